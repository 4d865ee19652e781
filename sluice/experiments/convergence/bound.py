"""Bounds on the squared gradient norm of a run, term by term: one that is proved, and the DPSR-CG paper's.

Symbols are those of docs/convergence.md, where the proof stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import scipy

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance
from sluice.mechanism.gates import ClippingBiasGate, Gate
from sluice.mechanism.scaling import MARGIN, GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a gate can do to the law of batches, at most.

    Attributes:
        low, high: between these lies, for every record, its rate among accepted batches over its rate among all [m, M].
        density: the largest ratio of two batches' acceptance probabilities [R].
    """

    low: float = 1.0
    high: float = 1.0
    density: float = 1.0

    @classmethod
    def of(cls, gate: Gate | None, sample_rate: float) -> Selection:
        """Bounds for any data and any public reference, from what the gate states of itself."""
        if gate is None:
            return cls()
        acceptance = gate.acceptance
        return cls(
            low=inclusion(acceptance.ratio_min, sample_rate),
            high=inclusion(acceptance.ratio_max, sample_rate),
            density=_most_accepted(gate, acceptance) / acceptance.probability_min,
        )

    @property
    def middle(self) -> float:
        """By how much selection scales the mean, up to `relative_shift` [k]."""
        return (self.low + self.high) / 2

    @property
    def relative_shift(self) -> float:
        """How far a record's weight in the mean may be from the middle, relative to it [kappa]."""
        return (self.high - self.low) / (self.high + self.low)


def inclusion(ratio: float, sample_rate: float) -> float:
    """A record's rate among accepted batches over its rate among all, if it multiplies acceptance by ``ratio`` on average."""
    return ratio / (1 - sample_rate + sample_rate * ratio)


def _most_accepted(gate: Gate, acceptance: Acceptance) -> float:
    if acceptance.ratio_min == acceptance.ratio_max == 1:
        return acceptance.probability_min
    if not isinstance(gate, ClippingBiasGate):
        return 1.0
    # Half a step of the noise's grid and a record's worth of rounding on top, as in the gate's own bounds.
    best = gate.clip_bound * (1 + 1e-6) - gate.threshold
    return min(1.0, float(scipy.special.ndtr(best / gate.noise_std)) * (1 + 1e-6))


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A bound on the mean over a run of the squared gradient norm, as a sum.

    Attributes:
        start: what the distance of the first loss from the smallest one leaves.
        bias: what the mean of a release is off the gradient by.
        sampling: what drawing batches leaves.
        noise: what the added noise leaves.
    """

    start: float
    bias: float
    sampling: float
    noise: float

    @property
    def total(self) -> float:
        return self.start + self.bias + self.sampling + self.noise


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The constants of a run of gradient descent without momentum, all of which are public or properties of the loss.

    Attributes:
        mechanism: of the run; its scaling is `GlobalScaling` and its public divisor the expected batch size.
        dataset_size: how many records there are [N].
        lr: the learning rate [eta].
        smoothness: the largest eigenvalue of a matrix that bounds the mean loss's curvature everywhere [L].
        trace: its trace, at most L times the number of weights [tr H].
        dimension: how many weights [d].
    """

    mechanism: SelectiveRelease
    dataset_size: int
    lr: float
    smoothness: float
    trace: float
    dimension: int

    def __post_init__(self) -> None:
        validate.positive(lr=self.lr, smoothness=self.smoothness, trace=self.trace)
        validate.positive_integer(dataset_size=self.dataset_size, dimension=self.dimension)
        if not isinstance(self.mechanism.scaling, GlobalScaling):
            raise InputError(f"scaling={self.mechanism.scaling!r} is not allowed: the bound is for GlobalScaling.")
        expected = self.mechanism.sample_rate * self.dataset_size
        if abs(self.mechanism.expected_batch_size - expected) > 1e-9 * expected:
            raise InputError(
                f"expected_batch_size={self.mechanism.expected_batch_size} is not allowed: the bound is for {expected}."
            )

    @property
    def scaling(self) -> GlobalScaling:
        assert isinstance(self.mechanism.scaling, GlobalScaling)
        return self.mechanism.scaling

    @property
    def longest(self) -> float:
        """The length that no weighted gradient exceeds, with the margin that weights are computed with [C]."""
        return self.scaling.max_grad_norm * (1 - MARGIN)

    @property
    def scale(self) -> float:
        """The weight of gradients that are not clipped [a = C / S]."""
        return self.longest / self.scaling.bound

    @property
    def selection(self) -> Selection:
        return Selection.of(self.mechanism.gate, self.mechanism.sample_rate)

    @property
    def step(self) -> float:
        """The step that the gradient itself is taken with: the scaling makes it smaller than the learning rate [alpha]."""
        return self.lr * self.scale * self.selection.middle

    @property
    def applies(self) -> bool:
        """Whether the step is short enough for the proof: alpha <= 1 / L."""
        return self.step * self.smoothness <= 1

    @property
    def sampling_variance(self) -> float:
        """Bounds the mean squared distance of a release from its mean, without its noise [V_h]."""
        mechanism = self.mechanism
        return self.selection.density * (1 - mechanism.sample_rate) * self.longest**2 / mechanism.expected_batch_size

    @property
    def noise_variance(self) -> float:
        """The variance of a release's noise in each coordinate [V_z]."""
        mechanism = self.mechanism
        return (mechanism.sigma * self.scaling.sensitivity / mechanism.expected_batch_size) ** 2

    def bias(self, *, cut_off: float, kept: float) -> float:
        """A bound on how far the mean of a release is from the gradient, in units of the scale.

        Args:
            cut_off: the length of the mean over records of what clipping takes off their gradients. Where only norms are known:
                the mean of ``max(norm - S, 0)``, which is no less.
            kept: the mean over records of ``min(norm, S)``.
        """
        return cut_off + self.selection.relative_shift * kept

    def terms(self, *, loss_gap: float, squared_bias: float, releases: int) -> Terms:
        """The proved bound on the mean of the squared gradient norm before each release.

        Args:
            loss_gap: the first loss less a lower bound on all.
            squared_bias: the mean over the releases of `bias` squared.
        """
        if not self.applies:
            raise InputError(
                f"lr={self.lr} is not allowed: the step {self.step:g} must be at most 1 / {self.smoothness:g} for the proof."
            )
        of_variance = self.lr**2 / self.step
        return Terms(
            start=2 * loss_gap / (self.step * releases),
            bias=squared_bias,
            sampling=of_variance * self.smoothness * self.sampling_variance,
            noise=of_variance * self.trace * self.noise_variance,
        )

    def paper_terms(self, *, loss_gap: float, releases: int) -> Terms | None:
        """The DPSR-CG paper's bound, its sum of acceptance probabilities being the number of accepted updates.

        None without a gate of its kind: the theorem divides by beta.
        """
        gate = self.mechanism.gate
        if not isinstance(gate, ClippingBiasGate) or gate.beta == 0:
            return None
        clip = self.scaling.max_grad_norm
        return Terms(
            start=2 * loss_gap / (self.lr * releases),
            bias=(gate.noise_std / gate.beta) ** 2,
            sampling=self.smoothness * self.lr * clip**2,
            noise=self.smoothness * self.lr * clip**2 * self.dimension * self.mechanism.sigma**2,
        )


__all__ = ["Descent", "Selection", "Terms", "inclusion"]
