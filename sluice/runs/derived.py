"""What in ``public/`` follows from ledger and certificate to the byte: pages for people, and plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice._base.errors import DataError
from sluice._base.files import parse_json, read_bytes
from sluice.runs.epsilon_plot import epsilon_plot
from sluice.runs.evaluations import main_score, over_epsilon, read_evaluations
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents
from sluice.runs.pages import html_page, markdown_page
from sluice.runs.scores import score_svg

PLOT = "accuracy.svg"
"""Named after the score of most runs, like ``accuracy.jsonl``; its axis names the score of this one."""

PAGES = ("certificate.md", "certificate.html", "epsilon.svg", PLOT)


def derived_files(folder: RunFolder, contents: LedgerContents, certificate: Mapping[str, Any]) -> dict[str, bytes]:
    """The content of each of `PAGES`, of the last one where there are scores to draw.

    Guarantee:
        A function of ledger, certificate, test scores and the result of an audit, and of nothing else.
    """
    plot, audit = epsilon_plot(contents), audit_of(folder, contents)
    texts = {
        "certificate.md": markdown_page(certificate, audit=audit),
        "certificate.html": html_page(certificate, plot=plot, audit=audit),
        "epsilon.svg": plot,
    }
    evaluations = read_evaluations(folder)
    score, points = main_score(evaluations), over_epsilon(evaluations)
    if score is not None and points:
        texts[PLOT] = score_svg(points, score=score, delta=contents.header.delta)
    return {name: text.encode("utf-8") for name, text in texts.items()}


def audit_of(folder: RunFolder, contents: LedgerContents) -> dict[str, Any] | None:
    """The audit of this very ledger, if there is one."""
    if not folder.audit_path.exists():
        return None
    audit = parse_json(read_bytes(folder.audit_path), what=str(folder.audit_path))
    if not isinstance(audit, dict) or audit.get("ledger_head") != contents.head:
        return None
    if not _can_be_shown(audit):
        raise DataError(
            f"{folder.audit_path} is not the result of an audit: rehearse again, or restore it from a copy."
        )
    return audit


def _can_be_shown(audit: Mapping[str, Any]) -> bool:
    summary, result = audit.get("summary"), audit.get("result")
    return (
        isinstance(summary, list)
        and all(isinstance(row, list) and len(row) == 2 for row in summary)
        and isinstance(result, dict)
        and isinstance(result.get("notes"), list)
        and isinstance(result.get("rehearsal"), bool)
        and isinstance(result.get("refuted"), bool)
        and isinstance(result.get("lower_bound"), int | float)
    )


__all__ = ["PAGES", "PLOT", "audit_of", "derived_files"]
