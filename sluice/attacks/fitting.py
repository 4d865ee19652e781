"""Attack nets: from features of records whose membership is known to scores of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sluice._base import validate
from sluice._base.errors import InputError
from sluice.attacks.scores import Scores

_BATCH, _RATE, _HELD_OUT = 64, 1e-3, 10
_SCORED_AT_ONCE = 2000


def branch(width: int) -> nn.Sequential:
    """The part of an attack net that sees one block of features."""
    return nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedAttack:
    """An attack net and the standardisation of its features, both from the records that it was fitted to.

    Attributes:
        epoch: which one was kept, by its loss on a held-out tenth.
    """

    net: nn.Module
    centres: tuple[Tensor, ...]
    scales: tuple[Tensor, ...]
    epoch: int

    @torch.no_grad()
    def scores(self, blocks: Sequence[Tensor]) -> Scores:
        """Log odds of membership for each record: above 0 the net says member."""
        seen = _standardised(blocks, self.centres, self.scales)
        parts = [
            self.net(*(block[rows] for block in seen)) for rows in torch.arange(len(seen[0])).split(_SCORED_AT_ONCE)
        ]
        outputs = torch.cat(parts).double()
        found: Scores = (outputs[:, 1] - outputs[:, 0]).numpy()
        return found


def fit_attack(
    make_net: Callable[[], nn.Module],
    blocks: Sequence[Tensor],
    members: ArrayLike,
    *,
    standardised: Sequence[bool],
    seed: int,
    epochs: int = 50,
) -> FittedAttack:
    """Fit a net that tells members from non-members.

    Cross entropy on logits, Adam, gradients of one batch at a time. The epoch is chosen on a held-out tenth of these records: those
    that the attack is judged on play no role.

    Args:
        blocks: features, each with a row for each record.
        standardised: which blocks are brought to mean 0 and deviation 1.
    """
    validate.positive_integer(epochs=epochs)
    inside = torch.as_tensor(np.asarray(members, dtype=bool)).long()
    if any(len(block) != len(inside) for block in blocks):
        raise InputError(f"members ({len(inside)}) and features must be equal in number.")
    if len(inside) < 2 * _HELD_OUT or not 0 < int(inside.sum()) < len(inside):
        raise InputError(
            f"members ({int(inside.sum())} of {len(inside)} records) are not allowed: an attack net needs members and "
            f"non-members, {2 * _HELD_OUT} records at least."
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        order = torch.randperm(len(inside))
        held_out, used = order[: len(order) // _HELD_OUT], order[len(order) // _HELD_OUT :]
        centres, scales = _statistics([block[used] for block in blocks], standardised)
        seen = _standardised(blocks, centres, scales)
        net, epoch = _trained(make_net(), seen, inside, used=used, held_out=held_out, epochs=epochs)
    return FittedAttack(net=net, centres=centres, scales=scales, epoch=epoch)


def _trained(
    net: nn.Module, blocks: Sequence[Tensor], inside: Tensor, *, used: Tensor, held_out: Tensor, epochs: int
) -> tuple[nn.Module, int]:
    optimizer = torch.optim.Adam(net.parameters(), lr=_RATE)
    best, best_loss, best_epoch = copy.deepcopy(net), float("inf"), 0
    for epoch in range(epochs):
        net.train()
        for rows in used[torch.randperm(len(used))].split(_BATCH):
            if len(rows) < 2:
                continue  # batch normalisation has no variance of one record
            optimizer.zero_grad()
            F.cross_entropy(net(*(block[rows] for block in blocks)), inside[rows]).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            loss = float(F.cross_entropy(net(*(block[held_out] for block in blocks)), inside[held_out]))
        if loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(net), loss, epoch + 1
    return best.eval(), best_epoch


def _statistics(
    blocks: Sequence[Tensor], standardised: Sequence[bool]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    centres, scales = [], []
    for block, wanted in zip(blocks, standardised, strict=True):
        scale = block.std(dim=0)
        centres.append(block.mean(dim=0) if wanted else torch.zeros(block.shape[1]))
        scales.append(torch.where(scale > 1e-6, scale, 1.0) if wanted else torch.ones(block.shape[1]))
    return tuple(centres), tuple(scales)


def _standardised(blocks: Sequence[Tensor], centres: Sequence[Tensor], scales: Sequence[Tensor]) -> list[Tensor]:
    return [(block - centre) / scale for block, centre, scale in zip(blocks, centres, scales, strict=True)]
