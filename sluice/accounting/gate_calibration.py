"""A gate whose noises follow the gradient noise while calibration looks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sluice._base.errors import InputError
from sluice.accounting.gate_terms import is_tunable

REFERENCE_RATIO = 5.0
LEAST_ACCEPTANCE = 0.05
LOWEST_NOISE, HIGHEST_NOISE = 1e-3, 1e9


@dataclass(frozen=True, kw_only=True)
class GateCalibration:
    """The gate's noises as functions of the gradient noise.

    Attributes:
        gate: any gate; noises that are None are chosen.
        strength: joint noise of a decision, over four times the gradient noise.
        split: how it is divided: the angle whose cosine is the gate's share and whose sine the reference's.
        least_gate_noise: what the gate noise never falls below, so that the worst batch still has a fair chance.
    """

    gate: Any
    strength: float
    split: float
    least_gate_noise: float = 0.0

    @classmethod
    def of(cls, gate: Any, *, strength: float, split: float) -> GateCalibration:
        least = _least_gate_noise(gate) if is_tunable(gate) and gate.gate_noise is None else 0.0
        return cls(gate=gate, strength=strength, split=split, least_gate_noise=least)

    @property
    def is_free(self) -> bool:
        return is_tunable(self.gate) and self.gate.gate_noise is None and self.gate.reference_noise is None

    def at(self, sigma: float) -> Any:
        """The gate to go with this much gradient noise."""
        gate = self.gate
        if not is_tunable(gate) or (gate.gate_noise is not None and gate.reference_noise is not None):
            return gate
        if gate.gate_noise is not None:
            return gate.with_noise(gate_noise=gate.gate_noise, reference_noise=REFERENCE_RATIO * sigma)
        if gate.reference_noise is not None:
            own = max(self.strength * sigma, self.least_gate_noise)
            return gate.with_noise(gate_noise=own, reference_noise=gate.reference_noise)
        blur = math.sqrt((1 - gate.reference_decay) / (1 + gate.reference_decay))
        return gate.with_noise(
            gate_noise=max(self.strength * sigma * math.cos(self.split), self.least_gate_noise),
            reference_noise=4 * self.strength * sigma * math.sin(self.split) / blur,
        )


def _least_gate_noise(gate: Any) -> float:
    """The smallest gate noise, to a few per cent, with which every batch is accepted with ``LEAST_ACCEPTANCE``."""
    noise = LOWEST_NOISE
    while noise < HIGHEST_NOISE:
        try:
            if gate.with_noise(gate_noise=noise, reference_noise=1.0).acceptance.probability_min >= LEAST_ACCEPTANCE:
                break
        except InputError:
            pass  # so little noise that the probability cannot even be represented
        noise *= 1.05
    return noise
