"""``sluice train`` with several workers, as processes of their own: started by Sluice, and by torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sluice.experiments.run import recorded_run
from sluice.runs.verify import verify_run

ROOT = Path(__file__).parents[2]
SETTINGS = "--dataset digits --noise-multiplier 3 --batch-size 64 --accountant rdp --threads 1 --worker-timeout 20"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("a") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )


def sluice(folder: Path, arguments: str) -> subprocess.Popen[str]:
    return start(folder, sys.executable, "-m", "sluice", *arguments.split())


def said(folder: Path) -> str:
    return (folder / "output").read_text()


def check(run: Path, *, releases: int) -> None:
    result = recorded_run(run).result
    assert result is not None
    assert result.releases == releases
    assert verify_run(run).holds


def wait_for(folder: Path, words: str, process: subprocess.Popen[str]) -> None:
    while words not in said(folder):
        assert process.poll() is None, said(folder)
        time.sleep(0.05)


def worker_of(rank: int, marker: str, *, folder: Path) -> int:
    """The process that is a worker of a run that was started in this folder with this argument."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
                environment = (entry / "environ").read_bytes().split(b"\0")
                is_here = (entry / "cwd").resolve() == folder.resolve()
            except OSError:
                continue
            if is_here and marker.encode() in command and f"RANK={rank}".encode() in environment:
                return int(entry.name)
    raise AssertionError(f"worker {rank} is not there")


def distance(run: Path, other: Path) -> float:
    first, second = (load_file(each / "public" / "model.safetensors") for each in (run, other))
    total = sum(float((first[name] - second[name]).double().square().sum()) for name in first)
    return (total / sum(float(value.double().square().sum()) for value in second.values())) ** 0.5


def entries(run: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (run / "public" / "ledger.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("file") != "model.safetensors"]


def test_workers_are_started_and_end_together(tmp_path):
    process = sluice(tmp_path, f"train {SETTINGS} --releases 3 --run shared --workers 2")
    assert process.wait() == 0, said(tmp_path)
    assert said(tmp_path).count("Result") == 1
    check(tmp_path / "runs" / "shared", releases=3)


@pytest.mark.slow
def test_torchrun_and_two_nodes_do_what_one_process_does(tmp_path):
    given = f"train {SETTINGS} --releases 100 --seed 1 --name"
    assert sluice(tmp_path, f"{given} alone").wait() == 0, said(tmp_path)
    shared = start(
        tmp_path, *TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "sluice", *given.split(), "shared"
    )
    assert shared.wait() == 0, said(tmp_path)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{listening.getsockname()[1]}"
    nodes = [
        start(
            tmp_path,
            *TORCHRUN,
            *f"--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint {endpoint} --rdzv-id run -m sluice".split(),
            *f"{given} nodes".split(),
        )
        for _ in range(2)
    ]
    assert [node.wait() for node in nodes] == [0, 0], said(tmp_path)
    alone = tmp_path / "runs" / "alone"
    for name in ("shared", "nodes"):
        run = tmp_path / "runs" / name
        check(run, releases=100)
        assert entries(run) == entries(alone)
        assert distance(run, alone) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_worker_is_named_and_the_run_resumes_with_another_number(tmp_path, lost):
    process = sluice(tmp_path, f"train {SETTINGS} --releases 300 --evaluate-every 10 --run lost-{lost} --workers 2")
    wait_for(tmp_path, "release 10 of", process)
    killed = worker_of(lost, f"lost-{lost}", folder=tmp_path)
    os.kill(killed, signal.SIGKILL)
    assert process.wait(timeout=60) == 1
    assert f"worker {lost} (process {killed}) was ended by SIGKILL" in said(tmp_path)
    assert sluice(tmp_path, f"train --resume lost-{lost} --workers 3").wait() == 0, said(tmp_path)
    check(tmp_path / "runs" / f"lost-{lost}", releases=300)


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_goes_on_by_itself(tmp_path):
    given = f"train {SETTINGS} --releases 300 --evaluate-every 10 --name restarted"
    restarting = ("--standalone", "--max-restarts", "3", "--nproc-per-node", "2", "-m", "sluice")
    process = start(tmp_path, *TORCHRUN, *restarting, *given.split())
    for rank, words in ((1, "release 10 of"), (0, "release 100 of")):
        wait_for(tmp_path, words, process)
        os.kill(worker_of(rank, "restarted", folder=tmp_path), signal.SIGKILL)
    assert process.wait() == 0, said(tmp_path)
    check(tmp_path / "runs" / "restarted", releases=300)


@pytest.mark.slow
def test_an_interruption_reaches_all_workers_and_costs_nothing(tmp_path):
    process = sluice(tmp_path, f"train {SETTINGS} --releases 1000 --evaluate-every 10 --run stopped --workers 2")
    wait_for(tmp_path, "release 10 of", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130, said(tmp_path)
    assert said(tmp_path).count("interrupted") == 1
    assert sluice(tmp_path, "train --resume stopped").wait() == 0, said(tmp_path)
    assert "lost" not in said(tmp_path)
    check(tmp_path / "runs" / "stopped", releases=1000)
