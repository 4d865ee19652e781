"""Every kind of mechanism by the name that ledgers give it, and what carries it out.

A new method of Sluice adds one line here; one of your own calls `register` (docs/new-method.md). Classes are named, not
imported, so that a ledger can be read without torch and without the rooms below this one. What a kind means never changes once a ledger has been written with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.mechanism.base import Mechanism
from sluice.mechanism.selective_release import SelectiveRelease


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A mechanism's class and its executor, or where they are, as ``module:name``."""

    mechanism: type[Mechanism] | str
    executor: type | str


KINDS: dict[str, Kind] = {
    SelectiveRelease.kind: Kind(
        mechanism="sluice.mechanism.selective_release:SelectiveRelease",
        executor="sluice.training.selective_release:SelectiveReleaseExecutor",
    ),
    "clipped release": Kind(
        mechanism="sluice.mechanism.clipped_release:ClippedRelease",
        executor="sluice.training.clipped_release:ClippedReleaseExecutor",
    ),
    "dpsur": Kind(
        mechanism="sluice.methods.dpsur:DpsurMechanism", executor="sluice.methods.dpsur.execution:SelectiveUpdates"
    ),
    "importance sampling": Kind(
        mechanism="sluice.methods.dpis:ImportanceSampling",
        executor="sluice.methods.dpis.execution:ImportanceSamplingExecutor",
    ),
    "adaptive budget": Kind(
        mechanism="sluice.methods.dpagd:AdaptiveBudget", executor="sluice.methods.dpagd.execution:AdaptiveDescent"
    ),
    "matrix": Kind(
        mechanism="sluice.methods.matrix:MatrixMechanism", executor="sluice.methods.matrix.execution:CorrelatedSteps"
    ),
    "non-private": Kind(
        mechanism="sluice.methods.non_private:NonPrivate", executor="sluice.methods.non_private.execution:Epochs"
    ),
}


def register(mechanism: type[Mechanism], *, executor: type | str) -> None:
    """Let ledgers hold a mechanism of your own, and engines train with it (docs/new-method.md).

    Args:
        mechanism: its class, a frozen dataclass with a ``kind`` of its own.
        executor: the class that makes its releases; or where it is, as ``module:name``, so that whoever only reads ledgers
            need not load torch.

    A class that is defined again, as in a notebook, takes the place of the former. Any other class of the same kind is
    refused, because what a kind means never changes.
    """
    known = KINDS.get(mechanism.kind)
    if known is not None and _place(known.mechanism) != _place(mechanism):
        raise InputError(
            f"kind={mechanism.kind!r} is not allowed for {_place(mechanism)}: it is the kind of {_place(known.mechanism)}. "
            "Choose another."
        )
    KINDS[mechanism.kind] = Kind(mechanism=mechanism, executor=executor)


def mechanism_from_dict(data: Mapping[str, Any]) -> Mechanism:
    """The inverse of every mechanism's ``to_dict``; unknown kinds and keys are refused."""
    if not isinstance(data, Mapping) or "kind" not in data:
        return _complete(SelectiveRelease.from_dict(data))
    validate.one_of(KINDS, kind=data["kind"])
    return _complete(_named(KINDS[data["kind"]].mechanism).from_dict(data))


def executor_of(mechanism: Mechanism) -> Any:
    """The class that makes the releases of a mechanism, called with the mechanism and a training context."""
    validate.one_of(KINDS, kind=mechanism.kind)
    return _named(KINDS[mechanism.kind].executor)


def _complete(mechanism: Mechanism) -> Mechanism:
    mechanism.require_complete()
    return mechanism


def _place(found: type | str) -> str:
    return found if isinstance(found, str) else f"{found.__module__}:{found.__qualname__}"


def _named(where: type | str) -> Any:
    if not isinstance(where, str):
        return where
    module, name = where.split(":")
    return getattr(import_module(module), name)
