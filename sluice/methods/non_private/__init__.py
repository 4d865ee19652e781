"""The ordinary optimizer, without any privacy: the line that private methods are measured against.

Algorithm: shuffled batches, each record once in an epoch, the mean gradient, a step of the optimizer. One "release" is
one epoch, so that a run can be interrupted and resumed like any other.

Accounting: none. What comes out protects nobody, and ledger and certificate say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sluice._base import validate
from sluice.accounting.dpa import DpEvent, NonPrivateDpEvent, NoOpDpEvent
from sluice.mechanism.base import Mechanism
from sluice.methods.base import Method, RunSettings


@dataclass(frozen=True, kw_only=True)
class NonPrivate(Mechanism):
    """Promises nothing: ``releases`` epochs of batches of ``batch_size`` records."""

    kind: ClassVar[str] = "non-private"
    accountants: ClassVar[tuple[str, ...]] = ()

    batch_size: int
    releases: int

    def __post_init__(self) -> None:
        validate.positive_integer(batch_size=self.batch_size, releases=self.releases)

    @property
    def provable(self) -> bool:
        return False

    @property
    def unproved_because(self) -> str:
        return "this run was made without any privacy, for comparison."

    def event_after(self, releases: int) -> DpEvent:
        self._require_releases(releases)
        return NonPrivateDpEvent() if releases else NoOpDpEvent()

    def theorem(self, accountant: str) -> str:
        return "none"

    @property
    def sampling(self) -> Mapping[str, Any]:
        return {"kind": "shuffled, every record once in an epoch", "rate": 1.0}

    @property
    def summary(self) -> tuple[tuple[str, str], ...]:
        return (("batches", f"{self.batch_size} records, shuffled"), ("noise", "none: this protects nobody"))


def plan(settings: RunSettings, dataset_size: int) -> NonPrivate:
    """As many epochs as ``releases`` says."""
    return NonPrivate(batch_size=min(settings.batch_size, dataset_size), releases=settings.releases)


_NETS: dict[str, dict[str, Any]] = {
    "mnist": {"model": "pixel-cnn", "lr": 0.05, "batch_size": 128},
    "fashion-mnist": {"features": "scattering", "model": "scattering-cnn", "lr": 0.02, "batch_size": 128},
    "cifar-10": {
        "features": "scattering",
        "model": "scattering-cnn",
        "lr": 0.02,
        "batch_size": 128,
        "weight_decay": 5e-4,
        "lr_schedule": "linear",
        "releases": 16,
    },
    "imdb": {"model": "bilstm", "optimizer": "adam", "lr": 0.001, "batch_size": 32, "releases": 3},
}


def defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    """Twenty epochs of the paper's nets, or as many as held-out records want."""
    if dataset not in _NETS:
        return {"lr": 0.3, "batch_size": 32, "releases": 20}
    return {"features": "plain", "activation": "tanh", "releases": 20, **_NETS[dataset]}


_NOT_PRIVATE = "nothing is private here"
METHOD = Method(
    name="non-private",
    summary="the ordinary optimizer; --releases counts epochs",
    proves="nothing: not private at all",
    mechanism=NonPrivate,
    plan=plan,
    defaults=defaults,
    unused=dict.fromkeys(
        ("noise_multiplier", "max_grad_norm", "scaling", "scaling_bound", "accountant", "epsilon", "delta"),
        _NOT_PRIVATE,
    ),
    target=lambda settings: None,
)
