"""The settings with which the systems of the DPSR-CG paper's table were published, by data set and epsilon.

They come from the papers and from the published code of DPSUR, whose runs the table repeats. Learning rates go with
a clipping bound of 0.1. Noise is listed where a claim is reproduced with it; runs with a proof calibrate their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLIP = 0.1
EPSILONS = (1.0, 2.0, 3.0, 4.0)

_ROWS: dict[str, dict[str, Any]] = {
    "mnist": {"lr": 2.0, "batch_size": 1024},
    "fashion-mnist": {"lr": 4.0, "batch_size": 2048},
    "cifar-10": {"lr": 4.0, "batch_size": 8192},
    "imdb": {"lr": 0.02, "batch_size": 1024, "optimizer": "adam"},
}
_SMALL: dict[str, Any] = {
    "features": "plain",
    "model": "linear",
    "lr": 1.0,
    "batch_size": 256,
    "releases": 200,
    "max_grad_norm": 1.0,
    "scaling": "clip",
}
# Nets and coefficients have larger gradients than a linear model of pixels: chosen on held-out records of digits.
SMALL_STEPS = {"lr": 0.1}

NOISE: dict[str, tuple[float, ...]] = {
    "mnist": (2.0, 1.5, 1.35, 1.35),
    "fashion-mnist": (4.0, 2.15, 2.15, 2.15),
    "cifar-10": (11.0, 9.0, 5.67, 5.67),
    "imdb": (2.0, 1.8, 1.35, 1.23),
}
"""DPSUR's noise multipliers, which its baselines share."""


def nearest(epsilon: float, values: tuple[Any, ...]) -> Any:
    """The entry for the published epsilon that lies nearest; there are three or four of them, from epsilon 1 on."""
    positions = range(len(values))
    return values[min(positions, key=lambda position: abs(EPSILONS[position] - epsilon))]


def small_settings() -> dict[str, Any]:
    """A linear model on plain records: for small data sets and the user's own, under methods that ask for no net."""
    return dict(_SMALL)


def pixel_settings(
    dataset: str, epsilon: float, *, activation: str, releases: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """A net on the plain records, as DPSGD and DPSGD-TS are run."""
    if dataset not in _ROWS:
        return {**_SMALL, **SMALL_STEPS, "model": "mlp", "activation": activation}
    return {
        **_ROWS[dataset],
        "features": "plain",
        "model": "bilstm" if dataset == "imdb" else "pixel-cnn",
        "activation": activation,
        "max_grad_norm": CLIP,
        "scaling": "clip",
        "releases": nearest(epsilon, releases[dataset]),
    }


def scattering_settings(dataset: str, epsilon: float, *, releases: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """A small net on scattering coefficients (texts: the net on words), as DPSGD-HF, DPSUR and DPIS are run."""
    if dataset not in _ROWS:
        return small_settings()
    settings = pixel_settings(dataset, epsilon, activation="tanh", releases=releases)
    if dataset != "imdb":
        settings |= {"features": "scattering", "model": "scattering-cnn"}
    return settings
