"""Opacus's helper of the same name."""

from __future__ import annotations

from typing import Any, NoReturn

from sluice.compat.opacus.refusals import refuse


def make_functional(*arguments: Any, **keywords: Any) -> NoReturn:
    refuse(
        "make_functional",
        'per-sample gradients of your own (grad_sample_mode="no_op") cannot be checked. Leave grad_sample_mode out and call '
        "model, loss.backward() and optimizer.step(); any module works.",
    )
