"""Calibration: the noises that just meet a target epsilon, or the releases that just fit into it.

The criterion. A gate decides by ``clip(R - E) + noise > tau``, and what blurs the decision is the gate's own noise
together with the noise in the published reference R. Their joint standard deviation,

    s^2 = (4 sigma_e)^2 + sr^2 (1 - decay) / (1 + decay)         (in units of the metric bound),

is the *strength* of the gate: it is held at ``4 * relative_gate_noise`` times the gradient noise sigma (1, the default,
is the DPSR-CG paper's sigma_e = sigma). For that strength, the split between gate noise and reference noise is chosen
that lets the *gradient noise* be smallest, with the reference noise between 2.4 and 10.7 sigma for the usual decay of
0.9. A gate noise that is chosen is never so small that the worst batch is accepted with less than 5 %: such a gate
would try for ever. A noise that the user gives is kept; if only the gate noise is given, the reference noise is 5 sigma, which
costs two or three per cent of epsilon.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.rounding import rounded_up
from sluice.accounting import ACCOUNTANTS, create_accountant, dpa
from sluice.accounting.events import SelectiveReleaseDpEvent, as_release, plain_release
from sluice.accounting.gate_calibration import HIGHEST_NOISE, LOWEST_NOISE, GateCalibration
from sluice.accounting.gate_terms import AccountedGate, require_provable
from sluice.accounting.pld_accountant import DEFAULT_TOLERANCE
from sluice.accounting.renyi_conversion import epsilon_and_order
from sluice.accounting.search import Reached, smallest_reaching
from sluice.accounting.selective_rdp import DEFAULT_ORDERS, renyi_divergences

_COARSE = 2e-3
_SLACK = 4e-4
_SPLITS = tuple(math.radians(angle) for angle in (8, 13, 18, 23, 28, 33, 38))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A mechanism that meets its target: ``epsilon <= target_epsilon`` at ``delta`` by the named accountant."""

    sample_rate: float
    noise_multiplier: float
    releases: int
    gate: Any
    prior_releases: tuple[float, ...]
    accountant: str
    epsilon: float
    target_epsilon: float
    delta: float

    @property
    def gate_noise(self) -> float | None:
        return getattr(self.gate, "gate_noise", None)

    @property
    def reference_noise(self) -> float | None:
        return None if self.gate is None else self.gate.reference_noise


def release_event(*, sample_rate: float, noise_multiplier: float, gate: AccountedGate | None) -> dpa.DpEvent:
    """The event of one release with this gate, or of one plain step without. A gate that nothing is proved for is refused."""
    if gate is None:
        return plain_release(sampling_probability=sample_rate, noise_multiplier=noise_multiplier)
    return gated_event(sample_rate=sample_rate, noise_multiplier=noise_multiplier, gate=gate)


def gated_event(*, sample_rate: float, noise_multiplier: float, gate: AccountedGate) -> SelectiveReleaseDpEvent:
    """The event of one release with this gate. A gate that nothing is proved for is refused."""
    require_provable(gate)
    if gate.reference_noise is None:
        raise InputError("gate.reference_noise=None is not allowed here: give a number (or inf), or calibrate first.")
    return SelectiveReleaseDpEvent(
        sampling_probability=sample_rate,
        noise_multiplier=noise_multiplier,
        acceptance=gate.acceptance,
        reference_noise_multiplier=gate.reference_noise,
        max_attempts=gate.max_attempts,
    )


def calibrate(
    *,
    target_epsilon: float,
    target_delta: float,
    releases: int,
    sample_rate: float,
    gate: Any = None,
    prior_releases: Sequence[float] = (),
    relative_gate_noise: float = 1.0,
    accountant: str = "pld",
) -> Calibration:
    """Choose noise multiplier, gate noise and reference noise together for a target epsilon.

    Args:
        target_epsilon, target_delta: what must not be exceeded.
        releases: how many updates will be released.
        sample_rate: q, the probability with which a step draws each record.
        gate: a gate, whose noises are chosen where they are None and kept where they are numbers; None for plain DP-SGD.
        prior_releases: noise multipliers of Gaussian releases made before, which share the budget.
        relative_gate_noise: the strength of the gate that is held fixed (see the module's description).
        accountant: "pld" or "rdp".

    Guarantee:
        The returned mechanism was accounted for after the search, and its epsilon is at most the target.
    """
    validate.positive(target_epsilon=target_epsilon, relative_gate_noise=relative_gate_noise)
    validate.open_fraction(target_delta=target_delta)
    validate.positive_integer(releases=releases)
    validate.fraction(sample_rate=sample_rate)
    validate.one_of(ACCOUNTANTS, accountant=accountant)
    return _calibrate(
        _Task(
            sample_rate=float(sample_rate),
            delta=target_delta,
            prior_releases=_checked(prior_releases),
            accountant=accountant,
        ),
        releases,
        gate,
        float(target_epsilon),
        float(relative_gate_noise),
    )


def solve_releases(
    *,
    target_epsilon: float,
    target_delta: float,
    noise_multiplier: float,
    sample_rate: float,
    gate: Any = None,
    prior_releases: Sequence[float] = (),
    accountant: str = "pld",
    max_releases: int = 10_000_000,
) -> Calibration:
    """The largest number of releases (up to ``max_releases``) that a target epsilon allows, all noises being given.

    Guarantee:
        The returned mechanism's epsilon is at most the target. Below some five thousand releases one more would exceed
        it; beyond, the number is right to 2 parts in 10,000.
    """
    validate.positive(target_epsilon=target_epsilon, noise_multiplier=noise_multiplier)
    validate.open_fraction(target_delta=target_delta)
    validate.positive_integer(max_releases=max_releases)
    validate.fraction(sample_rate=sample_rate)
    validate.one_of(ACCOUNTANTS, accountant=accountant)
    task = _Task(
        sample_rate=float(sample_rate),
        delta=target_delta,
        prior_releases=_checked(prior_releases),
        accountant=accountant,
    )
    return _solve_releases(task, float(noise_multiplier), gate, float(target_epsilon), max_releases)


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What stays fixed during a search."""

    sample_rate: float
    delta: float
    prior_releases: tuple[float, ...]
    accountant: str

    def epsilon(
        self,
        noise_multiplier: float,
        gate: Any,
        releases: int,
        *,
        accountant: str,
        tolerance: float = DEFAULT_TOLERANCE,
    ) -> float:
        fresh = create_accountant(accountant, tolerance=tolerance)
        for multiplier in self.prior_releases:
            fresh.compose(dpa.GaussianDpEvent(multiplier))
        if releases:
            fresh.compose(self.event(noise_multiplier, gate), releases)
        return float(fresh.get_epsilon(self.delta))

    def event(self, noise_multiplier: float, gate: Any) -> dpa.DpEvent:
        return release_event(sample_rate=self.sample_rate, noise_multiplier=noise_multiplier, gate=gate)

    def result(self, noise_multiplier: float, gate: Any, releases: int, target: float) -> Calibration:
        epsilon = self.epsilon(noise_multiplier, gate, releases, accountant=self.accountant)
        if not epsilon <= target:
            raise InputError(
                f"target_epsilon={target} could not be kept: the search ended at epsilon={epsilon}. Please report this."
            )
        return Calibration(
            sample_rate=self.sample_rate,
            noise_multiplier=noise_multiplier,
            releases=releases,
            gate=gate,
            prior_releases=self.prior_releases,
            accountant=self.accountant,
            epsilon=epsilon,
            target_epsilon=target,
            delta=self.delta,
        )


@functools.lru_cache(maxsize=128)
def _calibrate(task: _Task, releases: int, gate: Any, target: float, strength: float) -> Calibration:
    _require_room(task, target)
    guess = max(0.4, task.sample_rate * math.sqrt(2 * releases * math.log(1 / task.delta)) / target)
    shape = GateCalibration.of(gate, strength=strength, split=math.radians(23))

    def search(accountant: str, tolerance: float, slack: float, start: Reached) -> Reached:
        found = smallest_reaching(
            lambda sigma: task.epsilon(sigma, shape.at(sigma), releases, accountant=accountant, tolerance=tolerance),
            target=target,
            guess=start.x,
            slack=slack,
            lowest=LOWEST_NOISE,
            highest=HIGHEST_NOISE,
            slope=start.slope,
        )
        if found is None:
            raise InputError(_unreachable(task, releases, gate, target))
        return found

    rough = 0.03 if shape.is_free or task.accountant == "pld" else 1e-6
    point = search("rdp", DEFAULT_TOLERANCE, rough, Reached(x=guess, slope=1.5))
    if shape.is_free:
        shape = replace(shape, split=_best_split(task, releases, shape, target, point))
        point = search("rdp", DEFAULT_TOLERANCE, 0.03 if task.accountant == "pld" else 1e-6, point)
    if task.accountant == "pld":
        point = search("pld", _COARSE, _COARSE, replace(point, x=0.93 * point.x))
        point = search("pld", DEFAULT_TOLERANCE, _SLACK, point)
    return task.result(point.x, shape.at(point.x), releases, target)


def _best_split(task: _Task, releases: int, shape: GateCalibration, target: float, near: Reached) -> float:
    """The split that needs the least gradient noise, by the Renyi bound at the orders that matter nearby."""
    from sluice.accounting.rdp_accountant import SelectiveRdpAccountant  # its base class loads scipy.special

    accountant = SelectiveRdpAccountant()
    accountant.compose(task.event(near.x, shape.at(near.x)), releases)
    best = DEFAULT_ORDERS.index(accountant.get_epsilon_and_optimal_order(task.delta)[1])
    orders = np.array(DEFAULT_ORDERS[max(0, best - 2) : best + 3])
    fixed = sum((orders / (2 * multiplier**2) for multiplier in task.prior_releases), np.zeros_like(orders))

    def epsilon(candidate: GateCalibration, noise: float) -> float:
        release = as_release(task.event(noise, candidate.at(noise)))
        assert release is not None
        total = releases * renyi_divergences(release, orders) + fixed
        return epsilon_and_order(orders, total, delta=task.delta)[0]

    def needed(split: float) -> float:
        candidate = replace(shape, split=split)
        found = smallest_reaching(
            lambda noise: epsilon(candidate, noise),
            target=target,
            guess=near.x,
            slack=1e-4,
            lowest=LOWEST_NOISE,
            highest=HIGHEST_NOISE,
            slope=near.slope,
        )
        return math.inf if found is None else found.x

    return min(_SPLITS, key=needed)


@functools.lru_cache(maxsize=128)
def _solve_releases(task: _Task, sigma: float, gate: Any, target: float, most: int) -> Calibration:
    _require_room(task, target)

    def fits(accountant: str) -> Callable[[int], bool]:
        return lambda count: task.epsilon(sigma, gate, count, accountant=accountant) <= target

    by_renyi = _largest(fits("rdp"), start=1, most=most)
    count = by_renyi if task.accountant == "rdp" else _largest(fits("pld"), start=max(1, by_renyi), most=most)
    if count == 0:
        least = task.epsilon(sigma, gate, 1, accountant=task.accountant)
        raise InputError(
            f"target_epsilon={target} is not enough for a single release with noise_multiplier={sigma}: one costs "
            f"{rounded_up(least)}. Raise the noise or the target."
        )
    return task.result(sigma, gate, count, target)


def _largest(fits: Callable[[int], bool], *, start: int, most: int) -> int:
    """The largest count that fits, exactly below 5,000 and to 2 parts in 10,000 beyond; 0 if not even 1 does."""
    low, high = 0, most + 1
    probe = min(start, most)
    while low + max(1, int(2e-4 * low)) < high:
        if fits(probe):
            low = probe
        else:
            high = probe
        bounded = high <= most
        if low == 0:
            probe = high // 2
        elif not bounded:
            probe = min(most, max(low + 1, int(low * (1.25 if low == start else 2.0))))
            if low == most:
                break
        else:
            probe = (low + high) // 2
        if probe in (low, high):
            break
    return low


def _require_room(task: _Task, target: float) -> None:
    spent = task.epsilon(1.0, None, 0, accountant=task.accountant)
    if not spent < target:
        raise InputError(
            f"target_epsilon={target} is not allowed: prior_releases={list(task.prior_releases)} alone costs {rounded_up(spent)}. "
            "Raise the target, or the noise multipliers of the prior releases."
        )


def _unreachable(task: _Task, releases: int, gate: Any, target: float) -> str:
    floor = task.epsilon(
        HIGHEST_NOISE, GateCalibration.of(gate, strength=1.0, split=0.5).at(HIGHEST_NOISE), releases, accountant="rdp"
    )
    return (
        f"target_epsilon={target} cannot be reached by gradient noise: with the gate's noises as given, epsilon stays "
        f"above {floor:.4g}. Raise gate_noise (or leave it None, so that calibration chooses it), the target, or lower "
        "the number of releases."
    )


def _checked(prior_releases: Sequence[float]) -> tuple[float, ...]:
    for multiplier in prior_releases:
        validate.positive(prior_releases=multiplier)
    return tuple(float(multiplier) for multiplier in prior_releases)
