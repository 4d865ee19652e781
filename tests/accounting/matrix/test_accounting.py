from __future__ import annotations

import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy.special import ndtr

from sluice._base.errors import InputError
from sluice._base.grids import RELEASE_GRID, release_grid
from sluice.accounting import create_accountant
from sluice.accounting.matrix.accounting import accounted_coefficients, banded_event, unamplified_event
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import BandedToeplitz, identity
from sluice.accounting.matrix.workload import prefix_sums

BANDED = optimise_banded(prefix_sums(32), bands=4)


def delta_of(event: dpa.DpEvent, epsilon: float, *, accountant: str = "pld") -> float:
    return float(create_accountant(accountant).compose(event).get_delta(epsilon))


def sampled_divergence(rate: float, shift: float, epsilon: float) -> float:
    """The larger divergence of one Poisson-sampled Gaussian: the record being there against not."""
    edge = math.log((math.exp(epsilon) - 1 + rate) / rate) / shift + shift / 2
    return float((1 - rate) * ndtr(-edge) + rate * ndtr(shift - edge) - math.exp(epsilon) * ndtr(-edge))


def test_one_turn_of_the_groups_is_one_sampled_release() -> None:
    event = banded_event(BANDED, steps=4, groups=4, sample_rate=0.2, noise_multiplier=1.5)
    shift = float(np.linalg.norm(accounted_coefficients(BANDED, steps=4, noise_multiplier=1.5)))
    for epsilon in (0.1, 0.5, 1.0):
        exact = sampled_divergence(0.2, shift, epsilon)
        assert exact <= delta_of(event, epsilon) <= 1.002 * exact


def test_the_bound_holds_for_the_true_mechanism_of_two_steps_and_two_groups() -> None:
    """Integrated over the plane of the two released rows, the group of the record being random."""
    strategy, rate, epsilon = BandedToeplitz((1.0, 0.8)), 0.4, 0.3
    a, b = accounted_coefficients(strategy, steps=2, noise_multiplier=1.2)
    axis = np.linspace(-8, 9, 1701)
    x, y = np.meshgrid(axis, axis, indexing="ij")

    def density(shift_x: float, shift_y: float) -> np.ndarray:
        return np.exp(-((x - shift_x) ** 2 + (y - shift_y) ** 2) / 2) / (2 * np.pi)

    without = density(0, 0)
    with_record = (1 - rate) * without + rate / 2 * (density(a, b) + density(0, a))
    cell = (axis[1] - axis[0]) ** 2
    remove = np.maximum(with_record - math.exp(epsilon) * without, 0).sum() * cell
    add = np.maximum(without - math.exp(epsilon) * with_record, 0).sum() * cell
    stated = delta_of(banded_event(strategy, steps=2, groups=2, sample_rate=rate, noise_multiplier=1.2), epsilon)
    assert max(remove, add) <= stated
    # Without the later diagonals of the column the same figure would be too small: they must count.
    known_group = sampled_divergence(rate, float(np.hypot(a, b)), epsilon)
    forgotten = delta_of(banded_event(identity(), steps=1, groups=1, sample_rate=rate, noise_multiplier=1 / a), epsilon)
    assert forgotten < 0.6 * known_group <= 0.6 * stated


def test_releases_are_counted_by_turns_and_rounded_up() -> None:
    for steps, turns in ((8, 2), (9, 3), (1, 1)):
        event = banded_event(BANDED, steps=steps, groups=4, sample_rate=0.1, noise_multiplier=1.0)
        assert isinstance(event, dpa.SelfComposedDpEvent)
        assert event.count == turns


def test_a_run_does_not_show_more_rows_than_its_noise_was_planned_for() -> None:
    with pytest.raises(InputError, match="shown=9 is not allowed: it must be at most steps=8"):
        banded_event(BANDED, steps=8, shown=9, groups=4, sample_rate=0.1, noise_multiplier=1.0)


def test_one_band_is_plain_dp_sgd() -> None:
    event = banded_event(identity(), steps=50, groups=1, sample_rate=0.1, noise_multiplier=1.3)
    plain = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(1.3)), 50)
    for accountant in ("pld", "rdp"):
        assert delta_of(event, 2.0, accountant=accountant) == pytest.approx(
            delta_of(plain, 2.0, accountant=accountant), rel=1e-6
        )


@pytest.mark.parametrize("noise_multiplier", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("entries", [1, 3, 1000, 1_000_000])
def test_the_grid_of_releases_is_paid_for(noise_multiplier: float, entries: int) -> None:
    for strategy in (BANDED, optimise_blt(prefix_sums(32), buffers=2)):
        sensitivity = 2.0 * strategy.column_norm(32)
        step, std = release_grid(noise_multiplier=noise_multiplier, sensitivity=sensitivity, entries=entries)
        bands = strategy.bands or 32
        farthest = (2.0 * strategy.coefficients(32)[:bands] + step * math.sqrt(entries)) / std
        accounted = accounted_coefficients(strategy, steps=32, noise_multiplier=noise_multiplier)
        assert (farthest <= accounted[:bands] * (1 + 1e-12)).all()
        assert (accounted[bands:] == 0).all()
        assert accounted.max() <= (1 + 2 * RELEASE_GRID * noise_multiplier) / noise_multiplier


def test_without_amplification_the_worst_pattern_counts() -> None:
    strategy = optimise_blt(prefix_sums(40), buffers=2, participations=4, separation=10)
    event = unamplified_event(strategy, steps=40, participations=4, separation=10, noise_multiplier=2.0)
    ratio = strategy.sensitivity(steps=40, participations=4, separation=10) / strategy.column_norm(40)
    assert isinstance(event, dpa.GaussianDpEvent)
    assert event.noise_multiplier == pytest.approx(2.0 / ratio, rel=1e-3)
    assert event.noise_multiplier <= 2.0 / ratio


def test_schemes_without_a_proof_are_refused() -> None:
    blt = optimise_blt(prefix_sums(32), buffers=2)
    with pytest.raises(InputError, match="no amplification is proved"):
        banded_event(blt, steps=32, groups=8, sample_rate=0.1, noise_multiplier=1.0)
    with pytest.raises(InputError, match="groups=3 is not allowed with a strategy of 4 bands"):
        banded_event(BANDED, steps=32, groups=3, sample_rate=0.1, noise_multiplier=1.0)
    with pytest.raises(InputError, match="separation=2"):
        unamplified_event(
            BandedToeplitz((1.0, -0.2, 0.5)), steps=9, participations=2, separation=2, noise_multiplier=1.0
        )
