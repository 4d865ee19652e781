"""One attack as a user asks for it, on a data set's name or on a run, carried out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.files import cache_dir
from sluice.experiments.attacks.carry_out import (
    AttackScores,
    Report,
    lira_attacks,
    rmia_attacks,
    shadow_attack,
    shadow_logits,
    threshold_attacks,
    white_box_attack,
)
from sluice.experiments.attacks.pool import PoolSource
from sluice.experiments.attacks.recipes import SHADOW_METHODS, target_settings
from sluice.experiments.attacks.targets import Target, four_way_target, half_target, require_public, target_of_run
from sluice.experiments.settings import TrainSettings

ATTACKS = ("loss", "shadow", "white-box", "lira", "rmia")
FOUR_WAY = ("shadow", "white-box")
"""Attacks of the paper, on its split 2:1:2:1; targets of the others are trained on half of the records."""


@dataclass(frozen=True, kw_only=True)
class AttackRequest:
    """What to attack, and how.

    Attributes:
        dataset: a public data set, of which a target is trained; or
        run: a finished run, whose training records are attacked.
        method, epsilon, changes, records: of a target on a data set.
        shadow_method: how shadow models are trained: "same" as the target, or "ordinary".
        shadows: how many, for lira and rmia.
        targets: how many are attacked by the same shadow models.
        epochs: of attack nets.
        work: where models are kept; in the user's cache, or the run's ``private/``, if not given.
    """

    attack: str
    dataset: str | None = None
    run: Path | None = None
    method: str = "non-private"
    epsilon: float = 3.0
    changes: Mapping[str, Any] = field(default_factory=dict)
    records: int | None = None
    seed: int = 0
    shadow_method: str = "same"
    shadows: int = 16
    targets: int = 1
    epochs: int = 50
    work: Path | None = None
    data_dir: Path | None = None
    jobs: int | None = None

    def __post_init__(self) -> None:
        validate.one_of(ATTACKS, attack=self.attack)
        validate.one_of(SHADOW_METHODS, shadow_method=self.shadow_method)
        validate.positive_integer(targets=self.targets, shadows=self.shadows, epochs=self.epochs)
        validate.non_negative(seed=self.seed)
        if self.records is not None:
            validate.positive_integer(records=self.records)
        if (self.dataset is None) == (self.run is None):
            raise InputError("dataset and run: exactly one of them is attacked. Give --dataset or RUN.")
        if self.dataset is not None:
            require_public(self.dataset)
        if self.run is not None and self.attack == "shadow":
            raise InputError(
                "run is not allowed for the shadow attack: its shadow model needs records that the target was not trained on, "
                "and a run leaves only its test records. Use --dataset, or the attacks lira and rmia."
            )
        if self.targets > 1 and (self.run is not None or self.attack in FOUR_WAY):
            raise InputError(
                f"targets={self.targets} is not allowed here: only loss, lira and rmia on a data set have several."
            )

    @property
    def private_folder(self) -> Path | None:
        """Where results go that must not be published; None where the data are public."""
        return None if self.run is None else self.run / "private" / "attacks"

    @property
    def models(self) -> Path:
        """Where models are kept."""
        if self.work is not None:
            return self.work
        return cache_dir() / "attacks" if self.private_folder is None else self.private_folder / "models"


def attacked_targets(
    request: AttackRequest, *, report: Report = lambda done, total: None
) -> Iterator[tuple[Target, list[AttackScores]]]:
    """Train what has to be trained, and attack one target after the other.

    Guarantee:
        None: scores depend on who is a member. For private data they belong into ``private/``.
    """
    if request.attack == "shadow":
        source, settings = _asked(request)
        target, split = four_way_target(source, settings, seed=request.seed, work=request.models)
        found = shadow_attack(
            target, split, kind=request.shadow_method, seed=request.seed, work=request.models, epochs=request.epochs
        )
        yield target, [found, *threshold_attacks(target)]
        return
    for target in _targets(request):
        yield target, [*_scores(request, target, report), *threshold_attacks(target)]


def _targets(request: AttackRequest) -> Iterator[Target]:
    if request.run is not None:
        yield target_of_run(request.run, data_dir=request.data_dir)
        return
    source, settings = _asked(request)
    if request.attack in FOUR_WAY:
        yield four_way_target(source, settings, seed=request.seed, work=request.models)[0]
        return
    for number in range(request.targets):
        yield half_target(source, settings, seed=request.seed, number=number, work=request.models)


def _scores(request: AttackRequest, target: Target, report: Report) -> list[AttackScores]:
    if request.attack == "loss":
        return []
    if request.attack == "white-box":
        return [white_box_attack(target, seed=request.seed, epochs=request.epochs)]
    shadows = shadow_logits(
        target,
        shadows=request.shadows,
        kind=request.shadow_method,
        seed=request.seed,
        work=request.models,
        jobs=request.jobs,
        report=report,
    )
    return lira_attacks(target, shadows) if request.attack == "lira" else rmia_attacks(target, shadows)


def _asked(request: AttackRequest) -> tuple[PoolSource, TrainSettings]:
    assert request.dataset is not None
    settings = target_settings(
        request.dataset,
        method=request.method,
        epsilon=request.epsilon,
        seed=request.seed,
        changes=request.changes,
    )
    source = PoolSource(
        dataset=request.dataset,
        features=settings.features,
        data_dir=request.data_dir,
        records=request.records,
        seed=0 if request.records is None else request.seed,
    )
    return source, settings
