"""The gate that ``sluice epsilon`` and ``sluice plan`` account for, from their options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sluice.mechanism.gates import Gate

Beta = Annotated[float, typer.Option("--beta", help="Threshold of the gate, in units of its metric bound.")]
ClipRange = Annotated[float, typer.Option("--clip-range", help="Clip of the gate's difference, in the same units.")]
GateNoise = Annotated[
    float | None, typer.Option("--gate-noise", help="Gate noise sigma_e (standard deviation 4 sigma_e).")
]
ReferenceNoise = Annotated[
    float | None, typer.Option("--reference-noise", help="Noise multiplier of the published reference; 'inf' for none.")
]
MaxAttempts = Annotated[
    int | None, typer.Option("--max-attempts", help="Give up on a release after this many attempts; charged to delta.")
]
Strength = Annotated[
    float | None,
    typer.Option(
        "--strength",
        help="Keep each record by a coin of its own (the gate thinning), at this strength: no gate noise, no attempts.",
    ),
]
SmallNorm = Annotated[
    float | None,
    typer.Option(
        "--small-norm",
        help="Gradient norm up to which a record does not count for the gate: --scaling-bound of train, or --max-grad-norm where "
        "train does not scale by a bound. What rounding may do to the gate is charged for it; if not given, for the worst.",
    ),
]
LargeNorm = Annotated[
    float, typer.Option("--large-norm", help="Gradient norm from which a record counts fully for the gate.")
]
MovedRecords = Annotated[
    int | None,
    typer.Option(
        "--moved-records",
        help="With --strength: of how many other records rounding may move the norms. 1 (if not given) in sluice train and "
        "engine.releases; in a loop of your own over a mean loss the rows of a piece, at most max_physical_batch_size.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class GateOptions:
    """A gate as the options of either command describe it."""

    strength: float | None
    gate_noise: float | None
    beta: float
    clip_range: float
    reference_noise: float | None
    max_attempts: int | None
    small_norm: float | None
    large_norm: float
    moved_records: int | None

    def given(self, *names: str) -> list[str]:
        """Those of these options that were given, as they are typed."""
        return ["--" + name.replace("_", "-") for name in names if getattr(self, name) is not None]

    def gate(self, *, expected_batch_size: float) -> Gate:
        """The gate of a run with such batches, charged for rounding as that run is: `sluice train` and make_private fill it in alike."""
        from sluice._base import validate

        if self.small_norm is not None:
            validate.non_negative(small_norm=self.small_norm)
        # Without a norm the metric may rise as steeply as any gate lets it, which costs most.
        small_norm = math.inf if self.small_norm is None else self.small_norm
        gate = self._clipping_bias() if self.strength is None else self._thinning(self.strength)
        return gate.for_batches_of(expected_batch_size, small_norm=small_norm)

    def _clipping_bias(self) -> Gate:
        from sluice._base.errors import InputError
        from sluice.mechanism.gates import ClippingBiasGate

        if self.moved_records is not None:
            raise InputError("--moved-records is not allowed without --strength: only thinning reads it.")
        return ClippingBiasGate(
            beta=self.beta,
            clip_range=self.clip_range,
            gate_noise=self.gate_noise,
            reference_noise=self.reference_noise,
            large_norm=self.large_norm,
            max_attempts=self.max_attempts,
        )

    def _thinning(self, strength: float) -> Gate:
        from sluice._base.errors import InputError
        from sluice.mechanism.thinning import ThinningGate

        if meaningless := self.given("gate_noise", "reference_noise", "max_attempts"):
            raise InputError(
                f"--strength is not allowed together with {meaningless[0]}: this gate has neither noise nor attempts."
            )
        moved = 1 if self.moved_records is None else self.moved_records
        return ThinningGate(strength=strength, large_norm=self.large_norm, moved_records=moved)
