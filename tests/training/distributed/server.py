"""Runs jobs on several workers of torch.distributed: a process of its own, which imports once and forks for each order.

It stays single-threaded, so that forking is safe. Orders and answers are lines of JSON on standard input and output. A job is
the name of a function in jobs.py, which is called by each worker with the arguments of the order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist


def work(order: dict[str, Any], rank: int, store: str, answer: int) -> int:
    import jobs

    found: dict[str, Any] = {}
    try:
        if order["workers"] > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=order["workers"],
                # On a busy machine it takes long; where a worker is killed the others must not wait for that long.
                timeout=timedelta(seconds=10 if "kill" in order else 100),
            )
        found["result"] = getattr(jobs, order["job"])(**order["arguments"])
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        if order.get("trace"):
            traceback.print_exc()
    with os.fdopen(answer, "w") as stream:
        json.dump(found, stream)
    return 0


def carry_out(order: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer of each worker: a result or an error, and how it ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(order["workers"]):
            reader, writer = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(reader)
                code = 1
                try:
                    code = work(order, rank, f"{folder}/store", writer)
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(writer)
            children.append((process, reader))
        if "kill" in order:
            time.sleep(order["kill"]["after"])
            os.kill(children[order["kill"]["rank"]][0], getattr(signal, order["kill"].get("signal", "SIGKILL")))
        answers = []
        for rank, (process, reader) in enumerate(children):
            if order.get("kill", {}).get("signal") == "SIGSTOP" and order["kill"]["rank"] == rank:
                continue
            with os.fdopen(reader) as stream:
                text = stream.read()
            _, status = os.waitpid(process, 0)
            code = os.waitstatus_to_exitcode(status)
            answers.append(
                {"rank": rank, "code": code, "seconds": time.monotonic() - began, **json.loads(text or "{}")}
            )
        for rank, (process, _) in enumerate(children):
            if order.get("kill", {}).get("signal") == "SIGSTOP" and order["kill"]["rank"] == rank:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return answers


def main() -> None:
    torch.set_num_threads(1)
    import jobs

    jobs.warm_up()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(carry_out(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
