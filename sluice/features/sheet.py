"""A sheet of what features know: synthetic images and dictionaries, as a picture."""

from __future__ import annotations

from torch import Tensor

from sluice._base.figures import as_png, blank_figure
from sluice.features.base import SHOWN
from sluice.features.rows import RowFeatures

_COLUMNS = 12


def sheet(features: RowFeatures) -> bytes | None:
    """A PNG with a row of pictures for each thing that a feature has to show; None if there is nothing."""
    panels = [
        (f"{feature.written()}: {title}", images[:SHOWN])
        for _, feature, known in features.blocks
        for title, images in feature.pictures(features.shape, known).items()
    ]
    if not panels:
        return None
    with blank_figure() as figure:
        figure.set_size_inches(7.2, 2.6 * len(panels))
        for axes, (title, images) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
            mosaic = _mosaic(images)
            axes.imshow(mosaic.squeeze(-1).numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            axes.set_title(title, loc="left")
            axes.set_axis_off()
        return as_png(figure)


def _mosaic(images: Tensor) -> Tensor:
    """Images in rows of one picture, a white line between them, channels last."""
    count, channels, height, width = images.shape
    rows = -(-count // _COLUMNS)
    board = images.new_ones(rows * (height + 1) - 1, _COLUMNS * (width + 1) - 1, channels)
    for number, image in enumerate(images):
        top, left = number // _COLUMNS * (height + 1), number % _COLUMNS * (width + 1)
        board[top : top + height, left : left + width] = image.permute(1, 2, 0)
    return board.clamp(0.0, 1.0)
