"""What Opacus's keywords mean here: a mechanism, or a sentence that says what to write instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.mechanism.clipping import Clipping, FlatClipping, LayerClipping, QuantileClipping, Schedule
from sluice.training.clipped_release import layers_of
from sluice.training.engine import PrivacyEngine as Engine

CLIPPING = ("flat", "per_layer", "adaptive")

#: How per-sample gradients are computed is Sluice's choice; these modes differ in nothing else.
MODES = ("hooks", "functorch", "ew", "ghost")


def require_meaning(*, poisson_sampling: bool, batch_first: bool, grad_sample_mode: str) -> None:
    """Refuse what has no proof or no meaning here, saying what to write instead."""
    if not poisson_sampling:
        raise InputError(
            "poisson_sampling=False is not allowed: epsilon is proved for batches that are Poisson samples, and batches of "
            "a fixed size from a shuffled list can leak more. Leave it out. If each record must be used once in each "
            "epoch, see docs/matrix.md: the matrix mechanism accounts for that."
        )
    if not batch_first:
        raise InputError(
            "batch_first=False is not allowed: batches have their records on the first axis. Leave it out and transpose "
            "inside the model (an nn.LSTM(batch_first=False) in it is fine)."
        )
    if grad_sample_mode == "no_op":
        raise InputError(
            'grad_sample_mode="no_op" is not allowed: per-sample gradients that come from elsewhere (p.grad_sample) cannot '
            "be checked. Leave it out: any module works."
        )
    if grad_sample_mode not in MODES:
        raise InputError(
            f"grad_sample_mode={grad_sample_mode!r} is not allowed: it must be one of {', '.join(MODES)}, none of which "
            "changes anything here. Several processes need no mode of their own (docs/distributed.md)."
        )


class Hooks:
    """What Opacus returns in the module's place with ``wrap_model=False``: something to clean up."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def cleanup(self) -> None:
        """Stop watching the model: `PrivacyEngine.close`."""
        self._engine.close()


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How gradients are to be clipped, in Opacus's words.

    Attributes:
        clipping: "flat", "per_layer" or "adaptive".
        max_grad_norm: one number; or, per layer, one for each trainable parameter.
        schedule: factors of the bounds, release by release.
        target_unclipped_quantile ... min_clipbound: of adaptive clipping; None for a usual value.
    """

    clipping: str
    max_grad_norm: float | Sequence[float]
    schedule: Schedule | None = None
    target_unclipped_quantile: float | None = None
    clipbound_learning_rate: float | None = None
    unclipped_num_std: float | None = None
    max_clipbound: float | None = None
    min_clipbound: float | None = None

    def __post_init__(self) -> None:
        validate.one_of(CLIPPING, clipping=self.clipping)
        if self.clipping != "adaptive":
            for name in _ADAPTIVE:
                if getattr(self, name) is not None:
                    raise InputError(f'{name}={getattr(self, name)} is not allowed without clipping="adaptive".')
        elif self.schedule is not None:
            raise InputError(
                'clip_schedule is not allowed with clipping="adaptive", where the bound follows the norms: give one of them.'
            )

    def for_model(self, module: nn.Module, *, expected_batch_size: float) -> Clipping:
        if self.clipping == "per_layer":
            return LayerClipping.of(self._by_layer(module), schedule=self.schedule)
        bound = self._one_number()
        if self.clipping == "flat":
            return FlatClipping(max_grad_norm=bound, schedule=self.schedule)
        return QuantileClipping(
            max_grad_norm=bound,
            quantile=_given(self.target_unclipped_quantile, 0.5),
            rate=_given(self.clipbound_learning_rate, 0.2),
            noise=_given(self.unclipped_num_std, expected_batch_size / 20),
            smallest=_given(self.min_clipbound, bound / 1000),
            largest=_given(self.max_clipbound, bound * 1000),
        )

    def _one_number(self) -> float:
        if not isinstance(self.max_grad_norm, int | float):
            raise InputError(
                f'max_grad_norm={self.max_grad_norm} is not allowed with clipping="{self.clipping}": it must be one number. '
                'A list belongs to clipping="per_layer".'
            )
        validate.positive(max_grad_norm=self.max_grad_norm)
        return float(self.max_grad_norm)

    def _by_layer(self, module: nn.Module) -> dict[str, float]:
        """A layer's bound is the root of the sum of its parameters' squared bounds, so that all together stay what they were."""
        layers = layers_of(module)
        if isinstance(self.max_grad_norm, int | float):
            return dict.fromkeys(layers, self._one_number() / math.sqrt(len(layers)))
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        if len(names) != len(self.max_grad_norm):
            raise InputError(
                f"max_grad_norm of length {len(self.max_grad_norm)} is not allowed: the model has {len(names)} trainable "
                "parameters, and each needs a bound."
            )
        squares = dict.fromkeys(layers, 0.0)
        for name, bound in zip(names, self.max_grad_norm, strict=True):
            validate.positive(max_grad_norm=float(bound))
            squares[name.rpartition(".")[0]] += float(bound) ** 2
        return {layer: math.sqrt(square) for layer, square in squares.items()}


_ADAPTIVE = (
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "unclipped_num_std",
    "max_clipbound",
    "min_clipbound",
)


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else float(value)
