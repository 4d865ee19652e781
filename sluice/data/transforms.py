"""Conversions applied to a batch when it is read, so that images stay unsigned bytes in memory.

Each works on every record by itself with constants that are public, so none of them costs privacy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Transform = Callable[[Tensor], Tensor]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class ToFloat:
    """float32 of x / divisor and then, for each channel, (x - mean) / std.

    **Guarantee.** Row i of the result is a function of row i of the input and of these constants alone.
    """

    divisor: float = 255.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __call__(self, raw: Tensor) -> Tensor:
        return self.write(raw, torch.empty_like(raw, dtype=torch.float32))

    @property
    def only_converts(self) -> bool:
        """Whether numbers stay what they are."""
        return self.divisor == 1.0 and not self.mean

    def write(self, raw: Tensor, values: Tensor) -> Tensor:
        """The same into memory that is there already, float32."""
        values.copy_(raw)
        if self.divisor != 1.0:
            values.div_(self.divisor)
        if self.mean:
            shape = (1, len(self.mean), *[1] * (values.ndim - 2))
            mean, std = (torch.tensor(channel, device=raw.device).view(shape) for channel in (self.mean, self.std))
            values.sub_(mean).div_(std)
        return values


@dataclass(frozen=True, kw_only=True)
class ToIds:
    """Word ids as int64, which embeddings want.

    **Guarantee.** Row i of the result is a function of row i of the input alone.
    """

    def __call__(self, raw: Tensor) -> Tensor:
        return raw.to(torch.int64)


to_float = ToFloat()
standardised = ToFloat(mean=IMAGENET_MEAN, std=IMAGENET_STD)
unscaled = ToFloat(divisor=1.0)
to_ids = ToIds()
