"""Which modules of a model are recorded, and by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients.options import GradientOptions
from sluice.gradients.rules import Rule, rule_for
from sluice.gradients.sharding import of_fsdp


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module whose calls are recorded as a whole."""

    name: str
    module: nn.Module
    rule: Rule


def plan(model: nn.Module, *, options: GradientOptions, fallback: Rule) -> dict[nn.Module, Unit]:
    """The units of a model: modules with a rule, and those that the user gives to the fallback with all they contain.

    Parameters outside units are followed through the forward pass (`sluice.gradients.functional`).
    """
    names = {name for name, _ in model.named_modules()}
    for name in options.strategy:
        if name not in names:
            raise InputError(f"strategy names the module {name!r}, which the model does not have.")
    units: dict[nn.Module, Unit] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in units or not any(parameter.requires_grad for parameter in module.parameters()):
            return
        chosen = options.strategy.get(name, "auto") in ("vmap", "loop")
        rule = fallback if chosen else None if _computes_weights(module) else rule_for(module)
        if rule is not None:
            units[module] = Unit(name=name, module=module, rule=rule)
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    _refuse_scripts(model)
    return units


def _computes_weights(module: nn.Module) -> bool:
    # Parametrized weights and forward pre-hooks (the older weight_norm) compute what the module uses as its weight.
    hooks = [hook for hook in module._forward_pre_hooks.values() if not of_fsdp(hook)]
    return parametrize.is_parametrized(module) or bool(hooks)


def outside(model: nn.Module, units: Mapping[nn.Module, Unit]) -> frozenset[str]:
    """The names of the trainable parameters that no unit has."""
    inside = {parameter for unit in units.values() for parameter in unit.module.parameters()}
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and p not in inside)


#: Modules that only hold parameters or modules: it is the module around them that uses these.
_HOLDERS = (nn.ParameterList, nn.ParameterDict, nn.ModuleList, nn.ModuleDict, parametrize.ParametrizationList)


def user_of(model: nn.Module, name: str) -> str:
    """The smallest module that uses a parameter, or that calls a module."""
    name = name.rpartition(".")[0]
    while name and isinstance(model.get_submodule(name), _HOLDERS):
        name = name.rpartition(".")[0]
    return name


def enclose(model: nn.Module, units: dict[nn.Module, Unit], name: str, *, rule: Rule) -> None:
    """Record a module by this rule, together with all that it contains."""
    module = model.get_submodule(name)
    for part in module.modules():
        units.pop(part, None)
    units[module] = Unit(name=name, module=module, rule=rule)


def _refuse_scripts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                f"Module '{name}' is a TorchScript module, into which per-sample gradients cannot see. Use the Python "
                "module it was made from."
            )
