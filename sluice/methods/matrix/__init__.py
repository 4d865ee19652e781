"""DPSGD with a matrix mechanism: the noise of different steps is correlated, so that it partly cancels in the weights.

Source: Choquette-Choo et al., "(Amplified) Banded Matrix Factorization", NeurIPS 2023, for banded strategies;
McMahan et al., "A Hassle-free Algorithm for Private Learning in Practice", 2024, for buffered linear ones;
Choquette-Choo et al., "Near Exact Privacy Amplification for Matrix Mechanisms", ICLR 2025, for batches by balls in bins.

Algorithm: a batch; gradients clipped to length C and summed; to the sum of step t comes row t of inv(M) z, where z is
independent Gaussian noise and M a lower-triangular Toeplitz matrix with few bands or few buffers; a step of the optimizer
with the sum over the expected batch size. M is chosen so that the running sums that SGD makes of its gradients have the
least error (``-o workload=prefix``), or its iterates with momentum and learning-rate schedule (``-o workload=momentum``).

Accounting: sound, one proof for each way to draw batches, and no other combination is allowed (docs/matrix.md):

- ``cyclic-poisson``, banded strategies only: amplified by sampling, by PLD or RDP (section 4);
- ``balls-in-bins``: each record in one batch of every epoch, the same in each; by Monte Carlo with a confidence term in
  delta, in both directions (section 5). The seed of the sample is in the ledger, so that anybody can repeat it;
- ``poisson``: by conditional composition, known as MMCC (section 6).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS
from sluice.accounting.dpa import DpEvent, NoOpDpEvent, UnsupportedDpEvent
from sluice.accounting.matrix.accounting import banded_event, require_noise
from sluice.accounting.matrix.bins import BinsPair
from sluice.accounting.matrix.conditional import conditional_epsilon
from sluice.accounting.matrix.monte_carlo import (
    MonteCarloDelta,
    certified_delta,
    monte_carlo_epsilon,
    require_samples,
)
from sluice.accounting.matrix.optimise import require_buffers
from sluice.accounting.matrix.strategy import BandedToeplitz, BufferedLinearToeplitz
from sluice.mechanism.base import Mechanism
from sluice.methods.base import Method, RunSettings
from sluice.methods.reference import scattering_settings

BATCHES = ("cyclic-poisson", "balls-in-bins", "poisson")


@dataclass(frozen=True, kw_only=True)
class MatrixOptions:
    """What only the matrix mechanism has.

    Attributes:
        batches: how batches are drawn, which decides the proof: "cyclic-poisson", "balls-in-bins" or "poisson".
        strategy: "banded", or "blt" for a buffered linear one.
        bands: diagonals of a banded strategy. None takes the power of two with the least error, at most 16 under
            poisson; under balls-in-bins it takes 16, or as many as there are bins. One band is plain DP-SGD.
        buffers: of a buffered linear strategy.
        workload: what is to be known well: "prefix" sums, or the iterates with "momentum" and learning rates.
        samples: of the Monte Carlo account of balls-in-bins.
    """

    batches: str = "cyclic-poisson"
    strategy: str = "banded"
    bands: int | None = None
    buffers: int = 3
    workload: str = "momentum"
    samples: int = 200_000

    def __post_init__(self) -> None:
        validate.one_of(BATCHES, batches=self.batches)
        validate.one_of(("banded", "blt"), strategy=self.strategy)
        validate.one_of(("prefix", "momentum"), workload=self.workload)
        require_buffers(self.buffers)
        require_samples(self.samples)
        if self.bands is not None:
            validate.positive_integer(bands=self.bands)
        if self.strategy == "blt" and self.batches == "cyclic-poisson":
            raise InputError(
                "strategy='blt' is not allowed with batches='cyclic-poisson': a buffered linear strategy has no last "
                "band, so no amplification is proved. Use a banded strategy, or batches 'balls-in-bins' or 'poisson'."
            )


@dataclass(frozen=True, kw_only=True)
class MatrixMechanism(Mechanism):
    """What a run with correlated noise promises. Every field is public.

    Attributes:
        strategy: the matrix M.
        batches: how batches are drawn.
        groups: groups of cyclic-poisson, or bins; 1 for poisson.
        sample_rate: probability of a record to be in a batch whose turn its group has; for balls-in-bins, of its bin.
        expected_batch_size: what sums are divided by.
        max_grad_norm: the maximum norm of what a record adds to a sum.
        noise_multiplier: standard deviation of z over ``max_grad_norm`` times the norm of a column of M.
        certificate: what Monte Carlo certified for balls-in-bins, to be repeated by whoever verifies; None otherwise.
    """

    kind: ClassVar[str] = "matrix"

    strategy: BandedToeplitz | BufferedLinearToeplitz
    batches: str
    groups: int
    sample_rate: float
    expected_batch_size: float
    max_grad_norm: float
    noise_multiplier: float
    releases: int
    certificate: MonteCarloDelta | None = None

    def __post_init__(self) -> None:
        validate.one_of(BATCHES, batches=self.batches)
        validate.positive_integer(groups=self.groups, releases=self.releases)
        validate.fraction(sample_rate=self.sample_rate)
        validate.positive(expected_batch_size=self.expected_batch_size, max_grad_norm=self.max_grad_norm)
        require_noise(self.noise_multiplier)
        if self.batches == "cyclic-poisson":
            _ = self.dp_event  # refuses a strategy that this sampling has no proof for
        if (self.batches == "balls-in-bins") != (self.certificate is not None):
            raise InputError(
                f"certificate={self.certificate} is not allowed with batches={self.batches!r}: balls-in-bins needs the "
                "one that Monte Carlo gave, and no other batches have one."
            )

    @property
    def accountants(self) -> tuple[str, ...]:
        return _accountants_of(self.batches)

    @property
    def composable(self) -> bool:
        return self.batches == "cyclic-poisson"

    @property
    def provable(self) -> bool:
        return True

    def event_after(self, releases: int) -> DpEvent:
        self._require_releases(releases)
        if not releases:
            return NoOpDpEvent()
        if not self.composable:
            return UnsupportedDpEvent()
        return banded_event(
            self.strategy,
            steps=self.releases,
            groups=self.groups,
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            shown=releases,
        )

    def epsilon_after(self, releases: int, *, delta: float, accountant: str) -> float:
        """As for any mechanism; where events do not compose, the whole run is charged from the first release on."""
        self._require_releases(releases)
        if self.composable or not releases:
            return super().epsilon_after(releases, delta=delta, accountant=accountant)
        self._require_accountant(accountant)
        validate.open_fraction(delta=delta)
        return _conditional(self, delta) if self.batches == "poisson" else _certified(self, delta)

    def meaning(self, accountant: str) -> str:
        if self.batches == "balls-in-bins":
            return "proved, by Monte Carlo: delta includes the probability that the figure is wrong"
        return super().meaning(accountant)

    def theorem(self, accountant: str) -> str:
        what, section = {
            "cyclic-poisson": ("a banded strategy amplified by cyclic sampling", 4),
            "balls-in-bins": ("correlated noise on balls-in-bins batches, by Monte Carlo", 5),
            "poisson": ("correlated noise under Poisson sampling, by conditional composition", 6),
        }[self.batches]
        return f"Bound for {what}: docs/matrix.md, section {section}"

    @property
    def sampling(self) -> Mapping[str, Any]:
        kinds = {
            "cyclic-poisson": f"Poisson, from {self.groups} groups in turn",
            "balls-in-bins": f"balls in {self.groups} bins, the same in every epoch",
            "poisson": "Poisson",
        }
        return {"kind": kinds[self.batches], "rate": self.sample_rate}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        return (
            ("batches", f"{self.sampling['kind']}, {self.expected_batch_size:g} records on average"),
            ("strategy", _described(self.strategy)),
            ("noise multiplier", f"{self.noise_multiplier:.4g}"),
        )


def _accountants_of(batches: str) -> tuple[str, ...]:
    """Only the events of cyclic sampling are known to an accountant of Renyi divergences."""
    return ACCOUNTANTS if batches == "cyclic-poisson" else ("pld",)


def _described(strategy: BandedToeplitz | BufferedLinearToeplitz) -> str:
    if isinstance(strategy, BufferedLinearToeplitz):
        return f"buffered linear, {strategy.buffers} buffers"
    if strategy.bands == 1:
        return "one band: independent noise, as in plain DP-SGD"
    return f"banded, {strategy.bands} bands"


@functools.lru_cache(maxsize=32)
def _conditional(mechanism: MatrixMechanism, delta: float) -> float:
    return conditional_epsilon(
        mechanism.strategy,
        steps=mechanism.releases,
        sample_rate=mechanism.sample_rate,
        noise_multiplier=mechanism.noise_multiplier,
        delta=delta,
    ).epsilon


@functools.lru_cache(maxsize=32)
def _certified(mechanism: MatrixMechanism, delta: float) -> float:
    """The epsilon of the certificate if its sample, drawn again, holds at this delta; a new one by its seed if not."""
    certificate = mechanism.certificate
    assert certificate is not None
    steps, bins = mechanism.releases, mechanism.groups
    again = certified_delta(
        BinsPair.of(mechanism.strategy, steps=steps, bins=bins, noise_multiplier=mechanism.noise_multiplier),
        noise_multiplier=mechanism.noise_multiplier,
        epsilon=certificate.epsilon,
        samples=certificate.samples,
        seed=certificate.seed,
        failure_probability=certificate.failure_probability,
        charge=certificate.charge,
    )
    if again.delta <= delta:
        return certificate.epsilon
    return monte_carlo_epsilon(
        mechanism.strategy,
        steps=steps,
        bins=bins,
        noise_multiplier=mechanism.noise_multiplier,
        delta=delta,
        samples=certificate.samples,
        seed=certificate.seed,
    ).epsilon


_EPOCHS = {"mnist": (20, 25, 30), "fashion-mnist": (40, 50, 60), "cifar-10": (40, 50, 60), "imdb": (5, 10, 15)}
_BATCHES_PER_EPOCH = {"mnist": 58, "fashion-mnist": 29, "cifar-10": 48, "imdb": 24}
_BATCH_SIZE = {"mnist": 1024, "fashion-mnist": 2048, "cifar-10": 1024, "imdb": 1024}


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The DPSR-CG paper's epochs, batch sizes and rates for its comparison with a matrix mechanism."""
    if dataset not in _EPOCHS:
        return scattering_settings(dataset, epsilon, releases={})
    releases = {name: tuple(_BATCHES_PER_EPOCH[name] * epochs for epochs in row) for name, row in _EPOCHS.items()}
    return {
        **scattering_settings(dataset, epsilon, releases=releases),
        "batch_size": _BATCH_SIZE[dataset],
        "lr": 0.1,
        "max_grad_norm": 1.0,
    }


def unused_options(settings: RunSettings) -> dict[str, str]:
    """The options that a run with these settings does not read."""
    options: MatrixOptions = settings.own_options
    unused = {}
    if options.strategy == "blt":
        unused["bands"] = "only a banded strategy has it"
    else:
        unused["buffers"] = "only the strategy 'blt' has it"
    if options.batches != "balls-in-bins":
        unused["samples"] = "only batches 'balls-in-bins' are accounted for by Monte Carlo"
    if options.bands == 1:
        unused["workload"] = "with one band the noise is independent, whatever is to be known well"
    elif options.workload == "momentum" and settings.optimizer != "sgd":
        unused["workload"] = f"the optimizer {settings.optimizer!r} has no momentum that a strategy could be made for"
    return unused


def _plan(settings: RunSettings, dataset_size: int) -> MatrixMechanism:
    from sluice.methods.matrix.plan import plan  # it builds on this file

    return plan(settings, dataset_size)


METHOD = Method(
    name="matrix",
    summary="DPSGD with noise that is correlated over steps and partly cancels",
    proves="epsilon (PLD, RDP; Monte Carlo or MMCC for other batches)",
    mechanism=MatrixMechanism,
    plan=_plan,
    defaults=defaults,
    options=MatrixOptions,
    unused={"scaling_bound": "it clips"},
    unused_options=unused_options,
    accountants=lambda settings: _accountants_of(settings.own_options.batches),
)
