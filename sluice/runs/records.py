"""Records of a run's state: plain data and tensors in one file, with a checksum, read back without running any code."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.poly1305 import Poly1305
from torch import Tensor

from sluice._base.errors import DataError, InputError
from sluice._base.files import canonical_json, explained, parse_json, sha256_hex

Buffer = bytes | memoryview

BLOCK = 4096
"""A record has a multiple of this many bytes: disks are written to in whole blocks."""

# The checksum is a polynomial hash under a public key: it finds damage (missed with odds below 2^-80), not forgery, and
# takes a seventh of the time of sha256.
_CHECKSUM_KEY = bytes(range(1, 33))
_CHECKSUM_SIZE = 16
_HEAD = {"configuration", "release", "structure", "bytes", "checksum"}
_EARLIER_HEAD = {"configuration", "release", "bytes", "sha256"}  # tensors were part of the structure
_COUNTS = ("release", "structure", "bytes")
_MOST_HEAD = 4096


@dataclass(frozen=True, kw_only=True)
class Record:
    """A record that is yet to be written: its first line, once the checksum is known, and then its parts.

    Attributes:
        head: what the first line says, but for the checksum.
        parts: where the content is now. Tensors are not copied: it changes when they do.
    """

    magic: bytes
    head: Mapping[str, Any]
    parts: Sequence[Buffer]

    def begin_checksum(self) -> Poly1305:
        """The checksum of the head. Update it with the parts, in any pieces."""
        checksum = Poly1305(_CHECKSUM_KEY)
        checksum.update(canonical_json(self.head))
        return checksum

    def first_line(self, checksum: bytes) -> bytes:
        return self.magic + canonical_json({**self.head, "checksum": checksum.hex()}) + b"\n"

    @property
    def begin(self) -> int:
        """Where the content begins: how long the first line is."""
        return len(self.first_line(bytes(_CHECKSUM_SIZE)))

    @property
    def size(self) -> int:
        return self.begin + int(self.head["bytes"])


def encode_record(magic: bytes, payload: Mapping[str, Any], *, config_hash: str, release: int) -> Record:
    """A record of a state.

    Args:
        payload: tensors, numbers, strings, bytes, None, and lists, tuples or dictionaries of them.
        config_hash: sha256 of the run's configuration; a record is only read back under the same one.
        release: how many releases the state contains with it.
    """
    if not isinstance(release, int) or isinstance(release, bool) or not 0 <= release < 10**10:
        raise InputError(f"release={release!r} is not allowed: it must be an integer >= 0.")
    tensors: list[Tensor] = []
    structure = io.BytesIO()
    torch.save(_without_values(payload, "payload", tensors), structure)
    parts: list[Buffer] = [structure.getvalue(), *(_bytes_of(tensor) for tensor in tensors)]
    head: dict[str, Any] = {
        "configuration": config_hash,
        "release": release,
        "structure": len(parts[0]),
        "bytes": sum(len(part) for part in parts),
    }
    # Zeros behind the last tensor, which reading leaves alone. Counting them may make the first line longer.
    while excess := (record := Record(magic=magic, head=head, parts=parts)).size % BLOCK:
        parts.append(bytes(BLOCK - excess))
        head["bytes"] += BLOCK - excess
    return record


def decode_record(
    magic: bytes | tuple[bytes, ...], data: bytes, *, what: str, config_hash: str
) -> tuple[int, dict[str, Any]]:
    """The release and the payload of a record, tensors on the CPU.

    Args:
        magic: what it may begin with.
        what: names the record in errors.

    Guarantee:
        Nothing but plain data is unpickled (``weights_only``), and only after its checksum was found right. Damage is a
        DataError; a record of another configuration an InputError.
    """
    head, begin = _read_head(magic, data, what=what)
    content = memoryview(data)[begin:]
    if len(content) != head["bytes"] or not _is_whole(head, content):
        raise DataError(f"{what} is damaged (its checksum is wrong).")
    if head["configuration"] != config_hash:
        raise InputError(
            f"{what} belongs to another configuration: resume with the settings that the run began with, or start a "
            "new run."
        )
    structure = head.get("structure", len(content))
    return int(head["release"]), _with_values(_load_plain(content[:structure], what=what), content[structure:])


def release_of_record(magic: bytes, path: Path) -> int | None:
    """Which release the head of a record names; None if it has none. The rest of it is not looked at."""
    with explained("read", path), open(path, "rb") as stream:
        beginning = stream.read(_MOST_HEAD)
    try:
        return int(_read_head(magic, beginning, what=path.name)[0]["release"])
    except DataError:
        return None


def _read_head(magic: bytes | tuple[bytes, ...], data: bytes, *, what: str) -> tuple[dict[str, Any], int]:
    """The first line of a record behind its magic, and where its content begins."""
    if not data.startswith(magic):
        raise DataError(f"{what} is damaged (it does not begin as one).")
    begin = data.index(b"\n") + 1
    end = data.find(b"\n", begin, begin + _MOST_HEAD)
    head = parse_json(data[begin:end], what=f"{what} is damaged: its first line") if end > 0 else None
    if not isinstance(head, dict) or set(head) not in (_HEAD, _EARLIER_HEAD):
        raise DataError(f"{what} is damaged (its first line is not complete).")
    if not all(type(value) is int and value >= 0 for name, value in head.items() if name in _COUNTS):
        raise DataError(f"{what} is damaged (its first line holds no counts).")
    return head, end + 1


def _is_whole(head: Mapping[str, Any], content: Buffer) -> bool:
    checked = {name: value for name, value in head.items() if name not in ("checksum", "sha256")}
    if "sha256" in head:
        return bool(head["sha256"] == sha256_hex(canonical_json(checked) + bytes(content)))
    checksum = Poly1305(_CHECKSUM_KEY)
    checksum.update(canonical_json(checked))
    checksum.update(content)
    return bool(head["checksum"] == checksum.finalize().hex())


def _load_plain(content: Buffer, *, what: str) -> dict[str, Any]:
    try:
        payload = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{what} is damaged (torch cannot read it: {type(error).__name__}).") from error
    if not isinstance(payload, dict):
        raise DataError(f"{what} is damaged (it holds no dictionary).")
    return payload


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _without_values(value: Any, place: str, tensors: list[Tensor]) -> Any:
    """The same value of types that can be read back without running code, tensors as shapes; errors name the place."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            return value.detach()
        tensors.append(value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise InputError(f"{place} has the key {key!r}: keys of a checkpoint must be strings or integers.")
        return {key: _without_values(item, f"{place}[{key!r}]", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_without_values(item, f"{place}[{index}]", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    raise InputError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: allowed are tensors, numbers, strings, "
        "bytes, None, and lists, tuples or dictionaries of them."
    )


def _with_values(structure: dict[str, Any], content: memoryview) -> dict[str, Any]:
    """The inverse: shapes become tensors again, filled in the order in which they were taken out."""
    begin = 0

    def filled(value: Any) -> Any:
        nonlocal begin
        if isinstance(value, Tensor) and value.is_meta:
            tensor = torch.empty(value.shape, dtype=value.dtype)
            size = tensor.numel() * tensor.element_size()
            if size:
                tensor.reshape(-1).view(torch.uint8).numpy().data[:] = content[begin : begin + size]
            begin += size
            return tensor
        if isinstance(value, dict):
            return {key: filled(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items: Iterator[Any] = (filled(item) for item in value)
            return list(items) if isinstance(value, list) else tuple(items)
        return value

    result: dict[str, Any] = filled(structure)
    return result


__all__ = ["BLOCK", "Buffer", "Record", "decode_record", "encode_record", "release_of_record"]
