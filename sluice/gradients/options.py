"""How per-sample gradients are computed. No field here can change a result beyond rounding, nor any epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sluice import validate

STRATEGIES = ("auto", "gram", "explicit", "vmap", "loop")


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Performance options of the gradient engine.

    Attributes:
        chunk_size: samples that go through the model at once. None lets the cost model choose (64 to 256).
        strategy: module name to kernel, for experiments: "gram" (norms from Gram matrices over positions),
            "explicit" (per-sample gradients are formed), "vmap" (treat the module and all in it as
            opaque), "loop" (the same, one sample after the other, for modules that vmap cannot run), "auto" (the
            cost model; what every module not named here gets).
        kept_bytes: per-sample gradients formed for norms are kept for the weighted sum up to this many bytes per
            parameter; beyond it they are formed again, or not at all.
        compiled: use kernels in C where there are some and a C compiler was found (`sluice.gradients.native`).
        verify: compare the first batch's norms and sum, on two samples, with one autograd run per sample. This
            catches parameters that are used behind the back of their module and layers whose batch axis is not
            what it seems. It costs two small steps, once.
    """

    chunk_size: int | None = None
    strategy: Mapping[str, str] = field(default_factory=dict)
    kept_bytes: int = 64 * 2**20
    compiled: bool = True
    verify: bool = True

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            validate.positive_integer(chunk_size=self.chunk_size)
        validate.positive_integer(kept_bytes=self.kept_bytes)
        for kernel in self.strategy.values():
            validate.one_of(STRATEGIES, strategy=kernel)
