"""Geometry of rows: partial whitening by public covariances, and rows of norm 1.

A direction in which features hardly vary is enlarged, one in which they vary much is made smaller, so that clipped
gradients and noise treat directions more evenly. Half of the usual power keeps directions of mere rounding small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice._base import validate
from sluice._base.errors import InputError

POWER = 0.25
"""Values are multiplied by covariance^-power. With 0.5 all directions would vary alike."""

RIDGE = 0.01
"""Added to each eigenvalue, as a share of their mean."""

_LEAST_NORM = 1e-6


def whitening_matrix(covariance: Tensor, *, power: float = POWER, ridge: float = RIDGE) -> Tensor:
    """The symmetric matrix (covariance / mean eigenvalue + ridge)^-power, float32.

    With a covariance of 0 nothing is known, and nothing is changed but the scale.
    """
    validate.non_negative(power=power)
    validate.positive(ridge=ridge)
    if covariance.dim() != 2 or covariance.shape[0] != covariance.shape[1]:
        raise InputError(f"a covariance of shape {tuple(covariance.shape)} is not allowed: it must be a square matrix.")
    values, directions = torch.linalg.eigh(covariance.double())
    values = values.clamp(min=0.0)
    mean = values.mean()
    values = values / mean if mean > 0 else values
    factors: Tensor = (values + ridge) ** -power
    matrix: Tensor = directions * factors @ directions.T
    return matrix.float()


def covariance(rows: Tensor) -> Tensor:
    """The second moments of centred rows, float64."""
    rows = rows.double()
    return rows.T @ rows / len(rows)


def kronecker_covariances(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Covariances of channels, summed over places, and of places, summed over channels, of ``(n, channels, places)``."""
    _, channels, places = maps.shape
    return covariance(maps.transpose(1, 2).reshape(-1, channels)), covariance(maps.reshape(-1, places))


def unit_rows(rows: Tensor) -> Tensor:
    """Each row divided by its norm; a row of 0 remains 0."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return rows / norms.clamp(min=_LEAST_NORM)


__all__ = ["POWER", "RIDGE", "covariance", "kronecker_covariances", "unit_rows", "whitening_matrix"]
