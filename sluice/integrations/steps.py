"""One step of a trainer is one release, so that its counters, schedulers and checkpoints go by what is public."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sluice._base.errors import InputError
from sluice.gradients.synthetic import signature
from sluice.training.engine import PrivacyEngine
from sluice.training.weights import PrivateOptimizer


class ReleaseOptimizer(PrivateOptimizer):
    """Stands in for the user's optimizer in a trainer of another library: ``step()`` makes one whole release.

    A release may take several attempts and many pieces of a batch. A trainer that counted those would show, in step
    numbers and learning rates, what must stay hidden. Once all releases are made a step does nothing; see ``done``.
    """

    def __init__(self, engine: PrivacyEngine, release: Callable[[], bool]) -> None:
        super().__init__(engine._updater, consume=self._make_release)
        self._release = release
        self.done = False

    def _make_release(self) -> None:
        self.done = self.done or not self._release()

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Make a release. A closure is called once before it, as trainers expect that pass one."""
        self._opt_called = True  # for schedulers, which ask for it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers of the user's own optimizer may be moved here


def by_loss(engine: PrivacyEngine, loss: Callable[[Any, Any], Tensor]) -> Callable[[], bool]:
    """Makes the next release by `PrivacyEngine.releases`, as soon as it is called; false once there is none left."""
    releases: Iterator[int] = engine.releases(loss)
    return lambda: next(releases, None) is not None


class ReleaseNumbers(Dataset[dict[str, Tensor]]):
    """What a trainer goes through in place of the records, one number for each release of an epoch.

    Records are read where a release samples them: a loader of the trainer's own would read them a second time.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {"release": torch.tensor(index)}

    def loader(self) -> DataLoader[Any]:
        return _Resumable(self, batch_size=1)


class _Resumable(DataLoader[Any]):
    """Trainers warn about loaders that cannot be resumed within an epoch. Of numbers nothing has to be kept."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        return


class FixedShapes:
    """A collate function that must give every batch the same shape but for the number of records.

    Padding to the longest record of a batch makes the last bits of a record's gradient depend on the others.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._shape: Any = None

    def __call__(self, records: list[Any]) -> Any:
        batch = self._collate(records)
        shape = signature(batch)
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            raise InputError(
                "the collate function gave batches of different shapes, so what a record contributes depends on the others "
                "in its batch. Pad all records to one length: padding='max_length' with max_length=... in the tokenizer or "
                "the collator."
            )
        return batch


__all__ = ["FixedShapes", "ReleaseNumbers", "ReleaseOptimizer", "by_loss"]
