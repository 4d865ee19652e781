"""A small convolutional net that learns to tell classes of synthetic images apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

CELLS = 3
"""The map has so many cells in each direction, whatever the size of the image."""

BATCH = 256
_PEAK_RATE = 3e-3
_WARM_UP = 100
_WEIGHT_DECAY = 1e-3
_SMOOTHING = 0.05
_NORM_FLOOR = 1e-5


class SyntheticClasses(Protocol):
    """Classes by number, of which any number of images can be drawn."""

    @property
    def classes(self) -> int: ...

    def draw(self, labels: Tensor, generator: Generator) -> Tensor: ...


class ConvolutionalNet(nn.Module):
    """Three convolutions, a map of 3x3 cells, an embedding, and scores of classes."""

    def __init__(self, *, inputs: int = 1, channels: int, classes: int) -> None:
        super().__init__()
        first, second, third, embedding = channels, 2 * channels, 4 * channels, 8 * channels
        self.first = nn.Conv2d(inputs, first, 5, stride=2, padding=2, bias=False)
        self.second = nn.Conv2d(first, second, 3, padding=1, bias=False)
        self.third = nn.Conv2d(second, third, 3, padding=1, bias=False)
        self.embedding = nn.Linear(third * CELLS**2, embedding, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(first), nn.BatchNorm2d(second)
        self.third_norm, self.embedding_norm = nn.BatchNorm2d(third), nn.BatchNorm1d(embedding)
        self.scores = nn.Linear(embedding, classes)

    def forward(self, images: Tensor) -> Tensor:
        values = functional.relu(self.first_norm(self.first(images)))
        values = functional.max_pool2d(functional.relu(self.second_norm(self.second(values))), 2)
        values = functional.relu(self.third_norm(self.third(values)))
        cells = functional.adaptive_max_pool2d(values, CELLS).flatten(1)
        scores: Tensor = self.scores(functional.relu(self.embedding_norm(self.embedding(cells))))
        return scores

    def folded(self) -> dict[str, Tensor]:
        """Weights and biases of the four layers below the scores, with the statistics of the norms multiplied in."""
        folded = {}
        for name in ("first", "second", "third", "embedding"):
            weight = _double(self, f"{name}.weight")
            norm = {part: _double(self, f"{name}_norm.{part}") for part in ("weight", "bias")}
            mean, variance = (_double(self, f"{name}_norm.running_{part}") for part in ("mean", "var"))
            factor = norm["weight"] / (variance + _NORM_FLOOR).sqrt()
            folded[f"{name}.weight"] = (weight * factor.view(-1, *[1] * (weight.dim() - 1))).float()
            folded[f"{name}.bias"] = (norm["bias"] - mean * factor).float()
        return folded


def _double(net: nn.Module, name: str) -> Tensor:
    value: Tensor = net.state_dict()[name]
    return value.double()


def pretrained(
    source: SyntheticClasses, *, inputs: int = 1, channels: int, steps: int, seed: int, advance: Callable[[int], None]
) -> dict[str, Tensor]:
    """The folded weights of a net after so many steps on images with ``inputs`` channels drawn from ``source``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ConvolutionalNet(inputs=inputs, channels=channels, classes=source.classes)
    generator = torch.Generator().manual_seed(seed)
    # Where the processor multiplies bfloat16 itself, this halves the time. The weights are float32 in any case.
    short_numbers = torch.cpu._is_avx512_bf16_supported()
    optimizer = torch.optim.AdamW(net.parameters(), lr=_PEAK_RATE, weight_decay=_WEIGHT_DECAY)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, steps)
        labels = torch.randint(source.classes, (BATCH,), generator=generator)
        images = source.draw(labels, generator).contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():
            with torch.autocast("cpu", torch.bfloat16, enabled=short_numbers):
                scores = net(images)
            loss = functional.cross_entropy(scores.float(), labels, label_smoothing=_SMOOTHING)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
        optimizer.step()
        advance(1)
    return net.folded()


def _learning_rate(step: int, steps: int) -> float:
    """Up in a straight line at first, then down to 0 along a cosine."""
    return _PEAK_RATE * min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


__all__ = ["BATCH", "CELLS", "ConvolutionalNet", "SyntheticClasses", "pretrained"]
