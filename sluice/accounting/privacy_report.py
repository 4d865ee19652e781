"""One answer to "what does this run cost?": the sound figures, the plain ones, and the claimed one, side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice._base import validate
from sluice.accounting import dpa
from sluice.accounting.calibration import release_event
from sluice.accounting.claims import CLAIMED_LABEL, Reading, claimed_account
from sluice.accounting.gate_terms import AccountedGate, ClaimedGate
from sluice.accounting.pld_accountant import DEFAULT_TOLERANCE, SelectivePLDAccountant
from sluice.accounting.rdp_accountant import SelectiveRdpAccountant

MEANINGS = {
    "pld": "epsilon of this run, proved, by privacy-loss distributions (the figure to report)",
    "rdp": "epsilon of this run, proved, by Renyi divergences (looser)",
    "plain_pld": "epsilon of plain DP-SGD with the same gradient noise and no gate, by privacy-loss distributions",
    "plain_rdp": "epsilon of plain DP-SGD with the same gradient noise and no gate, by Renyi divergences",
    "paper_rdp": f"{CLAIMED_LABEL}: q_sup put into the sampled Gaussian, as the paper's algorithm prints rho; no guarantee",
    "paper_rdp_table": f"{CLAIMED_LABEL}: the same with the rho that reproduces the paper's table; no guarantee",
}


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """Epsilons of one run at ``delta``. Figures that start with ``paper`` are claims, not guarantees, or None.

    ``reasons`` says, for every figure that is infinite, why it is.
    """

    delta: float
    pld: float
    rdp: float
    plain_pld: float
    plain_rdp: float
    paper_rdp: float | None
    paper_rdp_table: float | None
    reasons: dict[str, str] = field(default_factory=dict)

    def figures(self) -> dict[str, float | None]:
        return {name: getattr(self, name) for name in MEANINGS}


def privacy_report(
    *,
    sample_rate: float,
    noise_multiplier: float,
    releases: int,
    delta: float,
    gate: AccountedGate | None = None,
    prior_releases: Sequence[float] = (),
    tolerance: float = DEFAULT_TOLERANCE,
) -> PrivacyReport:
    """Account for a run by every accountant.

    Guarantee:
        ``pld`` and ``rdp`` are upper bounds under adding or removing one record (docs/accounting.md).
    """
    validate.fraction(sample_rate=sample_rate)
    validate.positive(noise_multiplier=noise_multiplier)
    validate.positive_integer(releases=releases)
    validate.open_fraction(delta=delta)
    before: list[dpa.DpEvent] = [dpa.GaussianDpEvent(multiplier) for multiplier in prior_releases]
    plain = release_event(sample_rate=sample_rate, noise_multiplier=noise_multiplier, gate=None)
    release = release_event(sample_rate=sample_rate, noise_multiplier=noise_multiplier, gate=gate)

    def epsilon(accountant: dpa.PrivacyAccountant, event: dpa.DpEvent) -> float:
        accountant.compose(dpa.ComposedDpEvent([*before, dpa.SelfComposedDpEvent(event, releases)]))
        return float(accountant.get_epsilon(delta))

    figures: dict[str, Any] = {
        "pld": epsilon(SelectivePLDAccountant(tolerance=tolerance), release),
        "rdp": epsilon(SelectiveRdpAccountant(), release),
        "plain_pld": epsilon(SelectivePLDAccountant(tolerance=tolerance), plain),
        "plain_rdp": epsilon(SelectiveRdpAccountant(), plain),
        "paper_rdp": None,
        "paper_rdp_table": None,
    }
    if isinstance(gate, ClaimedGate) and gate.gate_noise is not None:
        readings: dict[str, Reading] = {"paper_rdp": "printed", "paper_rdp_table": "table"}
        for name, reading in readings.items():
            account = claimed_account(
                sample_rate=sample_rate,
                noise_multiplier=noise_multiplier,
                gate_noise=gate.gate_noise,
                beta=gate.beta,
                clip_range=gate.clip_range,
                reading=reading,
                once=dpa.ComposedDpEvent(before),
            )
            figures[name] = account.claimed_epsilon(releases=releases, delta=delta)
    reasons = {
        name: f"noise_multiplier={noise_multiplier} is so small that the divergence overflows: no finite epsilon is known"
        for name, value in figures.items()
        if value is not None and math.isinf(value)
    }
    return PrivacyReport(delta=delta, reasons=reasons, **figures)
