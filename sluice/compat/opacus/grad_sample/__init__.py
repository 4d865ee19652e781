"""Opacus's wrapper around a module. Here modules are neither wrapped nor marked."""

from sluice.compat.opacus.refusals import Refused


class GradSampleModule(Refused):
    instead = (
        "make_private returns the module itself, so model._module is model, and parameters keep their names. For gradients of "
        "single samples without training use sluice.gradients.PerSampleGradients(model), or torch.func.vmap(grad(...))."
    )


__all__ = ["GradSampleModule"]
