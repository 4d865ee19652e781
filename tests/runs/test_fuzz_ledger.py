"""Whatever is in a file, the answer is a value or a SluiceError, and the files stay as they are.

Each property runs a few hundred cases by default and 2,000 (16,000 in all) with ``-m slow``.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice._base.errors import SluiceError
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.scaling import GlobalScaling
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.runs.certificate import build_certificate, disagreements, read_certificate
from sluice.runs.checkpoint import load_checkpoint, save_checkpoint
from sluice.runs.folder import RunFolder
from sluice.runs.ledger import Ledger, LedgerHeader, read_ledger
from sluice.runs.ledger_entries import GENESIS, encode_line, parse_ledger
from sluice.runs.pages import html_page, markdown_page
from sluice.runs.privacy_spent import spending
from sluice.runs.verify import verify_run

CONFIG = "ab" * 32
FEW = settings(max_examples=300, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=2_000, suppress_health_check=list(HealthCheck))

NUMBERS = st.one_of(
    st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([0, 1, -1, 10**30, 1e-300, 1e300])
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["inf", "nan", "secure"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=6,
)
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "drop", "insert"]), st.integers(0, 10**6), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def both(check: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """A property as two tests: a few hundred cases, and two thousand of them marked slow."""

    @functools.wraps(check)
    def again(**values: Any) -> None:
        check(**values)

    again.__name__ += "_many"
    return FEW(given(**strategies)(check)), pytest.mark.slow(MANY(given(**strategies)(again)))


@functools.cache
def mechanism() -> SelectiveRelease:
    return SelectiveRelease(
        sample_rate=0.1,
        expected_batch_size=10.0,
        scaling=GlobalScaling(bound=2.0),
        noise_multiplier=2.0,
        releases=5,
        gate=ClippingBiasGate(gate_noise=1.0, reference_noise=10.0, small_norm=1.0, max_attempts=1000),
        prior_releases=(8.0,),
    )


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def header_body(**changes: Any) -> dict[str, Any]:
    header = LedgerHeader(
        mechanism=mechanism().to_dict(), delta=1e-5, accountant="rdp", configuration=CONFIG, versions={"sluice": "0.1"}
    )
    return header.to_dict() | changes


def chained(bodies: list[dict[str, Any]]) -> bytes:
    lines, head = [], GENESIS
    for body in bodies:
        line, head = encode_line(body, previous=head)
        lines.append(line)
    return b"".join(lines)


@functools.cache
def good_ledger() -> bytes:
    releases = [{"kind": "release", "number": number} for number in (1, 2, 3)]
    return chained([header_body(), *releases, {"kind": "published", "file": "x", "sha256": CONFIG}])


def edited(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, extra in edits:
        place %= len(content) + 1
        if kind == "flip" and place < len(content):
            content = (
                content[:place]
                + bytes([content[place] ^ (1 + (extra[0] if extra else 0)) % 256])
                + content[place + 1 :]
            )
        elif kind == "cut":
            content = content[:place]
        elif kind == "drop":
            content = content[:place] + content[place + max(1, len(extra)) :]
        elif kind == "insert":
            content = content[:place] + extra + content[place:]
    return content


def check_damaged_bytes(edits: list[tuple[str, int, bytes]]) -> None:
    """What can still be read is a beginning of what was written, and every begun record after it counts."""
    content = edited(good_ledger(), edits)
    try:
        contents = parse_ledger(content, where="ledger")
    except SluiceError:
        return
    assert good_ledger().startswith(content[: contents.complete_bytes])
    assert contents.spent == contents.counted + (len(content) > contents.complete_bytes)


test_damaged_bytes, test_damaged_bytes_many = both(check_damaged_bytes, edits=EDITS)


def check_reopening_damaged_bytes(edits: list[tuple[str, int, bytes]]) -> None:
    """Opening for more either repairs the file without losing a count, or leaves it alone."""
    content = edited(good_ledger(), edits)
    with folder() as place:
        path = place / "ledger.jsonl"
        path.write_bytes(content)
        try:
            expected = read_ledger(path).spent
        except SluiceError:
            with pytest.raises(SluiceError):
                Ledger.open(path)
            assert path.read_bytes() == content
        else:
            with Ledger.open(path) as ledger:
                assert ledger.spent == expected
            assert read_ledger(path).spent == expected
        assert list(place.iterdir()) == [path]


test_reopening_damaged_bytes, test_reopening_damaged_bytes_many = both(check_reopening_damaged_bytes, edits=EDITS)


def check_arbitrary_bytes(content: bytes) -> None:
    with pytest.raises(SluiceError):
        parse_ledger(content, where="ledger")


test_arbitrary_bytes, test_arbitrary_bytes_many = both(
    check_arbitrary_bytes,
    content=st.one_of(st.binary(max_size=200), VALUES.map(lambda value: json.dumps(value).encode() + b"\n")),
)


def check_well_chained_nonsense(bodies: list[dict[str, Any]]) -> None:
    """Anybody can compute the hashes, so what the lines say has to be checked as strictly."""
    try:
        contents = parse_ledger(chained([header_body(), *bodies]), where="ledger")
    except SluiceError:
        return
    kinds = [body["kind"] for body in bodies]
    assert contents.spent == sum(kind in ("release", "recovered") for kind in kinds)


BODIES = st.lists(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["release", "recovered", "published", "header", "other"])},
        optional={"number": st.one_of(st.integers(0, 3), VALUES), "file": VALUES, "sha256": VALUES, "extra": VALUES},
    ),
    max_size=4,
)
test_well_chained_nonsense, test_well_chained_nonsense_many = both(check_well_chained_nonsense, bodies=BODIES)


def paths_in(value: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    if not isinstance(value, dict):
        return [here]
    return [here, *(path for key, item in value.items() for path in paths_in(item, (*here, key)))]


def replaced(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    return {**value, path[0]: replaced(value[path[0]], path[1:], new)}


HEADER_PATHS = st.sampled_from(paths_in(mechanism().to_dict()))


def check_changed_mechanisms(path: tuple[str | int, ...], value: Any) -> None:
    """Any value anywhere in the mechanism: an epsilon that is a number, or an error that says why not."""
    body = header_body(mechanism=replaced(mechanism().to_dict(), path, value))
    try:
        content = chained([body, {"kind": "release", "number": 1}])
        spent = spending(parse_ledger(content, where="ledger"))
    except SluiceError:
        return
    assert spent.epsilon is None or spent.epsilon >= 0


test_changed_mechanisms, test_changed_mechanisms_many = both(check_changed_mechanisms, path=HEADER_PATHS, value=VALUES)


@functools.cache
def good_run() -> tuple[dict[str, bytes], str]:
    with folder() as place:
        run = RunFolder.create(place / "run", config={"a": 1})
        header = {"configuration": run.config_hash, "mechanism": mechanism().to_dict(), "accountant": "rdp"}
        with Ledger.create(run.ledger_path, header=LedgerHeader(delta=1e-5, **header)) as ledger:
            ledger.append_release(1)
        run.close()
        certificate = json.dumps(build_certificate(run))
        return {path.name: path.read_bytes() for path in run.public.iterdir()}, certificate


def write_run(place: Path, **replaced_files: bytes) -> RunFolder:
    files, certificate = good_run()
    (place / "public").mkdir()
    for name, content in (files | {"certificate.json": certificate.encode()} | replaced_files).items():
        (place / "public" / name).write_bytes(content)
    return RunFolder.look(place)


def check_changed_certificates(path: tuple[str | int, ...], value: Any) -> None:
    certificate = json.loads(good_run()[1])
    changed = replaced(certificate, path, value)
    with folder() as place:
        run = write_run(place, **{"certificate.json": json.dumps(changed).encode()})
        try:
            found = list(disagreements(read_certificate(run), certificate))
        except SluiceError:
            return
    facts = {
        key: item
        for key, item in changed.items()
        if key not in ("features", "warnings", "not_accounted", "must_not_be_published")
    }
    if not found and all(facts[key] == certificate[key] for key in facts if key != "privacy"):
        assert changed["privacy"]["epsilon"] >= certificate["privacy"]["epsilon"] * (1 - 1e-5)


test_changed_certificates, test_changed_certificates_many = both(
    check_changed_certificates, path=st.sampled_from(paths_in(json.loads(good_run()[1]))), value=VALUES
)


def check_damaged_runs(name: str, edits: list[tuple[str, int, bytes]]) -> None:
    """The whole verification of a run with one damaged file: a verdict or an error, and no file is touched."""
    files = good_run()[0] | {"certificate.json": good_run()[1].encode()}
    with folder() as place:
        (place / "public").mkdir()
        for each, content in (files | {name: edited(files[name], edits)}).items():
            (place / "public" / each).write_bytes(content)
        before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        try:
            verdict = verify_run(place)
        except SluiceError:
            verdict = None
        assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
        if verdict is not None and verdict.holds and verdict.contents is not None:
            assert verdict.contents.spent >= 1


test_damaged_runs, test_damaged_runs_many = both(
    check_damaged_runs, name=st.sampled_from(["config.json", "ledger.jsonl", "certificate.json"]), edits=EDITS
)


@functools.cache
def good_checkpoint() -> bytes:
    with folder() as place:
        payload = {"weights": torch.arange(4.0), "optimizer": {"step": 3}}
        return save_checkpoint(place, payload, config_hash=CONFIG, release=3).read_bytes()


def check_damaged_checkpoints(edits: list[tuple[str, int, bytes]], whole: bytes | None) -> None:
    """A damaged checkpoint is never loaded, and the spare is found behind it."""
    content = edited(good_checkpoint(), edits) if whole is None else whole
    with folder() as place:
        (place / "release-0000000003.checkpoint").write_bytes(good_checkpoint())
        (place / "release-0000000004.checkpoint").write_bytes(content)
        loaded = load_checkpoint(place, config_hash=CONFIG)
        assert loaded is not None
        assert (loaded.release, loaded.payload["optimizer"]) == (3, {"step": 3})
        assert loaded.note is not None


test_damaged_checkpoints, test_damaged_checkpoints_many = both(
    check_damaged_checkpoints, edits=EDITS, whole=st.none() | st.binary(max_size=300)
)


def test_pages_can_be_made_of_every_good_certificate() -> None:
    certificate = json.loads(good_run()[1])
    assert markdown_page(certificate)
    assert html_page(certificate, plot="<svg></svg>")
