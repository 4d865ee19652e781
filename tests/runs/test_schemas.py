"""The published schemas say what the classes and the codec write: no key more or less, and each of its type."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from sluice.experiments.settings import settings_from
from sluice.mechanism.base import Mechanism
from sluice.methods import METHODS, planned_mechanism
from sluice.runs.certificate import certificate_of, schema
from sluice.runs.ledger_entries import (
    GENESIS,
    LedgerEntry,
    LedgerHeader,
    Published,
    Recovered,
    Release,
    encode_line,
    parse_ledger,
)
from sluice.runs.privacy_spent import spending

HASH = "ab" * 32
LATER = {"scores", "spent_again", "written_with"}  # not in the certificates of version 0.1.0, which stay valid
OPEN = {("mechanism",), ("versions",), ("written_with",), ("released", "files")}
"""Objects whose keys the schemas leave open: the codec checks the first by its class, the others hold any names."""


@functools.cache
def mechanism_of(method: str) -> Mechanism:
    settings = settings_from({"method": method, "releases": 4})
    return planned_mechanism(settings, dataset_size=1437)


def header_of(method: str) -> LedgerHeader:
    mechanism = mechanism_of(method)
    accountant = mechanism.accountants[-1] if mechanism.accountants else "pld"
    return LedgerHeader(
        mechanism=mechanism.to_dict(), delta=1e-5, accountant=accountant, configuration=HASH, target_epsilon=3.0
    )


OTHER_LINES = (Release(number=1), Recovered(number=2), Published(file="weights.pt", sha256=HASH))


def line_of(entry: LedgerEntry) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(encode_line(entry, previous=GENESIS)[0])
    return line


def branch_of(kind: str) -> dict[str, Any]:
    """The part of the ledger's schema that is about this kind of line."""

    def kinds(branch: dict[str, Any]) -> list[str]:
        stated = branch["properties"]["kind"]
        return stated.get("enum", [stated.get("const")])

    (found,) = [branch for branch in schema("ledger-line")["oneOf"] if kind in kinds(branch)]
    return found


def closed_objects(data: Any, described: dict[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """Every object in the data with its schema, where the schema lists the keys."""
    if isinstance(data, dict) and place not in OPEN:
        yield data, described
        for key, value in data.items():
            yield from closed_objects(value, described["properties"].get(key, {}), (*place, key))
    elif isinstance(data, list) and "items" in described:
        for each in data:
            yield from closed_objects(each, described["items"], (*place, "items"))


def leaves(data: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(data, dict) and place not in OPEN:
        for key, value in data.items():
            yield from leaves(value, (*place, key))
    else:
        yield place


def with_wrong_type(data: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    changed = copy.deepcopy(data)
    inner = functools.reduce(lambda found, key: found[key], place[:-1], changed)
    inner[place[-1]] = [[]] if not isinstance(inner[place[-1]], list) else 1
    return changed


def assert_fits(data: dict[str, Any], described: dict[str, Any], whole: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(whole)
    validator.validate(data)
    for written, listed in closed_objects(data, described):
        assert set(written) == set(listed["properties"])
        assert set(listed["required"]) == set(written) - LATER
        assert listed["additionalProperties"] is False
    for place in leaves(data):
        assert not validator.is_valid(with_wrong_type(data, place)), place


def assert_line_fits(entry: LedgerEntry) -> None:
    line = line_of(entry)
    assert_fits(line, branch_of(entry.kind), schema("ledger-line"))
    assert LedgerEntry.from_dict({key: value for key, value in line.items() if key != "hash"}) == entry


@pytest.mark.parametrize("method", METHODS)
def test_every_header_has_the_keys_and_types_of_its_schema(method):
    assert_line_fits(header_of(method))


@pytest.mark.parametrize("entry", OTHER_LINES, ids=lambda entry: entry.kind)
def test_every_other_line_has_the_keys_and_types_of_its_schema(entry):
    assert_line_fits(entry)


def test_the_schema_has_no_kind_of_line_that_is_never_written():
    stated = [branch["properties"]["kind"] for branch in schema("ledger-line")["oneOf"]]
    listed = {kind for each in stated for kind in each.get("enum", [each.get("const")])}
    assert listed == {LedgerHeader.kind, *(entry.kind for entry in OTHER_LINES)}


@pytest.mark.parametrize("method", METHODS)
def test_every_certificate_has_the_keys_and_types_of_its_schema(method):
    head = encode_line(header_of(method), previous=GENESIS)[0]
    contents = parse_ledger(head, where="test")
    certificate = certificate_of(contents, configuration=HASH, spent=spending(contents))
    assert_fits(json.loads(json.dumps(certificate, allow_nan=False)), schema("certificate"), schema("certificate"))
    assert certificate["mechanism"] == json.loads(json.dumps(mechanism_of(method).to_dict()))
