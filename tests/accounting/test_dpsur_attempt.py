from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import dp_accounting as dpa
import numpy as np
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from sluice.accounting import dpsur_attempt as dpsur_attempt_module
from sluice.accounting.dpsur import Dpsur, DpsurAttemptDpEvent
from sluice.accounting.dpsur_attempt import attempt_bound, attempt_losses, attempt_renyi
from sluice.accounting.loss_distribution import DIRECTIONS, Direction
from sluice.accounting.pld_accountant import SelectivePLDAccountant
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant

MNIST = Dpsur(sample_rate=1024 / 60000, noise_multiplier=2.0, validation_rate=256 / 60000, validation_noise=1.3)
EPSILONS = np.array([-1.0, -0.2, -0.02, -0.001, 0.0, 0.001, 0.01, 0.1, 0.3, 1.0, 2.0])
ORDERS = np.array([1.5, 2.0, 4.0, 8.0, 20.0])


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The law of one attempt without and with z: masses of accepted candidates on a grid, and of "rejected"."""

    step: np.ndarray
    step_with: np.ndarray
    acceptance: np.ndarray
    acceptance_with: np.ndarray

    @property
    def laws(self) -> tuple[np.ndarray, np.ndarray]:
        kept, kept_with = self.step * self.acceptance, self.step_with * self.acceptance_with
        return np.append(kept, 1 - kept.sum()), np.append(kept_with, 1 - kept_with.sum())

    @property
    def laws_with_rejected_candidates(self) -> tuple[np.ndarray, np.ndarray]:
        refused, refused_with = self.step * (1 - self.acceptance), self.step_with * (1 - self.acceptance_with)
        return (
            np.append(self.step * self.acceptance, refused),
            np.append(self.step_with * self.acceptance_with, refused_with),
        )


def hockey_stick(laws: tuple[np.ndarray, np.ndarray], direction: Direction, epsilon: float) -> float:
    without, with_record = laws
    first, second = (with_record, without) if direction == "remove" else (without, with_record)
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def weights_of(mechanism: Dpsur, others: int = 0, points: int = 4001) -> np.ndarray:
    reach = others + 1 + 10 * mechanism.noise_multiplier
    return np.linspace(-reach, reach, points)


def masses(density: np.ndarray) -> np.ndarray:
    return density / density.sum()


def acceptance_of(mechanism: Dpsur, change: np.ndarray) -> np.ndarray:
    return norm.cdf((mechanism.beta - change) / (2 * mechanism.validation_noise))


def random_mechanism(rng: np.random.Generator) -> Dpsur:
    return Dpsur(
        sample_rate=float(rng.choice([0.02, 0.1, 0.3, 0.9, 1.0])),
        noise_multiplier=float(rng.choice([0.5, 1.0, 2.0, 5.0])),
        validation_rate=float(rng.choice([0.01, 0.1, 0.5, 1.0])),
        validation_noise=float(rng.choice([0.5, 1.0, 1.3, 3.0])),
        beta=float(rng.choice([-1.0, 0.0, 1.0])),
    )


def enumerated_attempt(mechanism: Dpsur, rng: np.random.Generator) -> Attempt:
    """Three other records, all of their batches, and loss changes of an adversary's choice for every validation batch."""
    weights, width, rate = weights_of(mechanism, 3), mechanism.noise_multiplier, mechanism.sample_rate
    gradients, moved = rng.choice([-1.0, 0.0, 1.0], 3), float(rng.choice([-1.0, 1.0]))

    def loss_change() -> np.ndarray:
        left, right = np.sort(rng.normal(size=2) * 2 * width)
        shapes = (
            np.where(weights > left, 1.0, -1.0),
            np.clip(rng.normal() + rng.normal() * weights, -1, 1),
            np.where((weights > left) & (weights < right), 1.0, -1.0),
        )
        return shapes[rng.integers(3)] * rng.choice([-1.0, 1.0])

    step, moved_step = np.zeros_like(weights), np.zeros_like(weights)
    accepted, accepted_with, usual = np.zeros_like(weights), np.zeros_like(weights), loss_change()
    for batch in itertools.product([0, 1], repeat=3):
        probability = math.prod(rate if drawn else 1 - rate for drawn in batch)
        mean = float(np.dot(batch, gradients))
        step += probability * norm.pdf(weights, mean, width)
        moved_step += probability * norm.pdf(weights, mean + moved, width)
        tested = mechanism.validation_rate
        probability = math.prod(tested if drawn else 1 - tested for drawn in batch)
        before = usual if rng.random() < 0.6 else loss_change()
        after = (before, -before, loss_change())[rng.integers(3)]
        accepted += probability * acceptance_of(mechanism, before)
        accepted_with += probability * (
            (1 - tested) * acceptance_of(mechanism, before) + tested * acceptance_of(mechanism, after)
        )
    return Attempt(
        step=masses(step),
        step_with=(1 - rate) * masses(step) + rate * masses(moved_step),
        acceptance=accepted,
        acceptance_with=accepted_with,
    )


def worst_attempt(mechanism: Dpsur, direction: Direction, epsilon: float, *, bets_on_rejection: bool) -> Attempt:
    """What the proof says is the worst: acceptance turns where the density ratio crosses a limit."""
    weights, rate, tested = weights_of(mechanism), mechanism.sample_rate, mechanism.validation_rate
    step = masses(norm.pdf(weights, 0, mechanism.noise_multiplier))
    step_with = (1 - rate) * step + rate * masses(norm.pdf(weights, 1, mechanism.noise_multiplier))
    k = math.exp(epsilon if direction == "remove" else -epsilon)
    is_large = (1 - tested) * step_with > k * step
    likes_large = (direction == "remove") != bets_on_rejection
    low, high = (acceptance_of(mechanism, np.array(change)) for change in (1.0, -1.0))
    accepted = np.where(is_large == likes_large, high, low)
    with_record = (1 - tested) * accepted + tested * (high if likes_large else low)
    return Attempt(step=step, step_with=step_with, acceptance=accepted, acceptance_with=with_record)


def test_no_enumerated_attempt_exceeds_the_bound():
    rng = np.random.default_rng(11)
    above_step = 0
    for _ in range(60):
        mechanism = random_mechanism(rng)
        attempt = enumerated_attempt(mechanism, rng)
        blind = replace(mechanism, validation_noise=1e6)
        for direction in DIRECTIONS:
            bounds = attempt_bound(mechanism, direction, EPSILONS)
            step_alone = attempt_bound(blind, direction, EPSILONS)
            for epsilon, bound, unaware in zip(EPSILONS, bounds, step_alone, strict=True):
                exact = hockey_stick(attempt.laws, direction, epsilon)
                assert exact <= bound + 1e-9
                above_step += exact > unaware + 1e-6
        exact_renyi = [renyi(attempt.laws_with_rejected_candidates, order) for order in ORDERS]
        assert np.all(exact_renyi <= attempt_renyi(mechanism, ORDERS) + 1e-6)
    # The negative control: an account that takes the decision for a fair coin is exceeded by many of the same cases.
    assert above_step > 300


def renyi(laws: tuple[np.ndarray, np.ndarray], order: float) -> float:
    log_p, log_q = (np.log(np.maximum(law, 1e-300)) for law in laws)
    moments = (logsumexp(order * log_q + (1 - order) * log_p), logsumexp(order * log_p + (1 - order) * log_q))
    return float(max(moments)) / (order - 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("epsilon", [-0.5, -0.01, 0.0, 0.01, 0.1, 0.5])
def test_the_bound_is_attained_by_the_worst_attempt(direction, epsilon):
    rng = np.random.default_rng(12)
    for _ in range(20):
        mechanism = random_mechanism(rng)
        exact = max(
            hockey_stick(worst_attempt(mechanism, direction, epsilon, bets_on_rejection=bet).laws, direction, epsilon)
            for bet in (False, True)
        )
        bound = float(attempt_bound(mechanism, direction, np.array([epsilon]))[0])
        assert exact == pytest.approx(bound, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_grid_never_lowers_the_curve(direction):
    rng = np.random.default_rng(13)
    for _ in range(20):
        mechanism = random_mechanism(rng)
        losses = attempt_losses(mechanism, direction, spacing=0.01, upper_tail=1e-12)
        assert losses.masses.sum() + losses.infinity == pytest.approx(1.0, abs=1e-9)
        at = (losses.first + np.arange(len(losses.masses))) * losses.spacing
        for epsilon in EPSILONS:
            weights = np.where(at > epsilon, -np.expm1(np.minimum(epsilon - at, 0.0)), 0.0)
            rounded = losses.infinity + float(weights @ losses.masses)
            bound = float(attempt_bound(mechanism, direction, np.array([epsilon]))[0])
            assert bound - 1e-12 <= rounded <= bound + 0.01


def sequence_laws(first: Attempt, second: Sequence[Attempt], *, max_attempts: int) -> tuple[np.ndarray, np.ndarray]:
    """All that a run of two releases shows: no candidate, one, or two; what the second is tested by depends on the first."""
    laws = []
    for index in (0, 1):
        *kept, rejected = first.laws[index]
        none = [rejected**max_attempts]
        parts = [np.array(none)]
        for position, mass in enumerate(kept):
            *later, rejected_later = second[position].laws[index]
            waits = range(1, max_attempts + 1)
            gave_up = sum(rejected ** (wait - 1) * rejected_later ** (max_attempts - wait) for wait in waits)
            both = sum(
                rejected ** (wait - 1) * rejected_later ** (more - 1)
                for wait in waits
                for more in range(1, max_attempts - wait + 1)
            )
            parts += [np.array([mass * gave_up]), mass * both * np.array(later)]
        laws.append(np.concatenate(parts))
    return laws[0], laws[1]


@pytest.mark.parametrize("max_attempts", [2, 3, 6])
def test_a_capped_run_costs_no_more_than_all_of_its_attempts(max_attempts):
    mechanism = Dpsur(sample_rate=0.3, noise_multiplier=1.0, validation_rate=0.3, validation_noise=0.6)

    def attempt(direction: Direction, epsilon: float, bets_on_rejection: bool) -> Attempt:
        full = worst_attempt(mechanism, direction, epsilon, bets_on_rejection=bets_on_rejection)
        every = slice(None, None, 40)  # for sums of Gaussians still exact to many digits
        step, step_with = masses(full.step[every]), masses(full.step_with[every])
        return Attempt(
            step=step,
            step_with=step_with,
            acceptance=full.acceptance[every],
            acceptance_with=full.acceptance_with[every],
        )

    charged, per_release = SelectivePLDAccountant(), SelectivePLDAccountant()
    charged.compose(DpsurAttemptDpEvent(attempt=mechanism), max_attempts)
    per_release.compose(dpa.ComposedDpEvent([mechanism.step_event, mechanism.test_event]), 1)
    epsilons = (0.0, 0.1, 0.3, 0.8, 1.5)
    bounds, too_small = ([account.get_delta(epsilon) for epsilon in epsilons] for account in (charged, per_release))
    closest, above = 0.0, 0
    for direction, tuned, bet in itertools.product(DIRECTIONS, (0.0, 0.3, 0.8), (False, True)):
        first = attempt(direction, tuned, bet)
        choices = [attempt(direction, tuned, choice) for choice in (False, True)]
        second = [choices[position > len(first.step) // 2] for position in range(len(first.step))]
        laws = sequence_laws(first, second, max_attempts=max_attempts)
        assert laws[0].sum() == pytest.approx(1.0)
        for epsilon, bound, unpaid in zip(epsilons, bounds, too_small, strict=True):
            exact = hockey_stick(laws, direction, epsilon)
            assert exact <= bound * (1 + 1e-6)
            closest = max(closest, exact / bound)
            above += exact > unpaid
    assert closest > 0.5, "the cases are too tame to test anything"
    # The negative control: charging fewer attempts than were made is not enough.
    assert above > 0


def test_both_accountants_read_attempts_and_the_sharp_one_is_smaller():
    event = DpsurAttemptDpEvent(attempt=MNIST)
    sharp, renyi_bound, plain = SelectivePLDAccountant(), SelectiveRdpAccountant(), SelectivePLDAccountant()
    for accountant in (sharp, renyi_bound):
        accountant.compose(event, 800)
    plain.compose(dpa.ComposedDpEvent([MNIST.step_event, MNIST.test_event]), 800)
    assert sharp.get_epsilon(1e-5) < 0.85 * plain.get_epsilon(1e-5)
    assert sharp.get_epsilon(1e-5) < renyi_bound.get_epsilon(1e-5)
    assert sharp.get_delta(sharp.get_epsilon(1e-5)) == pytest.approx(1e-5, rel=0.01)


def test_a_decision_that_ignores_the_data_is_the_plain_step_made_less_often():
    """Acceptance by a coin: the account is that of a step whose result is shown half of the time."""
    coin = replace(MNIST, validation_noise=1e7)
    charged, plain = SelectivePLDAccountant(), SelectivePLDAccountant()
    charged.compose(DpsurAttemptDpEvent(attempt=coin), 1000)
    plain.compose(MNIST.step_event, 500)
    assert charged.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"validation_noise": 0.01},
        {"validation_noise": 1e-8},
        {"beta": -50.0},
        {"beta": 50.0},
        {"validation_rate": 1.0},
        {"sample_rate": 1.0},
        {"noise_multiplier": 0.05},
    ],
)
def test_extreme_attempts_get_a_number_and_no_traceback(change):
    accountant = SelectivePLDAccountant()
    accountant.compose(DpsurAttemptDpEvent(attempt=replace(MNIST, **change)), 100)
    assert accountant.get_epsilon(1e-5) >= 0


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_little_noise_in_the_test_does_not_take_a_grid_of_millions_of_points(epsilon, monkeypatch):
    sizes = []
    original = dpsur_attempt_module.dominating_losses

    def measured(bounds, **grid):
        sizes.append(len(bounds))
        return original(bounds, **grid)

    monkeypatch.setattr(dpsur_attempt_module, "dominating_losses", measured)
    attempt = Dpsur(sample_rate=0.01, noise_multiplier=1.0, validation_rate=0.01, validation_noise=0.05)
    delta = SelectivePLDAccountant().compose(DpsurAttemptDpEvent(attempt=attempt), 100).get_delta(epsilon)
    assert delta == pytest.approx(0.447, abs=2e-3)
    assert max(sizes) < 1.1 * 2**20
