"""What one call of one layer contributes to the per-sample gradients of one parameter.

A `Tap` is a tensor of the forward pass whose gradient ``b`` is wanted. A `Contribution` turns that ``b``, and what
it kept of the forward pass, into per-sample squared norms and into weighted sums over samples. Kernels see float32
(or float64) only, with the sample axis first, and run without autograd and without autocast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from sluice.gradients.workspace import Lender
from sluice.mechanism.rounding_error import CHUNK_ROWS


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off inside the block, also where the user has it on."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


class Tap:
    """A point of the forward pass; ``gradient`` is the loss's derivative there once the backward pass has run.

    ``gradient`` is zero where the loss does not depend on the point. It is never bfloat16 or float16.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self._gradient: Tensor | None = None
        self._squares: Tensor | None = None
        self.bound = False

    def bind(self, gradient: Tensor | None) -> None:
        self.bound = True
        self._gradient = None if gradient is None else working(gradient.detach())

    @property
    def gradient(self) -> Tensor:
        if self._gradient is None:
            self._gradient = working(torch.zeros(self.shape, dtype=self.dtype, device=self.device))
        return self._gradient

    @property
    def squares(self) -> Tensor:
        """The squared norm of each row of a gradient ``[n, out]``, in float64; several contributions need it."""
        if self._squares is None:
            self._squares = squared_norms(self.gradient)
        return self._squares


def working(tensor: Tensor) -> Tensor:
    """The tensor in the precision in which kernels work: float32 for anything shorter, else unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


#: Single precision adds up this many squares without losing digits; longer sums are made of such parts, in float64.
_PART = 512

#: Per-sample gradients with at most so many entries are quick to add up in any precision.
_FEW = 64


def squared_norms(rows: Tensor) -> Tensor:
    """Squared Euclidean norm of each row, all axes but the first taken together, in float64."""
    if rows.numel() == 0:
        return rows.new_zeros(rows.shape[0], dtype=torch.float64)
    flat = rows.reshape(rows.shape[0], -1)
    whole = flat.shape[1] // _PART * _PART
    rest = flat[:, whole:] if whole else flat
    squares: Tensor = torch.linalg.vector_norm(rest, dim=1).double().square_()
    if whole:
        parts = torch.linalg.vector_norm(flat[:, :whole].unflatten(1, (-1, _PART)), dim=2)
        squares += parts.double().square_().sum(1)
    return squares


#: Squares below the first have lost digits in single precision, which those above the second would show.
_TINY, _LARGE = 1e-34, 1e10


def squared_norms_of_products(
    a: Tensor, b: Tensor, *, of_a: Tensor | None = None, of_b: Tensor | None = None
) -> Tensor:
    """``|a_i|^2 |b_i|^2`` for each row i, in float64: squared norms of the matrices that two vectors span.

    Either factor may be given, in float64, if it is known already.

    Squares of numbers below 1e-19 leave single precision. That matters only where the other vector is large, and such
    rows, which are rare, are taken in double precision.
    """
    first, second = squared_norms(a) if of_a is None else of_a, squared_norms(b) if of_b is None else of_b
    if not (_close(first, second) and _close(second, first)):
        lost = ((first < _TINY) & (second > _LARGE)) | ((second < _TINY) & (first > _LARGE))
        first, second = first.clone(), second.clone()
        first[lost] = torch.linalg.vector_norm(a[lost].flatten(1).double(), dim=1).square_()
        second[lost] = torch.linalg.vector_norm(b[lost].flatten(1).double(), dim=1).square_()
    return first * second


def _close(small: Tensor, large: Tensor) -> bool:
    """Whether no square of one is so small that it matters beside one of the other; false where one of them is NaN."""
    return small.numel() == 0 or float(small.amin()) >= _TINY or float(large.amax()) <= _LARGE


#: How many times longer than a sample's gradient the terms may be, in all, that are added up for it one by one in single
#: precision, and in double precision. A sample whose terms cancel further counts as longer than it is: next to terms that
#: are huge and cancel, other samples' would be rounded away (docs/noise.md, section 6).
SINGLE, DOUBLE = 2.0**8, 2.0**20


def not_below_terms(squares: Tensor, lengths: Tensor, *, most: float = SINGLE) -> Tensor:
    """Squared norms of gradients that are added up term by term.

    Args:
        squares: the squared norms of the sums of the terms, ``[n]``.
        lengths: the lengths of each sample's terms, added up, ``[n]``.
        most: `SINGLE` or `DOUBLE`.
    """
    return torch.maximum(squares.double(), (lengths.double() / most).square())


def row_lengths(rows: Tensor) -> Tensor:
    """Euclidean norms over the last axis, in float64: of any numbers, squares of which may leave single precision."""
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return lengths


def weighted(gradients: Tensor, weights: Tensor) -> Tensor:
    """``sum_i weights[i] * gradients[i]`` of matrices ``[n, a, b]``, whichever of the last two axes is the inner one."""
    weights = weights.to(gradients.dtype)
    if gradients.stride(1) < gradients.stride(2):
        return weighted(gradients.transpose(1, 2), weights).t()
    return (weights @ gradients.flatten(1)).view(gradients.shape[1:])


def block_rows(samples: int) -> int:
    """The size of even parts of so many samples, so small that the rounding error of a sum over one is paid for."""
    return max(1, -(-samples // max(1, -(-samples // CHUNK_ROWS))))


def blocks(samples: int) -> list[slice]:
    """All samples in parts of `block_rows` (docs/noise.md, section 6)."""
    size = block_rows(samples)
    return [slice(start, min(start + size, samples)) for start in range(0, max(1, samples), size)]


def sum_of_blocks(samples: int, part: Callable[[slice], Tensor]) -> Tensor:
    """The sum of ``part(rows)`` over `blocks`; what ``part`` returns must be new memory."""
    first, *others = blocks(samples)
    total = part(first)
    for rows in others:
        total += part(rows)
    return total


def zero_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """A copy whose given rows (a boolean mask) are exactly zero, whatever was there: 0 * inf must not survive."""
    return tensor.masked_fill(rows.view(-1, *[1] * (tensor.dim() - 1)), 0)


class Contribution(ABC):
    """Per-sample gradients of one parameter (or of some of its rows) from one call of one layer.

    Attributes:
        parameter: whose gradient this is.
        rows: the part of the parameter's first axis that it covers; None for all of it. Contributions to
            disjoint rows of a parameter are independent, others to the same parameter are added up before a norm
            is taken.
        lender: gives memory to gradients that are kept; None for new memory.
    """

    def __init__(self, parameter: Tensor, *, rows: slice | None = None, lender: Lender | None = None) -> None:
        self.parameter = parameter
        self.rows = rows
        self.lender = lender
        self._loan: object = None

    def memory(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialised tensor for gradients that are kept, with the dtype and the device of another one."""
        if self.lender is None:
            return like.new_empty(shape)
        buffer, self._loan = self.lender(shape, like)
        return buffer

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter, or of the part of it that is covered."""
        if self.rows is None:
            return self.parameter.shape
        covered = len(range(*self.rows.indices(self.parameter.shape[0])))
        return torch.Size((covered, *self.parameter.shape[1:]))

    @abstractmethod
    def norms_squared(self, *, keep: bool) -> Tensor:
        """Squared norm for each sample, ``[n]``, in float32 or float64. ``keep`` says that a weighted sum will probably be asked for next."""

    def term_lengths(self) -> Tensor:
        """The lengths of what a weighted sum adds up for each sample where no gradients are kept, in all, ``[n]``: see `SINGLE`."""
        return self.norms_squared(keep=False).sqrt()

    @abstractmethod
    def per_sample(self, samples: slice) -> Tensor:
        """The gradients themselves for some of the samples, ``[m, *shape]``."""

    def add_per_sample(self, samples: slice, *, into: Tensor, fresh: bool) -> None:
        """Add them to ``into``, ``[m, *shape]``; where that is ``fresh``, it has no content yet and is overwritten."""
        gradients = self.per_sample(samples).view(into.shape)
        if fresh:
            into.copy_(gradients)
        else:
            into += gradients

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """``sum_i weights[i] * gradient_i``, of this contribution's shape, in new memory. Dropped samples count as zero."""

    def add_weighted_sum(self, weights: Tensor, *, into: Tensor) -> None:
        """Add the weighted sum to an accumulator of this contribution's shape, in place."""
        into += self.weighted_sum(weights).view(into.shape)

    @abstractmethod
    def drop(self, samples: Tensor) -> None:
        """Make the gradients of the samples in this boolean mask exactly zero, even where they were NaN or infinite."""

    def merged(self, other: Contribution) -> Contribution | None:
        """One contribution that equals this one plus ``other`` (same parameter, same rows), if that is cheap."""
        return None


class ExplicitContribution(Contribution):
    """Per-sample gradients that are small enough to be formed, by a function of the tap's gradient.

    Args:
        compute: maps ``tap.gradient`` to ``[n, *shape]``. What it needs of the forward pass it closes over, in
            working precision (see `working`).
    """

    def __init__(
        self, parameter: Tensor, tap: Tap, compute: Callable[[Tensor], Tensor], *, rows: slice | None = None
    ) -> None:
        super().__init__(parameter, rows=rows)
        self._tap = tap
        self._compute = compute
        self._gradients: Tensor | None = None
        self._dropped: Tensor | None = None

    def _all(self) -> Tensor:
        if self._gradients is None:
            gradients = self._compute(self._tap.gradient)
            self._gradients = gradients if self._dropped is None else zero_rows(gradients, self._dropped)
        return self._gradients

    def norms_squared(self, *, keep: bool) -> Tensor:
        return squared_norms(self._all())

    def per_sample(self, samples: slice) -> Tensor:
        return self._all()[samples]

    def weighted_sum(self, weights: Tensor) -> Tensor:
        gradients = self._all()
        flat, weights = gradients.reshape(weights.shape[0], -1), weights.to(gradients.dtype)
        if flat.shape[1] <= _FEW:
            # So few numbers can be added up in double precision, all at once.
            return (weights.double() @ flat.double()).to(flat.dtype).view(gradients.shape[1:])
        return sum_of_blocks(len(flat), lambda rows: weights[rows] @ flat[rows]).view(gradients.shape[1:])

    def drop(self, samples: Tensor) -> None:
        self._dropped = samples
        if self._gradients is not None:
            self._gradients = zero_rows(self._gradients, samples)


class RowsContribution(ExplicitContribution):
    """A bias of a map that is applied once to each sample: its per-sample gradient is the tap's, ``[n, out]``."""

    def __init__(self, parameter: Tensor, tap: Tap) -> None:
        super().__init__(parameter, tap, lambda gradient: gradient)

    def norms_squared(self, *, keep: bool) -> Tensor:
        return self._tap.squares if self._dropped is None else super().norms_squared(keep=keep)


def sum_over_positions(parameter: Tensor, tap: Tap, view: Callable[[Tensor], Tensor]) -> ExplicitContribution:
    """A bias: its per-sample gradient is ``b`` summed over positions. ``view`` brings b to ``[n, positions, out]``."""
    return ExplicitContribution(parameter, tap, lambda gradient: view(gradient).sum(1))
