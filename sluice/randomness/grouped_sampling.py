"""Batches for correlated noise: who takes part when, so that amplification can be proved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import DataError, InputError
from sluice._base.grids import bernoulli_threshold
from sluice.randomness.noise import NoiseSource, SecureNoise

MAX_GROUPS = 1 << 20


def uniform_groups(count: int, *, groups: int, source: NoiseSource) -> Tensor:
    """``count`` independent integers in [0, groups), each exactly equally likely, as int32."""
    validate.positive_integer(groups=groups)
    if groups > MAX_GROUPS:
        raise InputError(f"groups={groups} is not allowed: it must be at most {MAX_GROUPS}.")
    stream = source.keystream()
    limit = (1 << 64) // groups * groups
    result = np.empty(count, dtype=np.int32)
    missing = np.arange(count)
    while missing.size:
        drawn = stream.read(missing.size, np.uint64)
        accepted = np.ones(missing.size, dtype=bool) if limit == 1 << 64 else drawn < np.uint64(limit)
        result[missing[accepted]] = (drawn[accepted] % np.uint64(groups)).astype(np.int32)
        missing = missing[~accepted]
    return torch.from_numpy(result)


class _GroupedSampler(ABC):
    """Records in groups that take turns. Each record's group is drawn by itself, from the source alone."""

    def __init__(self, *, dataset_size: int, groups: int, source: NoiseSource | None) -> None:
        validate.positive_integer(dataset_size=dataset_size, groups=groups)
        self.dataset_size = dataset_size
        self.groups = groups
        self.source = SecureNoise() if source is None else source
        self._group_of = uniform_groups(dataset_size, groups=groups, source=self.source)
        self._index_groups()

    @abstractmethod
    def batch_of(self, step: int) -> Tensor:
        """The indices of the batch of a step, counted from 0, in ascending order, as int64.

        No position is kept here: whoever makes the releases has the only count of them.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint has to keep. Sensitive: who is in which group must stay secret."""
        return {
            **self._public_state(),
            "group_of": self._group_of.clone(),
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved, with the same groups."""
        for name, value in self._public_state().items():
            if state.get(name) != value:
                raise InputError(
                    f"the saved {name} is {state.get(name)!r} and this sampler's is {value!r}: "
                    "resume with the data set and the sampling that the run began with."
                )
        group_of = state["group_of"]
        if group_of.shape != (self.dataset_size,) or not 0 <= int(group_of.min()) <= int(group_of.max()) < self.groups:
            raise DataError("the saved groups do not fit this sampler: the checkpoint is damaged; restore another.")
        self._group_of = group_of.to(torch.int32).clone()
        self._index_groups()
        self.source.load_state_dict(state["source"])

    def _public_state(self) -> dict[str, Any]:
        return {"dataset_size": self.dataset_size, "groups": self.groups}

    def _group_in_turn(self, step: int) -> Tensor:
        return self._members[step % self.groups]

    def _index_groups(self) -> None:
        order = torch.argsort(self._group_of, stable=True)
        sizes = torch.bincount(self._group_of, minlength=self.groups).tolist()
        self._members: tuple[Tensor, ...] = order.split(sizes)


class CyclicPoisson(_GroupedSampler):
    """Poisson batches from groups that take turns: step t samples group ``t mod groups``.

    Args:
        dataset_size: how many records there are.
        groups: how many groups; at least the bands of the strategy.
        sample_rate: the probability with which a record of the group in turn is in the batch.
        source: of the groups and of the batches.

    Guarantee:
        Each record is in a uniform group, for good, and in a batch of that group with probability
        ``inclusion_threshold / 2^64``, all independently of other records. So an added or removed record changes
        nothing about the others' groups or batches, two of its own participations are at least ``groups`` steps
        apart, and each is one Poisson-sampled release. The groups and the batch sizes are sensitive.
    """

    def __init__(
        self, *, dataset_size: int, groups: int, sample_rate: float, source: NoiseSource | None = None
    ) -> None:
        validate.fraction(sample_rate=sample_rate)
        self.sample_rate = float(sample_rate)
        super().__init__(dataset_size=dataset_size, groups=groups, source=source)

    @property
    def expected_batch_size(self) -> float:
        """What sums are divided by: a public constant, unlike the size of any one batch."""
        return self.sample_rate * self.dataset_size / self.groups

    @property
    def inclusion_threshold(self) -> int:
        """The probability that a record of the group in turn is sampled, times ``2^64``: exact."""
        return bernoulli_threshold(self.sample_rate)

    def batch_of(self, step: int) -> Tensor:
        group = self._group_in_turn(step)
        return group[self.source.bernoulli(len(group), self.sample_rate)]

    def _public_state(self) -> dict[str, Any]:
        return {**super()._public_state(), "sample_rate": self.sample_rate}


class BallsInBins(_GroupedSampler):
    """Each record in one uniform bin, for good; step t takes the whole of bin ``t mod groups``.

    Guarantee:
        Bins are drawn independently of each other, so an added or removed record changes nobody else's bin. The bins
        and their sizes are sensitive. Batches are never padded or cut off.
    """

    def __init__(self, *, dataset_size: int, bins: int, source: NoiseSource | None = None) -> None:
        super().__init__(dataset_size=dataset_size, groups=bins, source=source)

    @property
    def bins(self) -> int:
        return self.groups

    @property
    def expected_batch_size(self) -> float:
        """What sums are divided by: a public constant, unlike the size of any one batch."""
        return self.dataset_size / self.groups

    def batch_of(self, step: int) -> Tensor:
        return self._group_in_turn(step).clone()
