from __future__ import annotations

import dp_accounting as dpa
import pytest
from dp_accounting import rdp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from sluice._base.errors import InputError
from sluice.accounting import claims as paper
from sluice.accounting.claims import (
    CLASSICAL_ORDERS,
    ClaimedAccount,
    claimed_account,
    claimed_inflation,
    claimed_sample_rate,
    feature_statistics_event,
    paper_batch_size,
    tail_ratio,
)

FIRST_ROW = {"sample_rate": 1024 / 60000, "noise_multiplier": 2.0, "releases": 2000, "delta": 1e-5}


def claimed_epsilon(*, releases, delta, **numbers):
    return claimed_account(**numbers).claimed_epsilon(releases=releases, delta=delta)


def test_the_orders_are_the_classical_ones():
    assert len(CLASSICAL_ORDERS) == 99 + 53 + 3
    assert CLASSICAL_ORDERS[0] == pytest.approx(1.1)
    assert CLASSICAL_ORDERS[98] == pytest.approx(10.9)
    assert CLASSICAL_ORDERS[99:] == (*range(11, 64), 128, 256, 512)


@pytest.mark.parametrize(
    ("sigma", "rho"),
    [
        (1.35, 1.2944),
        (1.5, 1.2479),
        (1.8, 1.1869),
        (2.15, 1.1442),
        (2.5, 1.1168),
        (3.0, 1.0915),
        (3.5, 1.0751),
        (4.0, 1.0635),
        (5.67, 1.0418),
    ],
)
def test_inflation_of_the_table_reading(sigma, rho):
    assert claimed_inflation(gate_noise=sigma, reading="table") == pytest.approx(rho, abs=5e-5)


@pytest.mark.parametrize(
    ("sigma", "rho"), [(1.026, 1.29), (1.176, 1.24), (1.462, 1.18), (2.181, 1.11), (3.227, 1.07), (5.373, 1.04)]
)
def test_inflation_of_the_printed_reading(sigma, rho):
    assert claimed_inflation(gate_noise=sigma, reading="printed") == pytest.approx(rho, abs=2e-4)
    expected = norm.sf(1 / (4 * sigma)) / norm.sf(2 / (4 * sigma))
    assert claimed_inflation(gate_noise=sigma, reading="printed") == pytest.approx(expected, rel=1e-12)


def test_the_printed_reading_forgets_the_threshold_and_the_other_does_not():
    printed = {claimed_inflation(gate_noise=1.0, beta=beta, reading="printed") for beta in (0.0, 2.0, 3.0)}
    table = [claimed_inflation(gate_noise=1.0, beta=beta, reading="table") for beta in (0.0, 2.0, 3.0)]
    assert len(printed) == 1
    assert table == sorted(table)
    assert table[0] == pytest.approx(printed.pop())
    assert table[2] > table[0]


def test_inflation_charged_like_dpsur():
    charged_alike = {
        1.35: 2.41,
        1.5: 2.14,
        1.8: 1.83,
        2.15: 1.62,
        2.5: 1.49,
        3.0: 1.38,
        3.5: 1.31,
        4.0: 1.26,
        5.67: 1.17,
    }
    for sigma, rho in charged_alike.items():
        assert tail_ratio(farthest=5, shift=4, noise_std=4 * sigma) == pytest.approx(rho, abs=5e-3)


def test_far_tails_do_not_underflow():
    assert tail_ratio(farthest=200.0, shift=1.0, noise_std=4.0) == pytest.approx(2.7e5, rel=0.05)


def test_the_rate_is_capped_at_one():
    assert claimed_sample_rate(sample_rate=0.5, inflation=4.0) == 1.0
    assert claimed_sample_rate(sample_rate=0.1, inflation=1.5) == pytest.approx(0.15)


def test_epsilon_is_the_sampled_gaussian_at_the_inflated_rate():
    rate = FIRST_ROW["sample_rate"] * claimed_inflation(gate_noise=1.0, reading="printed")
    accountant = rdp.RdpAccountant(list(CLASSICAL_ORDERS))
    accountant.compose(dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(2.0)), 2000)
    assert claimed_epsilon(**FIRST_ROW, gate_noise=1.0) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)


@pytest.mark.parametrize(
    ("gate_noise", "reading", "epsilon"),
    [(1.0, "printed", 2.368), (0.6, "printed", 3.134), (1.0, "table", 2.778), (0.6, "table", 5.091)],
)
def test_claimed_epsilon_of_two_settings(gate_noise, reading, epsilon):
    assert claimed_epsilon(**FIRST_ROW, gate_noise=gate_noise, reading=reading) == pytest.approx(epsilon, abs=5e-4)


def test_conversion_of_the_feature_statistics_alone():
    account = ClaimedAccount(update=feature_statistics_event())
    assert account.claimed_epsilon(releases=1, delta=1e-5) == pytest.approx(0.695, abs=5e-4)


@settings(max_examples=25)
@given(
    sample_rate=st.floats(1e-3, 0.2),
    noise_multiplier=st.floats(0.7, 10.0),
    target_epsilon=st.floats(0.3, 8.0),
    gate_noise=st.floats(0.6, 6.0),
    statistics=st.booleans(),
)
def test_releases_spend_the_budget_and_not_more(sample_rate, noise_multiplier, target_epsilon, gate_noise, statistics):
    once = feature_statistics_event() if statistics else None
    account = claimed_account(
        sample_rate=sample_rate, noise_multiplier=noise_multiplier, gate_noise=gate_noise, once=once
    )
    count = account.claimed_releases(target_epsilon=target_epsilon, delta=1e-5)
    if count:
        assert account.claimed_epsilon(releases=count, delta=1e-5) <= target_epsilon
    assert account.claimed_epsilon(releases=count + 1, delta=1e-5) > target_epsilon
    assert account.claimed_updates_performed(target_epsilon=target_epsilon, delta=1e-5) == count + 1


def test_batch_size_of_the_papers_code():
    assert paper_batch_size(batch_size=1024, inflation=claimed_inflation(gate_noise=2.5, reading="table")) == 916


@pytest.mark.parametrize(
    "change",
    [
        {"sample_rate": 0.0},
        {"sample_rate": 1.5},
        {"noise_multiplier": 0.0},
        {"releases": 0},
        {"releases": 2.5},
        {"delta": 1.0},
        {"gate_noise": -1.0},
        {"beta": float("nan")},
        {"clip_range": 0.0},
        {"reading": "both"},
    ],
)
def test_bad_input_is_named(change):
    arguments = FIRST_ROW | {"gate_noise": 1.0} | change
    with pytest.raises(InputError, match=next(iter(change))):
        claimed_epsilon(**arguments)


def test_every_public_result_says_claimed():
    assert "claimed" in paper.CLAIMED_LABEL
    assert "not a guarantee" in (ClaimedAccount.claimed_epsilon.__doc__ or "")
