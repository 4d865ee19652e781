"""Preprocessing of single images: upright and centred, and seen from slightly different angles.

Each function moves the pixels of an image by what that image alone shows, so it costs no privacy.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError

STEEPEST = 0.8
"""Pixels to the side for each pixel down: images are sheared by at most this much."""

_LEAST_MASS = 1e-3
_LEAST_SPREAD = 1e-3


def clean(images: Tensor) -> Tensor:
    """Images in 0..1 whatever was in them: NaN reads as 0, values outside are moved to the nearer end."""
    require_images(images)
    return torch.nan_to_num(images, nan=0.0, posinf=1.0, neginf=0.0).clamp(0.0, 1.0)


def deskew(images: Tensor) -> Tensor:
    """Move the centre of mass to the middle, and shear rows until the image stands upright.

    ``(n, channels, height, width)`` in 0..1. Mass is brightness, summed over channels. Upright means that its mixed second
    moment is 0. Pixels from outside the image are 0; those between four others are interpolated.

    Guarantee:
        Row i of the result is a function of image i alone, bit for bit: it costs no privacy.

        | image | result |
        |---|---|
        | hardly any mass (a sum below 0.001) | unchanged |
        | all mass in one row | centred, not sheared |
        | NaN or values outside 0..1 | as if they were 0, or the nearer end |
    """
    images = clean(images)
    height, width = images.shape[-2:]
    down, across = _axes(height, width)
    # In float64 no image of this size can make a sum overflow, or a difference of moments vanish.
    mass = images.double().sum(dim=1)
    total = mass.sum(dim=(1, 2))
    light = total < _LEAST_MASS
    total = torch.where(light, 1.0, total)[:, None, None]
    middle_down = (mass * down).sum(dim=(1, 2), keepdim=True) / total
    middle_across = (mass * across).sum(dim=(1, 2), keepdim=True) / total
    below, beside = down - middle_down, across - middle_across
    spread = (mass * below * below).sum(dim=(1, 2), keepdim=True) / total
    mixed = (mass * below * beside).sum(dim=(1, 2), keepdim=True) / total
    slope = (mixed / (spread + _LEAST_SPREAD)).clamp(-STEEPEST, STEEPEST)
    moved_down = down + middle_down + torch.zeros_like(across)
    moved = interpolate(images, moved_down, across + middle_across + slope * down)
    return torch.where(light[:, None, None, None], images, moved)


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Turn every image about its middle. Row i of the result is a function of image i alone, bit for bit."""
    validate.finite(degrees=degrees)
    require_images(images)
    down, across = _axes(*images.shape[-2:])
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    source_down, source_across = cosine * down + sine * across, cosine * across - sine * down
    return interpolate(images, source_down[None], source_across[None])


def interpolate(images: Tensor, down: Tensor, across: Tensor) -> Tensor:
    """Values of images at given points, counted in pixels from the middle, between pixels and 0 outside.

    ``down`` and ``across`` are of shape ``(n, height, width)``, or ``(1, height, width)`` for the same points in all.
    """
    count, channels, height, width = images.shape
    framed = torch.nn.functional.pad(images, (1, 1, 1, 1)).flatten(2)
    points = []
    for position, length in ((down, height), (across, width)):
        position = (position + (length + 1) / 2).clamp(0.0, length + 1.0)
        first = position.floor().clamp(max=length)
        points.append((first.long(), (position - first).to(images.dtype)))
    (top, lower), (left, right) = points
    corner = (top * (width + 2) + left).flatten(1).expand(count, -1)
    lower, right = lower.flatten(1)[:, None], right.flatten(1)[:, None]

    def at(offset: int) -> Tensor:
        return framed.gather(2, (corner + offset)[:, None].expand(-1, channels, -1))

    upper_row = at(0) * (1 - right) + at(1) * right
    lower_row = at(width + 2) * (1 - right) + at(width + 3) * right
    return (upper_row * (1 - lower) + lower_row * lower).view(count, channels, height, width)


def require_images(images: Tensor) -> None:
    if images.dim() != 4 or not images.is_floating_point():
        raise InputError(
            f"images of shape {tuple(images.shape)} and {images.dtype} are not allowed: they must be floating-point "
            "numbers of shape (samples, channels, height, width)."
        )


def _axes(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows and columns, counted from the middle of the image: as a column and as a row."""
    down = torch.arange(height, dtype=torch.float64) - (height - 1) / 2
    across = torch.arange(width, dtype=torch.float64) - (width - 1) / 2
    return down[:, None], across[None, :]


__all__ = ["STEEPEST", "clean", "deskew", "interpolate", "require_images", "rotate"]
