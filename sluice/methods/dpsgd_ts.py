"""DPSGD-TS: DPSGD on nets whose activations are tempered sigmoids.

Source: Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI 2021.

Algorithm: that of DPSGD. Activations are s / (1 + exp(-T x)) - o, which are bounded, so that gradients explode less and
lose less to clipping. s = 2, T = 2, o = 1 (the default here) is tanh; choose others with
``--activation tempered-sigmoid:s,T,o``.

Accounting: sound, that of DPSGD. The activation is a public choice and costs nothing, as long as it was not chosen by
looking at the private records.
"""

from __future__ import annotations

from sluice.mechanism import Mechanism
from sluice.methods.base import Method
from sluice.methods.dpsgd import RELEASES
from sluice.methods.reference import pixel_settings
from sluice.planning import selective_mechanism

METHOD = Method(
    name="dpsgd-ts",
    summary="DPSGD on nets with tempered sigmoids (--activation tempered-sigmoid:s,T,o)",
    proves="epsilon (PLD, RDP)",
    promise=Mechanism,
    plan=selective_mechanism,
    defaults=lambda dataset, epsilon: pixel_settings(
        dataset, epsilon, activation="tempered-sigmoid", releases=RELEASES
    ),
)
