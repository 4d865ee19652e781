"""What happens with 40 public architectures, built small: docs/models.md is what this writes.

python benchmarks/models.py                      # the table, on standard output
python benchmarks/models.py --write docs/models.md
python benchmarks/models.py --only bert --only swin

Needs ``pip install 'sluice[models]'``. Weights are random and configurations small: what is tried is the architecture.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from models_catalog import ENTRIES, Entry
from torch import Tensor, nn

from sluice._base.errors import SluiceError
from sluice.gradients import PerSampleGradients, fix
from sluice.gradients.trees import apply, batch_size, take
from sluice.gradients.vmap import VmapRule

ROWS = 16
BEGIN, END = "<!-- begin of the table -->", "<!-- end of the table -->"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened with one model.

    Attributes:
        error: of norms and sums, relative to the largest norm, against gradients of batches of one in float64.
        ratio: processor time of a private step over that of an ordinary one on the same batch.
    """

    entry: Entry
    parameters: int
    way: str
    error: float = math.nan
    ratio: float = math.nan


def record_losses(output: Any, y: Tensor) -> Tensor:
    """A loss for each record, whatever the model returns: all its numbers against random targets."""
    logits = output if isinstance(output, Tensor) else output[0]
    if isinstance(logits, tuple | list):
        logits = logits[0]
    flat = logits.reshape(len(y), -1, logits.shape[-1]).mean(1)
    return F.cross_entropy(flat, y % flat.shape[-1], reduction="none")


def truth(model: nn.Module, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms of per-record gradients and their sum: one record at a time, in float64."""
    exact = copy.deepcopy(model).double()
    trained = {name: p for name, p in exact.named_parameters() if p.requires_grad}
    norms, sums = [], {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in range(len(y)):
        one = as_double(take(x, slice(i, i + 1)))
        value = record_losses(apply(exact, one), y[i : i + 1]).sum()
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(trained, found, strict=True) if g is not None}
        norms.append(torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt())
        for name, g in gradients.items():
            sums[name] += g
    return torch.stack(norms), sums


def as_double(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, dict):
        return {name: as_double(value) for name, value in x.items()}
    return tuple(as_double(value) for value in x)


def tried(entry: Entry) -> Outcome:
    torch.manual_seed(0)
    model, x = entry.build(ROWS)
    if entry.fixed:
        model = fix(model)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    model.train()
    y = torch.arange(batch_size(x)) % 2
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        gradients = PerSampleGradients(model)
        norms, sums = gradients.weighted_sum(x, y, record_losses, torch.ones_like)
    except SluiceError as error:
        return Outcome(entry=entry, parameters=count, way="refused: " + first_sentence(str(error)))
    expected, expected_sums = truth(model, x, y)
    largest = expected.max()
    difference = torch.stack([(sums[n].double() - s).square().sum() for n, s in expected_sums.items()]).sum().sqrt()
    error = max(float((norms.double() - expected).abs().max() / largest), float(difference / (largest * len(y))))
    private, ordinary = seconds(
        lambda: gradients.weighted_sum(x, y, record_losses, torch.ones_like), lambda: ordinary_step(model, x, y)
    )
    return Outcome(entry=entry, parameters=count, way=way_of(gradients), error=error, ratio=private / ordinary)


def ordinary_step(model: nn.Module, x: Any, y: Tensor) -> None:
    model.zero_grad()
    record_losses(apply(model, x), y).mean().backward()


def seconds(*steps: Callable[[], object], repeats: int = 20) -> list[float]:
    """The least processor time of each over some runs, in turns: other work on the machine meets all of them."""
    found: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats + 1):
        for step, times in zip(steps, found, strict=True):
            start = time.process_time()
            step()
            times.append(time.process_time() - start)
    return [min(times[1:]) for times in found]


def way_of(gradients: PerSampleGradients) -> str:
    """How gradients are found: by rules, or some or all by a fallback."""
    fallbacks = {
        unit.name: "loop" if getattr(unit.rule, "by_loop", False) else "vmap"
        for unit in gradients._units.values()
        if isinstance(unit.rule, VmapRule)
    }
    if not fallbacks:
        return "native"
    whole = fallbacks.get("")
    if whole is not None:
        return f"by {whole}"
    return f"native; {len(fallbacks)} of its parts by {', '.join(sorted(set(fallbacks.values())))}"


def first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;:]) ", text.replace("|", "/").replace("\n", " "))[0].rstrip(".;:")[:160]


def table(outcomes: list[Outcome]) -> str:
    lines = ["| model | from | parameters | what happens | error | cost |", "|---|---|---|---|---|---|"]
    for each in outcomes:
        name = each.entry.name + (" after `fix()`" if each.entry.fixed else "")
        error = "" if math.isnan(each.error) else f"{each.error:.0e}"
        ratio = "" if math.isnan(each.ratio) else f"{each.ratio:.1f}"
        lines.append(f"| {name} | {each.entry.source} | {each.parameters:,} | {each.way} | {error} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="only models whose name contains this")
    parser.add_argument("--write", type=Path, help="put the table into this file, in place of the one there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = [e for e in ENTRIES if not options.only or any(part.lower() in e.name.lower() for part in options.only)]
    outcomes = []
    for entry in chosen:
        try:
            outcomes.append(tried(entry))
        except Exception as error:  # a model that cannot even be built is said to be so
            outcomes.append(
                Outcome(entry=entry, parameters=0, way=f"fails: {type(error).__name__}: {first_sentence(str(error))}")
            )
        print(table(outcomes[-1:]).splitlines()[-1], flush=True)
    if options.write:
        text = options.write.read_text("utf-8")
        before, after = text.split(BEGIN)[0], text.split(END)[1]
        options.write.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
