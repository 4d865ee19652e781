"""Starting the workers of one run on this machine, and watching over them; ``torchrun`` does it for several machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from sluice.training.distributed.workers import Workers

_STARTED = "SLUICE_STARTED_WORKERS"
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL = 0.05
# Seconds that workers have to end by themselves after one is lost, beyond the time in which they must notice it.
_GRACE = 10.0


def is_worker() -> bool:
    """Whether this process was started as one of several workers, by torchrun or by `run_workers`."""
    return all(name in os.environ for name in _RENDEZVOUS) and int(os.environ["WORLD_SIZE"]) > 1


def is_started_here() -> bool:
    """Whether `run_workers` started this process, and says itself which worker is lost."""
    return _STARTED in os.environ


def restarts() -> tuple[int, int]:
    """How often torchrun has started this worker again, and how often it may."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)), int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def joined(*, timeout: float) -> Workers:
    """The workers that this process is one of; itself alone if it was started as usual."""
    from sluice.training.distributed.workers import WorkerLostError, Workers

    if not is_worker():
        return Workers()
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    from sluice.training.distributed.joining import join

    patience = timedelta(seconds=max(300.0, timeout))
    attempt, _ = restarts()
    try:
        store, rank, size = next(rendezvous("env://", timeout=patience))
        # The store may outlive workers, and must not lead those that are started again to them.
        store = PrefixStore(f"attempt {attempt}", store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    except RuntimeError as error:
        raise WorkerLostError(f"the workers have not found each other: {error}") from error
    return join(timeout=timeout)


def run_workers(count: int, arguments: Sequence[str], *, timeout: float, threads: int | None) -> int:
    """Run ``sluice`` with these arguments in so many processes, as the workers of one run; its exit code.

    Args:
        timeout: in so many seconds the others notice that one is lost.
        threads: of each worker; None shares the processors evenly.
    """
    shared = os.environ | {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        _STARTED: str(count),
    }
    shared.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each lost connection comes with a page of frames
    shared.setdefault("OMP_NUM_THREADS", str(threads or max(1, (os.cpu_count() or 1) // count)))
    command = [sys.executable, "-m", "sluice", *arguments]
    workers: list[subprocess.Popen[Any]] = []
    with _forwarding(workers) as received:
        for rank in range(count):
            workers.append(_start(command, shared, rank))
            for number in received:  # before there was this worker to forward it to
                workers[rank].send_signal(number)
        first_ended = _wait_for_all(workers, patience=timeout + _GRACE)
    if first_ended is not None and (code := workers[first_ended].returncode) < 0:
        name = signal.Signals(-code).name
        typer.echo(
            f"sluice: worker {first_ended} (process {workers[first_ended].pid}) was ended by {name}, and the others have "
            "stopped. What was released is logged and charged: resume the run with sluice train --resume.",
            err=True,
        )
        return 1
    return next((worker.returncode for worker in workers if worker.returncode), 0)


def _start(command: Sequence[str], shared: Mapping[str, str], rank: int) -> subprocess.Popen[Any]:
    # In a session of its own, so that Ctrl-C reaches each worker once, through `_forwarding`.
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    return subprocess.Popen(command, env={**shared, **own}, start_new_session=True, stdin=subprocess.DEVNULL)


def _wait_for_all(workers: Sequence[subprocess.Popen[Any]], *, patience: float) -> int | None:
    """Wait until all have ended, with force if one has failed and others do not follow; which one failed first."""
    failed: int | None = None
    deadline = float("inf")
    while any(worker.poll() is None for worker in workers):
        bad = [rank for rank, worker in enumerate(workers) if worker.returncode]
        if bad and failed is None:
            failed = min(bad, key=lambda rank: workers[rank].returncode)  # a signal before what followed from it
            deadline = time.monotonic() + patience
        if time.monotonic() > deadline:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
        time.sleep(_POLL)
    bad = [rank for rank, worker in enumerate(workers) if worker.returncode]
    return failed if failed is not None or not bad else min(bad, key=lambda rank: workers[rank].returncode)


@contextmanager
def _forwarding(workers: Sequence[subprocess.Popen[Any]]) -> Iterator[Sequence[int]]:
    """Inside the block signals that end programs go to all workers, which end in order; this process waits for them.

    Those that this process ignores, as `nohup` makes it, stay so: workers inherit that.

    Yields:
        The signals that have come.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    heeded = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heeded}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


__all__ = ["is_started_here", "is_worker", "joined", "restarts", "run_workers"]
