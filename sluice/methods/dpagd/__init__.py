"""DPAGD: gradient descent whose steps are chosen by a private line search, with a budget that adapts to the need.

Source: Lee and Kifer, "Concentrated Differentially Private Gradient Descent with Adaptive per-Iteration Privacy Budget",
KDD 2018.

Algorithm: a noisy gradient of all records gives a direction. Losses of all records are summed at the present weights and
at a grid of steps along that direction, and one of these points is selected by the exponential mechanism (noisy minimum).
If it is a step, it is made. If it is the present point, the gradient was too noisy: its budget is raised by a factor
1 + gamma, the gradient is measured again with the additional budget alone and averaged with what is there, and the
search is repeated. Every few steps the grid is stretched or shrunk to what was chosen lately.

Accounting: sound. Both parts are zero-concentrated (the gradient as a Gaussian mechanism, the selection as a mechanism of
bounded range), a privacy filter stops before their sum exceeds the budget rho, and rho is converted by RDP
(docs/methods-dpagd.md). A ledger says how many measurements were made and not how large their budgets were, so any run
is charged the whole of rho. Sub-samples of the records may save time; no amplification is claimed for them.

Unlike in the original, the selection has the smaller noise that monotone losses allow, and nothing is claimed without
proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from sluice._base import validate
from sluice._base.codec import ADDED_IF_GIVEN
from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.accounting.dpa import DpEvent, NoOpDpEvent, ZCDpEvent
from sluice.mechanism.base import Mechanism
from sluice.methods.base import Method, RunSettings
from sluice.methods.reference import pixel_settings, small_settings

RELEASES = {
    "mnist": (40, 60, 80),
    "fashion-mnist": (40, 60, 80),
    "cifar-10": (40, 60, 80),
    "imdb": (20, 30, 40),
}
"""Measurements that the first budgets would last for, at epsilon 1, 2, 3."""

LARGEST = {"candidates": 1000, "gamma": 100.0, "first_reach": 1e6, "reach_growth": 10.0}
"""Beyond these a search takes for ever, spends all on one gradient, or leaves the range of the weights' numbers."""

SMALLEST_RHO = 5e-13
"""With less, a gradient tells nothing, and with far less its numbers overflow."""

# Chosen on held-out training records of MNIST and IMDB; the other images follow MNIST. On the nets that other methods train, a
# line search without momentum makes little way: 78 % of MNIST after 40 measurements, where a linear model had 96 % after
# 30, and 50 % of IMDB, where a linear model had 81 %.
_IMAGES = {
    "features": "scattering",
    "model": "linear",
    "activation": None,
    "options": {"first_reach": 0.3, "refresh_every": 5, "loss_rate": 0.2},
}
_TEXTS = {
    "features": "bag-of-words",
    "model": "bag-of-words",
    "activation": None,
    "options": {"candidates": 10, "first_reach": 5.0, "refresh_every": 5, "loss_rate": 0.2},
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings that only DPAGD has.

    Attributes:
        selection_share: the part of a measurement's first budget that selects the step; the gradient gets the rest.
        gamma: how much the gradient's budget is raised where no step was worth making.
        candidates: steps that are tried, beside none.
        first_reach: the longest of them, as a distance in the space of weights, before it is adapted.
        refresh_every: steps after which the longest becomes (1 + reach_growth) times the longest of those made since.
        reach_growth: see there.
        loss_clip: a record's loss counts as at most this in the selection.
        gradient_rate, loss_rate: share of the records that a gradient and a selection look at, drawn afresh each time.
            Less than 1 saves time and loses accuracy.
    """

    selection_share: float = 0.2
    gamma: float = 0.1
    candidates: int = 20
    first_reach: float = 1.0
    refresh_every: int = 10
    reach_growth: float = 0.1
    loss_clip: float = 3.0
    gradient_rate: float = 1.0
    loss_rate: float = 1.0

    def __post_init__(self) -> None:
        validate.open_fraction(selection_share=self.selection_share)
        _require_search(self)


@dataclass(frozen=True, kw_only=True)
class AdaptiveBudget(Mechanism):
    """What a run of DPAGD promises.

    Attributes:
        rho: the whole budget, of zero-concentrated differential privacy.
        gradient_rho: what the first gradient costs; later ones cost at least as much.
        selection_rho: what each selection costs.
        max_grad_norm: gradients are clipped to this.
        releases: more measurements than this cannot be made within rho.
        gamma ... loss_rate: see `Options`.
        dataset_size: the number of records, which is public, to hold delta against; None where it is not known. Epsilon
            does not depend on it.
    """

    kind: ClassVar[str] = "adaptive budget"
    accountants: ClassVar[tuple[str, ...]] = ("rdp",)

    rho: float
    gradient_rho: float
    selection_rho: float
    max_grad_norm: float
    gamma: float
    candidates: int
    first_reach: float
    refresh_every: int
    reach_growth: float
    loss_clip: float
    gradient_rate: float
    loss_rate: float
    releases: int
    dataset_size: int | None = field(default=None, metadata=ADDED_IF_GIVEN)

    def __post_init__(self) -> None:
        if self.dataset_size is not None:
            validate.positive_integer(dataset_size=self.dataset_size)
        validate.positive(
            rho=self.rho,
            gradient_rho=self.gradient_rho,
            selection_rho=self.selection_rho,
            max_grad_norm=self.max_grad_norm,
        )
        validate.positive_integer(releases=self.releases)
        _require_search(self)
        if min(1.0, self.gamma) * self.gradient_rho < SMALLEST_RHO:
            raise InputError(
                f"gradient_rho={self.gradient_rho:.3g} with gamma={self.gamma:g} is not allowed: a gradient would get a "
                f"noise multiplier above {gaussian_noise(SMALLEST_RHO):g}. Use a larger epsilon or gamma, fewer "
                "releases, or a smaller selection_share."
            )

    @property
    def provable(self) -> bool:
        return True

    def event_after(self, releases: int) -> DpEvent:
        """The event of the whole budget, from the first measurement on."""
        self._require_releases(releases)
        return ZCDpEvent(self.rho) if releases else NoOpDpEvent()

    def theorem(self, accountant: str) -> str:
        return (
            "Zero-concentrated differential privacy of noisy gradients and noisy minima under a privacy filter, "
            f"converted by {accountant}: docs/methods-dpagd.md, sections 2 to 4"
        )

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": "Poisson", "rate": max(self.gradient_rate, self.loss_rate)}

    @property
    def fewest_measurements(self) -> int:
        """At least this many are made, unless a crash takes some: the budget covers them on every path.

        n measurements of which r raise the gradient's budget cost most if the raises come early: as much as n - r
        gradients at the last budget, ``(1 + gamma)^r`` times the first, and n selections.
        """
        growth = math.log1p(self.gamma)

        def fits(count: int) -> bool:
            worst = min(max(count - 1 / growth, 0.0), count - 1.0)
            gradients = max(
                raises * growth + math.log(count - raises) for raises in (math.floor(worst), math.ceil(worst))
            )
            left = usable_rho(self.rho) - count * self.selection_rho
            return left > 0 and gradients + math.log(self.gradient_rho) <= math.log(left)

        low, high = 0, self.releases + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def ending_after(self, releases: int) -> str:
        if releases >= self.releases:
            return ""
        return (
            f"the run ended after {releases} measurements: what is left of its budget, rho {self.rho:.4g}, does not "
            "cover the next one."
        )

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        first = self.gradient_rho + self.selection_rho
        return (
            ("budget", f"rho {self.rho:.4g}"),
            (
                "a measurement",
                f"costs rho {first:.3g} at first: gradient {self.gradient_rho:.3g}, selection {self.selection_rho:.3g}",
            ),
            (
                "after no step",
                f"{self.gamma:g} times the gradient's budget is added, and stays: rho "
                f"{self.gamma * self.gradient_rho + self.selection_rho:.3g} for the next measurement",
            ),
            (
                "measurements",
                f"at least {self.fewest_measurements:,}, at most {self.releases:,}; {math.floor(self.rho / first):,} if "
                "each makes a step",
            ),
            ("first noise multiplier", f"{gaussian_noise(self.gradient_rho):.4g}, lower where no step is worth making"),
            ("steps", f"0 and {self.candidates} more, at first up to {self.first_reach:g} long"),
            ("records", f"gradient {100 * self.gradient_rate:g} %, losses {100 * self.loss_rate:g} %; not amplified"),
        )


def _require_search(search: Options | AdaptiveBudget) -> None:
    validate.positive_integer(candidates=search.candidates, refresh_every=search.refresh_every)
    validate.positive(gamma=search.gamma, first_reach=search.first_reach, loss_clip=search.loss_clip)
    validate.non_negative(reach_growth=search.reach_growth)
    for name, most in LARGEST.items():
        if getattr(search, name) > most:
            raise InputError(f"{name}={getattr(search, name)} is not allowed: it must be at most {most:g}.")
    validate.fraction(gradient_rate=search.gradient_rate, loss_rate=search.loss_rate)


# Of the budget, so much is not used: more than all rounding errors in adding up what was spent.
_RESERVE = 2.0**-40


def usable_rho(rho: float) -> float:
    """The part of a budget that measurements may spend."""
    return rho * (1 - _RESERVE)


def gaussian_noise(rho: float) -> float:
    """The noise multiplier at which a Gaussian release costs rho."""
    return 1 / math.sqrt(2 * rho)


def largest_rho(*, epsilon: float, delta: float) -> float:
    """The largest budget rho, nearly, whose epsilon at ``delta`` is at most ``epsilon``, by the sound Renyi accountant.

    Guarantee:
        The accountant was asked for the very number that is returned.
    """

    def fits(rho: float) -> bool:
        return float(create_accountant("rdp").compose(ZCDpEvent(rho)).get_epsilon(delta)) <= epsilon

    low, high = 0.0, 1.0
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
        if high < 1e-12:
            raise InputError(f"epsilon={epsilon} is not allowed: it is too small for any measurement. Raise it.")
    return low


def plan(settings: RunSettings, dataset_size: int) -> AdaptiveBudget:
    """First budgets such that ``releases`` measurements could be made if none had to be raised."""
    if settings.noise_multiplier is not None:
        raise InputError(
            f"noise_multiplier={settings.noise_multiplier} is not allowed for method='dpagd', whose noise follows from "
            "epsilon and releases and is lowered as needed. Leave it out."
        )
    options: Options = settings.own_options
    rho = largest_rho(epsilon=settings.epsilon, delta=settings.delta)
    # A little less than the exact part, so that rounding does not take the last measurement away.
    each = rho / settings.releases * (1 - 1e-9)
    gradient_rho, selection_rho = (1 - options.selection_share) * each, options.selection_share * each
    search = {name: value for name, value in asdict(options).items() if name != "selection_share"}
    return AdaptiveBudget(
        rho=rho,
        gradient_rho=gradient_rho,
        selection_rho=selection_rho,
        max_grad_norm=settings.max_grad_norm,
        dataset_size=dataset_size,
        releases=math.floor(rho / (min(1.0, options.gamma) * gradient_rho + selection_rho)),
        **search,
    )


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """A linear model, which the line search is made for: of scattering coefficients, or of bags of words."""
    if dataset not in RELEASES:
        return small_settings() | {"accountant": "rdp", "releases": 100}
    settings = pixel_settings(dataset, epsilon, activation="tanh", releases=RELEASES) | {"accountant": "rdp"}
    return settings | (_TEXTS if dataset == "imdb" else _IMAGES)


_UNUSED = {
    **dict.fromkeys(
        ("lr", "momentum", "weight_decay", "optimizer", "lr_schedule"), "steps are chosen by the line search"
    ),
    **dict.fromkeys(("scaling", "scaling_bound"), "gradients are clipped to max_grad_norm"),
    "batch_size": "gradients are of all records, or of the share gradient_rate of them",
    "noise_multiplier": "the noise follows from epsilon and releases",
}

METHOD = Method(
    name="dpagd",
    summary="gradient descent with a private line search and an adaptive budget",
    proves="epsilon (RDP, from zCDP), selection included",
    mechanism=AdaptiveBudget,
    plan=plan,
    defaults=defaults,
    options=Options,
    unused=_UNUSED,
    accountants=lambda settings: ("rdp",),
    target=lambda settings: settings.epsilon,
)
