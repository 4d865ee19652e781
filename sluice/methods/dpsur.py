"""DPSUR: an update is kept if it lowers the loss on a fresh validation batch, judged with noise.

Source: Fu et al., "DPSUR: Accelerating Differentially Private Stochastic Gradient Descent Using Selective Update and
Release", VLDB 2024.

Algorithm: a Poisson batch gives a noisy gradient and with it candidate weights. A second Poisson batch, drawn from the
same records, gives the change of the mean loss from the present weights to the candidate, both on that batch; it is
clipped to [-C_v, C_v] and gets noise of standard deviation 2 C_v sigma_v. The candidate is released if the result lies
below beta C_v; otherwise weights and all of the optimizer's state are as before. The scaling may be global
(``--scaling global``), as in the DPSR-CG paper's ablation.

Accounting, three figures:

- proved: the released law is that of the candidate, re-weighted by its probability of being accepted
  (docs/accounting.md, section 8; by RDP). It is large, because the gate looks at the released weights themselves.
- claimed by its authors: a sampled Gaussian for the step, one for the test of each *accepted* update, nothing for the
  selection.
- claimed by the DPSR-CG paper: the sampling rate inflated by rho.

Only the first is an epsilon, and noise is calibrated to it unless ``-o account=claimed`` says that the budget is the
authors' claim, with their settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from dp_accounting import ComposedDpEvent, DpEvent, SelfComposedDpEvent
from torch import Tensor

from sluice import serial, validate
from sluice.accounting import create_accountant
from sluice.accounting.dpsur import Dpsur, DpsurDpEvent, claimed_dpsur_account, paper_dpsur_account
from sluice.accounting.paper import CLAIMED_LABEL
from sluice.accounting.search import smallest_reaching
from sluice.errors import InputError
from sluice.methods.base import Method
from sluice.methods.reference import NOISE, nearest, scattering_settings
from sluice.noise import noisy_sum
from sluice.planning import scaling_rule
from sluice.procedure import Draft, Procedure
from sluice.promise import Claim, Promise
from sluice.sampling import PoissonSampler, exact_sample_rate
from sluice.scaling import ScalingRule, scaling_from_dict
from sluice.workbench import Loss, Workbench

if TYPE_CHECKING:
    from sluice.settings import TrainSettings


@dataclass(frozen=True, kw_only=True)
class DpsurOptions:
    """What only DPSUR has.

    Attributes:
        account: which figure epsilon is about: "provable", or "claimed" for the authors' own, which proves nothing.
        validation_batch_size: expected size of a validation batch.
        validation_noise: noise multiplier of the test [sigma_v].
        loss_clip: the loss change is clipped to plus and minus this [C_v].
        threshold: a candidate is accepted below this many loss_clip [beta].
    """

    account: str = "provable"
    validation_batch_size: int = 256
    validation_noise: float = 1.3
    loss_clip: float = 0.001
    threshold: float = -1.0

    def __post_init__(self) -> None:
        validate.one_of(("provable", "claimed"), account=self.account)
        validate.positive_integer(validation_batch_size=self.validation_batch_size)
        validate.positive(validation_noise=self.validation_noise, loss_clip=self.loss_clip)
        validate.finite(threshold=self.threshold)


@dataclass(frozen=True, kw_only=True)
class DpsurMechanism(Promise):
    """What a run of DPSUR promises. Every field is public."""

    kind: ClassVar[str] = "dpsur"
    accountants: ClassVar[tuple[str, ...]] = ("rdp",)
    claims_beside_proof: ClassVar[bool] = True

    sample_rate: float
    expected_batch_size: float
    scaling: ScalingRule
    noise_multiplier: float
    validation_rate: float
    expected_validation_size: float
    validation_noise: float
    loss_clip: float
    threshold: float
    releases: int

    def __post_init__(self) -> None:
        validate.positive(
            expected_batch_size=self.expected_batch_size,
            expected_validation_size=self.expected_validation_size,
            loss_clip=self.loss_clip,
        )
        validate.positive_integer(releases=self.releases)
        _ = self.release  # checks the other fields

    @property
    def release(self) -> Dpsur:
        """One release, as the accountants know it."""
        return Dpsur(
            sample_rate=self.sample_rate,
            noise_multiplier=self.noise_multiplier,
            validation_rate=self.validation_rate,
            validation_noise=self.validation_noise,
            beta=self.threshold,
        )

    @property
    def provable(self) -> bool:
        return True

    def event_after(self, releases: int) -> DpEvent:
        self._require_releases(releases)
        events = [SelfComposedDpEvent(DpsurDpEvent(release=self.release), releases)] if releases else []
        return ComposedDpEvent(events)

    def claims_after(self, releases: int, *, delta: float) -> tuple[Claim, ...]:
        if not releases:
            return ()
        authors = claimed_dpsur_account(self.release).claimed_epsilon(releases=releases, delta=delta)
        paper = paper_dpsur_account(self.release).claimed_epsilon(releases=releases, delta=delta)
        return (
            Claim(label="claimed (DPSUR)", reading="authors'", value=authors),
            Claim(label=CLAIMED_LABEL, reading="table", value=paper),
        )

    def theorem(self, accountant: str) -> str:
        return (
            "Bound for a release that is selected by its own value, composed adaptively: docs/accounting.md, "
            "sections 8.2 and 8.3 (Renyi divergence)"
        )

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": "Poisson", "rate": self.sample_rate}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        return (
            ("sample rate", f"{self.sample_rate:.4g} ({self.expected_batch_size:g} records on average)"),
            ("validation rate", f"{self.validation_rate:.4g} ({self.expected_validation_size:g} records on average)"),
            ("noise multiplier", f"{self.noise_multiplier:.4g}"),
            ("validation noise", f"{self.validation_noise:.4g}, threshold {self.threshold:g}"),
        )

    def procedure(self, bench: Workbench) -> SelectiveUpdates:
        return SelectiveUpdates(self, bench)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self), "scaling": self.scaling.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DpsurMechanism:
        names = [field.name for field in fields(cls)]
        serial.require_keys(data, what="mechanism", required=("kind", *names))
        given = {name: data[name] for name in names}
        return cls(**{**given, "scaling": scaling_from_dict(data["scaling"])})


class SelectiveUpdates(Procedure[dict[str, Tensor]]):
    """Makes candidates until one is accepted.

    Guarantee:
        What is applied has the law that docs/accounting.md, section 8.1, describes. A candidate is tried out and put back,
        so a rejected one changes nothing but ``trace`` and the noise source: weights and the optimizer's state are bit
        for bit as before.
    """

    def __init__(self, promise: DpsurMechanism, bench: Workbench) -> None:
        super().__init__(releases=promise.releases, bench=bench)
        self._promise = promise
        size = bench.dataset_size
        self._batches = PoissonSampler(dataset_size=size, sample_rate=promise.sample_rate, source=bench.noise)
        self._tests = PoissonSampler(dataset_size=size, sample_rate=promise.validation_rate, source=bench.noise)

    def prepare(self, loss: Loss) -> Draft[dict[str, Tensor]]:
        attempts = measured = 0
        while True:
            attempts += 1
            indices = self._batches.sample()
            measured += len(indices)
            candidate = self._noisy_gradient(indices, loss)
            tested = self._tests.sample()
            raw_before = self.bench.raw_losses(tested, loss)
            with self.bench.updates.trial():
                self.bench.updates.step(candidate)
                raw_change = self._raw_change(raw_before, self.bench.raw_losses(tested, loss))
            if self._passes(raw_change):
                return Draft(content=candidate, attempts=attempts, measured=measured, metric=raw_change)

    def apply(self, content: dict[str, Tensor]) -> None:
        self.bench.apply(content)

    def _noisy_gradient(self, indices: Tensor, loss: Loss) -> dict[str, Tensor]:
        scaling, raw_sum = self._promise.scaling, self.bench.raw_sum()
        for chunk in self.bench.chunks(indices, loss):
            raw_sum.add(chunk, scaling(chunk.norms))
        gradient = raw_sum.tensors()
        noisy_sum(
            list(gradient.values()),
            noise_multiplier=self._promise.noise_multiplier,
            sensitivity=scaling.sensitivity,
            noise=self.noise,
            sum_error=self.bench.sum_error * scaling.sensitivity,
        )
        return {name: noisy.div_(self._promise.expected_batch_size) for name, noisy in gradient.items()}

    def _raw_change(self, raw_before: Tensor, raw_after: Tensor) -> float:
        """The clipped change of the loss. One that is not a number counts as the worst there is."""
        clip = self._promise.loss_clip
        raw_change = float((raw_after - raw_before).sum()) / self._promise.expected_validation_size
        return min(max(raw_change, -clip), clip) if math.isfinite(raw_change) else clip

    def _passes(self, raw_change: float) -> bool:
        clip = self._promise.loss_clip
        std = 2 * clip * self._promise.validation_noise
        noise = float(self.noise.normal((1,), std, dtype=torch.float64))
        return raw_change + noise < self._promise.threshold * clip


def plan(settings: TrainSettings, dataset_size: int) -> DpsurMechanism:
    """The mechanism with the noise that is given, or calibrated to the budget by the account that is asked for."""
    options: DpsurOptions = settings.own_options
    rate = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    tested = min(options.validation_batch_size, dataset_size)

    def mechanism(noise_multiplier: float) -> DpsurMechanism:
        return DpsurMechanism(
            sample_rate=rate,
            expected_batch_size=rate * dataset_size,
            scaling=scaling_rule(settings),
            noise_multiplier=noise_multiplier,
            validation_rate=tested / dataset_size,
            expected_validation_size=float(tested),
            validation_noise=options.validation_noise,
            loss_clip=options.loss_clip,
            threshold=options.threshold,
            releases=settings.releases,
        )

    if settings.noise_multiplier is not None:
        return mechanism(settings.noise_multiplier)

    def cost(noise_multiplier: float) -> float:
        candidate = mechanism(noise_multiplier)
        if options.account == "claimed":
            return candidate.claims_after(settings.releases, delta=settings.delta)[0].value
        return float(create_accountant("rdp").compose(candidate.dp_event).get_epsilon(settings.delta))

    found = smallest_reaching(cost, target=settings.epsilon, guess=2.0, slack=3e-3, lowest=0.3, highest=100.0)
    if found is None:
        raise InputError(
            f"epsilon={settings.epsilon} cannot be reached with releases={settings.releases}, "
            f"validation_noise={options.validation_noise} and validation_batch_size={options.validation_batch_size}: "
            "the selection alone costs more. Use fewer releases, more validation noise or a smaller validation batch."
        )
    return mechanism(found.x)


_CLAIMED_RELEASES = {
    "mnist": (281, 862, 1475, 1475),
    "fashion-mnist": (652, 682, 1082, 1973),
    "cifar-10": (119, 515, 462, 797),
    "imdb": (85, 266, 259, 259),
}
_CLAIMED_VALIDATION_NOISE = {
    "mnist": (1.3, 1.0, 0.9, 0.8),
    "fashion-mnist": (1.3, 1.3, 0.8, 0.8),
    "cifar-10": (1.3, 1.3, 1.1, 1.1),
    "imdb": (1.3, 1.2, 1.0, 0.9),
}


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """The authors' nets and rates, with the releases of their smallest budget: about what can be proved for 3."""
    settings = scattering_settings(dataset, 1.0, releases=_CLAIMED_RELEASES)
    if dataset not in NOISE:
        settings |= {"releases": 30, "lr": 2.0, "options": {"validation_batch_size": 64, "loss_clip": 0.01}}
    return {**settings, "accountant": "rdp"}


def claimed_settings(dataset: str, epsilon: float) -> dict[str, Any]:
    """The authors' own settings for an epsilon that they claim and nobody has proved."""
    return {
        **scattering_settings(dataset, epsilon, releases=_CLAIMED_RELEASES),
        "accountant": "rdp",
        "noise_multiplier": nearest(epsilon, NOISE[dataset]),
        "options": {"account": "claimed", "validation_noise": nearest(epsilon, _CLAIMED_VALIDATION_NOISE[dataset])},
    }


METHOD = Method(
    name="dpsur",
    summary="an update is kept if it lowers the loss on a validation batch, judged with noise",
    proves="epsilon (RDP), large; its authors' and the paper's figures are claimed",
    promise=DpsurMechanism,
    plan=plan,
    defaults=defaults,
    options=DpsurOptions,
    target=lambda settings: (
        settings.epsilon if settings.noise_multiplier is None and settings.own_options.account == "provable" else None
    ),
)
