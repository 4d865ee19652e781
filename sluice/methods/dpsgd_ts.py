"""DPSGD-TS: DPSGD on nets whose activations are tempered sigmoids.

Source: Papernot et al., "Tempered Sigmoid Activations for Deep Learning with Differential Privacy", AAAI 2021.

Algorithm: that of DPSGD. Activations are s / (1 + exp(-T x)) - o, which are bounded, so that gradients explode less and
lose less to clipping. s = 2, T = 2, o = 1 (the default here) is tanh; choose others with
``--activation tempered-sigmoid:s,T,o``. Small data sets and the user's own get a net with one hidden layer. Models
without activations are refused, and so are other activations: that would be DPSGD.

Accounting: sound, that of DPSGD. The activation is a public choice and costs nothing, as long as it was not chosen by
looking at the private records.
"""

from __future__ import annotations

from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import Method, RunSettings
from sluice.methods.dpsgd import RELEASES
from sluice.methods.reference import pixel_settings
from sluice.methods.selective import selective_mechanism


def _refusal(settings: RunSettings) -> str | None:
    used = settings.used_activation
    if used is None:
        return (
            f"model={settings.model!r} is not allowed for method='dpsgd-ts', which is about activations: it has none. Use "
            "a net, such as mlp, or method='dpsgd'."
        )
    if used != "tanh" and not str(used).startswith("tempered-sigmoid"):
        return (
            f"activation={used!r} is not allowed for method='dpsgd-ts': it must be tempered-sigmoid[:s,T,o], or tanh, "
            "which is one. For others use method='dpsgd'."
        )
    return None


METHOD = Method(
    name="dpsgd-ts",
    summary="DPSGD on nets with tempered sigmoids (--activation tempered-sigmoid:s,T,o)",
    proves="epsilon (PLD, RDP)",
    mechanism=SelectiveRelease,
    plan=selective_mechanism,
    defaults=lambda dataset, epsilon: pixel_settings(
        dataset, epsilon, activation="tempered-sigmoid", releases=RELEASES
    ),
    refuses=_refusal,
)
