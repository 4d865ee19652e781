"""The systems that ``sluice train --method NAME`` runs, one short file for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sluice._base import validate
from sluice.mechanism.base import Promise
from sluice.mechanism.selective_release import Mechanism
from sluice.methods import (
    dpagd,
    dpis,
    dpsgd,
    dpsgd_hf,
    dpsgd_ts,
    dpsr_cg,
    dpsr_cg_paper,
    dpsur,
    matrix,
    non_private,
)
from sluice.methods.base import Method, NoOptions

if TYPE_CHECKING:
    from sluice.experiments.settings import TrainSettings

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (dpsr_cg, dpsr_cg_paper, dpsgd, dpsgd_ts, dpsgd_hf, dpsur, dpis, dpagd, matrix, non_private)
}


def method_of(name: str) -> Method:
    """The method of this name."""
    validate.one_of(METHODS, method=name)
    return METHODS[name]


def planned_mechanism(settings: TrainSettings, *, dataset_size: int) -> Promise:
    """What a run with these settings promises, before any record is read."""
    method = method_of(settings.method)
    method.require_accountant(settings)
    return method.plan(settings, dataset_size)


def promise_from_dict(data: Mapping[str, Any]) -> Promise:
    """The inverse of every promise's ``to_dict``; unknown kinds and keys are refused."""
    if not isinstance(data, Mapping) or "kind" not in data:
        return Mechanism.from_dict(data)
    kinds: dict[str, Any] = {method.promise.kind: method.promise for method in METHODS.values()}
    validate.one_of(kinds, kind=data["kind"])
    promise: Promise = kinds[data["kind"]].from_dict(data)
    return promise


__all__ = ["METHODS", "Method", "NoOptions", "method_of", "planned_mechanism", "promise_from_dict"]
