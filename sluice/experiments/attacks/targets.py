"""The model that is attacked: trained for the purpose on part of a pool, or that of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sluice._base.errors import InputError
from sluice.attacks.scores import is_right
from sluice.data import names as data_set_names
from sluice.experiments.attacks.cells import (
    ModelCell,
    epsilon_of,
    for_records,
    logits_of,
    require_repeatable,
    train_models,
    trained_model,
)
from sluice.experiments.attacks.pool import Pool, PoolSource, load_pool
from sluice.experiments.attacks.split import FourWaySplit, Positions, four_way_split, half_of
from sluice.experiments.published import PublishedModel, load_model
from sluice.experiments.run import recorded_run
from sluice.experiments.settings import TrainSettings

_TARGET_SEEDS = 1_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """A model, the records that it was trained on, and others of the same kind that it was not.

    Guarantee:
        None: logits of members are private. Whatever is computed from this must not be published unless the data are public.

    Attributes:
        settings: of its training.
        logits: for every record of the pool.
        members, non_members: positions in the pool.
        epsilon: what is proved for the model; None for nothing.
    """

    source: PoolSource
    pool: Pool
    settings: TrainSettings
    model: PublishedModel
    logits: NDArray[np.float32]
    members: Positions
    non_members: Positions
    epsilon: float | None

    @property
    def attacked(self) -> Positions:
        """All records whose membership is asked for, members first."""
        return np.concatenate([self.members, self.non_members])

    @property
    def truth(self) -> NDArray[np.bool_]:
        """Membership of the records in `attacked`."""
        return np.repeat([True, False], [len(self.members), len(self.non_members)])

    def accuracy_on(self, positions: Positions) -> float:
        return float(is_right(self.logits[positions], self.pool.labels[positions]).mean())


def require_public(dataset: str) -> None:
    """Refuse the user's own data where results would not go to a private place."""
    if dataset not in data_set_names():
        raise InputError(
            f"dataset={dataset!r} is not allowed here: what an attack finds is private, and only public data sets "
            f"({', '.join(data_set_names())}) are attacked outside a run. Attack a run of it: results go to its private/."
        )


def four_way_target(
    source: PoolSource, settings: TrainSettings, *, seed: int, work: Path
) -> tuple[Target, FourWaySplit]:
    """A target on two sixths of the pool, with a sixth of non-members; the rest is the attacker's."""
    pool = load_pool(source)
    split = four_way_split(len(pool), seed=seed)
    cell = model_on(split.target_train, source, settings)
    return _trained(cell, non_members=split.target_test, work=work), split


def half_target(source: PoolSource, settings: TrainSettings, *, seed: int, number: int, work: Path) -> Target:
    """A target on half of the pool; the other half are the non-members."""
    inside = half_of(len(load_pool(source)), seed=seed, target=number)
    own_seed = replace(settings, seed=(settings.seed or 0) + _TARGET_SEEDS * number)
    cell = model_on(np.flatnonzero(inside), source, own_seed)
    return _trained(cell, non_members=np.flatnonzero(~inside), work=work)


def target_of_run(run: Path, *, data_dir: Path | None) -> Target:
    """A finished run, its training records as members and its test records as non-members."""
    recorded = recorded_run(run)
    settings, result = recorded.settings, recorded.result
    require_repeatable(settings)
    if result is None:
        raise InputError(
            f"run={str(run)!r} is not allowed: it is not finished. Resume it first: sluice train --resume {run}"
        )
    if settings.predicts_numbers:
        raise InputError(f"run={str(run)!r} is not allowed: it has loss={settings.loss!r}, and attacks are on classes.")
    source = PoolSource(
        dataset=settings.dataset,
        features=settings.features,
        classes=settings.classes,
        class_names=settings.class_names,
        target=settings.target,
        data_dir=data_dir,
    )
    pool, model = load_pool(source), load_model(run)
    return Target(
        source=source,
        pool=pool,
        settings=settings,
        model=model,
        logits=logits_of(model, pool),
        members=np.arange(pool.trained),
        non_members=np.arange(pool.trained, len(pool)),
        epsilon=result.epsilon,
    )


def model_on(
    positions: Positions, source: PoolSource, settings: TrainSettings, *, made_for: int | None = None
) -> ModelCell:
    """A model on these records of the pool, with private batches in proportion.

    Args:
        made_for: the number of records that the settings are for; if not given, the data set's own training records.
    """
    require_repeatable(settings)
    pool = load_pool(source)
    inside = np.zeros(len(pool), dtype=bool)
    inside[positions] = True
    fitted = for_records(settings, records=len(positions), made_for=made_for or pool.all_for_training)
    return ModelCell(source=source, settings=fitted, inside=inside)


def _trained(cell: ModelCell, *, non_members: Positions, work: Path) -> Target:
    (logits,) = train_models([cell], work=work)
    return Target(
        source=cell.source,
        pool=load_pool(cell.source),
        settings=cell.settings,
        model=trained_model(cell, work),
        logits=logits,
        members=np.flatnonzero(cell.inside),
        non_members=non_members,
        epsilon=epsilon_of(cell, work),
    )
