"""Accountants: what releases cost, proved; and beside it what the DPSR-CG paper claims, labelled so.

``rdp`` and ``pld`` are sound (docs/accounting.md) and have dp-accounting's face. ``paper`` reproduces published
figures and is never a guarantee. Names are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sluice._base.on_demand import import_on_demand

if TYPE_CHECKING:
    from sluice.accounting.acceptance import Acceptance
    from sluice.accounting.calibration import Calibration, calibrate, solve_releases
    from sluice.accounting.dpa import PrivacyAccountant
    from sluice.accounting.events import SelectiveReleaseDpEvent
    from sluice.accounting.opacus_adapter import SelectiveAccountant, register_with_opacus
    from sluice.accounting.pld_accountant import SelectivePLDAccountant
    from sluice.accounting.privacy_report import PrivacyReport, privacy_report
    from sluice.accounting.rdp_accountant import SelectiveRdpAccountant

# Of dp-accounting only what is used is loaded; see `sluice.accounting.dpa`.
import_on_demand("dp_accounting")
# scipy looks at every name of numpy, which loads these two, and a tenth of a second of start-up, for nothing.
import_on_demand("numpy.f2py")
import_on_demand("numpy.testing")
# And it parses the documentation of every special function: those in C, which are most, are found without.
import_on_demand("scipy.special", core="_ufuncs")

#: The sound accountants by name; the first is the tighter one.
ACCOUNTANTS = ("pld", "rdp")

_HOMES = {
    "Acceptance": "acceptance",
    "Calibration": "calibration",
    "PrivacyReport": "privacy_report",
    "SelectiveAccountant": "opacus_adapter",
    "SelectivePLDAccountant": "pld_accountant",
    "SelectiveRdpAccountant": "rdp_accountant",
    "SelectiveReleaseDpEvent": "events",
    "calibrate": "calibration",
    "privacy_report": "privacy_report",
    "register_with_opacus": "opacus_adapter",
    "solve_releases": "calibration",
}

__all__ = [
    "ACCOUNTANTS",
    "Acceptance",
    "Calibration",
    "PrivacyReport",
    "SelectiveAccountant",
    "SelectivePLDAccountant",
    "SelectiveRdpAccountant",
    "SelectiveReleaseDpEvent",
    "calibrate",
    "create_accountant",
    "privacy_report",
    "register_with_opacus",
    "solve_releases",
]


def create_accountant(name: str, *, tolerance: float | None = None) -> PrivacyAccountant:
    """A fresh sound accountant: one of ``ACCOUNTANTS``. The tolerance is that of "pld"; None takes its default."""
    from sluice._base import validate
    from sluice.accounting.pld_accountant import DEFAULT_TOLERANCE, SelectivePLDAccountant
    from sluice.accounting.rdp_accountant import SelectiveRdpAccountant

    validate.one_of(ACCOUNTANTS, accountant=name)
    if name == "rdp":
        return SelectiveRdpAccountant()
    return SelectivePLDAccountant(tolerance=DEFAULT_TOLERANCE if tolerance is None else tolerance)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
