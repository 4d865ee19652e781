"""Releases interrupted at every line: whatever happens, what is charged covers what was released."""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import sluice
from sluice._base.errors import InputError
from sluice._base.interrupts import DelayedInterrupt, uninterrupted
from sluice.accounting.matrix.strategy import BandedToeplitz
from sluice.mechanism.base import Mechanism
from sluice.methods.matrix import MatrixMechanism
from sluice.methods.matrix.execution import CorrelatedSteps
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions
from small_mechanisms import GATE, SIZE, small_mechanisms

RELEASES = 3
MATRIX = MatrixMechanism(
    strategy=BandedToeplitz(diagonals=(1.0, 0.5)),
    batches="cyclic-poisson",
    groups=2,
    sample_rate=0.5,
    expected_batch_size=10.0,
    max_grad_norm=1.0,
    noise_multiplier=2.0,
    releases=RELEASES,
)
MECHANISMS: dict[str, Mechanism] = small_mechanisms(RELEASES, rho=1.0, budgeted=8) | {"matrix": MATRIX}
SELECTIVE = MECHANISMS["dpsr-cg"]


class Run:
    """A small run with secure noise, momentum, and a note of every release that was logged."""

    def __init__(self, mechanism: Mechanism) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(SIZE, 4, generator=generator), torch.arange(SIZE) % 3
        self.model = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.logged: list[int] = []
        self.engine = PrivacyEngine()
        self.engine.make_private_by(
            mechanism,
            module=self.model,
            optimizer=self.optimizer,
            data_loader=TensorDataset(x, y),
            options=TrainingOptions(before_release=self.logged.append),
        )
        self.executor: Any = self.engine._executor

    def release(self) -> None:
        next(self.engine.releases(F.cross_entropy))

    def state(self) -> dict[str, Any]:
        state = copy.deepcopy(self.engine.state_dict())
        del state["releases"]["noise"]
        return state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(one, other) for one, other in zip(a, b, strict=True))
    return bool(a == b)


ROOT = Path(sluice.__file__).parent
WATCHED = {
    str(ROOT / name)
    for name in (
        "training/executor.py",
        "training/selective_release.py",
        "training/weights.py",
        "training/loop.py",
        "randomness/correlated.py",
        "randomness/grouped_sampling.py",
        "methods/dpsur/execution.py",
        "methods/dpis/execution.py",
        "methods/dpagd/execution.py",
        "methods/matrix/execution.py",
        "methods/non_private/execution.py",
    )
}


Line = tuple[str, int]


def traced(action: Callable[[], None], on_line: Callable[[Line], None]) -> None:
    """Run the action and tell of every line of the watched files that begins."""

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            on_line((frame.f_code.co_filename, frame.f_lineno))
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code.co_filename in WATCHED else None)
    try:
        action()
    finally:
        sys.settrace(before)


def lines_of(action: Callable[[], None]) -> list[Line]:
    """The lines that the action comes by, each once."""
    seen: dict[Line, None] = {}
    traced(action, lambda line: seen.setdefault(line))
    return list(seen)


def at_line(target: Line, strike: Callable[[], None], action: Callable[[], None]) -> None:
    """Run the action and strike when the line begins for the first time."""

    def on_line(line: Line) -> None:
        if line == target:
            sys.settrace(None)
            strike()

    traced(action, on_line)


def control_c() -> None:
    signal.raise_signal(signal.SIGINT)


def crash() -> None:
    raise MemoryError("planted")


@pytest.mark.parametrize("strike", [control_c, crash])
@pytest.mark.parametrize("method", MECHANISMS)
def test_a_release_can_be_interrupted_at_every_line(method, strike):
    """Either nothing has changed, or the release is charged; and what goes by turns stays in step."""
    interrupted = refused = 0
    first = Run(MECHANISMS[method])
    first.release()
    for line in lines_of(first.release):
        run = Run(MECHANISMS[method])
        run.release()
        before, logged = run.state(), len(run.logged)
        turns = watch_turns(run)
        try:
            at_line(line, strike, run.release)
        except (KeyboardInterrupt, MemoryError):
            interrupted += 1
        executor = run.executor
        assert executor.spent >= len(run.logged)
        if executor.spent == logged:
            assert same(run.state(), before)
        try:
            list(run.engine.releases(F.cross_entropy))
        except InputError as error:
            refused += 1
            if "checkpoint" not in str(error) or strike is not crash:
                raise  # a signal waits until the release is applied
            run.engine.load_state_dict(before_with_noise(run, before))
            list(run.engine.releases(F.cross_entropy))
        assert executor.done
        assert executor.released + executor.lost == executor.spent >= len(run.logged)
        assert turns() is None or len(turns()) == len(set(turns()))
    assert interrupted > 3
    assert (refused > 0) == (strike is crash)


def before_with_noise(run: Run, state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "releases": {**state["releases"], "noise": run.engine.noise.state_dict()}}


def watch_turns(run: Run) -> Callable[[], list[int] | None]:
    """For correlated noise: the steps whose sums were released; each must be on the batch of its own turn."""
    executor = run.executor
    if not isinstance(executor, CorrelatedSteps):
        return lambda: None
    released: list[int] = []
    drawn: list[int] = []
    draw, add_noise = executor._sampler.batch_of, executor._release.add_noise

    def batch_of(step: int) -> Tensor:
        drawn.append(step)
        return draw(step)

    def released_row(raw_sum: Any, **options: Any) -> Any:
        row = executor._release.position
        result = add_noise(raw_sum, **options)
        assert row == drawn[-1], "the row of noise is that of the batch"
        released.append(row)
        return result

    executor._sampler.batch_of = batch_of
    executor._release.add_noise = released_row
    return lambda: released


def test_a_release_that_could_not_be_logged_is_lost_and_its_turn_is_skipped():
    run = Run(MATRIX)
    run.release()
    turns = watch_turns(run)

    def fail(number: int) -> None:
        raise OSError("disk full")

    log = run.executor.context.before_release
    object.__setattr__(run.executor.context, "before_release", fail)
    with pytest.raises(OSError, match="disk full"):
        run.release()
    object.__setattr__(run.executor.context, "before_release", log)
    assert (run.executor.released, run.executor.lost) == (1, 1)
    list(run.engine.releases(F.cross_entropy))
    assert turns() == [2]
    assert run.engine.released == RELEASES - 1


def test_going_back_to_an_earlier_state_does_not_make_releases_free():
    run = Run(SELECTIVE)
    run.release()
    early = copy.deepcopy(run.engine.state_dict())
    run.release()
    spent = run.engine.get_epsilon(1e-5)
    run.engine.load_state_dict(early)
    assert run.engine.released == 1
    assert run.engine.get_epsilon(1e-5) == spent
    assert len(list(run.engine.releases(F.cross_entropy))) == RELEASES - 2


def ordinary_loop() -> tuple[PrivacyEngine, list[int], Callable[[], None]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(SIZE, 4, generator=generator), torch.arange(SIZE) % 3)
    net = nn.Sequential(nn.Linear(4, 3))
    logged: list[int] = []
    engine = PrivacyEngine()
    _, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        data_loader=data,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        sample_rate=0.5,
        releases=RELEASES,
        gate=GATE,
        before_release=logged.append,
    )

    def loop() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()

    return engine, logged, loop


@pytest.mark.parametrize("strike", [control_c, crash])
def test_the_ordinary_loop_can_be_interrupted_at_every_line_of_a_step(strike):
    interrupted = 0
    engine, _, loop = ordinary_loop()
    lines = lines_of(loop)
    engine.close()
    for line in lines:
        engine, logged, loop = ordinary_loop()
        try:
            at_line(line, strike, loop)
        except (KeyboardInterrupt, MemoryError):
            interrupted += 1
        executor: Any = engine._executor
        assert executor.spent >= len(logged)
        try:
            loop()
        except InputError as error:
            if "checkpoint" not in str(error) or strike is not crash:
                raise
        else:
            assert executor.done
        finally:
            engine.close()
    assert interrupted > 20


def test_attempts_that_were_interrupted_do_not_count_towards_the_cap(monkeypatch):
    run = Run(SELECTIVE)
    executor = run.executor
    executor.draw()
    executor.draw()
    assert executor._attempts_used == 0


def test_holds_may_overlap():
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        outer = DelayedInterrupt()
        with uninterrupted():
            outer.hold()
            control_c()
        control_c()
        assert received == []
        outer.let_go()
        assert received == [signal.SIGINT] * 2
        control_c()
        assert received == [signal.SIGINT] * 3
    finally:
        signal.signal(signal.SIGINT, previous)
