"""Why a cell of ours is below the printed one, as far as it is known."""

from __future__ import annotations

from collections.abc import Mapping

_IMAGES = ("mnist", "fashion-mnist", "cifar-10")
_NOT_KNOWN = "Not known."
_ONE_RUN = (
    "Not known. Batch, rate and number of updates are those behind the printed number, which is DPSUR's; some of its "
    "cells are the last accuracy of one run."
)
_AS_CODED = (
    "The authors' code is not the printed algorithm: gradients keep a length of up to S (8, 6, 3 by data set) while the "
    "noise is scaled to a length of 1, so that what they release costs many times the epsilon of the heading "
    "(docs/results.md). It also keeps the best test accuracy of a run; ours is read once, at the end."
)

#: By method and data set, "" for any other data set.
_REASONS: dict[tuple[str, str], str] = {
    **{(method, dataset): _AS_CODED for method in ("dpsr-cg", "dpsr-cg-paper") for dataset in _IMAGES},
    **{
        (
            method,
            "imdb",
        ): "Not known. The authors' code keeps the best test accuracy of a run; ours is read once, at the end."
        for method in ("dpsr-cg", "dpsr-cg-paper")
    },
    ("dpsgd", ""): _ONE_RUN,
    ("dpsgd-ts", ""): _ONE_RUN,
    ("dpsgd-hf", ""): _ONE_RUN,
    **{
        (
            "dpsgd-hf",
            dataset,
        ): "The printed run normalises features by noisy statistics of all records; ours within each image. "
        "Whether that is all of it is not known."
        for dataset in ("mnist", "cifar-10")
    },
    (
        "dpsur",
        "",
    ): "DPSUR's own accounting does not charge for the selection of updates, and the paper's stricter one is not "
    "proved either.",
    (
        "dpagd",
        "",
    ): "The code behind the printed number is not DPAGD: it applies its trial steps one after another and never "
    "takes them back, and accounts for one-sided exponential noise as if it were Gaussian. A real line search made "
    "little way on its net: 78 % of MNIST's held-out records after 40 measurements, so ours trains a linear model.",
    (
        "dpis",
        "",
    ): "DPIS has no public code: how its authors share the noise, and how often they refresh the normaliser, is not "
    "known here.",
    (
        "matrix",
        "",
    ): "The printed run estimates delta from 200,000 samples without a margin for chance, and leaves its noisy "
    "normalisation of features out of the account.",
    ("non-private", ""): "One run of the paper's net, with settings that held-out records prefer.",
}


def reason_below(dataset: str, method: str, *, budget_is_proved: bool) -> str:
    """Why ours may be below the printed number. It explains nothing where ours is above."""
    if method == "dpsur" and not budget_is_proved:
        return "Not known. The printed row is the paper's own run of DPSUR, under another accounting than its authors'."
    reason = _reason(_REASONS, dataset, method)
    if budget_is_proved and method in ("dpsur", "dpagd"):
        reason += " Ours holds the heading's epsilon as proved, which takes more noise."
    return reason


def _reason(reasons: Mapping[tuple[str, str], str], dataset: str, method: str) -> str:
    return reasons.get((method, dataset)) or reasons.get((method, "")) or _NOT_KNOWN
