from __future__ import annotations

import stat

import pytest

from sluice._base.errors import DataError, InputError
from sluice.runs.trace import TraceFile, TraceRow, read_trace


def row(release: int, attempts: int = 1) -> TraceRow:
    return TraceRow(release=release, attempts=attempts, measured=10, metric=0.5, seconds=0.25)


def test_rows_come_back_in_order_and_the_last_of_a_release_counts(tmp_path):
    trace = TraceFile(tmp_path / "trace.jsonl")
    for each in (row(1), row(2), row(3), row(2, attempts=7)):
        trace.append(each)
    assert read_trace(trace.path) == [row(1), row(2, attempts=7), row(3)]
    assert stat.S_IMODE(trace.path.stat().st_mode) == 0o600


def test_a_torn_row_is_skipped_and_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "trace.jsonl"
    TraceFile(path).append(row(1))
    TraceFile(path).append(row(2))
    path.write_bytes(path.read_bytes()[:-8])
    assert read_trace(path) == [row(1)]
    TraceFile(path).append(row(2))
    assert read_trace(path) == [row(1), row(2)]


@pytest.mark.parametrize("line", ['{"release": 1}', '{"a": {}}', "{nonsense}"])
def test_nonsense_is_named_by_its_line(tmp_path, line):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match="line 1"):
        read_trace(path)


@pytest.mark.parametrize(
    "change", [{"release": 0}, {"attempts": 0}, {"measured": -1}, {"metric": float("nan")}, {"seconds": "1"}]
)
def test_bad_rows_are_refused(change):
    values = {"release": 1, "attempts": 1, "measured": 1, "metric": 0.0, "seconds": 0.0}
    with pytest.raises(InputError, match=next(iter(change))):
        TraceRow(**(values | change))
