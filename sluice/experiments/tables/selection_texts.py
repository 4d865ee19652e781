"""The study of selection as text: for the terminal, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import groupby

from sluice.experiments.tables.selection import Key, SelectionLine
from sluice.experiments.tables.selection_cells import ARMS, REGIMES

COLUMNS = ("arm", "test accuracy % (seeds)", "less no gate (95 %)", "verdict")

_WHAT_COLUMNS_MEAN = """\
- **test accuracy**: read once at the end of each run; mean ± standard deviation over seeds, and how many.
- **less no gate**: the mean over seeds of the difference to the run without a gate that has the same seed, and the 95 % confidence
  interval of that mean by Student's t. About one in twenty of these intervals misses 0 where there is no difference.
- **verdict**: better or worse where the interval excludes 0.

All arms of a block are the data set's recipe under a gate, each with the noise that its own proof needs for the same epsilon. Thinning "as strong
as that gate" has the strength that the clipping-bias gate has at most. Noise is seeded: for experiments only.
"""


def blocks(lines: Iterable[SelectionLine]) -> list[tuple[Key, list[SelectionLine]]]:
    """The lines of each data set, regime and heading."""
    return [
        (key, list(members))
        for key, members in groupby(lines, key=lambda line: (line.dataset, line.regime, line.heading))
    ]


def block_title(dataset: str, regime: str, heading: float) -> str:
    at = "no epsilon" if "noise_multiplier" in REGIMES[regime].overrides else f"epsilon {heading:g}"
    return f"{dataset}, {at}" if regime == "plain" else f"{dataset}, {REGIMES[regime].text}, {at}"


def arm_text(line: SelectionLine) -> str:
    known = ARMS.get(line.arm)
    text = line.arm if known is None else known.text
    same = known is not None and known.as_strong_as_the_gate is not None
    return f"{text} ({line.strength:g})" if same and line.strength is not None else text


def cells_of(line: SelectionLine) -> tuple[str, str, str, str]:
    """A line as the texts of its columns."""
    spread = "" if line.deviation is None else f" ± {line.deviation:.2f}"
    difference, verdict = "", ""
    if line.difference is not None:
        width = "" if line.difference.half_width is None else f" ± {line.difference.half_width:.2f}"
        difference, verdict = f"{line.difference.mean:+.2f}{width}", line.difference.verdict
    return arm_text(line), f"{line.mean:.2f}{spread} ({len(line.accuracies)})", difference, verdict


def markdown(lines: Sequence[SelectionLine], *, plot: str, inclusion: str = "") -> str:
    parts = ["# What selection does", f"![Differences to training without a gate]({plot})", _WHAT_COLUMNS_MEAN]
    for key, members in blocks(lines):
        rows = [COLUMNS, ("---",) * len(COLUMNS), *map(cells_of, members)]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## {block_title(*key)}\n\n{table}\n")
    if inclusion:
        parts.append(f"## How much rarer the gate makes records with large gradients\n\n{inclusion}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def as_csv(lines: Sequence[SelectionLine]) -> str:
    names = ("dataset", "regime", "heading", "arm", "strength", "seeds", "mean", "deviation", "difference", "half_width", "verdict", "epsilon")  # fmt: skip
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for line in lines:
        difference = line.difference
        compared = (None,) * 3 if difference is None else (difference.mean, difference.half_width, difference.verdict)
        writer.writerow(
            (line.dataset, line.regime, line.heading, line.arm, line.strength, len(line.accuracies), line.mean, line.deviation, *compared, line.epsilon)
        )  # fmt: skip
    return text.getvalue()
