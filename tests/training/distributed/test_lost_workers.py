"""A worker that dies, stops or fails ends the run on all others, who name it; nothing is under-counted and the run goes on."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise

import pytest

from sluice.experiments.run import recorded_run
from sluice.runs.ledger import read_ledger
from sluice.runs.verify import verify_run

SECURE = {"releases": 3, "epsilon": 2.0, "accountant": "rdp", "evaluate_every": 2, "batch_size": 64}
TIMEOUT = 2.0

#: What a worker says when another one is killed; where they were still about to connect it is gloo that says so.
LOST = ("WorkerLostError", "closed", "reset", "timed out", "timeout")


@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_stop_and_name_the_worker_that_was_killed(server, lost):
    answers = server.run("endless", workers=3, timeout=TIMEOUT, kill={"rank": lost, "after": 1.0})
    assert answers[lost]["code"] == -9
    for answer in answers:
        if answer["rank"] != lost:
            assert answer["error"].startswith(f"WorkerLostError: worker {lost} of 3 (")
            assert answer["seconds"] < 1.0 + TIMEOUT + 8.0  # the machine may be busy


def test_a_worker_that_hangs_is_lost_after_the_timeout(server):
    kill = {"rank": 1, "after": 1.0, "signal": "SIGSTOP"}
    for answer in server.run("endless", workers=3, timeout=TIMEOUT, kill=kill):
        assert answer["error"].startswith("WorkerLostError: worker 1 of 3 (")
        assert "not heard from for 2 seconds" in answer["error"]


@pytest.mark.parametrize("worker", [0, 1])
def test_the_others_say_why_a_worker_has_stopped(server, worker):
    answers = server.run("fail_at", workers=3, release=2, worker=worker)
    assert answers[worker]["error"] == "ValueError: a record is broken"
    for answer in answers:
        if answer["rank"] != worker:
            assert f"worker {worker} of 3" in answer["error"]
            assert "has stopped: ValueError: a record is broken" in answer["error"]


@pytest.mark.parametrize("failing", [0, 1])
def test_nobody_has_ended_well_where_one_fails_after_the_last_release(server, failing):
    answers = server.run("leave", workers=3, failing=failing)
    assert answers[failing]["error"] == "ValueError: the disk is full"
    for answer in answers:
        if answer["rank"] != failing:
            assert f"worker {failing} of 3" in answer["error"]
            assert "has stopped: ValueError: the disk is full" in answer["error"]


@pytest.mark.parametrize("slow", [0, 1])
def test_all_wait_for_the_last_one_to_end(server, slow):
    assert min(server.results("leave", workers=3, slow=slow)) >= 1.0


def releases_in(log, *, seeded):
    """How many releases the workers were about to apply.

    With fresh noise each update is another release. A seed repeats a release after a kill, and another number of workers
    repeats it with other last digits: updates whose first values agree to a ten-thousandth are the same one.
    """
    lines = {line for file in log.parent.glob(f"{log.name}.*") for line in file.read_text().splitlines()}
    if not seeded:
        return len(lines)
    values = sorted(float(line.split()[1]) for line in lines)
    return sum(not math.isclose(value, previous, rel_tol=1e-4) for previous, value in pairwise([math.inf, *values]))


def check_killed(run, log, *, seeded):
    """No worker has applied a release that is not counted."""
    config, ledger = run / "public" / "config.json", run / "public" / "ledger.jsonl"
    applied = releases_in(log, seeded=seeded)
    if not config.exists() or not ledger.exists():
        assert applied == 0
        return
    assert applied <= read_ledger(ledger).spent <= SECURE["releases"]


def check_ended(run):
    result = recorded_run(run).result
    assert result is not None
    assert result.releases == SECURE["releases"]
    verification = verify_run(run)
    assert verification.holds, verification.checks
    assert len(list((run / "private" / "checkpoints").iterdir())) <= 2


def public_values(run):
    """What a seeded run publishes that any number of workers repeats: all but the last digits of the weights."""
    lines = [json.loads(line) for line in (run / "public" / "ledger.jsonl").read_text().splitlines()]
    releases = [line for line in lines if line.get("file") != "model.safetensors"]
    return releases, (run / "public" / "accuracy.jsonl").read_bytes()


def kill_at_random(server, folder, *, kills, seeded):
    settings = SECURE | ({"seed": 7} if seeded else {})
    chance = random.Random(f"{kills} {seeded}")
    done = number = 0
    whole = folder / "whole"
    arguments = {"settings": settings, "timeout": TIMEOUT}
    *_, last = server.run("run_in_folder", workers=2, run=str(whole), log=str(folder / "whole.log"), **arguments)
    duration = last["seconds"]
    check_ended(whole)
    while done < kills:
        number += 1
        run, log = folder / f"run-{number}", folder / f"run-{number}.log"
        for _ in range(chance.randint(1, 3)):
            workers = chance.choice([2, 2, 3])
            kill = {"rank": chance.randrange(workers), "after": chance.uniform(0.02, duration)}
            answers = server.run("run_in_folder", workers=workers, run=str(run), log=str(log), kill=kill, **arguments)
            done += answers[kill["rank"]]["code"] == -9
            for answer in answers:
                said = answer.get("error", "")
                assert not said or any(word in said for word in LOST), said
            check_killed(run, log, seeded=seeded)
        workers = chance.choice([1, 2, 3])
        for answer in server.run("run_in_folder", workers=workers, run=str(run), log=str(log), **arguments):
            assert "error" not in answer, answer["error"]
        check_killed(run, log, seeded=seeded)
        check_ended(run)
        if seeded:
            assert public_values(run) == public_values(whole)


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_kills_at_random_instants(server, tmp_path, seeded):
    kill_at_random(server, tmp_path, kills=5, seeded=seeded)


@pytest.mark.slow
@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "secure"])
def test_many_kills_at_random_instants(server, tmp_path, seeded):
    kill_at_random(server, tmp_path, kills=60, seeded=seeded)
