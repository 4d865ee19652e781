"""One page about one run or several: what each guarantees, what it learnt, and how they compare.

It is made from ``public/`` alone and may be published with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from sluice._base.html_page import document, figure, wide_table
from sluice._base.line_plot import BLUE, GREEN, GREY, RED, Line, Point
from sluice._base.rounding import rounded_up
from sluice.runs.certificate import build_certificate
from sluice.runs.derived import audit_of
from sluice.runs.epsilon_plot import epsilon_plot
from sluice.runs.evaluations import Evaluation, main_score, over_epsilon, read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents
from sluice.runs.pages import headline, html_sections
from sluice.runs.privacy_spent import PrivacySpent
from sluice.runs.scores import drawn, score_plot, score_text, score_title, scores_text
from sluice.runs.verify import Verification, verify_together

TITLE = "Privacy report"

_STYLE = """
body { max-width: 60rem; }
article { border-top: 3px solid #1f5fa8; margin-top: 3rem; }
.bar { background: #e4e4e4; height: 0.8rem; max-width: 30rem; }
.bar div { background: #1f5fa8; height: 100%; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.bar .over { background: #b3261e; }
nav ul { padding-left: 1.2rem; }
@media print { article { break-before: page; } nav { display: none; } }
"""

# Told apart by their dashes too, for those who see no colours and for black-and-white print.
_COLORS = (BLUE, "#c1630a", GREEN, "#7a3e9d", RED, GREY)
_DASHES = ("solid", "dashed", "dotted")


@dataclass(frozen=True, kw_only=True)
class _Reported:
    """What the page says of one run; ``contents`` and ``certificate`` are None where a ledger of it cannot be read."""

    name: str
    config: Mapping[str, Any]
    verification: Verification
    contents: LedgerContents | None
    certificate: Mapping[str, Any] | None
    audit: Mapping[str, Any] | None
    evaluations: Sequence[Evaluation]

    @property
    def scores(self) -> Mapping[str, float]:
        """What the model scores on test records after the last release that was evaluated, by name."""
        return self.evaluations[-1].scores if self.evaluations else {}

    @property
    def anchor(self) -> str:
        return "run-" + "".join(letter if letter.isalnum() else "-" for letter in self.name)


def report_page(paths: Sequence[Path], *, delta: float | None = None) -> tuple[str, bool]:
    """The page, and whether everything that the runs publish holds (`sluice.runs.verify`).

    Args:
        delta: at which runs are composed and checked, where it is not their own.

    Guarantee:
        Reads ``public/`` only. Each epsilon on the page is recomputed from a ledger.
    """
    verifications, joint = verify_together(paths, delta=delta)
    names = _distinct_names(paths)
    runs = [_read(path, name, each) for path, name, each in zip(paths, names, verifications, strict=True)]
    holds = all(each.holds for each in verifications)
    body = [
        f"<h1>{TITLE}</h1>",
        f'<p class="headline">{escape(_summary(runs, joint))}</p>',
        *_failures(runs),
        *([_contents_list(runs)] if len(runs) > 1 else []),
        "<main>",
        _section("At a glance", _comparison(runs)),
        *_scores_over_epsilon(runs),
        _section("Privacy budgets", "".join(map(_budget, runs))),
        *(_article(run) for run in runs),
        "</main>",
    ]
    return document(TITLE, "\n".join(body), style=_STYLE), holds


def _read(path: Path, name: str, verification: Verification) -> _Reported:
    folder = RunFolder.look(path)
    contents = verification.contents if verification.spent is not None else None
    return _Reported(
        name=name,
        config=folder.config,
        verification=verification,
        contents=contents,
        certificate=None if contents is None else build_certificate(folder),
        audit=None if contents is None else audit_of(folder, contents),
        evaluations=read_evaluations(folder),
    )


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def _summary(runs: Sequence[_Reported], joint: PrivacySpent | None) -> str:
    if len(runs) == 1:
        return "This run cannot be read." if runs[0].certificate is None else headline(runs[0].certificate)
    if joint is None:
        return f"{len(runs)} runs. They have no joint epsilon: not every ledger can be read."
    if joint.epsilon is None:
        return f"{len(runs)} runs. They have no joint epsilon: for at least one of them nothing is proved."
    audits = " with the audits on their records" if any(run.verification.audit for run in runs) else ""
    return (
        f"{len(runs)} runs{audits}. If they used the same records: epsilon = {rounded_up(joint.epsilon)} together, at delta = "
        f"{joint.delta:g}."
    )


def _failures(runs: Sequence[_Reported]) -> list[str]:
    return [
        f'<p class="warning">{escape(f"{run.name}: {check.name} does not hold: {check.detail}")}</p>'
        for run in runs
        for check in run.verification.checks
        if not check.holds
    ]


def _contents_list(runs: Sequence[_Reported]) -> str:
    links = "".join(f'<li><a href="#{run.anchor}">{escape(run.name)}</a></li>' for run in runs)
    return f'<nav aria-label="Runs"><ul>{links}</ul></nav>'


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _comparison(runs: Sequence[_Reported]) -> str:
    shown = {tuple(run.scores) for run in runs if run.scores}
    only = next(iter(shown))[0] if len(shown) == 1 and len(next(iter(shown))) == 1 else None
    reached = "Test result" if only is None else f"Test {score_title(only)}"
    columns = ("Run", "Data", "Method", "Epsilon", "Delta", "Updates", reached, "Audit", "Checks")
    rows = [
        (
            f'<a href="#{run.anchor}">{escape(run.name)}</a>',
            escape(str(run.config.get("dataset", "-"))),
            escape(str(run.config.get("method", "-"))),
            *(escape(cell) for cell in (*_privacy_cells(run), _reached(run, only), _audit_cell(run))),
            _checks_cell(run) if run.verification.holds else "<strong>FAIL</strong>",
        )
        for run in runs
    ]
    return wide_table(columns, rows, label="Comparison of the runs")


def _privacy_cells(run: _Reported) -> tuple[str, str, str]:
    spent, contents = run.verification.spent, run.contents
    if spent is None or contents is None:
        return "unreadable", "-", "-"
    epsilon = "none proved" if spent.epsilon is None else rounded_up(spent.epsilon)
    seeded = " (seeded: experiment only)" if contents.header.noise == "seeded" else ""
    audited = " (with the audit on its records)" if run.verification.audit else ""
    return epsilon + audited + seeded, f"{spent.delta:g}", f"{contents.spent:,} of {contents.header.planned_releases:,}"


def _reached(run: _Reported, only: str | None = None) -> str:
    """What a run's model scores on test records, without the name where ``only`` one is shown."""
    if not run.scores:
        return "-"
    return scores_text(run.scores) if only is None else score_text(only, run.scores[only])


def _audit_cell(run: _Reported) -> str:
    if run.audit is None:
        return "not audited"
    result = run.audit["result"]
    return f"{'refuted' if result['refuted'] else 'not refuted'}, at least {float(result['lower_bound']):.2f}"


def _checks_cell(run: _Reported) -> str:
    left = ", ".join(escape(each.name) for each in run.verification.not_checked)
    return f"all hold; not checked: {left}" if left else "all hold"


def _scores_over_epsilon(runs: Sequence[_Reported]) -> list[str]:
    """A plot for each score that runs are judged by: those of classes and those of numbers do not compare."""
    lines: dict[str, list[Line]] = {}
    for number, run in enumerate(runs):
        score, points = main_score(run.evaluations), over_epsilon(run.evaluations)
        if score is not None and points:
            lines.setdefault(score, []).append(_line(run, drawn(points, score), number, named=len(runs) > 1))
    if not lines:
        return [_section("Test results over epsilon", "<p>No run has published a test result at a proved epsilon.</p>")]
    return [_section(f"Test {score_title(score)} over epsilon", _plot(runs, score, lines[score])) for score in lines]


def _plot(runs: Sequence[_Reported], score: str, lines: Sequence[Line]) -> str:
    plot = score_plot(lines, score=score, x_label="epsilon of a run planned to stop there")
    said = "; ".join(
        f"{run.name}: {score_text(score, run.scores[score])} at epsilon {_privacy_cells(run)[0]}"
        for run in runs
        if score in run.scores
    )
    return figure(plot, label=f"Test {score_title(score)} over epsilon. At the end, {said}.")


def _line(run: _Reported, points: Sequence[Point], number: int, *, named: bool) -> Line:
    return Line(
        points=points,
        color=_COLORS[number % len(_COLORS)],
        dash=_DASHES[number // len(_COLORS) % len(_DASHES)] if number >= len(_COLORS) else _DASHES[number % 3],
        width=2.0,
        radius=3.0,
        label=run.name if named else "",
    )


def _budget(run: _Reported) -> str:
    spent, contents = run.verification.spent, run.contents
    if spent is None or contents is None:
        return f"<p>{escape(run.name)}: a ledger cannot be read.</p>"
    budget, epsilon = contents.header.target_epsilon, spent.epsilon
    if epsilon is None:
        return f"<p>{escape(run.name)}: no epsilon is proved.</p>"
    if budget is None:
        return f"<p>{escape(run.name)}: epsilon {rounded_up(epsilon)}; no budget was set.</p>"
    share = epsilon / budget
    width, kind = min(100.0, 100 * share), ' class="over"' if share > 1 + 1e-9 else ""
    return (
        f"<p>{escape(run.name)}: epsilon {rounded_up(epsilon)} of {budget:g}</p>"
        f'<div class="bar" aria-hidden="true"><div{kind} style="width: {width:.1f}%"></div></div>'
    )


def _article(run: _Reported) -> str:
    if run.certificate is None or run.contents is None:
        content = "<p>Nothing can be said of this run: a ledger of it cannot be read.</p>"
    else:
        said = f'<p class="headline">{escape(headline(run.certificate))}</p>'
        plot = epsilon_plot(run.contents)
        content = said + html_sections(run.certificate, plot=plot, audit=run.audit, level=3)
    return f'<article id="{run.anchor}">\n<h2>{escape(run.name)}</h2>\n{content}\n</article>'
