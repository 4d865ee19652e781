"""DPSGD-HF: DPSGD on handcrafted features.

Source: Tramer and Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", ICLR 2021.

Algorithm: that of DPSGD, on a small net that sees scattering coefficients (two orders, eight angles, scale 2) in place
of pixels, normalised in groups of channels within each image.

Accounting: sound, that of DPSGD. A record's features are a function of that record alone, so they cost nothing. (The
original's other normalisation, by private means over all records, is a release of its own; it is not used here.)
"""

from __future__ import annotations

from sluice.mechanism import Mechanism
from sluice.methods.base import Method
from sluice.methods.dpsgd import RELEASES as PIXEL_RELEASES
from sluice.methods.reference import scattering_settings
from sluice.planning import selective_mechanism

RELEASES = {
    "mnist": (331, 1032, 1796),
    "fashion-mnist": (785, 716, 1520),
    "cifar-10": (132, 548, 481),
    "imdb": PIXEL_RELEASES["imdb"],
}
"""Releases at epsilon 1, 2, 3. Texts have no scattering coefficients: there it is DPSGD with tanh."""

METHOD = Method(
    name="dpsgd-hf",
    summary="DPSGD on scattering coefficients of images",
    proves="epsilon (PLD, RDP)",
    promise=Mechanism,
    plan=selective_mechanism,
    defaults=lambda dataset, epsilon: scattering_settings(dataset, epsilon, releases=RELEASES),
)
