"""A published model as a file: its weights, and what is needed to make it again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from safetensors.torch import save
from torch import nn

from sluice.data import Examples, WeightedBagExamples

MODEL = "model"
"""What `model.safetensors` says beside its weights, under one key as JSON: several would stand in random order."""


def encoded_model(model: nn.Module, train: Examples, classes: Sequence[str]) -> bytes:
    """The weights as safetensors; of the records, shape and classes alone, which are public."""
    described: dict[str, Any] = {"classes": classes, "input_shape": train.input_shape}
    if isinstance(train, WeightedBagExamples):
        described["function_words"] = train.function_words
    return save(
        {name: value.detach().cpu().contiguous().clone() for name, value in model.state_dict().items()},
        metadata={MODEL: json.dumps(described)},
    )


__all__ = ["MODEL", "encoded_model"]
