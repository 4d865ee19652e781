from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from sluice.data import parsers
from sluice.data.catalog import CATALOG, CIFAR_10, IMDB, MNIST
from sluice.data.files import CatalogEntry, Content, DataFile


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Small tests see no data but what they make; tests on the real sets share one cache."""
    if request.node.get_closest_marker("bigdata"):
        if not os.environ.get("SLUICE_DATA"):
            pytest.skip("needs the real data sets: set SLUICE_DATA to a folder that holds them")
        return
    monkeypatch.delenv("SLUICE_DATA", raising=False)
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def _content(content: bytes) -> Content:
    return Content(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


@dataclass
class TinySet:
    """A made-up data set under a real name, with what its files hold, by their place in a data folder."""

    entry: CatalogEntry
    files: dict[str, bytes]
    truth: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, root: Path, only: Callable[[str], bool] = lambda place: True) -> Path:
        for place, content in self.files.items():
            if only(place):
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                (root / place).write_bytes(content)
        return root


@pytest.fixture
def tiny_mnist(monkeypatch: pytest.MonkeyPatch) -> TinySet:
    generator = np.random.default_rng(0)
    truth = {
        "train-images-idx3-ubyte.gz": generator.integers(0, 256, (50, 28, 28)),
        "train-labels-idx1-ubyte.gz": np.arange(50) % 10,
        "t10k-images-idx3-ubyte.gz": generator.integers(0, 256, (20, 28, 28)),
        "t10k-labels-idx1-ubyte.gz": np.arange(20) % 10,
    }
    contents = {name: gzip.compress(idx(array), mtime=0) for name, array in truth.items()}
    layout = tuple(replace(file, contents=(_content(contents[file.name]),), mirrors=()) for file in MNIST.layouts[0])
    entry = replace(MNIST, layouts=(layout,))
    monkeypatch.setitem(CATALOG, "mnist", entry)
    return TinySet(entry, {f"mnist/{name}": content for name, content in contents.items()}, truth)


@pytest.fixture
def tiny_cifar(monkeypatch: pytest.MonkeyPatch) -> TinySet:
    generator = np.random.default_rng(1)
    batches, truth = {}, {}
    for name in parsers.CIFAR_10_MEMBERS:
        images, labels = generator.integers(0, 256, (6, 3072), dtype=np.uint8), list(range(6))
        truth[name] = images.reshape(-1, 3, 32, 32)
        batches[name] = pickle.dumps({b"data": images, b"labels": labels}, protocol=2)
    for name, content in batches.items():
        monkeypatch.setitem(parsers.CIFAR_10_MEMBERS, name, hashlib.sha256(content).hexdigest())
    files = {f"cifar-10/cifar-10-python.tar.{kind}": _archive(batches, kind) for kind in ("gz", "xz")} | {
        f"cifar-10/cifar-10-batches-py/{name}": content for name, content in batches.items()
    }

    def tiny(file: DataFile) -> DataFile:
        return replace(file, contents=(_content(files[file.places[0]]),), mirrors=())

    entry = replace(CIFAR_10, layouts=tuple(tuple(map(tiny, layout)) for layout in CIFAR_10.layouts))
    monkeypatch.setitem(CATALOG, "cifar-10", entry)
    return TinySet(entry, files, truth)


def _archive(batches: dict[str, bytes], kind: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{kind}") as archive:  # type: ignore[call-overload]
        for name, content in [("readme.html", b"<p>"), *batches.items()]:
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


@pytest.fixture
def tiny_imdb(monkeypatch: pytest.MonkeyPatch) -> TinySet:
    """Reviews whose first word tells which one it is: rank 1 + position."""
    stream = io.BytesIO()
    reviews = np.empty(30, dtype=object)
    for position in range(30):
        reviews[position] = [1 + position, *range(100, 100 + position)]
    labels = np.array([1] * 15 + [0] * 15)
    np.savez(stream, x_train=reviews, y_train=labels, x_test=reviews[::-1].copy(), y_test=labels[::-1].copy())
    index = b'{"the": 1}'
    files = {"imdb/imdb.npz": stream.getvalue(), "imdb/imdb_word_index.json": index}
    layout = tuple(replace(file, contents=(_content(files[file.places[0]]),), mirrors=()) for file in IMDB.layouts[0])
    entry = replace(IMDB, layouts=(layout,))
    monkeypatch.setitem(CATALOG, "imdb", entry)
    monkeypatch.setattr("sluice.data.loading.IMDB", entry)
    return TinySet(entry, files)


@dataclass
class Mirrors:
    """A web server on this machine whose addresses behave well or badly: ``url("cut", file)``."""

    address: str
    contents: dict[str, bytes]
    requests: list[str]
    over: threading.Event

    def url(self, behaviour: str, name: str) -> str:
        return f"{self.address}/{behaviour}/{name}"

    def serve(self, tiny: TinySet, *behaviours: str) -> CatalogEntry:
        """The data set's entry, with these mirrors in this order."""
        self.contents.update({Path(place).name: content for place, content in tiny.files.items()})
        first, *others = tiny.entry.layouts
        served = tuple(
            replace(file, mirrors=tuple(self.url(behaviour, file.name) for behaviour in behaviours)) for file in first
        )
        return replace(tiny.entry, layouts=(served, *others))


@pytest.fixture
def mirrors() -> Iterator[Mirrors]:
    contents: dict[str, bytes] = {}
    requests: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            _, behaviour, name = self.path.split("/")
            content = contents[name]
            if behaviour == "absent":
                self.send_error(404)
            elif behaviour == "broken" or (behaviour == "recovering" and requests.count(self.path) == 1):
                self.send_error(503)
            elif behaviour == "moved":
                self.send_response(302)
                self.send_header("Location", f"/good/{name}")
                self.end_headers()
            elif behaviour == "wrong":
                self._send(content[:-1] + bytes([content[-1] ^ 1]))
            elif behaviour == "short":
                self._send(content[: len(content) // 2])
            elif behaviour == "cut":
                self._send(content[: len(content) // 2], promised=len(content))
            elif behaviour == "stalled":
                self._send(content[: len(content) // 2], promised=len(content))
                over.wait(30)
            elif behaviour == "slow":
                self._send(content[:1], promised=len(content))
                for part in range(1, len(content), len(content) // 5 + 1):
                    time.sleep(0.02)
                    self.wfile.write(content[part : part + len(content) // 5 + 1])
            elif behaviour == "flood":
                self.send_response(200)
                self.end_headers()
                for _ in range(500):  # an end, so that a download without a limit fails a test, not the disk
                    self.wfile.write(bytes(1 << 16))
            else:
                self._send(content)

        def _send(self, content: bytes, promised: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(content) if promised is None else promised))
            self.end_headers()
            self.wfile.write(content)
            self.wfile.flush()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up in the middle is what the tests are about."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield Mirrors(f"http://127.0.0.1:{server.server_address[1]}", contents, requests, over)
    over.set()
    server.shutdown()
    server.server_close()
    thread.join()
