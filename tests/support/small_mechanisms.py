"""One small mechanism of each method that trains on Poisson samples or by a budget of its own, for 40 records."""

from __future__ import annotations

from typing import Any

from sluice.mechanism.base import Mechanism
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.dpagd import AdaptiveBudget
from sluice.methods.dpis import ImportanceSampling
from sluice.methods.dpsur import DpsurMechanism
from sluice.methods.non_private import NonPrivate

SIZE = 40
GATE = ClippingBiasGate(
    beta=-1.0, gate_noise=0.5, reference_noise=20.0, small_norm=0.1, large_norm=1.0, initial_reference=10.0
)


def plain(releases: int) -> dict[str, Any]:
    """The arguments that make a `SelectiveRelease` plain DP-SGD."""
    return {
        "sample_rate": 0.5,
        "expected_batch_size": 20.0,
        "scaling": Clip(),
        "noise_multiplier": 2.0,
        "releases": releases,
    }


def small_mechanisms(releases: int, *, rho: float, budgeted: int) -> dict[str, Mechanism]:
    """By the names of their methods.

    Args:
        rho: the budget of dpagd.
        budgeted: its releases, which end when the budget does.
    """
    return {
        "dpsr-cg": SelectiveRelease(
            **plain(releases), gate=GATE.for_batches_of(20.0, small_norm=Clip().unclipped_norm)
        ),
        "dpsgd": SelectiveRelease(**plain(releases)),
        "dpsur": DpsurMechanism(
            **plain(releases),
            validation_rate=0.5,
            expected_validation_size=20.0,
            validation_noise=1.3,
            loss_clip=0.1,
            threshold=0.5,
        ),
        "dpis": ImportanceSampling(
            dataset_size=SIZE,
            wanted_rate=0.25,
            sample_rate=0.5,
            first_clip_norm=1.0,
            noise_multiplier=2.0,
            norm_noise=10.0,
            count_noise=5.0,
            norm_decay=0.5,
            clip_rate=0.2,
            clip_target=0.5,
            releases=releases,
        ),
        "dpagd": AdaptiveBudget(
            rho=rho,
            gradient_rho=0.16,
            selection_rho=0.04,
            max_grad_norm=1.0,
            gamma=0.5,
            candidates=3,
            first_reach=0.3,
            refresh_every=2,
            reach_growth=0.1,
            loss_clip=3.0,
            gradient_rate=1.0,
            loss_rate=1.0,
            releases=budgeted,
        ),
        "non-private": NonPrivate(batch_size=20, releases=releases),
    }
