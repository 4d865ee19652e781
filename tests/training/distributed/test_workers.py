"""Several workers do what one does: the oracle is a run in one process with the same seed."""

from __future__ import annotations

import statistics

import pytest

from sluice.runs.ledger import read_ledger

AGREE = 1e-5


def same_everywhere(results):
    assert len({result["digest"] for result in results}) == 1
    return results[0]


@pytest.fixture(scope="module")
def alone(server):
    (result,) = server.results("train", workers=1)
    return result


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_any_number_of_workers_takes_the_same_decisions(server, alone, difference, workers):
    found = same_everywhere(server.results("train", workers=workers))
    assert found["released"] == 100
    assert max(alone["attempts"]) > 3
    assert found["attempts"] == alone["attempts"]
    assert found["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
    assert difference(found["weights"], alone["weights"]) < AGREE


def test_measuring_stops_early_on_all_workers(server):
    """Rejected attempts end at a chunk boundary: fewer records are measured than in one chunk for each worker."""
    early, late = (server.results("measured_by_rejected", workers=2, chunk=chunk) for chunk in (8, 128))
    assert early[0] == early[1]
    assert [attempts for attempts, _ in early[0]] == [attempts for attempts, _ in late[0]]
    assert sum(measured for _, measured in early[0]) < 0.8 * sum(measured for _, measured in late[0])


def test_batches_with_fewer_records_than_workers(server, difference):
    alone, *_ = server.results("train", workers=1, releases=40, rate=0.005, gate=False)
    found = same_everywhere(server.results("train", workers=4, releases=40, rate=0.005, gate=False))
    assert 0 in alone["measured"]
    assert {1, 2} <= set(alone["measured"])
    assert found["measured"] == alone["measured"]
    assert difference(found["weights"], alone["weights"]) < AGREE


@pytest.mark.parametrize("rate", [0.1, 0.005])
def test_the_ordinary_loop(server, difference, rate):
    alone, *_ = server.results("train_by_loop", workers=1, rate=rate)
    found = same_everywhere(server.results("train_by_loop", workers=3, rate=rate))
    assert found["attempts"] == alone["attempts"]
    assert difference(found["weights"], alone["weights"]) < AGREE


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dpsgd", {"releases": 10, "noise_multiplier": 1.0, "batch_size": 30}),
        ("matrix", {"releases": 10, "noise_multiplier": 1.0}),
        ("dpsur", {"releases": 2, "noise_multiplier": 1.0, "batch_size": 30}),
        ("dpagd", {"releases": 5, "epsilon": 3.0}),
        ("dpis", {"releases": 10, "noise_multiplier": 2.0, "batch_size": 30}),
        ("non-private", {"releases": 2}),
    ],
)
def test_every_method(server, difference, method, settings):
    alone, *_ = server.results("train_method", workers=1, method=method, settings=settings)
    found = same_everywhere(server.results("train_method", workers=2, method=method, settings=settings))
    assert found["attempts"] == alone["attempts"]
    assert found["measured"] == alone["measured"]
    assert difference(found["weights"], alone["weights"]) < AGREE


@pytest.mark.parametrize("by_loop", [False, True])
@pytest.mark.parametrize("kind", ["thinning", "quantile"])
def test_coins_and_counts_of_records_are_shared(server, difference, kind, by_loop):
    alone, *_ = server.results("train_other", workers=1, kind=kind, by_loop=by_loop)
    found = same_everywhere(server.results("train_other", workers=3, kind=kind, by_loop=by_loop))
    assert found["measured"] == alone["measured"]
    assert found["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
    assert difference(found["weights"], alone["weights"]) < AGREE


def test_without_a_seed_workers_stay_together_and_runs_differ(server):
    first, second = (same_everywhere(server.results("train", workers=3, releases=5, seed=None)) for _ in range(2))
    assert first["digest"] != second["digest"]


def test_all_begin_with_the_weights_of_worker_0(server, difference):
    alone, *_ = server.results("train", workers=1, releases=3)
    found = same_everywhere(server.results("train", workers=2, releases=3, own=True))
    assert difference(found["weights"], alone["weights"]) < AGREE


def test_noise_is_added_once_and_from_independent_streams(server):
    entries = 30_000
    everyone = server.results("noisy_sum_of_ranks", workers=3, entries=entries, noise_multiplier=2.0, seed=None)
    assert all(each == everyone[0] for each in everyone)
    for released in everyone[0]:
        assert statistics.mean(released) == pytest.approx(6.0, abs=5 * 2 / entries**0.5)
        assert statistics.stdev(released) == pytest.approx(2.0, rel=0.02)
    parts = [
        released[start : start + entries // 3] for released in everyone[0] for start in range(0, entries, entries // 3)
    ]
    for index, part in enumerate(parts):
        for other in parts[:index]:
            assert abs(statistics.correlation(part, other)) < 0.05
            assert part[:100] != other[:100]


def test_a_seed_gives_the_same_noise_for_any_number_of_workers(server):
    (alone,), everyone = (
        server.results("noisy_sum_of_ranks", workers=workers, entries=100, noise_multiplier=2.0, seed=5)
        for workers in (1, 3)
    )
    for one, three in zip(alone, everyone[2], strict=True):
        assert [value - 1.0 for value in one] == pytest.approx([value - 6.0 for value in three], abs=1e-4)


def test_what_is_common_and_what_is_each_workers_own(server):
    first, second = server.results("common_draws", workers=2)
    assert first["common"] == second["common"]
    assert first["again"] == second["again"] != first["common"][:5]
    assert first["own"] != second["own"]


def test_a_release_is_on_disk_before_any_worker_applies_it(server, tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    found = server.results("train_on_record", workers=3, ledger=str(ledger))
    assert [each["seen"] for each in found] == [[1, 2, 3, 4, 5]] * 3
    assert read_ledger(ledger).spent == 5


@pytest.mark.parametrize("seed", [3, None])
def test_a_run_goes_on_with_any_number_of_workers(server, difference, tmp_path, seed):
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole, *_ = server.results("keep", workers=1, folder=str(tmp_path / "whole"), releases=8, seed=seed)
    for workers, stop_after in ((2, 3), (1, 5), (3, None)):
        found = server.results(
            "keep", workers=workers, folder=str(tmp_path / "parts"), releases=8, seed=seed, stop_after=stop_after
        )
        same_everywhere(found)
    assert found[0]["released"] == 8
    assert read_ledger(tmp_path / "parts" / "ledger.jsonl").spent == 8
    if seed is not None:
        assert difference(found[0]["weights"], whole["weights"]) < AGREE
        assert difference(found[0]["average"], whole["average"]) < AGREE
    else:
        assert difference(found[0]["weights"], whole["weights"]) > AGREE


@pytest.mark.parametrize(
    ("job", "arguments", "words"),
    [
        ("train_wrapped", {}, "DistributedDataParallel"),
        ("train_unshared", {}, "selective release cannot be trained by 2 workers"),
        ("train_differently", {"what": "mechanism"}, "the mechanism of worker 1 differs from worker 0"),
        ("train_differently", {"what": "records"}, "the number of records of worker 1"),
        ("train_differently", {"what": "lr"}, "the weights of worker 1"),
    ],
)
def test_what_workers_cannot_share_is_refused(server, job, arguments, words):
    for answer in server.run(job, workers=2, **arguments):
        assert answer["error"].startswith("InputError: ")
        assert words in answer["error"]
