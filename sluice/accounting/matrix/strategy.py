"""Strategies: lower-triangular Toeplitz matrices C under which noise is correlated as ``C^-1 z``.

What is released is ``C G + z`` (G being the sums of clipped gradients, one row for each step), and ``C^-1`` of it is
what training sees: ``G + C^-1 z``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sluice._base import validate
from sluice._base.codec import Encoded, readable
from sluice._base.errors import InputError
from sluice.accounting.matrix import series
from sluice.accounting.matrix.series import Series
from sluice.accounting.matrix.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StrategyError:
    """Root squared errors of the iterates of a workload, for noise z of unit variance and for one participation.

    Attributes:
        mean: the root of the mean over the iterates of the squared error of ``A C^-1 z``.
        largest: the root of the largest of them.
        sensitivity: the 2-norm by which one record moves ``C G``, for gradients clipped to 1. The errors at a given
            privacy (without amplification) are ``mean * sensitivity`` and ``largest * sensitivity``.
    """

    mean: float
    largest: float
    sensitivity: float


class Strategy(Encoded, ABC):
    """A lower-triangular Toeplitz matrix of any size with ones on its diagonal."""

    tag: ClassVar[str | None] = "kind"

    @property
    @abstractmethod
    def bands(self) -> int | None:
        """How many diagonals may differ from zero; None for all."""

    @property
    @abstractmethod
    def is_non_negative(self) -> bool:
        """Whether no entry is negative: what the amplification proofs of sections 5 and 6 need."""

    @abstractmethod
    def coefficients(self, steps: int) -> Series:
        """The first column of the matrix with this many rows."""

    def inverse_coefficients(self, steps: int) -> Series:
        """The first column of the inverse."""
        return series.inverse(self.coefficients(steps))

    def column_norm(self, steps: int) -> float:
        """The 2-norm of the first, and longest, column: the sensitivity to one participation."""
        return float(np.linalg.norm(self.coefficients(steps)))

    def sensitivity(self, *, steps: int, participations: int, separation: int) -> float:
        """The 2-norm by which a record moves ``C G`` that takes part in at most ``participations`` steps.

        Guarantee:
            Exact for records that take part at steps at least ``separation`` apart, each time with a gradient of
            norm at most 1 that may depend on everything released before. Matrices for which no exact value is proved
            are refused: see docs/matrix.md, section 2.
        """
        validate.positive_integer(steps=steps, participations=participations, separation=separation)
        column = self.coefficients(steps)
        possible = min(participations, -(-steps // separation))
        if possible == 1:
            return float(np.linalg.norm(column))
        disjoint = self.bands is not None and separation >= self.bands
        if not disjoint and (np.any(column < 0) or np.any(np.diff(column) > 0)):
            raise InputError(
                f"separation={separation} is not allowed for this strategy with {participations} participations: its "
                "coefficients are negative or increase somewhere, and then the sensitivity is only known where the "
                f"separation is at least the number of bands, {self.bands}."
            )
        return float(np.linalg.norm(series.repeated(column, count=possible, separation=separation)))

    def error(self, workload: Workload, *, participations: int = 1, separation: int = 1) -> StrategyError:
        """How well the iterates are known, per unit of noise."""
        errors = workload.row_errors(self.inverse_coefficients(workload.steps))
        return StrategyError(
            mean=math.sqrt(errors.mean()),
            largest=math.sqrt(errors.max()),
            sensitivity=self.sensitivity(steps=workload.steps, participations=participations, separation=separation),
        )


@readable
@dataclass(frozen=True)
class BandedToeplitz(Strategy):
    """The strategy of BandMF: ``bands`` diagonals, the first of which is 1.

    Attributes:
        diagonals: their values, the main diagonal first.
    """

    kind: ClassVar[str] = "banded"

    diagonals: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.diagonals:
            raise InputError("diagonals=() is not allowed: give at least the main diagonal, 1.0.")
        for value in self.diagonals:
            validate.finite(diagonals=value)
        if self.diagonals[0] != 1.0:
            raise InputError(
                f"diagonals[0]={self.diagonals[0]!r} is not allowed: it must be 1.0; divide all diagonals by the first."
            )

    @property
    def bands(self) -> int:
        return len(self.diagonals)

    @property
    def is_non_negative(self) -> bool:
        return min(self.diagonals) >= 0

    def coefficients(self, steps: int) -> Series:
        validate.positive_integer(steps=steps)
        result = np.zeros(steps)
        kept = min(steps, self.bands)
        result[:kept] = self.diagonals[:kept]
        return result


@readable
@dataclass(frozen=True, kw_only=True)
class BufferedLinearToeplitz(Strategy):
    """The BLT strategy: 1, then ``sum_i scale_i decay_i^(d-1)`` on diagonal d.

    Attributes:
        decay: one factor in [0, 1) for each buffer.
        scale: one number >= 0 for each buffer; they sum to at most 1, so that the coefficients never increase.
    """

    kind: ClassVar[str] = "blt"

    decay: tuple[float, ...]
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.decay or len(self.decay) != len(self.scale):
            raise InputError(
                f"decay has {len(self.decay)} entries and scale {len(self.scale)}, which is not allowed: give as many "
                "of one as of the other, at least one."
            )
        for factor in self.decay:
            validate.non_negative(decay=factor)
            if factor >= 1:
                raise InputError(f"decay={factor!r} is not allowed: it must be in [0, 1).")
        for weight in self.scale:
            validate.non_negative(scale=weight)
        if sum(self.scale) > 1:
            raise InputError(
                f"scale={self.scale!r} is not allowed: its sum must be at most 1, or the coefficients increase at "
                "first and the sensitivity formula does not hold."
            )

    @property
    def bands(self) -> None:
        return None

    @property
    def buffers(self) -> int:
        return len(self.decay)

    @property
    def is_non_negative(self) -> bool:
        return True

    def coefficients(self, steps: int) -> Series:
        validate.positive_integer(steps=steps)
        powers = np.array(self.decay) ** np.arange(steps - 1, dtype=float)[:, None]
        return np.concatenate([[1.0], powers @ np.array(self.scale)])


def identity() -> BandedToeplitz:
    """Independent noise: plain DP-SGD."""
    return BandedToeplitz((1.0,))
