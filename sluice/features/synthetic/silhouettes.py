"""Random silhouettes: bright shapes on black, made of boxes and ellipses with shades, textures, stripes and seams.

Many are their own mirror image. Everything is drawn by chance: no garment, template or photograph is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from sluice._base import validate

_PARTS = 4
_BATCH = 250
_SHARPNESS = 10.0
_FAINT = 0.05
_SMALLEST = 0.15
"""A shape is enlarged at most by the inverse of this."""


@dataclass(frozen=True, kw_only=True)
class Silhouettes:
    """Shapes by number, of which any number of differently worn images can be drawn.

    Attributes:
        classes: how many shapes there are.
        height: of an image.
        width: of an image.
        seed: of the shapes. Images come from the generator given to `draw`.
    """

    classes: int
    height: int
    width: int
    seed: int

    def __post_init__(self) -> None:
        validate.positive_integer(classes=self.classes, height=self.height, width=self.width)
        shapes = silhouettes(self.classes, height=self.height, width=self.width, seed=self.seed)
        object.__setattr__(self, "_shapes", shapes)

    def draw(self, shapes: Tensor, generator: Generator) -> Tensor:
        """One image of each shape, float32 in 0..1 of shape ``(n, 1, height, width)``.

        Every image is turned, stretched, moved and bent a little, and differs in brightness, contrast and grain.
        """
        images: Tensor = self._shapes[shapes]  # type: ignore[attr-defined]
        count = len(images)

        def normal(scale: float, *shape: int) -> Tensor:
            return scale * torch.randn(count, *shape, generator=generator)

        angle, wider, taller, shear = normal(0.1), normal(0.12).exp(), normal(0.12).exp(), normal(0.08)
        across = torch.stack([angle.cos() * wider, shear - angle.sin(), normal(0.08)], dim=1)
        down = torch.stack([angle.sin(), angle.cos() * taller, normal(0.08)], dim=1)
        points = functional.affine_grid(torch.stack([across, down], dim=1), list(images.shape), align_corners=False)
        size = (self.height, self.width)
        bends = functional.interpolate(normal(0.06, 2, 4, 4), size=size, mode="bilinear", align_corners=True)
        images = functional.grid_sample(images, points + bends.permute(0, 2, 3, 1), align_corners=False)
        images = images.clamp(min=1e-4) ** normal(0.35, 1, 1, 1).exp() * normal(0.15, 1, 1, 1).exp()
        grain = torch.rand(count, 1, 1, 1, generator=generator) * normal(0.06, 1, *size)
        return (images + grain * (images > 0.02)).clamp(0.0, 1.0)


def silhouettes(count: int, *, height: int, width: int, seed: int) -> Tensor:
    """Images of ``count`` different shapes: ``(count, 1, height, width)``, float32 in 0..1."""
    generator = torch.Generator().manual_seed(seed)
    batches = [min(_BATCH, count - start) for start in range(0, count, _BATCH)]
    return torch.cat([_framed(batch, (height, width), generator) for batch in batches])[:, None]


def _framed(count: int, size: tuple[int, int], generator: Generator) -> Tensor:
    """Shapes that fill the image in one direction and stand in its middle: painted twice with the same chance."""
    painter = _Painter(count, size, generator)
    state = generator.get_state()
    seen = painter.paint() > _FAINT
    painter.frame(seen)
    generator.set_state(state)
    return painter.paint()


class _Painter:
    """Draws a batch of shapes. All random numbers are of shape ``(count, 1, 1)``, one for each shape."""

    def __init__(self, count: int, size: tuple[int, int], generator: Generator) -> None:
        self.count, self.size, self.generator = count, size, generator
        down, across = (2 * (torch.arange(length) + 0.5) / length - 1 for length in size)
        self.down, self.across = down[:, None], across[None, :]
        self.sharpness = torch.tensor(_SHARPNESS)

    def frame(self, seen: Tensor) -> None:
        """Look at the part of the plane where something was seen, and not at the rest."""
        ends = []
        for axis, other in ((self.down, 2), (self.across, 1)):
            places, any_seen = axis.flatten(), seen.any(dim=other)
            low = torch.where(any_seen, places, math.inf).amin(dim=1)
            high = torch.where(any_seen, places, -math.inf).amax(dim=1)
            ends.append((low, high))
        empty = ~seen.flatten(1).any(dim=1)
        half = torch.stack([(high - low) / 2 for low, high in ends]).amax(dim=0).clamp(min=_SMALLEST)
        half = torch.where(empty, 1.0, half)[:, None, None]
        (top, bottom), (left, right) = ends
        middle_down = torch.where(empty, 0.0, (top + bottom) / 2)[:, None, None]
        middle_across = torch.where(empty, 0.0, (left + right) / 2)[:, None, None]
        self.down, self.across = self.down * half + middle_down, self.across * half + middle_across
        self.sharpness = _SHARPNESS / half

    def paint(self) -> Tensor:
        images = torch.zeros(self.count, *self.size)
        mirrored = self.some(0.65)
        parts = 1 + (self.uniform(0, _PARTS)).floor()
        for index in range(_PARTS):
            drawn = (parts > index).float()
            inside = self.part(mirrored) * drawn
            opaque = torch.ones_like(drawn) if index == 0 else self.some(0.7)
            painted = images * (1 - inside) + inside * self.fill(mirrored)
            hollowed = images * (1 - inside * self.uniform(0.3, 1.0))
            images = torch.where(opaque > 0, painted, hollowed) * self.seam(mirrored, drawn)
        return images.clamp(0.0, 1.0)

    def part(self, mirrored: Tensor) -> Tensor:
        """How much of each pixel lies inside a box, an ellipse or a curved box, or inside its mirror image."""
        middle, level = self.uniform(-0.5, 0.5), self.uniform(-0.6, 0.6)
        half_width, half_height = (self.uniform(math.log(0.12), math.log(0.8)).exp() for _ in range(2))
        angle = 0.4 * torch.randn(self.count, 1, 1, generator=self.generator) * self.some(0.5)
        taper, kind = self.uniform(-0.5, 0.5), self.uniform(0, 3).floor()

        def covered(middle: Tensor, angle: Tensor) -> Tensor:
            beside, below = self.across - middle, self.down - level
            along = (beside * angle.cos() + below * angle.sin()) / half_width
            up = (below * angle.cos() - beside * angle.sin()) / half_height
            bulge = torch.where(kind == 0, up * half_height, up * (up * half_height**2).abs())
            box = torch.maximum((along / (1 + taper * bulge)).abs(), up.abs())
            distance = torch.where(kind == 1, (along**2 + up**2).sqrt(), box)
            edge = self.sharpness * torch.minimum(half_width, half_height)
            return ((1 - distance) * edge + 0.5).clamp(0.0, 1.0)

        one, other = covered(middle, angle), covered(-middle, -angle)
        return torch.where(mirrored > 0, torch.maximum(one, other), one)

    def fill(self, mirrored: Tensor) -> Tensor:
        """A shade with a cloudy texture, sometimes striped."""
        texture = self.clouds()
        both_sides = (texture + texture.flip(2)) / 1.4
        texture = torch.where(mirrored * self.some(0.5) > 0, both_sides, texture)
        values = self.uniform(0.25, 1.0) * (1 + self.uniform(0.0, 0.35) * texture)
        slanted = self.uniform(0.0, math.pi)
        quarter = (self.uniform(0, 2).floor()) * (math.pi / 2)
        direction = torch.where(self.uniform(0, 1) < 1 / 3, slanted, quarter)
        phase = (self.across * direction.cos() + self.down * direction.sin()) * self.uniform(6, 40)
        stripes = torch.sign(torch.sin(phase + self.uniform(0, 6)))
        return values * (1 + 0.4 * self.some(0.25) * stripes)

    def clouds(self) -> Tensor:
        """Noise with a spectrum of 1/frequency^b, of variance 1."""
        height, width = self.size
        frequency = (torch.fft.fftfreq(height)[:, None] ** 2 + torch.fft.rfftfreq(width)[None] ** 2).sqrt()
        frequency[0, 0] = 1.0
        noise = torch.randn(self.count, height, width, generator=self.generator)
        spectrum = torch.fft.rfft2(noise) / frequency ** self.uniform(0.5, 1.5)
        clouds: Tensor = torch.fft.irfft2(spectrum, s=self.size)
        return clouds / (clouds.std(dim=(1, 2), keepdim=True) + 1e-6)

    def seam(self, mirrored: Tensor, drawn: Tensor) -> Tensor:
        """A factor that darkens a vertical line in some shapes."""
        aside = torch.where(mirrored > 0, self.some(0.5), 1.0)
        distance = self.across - self.uniform(-0.5, 0.5) * aside
        line = torch.exp(-((20 * distance) ** 2)) * (self.down.abs() < self.uniform(0.2, 1.0))
        return 1 - 0.6 * self.some(0.3) * drawn * line

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.count, 1, 1, generator=self.generator)

    def some(self, share: float) -> Tensor:
        """1 for this share of the shapes, 0 for the others."""
        return (self.uniform(0, 1) < share).float()


__all__ = ["Silhouettes", "silhouettes"]
