"""Lower bounds on epsilon from what a run released: can its claim be refuted?

Names are loaded on first use; only canaries need torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluice.audit.canaries import Canaries
    from sluice.audit.curves import Claim
    from sluice.audit.guesses import Channel, Plan, plan_guesses
    from sluice.audit.result import AuditResult, Bound
    from sluice.audit.scores import Observations, audit_scores, epsilon_lower_bound

_HOMES = {
    "AuditResult": "result",
    "Bound": "result",
    "Canaries": "canaries",
    "Channel": "guesses",
    "Claim": "curves",
    "Observations": "scores",
    "Plan": "guesses",
    "audit_scores": "scores",
    "epsilon_lower_bound": "scores",
    "plan_guesses": "guesses",
}

__all__ = [
    "AuditResult",
    "Bound",
    "Canaries",
    "Channel",
    "Claim",
    "Observations",
    "Plan",
    "audit_scores",
    "epsilon_lower_bound",
    "plan_guesses",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
