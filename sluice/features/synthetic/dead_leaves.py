"""Dead leaves: random textured shapes that lie on top of one another, the simplest images with the statistics of photographs.

Their edges, occlusions, contrasts and power spectra resemble those of natural images, but no image of anything is used:
every pixel comes from a random number generator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError

Array = NDArray[np.float32]

SIZES = (16, 64)
"""The smallest and the largest height or width."""

_OVERSAMPLING = 3
#: Radii of leaves, as fractions of the image's side.
_SMALLEST, _LARGEST = 4 / 96, 45 / 96
_LEAVES = (3, 6, 12, 25, 50)
_TEXTURES, _SLOPES = 64, (0.5, 3.5)


def dead_leaves(count: int, *, height: int, width: int, channels: int, seed: int) -> Tensor:
    """Draw images, uint8 of shape ``(count, channels, height, width)``.

    Image i depends on the seed, the shape and i alone, not on ``count``: each has a generator of its own.

    >>> few, many = (dead_leaves(count, height=16, width=20, channels=3, seed=1) for count in (1, 3))
    >>> many.shape, bool((many[:1] == few).all())
    (torch.Size([3, 3, 16, 20]), True)
    """
    validate.positive_integer(count=count)
    if channels not in (1, 3):
        raise InputError(f"channels={channels} is not allowed: it must be 1 (grey) or 3 (colour).")
    if not all(SIZES[0] <= side <= SIZES[1] for side in (height, width)):
        raise InputError(
            f"height={height}, width={width} is not allowed: each must be {SIZES[0]} to {SIZES[1]} pixels."
        )
    painter = _Painter.create(height=height, width=width, channels=channels, seed=seed)
    images = np.empty((count, channels, height, width), np.uint8)
    for index in range(count):
        images[index] = painter.image(np.random.default_rng([seed, 1, index]))
    return torch.from_numpy(images)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Painter:
    """Paints on a canvas of ``(height, width, channels)`` that is larger than the image by the factor of oversampling."""

    height: int
    width: int
    channels: int
    rows: Array
    columns: Array
    textures: Array
    """Periodic random fields with spectra f^-slope, of mean 0 and variance 1, one slope each."""

    @classmethod
    def create(cls, *, height: int, width: int, channels: int, seed: int) -> _Painter:
        height, width = height * _OVERSAMPLING, width * _OVERSAMPLING
        rows, columns = (np.arange(side, dtype=np.float32) for side in (height, width))
        textures = _random_fields(np.random.default_rng([seed, 0]), max(height, width))
        return cls(
            height=height, width=width, channels=channels, rows=rows[:, None], columns=columns[None], textures=textures
        )

    @property
    def side(self) -> float:
        return float(min(self.height, self.width))

    def image(self, random: np.random.Generator) -> NDArray[np.uint8]:
        canvas = self._background(random)
        number = int(random.choice(_LEAVES))
        # Radii of density r^-3: leaves of every size cover the same area.
        share = random.uniform(size=number)
        radii = self.side / np.sqrt(share / _SMALLEST**2 + (1 - share) / _LARGEST**2)
        if random.uniform() < 0.5:
            radii = np.sort(radii)[::-1]
        for radius in radii:
            self._add_leaf(canvas, float(radius), random)
        return self._developed(canvas, random)

    def _background(self, random: np.random.Generator) -> Array:
        canvas = np.broadcast_to(self._colour(random), (self.height, self.width, self.channels)).copy()
        texture = self._texture(random, self.height, self.width, slopes=(1.0, 3.5))
        canvas += texture[:, :, None] * self._tint(random, random.uniform(0, 0.25), 0.2)
        angle, strength = random.uniform(0, 2 * np.pi), random.uniform(0, 0.6)
        slope = (self.columns / self.width - 0.5) * np.cos(angle) + (self.rows / self.height - 0.5) * np.sin(angle)
        canvas += (strength * slope).astype(np.float32)[:, :, None]
        return canvas

    def _add_leaf(self, canvas: Array, radius: float, random: np.random.Generator) -> None:
        margin = self.side / 12
        x, y = random.uniform(-margin, self.width + margin), random.uniform(-margin, self.height + margin)
        outline = _OUTLINES[random.integers(len(_OUTLINES))]
        angle, stretch = random.uniform(0, np.pi), np.exp(random.uniform(-0.45, 0.45))
        softness = random.uniform(0.02, 0.3) if random.uniform() < 0.3 else 0.03
        reach = 1.6 * radius * max(stretch, 1 / stretch)  # farther out than any outline reaches
        left, right = (int(np.clip(x + side, 0, self.width)) for side in (-reach, reach + 1))
        top, bottom = (int(np.clip(y + side, 0, self.height)) for side in (-reach, reach + 1))
        if left == right or top == bottom:
            return
        across, down = self.columns[:, left:right] - np.float32(x), self.rows[top:bottom] - np.float32(y)
        cosine, sine = np.float32(np.cos(angle)), np.float32(np.sin(angle))
        u = (across * cosine + down * sine) * np.float32(1 / (radius * stretch))
        v = (down * cosine - across * sine) * np.float32(stretch / radius)
        cover = np.clip((1 - outline(u, v, random)) * np.float32(1 / softness) + np.float32(0.5), 0, 1)[:, :, None]
        part = canvas[top:bottom, left:right]
        part += cover * (self._fill(u, v, radius, random) - part)

    def _fill(self, u: Array, v: Array, radius: float, random: np.random.Generator) -> Array:
        colour, kind = self._colour(random), random.uniform()
        if kind < 0.35:
            pattern = self._texture(random, *u.shape, slopes=(0.5, 3.0))
            return np.asarray(colour + pattern[:, :, None] * self._tint(random, random.uniform(0.03, 0.2), 0.2))
        if kind < 0.5:
            frequency = radius * random.uniform(0.05, 0.5) * 96 / self.side
            pattern = np.sin(u * np.float32(frequency) + np.float32(random.uniform(0, 2 * np.pi)))
            pattern = np.sign(pattern) if random.uniform() < 0.5 else pattern
            return np.asarray(colour + pattern[:, :, None] * self._tint(random, random.uniform(0.05, 0.25), 0.3))
        if kind < 0.85:
            along, across = random.uniform(-0.25, 0.25, 2).astype(np.float32)
            return np.asarray(colour + (u * along + v * across)[:, :, None], np.float32)
        return colour

    def _colour(self, random: np.random.Generator) -> Array:
        """Mostly a brightness: the channels of photographs are strongly correlated."""
        brightness = random.uniform()
        shift = random.standard_normal(3) * random.choice((0.03, 0.08, 0.18))
        colour = np.clip(brightness + shift - 0.5 * shift.mean(), 0, 1)
        return self._kept(colour)

    def _tint(self, random: np.random.Generator, strength: float, variation: float) -> Array:
        return self._kept(strength * (1 + variation * random.standard_normal(3)))

    def _kept(self, colour: NDArray[np.float64]) -> Array:
        return np.asarray(colour if self.channels == 3 else [colour.mean()], np.float32)

    def _texture(self, random: np.random.Generator, height: int, width: int, *, slopes: tuple[float, float]) -> Array:
        first, last = (round((slope - _SLOPES[0]) / (_SLOPES[1] - _SLOPES[0]) * (_TEXTURES - 1)) for slope in slopes)
        field = self.textures[random.integers(first, last + 1)]
        size = len(field) // 2  # a field is kept twice along each side, so that a window needs no turning over
        top, left = random.integers(size, size=2)
        return np.asarray(field[top : top + height, left : left + width])

    def _developed(self, canvas: Array, random: np.random.Generator) -> NDArray[np.uint8]:
        """The canvas averaged over its fine pixels, with a random gamma, as bytes."""
        step = _OVERSAMPLING
        fine = np.clip(canvas, 0, 1).reshape(self.height // step, step, self.width // step, step, self.channels)
        image = fine.mean(axis=(1, 3)) ** np.float32(np.exp(random.normal(0, 0.25)))
        return np.asarray(image * 255 + 0.5, np.uint8).transpose(2, 0, 1)


def _random_fields(random: np.random.Generator, size: int) -> Array:
    squares = np.fft.fftfreq(size)[:, None] ** 2 + np.fft.rfftfreq(size)[None] ** 2
    squares[0, 0] = 1
    fields = []
    for slope in np.linspace(*_SLOPES, _TEXTURES):
        amplitudes = squares ** (-slope / 4)
        amplitudes[0, 0] = 0
        spectrum = amplitudes * (random.standard_normal(squares.shape) + 1j * random.standard_normal(squares.shape))
        field = np.fft.irfft2(spectrum, s=(size, size))
        fields.append(np.tile(field / field.std(), (2, 2)))
    return np.stack(fields).astype(np.float32)


def _ellipse(u: Array, v: Array, random: np.random.Generator) -> Array:
    return np.asarray(u * u + v * v)


def _rectangle(u: Array, v: Array, random: np.random.Generator) -> Array:
    return np.asarray(1.3 * np.maximum(np.abs(u), np.abs(v)) ** 2)


def _blob(u: Array, v: Array, random: np.random.Generator) -> Array:
    lobes, phase = int(random.integers(2, 6)), np.float32(random.uniform(0, 2 * np.pi))
    return np.asarray((u * u + v * v) / (1 + np.float32(0.4) * np.sin(lobes * np.arctan2(v, u) + phase)) ** 2)


def _triangle(u: Array, v: Array, random: np.random.Generator) -> Array:
    return np.asarray(1.6 * np.maximum(np.maximum(-1.2 * v, 0.6 * v + np.abs(u)), 0) ** 2)


#: Functions of a leaf's own coordinates that are 1 on its edge and less inside.
_OUTLINES: tuple[Callable[[Array, Array, np.random.Generator], Array], ...] = (_ellipse, _rectangle, _blob, _triangle)

__all__ = ["SIZES", "dead_leaves"]
