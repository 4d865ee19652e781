"""DPSGD-AC: DPSGD whose clipping bound follows a quantile of the gradients' norms, or a schedule; noise by a schedule.

Source: Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021.

Algorithm: that of DPSGD. Beside each sum a noisy count of the records that were not clipped is published, and the next bound
is moved up or down by how far their share is from the quantile that is asked for. With ``bound=schedule`` it falls, or
rises, to ``clip_end`` times the first in even factors; the noise multiplier goes to ``noise_end`` times the first likewise.

Accounting: sound. Sum and count are one Gaussian release, and each release is charged with the noise that it has
(docs/accounting.md, sections 12.2 and 12.4). Gradients are normalised by nothing: the learning rate goes with the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.mechanism.clipping import Clipping, FlatClipping, QuantileClipping, Schedule
from sluice.mechanism.rates import exact_sample_rate
from sluice.methods.base import Method, RunSettings
from sluice.methods.dpsgd import RELEASES
from sluice.methods.reference import pixel_settings

#: The bound stays within this factor of the first.
RANGE = 1000.0

LARGEST_END = 100.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that only DPSGD-AC has.

    Attributes:
        bound: what it follows, "quantile" or "schedule".
        quantile: the share of records that should not be clipped.
        clip_rate: how fast the bound follows.
        count_noise: standard deviation of the noise on the count; none for a twentieth of the batch size.
        clip_end: the last bound over the first, by schedule.
        noise_end: the last noise multiplier over the first.
        levels: how many factors a schedule has.
    """

    bound: str = "quantile"
    quantile: float = 0.5
    clip_rate: float = 0.2
    count_noise: float | None = None
    clip_end: float = 1.0
    noise_end: float = 1.0
    levels: int = 10

    def __post_init__(self) -> None:
        validate.one_of(("quantile", "schedule"), bound=self.bound)
        validate.open_fraction(quantile=self.quantile)
        if self.count_noise is not None:
            validate.positive(count_noise=self.count_noise)
        validate.positive(clip_rate=self.clip_rate, clip_end=self.clip_end, noise_end=self.noise_end)
        validate.positive_integer(levels=self.levels)
        for name, value, most in (
            ("clip_end", max(self.clip_end, 1 / self.clip_end), LARGEST_END),
            ("noise_end", max(self.noise_end, 1 / self.noise_end), LARGEST_END),
            ("levels", self.levels, 100),
        ):
            if value > most:
                raise InputError(f"{name}={getattr(self, name)} is not allowed: a factor of at most {most:g} is.")


def plan(settings: RunSettings, dataset_size: int) -> ClippedRelease:
    """With the noise that is given, or calibrated to the budget."""
    options: Options = settings.own_options
    rate = exact_sample_rate(batch_size=settings.batch_size or dataset_size, dataset_size=dataset_size)
    mechanism = ClippedRelease(
        sample_rate=rate,
        expected_batch_size=rate * dataset_size,
        clipping=_clipping(settings, options, expected_batch_size=rate * dataset_size),
        noise_multiplier=settings.noise_multiplier,
        noise_schedule=_schedule(options.noise_end, options.levels, settings.releases),
        releases=settings.releases,
        prior_releases=() if settings.mean_noise is None else (settings.mean_noise,),
    )
    if settings.noise_multiplier is not None:
        return mechanism
    return mechanism.calibrate(epsilon=settings.epsilon, delta=settings.delta, accountant=settings.accountant)


def _clipping(settings: RunSettings, options: Options, *, expected_batch_size: float) -> Clipping:
    bound = settings.max_grad_norm
    if options.bound == "schedule":
        return FlatClipping(
            max_grad_norm=bound, schedule=_schedule(options.clip_end, options.levels, settings.releases)
        )
    return QuantileClipping(
        max_grad_norm=bound,
        quantile=options.quantile,
        rate=options.clip_rate,
        noise=expected_batch_size / 20 if options.count_noise is None else options.count_noise,
        smallest=bound / RANGE,
        largest=bound * RANGE,
    )


def _schedule(end: float, levels: int, releases: int) -> Schedule | None:
    """Even factors from one to the last, each for as many releases; None where they are all one."""
    if end == 1.0 or levels == 1:
        return None
    factors = tuple(end ** (level / (levels - 1)) for level in range(levels))
    return Schedule(factors=factors, every=max(1, releases // levels))


def _unused_options(settings: RunSettings) -> Mapping[str, str]:
    options: Options = settings.own_options
    if options.bound == "schedule":
        found = dict.fromkeys(("quantile", "clip_rate", "count_noise"), "the bound follows a schedule")
    else:
        found = {"clip_end": "the bound follows a quantile"}
    if options.noise_end == 1.0 and (options.bound == "quantile" or options.clip_end == 1.0):
        found["levels"] = "there is no schedule"
    return found


def _defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    return pixel_settings(dataset, epsilon, activation="relu", releases=RELEASES)


METHOD = Method(
    name="dpsgd-ac",
    summary="DPSGD whose bound follows a quantile of the norms, or a schedule",
    proves="epsilon (PLD, RDP), the count included",
    mechanism=ClippedRelease,
    plan=plan,
    defaults=_defaults,
    options=Options,
    unused={"scaling": "gradients are clipped", "scaling_bound": "gradients are clipped"},
    unused_options=_unused_options,
)
