"""Gates: the public rule that decides whether an attempt is released or forgotten.

A gate here is a frozen description. Everything in it is public; what the accountant needs of it is its
``acceptance``: how much one record can change the probability of acceptance, for any batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sluice import validate
from sluice.accounting.acceptance import Acceptance
from sluice.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ClippingBiasGate:
    """Accept when few gradients of the batch are large, compared with a public reference.

    Record i adds ``e_i`` in ``[0, metric_bound]`` to the metric ``E`` of its batch: 0 where its gradient norm is
    at most ``small_norm``, ``metric_bound * norm / large_norm`` up to ``large_norm``, ``metric_bound`` above.
    The attempt is released when ``clip(R - E, -K, K) + N(0, sv^2) > tau``.

    Attributes (the DPSR-CG paper's symbols in brackets):
        beta: threshold in units of the metric bound [tau = beta * C_e].
        clip_range: clip of the difference, in units of the metric bound [K = clip_range * C_e].
        gate_noise: noise of the decision [sv = 4 * sigma_e * C_e]. None lets calibration choose it.
        reference_noise: noise multiplier of the published reference, std = reference_noise * C_e. None lets
            calibration choose it.
        small_norm: norms up to this do not count [S_g]. None takes the scaling rule's bound.
        large_norm: norms from here on count fully [S_e].
        metric_bound: the most that one record adds [C_e].
        reference_decay: weight of the past in the running average of published references, which is the
            reference of the next release (post-processing of public values, so it is free).
        initial_reference: the public constant the first release is compared with.
        max_attempts: give up on a release after this many attempts; its probability is charged to delta.
        hidden_reference: compare with the un-noised metric of the last accepted batch, as the paper does. No
            per-release bound covers that, so every epsilon of such a run is only "claimed".
    """

    beta: float = 3.0
    clip_range: float = 2.0
    gate_noise: float | None = None
    reference_noise: float | None = None
    small_norm: float | None = None
    large_norm: float = 11.0
    metric_bound: float = 1.0
    reference_decay: float = 0.9
    initial_reference: float = 0.0
    max_attempts: int | None = None
    hidden_reference: bool = False

    def __post_init__(self) -> None:
        validate.finite(beta=self.beta, initial_reference=self.initial_reference)
        validate.positive(clip_range=self.clip_range, large_norm=self.large_norm, metric_bound=self.metric_bound)
        if self.gate_noise is not None:
            validate.positive(gate_noise=self.gate_noise)
        if self.reference_noise is not None:
            validate.positive_or_infinite(reference_noise=self.reference_noise)
        if self.small_norm is not None:
            validate.non_negative(small_norm=self.small_norm)
            if self.small_norm > self.large_norm:
                raise InputError(
                    f"small_norm={self.small_norm} is not allowed: it must be at most large_norm={self.large_norm}."
                )
        if not 0 <= self.reference_decay < 1:
            raise InputError(f"reference_decay={self.reference_decay} is not allowed: it must be in [0, 1).")
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)

    @property
    def threshold(self) -> float:
        return self.beta * self.metric_bound

    @property
    def clip_bound(self) -> float:
        return self.clip_range * self.metric_bound

    @property
    def noise_std(self) -> float:
        if self.gate_noise is None:
            raise InputError("gate_noise=None is not allowed here: give a number, or calibrate the gate first.")
        return 4.0 * self.gate_noise * self.metric_bound

    @property
    def acceptance(self) -> Acceptance:
        """How one record can change the acceptance probability of any batch (docs/accounting.md, section 2)."""
        return Acceptance.one_sided(
            threshold=self.threshold,
            clip_bound=self.clip_bound,
            metric_bound=self.metric_bound,
            noise_std=self.noise_std,
        )

    def with_noise(self, *, gate_noise: float, reference_noise: float) -> ClippingBiasGate:
        return replace(self, gate_noise=gate_noise, reference_noise=reference_noise)
