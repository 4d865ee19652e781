"""The linear model of a run with its released weights shrunk by the noise that is known to be in them."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from sluice.experiments.settings import TrainSettings
from sluice.mechanism.base import Mechanism
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.models import accumulated_noise, shrunk


def shrunk_model(model: nn.Module, settings: TrainSettings, mechanism: Mechanism, *, releases: int) -> nn.Module:
    """A copy of a linear model after so many releases, its weights shrunk as ``settings.shrinkage`` says.

    Guarantee:
        Post-processing: it reads released weights and public numbers alone.
    """
    assert isinstance(mechanism, SelectiveRelease)
    assert settings.shrinkage is not None
    copy = deepcopy(model)
    classifier = copy.get_submodule("classifier")
    weight = classifier.weight
    assert isinstance(weight, nn.Parameter)
    if releases:
        noise = mechanism.sigma * mechanism.scaling.sensitivity / mechanism.expected_batch_size
        noise = accumulated_noise(lr=settings.lr, momentum=settings.momentum, releases=releases, noise=noise)
        with torch.no_grad():
            weight.copy_(shrunk(weight, noise=noise, factor=settings.shrinkage))
    return copy


__all__ = ["shrunk_model"]
