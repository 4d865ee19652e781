"""The accuracy table as text: for the terminal, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from itertools import groupby

from sluice._base.rounding import rounded_up
from sluice.experiments.tables.accuracy_table import Figure, Line

COLUMNS = (
    "method",
    "model",
    "ours % (seeds)",
    "printed %",
    "diff.",
    "sound epsilon",
    "provable epsilon",
    "claimed",
)

REFERENCES = (
    "Tang et al. 2023, DP-RandP (a net pre-trained on images from random processes, then DP-SGD): CIFAR-10 72.3 % at epsilon 1.",
    "Tramer and Boneh 2021 (linear models and nets on scattering coefficients): CIFAR-10 69.3 % at epsilon 3.",
    "De et al. 2022 (wide residual nets from scratch): CIFAR-10 56.8 % at epsilon 1.",
)

_WHAT_COLUMNS_MEAN = """\
- **ours**: accuracy on the test set, read once at the end of each run; mean ± standard deviation over seeds, and how many.
- **printed**: the accuracy table of the DPSR-CG paper. Its rows `dpis`, `dpsgd-hf`, `dpsgd-ts`, `dpagd` and `dpsgd` are those
  of DPSUR's Table 2, digit for digit. `dpsr-cg-paper` faces the printed row of DPSR-CG.
- **sound epsilon**: the proved epsilon that the run was held to, by the run's own accountant; "-" where it was held to none.
- **provable epsilon**: the smallest that is proved for what was run, and by which accountant.
- **claimed**: what somebody's formula says for this run, by each reading of it. No claim is a guarantee.

Epsilon is for adding or removing one record, rounded up. Noise is seeded: for experiments only.
"""


def blocks(lines: Iterable[Line]) -> list[tuple[str, float, list[Line]]]:
    """The lines of each data set and heading."""
    grouped = groupby(lines, key=lambda line: (line.dataset, line.heading))
    return [(dataset, heading, list(members)) for (dataset, heading), members in grouped]


def block_title(dataset: str, heading: float, lines: Sequence[Line]) -> str:
    deltas = sorted({line.delta for line in lines if line.delta is not None})
    at = f", delta {', '.join(f'{delta:g}' for delta in deltas)}" if deltas else ""
    return f"{dataset}, epsilon {heading:g}{at}"


def cells_of(line: Line) -> tuple[str, ...]:
    """A line as the texts of its columns."""
    return (
        line.row,
        line.model or "-",
        accuracy_text(line),
        line.printed.percent if line.printed else "-",
        "-" if line.difference is None else f"{line.difference:+.2f}",
        "-" if line.sound is None else f"{rounded_up(line.sound.value)} ({line.sound.label})",
        provable_text(line),
        claims_text(line.claimed) or "-",
    )


def accuracy_text(line: Line) -> str:
    if line.mean is None:
        return f"- ({line.remark})"
    spread = "" if line.deviation is None else f" ± {line.deviation:.2f}"
    count = f"{len(line.seeds)} of {len(line.seeds) + len(line.missing)}" if line.missing else f"{len(line.seeds)}"
    return f"{line.mean:.2f}{spread} ({count})"


def provable_text(line: Line) -> str:
    if line.mean is None:
        return "-"
    if line.provable is None:
        return "none"
    return f"{rounded_up(line.provable.value)} ({line.provable.label})"


def claims_text(claimed: Sequence[Figure]) -> str:
    """Who claims what, by which of several formulas."""
    texts = []
    for label, figures in groupby(claimed, key=lambda figure: figure.label):
        named = label if "claimed" in label else f"claimed ({label})"
        values = (f"{rounded_up(figure.value)} {figure.meaning.removesuffix(' reading')}" for figure in figures)
        texts.append(f"{named}: {', '.join(value.strip() for value in values)}")
    return "; ".join(texts)


def markdown(lines: Sequence[Line], *, title: str, plot: str, references: bool = False) -> str:
    """The whole table, what its columns mean, and why cells are below the printed ones."""
    parts = [f"# {title}\n"]
    for dataset, heading, members in blocks(lines):
        parts.append(f"## {block_title(dataset, heading, members)}\n")
        parts.append(_row(COLUMNS) + _row(["---"] * len(COLUMNS)) + "".join(_row(cells_of(line)) for line in members))
    parts.append(f"![Ours beside the printed numbers]({plot})\n")
    parts.append("## What the columns mean\n")
    parts.append(_WHAT_COLUMNS_MEAN)
    if references:
        parts.append("## What others reach\n")
        parts.append("".join(f"- {text}\n" for text in REFERENCES))
    below = below_the_printed(lines)
    if below:
        parts.append("## Below the printed number\n")
        parts.append("".join(f"- {text}\n" for text in below))
    return "\n".join(parts)


def below_the_printed(lines: Iterable[Line]) -> list[str]:
    """One sentence or two for each line that is below the printed number."""
    return [
        f"{line.dataset}, epsilon {line.heading:g}, `{line.row}` ({line.difference:+.2f}): {line.reason}"
        for line in lines
        if line.reason
    ]


def as_csv(lines: Iterable[Line]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "dataset", "heading_epsilon", "method", "model", "seeds", "missing_seeds", "test_accuracy_percent",
            "standard_deviation", "printed_percent", "difference", "printed_source", "sound_epsilon", "accountant",
            "provable_epsilon", "provable_by", "claimed", "delta", "releases", "wall_seconds", "remark",
            "why_below",
        ]
    )  # fmt: skip
    for line in lines:
        writer.writerow(
            [
                line.dataset,
                f"{line.heading:g}",
                line.row,
                line.model,
                " ".join(map(str, line.seeds)),
                " ".join(map(str, line.missing)),
                _number(line.mean, ".4f"),
                _number(line.deviation, ".4f"),
                line.printed.percent if line.printed else "",
                _number(line.difference, "+.2f"),
                line.printed.source if line.printed else "",
                rounded_up(line.sound.value) if line.sound else "",
                line.sound.label if line.sound else "",
                rounded_up(line.provable.value) if line.provable else "",
                line.provable.label if line.provable else "",
                claims_text(line.claimed),
                _number(line.delta, "g"),
                "" if line.releases is None else line.releases,
                _number(line.seconds, ".1f"),
                line.remark,
                line.reason,
            ]
        )
    return buffer.getvalue()


def _row(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |\n"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
