from __future__ import annotations

import threading

import pytest

from sluice._base.background import Background


def test_a_job_runs_while_the_program_goes_on():
    may_end, done = threading.Event(), []
    background = Background()
    assert not background.busy
    background.start(lambda: (may_end.wait(), done.append(1)))
    assert background.busy
    assert done == []
    may_end.set()
    background.wait()
    assert not background.busy
    assert done == [1]


@pytest.mark.parametrize("where", ["wait", "start"])
def test_an_error_comes_out_once_where_the_job_is_waited_for(where):
    def fail() -> None:
        raise OSError("planted")

    background, done = Background(), []
    background.start(fail)
    with pytest.raises(OSError, match="planted"):
        background.wait() if where == "wait" else background.start(lambda: done.append(1))
    background.wait()
    background.start(lambda: done.append(2))
    background.wait()
    assert done == [2]
