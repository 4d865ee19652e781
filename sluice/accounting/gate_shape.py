"""A gate whose noises follow the gradient noise while calibration looks for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sluice.accounting.gate_terms import is_tunable
from sluice.errors import InputError

REFERENCE_RATIO = 5.0
LOWEST_NOISE, HIGHEST_NOISE = 1e-3, 1e9


@dataclass(frozen=True, kw_only=True)
class GateShape:
    """The gate's noises as functions of the gradient noise."""

    gate: Any
    strength: float
    split: float

    @property
    def is_free(self) -> bool:
        return is_tunable(self.gate) and self.gate.gate_noise is None and self.gate.reference_noise is None

    def at(self, sigma: float) -> Any:
        gate = self.gate
        if not is_tunable(gate) or (gate.gate_noise is not None and gate.reference_noise is not None):
            return gate
        if gate.gate_noise is not None:
            return gate.with_noise(gate_noise=gate.gate_noise, reference_noise=REFERENCE_RATIO * sigma)
        if gate.reference_noise is not None:
            return gate.with_noise(gate_noise=self.strength * sigma, reference_noise=gate.reference_noise)
        blur = math.sqrt((1 - gate.reference_decay) / (1 + gate.reference_decay))
        return gate.with_noise(
            gate_noise=self.strength * sigma * math.cos(self.split),
            reference_noise=4 * self.strength * sigma * math.sin(self.split) / blur,
        )


def lowest_noise(shape: GateShape) -> float:
    """The smallest gradient noise to try: with less, a gate that scales with it would accept next to nothing."""
    sigma = LOWEST_NOISE
    while shape.gate is not None and sigma < HIGHEST_NOISE:
        try:
            _ = shape.at(sigma).acceptance
        except InputError:
            sigma *= 1.25
        else:
            break
    return sigma
