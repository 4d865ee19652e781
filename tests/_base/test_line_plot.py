from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.line_plot import BLUE, RED, Line, LinePlot, ticks

SVG = "{http://www.w3.org/2000/svg}"


def drawn(**options):
    plot = LinePlot(x_label="x < y", y_label="two\nlines", bottom=0.0, top=2.0, **options)
    return ElementTree.fromstring(plot.as_svg().encode())


def test_lines_marks_level_and_legend_are_drawn_inside_the_frame():
    root = drawn(
        lines=[Line(points=[(0, 0), (5, 1), (10, 2)], color=BLUE, label="a & b", radius=2, note="end")],
        level=Line(points=[(0, 1.5)], color=RED, dash="dashed", label="budget"),
    )
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"x < y", "two", "lines", "a & b", "budget", "end", "0", "10"} <= set(texts)
    circles = list(root.iter(f"{SVG}circle"))
    assert len(circles) == 4  # three points and the legend's
    assert all(0 < float(each.get("cx")) < 640 and 0 < float(each.get("cy")) < 360 for each in circles)
    heights = [float(each.get("cy")) for each in circles[:3]]
    assert heights == sorted(heights, reverse=True)
    assert sum("stroke-dasharray" in path.attrib for path in root.iter(f"{SVG}path")) == 2


def test_a_plot_without_lines_says_why():
    assert "no epsilon" in [text.text for text in drawn(empty="no epsilon").iter(f"{SVG}text")]


def test_a_single_point_at_zero_is_no_error():
    assert drawn(lines=[Line(points=[(0, 0)], color=BLUE, radius=2)]) is not None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 3.1, [0, 1, 2, 3]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 1040, [0, 250, 500, 750, 1000]),
        (75, 95, [75, 80, 85, 90, 95]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == expected


@given(low=st.floats(-1e6, 1e6), width=st.floats(1e-3, 1e9))
def test_there_are_a_few_ticks_wherever_the_axis_lies(low, width):
    found = ticks(low, low + width)
    assert 2 <= len(found) <= 7
    assert found == sorted(set(found))
