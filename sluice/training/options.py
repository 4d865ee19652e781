"""How a run is trained, whatever its mechanism: nothing here changes what is promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.audit.canaries import Canaries
from sluice.gradients import GradientOptions
from sluice.mechanism.base import Mechanism
from sluice.runs.ledger_recorder import LedgerRecorder, ledger_header
from sluice.training.batches import TARGETS
from sluice.training.weights import averaged


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """What `PrivacyEngine.make_private_by` may be told beside the mechanism.

    Attributes:
        loss_reduction: what the loss returns: "mean" or "sum" over the batch.
        lr_scheduler: advanced with each release. Do not call its ``step`` yourself.
        ema_decay: also keep a running average of the released weights (`PrivacyEngine.averaged`); costs no privacy.
        max_physical_batch_size: in a loop of your own, and where only losses are wanted, at most this many records go
            through the model at once; `PrivacyEngine.releases` takes as many as fit the caches. Bounds the memory only.
        gradient_options: how per-sample gradients are computed; changes speed and memory only.
        before_release: called with the number of a release before it is applied, after the ledger.
        ledger: a file to which every release is written before it is applied; ``sluice verify`` reads it. If it exists
            the run resumes with it: call `PrivacyEngine.load`, or the releases in it count as lost (methods whose
            records take turns refuse that: the turns would begin anew).
        ledger_delta: the delta at which that ledger reports.
        ledger_target: the epsilon that the ledger names as what the run was calibrated to, if it was.
        targets: where a record of the data set is a dict, the entries that `PrivacyEngine.releases` gives to the loss; the
            others are the model's keywords.
        canaries: made-up records that are trained with the others, for `PrivacyEngine.audit`.
        observe_attempt: called with each `ObservedAttempt` of selective release, which is sensitive: for studies alone.
    """

    loss_reduction: str = "mean"
    lr_scheduler: LRScheduler | None = None
    ema_decay: float | None = None
    max_physical_batch_size: int = 256
    gradient_options: GradientOptions | None = None
    before_release: Callable[[int], None] | None = None
    ledger: str | Path | None = None
    ledger_delta: float = 1e-5
    ledger_target: float | None = None
    targets: tuple[str, ...] = TARGETS
    canaries: Canaries | None = None
    observe_attempt: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        validate.one_of(("mean", "sum"), loss_reduction=self.loss_reduction)
        validate.positive_integer(max_physical_batch_size=self.max_physical_batch_size)
        if isinstance(self.targets, str) or not self.targets:
            raise InputError(f"targets={self.targets!r} is not allowed: give a tuple of names, such as ('labels',).")
        if self.ema_decay is not None:
            validate.open_fraction(ema_decay=self.ema_decay)

    def average_of(self, module: nn.Module) -> AveragedModel | None:
        """The running average of the module's weights, if one is kept."""
        if self.ema_decay is None:
            return None
        return averaged(module, decay=self.ema_decay)

    def recorder(self, mechanism: Mechanism, *, secure: bool, accountant: str) -> LedgerRecorder | None:
        """What writes releases to the ledger; None where no ledger is kept."""
        if self.ledger is None:
            return None
        header = ledger_header(
            mechanism,
            delta=self.ledger_delta,
            secure=secure,
            accountant=accountant,
            target_epsilon=self.ledger_target,
        )
        return LedgerRecorder(Path(self.ledger), header=header, repeats_noise=not secure)
