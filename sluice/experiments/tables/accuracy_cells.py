"""The cells of the accuracy table: which run each of them is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.data import names as data_set_names
from sluice.experiments.effects import epsilon_has_effect
from sluice.experiments.settings import TrainSettings, settings_from
from sluice.experiments.settings_files import assignment
from sluice.experiments.tables import ablation
from sluice.experiments.tables.accuracy_printed import DATASETS, has_printed_row
from sluice.experiments.tables.spoiling import Spoiling
from sluice.methods import METHODS, method_of

ALL = "all"

_ORDER = (
    "dpsr-cg",
    "dpsr-cg-paper",
    "dpsur",
    "matrix",
    "dpis",
    "dpsgd-hf",
    "dpsgd-ts",
    "dpagd",
    "dpsgd",
    "non-private",
)
_FIXED = ("dataset", "method", "epsilon", "seed", "hold_out", "evaluate_every")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A named set of settings that a method can be run with in place of its own.

    Attributes:
        datasets: where it exists.
        overrides: from data set and epsilon to the settings that differ.
    """

    datasets: tuple[str, ...]
    overrides: Callable[[str, float], Mapping[str, Any]]


VARIANTS: dict[tuple[str, str], Variant] = {
    ("dpsur", "claimed"): Variant(
        datasets=DATASETS, overrides=lambda dataset, epsilon: {"options": {"account": "claimed"}}
    ),
    ("dpsur", ablation.SAME_SCALING): Variant(datasets=ablation.DATASETS, overrides=ablation.dpsur_with_scaling),
    ("dpsr-cg", ablation.WITHOUT_SELECTION): Variant(
        datasets=DATASETS, overrides=lambda dataset, epsilon: {"gate": "none"}
    ),
}
"""By method and name; users type METHOD:NAME."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of the table.

    Attributes:
        variant: which settings other than the method's own, "" for those.
        epsilon: the heading that it stands under; None for methods that no epsilon shapes, which stand under all.
    """

    dataset: str
    method: str
    variant: str
    epsilon: float | None
    seed: int

    @property
    def row(self) -> str:
        """Method and variant as users type them."""
        return f"{self.method}:{self.variant}" if self.variant else self.method

    @property
    def name(self) -> str:
        """The stem of its file."""
        heading = "" if self.epsilon is None else f"eps{self.epsilon:.12g}"
        row = f"{self.method}+{self.variant}" if self.variant else self.method
        return "-".join(filter(None, (self.dataset, heading, row, f"seed{self.seed}")))

    @property
    def title(self) -> str:
        heading = "" if self.epsilon is None else f", epsilon {self.epsilon:g}"
        return f"{self.dataset}, {self.row}{heading}, seed {self.seed}"


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A cell, the settings of its run, and what is done to its training records before."""

    cell: Cell
    settings: TrainSettings
    spoiling: Spoiling | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The cells that were asked for, and the (data set, row) pairs left out, each with the reason."""

    cells: tuple[PlannedCell, ...]
    left_out: Mapping[tuple[str, str], str]


def table_order(methods: Iterable[str]) -> list[str]:
    """The order of the paper's table; methods that it does not know come last."""
    return sorted(methods, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))


def plan_cells(
    *,
    datasets: Sequence[str],
    methods: Sequence[str],
    epsilons: Sequence[float],
    seeds: Sequence[int],
    recipe: str = "paper",
    overrides: Mapping[str, Any] | None = None,
    tag: str = "",
) -> Plan:
    """Which runs the table needs. No record is read.

    Args:
        datasets: names of data sets; "all" is the paper's four.
        methods: names, or METHOD:VARIANT; "all" is every method of the paper's table, less those that the paper or the method
            itself does not have for a data set. A method that is named is never left out.
        epsilons: headings of the table.
        recipe: which of a method's own settings: those that it was published with, or the best that are known.
        overrides: settings for every cell, under the name ``tag``.
        tag: joins the name of the variant, so that results under other settings are kept apart.
    """
    overrides = dict(overrides or {})
    _check(epsilons=epsilons, seeds=seeds, overrides=overrides, tag=tag)
    named_datasets = _expanded(datasets, DATASETS, "datasets")
    validate_names(named_datasets, data_set_names(), "datasets")
    rows = [_row_of(text) for text in _expanded(methods, _ORDER, "methods")]
    explicit = {_row_of(text) for text in methods if text != ALL}
    cells: dict[Cell, TrainSettings] = {}
    left_out: dict[tuple[str, str], str] = {}
    for method, variant in rows:
        _require_a_data_set(method, variant, named_datasets)
    for dataset in named_datasets:
        for method, variant in rows:
            asked = (method, variant) in explicit
            if variant and dataset not in VARIANTS[method, variant].datasets:
                left_out[dataset, f"{method}:{variant}"] = "the variant is for other data sets"
                continue
            if not asked and dataset in DATASETS and not has_printed_row(dataset, method):
                left_out[dataset, method] = "the paper prints none"
                continue
            try:
                for cell, chosen in _cells_of_row(dataset, method, variant, epsilons, seeds, tag).items():
                    cells[cell] = _settings({**chosen, **overrides}, cell.epsilon, recipe)
            except InputError as error:
                if asked:
                    raise
                left_out[dataset, method] = str(error)
    planned = tuple(PlannedCell(cell=cell, settings=settings) for cell, settings in cells.items())
    return Plan(cells=planned, left_out=left_out)


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """From ``NAME=VALUE`` to settings. Values are JSON, else plain text; ``options.NAME`` is an option of the method."""
    found: dict[str, Any] = {}
    for item in items:
        name, value = assignment(item, argument="set")
        prefix, dot, option = name.partition(".")
        if prefix == "options" and dot:
            found.setdefault("options", {})[option] = value
        else:
            found[name] = value
    return found


def validate_names(given: Sequence[str], allowed: Sequence[str], argument: str) -> None:
    for name in given:
        if name not in allowed:
            raise InputError(f"{argument}={name!r} is not allowed: it must be one of {', '.join(allowed)} or all.")


def _check(*, epsilons: Sequence[float], seeds: Sequence[int], overrides: Mapping[str, Any], tag: str) -> None:
    for name, values in (("epsilons", epsilons), ("seeds", seeds)):
        if not values:
            raise InputError(f"{name} is empty: give at least one.")
    for epsilon in epsilons:
        validate.positive(epsilons=epsilon)
    for name in _FIXED:
        if name in overrides:
            raise InputError(f"set {name} is not allowed: a cell says it itself. Use --datasets, --methods and so on.")
    if bool(overrides) != bool(tag):
        raise InputError(
            "set and tag belong together: other settings need a name of their own, such as --set lr=0.2 --tag lr0.2."
        )
    if tag and not all(letter.isascii() and (letter.isalnum() or letter in "._") for letter in tag):
        raise InputError(f"tag={tag!r} is not allowed: it must be of letters, digits, dots and underscores.")


def _expanded(given: Sequence[str], everything: Sequence[str], argument: str) -> list[str]:
    if not given:
        raise InputError(f"{argument} is empty: give at least one, or all.")
    words = [name for word in given for name in (everything if word == ALL else [word])]
    return list(dict.fromkeys(words))


def _row_of(text: str) -> tuple[str, str]:
    method, _, variant = text.partition(":")
    validate_names([method], table_order(METHODS), "methods")
    names = [name for owner, name in VARIANTS if owner == method]
    if variant and variant not in names:
        known = f"it has {', '.join(names)}" if names else "it has none"
        raise InputError(f"methods={text!r} is not allowed: {method} has no variant {variant!r}; {known}.")
    return method, variant


def _cells_of_row(
    dataset: str, method: str, variant: str, epsilons: Sequence[float], seeds: Sequence[int], tag: str
) -> dict[Cell, dict[str, Any]]:
    """The cells of a row, each with the settings that it is about."""
    no_heading = "epsilon" in method_of(method).unused or not epsilon_has_effect(method, dataset)
    headings: Sequence[float | None] = [None] if no_heading else [float(epsilon) for epsilon in epsilons]
    full_variant = "-".join(filter(None, (variant, tag)))
    cells = {}
    for epsilon in headings:
        own = VARIANTS[method, variant].overrides(dataset, epsilon or 3.0) if variant else {}
        for seed in seeds:
            cell = Cell(dataset=dataset, method=method, variant=full_variant, epsilon=epsilon, seed=seed)
            cells[cell] = {"dataset": dataset, "method": method, "seed": seed, "evaluate_every": 0, **own}
    return cells


def _settings(chosen: Mapping[str, Any], epsilon: float | None, recipe: str) -> TrainSettings:
    if epsilon is None:
        return settings_from(chosen, recipe=recipe)
    if "noise_multiplier" not in chosen:
        return settings_from({**chosen, "epsilon": epsilon}, recipe=recipe)
    # Noise that is given is not made for the heading, which only picks the method's other settings.
    given = {name: chosen[name] for name in ("noise_multiplier", "hidden_reference") if name in chosen}
    others = {name: value for name, value in chosen.items() if name not in given}
    return replace(settings_from({**others, "epsilon": epsilon}, recipe=recipe), **given)


def _require_a_data_set(method: str, variant: str, datasets: Sequence[str]) -> None:
    if variant and not set(VARIANTS[method, variant].datasets) & set(datasets):
        allowed = ", ".join(VARIANTS[method, variant].datasets)
        raise InputError(f"methods={method}:{variant} is not allowed for {', '.join(datasets)}: it is for {allowed}.")
