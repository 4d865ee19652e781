"""What the header of a file of arrays tells without reading a record: how many there are, of which shape."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from numpy.lib import format as npy

_NAMES = ("x", "x_train")
_CHANNELS = (1, 3)


@dataclass(frozen=True, kw_only=True)
class ArrayHeader:
    """Shape and type of the records of a ``.npz`` file."""

    shape: tuple[int, ...]
    is_bytes: bool

    @property
    def records(self) -> int:
        return self.shape[0]

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width, if the records are images, by the rules of `sluice.data.own`."""
        if len(self.shape) == 3 and self.is_bytes:
            return (1, *self.shape[1:])
        if len(self.shape) != 4:
            return None
        _, first, second, third = self.shape
        if first in _CHANNELS:
            return first, second, third
        return (third, first, second) if third in _CHANNELS else None


def array_header(path: Path) -> ArrayHeader | None:
    """The header of the records' array; None where it cannot be read: whoever loads the file says why."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(each for each in _NAMES if f"{each}.npy" in archive.namelist())
            with archive.open(f"{name}.npy") as file:
                version = npy.read_magic(file)
                read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
                shape, _, kind = read(file)
    except (OSError, ValueError, StopIteration, zipfile.BadZipFile):
        return None
    return ArrayHeader(shape=shape, is_bytes=kind.kind == "u" and kind.itemsize == 1)
