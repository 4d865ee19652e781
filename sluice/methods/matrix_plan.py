"""Planning a run with correlated noise: strategy, batches, and the noise that a budget allows."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from sluice import validate
from sluice.accounting.search import smallest_reaching
from sluice.errors import InputError
from sluice.matrix.batches import cyclic_sample_rate
from sluice.matrix.monte_carlo import calibrate_balls_in_bins, monte_carlo_epsilon
from sluice.matrix.optimise import optimise_banded, optimise_blt
from sluice.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.matrix.workload import Workload
from sluice.methods.matrix import MatrixMechanism, MatrixOptions
from sluice.sampling import exact_sample_rate
from sluice.update_rule import learning_rates

if TYPE_CHECKING:
    from sluice.settings import TrainSettings

_UNAMPLIFIED_BANDS = 16


def plan(settings: TrainSettings, dataset_size: int) -> MatrixMechanism:
    """The mechanism with the noise that is given, or calibrated to the budget by the proof of its batches."""
    options: MatrixOptions = settings.own_options
    if settings.scaling != "clip":
        raise InputError(f"scaling={settings.scaling!r} is not allowed for method='matrix': it clips. Use 'clip'.")
    planner = {"cyclic-poisson": _cyclic, "balls-in-bins": _balls_in_bins, "poisson": _poisson}[options.batches]
    return planner(settings, options, dataset_size)


def _cyclic(settings: TrainSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    most = min(dataset_size // settings.batch_size, settings.releases)
    choices = [2**power for power in range(most.bit_length()) if 2**power <= most]
    workload = _workload(settings, options)

    def with_bands(bands: int) -> MatrixMechanism:
        rate = cyclic_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size, groups=bands)
        strategy = optimise_banded(workload, bands=min(bands, settings.releases))

        def mechanism(noise_multiplier: float) -> MatrixMechanism:
            return MatrixMechanism(
                strategy=strategy,
                batches=options.batches,
                groups=bands,
                sample_rate=rate,
                expected_batch_size=rate * dataset_size / bands,
                max_grad_norm=settings.max_grad_norm,
                noise_multiplier=noise_multiplier,
                releases=settings.releases,
            )

        return _calibrated(settings, mechanism)

    if options.bands is not None:
        return with_bands(options.bands)
    if not choices:
        exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)  # says what is wrong
    return min((with_bands(bands) for bands in choices), key=lambda found: _error(found, workload))


def _error(mechanism: MatrixMechanism, workload: Workload) -> float:
    """Root mean squared error of the iterates that the whole noise makes."""
    scale = mechanism.noise_multiplier * mechanism.strategy.column_norm(mechanism.releases)
    return scale * mechanism.strategy.error(workload).mean


def _poisson(settings: TrainSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    rate = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    strategy = _strategy(settings, options, separation=1)

    def mechanism(noise_multiplier: float) -> MatrixMechanism:
        return MatrixMechanism(
            strategy=strategy,
            batches=options.batches,
            groups=1,
            sample_rate=rate,
            expected_batch_size=rate * dataset_size,
            max_grad_norm=settings.max_grad_norm,
            noise_multiplier=noise_multiplier,
            releases=settings.releases,
        )

    return _calibrated(settings, mechanism)


def _balls_in_bins(settings: TrainSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)  # refuses what is too large
    bins = max(1, dataset_size // settings.batch_size)
    strategy = _strategy(settings, options, separation=bins)
    # A seeded run repeats all of its choices; the certificate of any other needs a seed that nobody chose.
    seed = secrets.randbits(63) if settings.seed is None else settings.seed
    if settings.noise_multiplier is None:
        certificate = calibrate_balls_in_bins(
            strategy,
            steps=settings.releases,
            bins=bins,
            epsilon=settings.epsilon,
            delta=settings.delta,
            samples=options.samples,
            seed=seed,
        )
    else:
        certificate = monte_carlo_epsilon(
            strategy,
            steps=settings.releases,
            bins=bins,
            noise_multiplier=settings.noise_multiplier,
            delta=settings.delta,
            samples=options.samples,
            seed=seed,
        )
    return MatrixMechanism(
        strategy=strategy,
        batches=options.batches,
        groups=bins,
        sample_rate=1 / bins,
        expected_batch_size=dataset_size / bins,
        max_grad_norm=settings.max_grad_norm,
        noise_multiplier=certificate.noise_multiplier,
        releases=settings.releases,
        certificate=certificate,
    )


def _strategy(
    settings: TrainSettings, options: MatrixOptions, *, separation: int
) -> BandedToeplitz | BufferedLinearToeplitz:
    workload = _workload(settings, options)
    if options.strategy == "blt":
        return optimise_blt(
            workload,
            buffers=options.buffers,
            participations=math.ceil(settings.releases / separation) if separation > 1 else 1,
            separation=separation,
        )
    bands = options.bands or min(_UNAMPLIFIED_BANDS, settings.releases, max(separation, 2))
    validate.positive_integer(bands=bands)
    return optimise_banded(workload, bands=bands)


def _workload(settings: TrainSettings, options: MatrixOptions) -> Workload:
    if options.workload == "prefix":
        return Workload(steps=settings.releases)
    momentum = settings.momentum if settings.optimizer == "sgd" else 0.0
    return Workload(steps=settings.releases, momentum=momentum, learning_rates=learning_rates(settings))


def _calibrated(settings: TrainSettings, mechanism: Callable[[float], MatrixMechanism]) -> MatrixMechanism:
    if settings.noise_multiplier is not None:
        return mechanism(settings.noise_multiplier)

    def cost(noise_multiplier: float) -> float:
        accountant = settings.accountant if mechanism(1.0).composable else "pld"
        return mechanism(noise_multiplier).epsilon_after(settings.releases, delta=settings.delta, accountant=accountant)

    found = smallest_reaching(cost, target=settings.epsilon, guess=2.0, slack=1e-3, lowest=0.2, highest=1e4)
    if found is None:
        raise InputError(
            f"epsilon={settings.epsilon} cannot be reached with releases={settings.releases}: use fewer releases, a "
            "smaller batch or a larger epsilon."
        )
    return mechanism(found.x)
