"""The models of an attack: each a run of its own, trained once, kept, resumed where it was interrupted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sluice._base import codec
from sluice._base.errors import DataError, InputError
from sluice._base.files import replaced_atomically
from sluice._base.locks import held_alone
from sluice.attacks.white_box import last_linear
from sluice.data import Examples
from sluice.experiments.attacks.pool import Pool, PoolSource, load_pool
from sluice.experiments.jobs import JobOptions, Lost, run_jobs
from sluice.experiments.published import PublishedModel, load_model
from sluice.experiments.run import Training, recorded_run
from sluice.experiments.settings import TrainSettings
from sluice.features.examples import RowExamples
from sluice.methods import method_of
from sluice.runs.folder import configuration_hash, may_begin

_ROWS_AT_ONCE = 500


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCell:
    """One model: its settings, and which records of the pool it is trained on."""

    source: PoolSource
    settings: TrainSettings
    inside: NDArray[np.bool_]

    @property
    def name(self) -> str:
        """Other settings, records or members: another folder. Where data lie does not matter."""
        source = codec.encode(replace(self.source, data_dir=None))
        members = hashlib.sha256(np.packbits(self.inside).tobytes()).hexdigest()
        key = configuration_hash({"settings": self.settings.to_dict(), "source": source, "members": members})
        return f"{Path(self.settings.dataset).stem}-{self.settings.method}-{key[:16]}"


def for_records(settings: TrainSettings, *, records: int, made_for: int) -> TrainSettings:
    """The same settings for a data set of another size: private batches keep their share of it, so epochs stay the same."""
    if not settings.batch_size or settings.method == "non-private":
        return settings
    return replace(settings, batch_size=max(1, round(settings.batch_size * records / made_for)))


def require_repeatable(settings: TrainSettings) -> None:
    """Refuse what an attack cannot train models with."""
    if settings.hold_out:
        raise InputError(
            f"hold_out={settings.hold_out} is not allowed in an attack: it draws members itself. Leave it out."
        )
    method_of(settings.method)


def train_models(
    cells: Sequence[ModelCell],
    *,
    work: Path,
    jobs: int | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[NDArray[np.float32]]:
    """Train what is not yet there, and give the logits of every model for every record of its pool.

    Args:
        work: where models are kept, a folder for each. They are un-noised functions of records unless their method is private,
            so for private data it must be private.
        jobs: how many at once, by joblib; None is one, -1 as many as there are processors.
        report: called with the number of models that are there and the number wanted.

    Guarantee:
        None. Logits on members are not private even where the model is; on records of others, publish neither.
    """
    options = JobOptions(jobs=jobs)
    work.mkdir(parents=True, exist_ok=True, mode=0o700)
    open_cells = [cell for cell in cells if not _logits_path(work, cell).exists()]
    done = len(cells) - len(open_cells)
    report(done, len(cells))
    train = partial(_train, work=work) if options.here else partial(_train, work=work, threads=1)
    for cell, ending in run_jobs(train, open_cells, options):
        if isinstance(ending, Lost):
            raise DataError(
                f"{cell.name} was not trained: {ending.reason}. Models that are trained are kept: try again."
            )
        done += 1
        report(done, len(cells))
    return [np.load(_logits_path(work, cell)) for cell in cells]


def trained_model(cell: ModelCell, work: Path) -> PublishedModel:
    """The model of a cell that `train_models` has trained."""
    return load_model(work / cell.name / "run")


def epsilon_of(cell: ModelCell, work: Path) -> float | None:
    """What is proved for a trained cell; None where nothing is."""
    result = recorded_run(work / cell.name / "run").result
    return None if result is None else result.epsilon


def _train(cell: ModelCell, work: Path, threads: int | None = None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)
    pool = load_pool(cell.source)
    run = work / cell.name / "run"
    run.parent.mkdir(parents=True, exist_ok=True)
    with held_alone(run.parent / "lock"):  # another cell of a table may want the same model
        if not _logits_path(work, cell).exists():
            _train_alone(cell, work, pool, run)


def _train_alone(cell: ModelCell, work: Path, pool: Pool, run: Path) -> None:
    splits = pool.divided(cell.inside)
    if may_begin(run):
        Training(settings=cell.settings, splits=splits).start(run)
    else:
        recorded = recorded_run(run)
        if recorded.result is None:
            Training(settings=cell.settings, splits=splits, mechanism=recorded.mechanism).resume(run)
    found = logits_of(load_model(run), pool)
    with replaced_atomically(_logits_path(work, cell), owner_only=True) as path, path.open("wb") as file:
        np.save(file, found)


def logits_of(model: PublishedModel, pool: Pool) -> NDArray[np.float32]:
    """What a model says of every record of the pool."""
    outputs, _ = _evaluated(model, pool.examples, hidden_of=None)
    return outputs


def hidden_of(model: PublishedModel, examples: Examples) -> NDArray[np.float32]:
    """What the last linear layer sees of each record."""
    _, inputs = _evaluated(model, examples, hidden_of=last_linear(model.module))
    assert inputs is not None
    return inputs


def _evaluated(
    model: PublishedModel, examples: Examples, *, hidden_of: nn.Linear | None
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    seen = examples.presented(model.mean) if isinstance(examples, RowExamples) else examples
    kept: list[Tensor] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        kept.append(inputs[0].detach().clone())

    hook = None if hidden_of is None else hidden_of.register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            parts = [
                model.module(seen.batch(positions)[0]).float().clone()
                for positions in torch.arange(len(seen)).split(_ROWS_AT_ONCE)
            ]
    finally:
        if hook is not None:
            hook.remove()
    return torch.cat(parts).numpy(), torch.cat(kept).numpy() if kept else None


def _logits_path(work: Path, cell: ModelCell) -> Path:
    return work / cell.name / "logits.npy"
