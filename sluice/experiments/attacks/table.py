"""The paper's two tables of attacks, and the same targets' settings under attacks that are stronger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from sluice._base import validate
from sluice._base.errors import DataError, InputError, SluiceError
from sluice._base.files import canonical_json, parse_json, read_bytes, write_atomically
from sluice.experiments.attacks.printed import printed_accuracy
from sluice.experiments.attacks.recipes import ORDINARY
from sluice.experiments.attacks.request import AttackRequest, attacked_targets
from sluice.experiments.attacks.results import described, rate_text, write_result
from sluice.experiments.jobs import JobOptions, Lost, run_jobs

TABLE_ATTACKS = ("shadow-ordinary", "shadow-same", "white-box", "lira", "rmia")


@dataclass(frozen=True, kw_only=True)
class AttackCell:
    """One attack on one target, for one seed.

    Attributes:
        attack: one of `TABLE_ATTACKS`.
        epsilon: None without privacy.
    """

    dataset: str
    method: str
    epsilon: float | None
    attack: str
    request: AttackRequest

    @property
    def name(self) -> str:
        """The stem of its file: with another number of records, shadow models or settings, another file."""
        request = self.request
        changes = hashlib.sha256(canonical_json(dict(request.changes))).hexdigest()[:8] if request.changes else ""
        parts = (
            *(self.dataset, "" if self.epsilon is None else f"eps{self.epsilon:g}", self.method, self.attack),
            f"shadows{request.shadows}" if self.attack in ("lira", "rmia") else "",
            "" if request.records is None else f"records{request.records}",
            *(changes, f"seed{request.seed}"),
        )
        return "-".join(filter(None, parts))


def plan_attacks(
    base: AttackRequest,
    *,
    datasets: Sequence[str],
    methods: Sequence[str],
    epsilons: Sequence[float],
    attacks: Sequence[str],
    seeds: Sequence[int],
) -> list[AttackCell]:
    """The cells, in the order of the table. ``base`` holds what is the same for all."""
    for name, values in (("datasets", datasets), ("methods", methods), ("attacks", attacks), ("seeds", seeds)):
        if not values:
            raise InputError(f"{name} is empty: give at least one.")
    cells = []
    for dataset in datasets:
        for attack in attacks:
            validate.one_of(TABLE_ATTACKS, attacks=attack)
            for method in methods:
                if method == ORDINARY and attack == "shadow-same" and "shadow-ordinary" in attacks:
                    continue  # the same shadow model
                for epsilon in [None] if method == ORDINARY else epsilons:
                    for seed in seeds:
                        kind = "ordinary" if attack == "shadow-ordinary" else "same"
                        request = replace(
                            base,
                            attack=attack.removesuffix("-ordinary").removesuffix("-same"),
                            dataset=dataset,
                            method=method,
                            epsilon=3.0 if epsilon is None else epsilon,
                            seed=seed,
                            shadow_method=kind,
                        )
                        cells.append(
                            AttackCell(dataset=dataset, method=method, epsilon=epsilon, attack=attack, request=request)
                        )
    return cells


def stored_cell(results: Path, cell: AttackCell) -> Mapping[str, Any] | None:
    """The result of a cell, if it is there."""
    path = results / f"{cell.name}.json"
    if not path.exists():
        return None
    found = parse_json(read_bytes(path), what=str(path))
    if not isinstance(found, dict) or "attacks" not in found or "train_accuracy" not in found:
        raise DataError(f"{path} is not the result of an attack: move it away.")
    return found


def run_cell(cell: AttackCell, results: Path) -> Mapping[str, Any]:
    """Carry out a cell and store its result. Data sets of the table are public."""
    ((target, attacks),) = attacked_targets(cell.request)
    request = cell.request
    extra = {"attack": cell.attack, "seed": request.seed, "records": len(target.pool), "epsilon": cell.epsilon}
    if request.attack in ("lira", "rmia"):
        extra["shadows"] = request.shadows
    result = described(target, attacks, extra)
    write_result(results / f"{cell.name}.json", result, public=True)
    return result


def run_cells(
    cells: Sequence[AttackCell], results: Path, options: JobOptions
) -> Iterator[tuple[AttackCell, Mapping[str, Any] | None, str]]:
    """Each cell with its result, or with None and why there is none, in the order in which they end."""
    for cell, ending in run_jobs(partial(_run_or_say, results=results.absolute()), cells, options):
        if isinstance(ending, Lost):
            yield cell, None, f"failed: {ending.reason}"
            continue
        result, failure = ending
        if result is not None and stored_cell(results, cell) is None:
            write_result(results / f"{cell.name}.json", result, public=True)  # the worker has a disk of its own
        yield cell, result, failure


def _run_or_say(cell: AttackCell, results: Path) -> tuple[Mapping[str, Any] | None, str]:
    try:
        # A worker may have died between storing its result and handing it over.
        return stored_cell(results, cell) or run_cell(cell, results), ""
    except InputError:
        raise
    except SluiceError as error:
        return None, f"failed: {error}"


def write_table(path: Path, cells: Sequence[AttackCell], found: Mapping[str, Mapping[str, Any]]) -> None:
    """The table as Markdown, cells that were not run included."""
    write_atomically(path, ("\n".join(_lines(cells, found)) + "\n").encode(), public=True)


def _lines(cells: Sequence[AttackCell], found: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield "# Membership attacks"
    yield ""
    yield "Balanced accuracy at the attack's own threshold, as the paper reports it, over all seeds. An attack shows what is leaked"
    yield "at least: that it finds little is no evidence of privacy. Made by `sluice reproduce attacks`."
    yield ""
    columns = (
        "data",
        "method",
        "epsilon",
        "attack",
        "seeds",
        "records",
        "train / test accuracy",
        "printed",
        "accuracy",
    )
    yield "| " + " | ".join((*columns, "gap attack", "loss AUC", "AUC", "TPR at 0.1 % FPR", "TPR at 1 % FPR")) + " |"
    yield "|" + "---|" * (len(columns) + 5)
    for rows in _by_line(cells).values():
        results = [found[cell.name] for cell in rows if cell.name in found]
        cell = rows[0]
        attack = cell.request.attack
        printed = printed_accuracy(attack, dataset=cell.dataset, method=cell.method, epsilon=cell.epsilon)
        head = [cell.dataset, cell.method, "" if cell.epsilon is None else f"{cell.epsilon:g}"]
        shown = "" if printed is None else f"{printed:.3f}"
        if not results:
            yield _row([*head, cell.attack, "not run", "", "", shown, *[""] * 6])
            continue
        for name in results[0]["attacks"]:
            if name in ("loss", "gap"):
                continue
            label = f"{cell.attack}" if attack in ("shadow", "white-box") else name
            each = [result["attacks"][name] for result in results]
            yield _row([*head, label, str(len(results)), f"{results[0]['records']:,}", *_figures(results, each, shown)])


def _figures(results: Sequence[Mapping[str, Any]], each: Sequence[Mapping[str, Any]], printed: str) -> list[str]:
    accuracies = [one["balanced_accuracy"] for one in each]
    train, test = (mean(result[key] for result in results) for key in ("train_accuracy", "test_accuracy"))
    gap = mean(result["attacks"]["gap"]["balanced_accuracy"] for result in results)
    loss = mean(result["attacks"]["loss"]["auc"] for result in results)
    return [
        f"{100 * train:.1f} / {100 * test:.1f} %",
        printed,
        "" if None in accuracies else f"{mean(accuracies):.3f}",
        f"{gap:.3f}",
        f"{loss:.3f}",
        f"{mean(one['auc'] for one in each):.3f}",
        *(_rate(each, asked) for asked in (0.001, 0.01)),
    ]


def _rate(each: Sequence[Mapping[str, Any]], asked: float) -> str:
    found = [rate for one in each for rate in one["rates"] if rate["asked"] == asked]
    if len(found) == 1 or not found:
        return rate_text(found[0] if found else None, each[0]["non_members"])
    return f"{100 * mean(rate['rate'] for rate in found):.2f} %"


def _by_line(cells: Sequence[AttackCell]) -> dict[tuple[Any, ...], list[AttackCell]]:
    lines: dict[tuple[Any, ...], list[AttackCell]] = {}
    for cell in cells:
        lines.setdefault((cell.dataset, cell.attack, cell.method, cell.epsilon), []).append(cell)
    return lines


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
