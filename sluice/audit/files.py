"""What an audit leaves in a run folder: the coins in ``private/``, the result in ``public/``.

A result is a function of what was released and of coins that the auditor threw. It tells nothing of any record, so it may
be published.
"""

from __future__ import annotations

import json
from typing import Any

from sluice._base.errors import DataError, InputError
from sluice._base.files import parse_json, read_bytes, write_atomically
from sluice.audit.evidence import Evidence
from sluice.audit.page import audit_page
from sluice.audit.result import AuditResult, result_of
from sluice.audit.trials import Trials
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import read_ledger

FORMAT = 1


def kept_coins(folder: RunFolder, *, drawn: bytes) -> bytes:
    """The coins that a run began with, else those just drawn, which are on disk before anything is released."""
    path = folder.coins_path
    if path.exists():
        coins = read_bytes(path)
        if len(coins) != len(drawn):
            raise DataError(f"{path} does not hold the coins of this run's canaries: restore it from a copy.")
        return coins
    if folder.ledger_path.exists() and read_ledger(folder.ledger_path).spent:
        raise DataError(f"{path} is missing though the run had begun: restore it from a copy.")
    write_atomically(path, drawn, public=False)
    return drawn


def write_audit(folder: RunFolder, evidence: Evidence | Trials) -> dict[str, Any]:
    """Write ``public/audit.json``, which names the head of the ledger that it is about, and ``audit.html``.

    Returns what the first of them holds.
    """
    result = evidence.result
    written = {
        "format": FORMAT,
        "ledger_head": read_ledger(folder.ledger_path).head,
        "verdict": result.verdict,
        "summary": [list(row) for row in result.rows],
        "result": result.to_dict(),
    }
    text = json.dumps(written, indent=2, allow_nan=False) + "\n"
    write_atomically(folder.audit_path, text.encode("ascii"), public=True)
    write_atomically(folder.audit_page_path, audit_page(evidence).encode("utf-8"), public=True)
    folder.hide_times()
    return written


def read_audit(folder: RunFolder) -> AuditResult:
    """What the last audit of a run found."""
    path = folder.audit_path
    if not path.exists():
        raise InputError(
            f"path={str(folder.path)!r} is not allowed: the run has not been audited. Rehearse it: "
            f"sluice audit rehearse --run {folder.path}"
        )
    written = parse_json(read_bytes(path), what=str(path))
    if not isinstance(written, dict) or written.get("format") != FORMAT:
        raise DataError(f"{path} is not an audit of format {FORMAT}.")
    try:
        return result_of(written["result"], where=str(path))
    except (InputError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


__all__ = ["kept_coins", "read_audit", "write_audit"]
