"""Principal components of the responses to patch dictionaries, learned from synthetic images.

A block's responses are standardised one by one, reduced by components of channels that all cells share, and the results of all
blocks by common components. All of it is linear, so nothing remains at the end but a matrix for each cell and a common one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.features.patch_blocks import PatchBlock

_DEVIATION_FLOOR = 0.1
#: Components of less variance, as a fraction of the largest, are rounding errors.
_SMALLEST_VARIANCE = 1e-7


@dataclass(frozen=True, kw_only=True, eq=False)
class ChannelComponents:
    """How a block's responses become a few numbers for each cell.

    Attributes:
        scale: ``(cells, 2 * pairs)``, the factor of each response.
        components: ``(2 * pairs, components)``, shared by the cells.
    """

    scale: Tensor
    components: Tensor

    @classmethod
    def fit(cls, responses: Tensor, block: PatchBlock) -> tuple[ChannelComponents, Tensor]:
        """From responses to synthetic images, ``(n, cells * 2 * pairs)``; also returns what these are reduced to.

        The responses are overwritten: they would be too large to keep twice.
        """
        deviation, mean = torch.std_mean(responses, dim=0)
        deviation += _DEVIATION_FLOOR * deviation.mean()
        scale = block.weight / (deviation * block.responses**0.5)
        cells = responses.sub_(mean).mul_(scale).view(len(responses), block.cells, -1)
        covariance = sum((cells[:, cell].T @ cells[:, cell] for cell in range(block.cells)), torch.zeros(()))
        _, vectors = _principal(covariance / len(responses), block.components)
        found = cls(scale=scale.view(block.cells, -1), components=vectors.float())
        return found, (cells @ found.components).flatten(1) + found(mean[None])

    def matrices(self) -> Tensor:
        """``(cells, 2 * pairs, components)``."""
        return self.scale[:, :, None] * self.components

    def __call__(self, responses: Tensor) -> Tensor:
        cells = responses.view(len(responses), *self.scale.shape)
        return ((cells * self.scale) @ self.components).flatten(1)


@dataclass(frozen=True, kw_only=True, eq=False)
class JointComponents:
    """Common components of all blocks, scaled to variance 1 over synthetic images.

    Attributes:
        matrix: ``(numbers of all blocks, components)``.
        offset: what is subtracted from the product: that of the mean.
        variances: of the components before they were scaled, largest first.
    """

    matrix: Tensor
    offset: Tensor
    variances: Tensor

    @classmethod
    def fit(cls, values: Tensor, components: int) -> JointComponents:
        """From the reduced responses of all blocks to synthetic images."""
        mean = values.mean(0)
        centred = values - mean
        variances, vectors = _principal(centred.T @ centred / len(values), min(components, len(values) - 1))
        known = variances > _SMALLEST_VARIANCE * variances[0]
        variances, matrix = variances[known], vectors[:, known] * variances[known].rsqrt()
        return cls(matrix=matrix.float(), offset=(mean.double() @ matrix).float(), variances=variances.float())


def _principal(covariance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues and their vectors, in float64."""
    values, vectors = torch.linalg.eigh(covariance.double())
    return values.flip(0)[:count], vectors.flip(1)[:, :count]


__all__ = ["ChannelComponents", "JointComponents"]
