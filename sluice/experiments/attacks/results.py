"""What is written of an attack: a small JSON file, a ROC plot, and the lines of a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sluice._base import codec
from sluice._base.files import write_atomically
from sluice.attacks.roc_plot import roc_plot
from sluice.experiments.attacks.carry_out import AttackScores
from sluice.experiments.attacks.targets import Target

STATUS = "an attack shows what is leaked at least: it is no evidence of privacy"
COLUMNS = ("attack", "AUC", "accuracy", "best accuracy", "TPR at 0.1 % FPR", "TPR at 1 % FPR")


def described(target: Target, attacks: Sequence[AttackScores], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The result of attacks on one target. It depends on who is a member: for private data, private."""
    return {
        "status": STATUS,
        "dataset": target.settings.dataset,
        "method": target.settings.method,
        "proved_epsilon": None if target.epsilon is None else codec.encode_float(target.epsilon),
        "delta": target.settings.delta,
        "members": len(target.members),
        "non_members": len(target.non_members),
        "train_accuracy": target.accuracy_on(target.members),
        "test_accuracy": target.accuracy_on(target.non_members),
        **extra,
        "attacks": {attack.name: asdict(attack.evaluation) for attack in attacks},
        "settings": target.settings.to_dict(),
    }


def cells_of(name: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of a table, from the result of one attack."""
    own = found["balanced_accuracy"]
    rates = {rate["asked"]: rate for rate in found["rates"]}
    return (
        name,
        f"{found['auc']:.3f}",
        "" if own is None else f"{own:.3f}",
        f"{found['best_balanced_accuracy']:.3f}",
        *(rate_text(rates.get(asked), found["non_members"]) for asked in (0.001, 0.01)),
    )


def rate_text(rate: Mapping[str, Any] | None, non_members: int) -> str:
    """A true positive rate with its interval, or that there are too few non-members for one."""
    if rate is None:
        return f"too few ({non_members})"
    return f"{100 * rate['rate']:.2f} % ({100 * rate['low']:.2f} to {100 * rate['high']:.2f})"


def write_result(path: Path, result: Mapping[str, Any], *, public: bool) -> None:
    content = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_atomically(path, content.encode("utf-8"), public=public)


def write_plot(path: Path, target: Target, attacks: Sequence[AttackScores], *, public: bool) -> None:
    """ROC curves beside the limit that is proved for the target, if any."""
    curves = {attack.name: attack.curve for attack in attacks if attack.name != "gap"}
    title = f"{target.settings.dataset}, {target.settings.method}" + ("" if public else " (PRIVATE: do not publish)")
    content = roc_plot(curves, epsilon=target.epsilon, delta=target.settings.delta, title=title)
    write_atomically(path, content, public=public)


__all__ = ["COLUMNS", "STATUS", "cells_of", "described", "rate_text", "write_plot", "write_result"]
