"""DPSGD-HF: DPSGD on handcrafted features.

Source: Tramer and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021.

Algorithm: that of DPSGD, on a small net that sees scattering coefficients (two orders, eight angles, scale 2) in place
of pixels, normalised in groups of channels within each image. Small sets of images and the user's own get a linear
model of them. Data without images is refused, except imdb, where the DPSR-CG paper's table has a row for it: there it is
DPSGD on a net with tanh.

Accounting: sound, that of DPSGD. A record's features are a function of that record alone, so they cost nothing. (The
original's other normalisation, by private means over all records, is a release of its own; it is not used here.)
"""

from __future__ import annotations

from typing import Any

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method, RunSettings
from sluice.methods.dpsgd import RELEASES as PIXEL_RELEASES
from sluice.methods.reference import SMALL_STEPS, scattering_settings
from sluice.methods.selective import selective_mechanism

RELEASES = {
    "mnist": (331, 1032, 1796),
    "fashion-mnist": (785, 716, 1520),
    "cifar-10": (132, 548, 481),
    "imdb": PIXEL_RELEASES["imdb"],
}
"""Releases at epsilon 1, 2, 3. Texts have no scattering coefficients: there it is DPSGD with tanh."""


def _defaults(dataset: str, epsilon: float) -> dict[str, Any]:
    settings = scattering_settings(dataset, epsilon, releases=RELEASES)
    return settings if dataset in RELEASES else settings | SMALL_STEPS | {"features": "scattering"}


def _refusal(settings: RunSettings) -> str | None:
    if settings.features == "scattering" or settings.dataset == "imdb":
        return None
    return (
        f"features={settings.features!r} is not allowed for method='dpsgd-hf', which is DPSGD on scattering coefficients. "
        "Use features='scattering', or method='dpsgd'."
    )


METHOD = Method(
    name="dpsgd-hf",
    summary="DPSGD on scattering coefficients of images (imdb: on words, with tanh)",
    proves="epsilon (PLD, RDP)",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=_defaults,
    refuses=_refusal,
)
