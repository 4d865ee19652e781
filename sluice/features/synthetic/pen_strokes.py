"""Random pen strokes: bright lines on black, as a hand might draw them if it wrote no alphabet.

A glyph is one to three strokes; a stroke is a chain of up to four arcs, each with a length and a turn, some after a corner;
later strokes begin on earlier ones. All of this is drawn by chance. No font, template or image of anything is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from sluice._base import validate
from sluice.features.deskew import STEEPEST

_STROKES, _ARCS, _DOTS = 3, 4, 16
"""At most so many strokes in a glyph and arcs in a stroke; dots of ink on an arc."""

_MARGIN = 2
_BATCH = 250


@dataclass(frozen=True, kw_only=True)
class PenStrokes:
    """Glyphs by number, of which any number of differently written images can be drawn.

    Attributes:
        classes: how many glyphs there are.
        height: of an image; an image of 28 pixels has a glyph of about 20 pixels in the middle, others in proportion.
        width: of an image.
        seed: of the glyphs. Images come from the generator given to `draw`.
        upright: sheared as `sluice.features.deskew.deskew` would shear them, up to a little slant.
    """

    classes: int
    height: int
    width: int
    seed: int
    upright: bool = False

    def __post_init__(self) -> None:
        validate.positive_integer(classes=self.classes, height=self.height, width=self.width)
        object.__setattr__(self, "_glyphs", _random_glyphs(self.classes, torch.Generator().manual_seed(self.seed)))

    def draw(self, glyphs: Tensor, generator: Generator) -> Tensor:
        """One image of each glyph, float32 in 0..1 of shape ``(n, 1, height, width)``.

        Every image differs in the proportions of its arcs, slant, size, position and the width and darkness of the pen.
        """
        chosen: _Glyphs = self._glyphs.take(glyphs)  # type: ignore[attr-defined]
        dots, ink = _written(chosen, generator)
        dots = _slanted(dots, generator)
        dots, ink, pen = _scaled(dots, ink, min(self.height, self.width) / 28, generator)
        if self.upright:
            dots = _slanted(_upright(dots, ink), generator, scale=0.3)
        return _printed(dots, ink, pen, (self.height, self.width), generator)[:, None]


def pen_strokes(count: int, *, height: int, width: int, seed: int, upright: bool = False) -> Tensor:
    """Images of ``count`` different glyphs, one each: ``(count, 1, height, width)``, float32 in 0..1."""
    source = PenStrokes(classes=count, height=height, width=width, seed=seed, upright=upright)
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.cat([source.draw(glyphs, generator) for glyphs in torch.arange(count).split(_BATCH)])


@dataclass(frozen=True, kw_only=True)
class _Glyphs:
    """What glyphs have in common with all their images. An arc of length 0 is not drawn."""

    turn: Tensor
    length: Tensor
    corner: Tensor
    heading: Tensor
    seat: Tensor
    """Where on the stroke before it a stroke sits, as a share of that stroke's length; and with which of its own points."""
    grip: Tensor
    offset: Tensor

    def take(self, glyphs: Tensor) -> _Glyphs:
        return _Glyphs(**{name: value[glyphs] for name, value in vars(self).items()})


def _random_glyphs(count: int, generator: Generator) -> _Glyphs:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(count, *shape, generator=generator)

    def either_sign(low: float, high: float, *shape: int) -> Tensor:
        return uniform(low, high, *shape) * torch.where(uniform(0, 1, *shape) < 0.5, -1.0, 1.0)

    def some(share: float, *shape: int) -> Tensor:
        return (uniform(0, 1, *shape) < share).float()

    def up_to(*shares: float) -> Tensor:
        """Number i with the i-th share as its probability."""
        return torch.multinomial(torch.tensor(shares), count, replacement=True, generator=generator)

    strokes = up_to(0.0, 0.6, 0.33, 0.07)
    first, *later = up_to(0.0, 0.15, 0.35, 0.3, 0.2), up_to(0.0, 0.5, 0.35, 0.15), up_to(0.0, 0.5, 0.35, 0.15)
    first = torch.where(strokes == 1, first.clamp(min=2), first)
    arcs = torch.stack([first, *later], dim=1) * (torch.arange(_STROKES) < strokes[:, None])
    drawn = (torch.arange(_ARCS) < arcs[:, :, None]).float()
    all_arcs = (_STROKES, _ARCS)
    corner = either_sign(0.6, 2.8, *all_arcs) * some(0.45, *all_arcs)
    corner[:, :, 0] = 0.0
    apart = some(0.25, _STROKES, 1)
    return _Glyphs(
        turn=either_sign(0.6, 5.0, *all_arcs) * some(0.65, *all_arcs) * drawn,
        length=uniform(0.4, 1.6, *all_arcs) * drawn,
        corner=corner * drawn,
        heading=uniform(0.0, 2 * math.pi, _STROKES),
        seat=uniform(0.0, 1.0, _STROKES),
        grip=uniform(0.0, 1.0, _STROKES) * some(0.5, _STROKES),
        offset=uniform(-0.8, 0.8, _STROKES, 2) * apart,
    )


def _written(glyphs: _Glyphs, generator: Generator) -> tuple[Tensor, Tensor]:
    """Dots along the strokes, ``(n, dots, 2)`` as across and down, and the length of pen that each stands for."""
    count = len(glyphs.turn)

    def noise(scale: float, *shape: int) -> Tensor:
        return scale * hand.view(-1, *[1] * len(shape)) * torch.randn(count, *shape, generator=generator)

    hand = 0.2 + 1.3 * torch.rand(count, generator=generator)
    all_arcs = (_STROKES, _ARCS)
    turn = glyphs.turn * noise(0.12, *all_arcs).exp() + noise(0.22, *all_arcs)
    length = glyphs.length * noise(0.2, *all_arcs).exp()
    corner = glyphs.corner + noise(0.15, *all_arcs)
    heading = glyphs.heading + noise(0.15, _STROKES)
    at_start = torch.zeros(_DOTS)
    at_start[0] = 1.0
    bends = (turn[..., None] / _DOTS + corner[..., None] * at_start).flatten(2)
    angles = heading[..., None] + bends.cumsum(dim=2)
    ink = (length[..., None] / _DOTS).expand(-1, -1, -1, _DOTS).flatten(2)
    paths = torch.stack([angles.cos() * ink, angles.sin() * ink], dim=-1).cumsum(dim=2)
    strokes = [paths[:, 0]]
    for index in range(1, _STROKES):
        seat = (glyphs.seat[:, index] + noise(0.04)).clamp(0.0, 1.0)
        held = _point_at(strokes[-1], ink[:, index - 1], seat)
        own = _point_at(paths[:, index], ink[:, index], glyphs.grip[:, index])
        shift = held - own + glyphs.offset[:, index] + noise(0.05, 2)
        strokes.append(paths[:, index] + shift[:, None])
    return torch.cat(strokes, dim=1), ink.flatten(1)


def _point_at(path: Tensor, ink: Tensor, share: Tensor) -> Tensor:
    """The dot of each path up to which this share of its length is drawn."""
    drawn = ink.cumsum(dim=1)
    index = torch.searchsorted(drawn, share[:, None] * drawn[:, -1:]).clamp(max=path.shape[1] - 1)
    return path.gather(1, index[..., None].expand(-1, -1, 2))[:, 0]


def _slanted(dots: Tensor, generator: Generator, *, scale: float = 1.0) -> Tensor:
    """Rotated, sheared and stretched by chance."""
    angle, shear, stretch = (scale * torch.randn(3, len(dots), generator=generator)).unbind()
    angle, shear, stretch = 0.15 * angle, 0.25 * shear, (0.2 * stretch).exp()
    across = angle.cos() * stretch * dots[..., 0].T + (shear - angle.sin()) * dots[..., 1].T
    down = angle.sin() * stretch * dots[..., 0].T + angle.cos() * dots[..., 1].T
    return torch.stack([across.T, down.T], dim=2)


def _scaled(dots: Tensor, ink: Tensor, unit: float, generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Dots and ink in pixels, in a box of 20 units with the width of the pen, which is drawn here too."""
    pen = unit * (0.5 + 0.95 * torch.rand(len(dots), generator=generator))
    hidden = (ink <= 0)[..., None]
    lowest = dots.masked_fill(hidden, math.inf).amin(dim=1)
    highest = dots.masked_fill(hidden, -math.inf).amax(dim=1)
    scale = (20 * unit - 2.6 * pen) / (highest - lowest).amax(dim=1).clamp(min=0.2)
    return dots * scale[:, None, None], ink * scale[:, None], pen


def _centred(dots: Tensor, ink: Tensor) -> Tensor:
    return dots - ((dots * ink[..., None]).sum(dim=1) / ink.sum(dim=1, keepdim=True))[:, None]


def _upright(dots: Tensor, ink: Tensor) -> Tensor:
    """Sheared until the mixed second moment is 0."""
    across, down = _centred(dots, ink).unbind(dim=2)
    slope = (ink * across * down).sum(dim=1) / ((ink * down * down).sum(dim=1) + 1.0)
    return torch.stack([across - slope.clamp(-STEEPEST, STEEPEST)[:, None] * down, down], dim=2)


def _printed(dots: Tensor, ink: Tensor, pen: Tensor, size: tuple[int, int], generator: Generator) -> Tensor:
    """Drawn with a round pen, the centre of mass near the middle: ``(n, height, width)``."""
    shift = 0.3 * min(size) / 28 * torch.randn(len(dots), 1, 2, generator=generator)
    steepness = 2.0 + 2.0 * torch.rand(len(dots), 1, 1, generator=generator)
    spots = _splat(_centred(dots, ink) + shift, ink, size)
    spread_down, spread_across = (_blur(length + 2 * _MARGIN, pen) for length in size)
    lines = spread_down @ spots @ spread_across * (math.sqrt(2 * math.pi) * pen)[:, None, None]
    shades = ((lines - 0.18) * steepness).clamp(0.0, 1.0)
    return shades[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN]


def _splat(dots: Tensor, ink: Tensor, size: tuple[int, int]) -> Tensor:
    """Ink on a grid with a margin: each dot is shared by the four nearest pixels."""
    height, width = (length + 2 * _MARGIN for length in size)
    across = (dots[..., 0] + (width - 1) / 2).clamp(0.0, width - 1.001)
    down = (dots[..., 1] + (height - 1) / 2).clamp(0.0, height - 1.001)
    left, top = across.floor(), down.floor()
    right_share, lower_share = across - left, down - top
    corner = torch.arange(len(dots))[:, None] * (height * width) + (top * width + left).long()
    paper = torch.zeros(len(dots) * height * width)
    for offset, share in (
        (0, (1 - right_share) * (1 - lower_share)),
        (1, right_share * (1 - lower_share)),
        (width, (1 - right_share) * lower_share),
        (width + 1, right_share * lower_share),
    ):
        paper.index_add_(0, (corner + offset).flatten(), (share * ink).flatten())
    return paper.view(-1, height, width)


def _blur(length: int, pen: Tensor) -> Tensor:
    """A Gaussian of the pen's width along one axis, for each image: ``(n, length, length)``."""
    place = torch.arange(length, dtype=torch.float32)
    distance = (place[:, None] - place[None]) ** 2
    width = pen[:, None, None]
    return torch.exp(-distance / (2 * width**2)) / (math.sqrt(2 * math.pi) * width)


__all__ = ["PenStrokes", "pen_strokes"]
