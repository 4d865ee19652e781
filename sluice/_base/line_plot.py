"""Lines over two axes as SVG, written without a plotting library, which would take longer to load than most runs to plot.

The same plot is the same bytes each time: neither the user's style, nor fonts, nor a date get into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

BLUE, GREEN, RED, GREY = "#1f5fa8", "#228833", "#b3261e", "#6b6b6b"

Point = tuple[float, float]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 18, 16, 50
_DASHES = {"solid": "", "dashed": ' stroke-dasharray="7 4"', "dotted": ' stroke-dasharray="2 3"'}
_STYLE = 'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="13" fill="#1a1a1a"'


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points joined by a line, or marked each, or both.

    Attributes:
        dash: "solid", "dashed" or "dotted".
        width: of the line; 0 draws none.
        radius: of the mark at each point; 0 draws none.
        note: text beside the last point.
    """

    points: Sequence[Point]
    color: str
    label: str = ""
    dash: str = "solid"
    width: float = 1.6
    radius: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class LinePlot:
    """A plot whose first axis begins at 0, unless it says otherwise.

    Attributes:
        y_label: one line of text or several.
        bottom, top: ends of the second axis.
        left, right: ends of the first axis; without the right one it ends behind the last point.
        logarithmic: both axes, which then end at positive numbers.
        upright: vertical lines over the whole height; their points' second coordinates do not matter.
        y_ticks: whether the second axis has numbers.
        legend_on_top: of the frame, not at its bottom.
        level: a horizontal line over the whole width, if any; its points' first coordinates do not matter.
        empty: what to say where there is nothing to draw.
    """

    x_label: str
    y_label: str
    bottom: float
    top: float
    lines: Sequence[Line] = ()
    level: Line | None = None
    empty: str = "nothing to draw"
    left: float = 0.0
    right: float | None = None
    logarithmic: bool = False
    upright: Sequence[Line] = ()
    y_ticks: bool = True
    legend_on_top: bool = False

    def as_svg(self) -> str:
        """The plot, as a whole document."""
        body = [
            *self._frame(),
            *(self._curves() if self.lines else [self._text(_WIDTH / 2, _HEIGHT / 2, self.empty, RED)]),
        ]
        head = (
            '<?xml version="1.0" encoding="utf-8"?>\n'
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
            f'viewBox="0 0 {_WIDTH} {_HEIGHT}" {_STYLE}>\n'
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(body) + "\n</svg>\n"

    @property
    def _right(self) -> float:
        if self.right is not None:
            return self.right
        return max((x for line in self.lines for x, _ in line.points), default=1.0) * 1.04 or 1.0

    def _x(self, value: float) -> float:
        return _LEFT + self._share(value, self.left, self._right) * (_WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - self._share(value, self.bottom, self.top) * (_HEIGHT - _TOP - _BOTTOM)

    def _share(self, value: float, low: float, high: float) -> float:
        if self.logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)

    def _ticks(self, low: float, high: float) -> list[float]:
        if not self.logarithmic:
            return ticks(low, high)
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        return [10.0**power for power in powers]

    def _frame(self) -> Iterator[str]:
        floor, middle = _HEIGHT - _BOTTOM, (_TOP + _HEIGHT - _BOTTOM) / 2
        yield f'<path d="M{_LEFT} {_TOP}V{floor}H{_WIDTH - _RIGHT}" fill="none" stroke="#1a1a1a"/>'
        yield self._text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, self.x_label)
        rows = self.y_label.split("\n")
        for number, row in enumerate(rows):
            turned = f' transform="rotate(-90 {16 * (number + 1)} {middle:g})"'
            yield self._text(16 * (number + 1), middle, row, extra=turned)
        if not self.lines:
            return
        for value in self._ticks(self.left, self._right):
            yield f'<path d="M{self._x(value):.2f} {floor}v4" stroke="#1a1a1a"/>'
            yield self._text(self._x(value), floor + 18, f"{value:g}")
        for value in self._ticks(self.bottom, self.top) if self.y_ticks else ():
            yield f'<path d="M{_LEFT} {self._y(value):.2f}h-4" stroke="#1a1a1a"/>'
            yield self._text(_LEFT - 7, self._y(value) + 4.5, f"{value:g}", anchor="end")

    def _curves(self) -> Iterator[str]:
        for line in self.lines:
            yield from self._curve(line)
        if self.level is not None:
            height = self.level.points[0][1]
            ends = self._path([(self.left, height), (self._right, height)])
            yield f'<path d="{ends}" {_stroke(self.level)}/>'
        for line in self.upright:
            ends = self._path([(line.points[0][0], self.bottom), (line.points[0][0], self.top)])
            yield f'<path d="{ends}" {_stroke(line)}/>'
        named = [line for line in (*self.lines, *([self.level] if self.level else []), *self.upright) if line.label]
        first = _TOP + 14 if self.legend_on_top else _HEIGHT - _BOTTOM - 14 - 19 * (len(named) - 1)
        for row, line in enumerate(named):
            yield from self._legend(line, first + 19 * row)

    def _curve(self, line: Line) -> Iterator[str]:
        if line.width and len(line.points) > 1:
            yield f'<path d="{self._path(line.points)}" {_stroke(line)}/>'
        if line.radius:
            for x, y in line.points:
                yield f'<circle cx="{self._x(x):.2f}" cy="{self._y(y):.2f}" r="{line.radius:g}" fill="{line.color}"/>'
        if line.note:
            x, y = line.points[-1]
            yield self._text(self._x(x), self._y(y) - 10, line.note, line.color, anchor="end")

    def _legend(self, line: Line, y: float) -> Iterator[str]:
        right = _WIDTH - _RIGHT - 10
        if line.width:
            yield f'<path d="M{right - 28} {y:g}h28" {_stroke(line)}/>'
        if line.radius:
            yield f'<circle cx="{right - 14}" cy="{y:g}" r="{line.radius:g}" fill="{line.color}"/>'
        yield self._text(right - 36, y + 4.5, line.label, anchor="end")

    def _path(self, points: Iterable[Point]) -> str:
        return "M" + "L".join(f"{self._x(x):.2f} {self._y(y):.2f}" for x, y in points)

    @staticmethod
    def _text(x: float, y: float, text: str, color: str = "#1a1a1a", *, anchor: str = "middle", extra: str = "") -> str:
        return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}" fill="{color}"{extra}>{escape(text)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """About five round numbers from low to high."""
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    # Counted in whole steps, so that no tick is 0.30000000000000004.
    counts = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [float(f"{count * step:.12g}") for count in counts]


def _stroke(line: Line) -> str:
    return f'fill="none" stroke="{line.color}" stroke-width="{line.width:g}"{_DASHES[line.dash]}'
