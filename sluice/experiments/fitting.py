"""Which records are trained on, and settings that nobody chose, made to fit their number, which is public."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sluice.data import Examples, hold_out
from sluice.experiments.settings import TrainSettings

_HOLD_OUT_SEED = 0
_BATCHES_PER_PASS = 4


def parts(train: Examples, settings: TrainSettings) -> tuple[Examples, Examples]:
    """The records to train on and those that are held out, where settings hold out some."""
    return hold_out(train, settings.hold_out, seed=_HOLD_OUT_SEED)


def fitted(settings: TrainSettings, *, train: Examples, defaults: Collection[str]) -> TrainSettings:
    """The settings with a batch that the records can fill, if its size was left at a default that is too large.

    Args:
        train: the records, some of which may be held out; their number is public.
        defaults: the settings, and options of the method, that were not chosen and may be changed.
    """
    if not defaults:
        return settings
    records = len(parts(train, settings)[0] if settings.hold_out else train)
    smaller = max(1, records // _BATCHES_PER_PASS)
    changed = settings
    if "batch_size" in defaults and settings.batch_size > records:
        changed = replace(changed, batch_size=smaller)
    options = {
        name: smaller
        for name in ("validation_batch_size",)
        if name in defaults and name in settings.options and settings.options[name] > records
    }
    return replace(changed, options={**changed.options, **options}) if options else changed


__all__ = ["fitted", "parts"]
