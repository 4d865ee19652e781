"""`sluice predict` takes what training took, in each of its forms, and says in one line what does not fit."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice import load_model
from sluice._base.errors import SluiceError
from sluice.cli import main
from sluice.experiments.preparing import prepare
from sluice.experiments.run import Training
from sluice.experiments.settings import settings_from

CLASSES = np.arange(60) % 3
X = np.random.default_rng(0).normal(0, 0.1, (60, 3)) + 3 * np.eye(3)[CLASSES]
NAMES = np.array(["low", "mid", "high"])


def trained(path: Path, dataset: Path, **chosen: Any) -> Path:
    quick = {
        "releases": 30,
        "noise_multiplier": 0.1,
        "method": "dpsgd",
        "seed": 1,
        "batch_size": 30,
        "accountant": "rdp",
    }
    settings = settings_from({**quick, "dataset": str(dataset), "evaluate_every": 0, **chosen})
    Training(settings=settings, splits=prepare(settings, show_progress=False)).start(path)
    shutil.rmtree(path / "private")
    return path


@pytest.fixture(scope="module")
def of_rows(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    np.savez(folder / "own.npz", x=X, y=CLASSES)
    return trained(folder / "run", folder / "own.npz")


@pytest.fixture(scope="module")
def of_table(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    return trained(folder / "run", table(folder / "own.csv", NAMES[CLASSES]), class_names="low,mid,high", target="size")


@pytest.fixture(scope="module")
def of_images(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    return trained(folder / "run", image_folder(folder / "own"))


def table(path: Path, labels: Any, *, names: str = "a,b,c,size") -> Path:
    rows = [",".join([*map(str, row), *([] if labels is None else [str(labels[i])])]) for i, row in enumerate(X)]
    path.write_text("\n".join([names, *rows]) + "\n")
    return path


def image_folder(path: Path, *, names: tuple[str, ...] = ("bright", "dark")) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name in names:
        (path / name).mkdir(parents=True)
        for i in range(30):
            image.new("L", (6, 4), (200 if name == "bright" else 20) + i).save(path / name / f"{i:02}.png")
    return path


def predicted(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["predict", str(run), str(data), "--json"])
    out, err = capsys.readouterr()
    assert not end.value.code, err
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(run: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["predict", str(run), str(data)])
    out, err = capsys.readouterr()
    assert (end.value.code, out, len(err.splitlines())) == (2, "", 1)
    return err


@pytest.mark.parametrize("y", [CLASSES, CLASSES[:, None], CLASSES.astype(float), np.eye(3)[CLASSES]])
def test_labels_may_have_any_form_that_training_takes(of_rows, tmp_path, capsys, y):
    np.savez(tmp_path / "asked.npz", x=X, y=y)
    assert predicted(of_rows, tmp_path / "asked.npz", capsys)["accuracy"] == 1.0


def test_arrays_of_names_are_read_with_the_classes_of_the_run(of_table, tmp_path, capsys):
    np.savez(tmp_path / "asked.npz", x=X, y=NAMES[CLASSES])
    assert predicted(of_table, tmp_path / "asked.npz", capsys)["accuracy"] == 1.0
    np.savez(tmp_path / "asked.npz", x=X, y=np.roll(NAMES, 1)[CLASSES])
    assert predicted(of_table, tmp_path / "asked.npz", capsys)["accuracy"] == 0.0


def test_a_table_is_predicted_by_a_run_on_a_table(of_table, tmp_path, capsys):
    path = table(tmp_path / "asked.csv", NAMES[CLASSES])
    found = predicted(of_table, path, capsys)
    assert (found["accuracy"], found["classes"][:3]) == (1.0, ["low", "mid", "high"])
    found = predicted(of_table, table(path, None, names="a,b,c"), capsys)
    assert (found["accuracy"], len(found["classes"])) == (None, 60)
    assert "record 1 has 'huge' in the column 'size'" in refusal(of_table, table(path, ["huge"] * 60), capsys)
    assert "record 1 has nothing in the column 'size'" in refusal(of_table, table(path, [""] * 60), capsys)


def test_folders_of_images_are_predicted_by_a_run_on_such(of_images, tmp_path, capsys):
    assert predicted(of_images, image_folder(tmp_path / "both"), capsys)["accuracy"] == 1.0
    found = predicted(of_images, image_folder(tmp_path / "dark", names=("dark",)), capsys)
    assert (found["accuracy"], set(found["classes"])) == (1.0, {"dark"})
    found = predicted(of_images, tmp_path / "dark" / "dark", capsys)
    assert (found["accuracy"], set(found["classes"])) == (None, {"dark"})
    image_folder(tmp_path / "other", names=("dark", "dim"))
    assert "folders that are no classes of the model (dim)" in refusal(of_images, tmp_path / "other", capsys)


def test_images_of_another_type_are_images(of_images, tmp_path, capsys):
    bright = np.full((4, 4, 6), 0.85)
    np.savez(tmp_path / "asked.npz", x=bright)
    assert set(predicted(of_images, tmp_path / "asked.npz", capsys)["classes"]) == {"bright"}


ONE_NAN = np.where(np.arange(180).reshape(60, 3) == 7, np.nan, X)


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"x": X, "y": CLASSES[:-1]}, "60 records, y has 59 labels"),
        ({"x": X, "y": NAMES[CLASSES]}, "holds names of classes"),
        ({"x": X, "y": CLASSES + 1}, "labels of 4 classes, and the model has 3"),
        ({"x": X, "y": np.eye(4)[CLASSES]}, "labels of 4 classes, and the model has 3"),
        ({"x": X[:, :2]}, r"the model sees records of shape (3,), and these become (2,)"),
        ({"x": np.zeros((5, 4, 4), np.uint8)}, r"the model sees records of shape (3,), and these become (4, 4)"),
        ({"x": X[:0]}, "at least one"),
        ({"x": ONE_NAN}, "NaN or infinite values"),
        ({"x": X.astype(str)}, "it must hold finite numbers"),
        ({"x": X[:, 0]}, "it must be (records, ...)"),
        ({"z": X}, "has no records"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(of_rows, tmp_path, capsys, content, part):
    np.savez(tmp_path / "asked.npz", **content)
    assert part in refusal(of_rows, tmp_path / "asked.npz", capsys)


def test_a_file_that_is_not_there_is_refused(of_rows, tmp_path, capsys):
    assert "there is no such file" in refusal(of_rows, tmp_path / "nothing.csv", capsys)


@pytest.mark.parametrize("records", [X[:, :2], X.astype(str), ONE_NAN, np.array(1.0)])
def test_a_program_gets_the_same_refusals(of_rows, records):
    with pytest.raises(SluiceError, match=r"^records"):
        load_model(of_rows).predict(records)


def test_no_records_have_no_predictions(of_rows):
    assert load_model(of_rows).predict(X[:0]).shape == (0,)


def test_numbers_need_as_many_targets_as_records(tmp_path, capsys):
    np.savez(tmp_path / "own.npz", x=X, y=X[:, 0])
    run = trained(tmp_path / "run", tmp_path / "own.npz", loss="squared")
    assert set(predicted(run, tmp_path / "own.npz", capsys)["scores"]) == {"mean_squared_error", "r_squared"}
    for y, part in ((X[1:, 0], "59 labels"), (np.full(60, np.nan), "target 0 is nan"), (NAMES[CLASSES], "no numbers")):
        np.savez(tmp_path / "asked.npz", x=X, y=y)
        assert part in refusal(run, tmp_path / "asked.npz", capsys)


def test_predictions_are_an_ordinary_file_of_the_user(of_rows, tmp_path):
    np.savez(tmp_path / "asked.npz", x=X)
    before = time.time() - 10
    with pytest.raises(SystemExit) as end:
        main(["predict", str(of_rows), str(tmp_path / "asked.npz"), "--output", str(tmp_path / "found.csv")])
    assert not end.value.code
    assert (tmp_path / "found.csv").stat().st_mtime > before
