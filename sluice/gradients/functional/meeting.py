"""One function in which something computed from parameters alone meets the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sluice.gradients.contributions import Contribution, ExplicitContribution, Tap
from sluice.gradients.functional.pullback import PulledBack, Value
from sluice.gradients.functional.trace import Event, Place
from sluice.gradients.options import GradientOptions
from sluice.gradients.workspace import Lender

if TYPE_CHECKING:
    from sluice.gradients.capture import Recording


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """What a rule for a function may ask and do.

    Attributes:
        owner: a name for messages.
        places: where the tensors among the arguments have the samples, by identity.
        lender: gives memory to gradients that are kept.
    """

    event: Event
    owner: str
    places: dict[int, Place | None]
    recording: Recording
    options: GradientOptions
    lender: Lender

    @property
    def samples(self) -> int:
        return self.recording.batch_size

    @property
    def output(self) -> Place | None:
        """Where the first tensor of the result has the samples."""
        return self.event.outputs[0] if self.event.outputs else None

    def place(self, tensor: Any) -> Place | None:
        return self.places.get(id(tensor))

    def tap(self, z: Tensor) -> tuple[Tensor, Tap]:
        """Ask for the loss's derivative at z. The returned tensor must be used in place of z from here on."""
        return self.recording.tap(z)

    def save(self, tensor: Tensor) -> Tensor:
        """The tensor, detached, to be used after the backward pass; changing it in place until then is an error."""
        return self.recording.save(tensor, owner=self.owner)

    def contribute(self, value: Any, make: Callable[[Tensor], Contribution]) -> None:
        """Per-sample gradients of a value, if it is one, by a contribution that `make` returns for its tensor."""
        if not isinstance(value, Value):
            return
        if value.is_parameter:
            self.recording.contribute(make(value.roots[0].parameter))
            return
        inner = make(value.plain)
        for root in value.roots:
            self.recording.contribute(PulledBack(root, inner, value, batch_size=self.samples))

    def fits(self, value: Value, *, place: Place, axes: int) -> bool:
        """Whether the value, of at most so many axes, has none where the samples are."""
        shape = value.tensor.shape
        before = axes - len(shape)
        return before >= 0 and (place.axis < before or shape[place.axis - before] == 1)

    def for_each_sample(self, value: Value, *, place: Place, axes: int) -> Tensor:
        """The value as a part of every sample, to broadcast against a tensor of so many axes. It must fit.

        Each sample has its own, so that the loss's derivative there is the per-sample gradient.
        """
        plain, axis, count = value.plain, place.axis, self.samples
        aligned = plain.reshape(*[1] * (axes - plain.dim()), *plain.shape)
        own, tap = self.tap(aligned.expand(*aligned.shape[:axis], count, *aligned.shape[axis + 1 :]))
        own_gradients = partial(_samples_first, axis=axis, shape=plain.shape)
        self.contribute(value, lambda parameter: ExplicitContribution(parameter, tap, own_gradients))
        return own if place.fold == 1 else own.repeat_interleave(place.fold, axis)

    def copies(self, value: Value) -> Tensor:
        """The value once for each sample, on a first axis of its own."""
        own, tap = self.tap(value.plain.expand(self.samples, *value.tensor.shape))
        self.contribute(value, lambda parameter: ExplicitContribution(parameter, tap, lambda gradient: gradient))
        return own

    def by_position(self, tensor: Tensor, place: Place) -> Tensor:
        """From any leading axes with the samples on one of them to ``[samples, positions, last axis]``."""
        return self.by_sample(tensor, place).reshape(self.samples, -1, tensor.shape[-1])

    def by_sample(self, tensor: Tensor, place: Place) -> Tensor:
        """With the samples first; what each of them has in a row stays on the axis where it was."""
        split: Tensor = tensor.unflatten(place.axis, (self.samples, place.fold))
        return split.movedim(place.axis, 0)


def _samples_first(gradient: Tensor, *, axis: int, shape: torch.Size) -> Tensor:
    return gradient.movedim(axis, 0).reshape(-1, *shape)
