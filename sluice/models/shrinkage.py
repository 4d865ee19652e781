"""Weights that noise has reached, shrunk by as much as noise explains: free, since it reads released weights alone."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional

from sluice._base.errors import InputError
from sluice._base.validate import non_negative, positive_integer


def accumulated_noise(*, lr: float, momentum: float, releases: int, noise: float) -> float:
    """The standard deviation of the noise in each weight after training by SGD with a constant learning rate.

    Args:
        noise: that of the noise in each entry of a release, as the optimizer sees it: noise multiplier times
            maximum gradient norm, divided by the expected batch size.
    """
    non_negative(lr=lr, momentum=momentum, noise=noise)
    positive_integer(releases=releases)
    if momentum >= 1:
        raise InputError(f"momentum={momentum} is not allowed: it must be from 0 to below 1.")
    # A release is applied at once and then, weakened by the momentum, with each one that follows.
    applied = ((1 - momentum**uses) / (1 - momentum) for uses in range(1, releases + 1))
    return lr * noise * math.sqrt(sum(share * share for share in applied))


def shrunk(weight: Tensor, *, noise: float, factor: float) -> Tensor:
    """The weight of a linear classifier with each entry moved towards 0 by ``factor`` times its noise, at most to 0.

    What all classes have in common in a column is taken off first: no probability depends on it, and it is noise alone in
    a classifier that began at zero.

    Args:
        weight: ``[classes, columns]``.
        noise: the standard deviation of the noise in each entry, from public numbers (`accumulated_noise`).

    **Guarantee.** A function of the weight and of public numbers. On released weights it is post-processing, which costs no
    privacy.
    """
    non_negative(noise=noise, factor=factor)
    classes = weight.shape[0]
    centred = weight - weight.mean(0, keepdim=True)
    return functional.softshrink(centred, factor * noise * math.sqrt((classes - 1) / classes))


__all__ = ["accumulated_noise", "shrunk"]
