"""Uniform bits: the ChaCha20 keystream."""

from __future__ import annotations

from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms

_ZEROS = bytes(1 << 19)
_BLOCK = 64

#: Bytes after which the number of a block begins again at zero.
LONGEST = _BLOCK << 32


class Keystream:
    """The ChaCha20 keystream of one key and one 96-bit number, read from its beginning."""

    def __init__(self, *, key: bytes, number: int) -> None:
        self._key, self._nonce = key, number.to_bytes(12, "little")
        self._start = 0
        self._cipher: CipherContext | None = None

    def read_into(self, target: np.ndarray) -> None:
        """Overwrite a contiguous array with the next bytes."""
        cipher = self._opened()
        target_bytes = target.view(np.uint8).data
        for start in range(0, len(target_bytes), len(_ZEROS)):
            part = target_bytes[start : start + len(_ZEROS)]
            cipher.update_into(memoryview(_ZEROS)[: len(part)], part)

    def read(self, count: int, dtype: type[np.unsignedinteger[Any]]) -> np.ndarray:
        """The next ``count`` uniform integers of an unsigned type."""
        result = np.empty(count, dtype=dtype)
        self.read_into(result)
        return result

    def hand_over(self, size: int) -> tuple[bytes, bytes]:
        """Key and nonce, for a kernel that makes the first ``size`` bytes by itself; what is read here comes after them.

        Guarantee:
            No byte is used twice: a stream of which anything has been read is not handed over.
        """
        if self._start or self._cipher is not None:
            raise AssertionError("a keystream that has been read from was given to a kernel")
        self._start = size
        return self._key, self._nonce

    def _opened(self) -> CipherContext:
        if self._cipher is None:
            block, rest = divmod(self._start, _BLOCK)
            counter = block.to_bytes(4, "little")
            self._cipher = Cipher(algorithms.ChaCha20(self._key, counter + self._nonce), mode=None).encryptor()
            self._cipher.update(bytes(rest))
        return self._cipher
