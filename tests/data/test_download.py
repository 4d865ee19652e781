from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from sluice._base.errors import DataError
from sluice.data import load
from sluice.data.catalog import CATALOG
from sluice.data.download import download
from sluice.data.files import DataFile

QUICK = {"timeout": (2.0, 1.0), "pause": 0.0}


def labels_file(mirrors: Any, tiny: Any, *behaviours: str) -> DataFile:
    return mirrors.serve(tiny, *behaviours).layouts[0][1]


@pytest.mark.parametrize("bad", ["absent", "broken", "wrong", "short", "cut", "stalled", "flood"])
def test_a_bad_mirror_is_passed_over_for_a_good_one(bad: str, tiny_mnist: Any, mirrors: Any, tmp_path: Path) -> None:
    file = labels_file(mirrors, tiny_mnist, bad, "good")
    path = download(file, tmp_path / "root", **QUICK)
    assert path == tmp_path / "root" / "mnist" / file.name
    assert path.read_bytes() == tiny_mnist.files[f"mnist/{file.name}"]
    assert [address.split("/")[1] for address in mirrors.requests] == [bad, "good"]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("behaviour", ["slow", "moved", "recovering"])
def test_a_slow_a_moved_and_a_recovering_mirror_deliver(
    behaviour: str, tiny_mnist: Any, mirrors: Any, tmp_path: Path
) -> None:
    file = labels_file(mirrors, tiny_mnist, behaviour)
    assert download(file, tmp_path, **QUICK).read_bytes() == tiny_mnist.files[f"mnist/{file.name}"]


def test_all_mirrors_bad_says_what_each_did_and_leaves_nothing(tiny_mnist: Any, mirrors: Any, tmp_path: Path) -> None:
    file = labels_file(mirrors, tiny_mnist, "absent", "broken", "wrong", "short", "cut", "stalled", "flood")
    with pytest.raises(DataError) as caught:
        download(file, tmp_path / "cache" / "data", **QUICK)
    message = str(caught.value)
    for part in (
        file.name,
        "answered 404",
        "answered 503",
        "sent other content",
        "broke off the transfer",
        "did not answer in time",
        "sent more than",
        file.contents[0].sha256,
    ):
        assert part in message
    assert message.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_only_passing_faults_are_tried_again(tiny_mnist: Any, mirrors: Any, tmp_path: Path) -> None:
    file = labels_file(mirrors, tiny_mnist, "absent", "broken", "wrong", "cut")
    with pytest.raises(DataError):
        download(file, tmp_path, **QUICK)
    tried = [address.split("/")[1] for address in mirrors.requests]
    assert tried == ["absent", "broken", "wrong", "cut", "broken", "cut"]


def test_a_mirror_that_does_not_exist_is_named(tiny_mnist: Any, tmp_path: Path) -> None:
    file = tiny_mnist.entry.layouts[0][1]
    unreachable = DataFile(
        name=file.name, places=file.places, contents=file.contents, mirrors=("http://127.0.0.1:1/labels",)
    )
    with pytest.raises(DataError, match=r"127\.0\.0\.1:1: could not be reached"):
        download(unreachable, tmp_path, **QUICK)


def test_elsewhere_than_on_a_terminal_one_plain_line_is_printed(
    tiny_mnist: Any, mirrors: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = labels_file(mirrors, tiny_mnist, "good")
    download(file, tmp_path, **QUICK)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"Downloading {file.name} (")
    assert captured.err.count("\n") == 1


def test_on_a_terminal_a_bar_is_drawn(
    tiny_mnist: Any,
    mirrors: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = labels_file(mirrors, tiny_mnist, "slow")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    download(file, tmp_path, **QUICK)
    captured = capsys.readouterr()
    assert "━" in captured.err
    assert captured.out == ""


def test_two_downloads_at_once_both_succeed(tiny_mnist: Any, mirrors: Any, tmp_path: Path) -> None:
    file = labels_file(mirrors, tiny_mnist, "slow")
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(download(file, tmp_path, **QUICK))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert list(paths[0].parent.iterdir()) == [paths[0]]


def test_load_downloads_into_the_cache_what_is_found_nowhere(
    tiny_mnist: Any, mirrors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "mnist", mirrors.serve(tiny_mnist, "absent", "good"))
    data_dir = tiny_mnist.write(tmp_path / "partly", only=lambda place: "train" in place)
    splits = load("mnist", data_dir=data_dir)
    assert (len(splits.train), len(splits.test)) == (50, 20)
    assert {address.rsplit("/")[-1] for address in mirrors.requests} == {
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    }
    assert sorted(path.name for path in (tmp_path / "cache" / "data" / "mnist").iterdir()) == [
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels-idx1-ubyte.gz",
    ]
    mirrors.requests.clear()
    load("mnist", data_dir=data_dir)
    assert mirrors.requests == []
