"""DPSUR: an update is kept if it lowers the loss on a fresh validation batch, judged with noise.

Source: Fu et al., "DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and
Release", VLDB 2024.

Algorithm: a Poisson batch gives a noisy gradient and with it candidate weights. A second Poisson batch, drawn from the
same records, gives the change of the mean loss from the present weights to the candidate, both on that batch; it is
clipped to [-C_v, C_v] and gets noise of standard deviation 2 C_v sigma_v. The candidate is released if the result lies
below beta C_v; otherwise weights and all of the optimizer's state are as before. The scaling may be global
(``--scaling global``), as in the DPSR-CG paper's ablation.

Accounting, three figures:

- proved: the run ends after a public number of attempts at the latest, and each of them is charged, accepted or not
  (docs/accounting.md, section 8.4). Without such a cap, as in older ledgers: the released law is that of the candidate,
  re-weighted by its probability of being accepted (sections 8.2 and 8.3), which costs far more.
- claimed by its authors: a sampled Gaussian for the step, one for the test of each *accepted* update, nothing for the
  selection.
- claimed by the DPSR-CG paper: the sampling rate inflated by rho.

Only the first is an epsilon, and noise is calibrated to it unless ``-o account=claimed`` asks for the authors' own
settings, or, on data other than theirs, for noise by their formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from sluice._base import validate
from sluice._base.codec import ADDED_IF_GIVEN
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS, create_accountant
from sluice.accounting.claims import CLAIMED_LABEL
from sluice.accounting.dpa import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from sluice.accounting.dpsur import (
    Dpsur,
    DpsurAttemptDpEvent,
    DpsurDpEvent,
    claimed_dpsur_account,
    enough_attempts,
    give_up_probability,
    paper_dpsur_account,
)
from sluice.accounting.search import smallest_reaching
from sluice.mechanism.base import Claim, Mechanism
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.scaling import ScalingRule
from sluice.methods.base import Method, RunSettings
from sluice.methods.reference import NOISE, nearest, scattering_settings
from sluice.methods.selective import scaling_rule

_LARGEST_NOISE = 100.0


@dataclass(frozen=True, kw_only=True)
class DpsurOptions:
    """What only DPSUR has.

    Attributes:
        account: which figure epsilon is about: "provable", or "claimed" for the authors' own, which proves nothing. On
            their data sets "claimed" brings their noise and number of updates for that epsilon.
        validation_batch_size: expected size of a validation batch.
        validation_noise: noise multiplier of the test [sigma_v].
        loss_clip: the loss change is clipped to plus and minus this [C_v].
        threshold: a candidate is accepted below this many loss_clip [beta].
    """

    account: str = "provable"
    validation_batch_size: int = 256
    validation_noise: float = 1.3
    loss_clip: float = 0.001
    threshold: float = -1.0

    def __post_init__(self) -> None:
        validate.one_of(("provable", "claimed"), account=self.account)
        validate.positive_integer(validation_batch_size=self.validation_batch_size)
        validate.positive(validation_noise=self.validation_noise, loss_clip=self.loss_clip)
        validate.finite(threshold=self.threshold)


@dataclass(frozen=True, kw_only=True)
class DpsurMechanism(Mechanism):
    """What a run of DPSUR promises. Every field is public.

    Attributes:
        max_attempts: the run ends after this many attempts in all, whether its releases are made or not. None, as in
            ledgers of earlier versions: it never gives up, and the proof is by releases.
    """

    kind: ClassVar[str] = "dpsur"
    claims_beside_proof: ClassVar[bool] = True

    sample_rate: float
    expected_batch_size: float
    scaling: ScalingRule
    noise_multiplier: float
    validation_rate: float
    expected_validation_size: float
    validation_noise: float
    loss_clip: float
    threshold: float
    releases: int
    max_attempts: int | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        validate.positive(
            expected_batch_size=self.expected_batch_size,
            expected_validation_size=self.expected_validation_size,
            loss_clip=self.loss_clip,
        )
        validate.positive_integer(releases=self.releases)
        if self.max_attempts is not None:
            validate.positive_integer(max_attempts=self.max_attempts)
        _ = self.release  # checks the other fields

    @property
    def release(self) -> Dpsur:
        """One release, as the accountants know it."""
        return Dpsur(
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            validation_rate=self.validation_rate,
            validation_noise=self.validation_noise,
            beta=self.threshold,
        )

    @property
    def accountants(self) -> tuple[str, ...]:
        return ("rdp",) if self.max_attempts is None else ACCOUNTANTS

    @property
    def provable(self) -> bool:
        return True

    def event_after(self, releases: int) -> DpEvent:
        """All attempts that the run may make, however many releases came of them: how many it made is not public."""
        self._require_releases(releases)
        if self.max_attempts is None:
            return self._selection_event(releases)
        return SelfComposedDpEvent(DpsurAttemptDpEvent(attempt=self.release), self.max_attempts)

    def _selection_event(self, releases: int) -> DpEvent:
        events: list[DpEvent] = [SelfComposedDpEvent(DpsurDpEvent(release=self.release), releases)] if releases else []
        return ComposedDpEvent(events)

    def epsilon_after(self, releases: int, *, delta: float, accountant: str) -> float:
        """By attempts; or by releases, where that is less and the cap is almost never reached whatever the data."""
        by_event = super().epsilon_after(releases, delta=delta, accountant=accountant)
        if self.max_attempts is None:
            return by_event
        given_up = give_up_probability(self.release, releases=self.releases, max_attempts=self.max_attempts)
        if given_up >= delta:
            return by_event
        by_releases = create_accountant("rdp").compose(self._selection_event(releases)).get_epsilon(delta - given_up)
        return min(by_event, float(by_releases) - math.log1p(-given_up))

    def claims_after(self, releases: int, *, delta: float) -> tuple[Claim, ...]:
        if not releases:
            return ()
        authors = claimed_dpsur_account(self.release).claimed_epsilon(releases=releases, delta=delta)
        paper = paper_dpsur_account(self.release).claimed_epsilon(releases=releases, delta=delta)
        return (
            Claim(label="claimed (DPSUR)", reading="authors'", value=authors),
            Claim(label=CLAIMED_LABEL, reading="table", value=paper),
        )

    def theorem(self, accountant: str) -> str:
        what, where = "a release that is selected by its own value", "sections 8.2 and 8.3 (Renyi divergence)"
        if self.max_attempts is not None:
            how = {"pld": "privacy-loss distributions", "rdp": "Renyi divergence"}[accountant]
            what = (
                f"each of at most {self.max_attempts} attempts, accepted or not (or, where it is smaller, for {what})"
            )
            where = f"section 8.4 ({how}; {where})"
        return f"Bound for {what}, composed adaptively: docs/accounting.md, {where}"

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": "Poisson", "rate": self.sample_rate}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        return (
            ("sample rate", f"{self.sample_rate:.4g} ({self.expected_batch_size:g} records on average)"),
            ("validation rate", f"{self.validation_rate:.4g} ({self.expected_validation_size:g} records on average)"),
            ("noise multiplier", f"{self.noise_multiplier:.4g}"),
            ("validation noise", f"{self.validation_noise:.4g}, threshold {self.threshold:g}"),
            ("attempts", "no cap" if self.max_attempts is None else f"at most {self.max_attempts:,}, all charged"),
        )


def plan(settings: RunSettings, dataset_size: int) -> DpsurMechanism:
    """The mechanism with the noise that is given, or calibrated to the budget by the account that is asked for."""
    options: DpsurOptions = settings.own_options
    rate = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    tested = min(options.validation_batch_size, dataset_size)

    def mechanism(noise_multiplier: float) -> DpsurMechanism:
        return DpsurMechanism(
            sample_rate=rate,
            expected_batch_size=rate * dataset_size,
            scaling=scaling_rule(settings),
            noise_multiplier=noise_multiplier,
            validation_rate=tested / dataset_size,
            expected_validation_size=float(tested),
            validation_noise=options.validation_noise,
            loss_clip=options.loss_clip,
            threshold=options.threshold,
            releases=settings.releases,
        )

    max_attempts = _max_attempts(mechanism(1.0), settings)

    def capped(noise_multiplier: float) -> DpsurMechanism:
        return replace(mechanism(noise_multiplier), max_attempts=max_attempts)

    def proved(noise_multiplier: float) -> float:
        return capped(noise_multiplier).epsilon_after(
            settings.releases, delta=settings.delta, accountant=settings.accountant
        )

    if math.isinf(proved(_LARGEST_NOISE)):
        raise InputError(
            f"validation_noise={options.validation_noise} is not allowed: it is so small that the test alone tells "
            "whether a record is there, and no finite epsilon is proved. Use more (its authors use 0.8 to 1.3)."
        )
    if settings.noise_multiplier is not None:
        return capped(settings.noise_multiplier)

    def claimed(noise_multiplier: float) -> float:
        return capped(noise_multiplier).claims_after(settings.releases, delta=settings.delta)[0].value

    cost = claimed if options.account == "claimed" else proved
    found = smallest_reaching(cost, target=settings.epsilon, guess=2.0, slack=3e-3, lowest=0.3, highest=_LARGEST_NOISE)
    if found is None:
        raise InputError(
            f"epsilon={settings.epsilon} cannot be reached with releases={settings.releases}, "
            f"max_attempts={max_attempts}, validation_noise={options.validation_noise} and "
            f"validation_batch_size={options.validation_batch_size}: the tests alone cost more. Use fewer releases, more "
            "validation noise or a smaller validation batch."
        )
    return capped(found.x)


def _max_attempts(mechanism: DpsurMechanism, settings: RunSettings) -> int:
    """The cap on attempts of the whole run: as given, or enough for almost every run."""
    if settings.max_attempts is None:
        return enough_attempts(mechanism.release, releases=settings.releases)
    most = math.exp(mechanism.release.log_acceptance_max)
    if settings.max_attempts * most < settings.releases:
        raise InputError(
            f"max_attempts={settings.max_attempts} is not allowed: dpsur counts the attempts of the whole run, and of those "
            f"{most:.2g} are accepted at best, so that releases={settings.releases} would hardly ever be reached. Raise it, "
            "or leave it out."
        )
    return settings.max_attempts


_CLAIMED_RELEASES = {
    "mnist": (281, 862, 1475, 1475),
    "fashion-mnist": (652, 682, 1082, 1973),
    "cifar-10": (119, 515, 462, 797),
    "imdb": (85, 266, 259, 259),
}
_CLAIMED_VALIDATION_NOISE = {
    "mnist": (1.3, 1.0, 0.9, 0.8),
    "fashion-mnist": (1.3, 1.3, 0.8, 0.8),
    "cifar-10": (1.3, 1.3, 1.1, 1.1),
    "imdb": (1.3, 1.2, 1.0, 0.9),
}


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The authors' settings for this epsilon, but for the noise of the step, which is calibrated to what is proved."""
    settings = scattering_settings(dataset, epsilon, releases=_CLAIMED_RELEASES)
    if dataset not in NOISE:
        return settings | {"releases": 30, "lr": 2.0, "options": {"validation_batch_size": 32, "loss_clip": 0.01}}
    return settings | {"options": {"validation_noise": nearest(epsilon, _CLAIMED_VALIDATION_NOISE[dataset])}}


def claimed_defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The authors' own settings, their noise included, for an epsilon that they claim and nobody has proved."""
    settings = defaults(dataset, epsilon)
    return settings if dataset not in NOISE else settings | {"noise_multiplier": nearest(epsilon, NOISE[dataset])}


METHOD = Method(
    name="dpsur",
    summary="an update is kept if it lowers the loss on a validation batch, judged with noise",
    proves="epsilon (PLD, RDP); its authors' and the paper's figures are claimed",
    mechanism=DpsurMechanism,
    plan=plan,
    defaults=defaults,
    claimed_defaults=claimed_defaults,
    counts_attempts=True,
    options=DpsurOptions,
    target=lambda settings: (
        settings.epsilon if settings.noise_multiplier is None and settings.own_options.account == "provable" else None
    ),
)
