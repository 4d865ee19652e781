from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.cli import main
from sluice.data import load
from sluice.data.catalog import CATALOG


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["data", *map(str, arguments)])
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def only_tiny(tiny_mnist: Any, tiny_imdb: Any) -> Iterator[None]:
    whole = dict(CATALOG)
    for name in ("fashion-mnist", "cifar-10"):
        del CATALOG[name]
    yield
    CATALOG.clear()
    CATALOG.update(whole)


def harm(path: Path) -> bytes:
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    return bytes(content)


def test_list_names_all_sets_and_where_they_lie(run: Any, tiny_mnist: Any, tmp_path: Path) -> None:
    code, out, _ = run("list", "--data-dir", tiny_mnist.write(tmp_path), "--json")
    sets = {item["name"]: item for item in json.loads(out)["data_sets"]}
    assert code == 0
    assert list(sets) == ["digits", "mnist", "fashion-mnist", "cifar-10", "imdb"]
    assert sets["mnist"]["found"] == str(tmp_path)
    assert sets["digits"]["found"] == "embedded"
    assert sets["cifar-10"] | {"found": "", "download_bytes": 170_498_071, "train": 50_000} == sets["cifar-10"]
    code, out, _ = run("list")
    assert code == 0
    assert "download 170 MB" in out


def test_verify_prints_a_line_for_each_file(run: Any, only_tiny: None, tiny_mnist: Any, tmp_path: Path) -> None:
    root = tiny_mnist.write(tmp_path / "data")
    code, out, _ = run("verify", "--data-dir", root)
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines] == ["ok"] * 5 + ["absent"] * 2
    assert lines[1].endswith(str(root / "mnist" / "train-images-idx3-ubyte.gz"))


def test_verify_finds_the_bad_file(run: Any, only_tiny: None, tiny_mnist: Any, tmp_path: Path) -> None:
    root = tiny_mnist.write(tmp_path / "data")
    bad = root / "mnist" / "t10k-labels-idx1-ubyte.gz"
    content = harm(bad)
    (root / "mnist" / "t10k-images-idx3-ubyte.gz").unlink()
    code, out, _ = run("verify", "--data-dir", root)
    states = {line.split()[2].rstrip(":"): line for line in out.splitlines()}
    assert code == 1
    assert states[str(bad)].startswith("damaged")
    assert f"sluice data get mnist --replace --data-dir {root}" in states[str(bad)]
    assert states[str(root / "mnist" / "t10k-images-idx3-ubyte.gz")].startswith("missing")
    assert bad.read_bytes() == content
    code, out, _ = run("verify", "mnist", "--data-dir", root, "--json")
    report = json.loads(out)
    assert (code, report["bad"]) == (1, 2)
    assert sorted(file["state"] for file in report["files"]) == ["damaged", "missing", "ok", "ok"]


def test_verify_looks_into_every_place(
    run: Any, only_tiny: None, tiny_mnist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLUICE_DATA", str(tiny_mnist.write(tmp_path / "data")))
    tiny_mnist.write(tmp_path / "cache" / "data")
    harm(tmp_path / "cache" / "data" / "mnist" / "train-labels-idx1-ubyte.gz")
    code, out, _ = run("verify", "mnist")
    assert (code, len(out.splitlines())) == (1, 8)
    assert "repair with: sluice data get mnist --replace\n" in out


def test_verify_of_a_set_that_is_not_there(run: Any, only_tiny: None) -> None:
    assert run("verify")[0] == 0
    code, out, _ = run("verify", "mnist")
    assert code == 1
    assert "missing" in out
    code, _, err = run("verify", "mnst")
    assert code == 2
    assert "digits, mnist" in err
    assert err.count("\n") == 1


def test_verify_of_a_folder_that_is_not_there(run: Any, tmp_path: Path) -> None:
    code, _, err = run("verify", "--data-dir", tmp_path / "typo")
    assert code == 2
    assert "typo" in err


@pytest.mark.parametrize("place", [(), ("--data-dir", "new")])
def test_get_downloads_once(
    place: tuple[str, ...],
    run: Any,
    tiny_mnist: Any,
    mirrors: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CATALOG, "mnist", mirrors.serve(tiny_mnist, "wrong", "good"))
    code, out, _ = run("get", "mnist", *place)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["downloaded"] * 4
    root = Path("new") if place else tmp_path / "cache" / "data"
    assert {f"mnist/{path.name}": path.read_bytes() for path in (root / "mnist").iterdir()} == tiny_mnist.files
    code, out, _ = run("get", "mnist", *place, "--json")
    assert {file["action"] for file in json.loads(out)["data_sets"]["mnist"]} == {"found"}


def test_get_sets_damaged_files_aside_only_when_told(
    run: Any, tiny_mnist: Any, mirrors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "mnist", mirrors.serve(tiny_mnist, "good"))
    root = tiny_mnist.write(tmp_path / "data")
    path = root / "mnist" / "train-labels-idx1-ubyte.gz"
    for number, name in enumerate(("damaged", "damaged.2")):
        content = harm(path)
        code, _, err = run("get", "mnist", "--data-dir", root)
        assert code == 2
        assert len(err.splitlines()) == 2
        assert path.read_bytes() == content
        assert len(mirrors.requests) == number
        command = err.splitlines()[1].removeprefix("Repair it with: sluice data ").split()
        assert run(*command)[0] == 0
        assert path.read_bytes() == tiny_mnist.files[f"mnist/{path.name}"]
        assert path.with_name(f"{path.name}.{name}").read_bytes() == content
    assert run("verify", "mnist", "--data-dir", root)[0] == 0


def test_get_fetches_the_archive_where_the_unpacked_folder_is_damaged(
    run: Any, tiny_cifar: Any, mirrors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "cifar-10", mirrors.serve(tiny_cifar, "good"))
    root = tiny_cifar.write(tmp_path / "data", only=lambda place: "batches-py" in place)
    harm(root / "cifar-10" / "cifar-10-batches-py" / "data_batch_3")
    assert run("get", "cifar-10", "--data-dir", root)[0] == 2
    code, out, _ = run("get", "cifar-10", "--data-dir", root, "--replace")
    assert code == 0
    assert out.split() == ["downloaded", "cifar-10", str(root / "cifar-10" / "cifar-10-python.tar.gz")]
    assert len(load("cifar-10", data_dir=root, download=False).train) == 30


def test_get_digits_and_wrong_names(run: Any) -> None:
    assert run("get", "digits")[0] == 0
    code, _, err = run("get", "nothing")
    assert code == 2
    assert "must be one of digits" in err


def test_get_without_a_working_mirror_is_one_short_error(
    run: Any, tiny_mnist: Any, mirrors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "mnist", mirrors.serve(tiny_mnist, "absent"))
    code, out, err = run("get", "mnist")
    assert (code, out) == (2, "")
    assert len([line for line in err.splitlines() if not line.startswith("Downloading")]) == 2
    assert "Traceback" not in err
    assert not (tmp_path / "cache").exists()


def test_a_damaged_scikit_learn_is_noticed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.data.loading.DIGITS_SHA256", "0" * 64)
    code, _, err = run("verify", "digits")
    assert code == 2
    assert "pip install --force-reinstall scikit-learn" in err


def test_the_commands_do_not_load_torch_before_they_run() -> None:
    script = "import sys, sluice.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_entries_are_well_formed() -> None:
    for entry in CATALOG.values():
        for layout in entry.layouts:
            for file in layout:
                assert all(len(content.sha256) == 64 and content.size > 0 for content in file.contents)
                assert all(url.startswith("http") and url.endswith(file.name) for url in file.mirrors)
        assert all(len(file.mirrors) >= 2 for file in entry.layouts[0])
