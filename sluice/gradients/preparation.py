"""What has to be known of a model before its gradients are recorded, found out once for each kind of batch.

No sample's value is used: the model runs on made-up inputs that share the batch's shapes and types.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import InputError, SluiceError, UnsupportedModuleError
from sluice.gradients.capture import Watch
from sluice.gradients.escalation import Escalation, cannot_be_recorded, warn_of_loops
from sluice.gradients.functional.trace import NotFollowedError
from sluice.gradients.interference import refuse_changing_state, refuse_interference
from sluice.gradients.losses import Loss, Total, check_loss
from sluice.gradients.options import GradientOptions
from sluice.gradients.plan import Unit
from sluice.gradients.probe import (
    Layout,
    probing_loss,
    refuse_deciding,
    refuse_routing,
    seed,
    takes_channels_last,
    undisturbed,
)
from sluice.gradients.synthetic import POOL, Samples, form, inputs_like, signature
from sluice.gradients.trees import apply, channels_last, tensors_in
from sluice.gradients.verification import Subject, verify
from sluice.gradients.vmap import VmapRule

#: How many shapes of one kind of batch are checked, and how many losses. Variable-length text has a new shape at almost
#: every batch.
CHECKS = 8


class RoundingWarning(UserWarning):
    """Kernels round the rows of a batch differently, so that a sample's gradient depends on its place in the last bits."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is known of the model for one kind of batch.

    Attributes:
        channels_last: whether images may be stored so.
        checked_on: the samples that the model was checked on; None where it was not.
    """

    layout: Layout
    channels_last: bool
    checked_on: Samples | None


class Preparation:
    """Finds out where samples are in each layer, and refuses a model that mixes them.

    Args:
        units: what is recorded by a rule; modules whose parameters cannot be followed are added to it.
        watch: is given the `Layout` before each forward pass.

    Attributes:
        is_complete: whether batches of a kind that has not been seen are refused.

    Guarantee:
        Whether a model or a loss is accepted depends on a batch's structure, types and shapes (but not on its size), on
        training modes and on the parameters' present values, never on the batch's values.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        units: dict[nn.Module, Unit],
        watch: Watch,
        names: Mapping[Tensor, str],
        options: GradientOptions,
    ) -> None:
        self._module = module
        self._units = units
        self._watch = watch
        self._options = options
        self._subject = Subject(model=module, watch=watch, units=units, names=names, kept_bytes=options.kept_bytes)
        self._has_images = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self._prepared: dict[Any, Prepared] = {}
        self.is_complete = False
        self._checks: Counter[Any] = Counter()
        self._losses: list[tuple[Loss, Any]] = []
        self._rows: set[Any] = set()

    def prepare(self, x: Any) -> Prepared:
        """Get ready for a batch like this; after the first one this costs next to nothing."""
        modes = tuple(module.training for module in self._module.modules())
        key = (modes, None if self._options.example is not None else signature(x))
        found = self._prepared.get(key)
        if found is None and self.is_complete:
            raise InputError(
                "records of another shape or type, or a model in another training mode, than at the start are not allowed "
                "here: finding out about them takes passes through the model that other workers would not make. Give all "
                "records one shape (pad them)."
            )
        if found is None:
            # Remembered only once it has passed, so that a model that was refused is refused again.
            found = self._prepared[key] = self._found_out(x, kind=(modes, form(x)))
        self._watch.layout = found.layout
        return found

    def check_loss(self, prepared: Prepared, y: Any, loss: Loss, *, total: Total, reduction: str) -> None:
        """Refuse a loss that mixes samples, the first time that it is used on such outputs and targets."""
        samples, case = prepared.checked_on, (id(prepared), signature(y))
        known = any(loss == other and case == seen for other, seen in self._losses)
        if samples is None or known or len(self._losses) >= CHECKS:
            return
        axes = prepared.layout.outputs
        check_loss(self._module, samples, axes, y, loss, total=total, reduction=reduction)
        self._losses.append((loss, case))

    def check_rows(self, prepared: Prepared, rows: int) -> None:
        """Warn if equal samples in a chunk of this shape do not have equal gradients, bit by bit (docs/noise.md)."""
        samples, case = prepared.checked_on, (id(prepared), rows)
        if samples is None or case in self._rows:
            return
        self._rows.add(case)
        with undisturbed(self._module), torch.enable_grad():
            self._module.eval()
            self._subject.probe(samples)
            x = samples.rows(*[0] * rows)
            _, chunk = self._subject.recorded(channels_last(x) if prepared.channels_last else x, rows)
            norms = chunk.norms
        self._watch.layout = prepared.layout
        if not bool((norms == norms[0]).all()):
            warnings.warn(
                "Kernels of this model round equal samples differently in different rows of a batch, so that a sample can "
                "change the last bits of others. Noise covers that for well-conditioned samples only: see "
                "docs/sharp-edges.md, 'floating-point gradients'.",
                RoundingWarning,
                stacklevel=2,
            )

    def _found_out(self, x: Any, *, kind: Any) -> Prepared:
        samples = self._samples(x)
        check = self._options.verify and self._checks[kind] < CHECKS
        if check:
            refuse_changing_state(self._module, samples)
        places = self._layout(samples, check=check)
        self._checks[kind] += check
        return Prepared(
            layout=places,
            channels_last=self._has_images and takes_channels_last(self._module, samples),
            checked_on=samples if check else None,
        )

    def _layout(self, samples: Samples, *, check: bool) -> Layout:
        """Where samples and parameters go; modules that cannot be recorded as planned are recorded in another way."""
        planned, first = dict(self._units), None
        escalation = Escalation(self._subject, self._units, chosen=frozenset(self._options.strategy))
        while True:
            try:
                places = self._checked(samples, check=check)
                break
            except Exception as error:  # the model runs as it is: whatever is raised comes from recording it
                first = first or error
                if not escalation.next(error, samples):
                    self._units.clear()
                    self._units.update(planned)
                    # Of parameters that are not followed, what was tried instead says more.
                    chosen = error if isinstance(first, NotFollowedError) else first
                    raise chosen if isinstance(chosen, SluiceError) else cannot_be_recorded(chosen) from None
        warn_of_loops([name for name in escalation.looping if not self._is_looping(planned, name)])
        return places

    def _is_looping(self, planned: Mapping[nn.Module, Unit], name: str) -> bool:
        unit = planned.get(self._module.get_submodule(name))
        return unit is not None and isinstance(unit.rule, VmapRule) and unit.rule.by_loop

    def _checked(self, samples: Samples, *, check: bool) -> Layout:
        places = self._subject.probe(samples)
        if check:
            refuse_routing(self._module, self._units, samples, names=self._subject.names)
            if self._options.example is None:
                refuse_deciding(self._module, self._units, samples, places, names=self._subject.names)
            refuse_interference(self._subject, samples, places.outputs)
        if check or places.events:
            # What is followed is compared with ordinary backward passes in any case.
            verify(self._subject, samples)
        return places

    def _samples(self, x: Any) -> Samples:
        if self._options.example is not None:
            samples = Samples.of(self._options.example)
            problem = self._problem(samples)
            if problem is not None:
                raise InputError(f"example cannot be used to check the model: {problem}")
            return samples
        problems = []
        for samples in inputs_like(x):
            problem = self._problem(samples)
            if problem is None:
                return samples
            problems.append(problem)
        if not self._options.verify:
            # Only shapes are read off, and the forward pass would raise for these samples in any case.
            return Samples.of(x)
        shapes = ", ".join(f"{t.dtype} {('samples', *t.shape[1:])}" for t in tensors_in(x)).replace("'", "")
        raise UnsupportedModuleError(
            "The model cannot be checked for mixed samples: on made-up inputs in the form of the batch "
            f"({shapes}), {problems[0]} Pass GradientOptions(example=inputs), a few public inputs that it runs on; or "
            "GradientOptions(verify=False), if you are sure that no sample reaches another one's gradient."
        )

    def _problem(self, samples: Samples) -> str | None:
        """Why the model cannot be checked on these samples, or None."""
        with undisturbed(self._module), torch.set_grad_enabled(self._options.verify):
            seed(0)
            try:
                outputs = list(tensors_in(apply(self._module, samples.few(POOL))))
            except Exception as error:  # whatever a model raises on values that it does not expect
                return f"it raises {type(error).__name__}: {str(error)[:200]}."
            found = [*outputs, *self._gradients(outputs)] if self._options.verify else []
        return None if all(bool(t.isfinite().all()) for t in found) else "its output or its gradient is not finite."

    def _gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        value = probing_loss(outputs)
        if not value.requires_grad:
            return []
        try:
            gradients = torch.autograd.grad(value, list(self._subject.names), allow_unused=True)
        except RuntimeError:  # an operation in place, say: recording the model says where
            return []
        return [gradient for gradient in gradients if gradient is not None]
