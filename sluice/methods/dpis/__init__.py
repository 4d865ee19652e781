"""DPIS: importance sampling, so that records with large gradients are sampled more often.

Source: Wei et al., "DPIS: An Enhanced SelectiveRelease for Differentially Private SGD with Importance Sampling", CCS 2022.

Algorithm: candidates by Poisson sampling at a public rate; each is kept with probability min(norm, C) / C and then
counts with its gradient's direction, at full length C. So a record is sampled in proportion to its clipped norm, and
the sum over (rate N) estimates the mean clipped gradient without bias. From the same candidates come, with noise,
the sum of clipped norms, which sets the next rate, and the number of clipped gradients, which sets the next C.

Accounting: sound, at the worst rate. No record is a candidate more often than ``sample_rate`` says, and everything that
is released together is one Gaussian release from the candidates (docs/methods-dpis.md, section 3); PLD or RDP. No
smaller cost is claimed because most records are sampled less often: those rates depend on the records, and no bound for
the worst record gains from them (section 4). How noise is shared between the three sums, and how rate and C are adapted,
are choices made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.calibration import calibrate
from sluice.accounting.dpa import DpEvent, NoOpDpEvent, SelfComposedDpEvent
from sluice.accounting.events import plain_release
from sluice.mechanism.base import Mechanism
from sluice.mechanism.rates import exact_sample_rate
from sluice.methods.base import Method, RunSettings
from sluice.methods.dpsgd_hf import RELEASES
from sluice.methods.reference import scattering_settings

# Where the noise of the statistics is left open, each costs this much less than the gradient: a hundredth of it.
STATISTICS_RATIO = 10.0

# What the statistics have to leave to the gradient, of the inverse square of the effective noise multiplier.
LEAST_GRADIENT_SHARE = 1e-3

# Outside of these a statistic is hardly hidden, or nothing but noise.
LEAST_STATISTICS_NOISE = 1e-9
LARGEST_STATISTICS_NOISE = 1e9

LARGEST_CLIP_RATE = 10.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that only DPIS has.

    Attributes:
        rate_cap: candidates are never sampled at more than this times batch_size over the number of records. This is
            the rate that is charged.
        norm_noise: standard deviation of the noise on the sum of clipped norms, in units of C; None is ten times the
            effective noise multiplier, which costs a hundredth of the budget.
        count_noise: standard deviation of the noise on the number of clipped gradients; None is five times that.
        norm_decay: weight of the past in the average from which the rate is set.
        clip_rate: how fast C adapts, at most 10; 0 keeps it at max_grad_norm.
        clip_target: the share of gradients that C should clip.
    """

    rate_cap: float = 1.5
    norm_noise: float | None = None
    count_noise: float | None = None
    norm_decay: float = 0.9
    clip_rate: float = 0.2
    clip_target: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_cap) and self.rate_cap >= 1):
            raise InputError(f"rate_cap={self.rate_cap} is not allowed: it must be a finite number >= 1.")
        given = {"norm_noise": self.norm_noise, "count_noise": self.count_noise}
        _require_noise(**{name: noise for name, noise in given.items() if noise is not None})
        _require_adaptation(norm_decay=self.norm_decay, clip_rate=self.clip_rate, clip_target=self.clip_target)


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(Mechanism):
    """What a run of DPIS promises.

    Attributes:
        dataset_size: the public number of records N, from which divisors are made.
        wanted_rate: how many records are to be kept in a release, over N.
        sample_rate: the most with which a record is a candidate [q]. The only rate that is accounted for.
        first_clip_norm: C before anything was released. Updates are in its units, whatever C becomes.
        noise_multiplier: standard deviation of the noise on the sum of kept gradients, over C.
        norm_noise: standard deviation of the noise on the candidates' sum of min(norm, C) / C; one record adds up to 1.
        count_noise: standard deviation of the noise on the candidates' sum of 1{norm > C} - 1/2; one record adds 1/2.
        norm_decay, clip_rate, clip_target: post-processing of these two; see `Options`.
    """

    kind: ClassVar[str] = "importance sampling"

    dataset_size: int
    wanted_rate: float
    sample_rate: float
    first_clip_norm: float
    noise_multiplier: float
    norm_noise: float
    count_noise: float
    norm_decay: float
    clip_rate: float
    clip_target: float
    releases: int

    def __post_init__(self) -> None:
        validate.positive_integer(dataset_size=self.dataset_size, releases=self.releases)
        validate.fraction(wanted_rate=self.wanted_rate, sample_rate=self.sample_rate)
        validate.positive(first_clip_norm=self.first_clip_norm, noise_multiplier=self.noise_multiplier)
        _require_noise(norm_noise=self.norm_noise, count_noise=self.count_noise)
        _require_adaptation(norm_decay=self.norm_decay, clip_rate=self.clip_rate, clip_target=self.clip_target)
        if self.wanted_rate > self.sample_rate:
            raise InputError(
                f"wanted_rate={self.wanted_rate} is not allowed: it must be at most sample_rate={self.sample_rate}."
            )

    @property
    def provable(self) -> bool:
        return True

    @property
    def effective_noise_multiplier(self) -> float:
        """The three sums together are one Gaussian release with this multiplier."""
        return 1 / math.hypot(1 / self.noise_multiplier, 1 / self.norm_noise, 0.5 / self.count_noise)

    def event_after(self, releases: int) -> DpEvent:
        self._require_releases(releases)
        if not releases:
            return NoOpDpEvent()
        release = plain_release(sampling_probability=self.sample_rate, noise_multiplier=self.effective_noise_multiplier)
        return SelfComposedDpEvent(release, releases)

    def theorem(self, accountant: str) -> str:
        return (
            "Bound for the Poisson-sampled Gaussian mechanism at the worst rate of importance sampling, composed "
            f"adaptively by {accountant}: docs/methods-dpis.md, section 3"
        )

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": "Poisson", "rate": self.sample_rate}

    @property
    def releases_metric(self) -> bool:
        return True

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        kept, most = self.wanted_rate * self.dataset_size, self.sample_rate * self.dataset_size
        return (
            ("candidates", f"at a rate of at most {self.sample_rate:.4g} ({most:g} records): what is charged"),
            ("kept", f"{kept:g} records wanted, in proportion to their clipped norms"),
            (
                "noise multiplier",
                f"{self.noise_multiplier:.4g}; all sums together {self.effective_noise_multiplier:.4g}",
            ),
            ("statistics' noise", f"norms {self.norm_noise:.4g}, count {self.count_noise:.4g}"),
        )

    def rate_at(self, mean_share: float) -> float:
        """The rate of candidates at which ``wanted_rate`` of all records are kept, if it may be that high.

        Args:
            mean_share: the public estimate of the mean of min(norm, C) / C.
        """
        return min(self.sample_rate, self.wanted_rate / mean_share)


def _require_noise(**noises: float) -> None:
    validate.positive(**noises)
    for name, noise in noises.items():
        if not LEAST_STATISTICS_NOISE <= noise <= LARGEST_STATISTICS_NOISE:
            raise InputError(
                f"{name}={noise} is not allowed: it must be from {LEAST_STATISTICS_NOISE:g} to "
                f"{LARGEST_STATISTICS_NOISE:g}."
            )


def _require_adaptation(*, norm_decay: float, clip_rate: float, clip_target: float) -> None:
    validate.non_negative(norm_decay=norm_decay, clip_rate=clip_rate)
    if clip_rate > LARGEST_CLIP_RATE:
        raise InputError(
            f"clip_rate={clip_rate} is not allowed: it must be at most {LARGEST_CLIP_RATE:g}, at which one release moves "
            "C through its whole range."
        )
    if norm_decay >= 1:
        raise InputError(f"norm_decay={norm_decay} is not allowed: it must be in [0, 1).")
    validate.open_fraction(clip_target=clip_target)


def plan(settings: RunSettings, dataset_size: int) -> ImportanceSampling:
    """With the noise that is given, or calibrated so that gradient and statistics together meet the budget."""
    options: Options = settings.own_options
    wanted = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    worst = min(1.0, options.rate_cap * wanted)
    if settings.noise_multiplier is not None:
        sigma = base = settings.noise_multiplier
    else:
        base = calibrate(
            sample_rate=worst,
            releases=settings.releases,
            target_epsilon=settings.epsilon,
            target_delta=settings.delta,
            accountant=settings.accountant,
        ).noise_multiplier
    norm_noise = STATISTICS_RATIO * base if options.norm_noise is None else options.norm_noise
    count_noise = STATISTICS_RATIO / 2 * base if options.count_noise is None else options.count_noise
    if settings.noise_multiplier is None:
        sigma = _gradient_noise(base, norm_noise=norm_noise, count_noise=count_noise)
    return ImportanceSampling(
        dataset_size=dataset_size,
        wanted_rate=wanted,
        sample_rate=worst,
        first_clip_norm=settings.max_grad_norm,
        noise_multiplier=sigma,
        norm_noise=norm_noise,
        count_noise=count_noise,
        norm_decay=options.norm_decay,
        clip_rate=options.clip_rate,
        clip_target=options.clip_target,
        releases=settings.releases,
    )


def _gradient_noise(effective: float, *, norm_noise: float, count_noise: float) -> float:
    """What is left for the gradient when all three together may have the effective noise multiplier."""
    norm_ratio, count_ratio = effective / norm_noise, effective / (2 * count_noise)
    left = 1 - norm_ratio * norm_ratio - count_ratio * count_ratio
    if left < LEAST_GRADIENT_SHARE:
        raise InputError(
            f"norm_noise={norm_noise:g} with count_noise={count_noise:g} is not allowed: the statistics alone would "
            f"spend the budget, which allows a noise multiplier of {effective:.4g}. Raise them, or leave them out."
        )
    # The last factor exceeds every rounding error made here.
    return effective * float(left**-0.5) * (1 + 2.0**-40)


def unused_options(settings: RunSettings) -> dict[str, str]:
    """The options that a run with these settings does not read."""
    options: Options = settings.own_options
    unused = {}
    if options.clip_rate == 0:
        unused["clip_target"] = "clip_rate=0 keeps C where it is"
    if options.rate_cap == 1:
        unused["norm_decay"] = "rate_cap=1 keeps the rate where it is"
    return unused


METHOD = Method(
    name="dpis",
    summary="records sampled in proportion to their clipped gradients, at a worst rate that is charged",
    proves="epsilon (PLD, RDP), at the worst rate",
    mechanism=ImportanceSampling,
    plan=plan,
    defaults=lambda dataset, epsilon: scattering_settings(dataset, epsilon, releases=RELEASES),
    options=Options,
    unused=dict.fromkeys(("scaling", "scaling_bound"), "kept gradients always count at full length"),
    unused_options=unused_options,
)
