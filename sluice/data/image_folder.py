"""Images of the user's own, in a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sluice._base.errors import DataError, InputError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_GREY = ("1", "L")


def is_image_folder(path: Path) -> bool:
    """Whether a folder has folders of images in it, or such folders called train and test."""
    return path.is_dir() and bool(_classes(path / "train" if _is_split(path) else path))


def read_image_folder(path: Path, *, at_least: int = 2) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Images with the names of their classes, and all names: those of the folders, in alphabetical order.

    Args:
        at_least: how many classes there must be.

    Folders without images count too: which classes there are is then decided by who laid the folders out, not by records.

    **Guarantee.** Image i of the result is a function of its file alone, its label one of its folder's name alone.
    """
    if not _is_split(path):
        names = _classes(path)
        x, y = _read(path, names, at_least)
        return {"x": x, "y": y}, names
    names = tuple(sorted({*_classes(path / "train"), *_classes(path / "test")}))
    (x_train, y_train), (x_test, y_test) = (_read(path / part, names, at_least) for part in ("train", "test"))
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}, names


def read_images(path: Path) -> np.ndarray | None:
    """The images that lie in a folder itself, without classes, by their names in alphabetical order; None if none do.

    **Guarantee.** Image i of the result is a function of its file alone.
    """
    files = sorted(each for each in path.iterdir() if each.is_file() and each.suffix.lower() in ENDINGS)
    return _stacked(files) if files else None


def _is_split(path: Path) -> bool:
    return {each.name for each in path.iterdir() if each.is_dir()} == {"train", "test"}


def _classes(path: Path) -> tuple[str, ...]:
    if not path.is_dir():
        return ()
    folders = sorted(each.name for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    return tuple(folders) if any(_images(path / name) for name in folders) else ()


def _images(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.suffix.lower() in ENDINGS) if folder.is_dir() else []


def _read(path: Path, names: tuple[str, ...], at_least: int) -> tuple[np.ndarray, np.ndarray]:
    if len(names) < at_least:
        raise DataError(f"{path} has images of one class only; it must have a folder for each of at least two.")
    files = [(file, name) for name in names for file in _images(path / name)]
    if not files:
        raise DataError(f"{path} holds no image ({', '.join(ENDINGS)}).")
    return _stacked([file for file, _ in files]), np.array([name for _, name in files])


def _stacked(files: Sequence[Path]) -> np.ndarray:
    first = _pixels(files[0])
    images = np.empty((len(files), *first.shape), dtype=np.uint8)
    for row, file in enumerate(files):
        image = _pixels(file)
        if image.shape != first.shape:
            raise DataError(
                f"{file} is {_described(image)}, {files[0]} is {_described(first)}: all images must have one size and be "
                "all grey or all coloured. Resize and convert them one by one beforehand."
            )
        images[row] = image
    return images


def _pixels(file: Path) -> np.ndarray:
    """(height, width) of a grey image, (3, height, width) of any other, as bytes."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError(f"{file} needs Pillow to be read: pip install pillow, or save arrays as .npz.") from None
    try:
        with Image.open(file) as image:
            grey = image.mode in _GREY
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
            return pixels if grey else np.moveaxis(pixels, 2, 0)
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}.") from error


def _described(image: np.ndarray) -> str:
    return f"{image.shape[-1]} x {image.shape[-2]}, {'coloured' if image.ndim == 3 else 'grey'}"


__all__ = ["ENDINGS", "is_image_folder", "read_image_folder", "read_images"]
