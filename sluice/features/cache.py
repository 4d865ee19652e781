"""Scattering features of a whole data set, computed once and kept on disk.

A cache file is named by the sha256 of everything its content depends on: the images, the transform's settings and its
version. It holds the features as float16, then the sha256 of the name and of these bytes. The digest is checked at
every use, so a file that was cut off, changed or renamed is computed again and never used.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sluice._base.errors import InputError
from sluice._base.files import cache_dir, canonical_json, explained, replaced_atomically
from sluice._base.progress import progress
from sluice.data.transforms import ToFloat, to_float
from sluice.features.scattering import COEFFICIENTS, Scattering

TRANSFORM_VERSION = 3
"""To be raised with every change that moves a coefficient by more than float16 can tell, if only on some machine.

2 knew matrix products only: now and then a coefficient between two float16 numbers was rounded to the other one. It can
still be computed, because a run resumes with the very features that it began with.
1 filled up the last chunk of a data set less than the others, so that its images could be rounded differently.
"""

PRODUCTS_ONLY = 2

_DIGEST_BYTES = 32
_VALUE_BYTES = 2
_BLOCK_BYTES = 1 << 24
_IMAGES_AT_ONCE = 1024


def scattering_features(
    images: Tensor,
    *,
    scaling: ToFloat = to_float,
    cache: bool = True,
    show_progress: bool = True,
    version: int | None = None,
) -> Tensor:
    """The scattering coefficients of 8-bit images as float16, ``(samples, 81 * channels, height // 4, width // 4)``.

    Args:
        images: uint8, ``(samples, height, width)`` or ``(samples, channels, height, width)``.
        scaling: how bytes become numbers before the transform; by default x / 255.
        cache: keep the result under the user's cache, and map it into memory from there the next time. The
            file is readable by its owner only, and as sensitive as the images.
        show_progress: a bar on a terminal, plain lines elsewhere.
        version: ``PRODUCTS_ONLY`` for the features that runs began with before there was a kernel; by default
            ``TRANSFORM_VERSION``.

    Convert a batch with ``.float()`` when it is used. Rounding to float16 moves a coefficient by at most 1 part in 2048,
    or by 3e-8 where it is smaller than 6e-5. The result is the same with and without the cache.

    Guarantee:
        Row i is a function of image i and of public settings alone, so the transform costs no privacy.
    """
    if images.dtype != torch.uint8 or images.dim() not in (3, 4):
        raise InputError(
            f"images ({images.dtype}, shape {tuple(images.shape)}) are not allowed: they must be uint8 of shape "
            "(samples, height, width) or (samples, channels, height, width). "
            "For other images call sluice.features.Scattering."
        )
    images = images.unsqueeze(1) if images.dim() == 3 else images
    version = TRANSFORM_VERSION if version is None else version
    if version not in (PRODUCTS_ONLY, TRANSFORM_VERSION):
        raise InputError(f"version={version} is not allowed: it must be {PRODUCTS_ONLY} or {TRANSFORM_VERSION}.")
    transform = Scattering(height=images.shape[2], width=images.shape[3], in_c=version > PRODUCTS_ONLY)
    shape = (images.shape[0], images.shape[1] * COEFFICIENTS, *transform.output_size)
    if not cache or images.numel() == 0:
        features = torch.empty(shape, dtype=torch.float16)
        start = 0
        for part in _computed(images, transform, scaling, show_progress):
            features[start : start + len(part)] = part
            start += len(part)
        return features
    settings = {"version": version, "scaling": asdict(scaling), "shape": list(images.shape)}
    return kept(name_of(settings, images), shape, parts=lambda: _computed(images, transform, scaling, show_progress))


def kept(name: str, shape: tuple[int, ...], *, parts: Callable[[], Iterator[Tensor]]) -> Tensor:
    """Features of this name from the cache, where ``parts`` puts them if they are not there: float16, mapped, not read.

    Args:
        name: by `name_of`.
        parts: computes the features, some records after the other.
    """
    path = cache_dir() / "features" / f"{name}.f16"
    if not _is_whole(path, name, shape):
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.parent.chmod(0o700)  # a file's name is a hash of images, by which a guess at them could be confirmed
            with replaced_atomically(path, owner_only=True) as temporary, temporary.open("wb") as file:
                _write(file, name, parts())
    with explained("read", path):
        # The mapping is private: a caller who changes the tensor does not change the file.
        return torch.from_file(str(path), shared=False, size=math.prod(shape), dtype=torch.float16).view(shape)


def name_of(settings: Mapping[str, Any], images: Tensor) -> str:
    """The sha256 of all that features depend on: what they are, and the images."""
    digest = hashlib.sha256(canonical_json(settings))
    for part in images.split(_IMAGES_AT_ONCE):
        digest.update(part.contiguous().cpu().numpy().data)
    return digest.hexdigest()


def _computed(images: Tensor, transform: Scattering, scaling: ToFloat, show_progress: bool) -> Iterator[Tensor]:
    with progress("scattering", total=len(images), shown=show_progress) as advance:
        for part in images.split(_IMAGES_AT_ONCE):
            yield transform(scaling(part)).to(torch.float16)
            advance(len(part))


def _write(file: BinaryIO, name: str, parts: Iterator[Tensor]) -> None:
    digest = hashlib.sha256(bytes.fromhex(name))
    for part in parts:
        content = part.cpu().numpy().data
        digest.update(content)
        file.write(content)
    file.write(digest.digest())


def _is_whole(path: Path, name: str, shape: tuple[int, ...]) -> bool:
    expected = _VALUE_BYTES * math.prod(shape)
    digest = hashlib.sha256(bytes.fromhex(name))
    with explained("read", path):
        if not path.is_file() or path.stat().st_size != expected + _DIGEST_BYTES:
            return False
        with path.open("rb") as file:
            while expected > 0:
                block = file.read(min(expected, _BLOCK_BYTES))
                if not block:
                    return False
                digest.update(block)
                expected -= len(block)
            return file.read() == digest.digest()
