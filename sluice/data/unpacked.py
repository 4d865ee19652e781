"""The unpacked copies in the user's cache: one .npy file for each array, bound to the sha256 of its source.

A copy is used only if every array still has the sha256 that was noted when it was written; otherwise it is
made again. Any number of processes may do so at once: each file is replaced in one move, all of them write the
same bytes, and the note comes last.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sluice._base.files import cache_dir, replaced_atomically

# Part of the folder's name, so that copies in an older form are never mistaken for the present one.
FORM = 1


def unpacked(name: str, source: str, unpack: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays that ``unpack`` makes of the files whose joint sha256 is ``source``, cached on disk."""
    folder = cache_dir() / "unpacked" / f"{name}-{FORM}-{source[:16]}"
    cached = _read(folder, source)
    if cached is not None:
        return cached
    arrays = {key: np.array(array, order="C") for key, array in unpack().items()}
    try:
        _write(folder, source, arrays)
    except OSError as error:
        warnings.warn(
            f"The unpacked copy of {name} could not be kept in {folder} ({error.strerror}), so the next load will be "
            "slow again. Set SLUICE_CACHE to a folder that can be written.",
            stacklevel=2,
        )
    return arrays


def _write(folder: Path, source: str, arrays: dict[str, np.ndarray]) -> None:
    digests = {}
    for key, array in arrays.items():
        with replaced_atomically(folder / f"{key}.npy") as temporary:
            with temporary.open("wb") as stream:
                np.save(stream, array, allow_pickle=False)
            with temporary.open("rb") as stream:
                digests[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    with replaced_atomically(folder / "manifest.json") as temporary:
        temporary.write_text(
            json.dumps({"source": source, "arrays": digests, "seal": _seal(source, digests)}, indent=2)
        )


def _read(folder: Path, source: str) -> dict[str, np.ndarray] | None:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return None
    digests = manifest.get("arrays") if isinstance(manifest, dict) else None
    if not isinstance(digests, dict) or manifest.get("seal") != _seal(source, digests):
        return None
    arrays = {}
    for key, digest in digests.items():
        content = _whole(folder / f"{key}.npy")
        if content is None or hashlib.sha256(content).hexdigest() != digest:
            return None
        arrays[key] = _npy(content)
    return arrays


def _seal(source: str, digests: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps([source, digests], sort_keys=True).encode()).hexdigest()


def _whole(path: Path) -> bytearray | None:
    """The file in a writable buffer, which the array then uses without a copy."""
    try:
        with path.open("rb") as stream:
            content = bytearray(os.fstat(stream.fileno()).st_size)
            return content if stream.readinto(content) == len(content) else None
    except OSError:
        return None


def _npy(content: bytearray) -> np.ndarray:
    header = io.BytesIO(content[:4096])
    np.lib.format.read_magic(header)
    shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    return np.frombuffer(content, dtype=dtype, offset=header.tell()).reshape(shape)
