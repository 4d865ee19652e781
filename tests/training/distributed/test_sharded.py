"""A model whose parameters `fully_shard` spreads over two workers, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WORKER = Path(__file__).with_name("sharded_worker.py")
ROOT = WORKER.parents[3]


def carried_out(folder: Path, *orders: tuple[str, dict[str, Any]], workers: int = 2) -> list[list[dict[str, Any]]]:
    """The results of each order, one of each worker."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, WORKER, json.dumps(orders), str(rank), str(workers), folder / "store"],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(workers)
    ]
    try:
        printed = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = [[json.loads(line) for line in lines] for lines in printed]
    for answer in (each for lines in answers for each in lines):
        assert "error" not in answer, answer["error"]
    return [[answer["result"] for answer in each if answer] for each in zip_longest(*answers)]


def require_same(each: list[dict[str, Any]]) -> None:
    for found in each:
        assert found["difference"] < 1e-5
        assert found["moved"] > 0.01, "or the test would see nothing"
        assert found["attempts"][0] == found["attempts"][1]
        assert 0.4 < found["own"] < 0.6


def test_gradients_are_those_of_the_whole_model_and_so_are_weights_after_training(tmp_path):
    small = {"rate": 0.2, "gate": True, "blocks": 1, "releases": 2}
    norms, weights = carried_out(tmp_path, ("norms_and_sums", {}), ("same_weights", small))
    assert norms == [{"norms": True, "sums": True, "by_rule": True}] * 2
    require_same(weights)


@pytest.mark.slow
def test_what_a_sharded_model_cannot_have_is_refused(tmp_path):
    (refused,) = carried_out(tmp_path, ("refused", {}))
    for messages in refused:
        assert "ema_decay=0.9 is not allowed for a sharded model" in messages["average"]
        assert "canaries are not allowed in a sharded model" in messages["canaries"]
        assert "a loop of your own is not allowed for a sharded model" in messages["loop"]
        assert "the state of a sharded model is not written yet" in messages["state"]
        assert "non-private cannot be trained with a sharded model" in messages["method"]
        assert "parameter 'words.weight' is not spread" in messages["placement"]


@pytest.mark.slow
def test_a_worker_holds_half_of_the_parameters_and_of_the_optimizers_state(tmp_path):
    ((*each,),) = carried_out(tmp_path, ("same_weights", {"rate": 0.25, "gate": True, "blocks": 8}))
    require_same(each)
    for found in each:
        assert 0.5 < found["peak"] < 0.56, "half of everything, and a block or two that are gathered"


@pytest.mark.slow
def test_workers_without_records_take_part(tmp_path):
    (each,) = carried_out(tmp_path, ("same_weights", {"rate": 0.02, "gate": False, "releases": 8}))
    require_same(each)


@pytest.mark.slow
def test_rows_that_cannot_be_shared_out_evenly(tmp_path):
    """Three workers: parameters of 16, 40, 48 and 64 rows, and of 3."""
    (each,) = carried_out(tmp_path, ("same_weights", {"rate": 0.25, "gate": False}), workers=3)
    for found in each:
        assert found["difference"] < 1e-5
        assert found["attempts"][0] == found["attempts"][1]


@pytest.mark.slow
def test_noise_that_cannot_be_predicted(tmp_path):
    (each,) = carried_out(tmp_path, ("secure", {}))
    assert each[0]["sum"] == each[1]["sum"]
    assert each[0]["moved"] > 0.01


@pytest.mark.slow
def test_each_worker_adds_the_noise_of_its_own_rows_and_nobody_adds_it_again(tmp_path):
    (each,) = carried_out(tmp_path, ("noise_alone", {}))
    assert each[0]["whole"] == each[1]["whole"]
    deviation, mean = each[0]["whole"]
    entries = each[0]["entries"]
    assert abs(deviation / 6 - 1) < 5 / np.sqrt(2 * entries)
    assert abs(mean) < 5 * 6 / np.sqrt(entries)
    one, other = (np.array(found["own"]) for found in each)
    assert abs(np.corrcoef(one, other)[0, 1]) < 5 / np.sqrt(len(one))


@pytest.mark.slow
def test_a_worker_that_is_lost_in_the_middle_of_a_forward_pass_is_named(tmp_path):
    ((found,),) = carried_out(tmp_path, ("lost", {}))
    assert found["error"] == "WorkerLostError"
    assert "worker 1 of 2" in found["message"]
