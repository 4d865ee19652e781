"""Correlated noise, made step by step with memory for ``bands - 1`` past steps, or for the buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.randomness.noise import NoiseSource, noisy_sum

Tensors = list[Tensor]


class CorrelatedNoise:
    """The rows of ``C^-1 z``, one at a time, from the rows of z.

    Row t is ``z_t - sum_{d>=1} c_d x_{t-d}``, x being the rows already made. The values are computed in float64 and
    kept in the type of z.

    Guarantee:
        If the rows of z are independent with variance s^2, entries of the result at the same place of a tensor have
        the covariance ``s^2 (C' C)^-1`` over the steps, up to rounding of the results; different places are
        independent. What is returned is secret until it is added to something, and so is the state. To release sums
        use :class:`CorrelatedRelease`, which also protects low-order digits.
    """

    def __init__(self, strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
        self.strategy = strategy
        self._past = _memory_for(strategy)
        self.position = 0

    def next(self, independent: Sequence[Tensor]) -> Tensors:
        """The next correlated row, from the next row of z."""
        row = [(z.detach().double() - echo).to(z.dtype) for z, echo in _with_echo(independent, self._past)]
        self._past.append(row)
        self.position += 1
        return row

    def skip(self) -> None:
        """Continue without the noise of this step: as if the row had been zero."""
        self._past.append_zero()
        self.position += 1

    def state_dict(self) -> dict[str, Any]:
        return {"strategy": self.strategy.to_dict(), "position": self.position, "past": self._past.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_strategy(state, self.strategy)
        self._past.load(state["past"])
        self.position = int(state["position"])


class CorrelatedRelease:
    """Sums of clipped gradients with correlated noise: ``G + C^-1 z``, a row for each step.

    Each step releases ``(C G)_t + z_t`` by :func:`sluice.randomness.noise.noisy_sum`, so on a grid that is public and with a real
    normal, and subtracts from it what is already public: ``x_t = (C G)_t + z_t - sum_{d>=1} c_d x_{t-d}``. That is post-
    processing, so no rounding in it touches the guarantee. The price is a second memory, for past raw sums.

    Args:
        strategy: C.
        steps: how many steps the mechanism has; a further one is refused.
        noise_multiplier: standard deviation of z over ``max_grad_norm * strategy.column_norm(steps)``.
        max_grad_norm: the bound on the norm of each record's contribution to a raw sum.
        source: of z.

    Guarantee:
        The whole sequence of results is post-processing of the Gaussian mechanism ``C G + z``, whose coefficients, in
        units of the noise, are entry by entry at most those of
        :func:`sluice.accounting.matrix.accounting.accounted_coefficients`, steps that were skipped included. What one record can
        do to it depends on the batches: see the accountants in :mod:`sluice.accounting.matrix`. Not proved: that ``G`` and the
        sum ``C G`` are free of rounding errors (docs/noise.md, section 6). The state holds raw sums: it is sensitive.
    """

    def __init__(
        self,
        strategy: BandedToeplitz | BufferedLinearToeplitz,
        *,
        steps: int,
        noise_multiplier: float,
        max_grad_norm: float,
        source: NoiseSource,
    ) -> None:
        validate.positive_integer(steps=steps)
        validate.positive(noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
        self.strategy = strategy
        self.steps = steps
        self.noise_multiplier = float(noise_multiplier)
        self.sensitivity = float(max_grad_norm) * strategy.column_norm(steps)
        self.source = source
        self.position = 0
        self._raw_past = _memory_for(strategy)
        self._released_past = _memory_for(strategy)

    def release(self, raw_sum: Sequence[Tensor], *, sum_error: float = 0.0) -> Tensors:
        """Add the noise of this step in place: the raw values are overwritten.

        Args:
            sum_error: a bound on the rounding error of the raw sum, over ``max_grad_norm``; the noise covers it.
        """
        raw = [tensor.detach().clone() for tensor in raw_sum]
        released = self.add_noise(raw_sum, sum_error=sum_error)
        self.remember(raw_sum=raw, released=[tensor.detach().clone() for tensor in released])
        return released

    def add_noise(self, raw_sum: Sequence[Tensor], *, sum_error: float = 0.0) -> Tensors:
        """The first half of `release`: the noise alone. The step is not over before `remember`, which must follow."""
        self._require_a_step_left()
        rows = [raw.detach().double() + echo for raw, echo in _with_echo(raw_sum, self._raw_past)]
        noisy_sum(
            rows,
            noise_multiplier=self.noise_multiplier,
            sensitivity=self.sensitivity,
            noise=self.source,
            sum_error=sum_error * self.sensitivity,
        )
        with torch.no_grad():
            for target, (row, echo) in zip(raw_sum, _with_echo(rows, self._released_past), strict=True):
                target.copy_(row - echo)
        return list(raw_sum)

    def remember(self, *, raw_sum: Tensors, released: Tensors) -> None:
        """The second half: keep what later steps need of this one. The tensors are kept themselves, not copied.

        Guarantee:
            Nothing is drawn: from what `add_noise` took and gave, the state comes out the same bit for bit.
        """
        self._raw_past.append(raw_sum)
        self._released_past.append(released)
        self.position += 1

    def skip(self) -> None:
        """Continue after a step whose result was lost, such as one made after the checkpoint that a crash left.

        Guarantee:
            The lost result may have been seen. Later rows hold nothing of the lost raw sum, and nothing is drawn or
            released for the lost row again, so each column of C only loses entries (docs/matrix.md, section 3).
        """
        self._require_a_step_left()
        self._raw_past.append_zero()
        self._released_past.append_zero()
        self.position += 1

    @property
    def rows_kept(self) -> int:
        """How many of the last rows the state consists of, one by one; 0 where it is made of sums over all of them."""
        return self._raw_past.rows_kept

    def state_dict(self, *, rows: bool = True) -> dict[str, Any]:
        """What a checkpoint has to keep. Sensitive: it holds raw sums.

        Args:
            rows: false leaves out the rows that `recall` brings back.
        """
        return {
            "strategy": self.strategy.to_dict(),
            "position": self.position,
            "raw_past": self._raw_past.state() if rows else [],
            "released_past": self._released_past.state() if rows else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_strategy(state, self.strategy)
        self._raw_past.load(state["raw_past"])
        self._released_past.load(state["released_past"])
        self.position = int(state["position"])

    def recall(self, rows: Mapping[int, tuple[Tensors, Tensors]]) -> None:
        """Complete a state that was saved without its rows.

        Args:
            rows: raw sums and what was released, by step, counted from 0. A step that is missing counts as skipped.
        """
        for memory, which in ((self._raw_past, 0), (self._released_past, 1)):
            memory.load([])
            for step in range(max(0, self.position - self.rows_kept), self.position):
                if step in rows:
                    memory.append(rows[step][which])
                else:
                    memory.append_zero()

    def _require_a_step_left(self) -> None:
        if self.position >= self.steps:
            raise InputError(f"all steps={self.steps} are made: a longer run needs a mechanism planned for more steps.")


class _Memory(ABC):
    """What is left of past rows x: enough for ``sum_{d>=1} c_d x_{t-d}``."""

    #: How many of the last rows it consists of, one by one; 0 if it is made of sums over all of them.
    rows_kept: int = 0

    @abstractmethod
    def echo(self, place: int, like: Tensor) -> Tensor:
        """That sum for one tensor of the row, as float64."""

    @abstractmethod
    def append(self, row: Tensors) -> None:
        """Remember a row."""

    @abstractmethod
    def append_zero(self) -> None:
        """Remember a row of zeros."""

    @abstractmethod
    def state(self) -> list[Any]:
        """For a checkpoint."""

    @abstractmethod
    def load(self, state: Sequence[Any]) -> None:
        """The inverse of ``state``."""


class _BandMemory(_Memory):
    def __init__(self, diagonals: Sequence[float]) -> None:
        self._weights = tuple(diagonals[1:])
        self._rows: deque[Tensors | None] = deque(maxlen=len(self._weights))
        self.rows_kept = len(self._weights)

    def echo(self, place: int, like: Tensor) -> Tensor:
        result = torch.zeros_like(like, dtype=torch.float64)
        for weight, row in zip(self._weights, self._rows, strict=False):
            if row is not None:
                result.add_(row[place], alpha=weight)
        return result

    def append(self, row: Tensors) -> None:
        self._rows.appendleft(row)

    def append_zero(self) -> None:
        self._rows.appendleft(None)

    def state(self) -> list[Any]:
        return [None if row is None else list(row) for row in self._rows]  # rows never change

    def load(self, state: Sequence[Any]) -> None:
        self._rows = deque(
            (None if row is None else [tensor.clone() for tensor in row] for row in state), maxlen=len(self._weights)
        )


class _BufferMemory(_Memory):
    def __init__(self, strategy: BufferedLinearToeplitz) -> None:
        self._decay, self._scale = strategy.decay, strategy.scale
        self._buffers: list[Tensors] = []

    def echo(self, place: int, like: Tensor) -> Tensor:
        result = torch.zeros_like(like, dtype=torch.float64)
        for weight, buffer in zip(self._scale, self._buffers, strict=False):
            result.add_(buffer[place], alpha=weight)
        return result

    def append(self, row: Tensors) -> None:
        if not self._buffers:
            self._buffers = [[tensor.double().clone() for tensor in row] for _ in self._decay]
            return
        for factor, buffer in zip(self._decay, self._buffers, strict=True):
            for kept, tensor in zip(buffer, row, strict=True):
                kept.mul_(factor).add_(tensor)

    def append_zero(self) -> None:
        for factor, buffer in zip(self._decay, self._buffers, strict=False):
            for kept in buffer:
                kept.mul_(factor)

    def state(self) -> list[Any]:
        return [[tensor.clone() for tensor in buffer] for buffer in self._buffers]

    def load(self, state: Sequence[Any]) -> None:
        self._buffers = [[tensor.clone() for tensor in buffer] for buffer in state]


def _memory_for(strategy: BandedToeplitz | BufferedLinearToeplitz) -> _Memory:
    if isinstance(strategy, BandedToeplitz):
        return _BandMemory(strategy.diagonals)
    return _BufferMemory(strategy)


def _with_echo(row: Sequence[Tensor], memory: _Memory) -> list[tuple[Tensor, Tensor]]:
    return [(tensor, memory.echo(place, tensor)) for place, tensor in enumerate(row)]


def _require_strategy(state: Mapping[str, Any], strategy: BandedToeplitz | BufferedLinearToeplitz) -> None:
    if state.get("strategy") != strategy.to_dict():
        raise InputError(
            f"the saved strategy is {state.get('strategy')!r} and this one is {strategy.to_dict()!r}: resume with the "
            "strategy that the run began with."
        )
