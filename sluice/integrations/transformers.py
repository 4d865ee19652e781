"""Private training by Hugging Face's `Trainer`: its callbacks, schedulers and checkpoints; our batches and steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import get_last_checkpoint

from sluice._base.errors import InputError
from sluice.integrations.privacy import Plan, Privacy, refuse_settings
from sluice.integrations.steps import FixedShapes, ReleaseNumbers, ReleaseOptimizer, by_loss
from sluice.training.batches import Batches
from sluice.training.engine import PrivacyEngine

IGNORED = -100

# Losses and gradients of training records, and how long they took: with a gate, as long as its attempts.
_SENSITIVE = ("loss", "grad_norm", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second")

_REFUSED: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (
        1,
        "one step is one release, of a batch of per_device_train_batch_size records on average. Memory is bounded by "
        "Privacy(max_physical_batch_size=...) however large that is.",
    ),
    "fp16": (False, "a gradient scaler would scale what is clipped by a number that depends on all records."),
    "bf16": (False, "norms are measured in the precision of the parameters. Load the model in bfloat16 instead."),
    "torch_compile": (False, "compiled code cannot be recorded."),
    "label_smoothing_factor": (0.0, "the trainer's smoother averages over the batch. Give compute_loss_func."),
    "auto_find_batch_size": (False, "the batch size is part of what is promised."),
    "world_size": (1, "releases are made by one process."),
}


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """`Trainer`, every step of which is one release.

    Arguments are the `Trainer`'s own, and:

    Args:
        privacy: the budget. ``args.per_device_train_batch_size`` is the size of batches on average, and ``args.max_steps``, or
            ``args.num_train_epochs``, says how many releases are made.

    The loss of a record is ``compute_loss_func(outputs, labels)``, a mean over records, or what the model itself would
    compute for that record alone (`record_losses`).

    Attributes:
        privacy_engine: from the beginning of `train` on; ask it for epsilon.

    Guarantee:
        What `PrivacyEngine.releases` promises. ``global_step`` is the number of releases, so learning rates, logs and
        checkpoints go by what is public; losses and gradient norms of training records, and how long training took, are neither
        logged nor returned. The ledger is
        ``output_dir/ledger.jsonl``. A checkpoint's folder ``private`` is sensitive.
    """

    def __init__(self, *args: Any, privacy: Privacy, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        self.privacy = privacy
        self.privacy_engine: PrivacyEngine | None = None
        self._resumed: Path | None = None
        self.add_callback(_Keeping(self))

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        if self.privacy_engine is not None:
            raise InputError(
                "train was called before: its releases are made. Make a new PrivateTrainer for another run."
            )
        if resume_from_checkpoint:
            found = (
                resume_from_checkpoint
                if isinstance(resume_from_checkpoint, str)
                else get_last_checkpoint(self.args.output_dir)
            )
            self._resumed = Path(found) if found else None
        elif self._ledger.exists():
            raise InputError(
                f"output_dir={self.args.output_dir!r} holds the ledger of an earlier run. Call "
                "train(resume_from_checkpoint=True) to go on with it, or choose another output_dir."
            )
        try:
            output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            return output._replace(metrics=_public(output.metrics))
        finally:
            if self.privacy_engine is not None:
                self.privacy_engine.close()

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Numbers of releases: records are read where they are sampled."""
        own = super().get_train_dataloader()
        workers = self.args.dataloader_num_workers
        self._records: DataLoader[Any] = DataLoader(
            own.dataset, collate_fn=FixedShapes(own.collate_fn), num_workers=workers
        )
        size = self.args.per_device_train_batch_size
        per_epoch = math.ceil(Batches(self._records).size / size)
        # What the Trainer itself makes of these two settings.
        self._planned = (
            self.args.max_steps if self.args.max_steps > 0 else math.ceil(per_epoch * self.args.num_train_epochs)
        )
        return ReleaseNumbers(per_epoch).loader()

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that was asked for, behind one whose steps are releases."""
        original = super().create_optimizer(model)
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            module=self.model,
            optimizer=original,
            batch_size=self.args.per_device_train_batch_size,
            releases=self._planned,
            ledger=self._ledger,
            targets=tuple(self.label_names),
        )
        self.privacy_engine = self.privacy.engine(self._records, plan)
        self.optimizer = self._release_optimizer = ReleaseOptimizer(
            self.privacy_engine, by_loss(self.privacy_engine, self._loss)
        )
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Nothing: ``optimizer.step()``, which follows, reads the batch. Losses of training records are not for logs."""
        model.train()
        return torch.zeros((), device=self.args.device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(_public(logs))  # without the start of training, from which it would compute speeds

    def floating_point_ops(self, inputs: Any) -> int:
        return 0

    @property
    def _ledger(self) -> Path:
        return Path(self.args.output_dir) / "ledger.jsonl"

    def _loss(self, outputs: Any, labels: Any) -> Tensor:
        if self.compute_loss_func is not None:
            given: Tensor = self.compute_loss_func(outputs, labels)
            return given
        return record_losses(self.model, outputs, labels).mean()


def _public(logs: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in logs.items() if name not in _SENSITIVE}


class _Keeping(TrainerCallback):  # type: ignore[misc]
    """Keeps the engine's state with the trainer's checkpoints, and stops the trainer when no release is left."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        trainer, engine = self._trainer, self._trainer.privacy_engine
        assert engine is not None
        if trainer._resumed is not None:
            engine.load(trainer._resumed / "private")
        return control

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        assert self._trainer.privacy_engine is not None
        self._trainer.privacy_engine.save(Path(args.output_dir) / f"checkpoint-{state.global_step}" / "private")
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # Releases that were lost in a crash are charged, so fewer than planned may be left.
        control.should_training_stop = control.should_training_stop or self._trainer._release_optimizer.done
        return control


def _refuse(trainer: Trainer) -> None:
    refuse_settings(trainer.args, _REFUSED)
    if trainer.args.n_gpu > 1:
        raise InputError(
            f"n_gpu={trainer.args.n_gpu} is not allowed in private training: show one device to the process."
        )
    if trainer.args.hub_strategy in ("checkpoint", "all_checkpoints") and trainer.args.push_to_hub:
        raise InputError(
            f"hub_strategy={str(trainer.args.hub_strategy)!r} is not allowed in private training: checkpoints hold the "
            "private state of the run. Set hub_strategy='every_save' or 'end'."
        )
    if type(trainer).compute_loss is not Trainer.compute_loss:
        raise InputError(
            "compute_loss was overridden, which private training does not call. Pass compute_loss_func=loss with "
            "loss(outputs, labels) to the trainer: the mean over records."
        )


def record_losses(model: nn.Module, outputs: Any, labels: Any) -> Tensor:
    """The loss of each record, as the model itself computes it for a batch of that record alone.

    Args:
        model: one of transformers' models for classification, regression, tokens, (masked) language or question answering,
            also inside a peft model.
        outputs: what it returned, called without labels.
        labels: the batch's ``labels``, or a dict with ``start_positions`` and ``end_positions``.

    Tokens that are labelled -100 do not count, and a record is the mean over its own tokens.
    """
    base: Any = model
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    if isinstance(labels, dict):
        return _span_losses(outputs, labels)
    kind, logits = _kind(base), outputs["logits"]
    if kind == "causal":
        return _token_losses(logits[:, :-1], labels[:, 1:])
    if kind == "tokens":
        return _token_losses(logits, labels)
    return _class_losses(logits, labels, problem=_problem(base, labels))


def _kind(model: nn.Module) -> str:
    """What the model's labels are about."""
    name, kind = type(model).__name__, getattr(model, "loss_type", None)
    if kind in ("ForSequenceClassification", "ForImageClassification"):
        return "classes"
    if kind == "ForCausalLM" or (kind is None and name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return "causal"
    if kind in ("ForMaskedLM", "ForTokenClassification") or getattr(model.config, "is_encoder_decoder", False):
        return "tokens"
    raise InputError(
        f"{name} has a loss that is not known here. Pass compute_loss_func=loss with loss(outputs, labels) to the trainer: "
        "the mean over records."
    )


def _problem(model: nn.Module, labels: Tensor) -> str:
    config: Any = model.config
    named = getattr(config, "problem_type", None)
    if named is not None:
        return str(named)
    if getattr(config, "num_labels", 2) == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _class_losses(logits: Tensor, labels: Tensor, *, problem: str) -> Tensor:
    if problem == "single_label_classification":
        return F.cross_entropy(logits, labels.reshape(-1), reduction="none")
    each: Callable[..., Tensor] = F.mse_loss if problem == "regression" else F.binary_cross_entropy_with_logits
    return each(logits, labels.reshape(logits.shape).to(logits.dtype), reduction="none").mean(1)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    counts = (labels != IGNORED).sum(1).clamp(min=1)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
    return losses.sum(1) / counts


def _span_losses(outputs: Any, labels: dict[str, Tensor]) -> Tensor:
    def one(logits: Tensor, positions: Tensor) -> Tensor:
        length = logits.shape[1]  # a position beyond the text does not count
        return F.cross_entropy(logits, positions.reshape(-1).clamp(0, length), ignore_index=length, reduction="none")

    start = one(outputs["start_logits"], labels["start_positions"])
    return (start + one(outputs["end_logits"], labels["end_positions"])) / 2


__all__ = ["PrivateTrainer", "record_losses"]
