"""Randomness for everything private: Gaussian noise, sampling and gate decisions, from one ChaCha20 keystream.

``SecureNoise`` is the default and cannot be replayed. ``SeededNoise`` runs the same code on a key derived from a
seed, so that an experiment can be repeated; whoever knows the seed can subtract the noise, so it protects nobody.
"""

from __future__ import annotations

import hashlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.grids import bernoulli_threshold, power_of_two_below, release_grid
from sluice.randomness.keystream import Keystream
from sluice.randomness.native.kernels import workable
from sluice.randomness.rounded_normal import Entries, rounded_normals

# The grid of `NoiseSource.normal` in units of its standard deviation.
NORMAL_GRID = 2.0**-30

_RECORDS_PER_BLOCK = 1 << 18


class NoiseSource(ABC):
    """What sampling, gates and releases ask of a source of randomness. Every call uses a keystream of its own."""

    secure: bool

    @abstractmethod
    def keystream(self) -> Keystream:
        """A keystream that no other call has read from."""

    @abstractmethod
    def side_keystream(self, purpose: str) -> Keystream:
        """A keystream for what never touches a release, one for each purpose and call; it does not count as a call."""

    def random_order(self, indices: Tensor) -> Tensor:
        """The same indices in a uniformly random order (two of 2^64 equal keys among 2^20 have odds of 2^-25)."""
        keys = self.side_keystream("order").read(len(indices), np.uint64)
        # Signed numbers in the same order: torch sorts those, and five times as fast as numpy where there are many.
        signed = (keys ^ np.uint64(1 << 63)).view(np.int64)
        return indices[torch.argsort(torch.from_numpy(signed), stable=True)]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint made by the same kind of source."""

    def rounded_normal(self, count: int, *, scale: float) -> Tensor:
        """``count`` draws of a real ``N(0, scale^2)``, each rounded to the nearest integer, as float64."""
        return rounded_normals(count, scale=scale, digits=self.keystream())

    def add_rounded_normal(self, entries: Entries, *, scale: float, step: float) -> None:
        """Round entries to multiples of a power of two, and add draws of ``rounded_normal`` times that to them, in place."""
        entries.add_rounded_normals(scale=scale, step=step, digits=self.keystream())

    def normal(self, shape: Sequence[int], std: float, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Independent draws of ``N(0, std^2)``, rounded to multiples of about ``std * 2^-30`` and then to ``dtype``.

        For values that are added to sensitive ones use :func:`noisy_sum`, which also protects the low-order digits.
        """
        validate.positive(std=std)
        step = power_of_two_below(std * NORMAL_GRID)
        return self.rounded_normal(math.prod(shape), scale=std / step).mul_(step).to(dtype).reshape(tuple(shape))

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Independent multiples of ``2^-53`` in [0, 1), each equally likely, as float64."""
        drawn = self.keystream().read(math.prod(shape), np.uint64)
        return torch.from_numpy((drawn >> np.uint64(11)) * 2.0**-53).reshape(tuple(shape))

    def bernoulli(self, count: int, probability: float) -> Tensor:
        """``count`` independent coins, as booleans.

        Guarantee:
            Each is true with probability ``floor(probability * 2^64) / 2^64`` exactly, so never more often than
            ``probability`` says. A 64-bit uniform is compared with that threshold; its last 48 bits are only drawn
            where its first 16 do not decide.
        """
        if not 0 <= probability <= 1:
            raise InputError(f"probability={probability!r} is not allowed: it must be in [0, 1].")
        threshold = bernoulli_threshold(probability)
        if threshold == 1 << 64:
            return torch.ones(count, dtype=torch.bool)
        first, rest = np.uint16(threshold >> 48), np.uint64(threshold & (2**48 - 1))
        stream = self.keystream()
        result = np.empty(count, dtype=np.bool_)
        for start in range(0, count, _RECORDS_PER_BLOCK):
            block = result[start : start + _RECORDS_PER_BLOCK]
            drawn = stream.read(block.size, np.uint16)
            np.less(drawn, first, out=block)
            undecided = np.flatnonzero(drawn == first)
            block[undecided] = stream.read(undecided.size, np.uint64) >> np.uint64(16) < rest
        return torch.from_numpy(result)

    def noisy_number(self, raw: float, *, noise_multiplier: float, sensitivity: float, sum_error: float = 0.0) -> float:
        """One number as a Gaussian release: see `noisy_sum`."""
        (published,) = noisy_sum(
            [torch.tensor(raw, dtype=torch.float64)],
            noise_multiplier=noise_multiplier,
            sensitivity=sensitivity,
            noise=self,
            sum_error=sum_error,
        )
        return float(published)


class SecureNoise(NoiseSource):
    """Noise that cannot be predicted or repeated: every call takes a fresh 256-bit key from the operating system.

    Guarantee:
        No key is stored, so no two calls share a keystream: not in one instance, not in two, not after a fork, a
        copy, a pickle or a restored checkpoint.
    """

    secure = True

    def keystream(self) -> Keystream:
        return Keystream(key=os.urandom(32), number=0)

    def side_keystream(self, purpose: str) -> Keystream:
        return self.keystream()

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "secure"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_kind(state, "secure")

    def __repr__(self) -> str:
        return "SecureNoise()"


class SeededNoise(NoiseSource):
    """The same construction under a key derived from a seed: for experiments only.

    Guarantee:
        None against anyone who can guess the seed. The same seed and the same sequence of calls give the same values;
        a restored state continues the sequence where it was saved.
    """

    secure = False

    def __init__(self, seed: int) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise InputError(f"seed={seed!r} is not allowed: it must be an integer.")
        self._seed = seed
        self._calls = 0
        self._key = _key_of(seed)

    @property
    def seed(self) -> int:
        return self._seed

    def keystream(self) -> Keystream:
        self._calls += 1
        return Keystream(key=self._key, number=self._calls)

    def side_keystream(self, purpose: str) -> Keystream:
        return Keystream(key=_key_of(self._seed, purpose=purpose), number=self._calls)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "seeded", "seed": self._seed, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _require_kind(state, "seeded")
        seed, calls = state.get("seed"), state.get("calls")
        if not isinstance(seed, int) or not isinstance(calls, int) or calls < 0:
            raise InputError(f"state={dict(state)!r} is not allowed: it must hold integers 'seed' and 'calls'.")
        self._seed, self._calls, self._key = seed, calls, _key_of(seed)

    def __repr__(self) -> str:
        return f"SeededNoise({self._seed})"


def noisy_sum(
    raw_sum: Sequence[Tensor],
    *,
    noise_multiplier: float,
    sensitivity: float,
    noise: NoiseSource,
    sum_error: float = 0.0,
    part_of: int | None = None,
) -> list[Tensor]:
    """Turn a sum over records into a Gaussian release, in place: the raw values are overwritten.

    Each entry is rounded to a public grid whose step is a power of two, and a real normal rounded to the same grid is
    added. All of it is exact, so the low-order digits of the result say nothing about those of the sum; the result is
    then rounded to the tensor's own type (bfloat16 and float16 included), which is post-processing.

    Args:
        raw_sum: the tensors of one release; all their entries together are one vector.
        noise_multiplier: standard deviation over sensitivity, as the accountant is told.
        sensitivity: the most that adding or removing one record moves the exact sum, in the 2-norm.
        noise: the source.
        sum_error: a bound, 2-norm, on the difference between ``raw_sum`` and the exact sum of the records'
            contributions, where one is known. It must be public and hold for every batch.
        part_of: how many entries the whole vector has, where others add noise to the rest of it. None if this is all.

    Guarantee:
        The result is post-processing of the Gaussian mechanism with noise multiplier ``noise_multiplier`` on
        ``raw_sum``, exactly: rounding to the grid raises the sensitivity by at most ``step * sqrt(entries)``, at most
        ``2^-15`` standard deviations, and twice ``sum_error`` comes on top; the standard deviation is raised to pay
        for both, so nothing is left to charge to epsilon or delta (docs/noise.md, section 3). What is taken on
        trust: the sensitivity and ``sum_error`` given, and what :func:`sluice.randomness.rounded_normal.rounded_normals` takes.

        | entry of the raw sum | what happens |
        |---|---|
        | no tensors, or empty batch (all zeros) | noise alone, as for any other sum |
        | beyond ``2^52`` grid steps | clamped there, which raises no sensitivity |
        | NaN or infinite | DataError, nothing is released; entries of float32 and float64 tensors become NaN |
    """
    validate.positive(noise_multiplier=noise_multiplier, sensitivity=sensitivity)
    validate.non_negative(sum_error=sum_error)
    work = [_work_on(tensor) for tensor in raw_sum]
    entries = Entries(work)
    step, std = release_grid(
        noise_multiplier=noise_multiplier,
        sensitivity=sensitivity,
        entries=entries.count if part_of is None else part_of,
        sum_error=sum_error,
    )
    noise.add_rounded_normal(entries, scale=std / step, step=step)
    with torch.no_grad():
        for tensor, worked in zip(raw_sum, work, strict=True):
            if worked is not tensor:
                tensor.copy_(worked)
    return list(raw_sum)


def _work_on(tensor: Tensor) -> Tensor:
    """The tensor itself where noise can be added to its memory, else a copy in float64."""
    if workable(tensor):
        return tensor
    return tensor.detach().to(device="cpu", dtype=torch.float64, memory_format=torch.contiguous_format, copy=True)


def _key_of(seed: int, *, purpose: str = "noise") -> bytes:
    return hashlib.sha256(f"sluice seeded {purpose}, version 1: {seed}".encode()).digest()


def _require_kind(state: Mapping[str, Any], kind: str) -> None:
    if state.get("kind") != kind:
        raise InputError(
            f"the saved source of randomness is {state.get('kind')!r} and this one is {kind!r}: "
            "resume with the kind of source that the run began with."
        )
