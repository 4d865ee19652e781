"""Figures drawn without a screen, the same bytes each time: neither the user's style nor a date gets into them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.figure import Figure

BLUE, RED, GREY = "#1f5fa8", "#b3261e", "#6b6b6b"


@contextmanager
def blank_figure() -> Iterator[Figure]:
    """A figure with settings of its own: neither the user's style nor a running number gets into the file."""
    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        matplotlib.rcParams.update({"svg.hashsalt": "sluice", "font.size": 10, "axes.spines.top": False})
        matplotlib.rcParams.update({"axes.spines.right": False, "svg.fonttype": "path"})
        yield Figure(figsize=(6.4, 3.6), layout="constrained")


def as_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def as_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()
