"""Settings that nobody chose, made to fit the number of records, which is public."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from sluice.experiments.settings import TrainSettings

_BATCHES_PER_PASS = 4


def fitted(settings: TrainSettings, *, records: int, defaults: Collection[str]) -> TrainSettings:
    """The settings with a batch that the records can fill, if its size was left at a default that is too large.

    Args:
        records: how many there are to train on: public.
        defaults: the settings, and options of the method, that were not chosen and may be changed.
    """
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


__all__ = ["fitted"]
