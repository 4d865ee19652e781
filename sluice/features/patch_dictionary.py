"""Dictionaries of patches: how they are whitened, which atoms they hold, and how an image responds to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sluice._base.errors import InputError
from sluice.features.patch_blocks import Layout

VARIANCE_FLOOR = 10 / 255**2
"""Added to a patch's variance: what is flatter than this is noise rather than structure."""

CENTRE, SPREAD = 0.45, 0.25
"""What the numbers of patches that keep their brightness are centred and scaled by: about those of any photograph."""

_PATCHES_PER_IMAGE = 20
_FLATTEST = 0.02
_EIGENVALUE_FLOOR = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Dictionary:
    """Whitening and atoms of one block.

    Attributes:
        whitening: ``(size of a patch, coordinates)``. The first ``even`` coordinates of a mirrored patch are those of the
            patch, the others change their sign.
        atoms: ``(pairs, coordinates)`` of length 1. With the sign of the odd coordinates changed, an atom is its mirror image.
    """

    layout: Layout
    whitening: Tensor
    atoms: Tensor
    even: int

    @property
    def floor(self) -> float:
        return self.layout.block.norm_floor * self.whitening.shape[1]

    @classmethod
    def fit(cls, layout: Layout, prepared: Tensor, generator: torch.Generator) -> Dictionary:
        """From random patches of synthetic images, which `PatchBlock.prepare` has prepared."""
        patches = _random_patches(layout, prepared, generator)
        pairs = layout.block.pairs
        if len(patches) < pairs:
            raise InputError(
                f"images={len(prepared)} is not allowed for a dictionary of {pairs} pairs: their {len(patches)} patches "
                "are too few. Ask for more synthetic images or for a smaller dictionary."
            )
        whitening, even = _whitening(patches.double(), layout)
        chosen = torch.randperm(len(patches), generator=generator)[:pairs]
        atoms = patches[chosen].double() @ whitening
        atoms /= atoms.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return cls(layout=layout, whitening=whitening.float(), atoms=atoms.float(), even=even)

    def responses(self, prepared: Tensor) -> Tensor:
        """Square roots of mean responses, ``(n, cells, 2, pairs)``, by matrix products, in the type of the images."""
        flat, kind = prepared.flatten(1), prepared.dtype
        whitening, atoms, threshold = self.whitening.to(kind), self.atoms.to(kind), self.layout.block.threshold
        sums = flat.new_zeros(len(flat), self.layout.block.cells, 2, len(atoms))
        for cell, starts in enumerate(self.layout.starts):
            white = normalised(flat[:, starts[:, None] + self.layout.places], self.layout) @ whitening
            white = white * (white.square().sum(2, keepdim=True) + self.floor).rsqrt()
            even = white[:, :, : self.even] @ atoms[:, : self.even].T
            odd = white[:, :, self.even :] @ atoms[:, self.even :].T
            for at, signal in ((cell, even + odd), (int(self.layout.mirrored_cells[cell]), even - odd)):
                sums[:, at, 0] += (signal - threshold).relu_().mean(1)
                sums[:, at, 1] += (-signal - threshold).relu_().mean(1)
        return sums.sqrt_()


def normalised(patches: Tensor, layout: Layout) -> Tensor:
    """Patches, along the last dimension, without their mean and contrast, or with brightness and colours scaled."""
    if not layout.block.contrast:
        return (patches - CENTRE) * (1 / SPREAD)
    patches = patches - patches.mean(-1, keepdim=True)
    return patches * (patches.square().mean(-1, keepdim=True) + VARIANCE_FLOOR).rsqrt()


def _random_patches(layout: Layout, prepared: Tensor, generator: torch.Generator) -> Tensor:
    starts = torch.cat(layout.starts)
    drawn = starts[torch.randint(len(starts), (len(prepared), _PATCHES_PER_IMAGE), generator=generator)]
    patches = prepared.flatten(1).gather(1, (drawn[:, :, None] + layout.places).flatten(1)).view(-1, len(layout.places))
    return normalised(patches[patches.std(1) > _FLATTEST], layout)


def _whitening(patches: Tensor, layout: Layout) -> tuple[Tensor, int]:
    """Principal axes of patches and their mirror images, even ones first, divided by their deviations."""
    covariance = patches.T @ patches / len(patches)
    covariance = (covariance + covariance[layout.mirrored][:, layout.mirrored]) / 2
    floor = _EIGENVALUE_FLOOR * covariance.diagonal().mean()
    values, axes, parities = [], [], []
    for parity, sign in enumerate((1, -1)):
        basis = _symmetric_basis(layout.mirrored, sign)
        found, vectors = torch.linalg.eigh(basis.T @ covariance @ basis)
        values.append(found)
        axes.append(basis @ vectors)
        parities.append(torch.full(found.shape, parity))
    value, axis, parity_of = torch.cat(values), torch.cat(axes, 1), torch.cat(parities)
    largest = value.argsort(descending=True)[: min(layout.block.coordinates, len(value) - 1)]
    largest = torch.cat([largest[parity_of[largest] == parity] for parity in (0, 1)])
    return axis[:, largest] * (value[largest] + floor).rsqrt(), int((parity_of[largest] == 0).sum())


def _symmetric_basis(mirrored: Tensor, sign: int) -> Tensor:
    """An orthonormal basis of the patches that mirroring leaves alone (sign 1) or negates (sign -1)."""
    one = torch.eye(len(mirrored), dtype=torch.float64)
    sums = one + sign * one[mirrored]
    first = torch.arange(len(mirrored)) <= mirrored
    return functional.normalize(sums[first & (sums.abs().sum(1) > 0)], dim=1).T


__all__ = ["CENTRE", "SPREAD", "VARIANCE_FLOOR", "Dictionary", "normalised"]
