"""The files in ``public/``, held to the ledger and to the certificate, and those that nothing can be held to."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from sluice._base.errors import DataError
from sluice._base.files import explained, read_bytes, sha256_of_file, without_access_time
from sluice.runs.certificate import read_certificate
from sluice.runs.derived import PAGES, derived_files
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import LedgerContents, library_versions

REMEDY = "; if nobody changed it, an earlier version wrote it: sluice certificate RUN writes it again"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that holds or does not, in one line."""

    name: str
    holds: bool
    detail: str


@dataclass(frozen=True, kw_only=True)
class NotChecked:
    """A file that may say anything, and why."""

    name: str
    why: str


def logged_file_checks(folder: RunFolder, contents: LedgerContents) -> list[Check]:
    """The files of which the ledger has a hash, and weights, of which it must have one."""
    checks = []
    for name, expected in sorted(contents.published.items()):
        path = folder.public / name
        if path.parent != folder.public or not path.is_file():
            checks.append(Check(name=name, holds=False, detail="published according to the ledger, and missing"))
        elif sha256_of_file(path) != expected:
            checks.append(Check(name=name, holds=False, detail="its sha256 is not the one in the ledger"))
        else:
            checks.append(Check(name=name, holds=True, detail=f"sha256 as in the ledger ({expected[:16]})"))
    if folder.weights_path.name not in contents.published and folder.weights_path.exists():
        detail = "present, but not in the ledger: nothing ties these weights to this ledger"
        checks.append(Check(name=folder.weights_path.name, holds=False, detail=detail))
    return checks


def page_checks(folder: RunFolder, contents: LedgerContents) -> list[Check]:
    """Pages and plots, where the versions that wrote them are those that run here: others may word or draw them otherwise.

    Only for a run whose certificate holds.
    """
    if not folder.certificate_path.exists():
        return []
    certificate = read_certificate(folder)
    if certificate.get("written_with") != library_versions():
        return []
    try:
        expected = derived_files(folder, contents, certificate)
    except DataError as error:
        return [Check(name="pages", holds=False, detail=str(error))]
    found = {name: read_bytes(folder.public / name) for name in expected if (folder.public / name).exists()}
    return [
        Check(name=name, holds=True, detail="follows from certificate and ledger")
        if content == expected[name]
        else Check(name=name, holds=False, detail=f"not what follows from certificate and ledger{REMEDY}")
        for name, content in found.items()
    ]


def not_checked(folder: RunFolder, *, checked: Collection[str]) -> list[NotChecked]:
    """Files in ``public/`` beside those that were checked."""
    with explained("read", folder.public):
        descriptor = without_access_time(str(folder.public), os.O_RDONLY)
        try:
            names = sorted(os.listdir(descriptor))
        finally:
            os.close(descriptor)
    own = {path.name for path in (folder.config_path, folder.ledger_path, folder.audit_ledger_path)}
    return [NotChecked(name=name, why=_why(folder, name)) for name in names if name not in {*checked, *own}]


def _why(folder: RunFolder, name: str) -> str:
    if name not in PAGES or not folder.certificate_path.exists():
        return "neither ledger nor certificate tells what must be in it"
    return "the certificate does not hold, or other versions wrote it: sluice certificate RUN writes it again"


__all__ = ["REMEDY", "Check", "NotChecked", "logged_file_checks", "not_checked", "page_checks"]
