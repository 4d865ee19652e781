"""Images of the user's own, in a folder for each class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sluice._base.errors import DataError, InputError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
_GREY = ("1", "L")
_COLOURED = ("LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
_STEPS_OF_16_BITS = 257
"""From 16 bits to 8: the largest numbers, 65,535 and 255, correspond."""


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
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError(f"{file} needs Pillow to be read: pip install pillow, or save arrays as .npz.") from None
    try:
        with Image.open(file) as image:
            return pixels_of(image, str(file))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}.") from error


def pixels_of(image: Any, where: str) -> np.ndarray:
    """(height, width) of a grey image of Pillow's, (3, height, width) of any other, as bytes; without transparency.

    Pillow would cut numbers of 16 bits off at 255, which leaves black and white; they are divided by a constant.
    """
    if _has_16_bits(image):
        values = np.asarray(image).astype(np.uint32)
        return ((values + _STEPS_OF_16_BITS // 2) // _STEPS_OF_16_BITS).astype(np.uint8)
    if image.mode in _GREY:
        return np.asarray(image.convert("L"))
    if image.mode not in _COLOURED:
        raise DataError(
            f"{where} has the mode {image.mode}; allowed are {', '.join((*_GREY, 'I;16', *_COLOURED))}. Convert images one by one "
            "beforehand, scaling them by a public constant."
        )
    return np.moveaxis(np.asarray(image.convert("RGB")), 2, 0)


def _has_16_bits(image: Any) -> bool:
    """Whether these are grey levels of 16 bits; some versions of Pillow read such PNG and PGM files into 32."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def _described(image: np.ndarray) -> str:
    return f"{image.shape[-1]} x {image.shape[-2]}, {'coloured' if image.ndim == 3 else 'grey'}"


__all__ = ["ENDINGS", "is_image_folder", "pixels_of", "read_image_folder", "read_images"]
