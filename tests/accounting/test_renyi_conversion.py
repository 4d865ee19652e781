"""Leaving out orders that cannot be the best one changes no digit of what dp-accounting says of all of them."""

from __future__ import annotations

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.accounting.renyi_conversion import epsilon_and_order
from sluice.accounting.selective_rdp import DEFAULT_ORDERS

ORDERS = (1.005, *DEFAULT_ORDERS)
DELTAS = st.one_of(st.floats(-300, -0.01).map(lambda exponent: 10**exponent), st.just(0.0))
SHAPES = st.tuples(st.floats(-14, 4), st.floats(-1, 3), st.integers(0, 2**32 - 1))


def by_every_order(divergences: np.ndarray, delta: float) -> tuple[float, float]:
    epsilon, order = dp_accounting.rdp.compute_epsilon(list(ORDERS), list(divergences), delta)
    return float(epsilon), float(order)


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
