"""Tensors as one vector that is cut into equal parts, one for each worker."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Flat:
    """The entries of some tensors, by name, and how to make tensors of entries again.

    Attributes:
        entries: how many there are.
        part_size: how many each worker gets; the last parts may be shorter, or empty, and are filled up.
        is_double: whether some tensor has more digits than float32.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, parts: int) -> None:
        self._tensors = dict(tensors)
        self.entries = sum(tensor.numel() for tensor in self._tensors.values())
        self.part_size = -(-self.entries // parts)
        self._length = parts * self.part_size
        self.is_double = any(tensor.dtype is torch.float64 for tensor in self._tensors.values())

    def vector(self, dtype: torch.dtype) -> Tensor:
        """All entries, and zeros that fill up the last part."""
        result = torch.zeros(self._length, dtype=dtype)
        start = 0
        for tensor in self._tensors.values():
            result[start : start + tensor.numel()] = tensor.detach().reshape(-1)
            start += tensor.numel()
        return result

    def tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """Tensors of the shapes that were given, with the entries of a vector, in its type."""
        found, start = {}, 0
        for name, tensor in self._tensors.items():
            found[name] = vector[start : start + tensor.numel()].reshape(tensor.shape).to(tensor.device)
            start += tensor.numel()
        return found


__all__ = ["Flat"]
