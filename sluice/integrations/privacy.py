"""What a trainer of another library is told about privacy, and the engine that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting import ACCOUNTANTS
from sluice.gradients import GradientOptions
from sluice.mechanism.gates import Gate
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.scaling import ScalingRule
from sluice.training.arguments import SelectiveArguments
from sluice.training.batches import TARGETS, Batches
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The budget of a run inside a trainer of another library, which says the rest: batch size, steps, learning rate.

    Attributes:
        delta: at which epsilon is calibrated and reported.
        max_grad_norm: the maximum norm of one record's weighted gradient.
        target_epsilon: the noise is calibrated to spend at most this. Or:
        noise_multiplier: standard deviation of the noise over ``max_grad_norm``.
        scaling: from norms to weights; None clips.
        gate: which attempts are released; None releases all: plain DP-SGD.
        accountant, seed: as for `PrivacyEngine`.
        max_physical_batch_size: at most this many records go through the model at once. Bounds the memory only.
        gradient_options: how per-sample gradients are computed; changes speed and memory only.
    """

    delta: float
    max_grad_norm: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    scaling: ScalingRule | None = None
    gate: Gate | None = None
    accountant: str = "pld"
    seed: int | None = None
    max_physical_batch_size: int = 256
    gradient_options: GradientOptions | None = None

    def __post_init__(self) -> None:
        validate.open_fraction(delta=self.delta)
        validate.positive(max_grad_norm=self.max_grad_norm)
        validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise InputError(
                f"target_epsilon={self.target_epsilon}, noise_multiplier={self.noise_multiplier} is not allowed: give "
                "exactly one of the two."
            )

    def engine(self, data: DataLoader[Any] | Dataset[Any], plan: Plan) -> PrivacyEngine:
        """An engine that is ready to make the planned releases."""
        arguments = SelectiveArguments(
            data_loader=data,
            max_grad_norm=self.max_grad_norm,
            releases=plan.releases,
            epochs=None,
            sample_rate=exact_sample_rate(batch_size=plan.batch_size, dataset_size=Batches(data).size),
            scaling=self.scaling,
            gate=self.gate,
            prior_releases=(),
            loop_piece=self.max_physical_batch_size if plan.loop_of_its_own else 1,
        )
        if self.target_epsilon is not None:
            mechanism = arguments.with_epsilon(self.target_epsilon, self.delta, None, accountant=self.accountant)
        else:
            assert self.noise_multiplier is not None
            mechanism = arguments.with_noise(self.noise_multiplier)
        options = TrainingOptions(
            max_physical_batch_size=self.max_physical_batch_size,
            gradient_options=self.gradient_options,
            ledger=plan.ledger,
            ledger_delta=self.delta,
            ledger_target=self.target_epsilon,
            targets=plan.targets,
        )
        engine = PrivacyEngine(accountant=self.accountant, seed=self.seed)
        engine.make_private_by(
            mechanism, module=plan.module, optimizer=plan.optimizer, data_loader=data, options=options
        )
        return engine


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the trainer says of a run.

    Attributes:
        batch_size: how many records a batch has on average.
        releases: how many steps the trainer makes.
        ledger, targets: as in `TrainingOptions`.
        loop_of_its_own: whether the trainer takes means over pieces of batches, in `PrivacyEngine.ordinary_loop`.
    """

    module: nn.Module
    optimizer: Optimizer
    batch_size: int
    releases: int
    ledger: Path | None = None
    targets: tuple[str, ...] = TARGETS
    loop_of_its_own: bool = False


def refuse_settings(settings: Any, refused: dict[str, tuple[Any, str]]) -> None:
    """Raise for the first setting of a trainer that does not have the one value which is allowed.

    Args:
        refused: the name of a setting, the value that is allowed, and why no other is.
    """
    for name, (allowed, why) in refused.items():
        value = getattr(settings, name, allowed)
        if value != allowed:
            raise InputError(f"{name}={value!r} is not allowed in private training: {why} Set {name}={allowed!r}.")


__all__ = ["Plan", "Privacy", "refuse_settings"]
