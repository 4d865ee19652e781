from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.data.unpacked import unpacked

SOURCE = "ab" * 32
TRUTH = {"train_inputs": np.arange(24, dtype=np.uint8).reshape(2, 3, 4), "train_labels": np.array([1, 0], np.int64)}


def make() -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in TRUTH.items()}


def refuse() -> dict[str, np.ndarray]:
    raise AssertionError("the cached copy should have been used")


def assert_true(arrays: dict[str, np.ndarray]) -> None:
    assert arrays.keys() == TRUTH.keys()
    for name, array in TRUTH.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
        assert arrays[name].flags.writeable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert_true(unpacked("set", SOURCE, make))
    (folder,) = (tmp_path / "cache" / "unpacked").iterdir()
    return folder


def test_the_second_time_nothing_is_unpacked(folder: Path) -> None:
    assert_true(unpacked("set", SOURCE, refuse))
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "train_inputs.npy", "train_labels.npy"]


def test_a_copy_of_another_source_is_not_used(folder: Path) -> None:
    with pytest.raises(AssertionError):
        unpacked("set", "cd" * 32, refuse)
    with pytest.raises(AssertionError):
        unpacked("set", SOURCE[:16] + "c" * 48, refuse)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _drop_an_array(manifest: Path) -> None:
    document = json.loads(manifest.read_text())
    del document["arrays"]["train_labels"]
    manifest.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("train_inputs.npy", _flip),
        ("train_inputs.npy", Path.unlink),
        ("train_labels.npy", lambda path: path.write_bytes(b"")),
        ("train_labels.npy", lambda path: path.write_bytes(path.read_bytes()[:-8])),
        ("manifest.json", Path.unlink),
        ("manifest.json", lambda path: path.write_text("{")),
        ("manifest.json", lambda path: path.write_text("[]")),
        ("manifest.json", lambda path: path.write_text("{}")),
        ("manifest.json", _drop_an_array),
    ],
)
def test_a_damaged_copy_is_made_anew(name: str, harm: Any, folder: Path) -> None:
    harm(folder / name)
    assert_true(unpacked("set", SOURCE, make))
    assert_true(unpacked("set", SOURCE, refuse))


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="SLUICE_CACHE"):
        assert_true(unpacked("set", SOURCE, make))


HARASS = """
import random, sys
from pathlib import Path
import numpy as np
from sluice.data.unpacked import unpacked
from sluice._base.files import cache_dir

truth = np.arange(50_000, dtype=np.int64)
chance = random.Random(int(sys.argv[1]))
made = 0
def make():
    global made
    made += 1
    return {"first": truth, "second": truth[::-1]}
for _ in range(12):
    arrays = unpacked("set", "ab" * 32, make)
    assert np.array_equal(arrays["first"], truth) and np.array_equal(arrays["second"], truth[::-1])
    victim = next((cache_dir() / "unpacked").iterdir()) / chance.choice(["first.npy", "second.npy", "manifest.json"])
    if chance.random() < 0.5:
        victim.unlink(missing_ok=True)
    elif victim.exists():
        victim.write_bytes(b"damaged")
print(made)
"""


def test_two_processes_that_damage_each_others_copies_always_read_the_truth() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", HARASS, str(seed)], stdout=-1, stderr=-1, text=True)
        for seed in (1, 2)
    ]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert int(out) > 3
