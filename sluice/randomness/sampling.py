"""Poisson sampling: which records an attempt looks at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.grids import bernoulli_threshold
from sluice.randomness.noise import NoiseSource, SecureNoise


class PoissonSampler:
    """Batches in which every record is present or absent on its own, with the same probability.

    Guarantee:
        Each record is in a batch with probability ``inclusion_threshold / 2^64``, independently of all other records
        and of all other batches. That is never above the accounted ``sample_rate``, and below it by less than
        ``2^-64``. A batch may be empty. The size of a batch is sensitive: it tells about the number of records, which
        one added or removed record changes.
    """

    def __init__(self, *, dataset_size: int, sample_rate: float, source: NoiseSource | None = None) -> None:
        validate.positive_integer(dataset_size=dataset_size)
        validate.fraction(sample_rate=sample_rate)
        self.dataset_size = dataset_size
        self.sample_rate = float(sample_rate)
        self.source = SecureNoise() if source is None else source

    @property
    def expected_batch_size(self) -> float:
        """What sums are divided by: a public constant, unlike the size of any one batch."""
        return self.sample_rate * self.dataset_size

    @property
    def inclusion_threshold(self) -> int:
        """The probability that a record is sampled, times ``2^64``: exact."""
        return bernoulli_threshold(self.sample_rate)

    def sample(self) -> Tensor:
        """The indices of one batch in ascending order, as int64."""
        present = self.source.bernoulli(self.dataset_size, self.sample_rate).numpy()
        return torch.from_numpy(np.flatnonzero(present).astype(np.int64, copy=False))

    def batch_of(self, step: int) -> Tensor:
        """The batch of any step: all have the same law."""
        return self.sample()

    def __iter__(self) -> Iterator[Tensor]:
        """Batches without end."""
        while True:
            yield self.sample()

    def state_dict(self) -> dict[str, Any]:
        return {
            "dataset_size": self.dataset_size,
            "sample_rate": self.sample_rate,
            "source": self.source.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where the state was saved: the same batches from a seeded source, fresh ones from a secure one."""
        for name, value in (("dataset_size", self.dataset_size), ("sample_rate", self.sample_rate)):
            if state.get(name) != value:
                raise InputError(
                    f"the saved {name} is {state.get(name)!r} and this sampler's is {value!r}: "
                    "resume with the data set and the rate that the run began with."
                )
        self.source.load_state_dict(state["source"])
