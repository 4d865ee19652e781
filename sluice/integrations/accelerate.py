"""Private training in a loop written for Accelerate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from sluice._base.errors import InputError
from sluice.integrations.privacy import refuse_settings
from sluice.training.engine import PrivacyEngine
from sluice.training.loop import PrivateLoader

_REFUSED: dict[str, tuple[Any, str]] = {
    "gradient_accumulation_steps": (
        1,
        "the loader's batches are cut into pieces already, whose gradients are added up before a release. Memory is "
        "bounded by max_physical_batch_size.",
    ),
    "mixed_precision": ("no", "norms are measured in the precision of the parameters."),
    "num_processes": (1, "releases are made by one process."),
}


class DeviceLoader:
    """The private loader, its batches on the accelerator's device.

    Accelerate's own loader reads one batch ahead, which a release does not allow: which batch comes next, and whether any
    does, depends on it.
    """

    def __init__(self, loader: PrivateLoader, accelerator: Accelerator) -> None:
        self._loader = loader
        self._accelerator = accelerator

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def finished(self) -> bool:
        """Whether the last release has been made: public."""
        return self._loader.finished

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield send_to_device(batch, self._accelerator.device)


class _State:
    """The state of a run as Accelerate saves and loads it."""

    def __init__(self, engine: PrivacyEngine) -> None:
        self._engine = engine

    def state_dict(self) -> dict[str, Any]:
        return self._engine.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._engine.noise.secure and not self._engine.has_ledger:
            raise InputError(
                "load_state is not allowed for an engine without a ledger: releases that were made after the state was saved would "
                "not be charged. Make the engine with make_private(ledger=...), from the beginning of the run on."
            )
        self._engine.load_state_dict(state)


def prepare(accelerator: Accelerator, engine: PrivacyEngine) -> tuple[nn.Module, Any, DeviceLoader]:
    """``accelerator.prepare`` for the model, optimizer and loader of an engine that is set up.

    Use them as Accelerate's: ``accelerator.backward(loss)``, ``optimizer.step()``; do not call ``accelerator.prepare`` on them
    again. A scheduler is given to the engine, ``make_private(lr_scheduler=...)``, which advances it by release.

    The state of the run is part of ``accelerator.save_state`` and ``load_state`` from here on. Such a folder is sensitive.
    After a restart, make the engine with the same arguments and the same ledger, prepare, then ``load_state``: releases that
    the ledger has and the state has not stay charged. Without a ledger, or a seed, ``load_state`` is refused.
    """
    refuse_settings(accelerator, _REFUSED)
    module, optimizer, loader = engine.ordinary_loop()
    module, prepared = accelerator.prepare(module, optimizer)
    accelerator.register_for_checkpointing(_State(engine))
    return module, prepared, DeviceLoader(loader, accelerator)


__all__ = ["DeviceLoader", "prepare"]
