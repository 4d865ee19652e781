"""Models as they are found in the wild: no kernel was written for them alone.

All are small enough for a laptop and keep the shape of what they stand for: bare parameters, tied weights, grouped
convolutions, frozen layers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sluice.experiments.bench.scenarios import Scenario

_WORDS, _VOCABULARY = 80, 20_000
_TOKENS, _CONTEXT = 4_000, 64
_STEPS = 256
_IMAGE = (3, 32, 32)


def mlp() -> nn.Module:
    """784-1024-1024-10."""
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


class BagOfWords(nn.Module):
    """The mean of the words' vectors, as one ``nn.EmbeddingBag``, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(_VOCABULARY, 64, mode="mean")
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(x))
        return logits


class MeanPooledEmbedding(nn.Module):
    """The same mean as an ordinary ``nn.Embedding`` and a reduction."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, 64)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(x).mean(1))
        return logits


class Attention(nn.Module):
    """Multi-head self-attention built from two linear layers, as vision and language libraries write it."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return out


class Block(nn.Module):
    """A transformer block, normalised before each part."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class VisionTransformer(nn.Module):
    """Width 192, six layers, patches of 4 x 4 pixels.

    Args:
        bare: with a class token and position embeddings that are parameters of the model itself.
    """

    def __init__(self, *, bare: bool) -> None:
        super().__init__()
        width, patches = 192, 64
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width)) if bare else None
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, width)) if bare else None
        self.blocks = nn.Sequential(*(Block(width, 3) for _ in range(6)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        if self.class_token is not None and self.positions is not None:
            x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
            x = self.norm(self.blocks(x))[:, 0]
        else:
            x = self.norm(self.blocks(x)).mean(1)
        logits: Tensor = self.head(x)
        return logits


class LanguageModel(nn.Module):
    """Four causal layers of width 128 that predict each next token; the output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        width = 128
        self.tokens = nn.Embedding(_TOKENS, width)
        self.places = nn.Embedding(_CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, 4, causal=True) for _ in range(4)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1))
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + places)))
        return logits.transpose(1, 2)


class DepthwiseSeparable(nn.Sequential):
    """Six blocks of a depthwise and a pointwise convolution, in the manner of MobileNet, with GroupNorm."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()]
        for inputs, outputs, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)):
            layers += [
                nn.Conv2d(inputs, inputs, 3, stride=stride, padding=1, groups=inputs, bias=False),
                nn.GroupNorm(8, inputs),
                nn.ReLU(),
                nn.Conv2d(inputs, outputs, 1, bias=False),
                nn.GroupNorm(8, outputs),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class LowRankLinear(nn.Module):
    """A frozen linear layer with a trained update of rank 8, its matrices used as parameters (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(0.01 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.a), self.b)
        return out


def low_rank_adapters() -> nn.Module:
    """The vision transformer, frozen but for its head, with LoRA on the attention's linear layers."""
    model = VisionTransformer(bare=False).requires_grad_(False)
    for block in model.blocks:
        block.attention.qkv = LowRankLinear(block.attention.qkv)  # type: ignore[union-attr, arg-type]
        block.attention.out = LowRankLinear(block.attention.out)  # type: ignore[union-attr, arg-type]
    model.head.requires_grad_(True)
    return model


def _convolution(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(16, outputs), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class Residual(nn.Module):
    """A sum of its input and what its layers make of it."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shortcut(x) + self.layers(x)
        return out


def resnet9() -> nn.Module:
    """ResNet-9 with GroupNorm and half the usual width."""
    return nn.Sequential(
        _convolution(3, 32),
        _convolution(32, 64, pool=True),
        Residual(_convolution(64, 64), _convolution(64, 64)),
        _convolution(64, 128, pool=True),
        _convolution(128, 256, pool=True),
        Residual(_convolution(256, 256), _convolution(256, 256)),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def _wide_block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    def branch(channels: int, step: int) -> list[nn.Module]:
        return [
            nn.GroupNorm(16, channels),
            nn.ReLU(),
            nn.Conv2d(channels, outputs, 3, stride=step, padding=1, bias=False),
        ]

    shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
    return [
        Residual(*branch(inputs, stride), *branch(outputs, 1), shortcut=shortcut),
        Residual(*branch(outputs, 1), *branch(outputs, 1)),
    ]


def wide_resnet16_4() -> nn.Module:
    """WRN-16-4 with GroupNorm."""
    blocks = [
        part
        for inputs, outputs, stride in ((16, 64, 1), (64, 128, 2), (128, 256, 2))
        for part in _wide_block(inputs, outputs, stride)
    ]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        *blocks,
        nn.GroupNorm(16, 256),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def conv1d() -> nn.Module:
    """Four convolutions over a signal of 256 steps."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((8, 64), (64, 128), (128, 128), (128, 256)):
        layers += [nn.Conv1d(inputs, outputs, 5, padding=2), nn.GroupNorm(8, outputs), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(256, 10))


class GatedRecurrent(nn.Module):
    """A GRU of two layers over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_TOKENS, 64)
        self.gru = nn.GRU(64, 128, num_layers=2, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.words(x))[0][:, -1])
        return logits


SCENARIOS: dict[str, Scenario] = {
    "mlp": Scenario(model=mlp, shape=(784,), classes=10),
    "bag-of-words": Scenario(model=BagOfWords, shape=(_WORDS,), classes=2, vocabulary=_VOCABULARY),
    "mean-embedding": Scenario(model=MeanPooledEmbedding, shape=(_WORDS,), classes=2, vocabulary=_VOCABULARY),
    "vit-class-token": Scenario(model=partial(VisionTransformer, bare=True), shape=_IMAGE, classes=10),
    "vit": Scenario(model=partial(VisionTransformer, bare=False), shape=_IMAGE, classes=10),
    "gpt-tied": Scenario(
        model=LanguageModel, shape=(_CONTEXT,), classes=_TOKENS, vocabulary=_TOKENS, targets=(_CONTEXT,)
    ),
    "depthwise": Scenario(model=DepthwiseSeparable, shape=_IMAGE, classes=10),
    "lora": Scenario(model=low_rank_adapters, shape=_IMAGE, classes=10),
    "resnet9": Scenario(model=resnet9, shape=_IMAGE, classes=10),
    "wrn-16-4": Scenario(model=wide_resnet16_4, shape=_IMAGE, classes=10),
    "conv1d": Scenario(model=conv1d, shape=(8, _STEPS), classes=10),
    "gru": Scenario(model=GatedRecurrent, shape=(_WORDS,), classes=2, vocabulary=_TOKENS),
}
