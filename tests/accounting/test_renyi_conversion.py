"""Leaving out orders that cannot be the best one changes no digit of what dp-accounting says of all of them."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.accounting.renyi_conversion import delta_and_order, epsilon_and_order
from sluice.accounting.selective_rdp import DEFAULT_ORDERS

ORDERS = (1.005, *DEFAULT_ORDERS)
DELTAS = st.one_of(st.floats(-300, -0.01).map(lambda exponent: 10**exponent), st.just(0.0))
SHAPES = st.tuples(st.floats(-14, 4), st.floats(-1, 3), st.integers(0, 2**32 - 1))


def by_every_order(divergences: np.ndarray, delta: float) -> tuple[float, float]:
    epsilon, order = dp_accounting.rdp.compute_epsilon(list(ORDERS), list(divergences), delta)
    return float(epsilon), float(order)


@example(shape=(-1.0, -1.0, 0), delta=0.1)  # several orders prove 0
@given(shape=SHAPES, delta=DELTAS)
def test_the_answer_is_that_of_all_orders(shape, delta):
    size, growth, seed = shape
    noise = 1 + 1e-9 * np.random.default_rng(seed).normal(size=len(ORDERS))
    divergences = 10**size * np.array(ORDERS) ** growth * noise
    assert epsilon_and_order(ORDERS, divergences, delta=delta) == by_every_order(divergences, delta)


@given(constant=st.floats(0.1, 50), delta=st.floats(1e-12, 1e-2))
def test_orders_that_are_equally_good_to_rounding_are_told_apart_as_by_dp_accounting(constant, delta):
    orders = np.array(ORDERS)
    divergences = np.maximum(constant - np.log1p(-1 / orders) + np.log(delta * orders) / (orders - 1), 1e-3)
    assert epsilon_and_order(ORDERS, divergences, delta=delta) == by_every_order(divergences, delta)


@pytest.mark.parametrize("divergence", [0.0, -1e-18, 1e-17, np.inf])
@pytest.mark.parametrize("places", [slice(None), slice(0, 1), slice(5, 6), slice(-1, None)])
@pytest.mark.parametrize("delta", [0.0, 1e-9, 1e-5, 0.999])
def test_so_is_that_of_unusual_divergences(divergence, places, delta):
    divergences = 0.1 * np.array(ORDERS)
    divergences[places] = divergence
    assert epsilon_and_order(ORDERS, divergences, delta=delta) == by_every_order(divergences, delta)


def test_what_is_not_a_number_proves_nothing():
    divergences = np.array(ORDERS) * 0.1
    expected = epsilon_and_order(ORDERS, divergences, delta=1e-5)
    broken = divergences.copy()
    broken[[3, 40]] = np.nan
    assert epsilon_and_order(ORDERS, broken, delta=1e-5)[0] >= expected[0]
    assert delta_and_order(ORDERS, broken, epsilon=1.0)[0] >= delta_and_order(ORDERS, divergences, epsilon=1.0)[0] > 0
    assert epsilon_and_order(ORDERS, np.full(len(ORDERS), np.nan), delta=1e-5)[0] == np.inf
    assert delta_and_order(ORDERS, np.full(len(ORDERS), np.nan), epsilon=1.0)[0] == 1.0


def test_divergences_below_the_digits_of_a_double_have_a_delta():
    assert 0 < delta_and_order(ORDERS, np.array(ORDERS) * 1e-20, epsilon=0.0)[0] < 1e-7
    assert delta_and_order(ORDERS, np.zeros(len(ORDERS)), epsilon=0.0)[0] == 0
