"""DPSR-CG: selective release by the clipping bias of a batch, with a public reference.

Source: the DPSR-CG paper, with the repairs that its privacy needs (docs/accounting.md, section 4).

Algorithm: a Poisson batch; its metric, which counts large gradients; it is compared, with noise, with a public reference,
and the attempt is released or forgotten. A release is the scaled sum of gradients with noise, and the metric with noise,
from which the next reference is made. A forgotten attempt leaves no trace.

Accounting: sound, by PLD or RDP with the bound of docs/accounting.md, section 3, which covers the selection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method
from sluice.methods.selective import selective_mechanism

# Chosen on held-out training records (docs/results.md tells how), never on test records.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 0.3, "scaling_bound": 1.0, "releases": 200, "batch_size": 256, "ema_decay": 0.9},
    "mnist": {
        "features": "scattering",
        "releases": 1500,
        "batch_size": 1024,
        "lr": 0.1,
        "scaling_bound": 0.3,
        "ema_decay": 0.99,
    },
    "fashion-mnist": {
        "features": "scattering",
        "releases": 2000,
        "batch_size": 2048,
        "lr": 0.1,
        "scaling_bound": 0.3,
        "ema_decay": 0.99,
    },
    "cifar-10": {
        "features": "scattering",
        "model": "scattering-cnn",
        "releases": 1000,
        "batch_size": 2048,
        "lr": 0.15,
        "scaling_bound": 1.0,
        "ema_decay": 0.99,
    },
    "imdb": {
        "features": "bag-of-words",
        "model": "bag-of-words",
        "releases": 300,
        "batch_size": 1024,
        "lr": 2.0,
        "scaling_bound": 0.3,
        "ema_decay": 0.95,
    },
}


def defaults(dataset: str, epsilon: float) -> Mapping[str, Any]:
    """What a data set is trained with unless told otherwise; the user's own data gets what ``digits`` has."""
    settings = _DEFAULTS.get(dataset, _DEFAULTS["digits"])
    # With less noise, held-out records preferred larger steps.
    return {**settings, "lr": 0.2} if dataset == "mnist" and epsilon >= 2 else settings


METHOD = Method(
    name="dpsr-cg",
    summary="selective release by clipping bias, with a public reference",
    proves="epsilon (PLD, RDP), selection included",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=defaults,
    gate="clipping-bias",
)
