"""Checkpoints: whole or not at all, checked when they are read, and the one before kept as a spare.

A checkpoint holds un-noised state (the sampler's, say) and tells when it was made. It belongs in ``private/``.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice._base.errors import DataError, InputError
from sluice._base.files import canonical_json, explained, parse_json, read_bytes, sha256_hex, write_atomically

_MAGIC = b"sluice checkpoint 1\n"
_NAME = re.compile(r"release-(\d{10})\.checkpoint")
_KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read back.

    Attributes:
        release: how many releases it contains.
        payload: what was saved, tensors on the CPU.
        note: which newer checkpoint was passed over because it is damaged, or None.
    """

    release: int
    payload: dict[str, Any]
    note: str | None = None


def save_checkpoint(folder: Path, payload: Mapping[str, Any], *, config_hash: str, release: int) -> Path:
    """Write a checkpoint and remove all but the last two.

    Args:
        folder: where checkpoints are kept.
        payload: tensors, numbers, strings, bytes, None, and lists, tuples or dictionaries of them.
        config_hash: sha256 of the run's configuration; a checkpoint is only read back under the same one.
        release: how many releases the state contains.

    Guarantee:
        After a crash at any instant the last checkpoint that was returned from here can be read.
    """
    if not isinstance(release, int) or isinstance(release, bool) or not 0 <= release < 10**10:
        raise InputError(f"release={release!r} is not allowed: it must be an integer >= 0.")
    content = _encode(payload, config_hash=config_hash, release=release)
    target = folder / f"release-{release:010d}.checkpoint"
    with explained("create", folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(target, content, public=False)
    with explained("clean up", folder):
        # A damaged spare ahead of the run (another history) must not outlive the state that replaced it.
        for newer in [path for path in _checkpoints(folder) if _number(path) > release]:
            newer.unlink(missing_ok=True)
        for old in _checkpoints(folder)[_KEPT:]:
            old.unlink(missing_ok=True)
    return target


def load_checkpoint(folder: Path, *, config_hash: str) -> Checkpoint | None:
    """Read the newest checkpoint that is whole; None if there is none at all.

    Guarantee:
        Nothing but plain data is unpickled (``weights_only``), and only after its checksum was found right. A
        checkpoint of another configuration is refused, never passed over.
    """
    problems: list[str] = []
    for path in _checkpoints(folder):
        try:
            release, payload = _decode(read_bytes(path), path=path, config_hash=config_hash)
        except DataError as error:
            problems.append(str(error))
            continue
        note = None
        if problems:
            note = f"{' '.join(problems)} Resuming from the one before, which contains {release} releases."
        return Checkpoint(release=release, payload=payload, note=note)
    if problems:
        raise DataError(f"no checkpoint in {folder} can be read: {' '.join(problems)} Restore one from a copy.")
    return None


def _checkpoints(folder: Path) -> list[Path]:
    """Newest first."""
    if not folder.is_dir():
        return []
    with explained("read", folder):
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _encode(payload: Mapping[str, Any], *, config_hash: str, release: int) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(payload, "payload"), buffer)
    content = buffer.getvalue()
    head = {"configuration": config_hash, "release": release, "bytes": len(content)}
    checksum = sha256_hex(canonical_json(head) + content)
    return _MAGIC + canonical_json({**head, "sha256": checksum}) + b"\n" + content


def _decode(data: bytes, *, path: Path, config_hash: str) -> tuple[int, dict[str, Any]]:
    damaged = f"The checkpoint {path.name} is damaged"
    if not data.startswith(_MAGIC):
        raise DataError(f"{damaged} (it does not begin as one).")
    line, separator, content = data[len(_MAGIC) :].partition(b"\n")
    head = parse_json(line, what=f"{damaged}: its first line") if separator else None
    if not isinstance(head, dict) or set(head) != {"configuration", "release", "bytes", "sha256"}:
        raise DataError(f"{damaged} (its first line is not complete).")
    checksum = head.pop("sha256")
    try:
        expected = sha256_hex(canonical_json(head) + content)
    except ValueError as error:
        raise DataError(f"{damaged} (its first line holds {error}).") from error
    if checksum != expected or head["release"] != _number(path):
        raise DataError(f"{damaged} (its checksum is wrong).")
    if head["configuration"] != config_hash:
        raise InputError(
            f"the checkpoint {path} belongs to another configuration: resume with the settings that the run began "
            "with, or start a new run."
        )
    try:
        payload = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{damaged} (torch cannot read it: {type(error).__name__}).") from error
    if not isinstance(payload, dict):
        raise DataError(f"{damaged} (it holds no dictionary).")
    return int(head["release"]), payload


def _plain(value: Any, place: str) -> Any:
    """The same value made of types that can be read back without running code; the error names the place."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise InputError(f"{place} has the key {key!r}: keys of a checkpoint must be strings or integers.")
        return {key: _plain(item, f"{place}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise InputError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: allowed are tensors, numbers, strings, "
        "bytes, None, and lists, tuples or dictionaries of them."
    )
