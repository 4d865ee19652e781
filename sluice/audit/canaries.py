"""Canaries: made-up records that an audit tries to find again in what was released.

A white-box canary has a weight of its own, attached to the model, on which no other record has a gradient. So all that it
adds to a sum stands on one coordinate, and what is released there is what an adversary with full access would look at.
Sampling, scaling, gate, noise and ledger treat it like any other record.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data import default_collate as collated

from sluice._base import validate
from sluice._base.errors import InputError
from sluice._base.records import reads_by_index
from sluice.audit.guesses import require_canaries
from sluice.gradients.trees import apply, mapped

Array = np.ndarray
Kind = Literal["quiet", "loud", "mislabelled", "blank"]
KINDS = ("quiet", "loud", "mislabelled", "blank")
WHITE_BOX = ("quiet", "loud")

# A quiet canary stays this much below the norm from which a gate takes notice: norms are right to 1e-5.
_BELOW = 1 - 1e-4


@dataclass(frozen=True, kw_only=True)
class Canaries:
    """Canaries of one audit, and the coins that decided which of them are in the data.

    Attributes:
        count: how many; about half of them are in.
        kind: what they are like.

            | kind | gradient | what it can show | where |
            |---|---|---|---|
            | "quiet" | a weight of its own; as long as the gate overlooks | noise, sampling | a run to be published |
            | "loud" | a weight of its own; longer than any bound | noise, sampling, scaling, gate | rehearsals only |
            | "mislabelled", "blank" | that of a record with a wrong label, or with next to no input | the final model | rehearsals only |
        loss: that of the training loop, ``loss(output, target)``, from which the length of a quiet canary follows.
        records: the (inputs, targets) of "mislabelled" or "blank" ones: `mislabelled`, `blank`.
        coins: one bit for each canary, packed. Left out, they come from the operating system: never from the run's seed.
    """

    count: int
    kind: Kind = "quiet"
    loss: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    records: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    coins: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.count != 1:  # which is for runs that are repeated
            require_canaries(self.count)
        validate.one_of(KINDS, kind=self.kind)
        if (self.records is None) != self.is_white_box:
            raise InputError(
                f"records is not allowed with kind={self.kind!r}: canaries that are inputs have records, others have none."
            )
        if self.records is not None and any(len(part) != self.count for part in self.records):
            raise InputError(f"records is not allowed: it must hold count={self.count} inputs and as many targets.")
        size = -(-self.count // 8)
        if not self.coins:
            object.__setattr__(self, "coins", os.urandom(size))
        if len(self.coins) != size:
            raise InputError(f"coins holds {len(self.coins)} bytes and count={self.count} canaries need {size}.")

    @property
    def is_white_box(self) -> bool:
        return self.kind in WHITE_BOX

    @property
    def is_rehearsal(self) -> bool:
        """Whether a run with them must not be published: they disturb it."""
        return self.kind != "quiet"

    @property
    def members(self) -> Array:
        """Which canaries are in the data. Sensitive until the audit is made."""
        bits = np.unpackbits(np.frombuffer(self.coins, dtype=np.uint8), count=self.count)
        return bits.astype(bool)

    @property
    def expected(self) -> int:
        """How many records they are on average, which public constants are made from: never how many there are."""
        return self.count // 2


def mislabelled(x: Tensor, y: Tensor, *, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Records, each with a label that is wrong."""
    generator = torch.Generator().manual_seed(seed)
    return x, (y + torch.randint(1, classes, y.shape, generator=generator)) % classes


def blank(shape: tuple[int, ...], *, count: int, classes: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs of zeros but for one feature each, with labels by chance."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(count, *shape)
    features = x.view(count, -1)
    features[torch.arange(count), torch.arange(count) % features.shape[1]] = 1.0
    return x, torch.randint(0, classes, (count,), generator=generator)


def canary_norm(mechanism: Any, kind: str) -> float:
    """How long a canary's gradient is before it is scaled.

    A loud one is twice as long as any bound that scaling or gate know; a quiet one is as long as a gradient may be without
    being shortened or noticed.
    """
    scaling, gate = getattr(mechanism, "scaling", None), getattr(mechanism, "gate", None)
    clip = _first_of(scaling if scaling is not None else mechanism, ("max_grad_norm", "first_clip_norm"), 1.0)
    bound = _first_of(scaling, ("unclipped_norm",), clip)
    large, small = _first_of(gate, ("large_norm",), 0.0), _first_of(gate, ("small_norm",), bound)
    if kind == "loud":
        return 2 * max(clip, bound, large)
    return _BELOW * min(bound, small)


def _first_of(source: Any, names: tuple[str, ...], otherwise: float) -> float:
    found = (getattr(source, name, None) for name in names)
    return next((float(value) for value in found if value is not None), otherwise)


class Attached(nn.Module):
    """A model with one more weight for each canary.

    For ordinary records it computes what the model computes. For a canary the output is a constant whose derivative is
    that of the canary's own weight alone: the model's weights get no gradient, whatever the loss.
    """

    def __init__(self, base: nn.Module, *, canaries: int) -> None:
        super().__init__()
        self.base = base
        like = next(base.parameters())
        self.canary = nn.Embedding(canaries + 1, 1, dtype=like.dtype, device=like.device)  # the last row is nobody's
        nn.init.zeros_(self.canary.weight)
        self.scale = 1.0

    def forward(self, *inputs: Any) -> Tensor:
        *rest, last = inputs
        if isinstance(last, tuple | list):  # as an ordinary loop gives it: the number stays with the last input
            rest, last = [*rest, last[0]], last[1]
        output = self.base(*rest)
        if not isinstance(output, Tensor) or output.dim() < 1:
            raise InputError(
                f"the model's output is a {type(output).__name__}: canaries need a model that returns one tensor, samples first."
            )
        nobody = self.canary.num_embeddings - 1
        numbers = last.clamp(0, nobody)
        weight = self.canary(numbers)
        moved = (weight - weight.detach()) * self.scale
        first = torch.zeros(output[0].numel(), dtype=output.dtype, device=output.device)
        first[0] = 1.0
        constant = (first * (1 + moved)).reshape(output.shape)
        is_canary = (numbers < nobody).reshape(-1, *[1] * (output.dim() - 1))
        return torch.where(is_canary, constant, output)

    def set_length(self, norm: float, blank_record: tuple[Any, ...], loss: Callable[[Any, Any], Tensor]) -> None:
        """Give canaries a gradient of this norm under a loss.

        Args:
            blank_record: a batch of one blank record: inputs, number, target.
        """
        *inputs, target = blank_record
        with torch.no_grad():
            shape = apply(self, tuple(inputs)).shape
        output = torch.zeros(shape, device=self.canary.weight.device)
        output.view(-1)[0] = 1.0
        output.requires_grad_(True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(loss(output, target).sum(), output)
        steepness = float(slope.reshape(-1)[0])
        if not abs(steepness) > 0:
            raise InputError(
                "loss is not allowed: it has no derivative at the canaries' output, so they cannot be seen."
            )
        self.scale = norm / steepness

    @property
    def displacement(self) -> Array:
        """How far each canary's weight has moved against its gradient, which is where updates take it."""
        weights: Array = self.canary.weight.detach().double().cpu().numpy()[:-1, 0]
        return -weights


class WithCanaries(Dataset[Any]):
    """A data set and, behind its records, the canaries that are in.

    White-box canaries are blank records with their number beside the last input; ordinary records have the number of nobody.

    Guarantee:
        Ordinary records are as they were. A canary is a function of its number, of public constants, and of the shapes and
        types of a record.
    """

    def __init__(self, source: Dataset[Any], canaries: Canaries) -> None:
        self._source = source
        self._canaries = canaries
        self._own = len(source)  # type: ignore[arg-type]
        self._inside = torch.from_numpy(np.flatnonzero(canaries.members))
        self._blank = _blank(source[0])
        if not isinstance(self._blank, tuple | list) or len(self._blank) < 2:
            raise InputError(
                f"a record of the data set is a {type(self._blank).__name__}: with canaries it must be (inputs..., target)."
            )
        if reads_by_index(source) or isinstance(source, TensorDataset):
            self.batch = self._batch

    def __len__(self) -> int:
        return self._own + len(self._inside)

    def __getitem__(self, index: int) -> Any:
        number = int(self._inside[index - self._own]) if index >= self._own else self._canaries.count
        record = self._source[index] if index < self._own else self._canary(number)
        return self._numbered(record, torch.tensor(number))

    def blank_record(self) -> tuple[Any, ...]:
        """A batch of one blank record: inputs, number, target."""
        *inputs, target = collated([self._blank])
        return (*inputs, torch.zeros(1, dtype=torch.int64), target)

    def _batch(self, indices: Tensor) -> Any:
        ordinary = indices < self._own
        # Of a canary only the shape is needed; whatever is read in its place is overwritten.
        read = torch.where(ordinary, indices, 0)
        if isinstance(self._source, TensorDataset):
            parts: Any = tuple(tensor[read] for tensor in self._source.tensors)
        else:
            parts = self._source.batch(read)  # type: ignore[attr-defined]
        numbers = torch.full_like(indices, self._canaries.count)
        numbers[~ordinary] = self._inside[indices[~ordinary] - self._own]
        if not bool(ordinary.all()):
            parts = self._overwritten(tuple(parts), ~ordinary, numbers)
        return self._numbered(parts, numbers)

    def _overwritten(self, parts: tuple[Any, ...], rows: Tensor, numbers: Tensor) -> tuple[Any, ...]:
        records = self._canaries.records

        def blanked(part: Tensor) -> Tensor:
            part = part.clone()
            part[rows] = 0
            return part

        if records is None:
            blanks: tuple[Any, ...] = mapped(parts, blanked)
            return blanks
        x, y = (part.clone() for part in parts)
        x[rows], y[rows] = records[0][numbers[rows]].to(x.dtype), records[1][numbers[rows]].to(y.dtype)
        return x, y

    def _canary(self, number: int) -> Any:
        records = self._canaries.records
        return self._blank if records is None else (records[0][number], records[1][number])

    def _numbered(self, record: Any, number: Tensor) -> Any:
        if not self._canaries.is_white_box:
            return record
        *inputs, last, target = record
        return (*inputs, (last, number), target)


def with_canaries(source: DataLoader[Any] | Dataset[Any], canaries: Canaries) -> DataLoader[Any] | WithCanaries:
    """A loader or data set with the canaries that are in."""
    if not isinstance(source, DataLoader):
        return WithCanaries(source, canaries)
    if source.collate_fn is not collated:
        raise InputError(
            "collate_fn is not allowed with canaries: give a data set whose records torch can put together."
        )
    return DataLoader(
        WithCanaries(source.dataset, canaries), batch_size=source.batch_size, num_workers=source.num_workers
    )


def _blank(record: Any) -> Any:
    """The same structure with zeros."""
    if isinstance(record, tuple | list):
        return tuple(_blank(part) for part in record)
    if isinstance(record, Tensor):
        return torch.zeros_like(record)
    if isinstance(record, np.ndarray):
        return np.zeros_like(record)
    if isinstance(record, bool | int | float | np.generic):
        return type(record)(0)
    raise InputError(f"a record of the data set holds a {type(record).__name__}: with canaries it must hold numbers.")


__all__ = ["Attached", "Canaries", "WithCanaries", "blank", "canary_norm", "mislabelled", "with_canaries"]
