"""Scenes of dead leaves by number, each seen from many places and in many lights: classes to pre-train a net on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional

from sluice._base import validate
from sluice.features.synthetic.dead_leaves import SIZES, dead_leaves

_WIDER = 1.4
"""How much larger a scene is than what is seen of it at once."""


@dataclass(frozen=True, kw_only=True)
class LeafScenes:
    """Scenes by number, of which any number of views can be drawn.

    Attributes:
        classes: how many scenes there are.
        channels: of an image.
        height: of an image.
        width: of an image.
        seed: of the scenes. Views come from the generator given to `draw`.
    """

    classes: int
    channels: int
    height: int
    width: int
    seed: int

    def __post_init__(self) -> None:
        validate.positive_integer(classes=self.classes, height=self.height, width=self.width)
        height, width = (min(SIZES[1], round(_WIDER * size)) for size in (self.height, self.width))
        scenes = dead_leaves(self.classes, height=height, width=width, channels=self.channels, seed=self.seed)
        object.__setattr__(self, "_scenes", scenes)

    def draw(self, scenes: Tensor, generator: Generator) -> Tensor:
        """One view of each scene, float32 in 0..1 of shape ``(n, channels, height, width)``.

        A view is a part of the scene, mirrored or not, turned a little; brightness, contrast and the balance of colours differ.
        """
        images = self._scenes[scenes].float() / 255  # type: ignore[attr-defined]
        count = len(images)

        def uniform(low: float, high: float, *shape: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *shape, generator=generator)

        size = uniform(0.5, 0.9)
        angle, mirrored = uniform(-0.2, 0.2), torch.randint(2, (count,), generator=generator) * 2.0 - 1
        right, down = ((1 - size) * uniform(-1, 1) for _ in range(2))
        across = torch.stack([mirrored * size * angle.cos(), -size * angle.sin(), right], dim=1)
        along = torch.stack([mirrored * size * angle.sin(), size * angle.cos(), down], dim=1)
        target = [count, self.channels, self.height, self.width]
        points = functional.affine_grid(torch.stack([across, along], dim=1), target, align_corners=False)
        views = functional.grid_sample(images, points, padding_mode="reflection", align_corners=False)
        balance = uniform(-0.1, 0.1, self.channels, 1, 1)
        contrast, brightness = uniform(0.7, 1.3, 1, 1, 1), uniform(-0.15, 0.15, 1, 1, 1)
        lit = (views - 0.5) * contrast + 0.5 + brightness + balance
        return (lit + 0.03 * torch.randn(lit.shape, generator=generator)).clamp(0.0, 1.0)


__all__ = ["LeafScenes"]
