"""Kahane's inequality at work: no adversary in a small world does better than the scalar pair."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sluice.accounting.matrix.bins import BinsPair
from sluice.accounting.matrix.strategy import BandedToeplitz

STRATEGY = BandedToeplitz((1.0, 0.7, 0.4, 0.3))
NOISE, EPSILON, SAMPLES = 1.5, 0.5, 150_000


def adversary_divergences(kind: str) -> tuple[float, float]:
    """Two bins, four steps, gradients in the plane that may depend on the rows before; both divergences, simulated."""
    scale = NOISE * STRATEGY.column_norm(4)
    column = STRATEGY.coefficients(4) / scale
    generator = np.random.default_rng(9)
    deltas = []
    for present in (True, False):
        patterns = np.array([[1, 0, 1, 0], [0, 1, 0, 1]])
        drawn = generator.integers(2, size=SAMPLES)
        gradients = np.zeros((SAMPLES, 4, 2))
        logs = np.zeros((SAMPLES, 2))
        history = np.zeros((SAMPLES, 2))
        for step in range(4):
            angle = {
                "opposed": np.full(SAMPLES, math.pi * (step // 2)),
                "turning": np.full(SAMPLES, 0.8 * step),
                "chasing": np.arctan2(history[:, 1], history[:, 0]),
                "fleeing": np.arctan2(-history[:, 1], -history[:, 0]),
            }[kind]
            gradients[:, step] = np.stack([np.cos(angle), np.sin(angle)], axis=1)
            shifts = np.stack(
                [sum(column[step - j] * pattern[j] * gradients[:, j] for j in range(step + 1)) for pattern in patterns]
            )
            row = generator.normal(size=(SAMPLES, 2))
            if present:
                row = row + shifts[drawn, np.arange(SAMPLES)]
            logs += (np.einsum("kni,ni->kn", shifts, row) - (shifts**2).sum(axis=2) / 2).T
            history += row
        ratio = np.log(np.exp(logs).mean(axis=1))
        deltas.append(np.maximum(0, -np.expm1(EPSILON - ratio if present else EPSILON + ratio)))
    return tuple(float(values.mean()) - 4 * float(values.std()) / math.sqrt(SAMPLES) for values in deltas)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["opposed", "turning", "chasing", "fleeing"])
def test_no_adversary_beats_the_pair(kind: str) -> None:
    pair = BinsPair.of(STRATEGY, steps=4, bins=2, noise_multiplier=NOISE)
    remove, add = adversary_divergences(kind)
    assert remove < pair.estimates("remove", epsilon=EPSILON, samples=100_000, seed=1).mean()
    assert add < pair.estimates("add", epsilon=EPSILON, samples=100_000, seed=1).mean()


def test_larger_entries_only_raise_the_divergences() -> None:
    values = []
    for tail in ((0.0, 0.0, 0.0), (0.7, 0.0, 0.0), (0.7, 0.4, 0.0), (0.7, 0.4, 0.3)):
        strategy = BandedToeplitz((1.0, *tail))
        pair = BinsPair.of(strategy, steps=4, bins=2, noise_multiplier=2.0 / strategy.column_norm(4))
        values.append(
            [pair.estimates(way, epsilon=0.3, samples=50_000, seed=1).mean() for way in ("remove", "add")]  # type: ignore[arg-type]
        )
    assert (np.diff(values, axis=0) > 0).all()
