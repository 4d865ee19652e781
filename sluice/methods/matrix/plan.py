"""Planning a run with correlated noise: strategy, batches, and the noise that a budget allows."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import replace

from sluice._base.errors import InputError
from sluice.accounting.matrix.monte_carlo import calibrate_balls_in_bins, monte_carlo_epsilon
from sluice.accounting.matrix.optimise import optimise_banded, optimise_blt
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.accounting.matrix.workload import Workload
from sluice.accounting.search import smallest_reaching
from sluice.mechanism.rates import cyclic_sample_rate, exact_sample_rate
from sluice.methods.base import RunSettings
from sluice.methods.matrix import MatrixMechanism, MatrixOptions

_MOST_BANDS = 16
_FIRST_GUESS = 2.0


def plan(settings: RunSettings, dataset_size: int) -> MatrixMechanism:
    """The mechanism with the noise that is given, or calibrated to the budget by the proof of its batches."""
    options: MatrixOptions = settings.own_options
    if settings.scaling != "clip":
        raise InputError(f"scaling={settings.scaling!r} is not allowed for method='matrix': it clips. Use 'clip'.")
    planner = {"cyclic-poisson": _cyclic, "balls-in-bins": _balls_in_bins, "poisson": _poisson}[options.batches]
    return planner(settings, options, dataset_size)


def _cyclic(settings: RunSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)  # refuses what is too large
    workload = _workload(settings, options)

    def with_bands(bands: int) -> MatrixMechanism:
        rate = cyclic_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size, groups=bands)
        strategy = optimise_banded(workload, bands=min(bands, settings.releases))
        return _calibrated(
            settings,
            MatrixMechanism(
                strategy=strategy,
                batches=options.batches,
                groups=bands,
                sample_rate=rate,
                expected_batch_size=rate * dataset_size / bands,
                max_grad_norm=settings.max_grad_norm,
                noise_multiplier=_FIRST_GUESS,
                releases=settings.releases,
            ),
        )

    return _least_error(with_bands, options, workload, most=dataset_size // settings.batch_size)


def _poisson(settings: RunSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    rate = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    workload = _workload(settings, options)

    def with_strategy(strategy: BandedToeplitz | BufferedLinearToeplitz) -> MatrixMechanism:
        return _calibrated(
            settings,
            MatrixMechanism(
                strategy=strategy,
                batches=options.batches,
                groups=1,
                sample_rate=rate,
                expected_batch_size=rate * dataset_size,
                max_grad_norm=settings.max_grad_norm,
                noise_multiplier=_FIRST_GUESS,
                releases=settings.releases,
            ),
        )

    if options.strategy == "blt":
        return with_strategy(optimise_blt(workload, buffers=options.buffers))
    return _least_error(
        lambda bands: with_strategy(optimise_banded(workload, bands=bands)), options, workload, most=_MOST_BANDS
    )


def _least_error(
    with_bands: Callable[[int], MatrixMechanism], options: MatrixOptions, workload: Workload, *, most: int
) -> MatrixMechanism:
    """With the bands that are asked for, or with the power of two up to ``most`` that has the least error.

    Amplification favours few bands. One is among the choices, so the error is never above that of plain DP-SGD.
    """
    if options.bands is not None:
        return with_bands(options.bands)
    choices = [2**power for power in range(min(most, workload.steps).bit_length())]
    return min((with_bands(bands) for bands in choices), key=lambda found: _error(found, workload))


def _error(mechanism: MatrixMechanism, workload: Workload) -> float:
    """Root mean squared error of the iterates that the whole noise makes."""
    scale = mechanism.noise_multiplier * mechanism.strategy.column_norm(mechanism.releases)
    return scale * mechanism.strategy.error(workload).mean


def _balls_in_bins(settings: RunSettings, options: MatrixOptions, dataset_size: int) -> MatrixMechanism:
    exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)  # refuses what is too large
    bins = dataset_size // settings.batch_size
    if settings.releases < bins:
        raise InputError(
            f"releases={settings.releases} is not allowed with batch_size={settings.batch_size} and "
            f"batches='balls-in-bins': an epoch has {bins} batches, some of which would never be used. Use at least "
            f"{bins} releases, or larger batches."
        )
    strategy = _strategy(settings, options, bins=bins)
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


def _strategy(settings: RunSettings, options: MatrixOptions, *, bins: int) -> BandedToeplitz | BufferedLinearToeplitz:
    workload = _workload(settings, options)
    if options.strategy == "blt":
        return optimise_blt(
            workload,
            buffers=options.buffers,
            participations=math.ceil(settings.releases / bins),
            separation=bins,
        )
    return optimise_banded(workload, bands=min(_MOST_BANDS, bins) if options.bands is None else options.bands)


def _workload(settings: RunSettings, options: MatrixOptions) -> Workload:
    if options.workload == "prefix":
        return Workload(steps=settings.releases)
    momentum = settings.momentum if settings.optimizer == "sgd" else 0.0
    return Workload(steps=settings.releases, momentum=momentum, learning_rates=_learning_rates(settings))


def _calibrated(settings: RunSettings, mechanism: MatrixMechanism) -> MatrixMechanism:
    """The mechanism with the noise that is given, or with the least that the budget allows."""
    if settings.noise_multiplier is not None:
        return replace(mechanism, noise_multiplier=settings.noise_multiplier)

    def cost(noise_multiplier: float) -> float:
        candidate = replace(mechanism, noise_multiplier=noise_multiplier)
        return candidate.epsilon_after(settings.releases, delta=settings.delta, accountant=settings.accountant)

    found = smallest_reaching(cost, target=settings.epsilon, guess=_FIRST_GUESS, slack=1e-3, lowest=0.2, highest=1e4)
    if found is None:
        raise InputError(
            f"epsilon={settings.epsilon} cannot be reached with releases={settings.releases}: use fewer releases, a "
            "smaller batch or a larger epsilon."
        )
    return replace(mechanism, noise_multiplier=found.x)


def _learning_rates(settings: RunSettings) -> tuple[float, ...] | None:
    """The learning rate of each release, relative to the first; None where it is constant."""
    if settings.lr_schedule == "constant":
        return None
    shares = [step / settings.releases for step in range(settings.releases)]
    if settings.lr_schedule == "linear":
        return tuple(1 - share for share in shares)
    if settings.lr_schedule == "step":
        return tuple(1.0 if share < 0.5 else 0.1 for share in shares)
    return tuple((1 + math.cos(math.pi * share)) / 2 for share in shares)
