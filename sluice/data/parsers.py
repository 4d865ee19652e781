"""From the bytes of published files to arrays. Every caller has verified the bytes first."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sluice._base.errors import DataError

CIFAR_10_FOLDER = "cifar-10-batches-py"
CIFAR_10_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
CIFAR_10_TEST = "test_batch"
# The sha256 of the files whose md5 sums their author and torchvision publish.
CIFAR_10_MEMBERS = {
    "data_batch_1": "54636561a3ce25bd3e19253c6b0d8538147b0ae398331ac4a2d86c6d987368cd",
    "data_batch_2": "766b2cef9fbc745cf056b3152224f7cf77163b330ea9a15f9392beb8b89bc5a8",
    "data_batch_3": "0f00d98ebfb30b3ec0ad19f9756dc2630b89003e10525f5e148445e82aa6a1f9",
    "data_batch_4": "3f7bb240661948b8f4d53e36ec720d8306f5668bd0071dcb4e6c947f78e9682b",
    "data_batch_5": "d91802434d8376bbaeeadf58a737e3a1b12ac839077e931237e0dcd43adcb154",
    "test_batch": "f53d8d457504f7cff4ea9e021afcf0e0ad8e24a91f3fc42091b8adef61157831",
}
KERAS_SHUFFLE_SEED = 113


def idx(content: bytes) -> np.ndarray:
    """Read the idx format of MNIST: unsigned bytes, dimensions in the header. Refuses any other content."""
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"Not an idx file of unsigned bytes: it begins with {content[:4].hex() or 'nothing'}.")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    shape = tuple(int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions))
    values = np.frombuffer(content, np.uint8, offset=min(start, len(content)))
    if len(content) < start or values.size != np.prod(shape, dtype=object):
        raise DataError(f"Not a whole idx file: the header promises shape {shape}, {values.size} bytes follow it.")
    return values.reshape(shape)


def unpack_mnist(contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Images as (N, 1, 28, 28) and labels, both unsigned bytes."""
    arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_inputs"] = idx(gzip.decompress(contents[f"{prefix}-images-idx3-ubyte.gz"]))[:, None]
        arrays[f"{part}_labels"] = idx(gzip.decompress(contents[f"{prefix}-labels-idx1-ubyte.gz"]))
    return arrays


def unpack_cifar_10(contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Images as (N, 3, 32, 32) and labels, both unsigned bytes, from the archive or from its unpacked files.

    The batch files are pickles: each is compared with its own sha256 before it is opened, in an archive too.
    """
    batches = contents if CIFAR_10_TEST in contents else _members(next(iter(contents.values())))
    parsed = {name: _cifar_10_batch(name, batches[name]) for name in CIFAR_10_MEMBERS}
    train = [parsed[name] for name in CIFAR_10_TRAIN]
    return {
        "train_inputs": np.concatenate([images for images, _ in train]),
        "train_labels": np.concatenate([labels for _, labels in train]),
        "test_inputs": parsed[CIFAR_10_TEST][0],
        "test_labels": parsed[CIFAR_10_TEST][1],
    }


def _members(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:*") as unpacked:
        members = {}
        for member in unpacked:
            folder, _, name = member.name.rpartition("/")
            stream = unpacked.extractfile(member) if folder == CIFAR_10_FOLDER and name in CIFAR_10_MEMBERS else None
            if stream is not None:
                members[name] = stream.read()
    return members


def _cifar_10_batch(name: str, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    found = hashlib.sha256(content).hexdigest()
    if found != CIFAR_10_MEMBERS[name]:
        raise DataError(
            f"{CIFAR_10_FOLDER}/{name} is damaged: expected sha256 {CIFAR_10_MEMBERS[name]}; found {found}."
        )
    batch: dict[bytes, Any] = pickle.loads(content, encoding="bytes")
    return batch[b"data"].reshape(-1, 3, 32, 32), np.array(batch[b"labels"], dtype=np.uint8)


def unpack_imdb(contents: Mapping[str, bytes]) -> dict[str, np.ndarray]:
    """Reviews as one row of word ranks with offsets, in the order that Keras shuffles them into."""
    with np.load(io.BytesIO(contents["imdb.npz"]), allow_pickle=True) as archive:
        raw = {name: archive[name] for name in ("x_train", "y_train", "x_test", "y_test")}
    generator = np.random.RandomState(KERAS_SHUFFLE_SEED)
    arrays = {}
    for part in ("train", "test"):
        order = np.arange(len(raw[f"x_{part}"]))
        generator.shuffle(order)
        ids, offsets = flatten([raw[f"x_{part}"][i] for i in order])
        arrays[f"{part}_ids"] = ids
        arrays[f"{part}_offsets"] = offsets
        arrays[f"{part}_labels"] = raw[f"y_{part}"][order].astype(np.uint8)
    return arrays


def flatten(sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as one int32 row and the offsets where each list begins (and the last ends)."""
    offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
    ids = np.fromiter((rank for sequence in sequences for rank in sequence), dtype=np.int32, count=int(offsets[-1]))
    return ids, offsets
