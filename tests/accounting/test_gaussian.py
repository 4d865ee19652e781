from __future__ import annotations

import math

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.accounting import calibrate, create_accountant, dpa
from sluice.accounting.gaussian import gaussian_delta, gaussian_epsilon


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@given(mu=st.floats(-4, 2).map(lambda x: 10.0**x), log_delta=st.floats(-60, -0.5))
def test_the_closed_form_is_never_undercut_and_hardly_exceeded(mu: float, log_delta: float) -> None:
    delta = 10.0**log_delta
    epsilon = gaussian_epsilon(mu, delta)
    assert exact_delta(mu, epsilon) <= delta
    less = epsilon * (1 - 1e-6) - 1e-9
    if less > 0:
        assert exact_delta(mu, less) > delta
    found = gaussian_delta(mu, epsilon)
    assert exact_delta(mu, epsilon) <= found <= delta


@pytest.mark.parametrize("releases", [1, 40, 150])
@pytest.mark.parametrize("target", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("prior", [(), (25.0, 60.0)])
def test_full_batches_cost_what_one_gaussian_release_costs(
    releases: int, target: float, prior: tuple[float, ...]
) -> None:
    plan = calibrate(target_epsilon=target, target_delta=1e-5, releases=releases, sample_rate=1.0, prior_releases=prior)
    mu = math.sqrt(releases / plan.noise_multiplier**2 + sum(1 / noise**2 for noise in prior))
    assert plan.epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-10)
    assert target * (1 - 1e-3) <= plan.epsilon <= target


def test_what_is_more_than_a_gaussian_is_composed_as_before() -> None:
    accountant = create_accountant("pld")
    accountant.compose(dpa.GaussianDpEvent(10.0), 10)
    alone = accountant.get_epsilon(1e-5)
    accountant.compose(dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(1.0)), 10)
    assert alone == pytest.approx(gaussian_epsilon(1 / math.sqrt(10.0), 1e-5), rel=1e-12)
    assert accountant.get_delta(alone) > 1e-5
    assert accountant.get_epsilon(1e-5) > alone
