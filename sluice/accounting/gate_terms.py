"""What accounting and calibration need of a gate, without the tensors that a gate works on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.acceptance import Acceptance


class AccountedGate(Protocol):
    """Any gate whose noises are set."""

    @property
    def acceptance(self) -> Acceptance: ...

    @property
    def reference_noise(self) -> float | None: ...

    @property
    def max_attempts(self) -> int | None: ...


def is_tunable(gate: object) -> bool:
    """Whether a gate leaves the choice of its noises to calibration wherever they are None."""
    wanted = ("gate_noise", "reference_noise", "reference_decay", "with_noise")
    return gate is not None and all(hasattr(gate, name) for name in wanted)


@dataclass(frozen=True, kw_only=True)
class GateTerms:
    """The clipping-bias gate as an accountant sees it: in units of the metric bound, and nothing of how it measures.

    Attributes:
        beta: threshold [tau = beta * C_e].
        clip_range: clip of the difference [K = clip_range * C_e].
        gate_noise: noise of the decision [sv = 4 * sigma_e * C_e]; None lets calibration choose it.
        reference_noise: noise multiplier of the published reference; None lets calibration choose it.
        reference_decay: weight of the past in the running average of published references.
        max_attempts: give up on a release after this many attempts; None never gives up.
    """

    beta: float = 3.0
    clip_range: float = 2.0
    gate_noise: float | None = None
    reference_noise: float | None = None
    reference_decay: float = 0.9
    max_attempts: int | None = None

    def __post_init__(self) -> None:
        validate.finite(beta=self.beta)
        validate.positive(clip_range=self.clip_range)
        if self.gate_noise is not None:
            validate.positive(gate_noise=self.gate_noise)
        if self.reference_noise is not None:
            validate.positive_or_infinite(reference_noise=self.reference_noise)
        if not 0 <= self.reference_decay < 1:
            raise InputError(f"reference_decay={self.reference_decay} is not allowed: it must be in [0, 1).")
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)

    @property
    def acceptance(self) -> Acceptance:
        if self.gate_noise is None:
            raise InputError("gate_noise=None is not allowed here: give a number, or calibrate the gate first.")
        return Acceptance.one_sided(
            threshold=self.beta, clip_bound=self.clip_range, metric_bound=1.0, noise_std=4.0 * self.gate_noise
        )

    def with_noise(self, *, gate_noise: float, reference_noise: float) -> GateTerms:
        return replace(self, gate_noise=gate_noise, reference_noise=reference_noise)
