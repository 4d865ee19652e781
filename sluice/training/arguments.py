"""What users of the engine may leave open, filled in; what contradicts itself, refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import solve_releases
from sluice.gradients.costs import fixed_rows
from sluice.mechanism.gates import Gate
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.scaling import Clip, ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import ThinningGate
from sluice.training.batches import Batches


@dataclass(frozen=True, kw_only=True)
class SelectiveArguments:
    """What `make_private` is told about its mechanism, in the words of Opacus; it says what they mean.

    ``loop_piece`` is the largest number of records over which a loop of the user's own takes a mean; 1 where it takes sums.
    """

    data_loader: DataLoader[Any] | Dataset[Any]
    max_grad_norm: float
    releases: int | None
    epochs: int | None
    sample_rate: float | None
    scaling: ScalingRule | None
    gate: Gate | None
    prior_releases: tuple[float, ...]
    expected_canaries: int = 0
    loop_piece: int = 1

    def with_noise(self, noise_multiplier: float) -> SelectiveRelease:
        """The mechanism with this noise; without a planned end where neither releases nor epochs are given."""
        validate.positive(noise_multiplier=noise_multiplier)
        if self.releases is None and self.epochs is None:
            return self._mechanism(1, noise_multiplier).open_ended(first_stage=self.per_epoch)
        return self._mechanism(self._total, noise_multiplier)

    def with_epsilon(
        self, epsilon: float, delta: float, noise_multiplier: float | None, *, accountant: str
    ) -> SelectiveRelease:
        """The mechanism that keeps a budget: with the noise that does, or with this noise and the releases that do."""
        if noise_multiplier is None:
            return self._mechanism(self._total, None).calibrate(epsilon=epsilon, delta=delta, accountant=accountant)
        if self.releases is not None or self.epochs is not None:
            raise InputError(
                f"noise_multiplier={noise_multiplier}, releases={self.releases}, epochs={self.epochs} is not allowed with "
                "target_epsilon: each follows from the other. Give the noise alone to train for as long as the budget lasts, "
                "or releases or epochs to have the noise chosen."
            )
        mechanism = self._mechanism(1, noise_multiplier)
        found = solve_releases(
            target_epsilon=epsilon,
            target_delta=delta,
            noise_multiplier=noise_multiplier,
            sample_rate=mechanism.sample_rate,
            gate=mechanism.gate,
            prior_releases=self.prior_releases,
            accountant=accountant,
        )
        return mechanism.with_releases(found.releases)

    @property
    def releases_per_pass(self) -> int | None:
        """After how many releases the loader ends; None with the last one."""
        return self.per_epoch if self.releases is None else None

    @property
    def dataset_size(self) -> int:
        return Batches(self.data_loader).size + self.expected_canaries

    @property
    def rate(self) -> float:
        return _sample_rate(self.sample_rate, self.data_loader, self.dataset_size)

    @property
    def per_epoch(self) -> int:
        return math.ceil(1 / self.rate)

    @property
    def _total(self) -> int:
        return _total_releases(self.releases, self.epochs, self.per_epoch)

    def _mechanism(self, releases: int, noise_multiplier: float | None) -> SelectiveRelease:
        size, rate = self.dataset_size, self.rate
        scaling = _scaling(self.scaling, self.max_grad_norm)
        gate = self.gate and self.gate.for_batches_of(rate * size, small_norm=scaling.unclipped_norm)
        mechanism = SelectiveRelease(
            sample_rate=gate.candidate_rate(rate) if gate else rate,
            expected_batch_size=rate * size,
            scaling=scaling,
            noise_multiplier=noise_multiplier,
            releases=releases,
            gate=gate,
            prior_releases=self.prior_releases,
        )
        if not isinstance(gate, ThinningGate):
            return mechanism
        rows = fixed_rows(mechanism.expected_candidates, most=self.loop_piece)
        return replace(mechanism, gate=replace(gate, moved_records=max(gate.moved_records, rows)))


def _sample_rate(given: float | None, source: DataLoader[Any] | Dataset[Any], size: int) -> float:
    """The rate that is given, or the loader's batch size over the number of records, exactly."""
    if isinstance(source, DataLoader) and not isinstance(source.sampler, RandomSampler | SequentialSampler):
        raise InputError(
            f"data_loader samples by {type(source.sampler).__name__}, which Poisson sampling would replace. Give a "
            "loader without a sampler of its own, and put weights or subsets into the data set."
        )
    if given is not None:
        validate.fraction(sample_rate=given)
        return float(given)
    if not isinstance(source, DataLoader) or source.batch_size is None:
        raise InputError("sample_rate=None is not allowed here: give a number in (0, 1], or a loader with batch_size.")
    return exact_sample_rate(batch_size=source.batch_size, dataset_size=size)


def _total_releases(releases: int | None, epochs: int | None, per_epoch: int) -> int:
    """The number of releases, of which one of the two arguments tells."""
    if (releases is None) == (epochs is None):
        raise InputError(
            f"releases={releases}, epochs={epochs} is not allowed: give exactly one of the two. (With target_epsilon, noise_multiplier may take their place.)"
        )
    if epochs is not None:
        validate.positive_integer(epochs=epochs)
        return epochs * per_epoch
    validate.positive_integer(releases=releases)
    assert releases is not None
    return releases


def _scaling(scaling: ScalingRule | None, max_grad_norm: float) -> ScalingRule:
    """The rule with the bound that is given beside it; None clips."""
    validate.positive(max_grad_norm=max_grad_norm)
    if scaling is None:
        return Clip(max_grad_norm=max_grad_norm)
    if scaling.max_grad_norm not in (1.0, max_grad_norm):
        raise InputError(
            f"scaling.max_grad_norm={scaling.max_grad_norm} contradicts max_grad_norm={max_grad_norm}: give one of them, "
            "or the same number twice."
        )
    return replace(scaling, max_grad_norm=max_grad_norm)
