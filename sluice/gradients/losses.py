"""Refusing losses that mix samples, by trying them on made-up outputs and targets.

What counts is the derivative with respect to one sample's output: it must be the same whatever the other samples and their
targets are, and however many there are. Then the loss is a sum of one term for each sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import InputError
from sluice.gradients.independence import close
from sluice.gradients.probe import Axes, seed, undisturbed
from sluice.gradients.synthetic import POOL, Samples, targets_like
from sluice.gradients.trees import apply, mapped, tensors_in

_COUNT = POOL // 2

Loss = Callable[[Any, Any], Tensor]
#: The value that is differentiated, from what the loss returned and the number of samples.
Total = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class _Outputs:
    """The output of the model for the whole pool, and its tensors."""

    output: Any
    leaves: list[Tensor]
    axes: list[int | None]

    def rows(self, indices: list[int]) -> tuple[Any, list[Tensor]]:
        """The output for some samples, and those of its tensors that have a derivative, samples first."""
        chosen: list[Tensor] = []
        sources: list[Tensor] = []
        for leaf, axis in zip(self.leaves, self.axes, strict=True):
            if axis is None:
                chosen.append(leaf)
                continue
            part = leaf.index_select(axis, torch.tensor(indices, device=leaf.device)).movedim(axis, 0).contiguous()
            if part.is_floating_point():
                sources.append(part.requires_grad_(True))
            chosen.append(part.movedim(0, axis))
        parts = iter(chosen)
        return mapped(self.output, lambda _: next(parts)), sources

    @property
    def classes(self) -> list[int]:
        """Numbers of classes that the output may stand for: its second axis, or its last."""
        found: set[int] = {2}
        for leaf, axis in zip(self.leaves, self.axes, strict=True):
            sizes = [size for i, size in enumerate(leaf.shape) if i != axis] if axis is not None else []
            found.update(size for size in sizes[:1] + sizes[-1:] if size > 1)
        # Labels out of range are an error on a CPU and the end of the program on other devices.
        ordered = sorted(found, reverse=True)
        return ordered if all(leaf.device.type == "cpu" for leaf in self.leaves) else ordered[-1:]


def check_loss(
    model: nn.Module, samples: Samples, axes: Axes, y: Any, loss: Loss, *, total: Total, reduction: str
) -> None:
    """Raise `InputError` if the loss is seen to mix samples. One that accepts no made-up target is not checked.

    Args:
        axes: the axis of each tensor of the output that holds the samples.
        y: a batch's targets, of which only shapes and types are used.
        total: makes one number of what the loss returns, a sum over samples.
        reduction: what the loss is said to return.
    """
    with undisturbed(model):
        with torch.no_grad():
            seed(0)
            output = apply(model, samples.few(POOL))
        outputs = _taken_apart(output, axes)
        if outputs is None:
            return
        with torch.enable_grad():
            for targets in targets_like(y, classes=outputs.classes):
                _Trial(outputs, targets, loss, total, reduction).run()


def _taken_apart(output: Any, axes: Axes) -> _Outputs | None:
    leaves = list(tensors_in(output))
    return _Outputs(output=output, leaves=leaves, axes=list(axes)) if len(axes) == len(leaves) else None


class _Trial:
    """One kind of targets."""

    def __init__(self, outputs: _Outputs, targets: Samples, loss: Loss, total: Total, reduction: str) -> None:
        self._outputs = outputs
        self._targets = targets
        self._loss = loss
        self._total = total
        self._reduction = reduction

    def run(self) -> None:
        everyone = list(range(_COUNT))
        changed = [[i if i == kept else _COUNT + i for i in everyone] for kept in everyone]
        try:
            before = self._derivatives(everyone)
            after = [self._derivatives(rows) for rows in changed]
            fewer = self._derivatives(everyone[: _COUNT // 2])
            random = not _same(before, self._derivatives(everyone, start=1))
        except Exception:  # whatever a loss raises on targets that mean nothing to it
            return
        if not all(_same(_at(before, i), _at(found, i)) for i, found in enumerate(after)):
            raise InputError(
                "loss: the derivative at one sample's output depends on the other samples of the batch, so its gradient is "
                "not about one sample. Class weights, ignore_index and masks together with reduction='mean' do this: they "
                "divide by a number that depends on the whole batch. So do targets that broadcast against the output. Use "
                "reduction='none' and average over each sample's own entries, or reduction='sum', or multiply each "
                "sample's loss by its weight and divide by the number of samples."
            )
        if not random and not all(_same(_at(before, i), _at(fewer, i)) for i in range(_COUNT // 2)):
            other = "sum" if self._reduction == "mean" else "mean"
            raise InputError(
                f"loss: the derivative at one sample's output changes with the number of samples, which a loss with "
                f"loss_reduction={self._reduction!r} must not do. Pass loss_reduction={other!r} if that is how the loss "
                "reduces, or use reduction='none' and average over each sample's own entries."
            )

    def _derivatives(self, rows: list[int], *, start: int = 0) -> list[Tensor]:
        """Derivatives at the outputs, samples first; also the values themselves, where there is one for each sample."""
        output, sources = self._outputs.rows(rows)
        seed(start)
        value = self._loss(output, self._targets.rows(*rows))
        total = self._total(value, len(rows))
        gradients = torch.autograd.grad(total, sources, allow_unused=True)
        found = [torch.zeros_like(s) if g is None else g for s, g in zip(sources, gradients, strict=True)]
        return [*found, value.detach()] if self._reduction == "none" else found


def _at(tensors: list[Tensor], row: int) -> list[Tensor]:
    return [tensor[row] for tensor in tensors]


def _same(expected: list[Tensor], found: list[Tensor]) -> bool:
    return all(close(a, b) for a, b in zip(expected, found, strict=True))
