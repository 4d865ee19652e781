"""The numbers of docs/accounting.md that are to be followed with pen and paper, recomputed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm

from sluice.accounting.acceptance import Acceptance
from sluice.accounting.claims import claimed_account
from sluice.accounting.events import SelectiveReleaseDpEvent
from sluice.accounting.selective_rdp import renyi_divergences
from sluice.mechanism.thinning import LARGEST_SHARE, ThinningGate, rate_at

PAGE = (Path(__file__).parents[2] / "docs" / "accounting.md").read_text(encoding="utf-8")
RATE, NOISE, REFERENCE_NOISE = 0.1, 10.0, 50.0
ACCEPTANCE = Acceptance.one_sided(threshold=3.0, clip_bound=2.0, metric_bound=1.0, noise_std=4.0)


def second_moment(ratio: float) -> float:
    growth = math.exp(1 / NOISE**2 + 1 / REFERENCE_NOISE**2)
    return (1 - RATE) ** 2 + 2 * RATE * (1 - RATE) * ratio + (RATE * ratio) ** 2 * growth


def test_every_step_of_the_renyi_example_is_on_the_page():
    ratio = norm.sf(5 / 4) / norm.sf(4 / 4)
    assert ACCEPTANCE.ratio_min == pytest.approx(ratio, rel=1e-12)
    a0, z0 = second_moment(ratio), 1 - RATE + RATE * ratio
    a1, z1 = second_moment(1.0) - a0, RATE * (1 - ratio)
    best = (a1 * z0 - 2 * a0 * z1) / (a1 * z1)
    value = (a0 + a1 * best) / (z0 + z1 * best) ** 2
    for number in (
        f"{ratio:.6f}",
        f"{a0:.9f}",
        f"{a0 + a1:.9f}",
        f"{z0:.9f}",
        f"{z1:.9f}",
        f"{best:.4f}",
        f"{value:.8f}",
    ):
        assert number in PAGE
    for weight in np.linspace(0, 1, 101):
        assert (a0 + a1 * weight) / (z0 + z1 * weight) ** 2 <= value
    event = SelectiveReleaseDpEvent(
        sampling_probability=RATE,
        noise_multiplier=NOISE,
        acceptance=ACCEPTANCE,
        reference_noise_multiplier=REFERENCE_NOISE,
    )
    assert renyi_divergences(event, np.array([2.0]))[0] == pytest.approx(math.log(value), rel=1e-6)
    assert f"{math.log(value):.3e}".replace("e-04", "e-4") in PAGE


def test_the_hockey_stick_example_is_on_the_page():
    mu, k, weight = math.hypot(1 / NOISE, 1 / REFERENCE_NOISE), math.exp(0.05), 0.1385
    low = ACCEPTANCE.ratio_min

    def divergence(weight: float) -> float:
        z = 1 - RATE + RATE * (weight + (1 - weight) * low)
        total = 0.0
        for ratio, share in ((1.0, weight), (low, 1 - weight)):
            u = math.log((k * z - 1 + RATE) / (RATE * ratio)) / mu + mu / 2
            kept = (1 - RATE) * norm.sf(u) + RATE * ratio * norm.sf(u - mu)
            total += share * (kept / z - k * norm.sf(u))
        return total

    largest = max(divergence(other) for other in np.linspace(0, 1, 2001))
    assert divergence(weight) == pytest.approx(largest, rel=1e-6)
    assert f"{largest:.3e}".replace("e-05", "e-5") in PAGE


@pytest.mark.parametrize(
    ("size", "batch", "noise", "releases", "gate_noise"),
    [
        (60000, 1024, 2.0, 2000, 1.0),
        (60000, 1024, 2.0, 2000, 0.6),
        (50000, 2048, 5.67, 553, 2.0),
        (50000, 8192, 9.0, 300, 3.0),
    ],
)
def test_the_claimed_columns_are_on_the_page(size, batch, noise, releases, gate_noise):
    printed, table = (
        claimed_account(
            sample_rate=batch / size, noise_multiplier=noise, gate_noise=gate_noise, reading=reading
        ).claimed_epsilon(releases=releases, delta=1e-5)
        for reading in ("printed", "table")
    )
    assert f"| {printed:.3f} | {table:.3f} |" in PAGE


def test_the_cost_of_giving_up_is_on_the_page():
    given_up = (1 - ACCEPTANCE.probability_min) ** 200
    assert f"{given_up:.1e}" == "2.0e-10"
    assert "`eta = 2.0e-10`" in PAGE


def test_the_thinning_example_digit_for_digit():
    """docs/accounting.md, section 13.6."""
    q, tilts = 0.1, (math.exp(-1), math.exp(-0.5), 1.0)
    sums = [1 - q + q * a for a in tilts]
    assert math.prod(sums) == pytest.approx(0.899928, abs=5e-7)
    rates = [rate_at(q, odds_factor=a) for a in tilts]
    assert rates == pytest.approx([0.039270, 0.063137, 0.1], abs=5e-7)
    assert rates[0] * rates[1] == pytest.approx(0.0024794, abs=5e-8)
    gate = ThinningGate(strength=1.0, small_norm=0.0, large_norm=1.0)
    kept = gate.keep_probability(torch.tensor([1.0, 0.5, 0.0]), sample_rate=q) / LARGEST_SHARE
    assert kept.tolist() == pytest.approx([0.392703, 0.631373, 1.0], abs=5e-7)
    moment = math.exp(0.25) - 1
    assert math.log1p(rates[0] ** 2 * moment) == pytest.approx(4.379e-4, abs=5e-8)
    assert math.log1p(q**2 * moment) == pytest.approx(2.836e-3, abs=5e-7)
    assert replace(gate, strength=-1.0).candidate_rate(q) == pytest.approx(0.231969, abs=5e-7)
