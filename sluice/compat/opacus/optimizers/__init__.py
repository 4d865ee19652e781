"""The optimizer that `make_private` returns, with the names that Opacus's has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from sluice._base.errors import InputError
from sluice.mechanism.clipped_release import ClippedRelease
from sluice.training.weights import PrivateOptimizer

_STAGES = (
    "clipping, noise and update are one step here, logged before it is made, and what is not yet noised is kept from "
    "sight. Call optimizer.step() alone."
)
_ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("clip_and_accumulate", "add_noise", "scale_grad", "pre_step", "signal_skip_step"), _STAGES),
    "grad_samples": "gradients of single records are never formed. For their norms use sluice.gradients.PerSampleGradients.",
    "params": "use optimizer.param_groups.",
}


class DPOptimizer(PrivateOptimizer):
    """A `PrivateOptimizer` that also answers to Opacus's names."""

    def __init__(
        self, private: PrivateOptimizer, *, mechanism: ClippedRelease, max_grad_norm: float | Sequence[float]
    ) -> None:
        super().__init__(private._updater, consume=private._consume)
        self._mechanism = mechanism
        self._max_grad_norm = max_grad_norm

    @property
    def noise_multiplier(self) -> float:
        """That of a release as a whole, before a schedule's factor."""
        return self._mechanism.sigma

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> NoReturn:
        raise InputError(_fixed("noise_multiplier", "noise_schedule"))

    @property
    def max_grad_norm(self) -> float | Sequence[float]:
        """What make_private was given."""
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> NoReturn:
        raise InputError(_fixed("max_grad_norm", "clip_schedule"))

    @property
    def expected_batch_size(self) -> float:
        return self._mechanism.expected_batch_size

    @property
    def accumulated_iterations(self) -> int:
        """Always 1: the pieces of a batch are not batches."""
        return 1

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call a function with this optimizer after each release."""

        def hook(optimizer: Any, arguments: Any, keywords: Any) -> None:
            fn(self)

        self.register_step_post_hook(hook)

    def __getattr__(self, name: str) -> Any:
        if name in _ABSENT:
            raise AttributeError(f"optimizer.{name} is not offered: {_ABSENT[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _fixed(name: str, instead: str) -> str:
    return (
        f"optimizer.{name} cannot be changed while training: it is part of what the run promises. Fix it in advance with "
        f"make_private({instead}=Schedule(...)), from sluice."
    )


__all__ = ["DPOptimizer"]
