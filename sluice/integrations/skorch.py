"""Private training by skorch's nets: `fit` makes releases; predicting, scoring and searching stay skorch's."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from skorch import NeuralNet, NeuralNetBinaryClassifier, NeuralNetClassifier, NeuralNetRegressor
from skorch.callbacks import EpochTimer
from skorch.dataset import ValidSplit
from torch import Tensor
from torch.utils.data import DataLoader

from sluice._base.errors import InputError
from sluice.integrations.privacy import Plan, Privacy
from sluice.integrations.steps import FixedShapes
from sluice.training.engine import PrivacyEngine


class PrivateNet(NeuralNet):  # type: ignore[misc]
    """A net of skorch whose ``fit`` trains with differential privacy.

    Arguments are skorch's own, and:

    Args:
        privacy: the budget. ``batch_size`` is that of batches on average, and ``max_epochs`` says how many releases are made.
        private_folder: keeps ledger and state of the run, to go on with after a restart: sensitive. None keeps nothing.
        train_split: None, unlike skorch's own: all records are for training. A ``predefined_split`` of records of their own is
            allowed. `ValidSplit` is not: one record more or less moves others across its folds, and the budget is for
            one record.

    Attributes:
        privacy_engine_: from ``fit`` on; ask it for epsilon.

    Guarantee:
        What `PrivacyEngine.releases` promises. Neither losses of training records nor how long epochs took, which depends on
        them, are in the history. Losses of a ``predefined_split`` are: they are about its records, without noise.
    """

    def __init__(
        self,
        *args: Any,
        privacy: Privacy | None = None,
        private_folder: str | Path | None = None,
        train_split: Any = None,
        **kwargs: Any,
    ) -> None:
        self.privacy = privacy
        self.private_folder = private_folder
        super().__init__(*args, train_split=train_split, **kwargs)

    @property
    def _default_callbacks(self) -> list[tuple[str, Any]]:
        return [(name, each) for name, each in super()._default_callbacks if not isinstance(each, EpochTimer)]

    def get_split_datasets(self, X: Any, y: Any = None, **fit_params: Any) -> Any:
        if isinstance(self.train_split, ValidSplit):
            raise InputError(
                "train_split=ValidSplit(...) is not allowed in private training: adding one record moves others from one side "
                "to the other. Leave it out, or give predefined_split(dataset) with records that are not trained on."
            )
        return super().get_split_datasets(X, y, **fit_params)

    def initialize(self) -> Any:
        last: PrivacyEngine | None = getattr(self, "privacy_engine_", None)
        if last is not None:
            last.close()  # with the lock of its ledger
        self.privacy_engine_: PrivacyEngine | None = None
        return super().initialize()

    def run_single_epoch(self, iterator: Any, training: bool, prefix: str, step_fn: Any, **fit_params: Any) -> None:
        """The releases of an epoch. An epoch that was made before a restart passes without one."""
        if not training:
            super().run_single_epoch(iterator, training, prefix, step_fn, **fit_params)
            return
        if fit_params:
            raise InputError(f"fit parameters {', '.join(fit_params)} are not allowed: put them into the records.")
        engine = self._engine(iterator)
        end = len(self.history) * math.ceil(len(iterator.dataset) / self.batch_size)
        if len(self.history) > self.max_epochs:
            raise InputError(
                f"all releases of max_epochs={self.max_epochs} are made: more would exceed the budget. Make a new net with "
                "more epochs, calibrated for them."
            )
        self._set_training(True)
        while engine.released < end:
            self.notify("on_batch_begin", batch=(None, None), training=True)
            if next(self._releases, None) is None:  # some were lost in a crash, and stay charged
                break
            self.notify("on_batch_end", batch=(None, None), training=True, loss=None, y_pred=None)

    def _engine(self, iterator: DataLoader[Any]) -> PrivacyEngine:
        if self.privacy_engine_ is None:
            self.privacy_engine_ = self._begun(iterator)
            self._releases = self.privacy_engine_.releases(self._record_loss)
        return self.privacy_engine_

    def _begun(self, iterator: DataLoader[Any]) -> PrivacyEngine:
        if self.privacy is None:
            raise InputError(
                "privacy=None is not allowed: give Privacy(delta=..., max_grad_norm=..., target_epsilon=...)."
            )
        folder = None if self.private_folder is None else Path(self.private_folder)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            module=self.module_,
            optimizer=self.optimizer_,
            batch_size=self.batch_size,
            releases=self.max_epochs * math.ceil(len(iterator.dataset) / self.batch_size),  # type: ignore[arg-type]
            ledger=None if folder is None else folder / "ledger.jsonl",
        )
        records: DataLoader[Any] = DataLoader(iterator.dataset, collate_fn=FixedShapes(iterator.collate_fn))
        engine = self.privacy.engine(records, plan)
        if folder is not None:
            if (folder / "state").exists():
                engine.load(folder / "state")
            engine.keep_in(
                folder / "state", every=None if engine.noise.secure else 1
            )  # a seed has to be kept with its place
        return engine

    def _record_loss(self, output: Any, y: Any) -> Tensor:
        loss: Tensor = self.get_loss(output, y, training=True)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """A copy can predict. It cannot go on training, which would spend the same budget twice."""
        state = {name: value for name, value in super().__getstate__().items() if name != "_releases"}
        return {**state, "privacy_engine_": None, "privacy": None} if "privacy_engine_" in state else state


class PrivateClassifier(PrivateNet, NeuralNetClassifier):  # type: ignore[misc]
    """`NeuralNetClassifier`, trained with differential privacy: see `PrivateNet`."""


class PrivateBinaryClassifier(PrivateNet, NeuralNetBinaryClassifier):  # type: ignore[misc]
    """`NeuralNetBinaryClassifier`, trained with differential privacy: see `PrivateNet`."""


class PrivateRegressor(PrivateNet, NeuralNetRegressor):  # type: ignore[misc]
    """`NeuralNetRegressor`, trained with differential privacy: see `PrivateNet`."""


__all__ = ["PrivateBinaryClassifier", "PrivateClassifier", "PrivateNet", "PrivateRegressor"]
