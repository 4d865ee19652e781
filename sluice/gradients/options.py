"""How per-sample gradients are computed. No field here can change a result beyond rounding, nor any epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.gradients.trees import batch_size

STRATEGIES = ("auto", "gram", "explicit", "vmap", "loop")


@dataclass(frozen=True, kw_only=True)
class GradientOptions:
    """Performance options of the gradient engine.

    Attributes:
        chunk_size: samples that go through the model at once. None lets the cost model choose (16 to 256).
        strategy: module name to kernel, for experiments: "gram" (norms from Gram matrices over positions),
            "explicit" (per-sample gradients are formed), "vmap" (run the module and all in it under
            `torch.func.vmap`), "loop" (the same, one sample after the other, for modules that vmap cannot run), "auto"
            (the cost model; what every module not named here gets).
        kept_bytes: per-sample gradients formed for norms are kept for the weighted sum up to this many bytes per
            parameter; beyond it they are formed again, or not at all.
        compiled: use kernels in C where there are some and a C compiler was found (`sluice.gradients.native`).
        verify: check the model, on a few made-up samples and whenever shapes or training modes are new, for mixed
            samples, for state that outlives a batch, and for parameters that are used without calling their module;
            and the loss for mixed samples, where it is given to us (docs/gradients.md). It costs some small steps.
        example: a batch of inputs to check the model on in place of made-up ones, samples first: at least two different
            ones. It must be public: whether the model is accepted depends on its values. For models that fail on
            random numbers.
    """

    chunk_size: int | None = None
    strategy: Mapping[str, str] = field(default_factory=dict)
    kept_bytes: int = 128 * 2**20
    compiled: bool = True
    verify: bool = True
    example: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.chunk_size is not None:
            validate.positive_integer(chunk_size=self.chunk_size)
        validate.positive_integer(kept_bytes=self.kept_bytes)
        for kernel in self.strategy.values():
            validate.one_of(STRATEGIES, strategy=kernel)
        if self.example is not None and batch_size(self.example) < 2:
            raise InputError("example holds one sample, which is not enough: give at least 2 different ones.")
