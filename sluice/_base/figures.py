"""Figures drawn without a screen, the same bytes each time: neither the user's style nor a date gets into them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.figure import Figure


@contextmanager
def blank_figure() -> Iterator[Figure]:
    """A figure with settings of its own: neither the user's style nor a running number gets into the file."""
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        matplotlib.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
        yield Figure(figsize=(6.4, 3.6), layout="constrained")


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
