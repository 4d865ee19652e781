"""Independent trials: thresholds chosen by some of them, bounds by the others."""

from __future__ import annotations

import numpy as np
import pytest

from sluice._base.errors import InputError
from sluice.audit.bounds import gaussian_fit_mu, trials_p_value
from sluice.audit.curves import Claim, gaussian_curve, gaussian_delta, gaussian_epsilon
from sluice.audit.trials import Trials

DELTA = 1e-5


def trials(*, mu: float, count: int, seed: int, claim: Claim | None = None) -> Trials:
    random = np.random.default_rng(seed)
    members = np.arange(count) % 2 == 0
    return Trials(
        scores=random.standard_normal(count) + mu * members,
        members=members,
        choosing=np.arange(count) < count // 8,
        score="a score",
        kind="trials",
        delta=DELTA,
        claim=claim,
    )


def claim_of(mu: float) -> Claim:
    epsilons = np.linspace(0.0, 2 * gaussian_epsilon(mu, delta=DELTA), 20)
    profile = tuple((float(each), gaussian_delta(float(each), mu=mu)) for each in epsilons)
    return Claim(epsilon=gaussian_epsilon(mu, delta=DELTA), delta=DELTA, profile=profile, proved=True)


def test_eight_thousand_trials_of_a_gaussian_find_nine_tenths_of_it():
    found = [gaussian_fit_mu(**trials(mu=1.0, count=8000, seed=seed).counts("gaussian-fit")) for seed in range(10)]
    assert np.mean(found) == pytest.approx(0.914, abs=0.03)  # by the formula, at the best threshold
    assert max(found) < 1.05


def test_bounds_and_test_keep_their_confidence():
    claim = claim_of(0.5)
    found = [trials(mu=0.5, count=400, seed=seed, claim=claim).result for seed in range(200)]
    allowed = 200 * 0.05 + 3 * np.sqrt(200 * 0.05 * 0.95)
    for number in (0, 1):
        assert sum(each.bounds[number].lower_bound > claim.epsilon for each in found) <= allowed
    assert sum(each.refuted for each in found) <= allowed


def test_a_false_claim_is_refuted():
    found = trials(mu=1.0, count=8000, seed=0, claim=claim_of(0.7)).result
    assert found.refuted
    assert found.p_value < 1e-3
    assert [bound.method for bound in found.bounds] == ["clopper-pearson", "gaussian-fit"]
    assert all(bound.lower_bound <= bound.ceiling for bound in found.bounds)


def test_the_p_value_is_where_the_test_turns():
    counts = {"hits": 400, "with_canary": 500, "alarms": 50, "without": 500}
    p_value = trials_p_value(gaussian_curve(1.8), **counts)
    mu = {beta: gaussian_fit_mu(**counts, confidence=1 - beta) for beta in (p_value * 0.99, p_value * 1.01)}
    assert mu[p_value * 0.99] < 1.8 < mu[p_value * 1.01]
    assert trials_p_value(gaussian_curve(5.0), **counts) == 1.0


@pytest.mark.parametrize("members", [np.zeros(40, dtype=bool), np.ones(40, dtype=bool), np.arange(40) < 5])
def test_trials_of_one_side_alone_are_refused(members):
    with pytest.raises(InputError, match="all with the canary or all without"):
        Trials(
            scores=np.arange(40.0),
            members=members,
            choosing=np.arange(40) < 5,
            score="a score",
            kind="trials",
            delta=DELTA,
        )
