"""Activations by the name a user types, the tempered sigmoid included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sluice._base import validate
from sluice._base.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Tempering:
    """The three constants of a tempered sigmoid, ``scale / (1 + exp(-inverse_temperature * x)) - offset``.

    They are s, T and o in the literature. The defaults give tanh exactly.
    """

    scale: float = 2.0
    inverse_temperature: float = 2.0
    offset: float = 1.0

    def __post_init__(self) -> None:
        validate.positive(scale=self.scale, inverse_temperature=self.inverse_temperature)
        validate.finite(offset=self.offset)


class TemperedSigmoid(nn.Module):
    """A sigmoid that is bounded to (-o, s - o) and has the slope s * T / 4 at zero."""

    def __init__(self, tempering: Tempering | None = None) -> None:
        super().__init__()
        self.tempering = tempering or Tempering()

    def forward(self, inputs: Tensor) -> Tensor:
        constants = self.tempering
        return constants.scale * torch.sigmoid(constants.inverse_temperature * inputs) - constants.offset

    def extra_repr(self) -> str:
        constants = self.tempering
        return f"s={constants.scale}, T={constants.inverse_temperature}, o={constants.offset}"


Activation = str | Tempering
"""What users give: "tanh", "relu", "tempered-sigmoid", "tempered-sigmoid:s,T,o" or a ``Tempering``."""

_BY_NAME: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "tempered-sigmoid": TemperedSigmoid,
}


def create_activation(activation: Activation) -> nn.Module:
    """A new module for the activation; every place in a net gets its own."""
    if isinstance(activation, Tempering):
        return TemperedSigmoid(activation)
    name, has_constants, constants = activation.partition(":")
    if has_constants and name == "tempered-sigmoid":
        return TemperedSigmoid(_parse(activation, constants))
    if activation not in _BY_NAME:
        raise InputError(
            f"activation={activation!r} is not allowed: it must be tanh, relu, tempered-sigmoid, or "
            "tempered-sigmoid:s,T,o with three numbers, as in tempered-sigmoid:1.58,3,0.71."
        )
    return _BY_NAME[activation]()


def _parse(activation: str, constants: str) -> Tempering:
    try:
        scale, inverse_temperature, offset = (float(part) for part in constants.split(","))
    except ValueError as error:
        raise InputError(
            f"activation={activation!r} is not allowed: after the colon give three numbers s,T,o, "
            "as in tempered-sigmoid:1.58,3,0.71."
        ) from error
    return Tempering(scale=scale, inverse_temperature=inverse_temperature, offset=offset)
