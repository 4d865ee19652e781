"""The format of a ledger: hash-chained JSON lines, read strictly, and what each kind of line says.

Line k is the canonical JSON of a body and its ``hash``: the sha256 of the hash of line k-1 (64 zeros before the first)
followed by the canonical JSON of the body. docs/runs.md describes the format for those who want to check it with
tools of their own.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sluice
from sluice._base import validate
from sluice._base.codec import Encoded, decode, encode, readable
from sluice._base.errors import DataError, InputError, SluiceError
from sluice._base.files import canonical_json, parse_json
from sluice.accounting import ACCOUNTANTS

FORMAT = 1
GENESIS = "0" * 64
NOISE_SOURCES = ("secure", "seeded")

_HASH = re.compile(r"[0-9a-f]{64}")
_LISTED_PACKAGES = ("dp-accounting", "numpy", "scipy", "torch")


class LedgerEntry(Encoded):
    """What one line of a ledger says, beside its hash."""

    tag: ClassVar[str | None] = "kind"


@readable
@dataclass(frozen=True, kw_only=True)
class LedgerHeader(LedgerEntry):
    """All that an accountant has to know of a run, fixed before its first release.

    Attributes:
        format: of the whole ledger.
        mechanism: the mechanism's ``to_dict()``, whole, what is published before training included.
        delta: the delta at which the run reports.
        configuration: sha256 of the run's public configuration, or None where there is none.
        noise: "secure", or "seeded" for experiments that can be repeated and protect nobody.
        accountant: "pld" or "rdp".
        target_epsilon: the budget, or None where the noise was given instead.
        versions: of the libraries that made the run.
    """

    kind: ClassVar[str] = "header"

    format: int = FORMAT
    mechanism: Mapping[str, Any]
    delta: float
    configuration: str | None = None
    noise: str = "secure"
    accountant: str = "pld"
    target_epsilon: float | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: library_versions())

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise InputError(f"format={self.format} is not allowed: this version of Sluice reads format {FORMAT}.")
        validate.open_fraction(delta=self.delta)
        validate.one_of(NOISE_SOURCES, noise=self.noise)
        validate.one_of(ACCOUNTANTS, accountant=self.accountant)
        if self.target_epsilon is not None:
            validate.positive(target_epsilon=self.target_epsilon)
        if self.configuration is not None and not _is_hash(self.configuration):
            raise InputError(f"configuration={self.configuration!r} is not allowed: it must be a sha256 in hex.")
        if not isinstance(self.mechanism, Mapping):
            raise InputError(f"mechanism={self.mechanism!r} is not allowed: it must be a mechanism's to_dict().")
        planned = self.mechanism.get("releases")
        validate.positive_integer(**{"mechanism['releases']": planned})
        if not isinstance(self.versions, Mapping):
            raise InputError(f"versions={self.versions!r} is not allowed: it must map names to versions.")
        for name, version in self.versions.items():
            _require_string(**{f"versions[{name!r}]": version})

    @property
    def planned_releases(self) -> int:
        return int(self.mechanism["releases"])


@readable
@dataclass(frozen=True, kw_only=True)
class Release(LedgerEntry):
    """A release, written before its update is applied."""

    kind: ClassVar[str] = "release"

    number: int


@readable
@dataclass(frozen=True, kw_only=True)
class Recovered(Release):
    """A release that is counted though its line was torn."""

    kind: ClassVar[str] = "recovered"


@readable
@dataclass(frozen=True, kw_only=True)
class Published(LedgerEntry):
    """Which bytes are published under a name, written before the file is put in place."""

    kind: ClassVar[str] = "published"

    file: str
    sha256: str

    def __post_init__(self) -> None:
        _require_string(file=self.file)
        if not _is_hash(self.sha256):
            raise InputError(f"sha256={self.sha256!r} is not allowed: it must be 64 hex digits.")


@dataclass(frozen=True, kw_only=True)
class LedgerContents:
    """What a ledger says.

    Attributes:
        header: the first line.
        counted: the number of the last release that is logged, recovered ones included.
        recovered: how many of these were counted after a crash though their entry was torn.
        torn: whether the last line is incomplete. It stands for one more release, which counts as spent, unless
            all planned releases are logged already and no other could have been begun.
        published: sha256 of each public file by name, as last recorded.
        head: the hash of the last complete line. Who keeps it can tell any later change.
        complete_bytes: the length of all complete lines.
    """

    header: LedgerHeader
    counted: int
    recovered: int
    torn: bool
    published: Mapping[str, str]
    head: str
    complete_bytes: int

    @property
    def spent(self) -> int:
        """How many releases are counted, the torn one included."""
        return self.counted + self.torn_release

    @property
    def torn_release(self) -> bool:
        return self.torn and self.counted < self.header.planned_releases


def library_versions() -> dict[str, str]:
    """The versions that can matter to whoever checks a run later."""
    from importlib.metadata import version

    return {"sluice": sluice.__version__} | {name: version(name) for name in _LISTED_PACKAGES}


def encode_line(entry: LedgerEntry | Mapping[str, Any], *, previous: str) -> tuple[bytes, str]:
    """An entry, or its plain data, as its line in the ledger, and the hash of that line."""
    try:
        body = encode(entry)
        digest = hashlib.sha256(previous.encode("ascii") + canonical_json(body)).hexdigest()
        return canonical_json({**body, "hash": digest}) + b"\n", digest
    except (TypeError, ValueError) as error:
        raise InputError(f"a ledger line must be plain, strict JSON: {error}.") from error


def parse_ledger(content: bytes, *, where: str) -> LedgerContents:
    """Read a whole ledger.

    Guarantee:
        The result's ``spent`` is at least the number of releases whose entry was begun. A torn last line (no line
        end, or null bytes, as power loss leaves them) counts as one while any is left of the plan. Whatever else is
        wrong is a DataError that names the line; nothing is guessed.
    """
    lines = content.split(b"\n")
    tail = lines.pop()
    torn = bool(tail)
    if not torn and lines and b"\0" in lines[-1]:
        lines.pop()
        torn = True
    if not lines:
        raise DataError(
            f"{where}: the first line is missing or incomplete, so no release was ever logged here. "
            "Start the run again in an empty folder."
        )
    head = GENESIS
    header: LedgerHeader | None = None
    counted = recovered = 0
    published: dict[str, str] = {}
    for index, line in enumerate(lines, start=1):
        if header is not None and counted < header.planned_releases:
            # Nearly all lines are the next release, to the byte: there is nothing to read in them.
            next_release, digest = encode_line(Release(number=counted + 1), previous=head)
            if line + b"\n" == next_release:
                counted, head = counted + 1, digest
                continue
        place = f"{where}, line {index}"
        body, head = _decode_line(line, previous=head, place=place)
        try:
            if (body["kind"] == LedgerHeader.kind) != (index == 1):
                raise InputError(f"the header must be the first line and nowhere else, not a {body['kind']!r}.")
            entry = decode(LedgerEntry, body, what="the line")
            if isinstance(entry, LedgerHeader):
                header = entry
            elif isinstance(entry, Published):
                published[entry.file] = entry.sha256
            else:
                if entry.number != counted + 1:
                    raise InputError(f"number={entry.number} is not allowed: release {counted + 1} comes next.")
                if header is None or entry.number > header.planned_releases:
                    raise InputError(
                        f"number={entry.number} is not allowed: it is beyond the releases of the mechanism."
                    )
                counted += 1
                recovered += isinstance(entry, Recovered)
        except SluiceError as error:
            raise DataError(f"{place}: {error}") from error
    if header is None:
        raise DataError(f"{where}: the header is missing.")
    return LedgerContents(
        header=header,
        counted=counted,
        recovered=recovered,
        torn=torn,
        published=published,
        head=head,
        complete_bytes=sum(len(line) + 1 for line in lines),
    )


def _decode_line(line: bytes, *, previous: str, place: str) -> tuple[dict[str, Any], str]:
    entry = parse_json(line, what=f"{place}: this line")
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str) or not _is_hash(entry.get("hash")):
        raise DataError(f"{place}: it must be a JSON object with a 'kind' and a 'hash'.")
    found = entry.pop("hash")
    try:
        expected_line, expected = encode_line(entry, previous=previous)
    except SluiceError as error:
        raise DataError(f"{place}: {error}") from error
    if found != expected:
        raise DataError(
            f"{place}: the hash chain is broken: this line or one before it was changed, moved or removed. "
            "Restore the ledger from a copy; the run cannot be verified or resumed as it is."
        )
    if expected_line != line + b"\n":
        raise DataError(f"{place}: the line is not in canonical form, so it was not written by Sluice.")
    return entry, expected


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _require_string(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or not value.strip():
            raise InputError(f"{name}={value!r} is not allowed: it must be a string.")
