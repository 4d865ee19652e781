"""Whatever is in a configuration file, a data file or on the command line: a value, or an error of one or two lines.

A few hundred cases by default; with ``-m slow`` 10,000, beside the 16,000 of test_fuzz_ledger.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from sluice._base.errors import SluiceError
from sluice.cli import main
from sluice.cli import train as train_command
from sluice.data import DataSplits, load
from sluice.experiments.settings import CHOICES, TrainSettings, settings_from, settings_of
from sluice.methods import METHODS

NAMES = tuple(field.name for field in fields(TrainSettings))
PATIENCE_SECONDS = 120
"""A guard against endless loops only: hundreds of times what a case takes."""


def both(check: Callable[..., None], *, few: int, many: int, **strategies: st.SearchStrategy[Any]) -> tuple[Any, Any]:
    """A property as two tests: a few cases, and many of them marked slow."""

    @functools.wraps(check)
    def again(**values: Any) -> None:
        check(**values)

    again.__name__ += "_many"
    options = {"suppress_health_check": list(HealthCheck)}
    return (
        settings(max_examples=few, **options)(given(**strategies)(check)),
        pytest.mark.slow(settings(max_examples=many, **options)(given(**strategies)(again))),
    )


@contextmanager
def folder() -> Iterator[Path]:
    """An empty folder to work in; nothing may be left half-written there."""
    path = Path(tempfile.mkdtemp(prefix="sluice-fuzz-"))
    before = Path.cwd()
    os.chdir(path)
    try:
        yield path
        assert not list(path.rglob("*.partial"))
    finally:
        os.chdir(before)
        shutil.rmtree(path)


@contextmanager
def patience() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still busy after {PATIENCE_SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def require_short(error: SluiceError) -> None:
    text = str(error)
    assert text
    assert len(text.splitlines()) <= 2, text


# Configuration files.

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.sampled_from([10**400, -(2**63), 2**63, 5e-324, 1e308, 0.5, 1e-5, True]),
)
WORDS = st.sampled_from(
    [*METHODS, *(word for words in CHOICES.values() for word in words), "inf", "nan", "digits", "", "x.npz"]
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=4,
)
TABLES = st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text(max_size=5)), VALUES, max_size=4)

GOOD_TOML = b"""# A run.
dataset = "mnist"
releases = 1_000
delta = 1e-5
hidden_reference = false
lr_schedule = 'cosine'
"""
GOOD_JSON = b'{"dataset": "mnist", "releases": 1000, "delta": 1e-5, "gate": null, "lr_schedule": "cosine"}'
EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "drop", "insert"]), st.integers(0, 10**6), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, extra in edits:
        place %= len(content) + 1
        if kind == "flip" and place < len(content):
            changed = (content[place] + 1 + (extra[0] if extra else 0)) % 256
            content = content[:place] + bytes([changed]) + content[place + 1 :]
        elif kind == "cut":
            content = content[:place]
        elif kind == "drop":
            content = content[:place] + content[place + max(1, len(extra)) :]
        elif kind == "insert":
            content = content[:place] + extra + content[place:]
    return content


def read_settings(content: bytes, name: str) -> None:
    with folder() as place:
        file = place / name
        file.write_bytes(content)
        try:
            found = settings_from({}, file=file)
        except SluiceError as error:
            require_short(error)
            return
        assert settings_of(found.to_dict(), where="itself") == found
        json.dumps(found.to_dict(), allow_nan=False)


def check_configuration_bytes(edits: list[tuple[str, int, bytes]], whole: bytes | None, as_json: bool) -> None:
    good = GOOD_JSON if as_json else GOOD_TOML
    read_settings(edited(good, edits) if whole is None else whole, "a.json" if as_json else "a.toml")


test_configuration_bytes, test_configuration_bytes_many = both(
    check_configuration_bytes,
    few=150,
    many=2_000,
    edits=EDITS,
    whole=st.none() | st.binary(max_size=60) | st.text(max_size=30).map(str.encode),
    as_json=st.booleans(),
)


def check_configuration_values(table: dict[str, Any]) -> None:
    read_settings(json.dumps(table).encode(), "a.json")


test_configuration_values, test_configuration_values_many = both(
    check_configuration_values, few=150, many=2_000, table=TABLES
)


def in_toml(value: Any) -> str:
    """TOML of any value, also of some that TOML has no words for: then it is not TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {in_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(in_toml(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str | bool) or value is None else repr(value)


def check_toml_values(table: dict[str, Any]) -> None:
    text = "".join(f"{json.dumps(key)} = {in_toml(value)}\n" for key, value in table.items())
    read_settings(text.encode("utf-8", "surrogatepass"), "a.toml")


test_toml_values, test_toml_values_many = both(check_toml_values, few=150, many=1_500, table=TABLES)


def check_recorded_configurations(changes: dict[str, Any]) -> None:
    try:
        found = settings_of({**TrainSettings().to_dict(), **changes}, where="config.json")
    except SluiceError as error:
        require_short(error)
        return
    assert settings_of(found.to_dict(), where="itself") == found


test_recorded_configurations, test_recorded_configurations_many = both(
    check_recorded_configurations, few=100, many=1_000, changes=TABLES
)


# Data files.


@functools.cache
def good_archive() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, x=np.arange(40, dtype=np.float32).reshape(20, 2), y=np.arange(20) % 2)
    return stream.getvalue()


def read_data(content: bytes) -> DataSplits | None:
    with folder() as place:
        path = place / "own.npz"
        path.write_bytes(content)
        try:
            found = load(str(path))
        except SluiceError as error:
            require_short(error)
            return None
        finally:
            assert path.read_bytes() == content
        assert len(found.train) > 0
        x, y = found.train.batch([0])
        assert x.isfinite().all()
        assert 0 <= int(y[0]) < len(found.classes)
        return found


def check_data_bytes(edits: list[tuple[str, int, bytes]], whole: bytes | None) -> None:
    read_data(edited(good_archive(), edits) if whole is None else whole)


test_data_bytes, test_data_bytes_many = both(
    check_data_bytes, few=150, many=1_500, edits=EDITS, whole=st.none() | st.binary(max_size=100)
)


def check_member_bytes(edits: list[tuple[str, int, bytes]]) -> None:
    """Damage inside of an archive whose checksums are right."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good_archive())) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            new.writestr(name, edited(old.read(name), edits) if name == "x.npy" else old.read(name))
    read_data(stream.getvalue())


HEADER_EDITS = st.lists(
    st.tuples(st.sampled_from(["flip", "drop", "insert"]), st.integers(0, 130), st.binary(max_size=3)),
    min_size=1,
    max_size=3,
)
test_member_bytes, test_member_bytes_many = both(
    check_member_bytes, few=100, many=500, edits=st.one_of(EDITS, HEADER_EDITS)
)

DTYPES = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(),
    arrays.unsigned_integer_dtypes(),
    arrays.floating_dtypes(),
    arrays.complex_number_dtypes(),
    arrays.byte_string_dtypes(max_len=3),
    arrays.unicode_string_dtypes(max_len=3),
    arrays.datetime64_dtypes(),
)
SHAPES = st.one_of(
    arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5),
    st.tuples(st.just(6), st.integers(1, 4)),
    st.just((6,)),
    st.just((6, 1, 4, 4)),
)
ARRAYS = st.builds(lambda dtype, shape: (dtype, shape), DTYPES, SHAPES).flatmap(
    lambda kind: arrays.arrays(kind[0], kind[1])
)
LABELS = st.one_of(ARRAYS, arrays.arrays(np.int64, 6, elements=st.integers(-1, 3)))
MEMBERS = st.one_of(
    st.fixed_dictionaries({"x": ARRAYS, "y": LABELS}),
    st.fixed_dictionaries({"x_train": ARRAYS, "y_train": LABELS, "x_test": ARRAYS, "y_test": LABELS}),
    st.dictionaries(st.sampled_from(["x", "y", "x_train", "y_train", "x_test", "y_test", "z"]), ARRAYS, max_size=4),
)


def check_data_arrays(members: dict[str, np.ndarray]) -> None:
    stream = io.BytesIO()
    np.savez(stream, **members)
    read_data(stream.getvalue())


test_data_arrays, test_data_arrays_many = both(check_data_arrays, few=150, many=1_500, members=MEMBERS)


# The command line.


def run_command(arguments: list[str]) -> int:
    """The exit code of a command; its messages are short and nothing half-written is left."""
    out, err = io.StringIO(), io.StringIO()
    with folder() as place, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patience():
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        code = stop.value.code
        if code == 2:
            assert not [file for file in place.rglob("*") if file.is_file()]
    assert code in (0, 1, 2), (arguments, code)
    assert "Traceback" not in err.getvalue()
    if code == 2:
        assert 1 <= len(err.getvalue().splitlines()) <= 2 or not arguments[1:], err.getvalue()
    if code == 0 and "--json" in arguments and "--help" not in arguments:
        json.loads(out.getvalue())
    return int(code)


ODD = st.one_of(
    st.sampled_from(
        ["nan", "inf", "-inf", "0", "-1", "1e400", "1e-320", "0x10", "1_0", "", " ", "½", "٣", "None", "--"]
    ),
    st.text(max_size=5),
    st.integers().map(str),
    st.floats().map(repr),
)


@st.composite
def options(draw: st.DrawFn, likely: dict[str, list[str]], flags: list[str]) -> list[str]:
    """Options with values that are likely to be allowed, up to two of them with an odd one, or left out; extra words."""
    values = {name: draw(st.sampled_from(choices)) for name, choices in likely.items()}
    for name in draw(st.lists(st.sampled_from(sorted(likely)), max_size=2)):
        values[name] = draw(ODD)
    for name in draw(st.lists(st.sampled_from(sorted(likely)), max_size=2)):
        values.pop(name, None)
    extra = draw(st.one_of(st.just([]), st.just([]), st.lists(st.one_of(st.sampled_from(flags), ODD), max_size=2)))
    return [word for pair in values.items() for word in pair] + extra


ACCOUNTING = {
    "--dataset-size": ["1000", "50"],
    "--batch-size": ["10", "50"],
    "--releases": ["1", "3"],
    "--delta": ["1e-5", "0.01"],
    "--beta": ["3", "0", "-1"],
    "--clip-range": ["2", "0.5"],
    "--gate-noise": ["2", "1"],
    "--reference-noise": ["10", "inf"],
    "--max-attempts": ["1000000", "2"],
}
EPSILON = ACCOUNTING | {"--noise-multiplier": ["2", "0.8"]}
PLAN = ACCOUNTING | {"--epsilon": ["2", "8"], "--accountant": ["rdp"], "--plot": ["plan", "a/b.png"]}


def check_epsilon(arguments: list[str]) -> None:
    run_command(["epsilon", *arguments])


test_epsilon, test_epsilon_many = both(
    check_epsilon, few=40, many=400, arguments=options(EPSILON, ["--json", "--no-gate", "--help"])
)


def test_hardly_any_noise_has_no_warning():
    counts = ["--dataset-size", "1000", "--batch-size", "10", "--releases", "1", "--delta", "1e-5"]
    gate = ["--beta", "3", "--clip-range", "2", "--gate-noise", "2", "--reference-noise", "10"]
    check_epsilon([*counts, *gate, "--noise-multiplier", "1e-320"])


def check_plan(arguments: list[str]) -> None:
    run_command(["plan", *arguments, "--json"])


test_plan, test_plan_many = both(check_plan, few=25, many=200, arguments=options(PLAN, ["--no-gate", "--help"]))

TRAIN = {
    "--dataset": ["digits", "own.npz"],
    "--method": ["dpsr-cg", "dpsgd"],
    "--features": ["plain", "scattering"],
    "--model": ["linear", "pixel-cnn"],
    "--activation": ["tanh", "tempered-sigmoid:2,2,1"],
    "--hold-out": ["0.1"],
    "--noise-multiplier": ["2"],
    "--releases": ["2"],
    "--batch-size": ["64"],
    "--delta": ["1e-5"],
    "--accountant": ["rdp"],
    "--optimizer": ["sgd", "adam"],
    "--lr": ["0.1"],
    "--momentum": ["0.5"],
    "--lr-schedule": ["linear"],
    "--ema-decay": ["0", "0.9"],
    "--max-grad-norm": ["1"],
    "--scaling": ["clip", "global"],
    "--scaling-bound": ["2"],
    "--gate": ["coin", "none"],
    "--beta": ["3"],
    "--gate-noise": ["1"],
    "--max-attempts": ["100000"],
    "--coin-probability": ["0.5"],
    "--seed": ["1"],
    "--evaluate-every": ["0"],
    "--config": ["a.toml"],
    "--run": ["name", "a/b"],
    "--resume": ["name"],
    "--checkpoint-every": ["2"],
    "--threads": ["1"],
    "--max-physical-batch-size": ["8"],
}
BASE = ["--noise-multiplier", "2", "--releases", "2", "--accountant", "rdp", "--batch-size", "64"]


@pytest.fixture(scope="module")
def _no_training() -> Iterator[None]:
    """Everything up to the plan that is shown; the training itself is not what is tested here."""

    def ended(*args: Any, **options: Any) -> None:
        raise typer.Exit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_command, "_carry_out", ended)
        yield
    torch.set_num_threads(1)


def check_train(arguments: list[str]) -> None:
    run_command(["train", *BASE, *arguments])


test_train, test_train_many = (
    pytest.mark.usefixtures("_no_training")(test)
    for test in both(
        check_train,
        few=60,
        many=400,
        arguments=st.one_of(
            options({name: TRAIN[name]}, ["--help", "--hidden-reference", "--no-such-option"])
            if name
            else st.lists(ODD, max_size=2)
            for name in [*TRAIN, ""]
        ),
    )
)

OTHERS = {
    "verify": {"--delta": ["1e-5"]},
    "certificate": {"--json": ["run"]},
    "private": {"--json": ["run"]},
    "data list": {"--data-dir": [".", "none"]},
    "data verify": {"--data-dir": [".", "none"]},
    "data get": {"--data-dir": ["new"]},
    "reproduce": {"--json": ["none"]},
    "bench": {"--json": ["none"]},
    "": {"--version": ["x"]},
}


def check_other_commands(command: str, arguments: list[str]) -> None:
    if any(word in arguments for word in ("mnist", "fashion-mnist", "cifar-10", "imdb")):
        return  # these would be downloaded
    run_command([*command.split(), *arguments])


test_other_commands, test_other_commands_many = both(
    check_other_commands,
    few=60,
    many=600,
    command=st.sampled_from([name for name in OTHERS if name]),
    arguments=st.one_of(*(options(likely, ["run", ".", "--json", "--help"]) for likely in OTHERS.values())),
)
