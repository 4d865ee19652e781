"""The constants of features, made once from synthetic images and kept in the user's cache.

A file is named by the sha256 of everything that its content depends on: the feature, its options, its version and the
shape of the images. It is a safetensors file, readable by everybody: nothing private enters it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from sluice._base.files import cache_dir, canonical_json, explained, read_bytes, sha256_hex, write_atomically
from sluice._base.progress import progress
from sluice.features.base import ImageFeature, ImageShape


def constants_path(feature: ImageFeature, shape: ImageShape) -> Path:
    """Where the constants of a feature are kept."""
    name = sha256_hex(canonical_json({**feature.identity(), "shape": list(shape)}))
    return cache_dir() / "constants" / f"{feature.kind}-{name[:32]}.safetensors"


def constants(feature: ImageFeature, shape: ImageShape, *, show_progress: bool = True) -> dict[str, Tensor]:
    """The constants of a feature for images of a shape, made on first use.

    Guarantee:
        A function of the feature and the shape alone. No record of any data set is read.
    """
    feature.require_shape(shape)
    steps = feature.steps(shape)
    if steps == 0:
        return {}
    path = constants_path(feature, shape)
    kept = _kept(path)
    if kept is not None:
        return kept
    with _one_thread(), progress(f"building {feature.written()}", total=steps, shown=show_progress) as advance:
        made = {name: value.contiguous() for name, value in feature.fit(shape, advance=advance).items()}
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(made), public=True)
    return made


def constants_digest(feature: ImageFeature, shape: ImageShape) -> str | None:
    """The sha256 of the constants' file, by which a run says what it was made with; None where there are none."""
    if feature.steps(shape) == 0:
        return None
    constants(feature, shape)
    return sha256_hex(read_bytes(constants_path(feature, shape)))


def _kept(path: Path) -> dict[str, Tensor] | None:
    if not path.is_file():
        return None
    try:
        return load(read_bytes(path))
    except SafetensorError:
        return None  # cut off by a full disk or a crash: it is made again


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of PyTorch inside the block: sums come out the same however many the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


__all__ = ["constants", "constants_digest", "constants_path"]
