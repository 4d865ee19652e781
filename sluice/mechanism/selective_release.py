"""The mechanism of selective release, and of plain DP-SGD: everything public about such a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, get_args

from sluice._base import validate
from sluice._base.codec import ADDED, ADDED_IF_GIVEN, encode
from sluice._base.errors import InputError
from sluice.accounting.calibration import calibrate, release_event
from sluice.accounting.claims import CLAIMED_LABEL, Reading, claimed_account
from sluice.accounting.dpa import ComposedDpEvent, DpEvent
from sluice.mechanism.base import Claim
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
from sluice.mechanism.poisson_release import PoissonRelease
from sluice.mechanism.scaling import ScalingRule
from sluice.mechanism.stages import MOST_RELEASES, Stages
from sluice.mechanism.stated_gate import as_if_provable, stated
from sluice.mechanism.thinning import Tempered, ThinningGate


@dataclass(frozen=True, kw_only=True)
class SelectiveRelease(PoissonRelease):
    """What a run promises to do. No performance option is here, and nothing here is sensitive.

    Attributes:
        sample_rate: probability with which each record is in a batch, independently [q]. With a gate that thins batches, of
            the batches before that.
        expected_batch_size: the public constant that sums are divided by. Usually sample_rate times the number of
            records, rounded or not; it is never recomputed from the data.
        scaling: from norms to weights; carries the sensitivity.
        noise_multiplier: standard deviation of a release's noise over the sensitivity [sigma]. None leaves it open, and with it
            noises of the gate that are None: `calibrate` chooses them. Nothing can be trained or accounted for before.
        releases: how many updates are released at most [T].
        gate: which attempts are released; None for all of them, which is plain DP-SGD.
        prior_releases: noise multipliers of Gaussian releases made before training from the same records, for instance
            private statistics of features. Each is composed with the run.
        stages: how a run without a planned end is charged; ``releases`` then is only a number that no run reaches.
    """

    kind: ClassVar[str] = "selective release"
    tag: ClassVar[str | None] = None  # the first ledgers had no other mechanism, and named none

    sample_rate: float
    expected_batch_size: float
    scaling: ScalingRule
    noise_multiplier: float | None = None
    releases: int
    gate: Gate | None = field(default=None, metadata=ADDED)
    prior_releases: tuple[float, ...] = field(default=(), metadata={**ADDED, "key": "preparation"})
    stages: Stages | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate is not None and self.gate.thins and self.sample_rate == 1:
            raise InputError(
                "sample_rate=1 is not allowed with a gate that thins batches: odds of being in every batch stay what they are, "
                "and nobody would be left out. Sample fewer records, or leave the gate out."
            )
        if self.noise_multiplier is None:
            return
        validate.positive(noise_multiplier=self.noise_multiplier)
        if self.gate is not None:
            if self.gate.reference_noise is None:
                raise InputError(
                    "gate.reference_noise=None is not allowed in a mechanism: give a number, or calibrate first."
                )
            _ = self.gate.acceptance  # refuses a gate whose noise is not set

    def calibrate(self, *, epsilon: float, delta: float, accountant: str = "pld") -> SelectiveRelease:
        """This mechanism with the noise that spends at most ``epsilon`` at ``delta``, all releases and prior releases included.

        Args:
            accountant: by which it is proved: "pld" or "rdp".

        Noises of the gate that are open are chosen together with that of the gradient; those that are given stay
        (`sluice.accounting.calibration`).
        """
        if self.noise_multiplier is not None:
            raise InputError(
                f"noise_multiplier={self.noise_multiplier} is not allowed in calibrate: the noise is chosen already. Leave it "
                "None."
            )
        chosen = calibrate(
            sample_rate=self.sample_rate,
            releases=self.releases,
            target_epsilon=epsilon,
            target_delta=delta,
            gate=self.gate,
            prior_releases=self.prior_releases,
            accountant=accountant,
        )
        return replace(self, noise_multiplier=chosen.noise_multiplier, gate=chosen.gate)

    @property
    def expected_candidates(self) -> float:
        """How many records a batch has on average before a gate thins it."""
        if not isinstance(self.gate, ThinningGate):
            return self.expected_batch_size
        return self.expected_batch_size * self.sample_rate / self.gate.plain_rate(self.sample_rate)

    @property
    def provable(self) -> bool:
        """Whether the accountants' numbers are proved for this mechanism. If not they are only "claimed"."""
        return self.gate is None or self.gate.provable

    @property
    def as_claimed(self) -> SelectiveRelease:
        """Itself; or, where the reference is hidden, the run that it would be if the reference were public."""
        return self if self.gate is None else replace(self, gate=as_if_provable(self.gate))

    @property
    def release_event(self) -> DpEvent:
        """The event of one release. A gate that nothing is proved for has none: see `as_claimed`."""
        return release_event(sample_rate=self.sample_rate, noise_multiplier=self.sigma, gate=self.gate)

    def event_after(self, releases: int) -> DpEvent:
        """The event of a run that made this many releases, prior releases included."""
        self._require_releases(releases)
        return self._composed([(self.release_event, releases)] if releases else [])

    def claims_after(self, releases: int, *, delta: float) -> tuple[Claim, ...]:
        """What the DPSR-CG paper's formula says, by each reading of it; nothing for other gates than its own."""
        gate = self.gate
        if not isinstance(gate, ClippingBiasGate) or gate.gate_noise is None or not releases:
            return ()
        claims = []
        for reading in get_args(Reading):
            account = claimed_account(
                sample_rate=self.sample_rate,
                noise_multiplier=self.sigma,
                gate_noise=gate.gate_noise,
                beta=gate.beta,
                clip_range=gate.clip_range,
                reading=reading,
                once=ComposedDpEvent(self.prior_events),
            )
            value = account.claimed_epsilon(releases=releases, delta=delta)
            claims.append(Claim(label=CLAIMED_LABEL, reading=reading, value=value))
        return tuple(claims)

    @property
    def unproved_because(self) -> str:
        if self.provable:
            return ""
        return (
            "this run compares each batch with an un-noised value of an earlier one. No proof covers that, and the "
            "figures claimed for it are refuted by an example (docs/accounting.md, section 4)."
        )

    def theorem(self, accountant: str) -> str:
        section = {
            "rdp": "sections 3.3 and 3.5 (Renyi divergence)",
            "pld": "sections 3.4 and 3.5 (privacy-loss distributions)",
        }[accountant]
        what = "selective release with a public reference"
        if self.gate is None:
            what = "the Poisson-sampled Gaussian mechanism"
        elif self.gate.thins:
            what, section = "the Poisson-sampled Gaussian mechanism, thinned record by record", f"section 13, {section}"
        staged = "" if self.stages is None else "; charged by stages, section 12.1"
        return f"Bound for {what}, composed adaptively: docs/accounting.md, {section}{staged}"

    @property
    def releases_metric(self) -> bool:
        return self.gate is not None and math.isfinite(self.gate.reference_noise or math.inf) and self.provable

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        rows = [
            ("sample rate", f"{self.sample_rate:.4g} ({self.expected_batch_size:g} records on average)"),
            ("noise multiplier", f"{self.sigma:.4g}"),
        ]
        if isinstance(self.scaling, Tempered):
            rows.append(("scaling", f"{self.scaling.base.kind}, tempered with strength {self.scaling.gate.strength:g}"))
        if self.prior_releases:
            multipliers = ", ".join(f"{each:g}" for each in self.prior_releases)
            rows.append(("before training", f"Gaussian release with noise multiplier {multipliers}"))
        gate = self.gate
        if isinstance(gate, ClippingBiasGate):
            reference = "hidden: nothing is proved" if gate.hidden_reference else f"{gate.reference_noise:.4g}"
            rows += [
                ("gate", f"clipping bias, beta {gate.beta:g}"),
                ("gate noise", f"{gate.gate_noise:.4g}"),
                ("reference noise", reference),
            ]
        elif isinstance(gate, CoinGate):
            rows.append(("gate", f"a coin that accepts {gate.probability:.3g} of the attempts"))
        elif isinstance(gate, ThinningGate):
            rows.append(("gate", f"thinning, strength {gate.strength:g}: each record is kept by a coin of its own"))
        else:
            rows.append(("gate", "none: every attempt is released"))
        return tuple(rows)

    def with_releases(self, releases: int) -> SelectiveRelease:
        return replace(self, releases=releases)

    def open_ended(self, *, first_stage: int) -> SelectiveRelease:
        """This mechanism without a planned end, charged by stages of which the first has this many releases."""
        return replace(self, releases=MOST_RELEASES, stages=Stages(first=first_stage))

    def to_dict(self) -> dict[str, Any]:
        described = None if self.gate is None else stated(self.gate)
        data: dict[str, Any] = encode(replace(self, gate=described))
        return data
