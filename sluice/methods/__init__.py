"""The systems that ``sluice train --method NAME`` runs, one short file for each."""

from __future__ import annotations

from sluice._base import validate
from sluice.mechanism.base import Mechanism
from sluice.methods import (
    dpagd,
    dpis,
    dpsgd,
    dpsgd_ac,
    dpsgd_hf,
    dpsgd_ts,
    dpsr_cg,
    dpsr_cg_paper,
    dpsur,
    matrix,
    non_private,
)
from sluice.methods.base import Method, NoOptions, RunSettings

METHODS: dict[str, Method] = {
    module.METHOD.name: module.METHOD
    for module in (dpsr_cg, dpsr_cg_paper, dpsgd, dpsgd_ts, dpsgd_hf, dpsgd_ac, dpsur, dpis, dpagd, matrix, non_private)
}


def method_of(name: str) -> Method:
    """The method of this name."""
    validate.one_of(METHODS, method=name)
    return METHODS[name]


def planned_mechanism(settings: RunSettings, *, dataset_size: int) -> Mechanism:
    """What a run with these settings promises, before any record is read."""
    method = method_of(settings.method)
    method.require_accountant(settings)
    return method.plan(settings, dataset_size)


__all__ = ["METHODS", "Method", "NoOptions", "method_of", "planned_mechanism"]
