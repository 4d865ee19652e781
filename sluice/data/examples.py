"""Records with labels, read one by one or in batches by index."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from sluice._base.errors import InputError
from sluice.data.files import Kind
from sluice.data.transforms import ToFloat, Transform
from sluice.gradients.native.gather import gather_rows
from sluice.gradients.workspace import Pool

Indices = Tensor | np.ndarray | Sequence[int]

_HASHED_AT_ONCE = 1024
_GATHERED_BYTES = 1 << 18

# Batches of the same size follow each other: most of them can use the memory of an earlier one.
_memory = Pool()


class Examples(Dataset[tuple[Tensor, Tensor]], ABC):
    """A map-style data set of (x, y) whose batches are read by index, an empty one included.

    **Guarantee.** Record i of a batch is a function of record i of the data alone: whatever a transform does, it
    uses no statistics of the other records.
    """

    labels: Tensor

    @abstractmethod
    def inputs_at(self, indices: Tensor) -> Tensor:
        """The inputs at these positions, ready for a model."""

    @abstractmethod
    def subset(self, indices: Indices) -> Self:
        """The records at these positions, in this order."""

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """The inputs and labels at these positions, in this order; repeated positions are allowed.

        **Guarantee.** Nothing but the named records is read.
        """
        positions = self.positions(indices)
        return self.inputs_at(positions), self.labels.index_select(0, positions)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index={index} is outside a data set of {len(self)} records")
        inputs, labels = self.batch([index % len(self)])
        return inputs[0], labels[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        """What a ``DataLoader`` calls to read a batch at once."""
        inputs, labels = self.batch(indices)
        return list(zip(inputs, labels, strict=True))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one record as a model sees it."""
        return tuple(self.batch([])[0].shape[1:])

    def digested_inputs_at(self, indices: Tensor) -> Tensor:
        """What stands for the inputs at these positions in `digests`."""
        return self.inputs_at(indices)

    def digests(self) -> list[bytes]:
        """The sha256 of each record: of its inputs as a model sees them, and of its label.

        **Guarantee.** Entry i is a function of record i alone. Like any hash of records it is itself private.
        """
        found = []
        for positions in torch.arange(len(self)).split(_HASHED_AT_ONCE):
            inputs, labels = self.digested_inputs_at(positions).cpu(), self.labels[positions].cpu()
            kind = f"sluice record, version 1: {inputs.dtype} {tuple(inputs.shape[1:])}\n".encode()
            rows = inputs.reshape(len(inputs), -1).contiguous().view(torch.uint8).numpy()
            pairs = zip(rows, labels.tolist(), strict=True)
            found += [hashlib.sha256(kind + f"{label}\n".encode() + row.tobytes()).digest() for row, label in pairs]
        return found

    def positions(self, indices: Indices) -> Tensor:
        """Positions as an int64 tensor beside the labels; refuses masks, fractions and what lies outside."""
        positions = torch.as_tensor(indices, device=self.labels.device)
        if positions.numel() == 0:
            return torch.empty(0, dtype=torch.int64, device=self.labels.device)
        if positions.ndim != 1 or positions.dtype.is_floating_point or positions.dtype == torch.bool:
            found = f"shape {tuple(positions.shape)}, {positions.dtype}"
            raise InputError(f"indices ({found}) are not allowed: they must be a row of integers.")
        low, high = map(int, torch.aminmax(positions))
        if low < 0 or high >= len(self):
            raise InputError(f"indices from {low} to {high} are not allowed: they must lie in 0 .. {len(self) - 1}.")
        return positions.to(torch.int64)


class TensorExamples(Examples):
    """Inputs held in one tensor in their compact type; ``transform`` makes model inputs of a batch of them.

    ``labels`` are integers for classes, floats for numbers to predict.

    ``digests`` are those of the records that the inputs were computed from, where they are features: a record then
    stays the same record whatever features are made of it.
    """

    def __init__(
        self, inputs: Tensor, labels: Tensor, transform: Transform, *, digests: list[bytes] | None = None
    ) -> None:
        if len(inputs) != len(labels):
            raise InputError(f"inputs ({len(inputs)} records) and labels ({len(labels)}) must be equal in number.")
        self.inputs = inputs
        self.labels = labels.to(torch.float32 if labels.is_floating_point() else torch.int64)
        self.transform = transform
        self._digests = digests

    def digests(self) -> list[bytes]:
        return super().digests() if self._digests is None else self._digests

    def inputs_at(self, indices: Tensor) -> Tensor:
        if not isinstance(self.transform, ToFloat):
            return self.transform(self.inputs.index_select(0, indices))
        shape = (len(indices), *self.inputs.shape[1:])
        if self.transform.only_converts and self.inputs.device.type == "cpu":
            values = _memory.empty(shape)
            if gather_rows(self.inputs, indices, into=values):
                return values
        # A few records at a time, so that they are still in the processor's cache when they are converted.
        values = torch.empty(shape, dtype=torch.float32, device=self.inputs.device)
        rows = max(1, _GATHERED_BYTES // max(1, self.inputs[:1].nbytes))
        for places, part in zip(indices.split(rows), values.split(rows), strict=True):
            self.transform.write(self.inputs.index_select(0, places), part)
        return values

    def stored(self) -> TensorExamples:
        """The same records in half precision, if that is all that they are stored in, for models that take them so.

        These are models that convert them to their own precision as they read them (`sluice.models.StoredLinear`).
        """
        converted = isinstance(self.transform, ToFloat) and self.transform.only_converts
        if type(self) is not TensorExamples or not converted or self.inputs.dtype is not torch.float16:
            return self
        return StoredExamples(self.inputs, self.labels, self.transform, digests=self._digests)

    def subset(self, indices: Indices) -> Self:
        chosen = self._chosen(indices)
        return type(self)(chosen.inputs, chosen.labels, self.transform, digests=chosen._digests)

    def _chosen(self, indices: Indices) -> TensorExamples:
        positions = self.positions(indices)
        inputs, labels = self.inputs.index_select(0, positions), self.labels.index_select(0, positions)
        digests = None if self._digests is None else [self._digests[position] for position in positions.tolist()]
        return TensorExamples(inputs, labels, self.transform, digests=digests)

    def to(self, device: torch.device | str) -> Self:
        """The same records on another device, still in their compact type."""
        return type(self)(self.inputs.to(device), self.labels.to(device), self.transform, digests=self._digests)


class StoredExamples(TensorExamples):
    """Records whose inputs are read in the type in which they are stored: see `TensorExamples.stored`."""

    def inputs_at(self, indices: Tensor) -> Tensor:
        return self.inputs.index_select(0, indices)

    def digested_inputs_at(self, indices: Tensor) -> Tensor:
        return super().inputs_at(indices)


@dataclass(frozen=True, kw_only=True)
class DataSplits:
    """A data set ready to train on.

    ``fingerprint`` is the sha256 that identifies the source; ``None`` where it cannot be known, as for a data set
    object of the user's own.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    train: Examples
    test: Examples
    fingerprint: str | None = None
