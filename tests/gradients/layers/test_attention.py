from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, NonFiniteGradientWarning, PerSampleGradients

SIZES = st.sampled_from([0, 1, 7, 64])


def shaken(module: nn.Module) -> nn.Module:
    """Biases start at zero, which would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


class Attention(nn.Module):
    """Takes samples first, whatever the layout of the attention inside."""

    def __init__(self, attention: nn.MultiheadAttention, **options: object) -> None:
        super().__init__()
        self.attention = attention
        self.options = options

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        key = query if key is None else key
        value = key if value is None else value
        inputs = [query, key, value]
        if not self.attention.batch_first:
            swapped = {id(t): t.transpose(0, 1) for t in inputs}
            inputs = [swapped[id(t)] for t in inputs]
        y, weights = self.attention(*inputs, key_padding_mask=padding, **self.options)
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return y.flatten(1) if weights is None else torch.cat([y.flatten(1), weights.flatten(1)], 1)


def padding_for(n: int, keys: int) -> Tensor:
    """Hides the end of each sample, never its first position."""
    return torch.arange(keys) >= torch.randint(1, keys + 1, (n, 1))


@settings(max_examples=40)
@given(
    n=SIZES,
    queries=st.integers(1, 5),
    heads=st.sampled_from([1, 2]),
    batch_first=st.booleans(),
    bias=st.booleans(),
    learned_position=st.booleans(),
    zero_position=st.booleans(),
    need_weights=st.sampled_from(["no", "average", "each head"]),
    masked=st.sampled_from(["no", "boolean", "additive", "causal hint"]),
    padded=st.booleans(),
    strategy=st.sampled_from(["auto", "gram", "explicit"]),
)
def test_self_attention_agrees_with_the_oracle(
    matches,
    reaching_loss,
    n,
    queries,
    heads,
    batch_first,
    bias,
    learned_position,
    zero_position,
    need_weights,
    masked,
    padded,
    strategy,
):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(
        4, heads, bias=bias, add_bias_kv=learned_position, add_zero_attn=zero_position, batch_first=batch_first
    )
    options: dict[str, object] = {
        "need_weights": need_weights != "no",
        "average_attn_weights": need_weights == "average",
    }
    causal = torch.ones(queries, queries).triu(1).bool()
    if masked == "boolean" or (masked == "causal hint" and (learned_position or zero_position)):
        options["attn_mask"] = causal
    elif masked == "causal hint":
        options |= {"attn_mask": causal, "is_causal": True}
    elif masked == "additive":
        options["attn_mask"] = torch.randn(queries, queries)
    batch = {"query": torch.randn(n, queries, 4)}
    if padded:
        batch["padding"] = padding_for(n, queries)
    model = Exact(shaken(attention), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
        matches(model, batch, torch.randn(n), reaching_loss, strategy={"attention": strategy})


class Exact(Attention):
    """Brings an additive mask to the precision of the input, as the oracle runs in another one."""

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, padding: Tensor | None = None
    ) -> Tensor:
        mask = self.options.get("attn_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            self.options["attn_mask"] = mask.to(query.dtype)
        return super().forward(query, key, value, padding)


@settings(max_examples=30)
@given(
    n=SIZES,
    queries=st.integers(1, 4),
    keys=st.integers(1, 4),
    sizes=st.sampled_from([(None, None), (3, 5), (4, 2)]),
    same=st.booleans(),
    batch_first=st.booleans(),
    need_weights=st.booleans(),
    padded=st.booleans(),
)
def test_cross_attention_agrees_with_the_oracle(
    matches, reaching_loss, n, queries, keys, sizes, same, batch_first, need_weights, padded
):
    torch.manual_seed(0)
    key_size, value_size = sizes
    attention = nn.MultiheadAttention(4, 2, kdim=key_size, vdim=value_size, batch_first=batch_first, add_bias_kv=True)
    batch = {"query": torch.randn(n, queries, 4), "key": torch.randn(n, keys, key_size or 4)}
    if not same or key_size is not None:
        batch["value"] = torch.randn(n, keys, value_size or 4)
    if padded:
        batch["padding"] = padding_for(n, keys)
    matches(Attention(shaken(attention), need_weights=need_weights), batch, torch.randn(n), reaching_loss)


def test_query_that_is_also_the_value(matches, reaching_loss):
    """Queries and values share a tensor that the keys do not: rows of one weight that are not neighbours."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = shaken(nn.MultiheadAttention(4, 2, batch_first=True))

        def forward(self, x: Tensor, key: Tensor) -> Tensor:
            return self.attention(x, key, x)[0]

    matches(Odd(), (torch.randn(7, 3, 4), torch.randn(7, 3, 4)), torch.randn(7), reaching_loss)


def test_mask_for_each_sample_and_head(matches, reaching_loss):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = shaken(nn.MultiheadAttention(4, 2, batch_first=True))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, attn_mask=mask.flatten(0, 1))[0]

    matches(Masked(), (torch.randn(7, 3, 4), torch.randn(7, 2, 3, 3)), torch.randn(7), reaching_loss)


def test_called_twice(matches, reaching_loss):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = shaken(nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True))

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x, x, x)[0]
            return self.attention(x, x, x.sin())[0]

    matches(Twice(), torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def test_only_some_parameters_are_trained(matches, reaching_loss):
    attention = shaken(nn.MultiheadAttention(4, 2, batch_first=True))
    attention.in_proj_weight.requires_grad_(False)
    attention.out_proj.bias.requires_grad_(False)
    matches(Attention(attention), torch.randn(7, 3, 4), torch.randn(7), reaching_loss)


def transformer(training: bool, **options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, **options)  # type: ignore[arg-type]
    return shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)).train(training)


class Encoder(nn.Module):
    def __init__(self, encoder: nn.Module, batch_first: bool = True) -> None:
        super().__init__()
        self.encoder = encoder
        self.batch_first = batch_first

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.encoder(x, src_key_padding_mask=padding)
        return y if self.batch_first else y.transpose(0, 1)


@pytest.mark.parametrize("n", [0, 1, 7, 64])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_transformer_encoder_agrees_with_the_oracle(matches, reaching_loss, n, training, padded):
    batch = {"x": torch.randn(n, 5, 8)}
    if padded:
        batch["padding"] = padding_for(n, 5)
    matches(Encoder(transformer(training, batch_first=True)), batch, torch.randn(n), reaching_loss)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options", [{"norm_first": True}, {"batch_first": True, "activation": "gelu"}, {"bias": False}]
)
def test_transformer_options(matches, reaching_loss, training, options):
    model = Encoder(transformer(training, **options), batch_first=options.get("batch_first", False))
    matches(model, torch.randn(7, 5, 8), torch.randn(7), reaching_loss)


def test_nested_tensors_of_the_inference_path_are_avoided(matches, reaching_loss):
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
    encoder = shaken(nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)).eval()
    batch = {"x": torch.randn(7, 5, 8), "padding": padding_for(7, 5)}
    batch["padding"][0] = False
    matches(Encoder(encoder), batch, torch.randn(7), lambda out, y: reaching_loss(out[:, :1], y))


def test_transformer_decoder_agrees_with_the_oracle(matches, reaching_loss):
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerDecoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
            self.decoder = shaken(nn.TransformerDecoder(layer, 1))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.decoder(x, memory)

    matches(Decoder(), (torch.randn(7, 3, 8), torch.randn(7, 5, 8)), torch.randn(7), reaching_loss)


@pytest.mark.parametrize("need_weights", [True, False])
def test_dropout_is_that_of_the_module(need_weights):
    attention = nn.MultiheadAttention(4, 2, dropout=1.0, batch_first=True)
    model = Attention(attention, need_weights=need_weights)
    engine = PerSampleGradients(model, options=GradientOptions(verify=False))
    x, y = torch.randn(5, 3, 4), torch.randn(5)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return output[:, :12].square().sum(1) + output[:, :12].sum(1)

    _, sums = engine.weighted_sum(x, y, loss, torch.ones_like)
    # With everything dropped the output is the last bias alone.
    assert sums["attention.in_proj_weight"].abs().max() == 0
    assert sums["attention.out_proj.bias"].abs().max() > 0
    _, sums = PerSampleGradients(model.eval()).weighted_sum(x, y, loss, torch.ones_like)
    assert sums["attention.in_proj_weight"].abs().max() > 0


def test_broken_sample_leaves_the_others_alone(reaching_loss):
    model = Encoder(transformer(True, batch_first=True))
    x, y = torch.randn(7, 5, 8), torch.randn(7)
    spoilt = x.clone()
    spoilt[2, 1, 1] = float("nan")
    engine = PerSampleGradients(model)
    weights = torch.tensor([1.0, 1, 0, 1, 1, 1, 1])
    norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda _: weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken_norms, broken_sums = engine.weighted_sum(spoilt, y, reaching_loss, torch.ones_like)
    assert [w.category for w in caught] == [NonFiniteGradientWarning]
    others = torch.arange(7) != 2
    torch.testing.assert_close(broken_norms[others], norms[others])
    for name, value in sums.items():
        torch.testing.assert_close(broken_sums[name], value)


def test_batch_on_the_wrong_axis_is_refused(reaching_loss):
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    engine = PerSampleGradients(Wrong(), options=GradientOptions(verify=False))
    with pytest.raises(UnsupportedModuleError, match="batch_first=True"):
        engine.norms(torch.randn(7, 3, 4), torch.randn(7), reaching_loss)
