"""Signals that come while they are being held back or handed back."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from sluice._base import interrupts
from sluice._base.interrupts import DelayedInterrupt, uninterrupted


@pytest.fixture
def received() -> Iterator[list[int]]:
    """The signals that came through to whoever had them before."""
    found: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, lambda sent, frame: found.append(sent)) for number in numbers}
    yield found
    for number, handler in previous.items():
        signal.signal(number, handler)


def at_step(target: int, strike: Callable[[], None], action: Callable[[], None]) -> int:
    """Run the action and strike before a bytecode of the module of that number; how many there were."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != interrupts.__file__ or frame.f_code.co_name == "_note":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            steps += 1
            if steps == target:
                strike()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return steps


def held() -> None:
    interrupt = DelayedInterrupt()
    interrupt.hold()
    interrupt.let_go()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_is_lost_whenever_it_comes(received, sent):
    handler = signal.getsignal(sent)
    steps = at_step(0, lambda: None, held)
    assert steps > 50
    for step in range(1, steps + 1):
        received.clear()
        at_step(step, lambda: signal.raise_signal(sent), held)
        assert received == [sent], step
        assert signal.getsignal(sent) is handler


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_raises_leaves_no_other_one_held(received, sent):
    def block() -> None:
        with uninterrupted():
            pass

    other = signal.SIGTERM if sent == signal.SIGINT else signal.SIGINT
    handler = signal.getsignal(other)
    signal.signal(sent, signal.default_int_handler)
    for step in range(1, at_step(0, lambda: None, block) + 1):
        with pytest.raises(KeyboardInterrupt):
            at_step(step, lambda: signal.raise_signal(sent), block)
        assert signal.getsignal(sent) is signal.default_int_handler, step
        assert signal.getsignal(other) is handler, step
