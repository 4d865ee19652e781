"""The real data sets, where they are at hand."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from sluice.cli import main
from sluice.data import load, load_sequences, load_word_index

pytestmark = pytest.mark.bigdata


@pytest.mark.parametrize(
    ("name", "train_labels", "test_labels", "counts"),
    [
        (
            "mnist",
            [5, 0, 4, 1, 9, 2, 1, 3, 1, 4],
            [7, 2, 1, 0, 4],
            [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        ),
        ("fashion-mnist", [9, 0, 0, 3, 0, 2, 7, 2, 5, 5], [9, 2, 1, 1, 6], [6000] * 10),
    ],
)
def test_mnist_and_fashion_mnist(name: str, train_labels: list[int], test_labels: list[int], counts: list[int]) -> None:
    splits = load(name)
    assert splits.train.inputs.shape == (60_000, 1, 28, 28)
    assert splits.test.inputs.shape == (10_000, 1, 28, 28)
    assert splits.train.inputs.dtype == torch.uint8
    assert splits.train.labels[:10].tolist() == train_labels
    assert splits.test.labels[:5].tolist() == test_labels
    assert splits.train.labels.bincount().tolist() == counts
    assert len(splits.classes) == 10
    x, _ = splits.train.batch(range(1000))
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)


def test_mnist_and_fashion_mnist_have_their_known_means() -> None:
    for name, mean in (("mnist", 0.1307), ("fashion-mnist", 0.2860)):
        inputs = load(name).train.inputs
        assert inputs.to(torch.float64).mean() / 255 == pytest.approx(mean, abs=5e-5)


def test_cifar_10() -> None:
    splits = load("cifar-10")
    assert splits.train.inputs.shape == (50_000, 3, 32, 32)
    assert splits.test.inputs.shape == (10_000, 3, 32, 32)
    assert splits.train.labels[:5].tolist() == [6, 9, 9, 4, 1]
    assert splits.test.labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert splits.train.labels.bincount().tolist() == [5000] * 10
    assert splits.test.labels.bincount().tolist() == [1000] * 10
    assert [splits.classes[label] for label in (6, 9, 3)] == ["frog", "truck", "cat"]
    means = splits.train.inputs.to(torch.float32).mean((0, 2, 3)) / 255
    torch.testing.assert_close(means, torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5, rtol=0)


@pytest.mark.slow
def test_cifar_10_from_its_unpacked_folder_is_the_same(tmp_path: Path) -> None:
    with tarfile.open(Path(os.environ["SLUICE_DATA"]) / "cifar-10" / "cifar-10-python.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    from_folder, from_archive = load("cifar-10", data_dir=tmp_path, download=False), load("cifar-10")
    assert from_folder.fingerprint != from_archive.fingerprint
    assert torch.equal(from_folder.train.inputs, from_archive.train.inputs)
    assert torch.equal(from_folder.test.labels, from_archive.test.labels)


def test_imdb() -> None:
    train, test = load_sequences("imdb")
    assert (train.sequences.lengths[:4] + 1).tolist() == [218, 189, 141, 550]
    assert (test.sequences.lengths[:4] + 1).tolist() == [68, 260, 603, 181]
    assert int(train.sequences.lengths.max()) + 1 == 2494
    splits = load("imdb")
    assert (splits.train.inputs.shape, splits.test.inputs.shape) == ((25_000, 80), (25_000, 80))
    assert splits.train.labels[:10].tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 1, 0]
    assert splits.train.labels.bincount().tolist() == splits.test.labels.bincount().tolist() == [12_500, 12_500]
    x, _ = splits.train.batch([0])
    assert x[0, :10].tolist() == [1, 14, 22, 16, 43, 530, 973, 1622, 1385, 65]
    assert int(splits.train.inputs.max()) == 19_999
    word = {rank: word for word, rank in load_word_index().items()}
    assert len(word) == 88_584
    assert " ".join(word[rank] for rank in train.sequences[0][:7]) == "this film was just brilliant casting location"


def test_imdb_as_bags_of_words() -> None:
    splits = load("imdb", text_as="bag-of-words", vocabulary=5000)
    x, _ = splits.train.batch(range(500))
    assert x.shape == (500, 5000)
    torch.testing.assert_close(x.norm(dim=1), torch.ones(500))


def test_verify_checks_every_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["data", "verify", "--data-dir", os.environ["SLUICE_DATA"]])
    lines = capsys.readouterr().out.splitlines()
    assert not caught.value.code, lines
    assert all(line.startswith("ok ") for line in lines)
    assert len(lines) == 12


def test_two_processes_load_mnist_at_once_into_an_empty_cache(tmp_path: Path) -> None:
    script = "from sluice.data import load; print(int(load('mnist').train.inputs.sum()))"
    environment = os.environ | {"SLUICE_CACHE": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", script], env=environment, stdout=-1, text=True)
        for _ in range(2)
    ]
    sums = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert sums == {str(int(load("mnist").train.inputs.sum()))}
    assert [path.name for path in tmp_path.rglob("*.partial")] == []
