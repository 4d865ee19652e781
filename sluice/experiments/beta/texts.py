"""The table on beta as text: for the terminal, Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from sluice._base.rounding import rounded_up
from sluice.experiments.beta.study import Line, Share

COLUMNS = (
    "data set",
    "gate",
    "beta",
    "good of accepted",
    "good of rejected",
    "acceptance",
    "passes",
    "metric",
    "accuracy %",
    "epsilon",
    "releases",
)

_WHAT_COLUMNS_MEAN = """\
- **good of accepted**, **good of rejected**: the share of updates that lower the mean loss on the training records, with its exact
  binomial interval at 95 % and how many were looked at, over all seeds. Releases are chosen at a public rate; of a chosen one the
  accepted attempt is looked at and each rejected one with a public probability. Candidates are made with noise of the
  study's own, so the run is what it would have been without.
- **acceptance**: accepted attempts over all, those included that were rejected before a batch was read.
- **passes**: records measured for one release over the expected size of a batch.
- **metric**: that of accepted batches, on average; the gate clips its difference from the reference to plus and minus 2.
- **accuracy**: on the test set, read once at the end of each run; mean ± standard deviation over seeds, and how many.
- **epsilon** is proved, at delta 1e-5, rounded up.

Noise is seeded: for experiments only. All but accuracy and epsilon is sensitive in real runs; the records here are public.
"""


def share_text(share: Share) -> str:
    if share.value is None:
        return "-"
    low, high = share.interval
    return f"{100 * share.value:.0f} % [{100 * low:.0f}, {100 * high:.0f}] of {share.evaluated}"


def cells_of(line: Line) -> tuple[str, ...]:
    """A line as the texts of its columns."""
    count = f"{len(line.seeds)} of {len(line.seeds) + len(line.missing)}" if line.missing else f"{len(line.seeds)}"
    spread = "" if line.deviation is None else f" ± {line.deviation:.2f}"
    return (
        line.dataset,
        line.gate,
        f"{line.beta:g}",
        share_text(line.accepted),
        share_text(line.rejected),
        "-" if line.acceptance is None else f"{line.acceptance:.3f}",
        "-" if line.passes is None else f"{line.passes:.2f}",
        "-" if line.metric is None else f"{line.metric:.2f}",
        "- (not run)" if line.accuracy is None else f"{line.accuracy:.2f}{spread} ({count})",
        "-" if line.epsilon is None else rounded_up(line.epsilon),
        "-" if line.releases is None else str(line.releases),
    )


def markdown(lines: Sequence[Line], *, plots: Mapping[str, str], sampling: str) -> str:
    heading = "| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|\n"
    rows = "".join("| " + " | ".join(row) + " |\n" for row in map(cells_of, lines))
    pictures = "".join(f"![{title}]({name})\n\n" for title, name in plots.items())
    return "\n".join(
        [
            "# Beta: good and bad updates among the accepted and the rejected\n",
            f"{sampling}\n",
            heading + rows,
            pictures,
            "## What the columns mean\n",
            _WHAT_COLUMNS_MEAN,
        ]
    )


def as_csv(lines: Iterable[Line]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(
        [
            "dataset", "gate", "beta", "seeds", "missing_seeds", "accepted_good", "accepted_evaluated", "accepted_low",
            "accepted_high", "rejected_good", "rejected_evaluated", "rejected_low", "rejected_high", "acceptance",
            "passes_per_release", "metric", "test_accuracy_percent", "standard_deviation", "epsilon", "releases",
        ]
    )  # fmt: skip
    for line in lines:
        writer.writerow(
            [
                line.dataset,
                line.gate,
                f"{line.beta:g}",
                " ".join(map(str, line.seeds)),
                " ".join(map(str, line.missing)),
                *_share(line.accepted),
                *_share(line.rejected),
                *(_number(value) for value in (line.acceptance, line.passes, line.metric, line.accuracy)),
                _number(line.deviation),
                "" if line.epsilon is None else rounded_up(line.epsilon),
                "" if line.releases is None else line.releases,
            ]
        )
    return buffer.getvalue()


def _share(share: Share) -> list[str]:
    ends = (f"{end:.4f}" for end in share.interval) if share.evaluated else ("", "")
    return [str(share.good), str(share.evaluated), *ends]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


__all__ = ["COLUMNS", "as_csv", "cells_of", "markdown", "share_text"]
