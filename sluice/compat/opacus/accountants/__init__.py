"""Opacus's accountants, for steps that somebody else makes; those of a run are counted by its engine."""

from __future__ import annotations

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.accounting.opacus_adapter import SelectiveAccountant

#: Opacus's names of accountants, and Sluice's: both pairs compute the same kind of bound.
NAMES = {"prv": "pld", "rdp": "rdp"}


def known_accountant(accountant: str) -> str:
    """Sluice's name of an accountant of Opacus."""
    if accountant == "gdp":
        raise InputError(
            'accountant="gdp" is not allowed: it approximates by a limit theorem, and can say less than the true epsilon. Use '
            '"prv", which is as tight and a bound.'
        )
    validate.one_of(NAMES, accountant=accountant)
    return NAMES[accountant]


class RDPAccountant(SelectiveAccountant):
    """By Renyi divergences."""

    def __init__(self) -> None:
        super().__init__(accountant="rdp")


class PRVAccountant(SelectiveAccountant):
    """By privacy-loss distributions: the tighter one."""

    def __init__(self) -> None:
        super().__init__(accountant="pld")


def create_accountant(mechanism: str) -> SelectiveAccountant:
    """An empty accountant by the name that Opacus has for it."""
    return SelectiveAccountant(accountant=known_accountant(mechanism))


__all__ = ["PRVAccountant", "RDPAccountant", "create_accountant", "known_accountant"]
