"""nn.MultiheadAttention, taken apart into its linear maps.

The module's own forward is replaced by the same arithmetic in plain operations, so that each projection is seen as a
linear map over positions. Transformer layers need no rule of their own: they call this module and others with rules,
once torch's fused inference path is switched off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients.contributions import ExplicitContribution
from sluice.gradients.positions import LinearContribution
from sluice.gradients.rules import Call, Rule, register


class AttentionRule(Rule):
    replaces_forward = True
    owns_batch_axis = True

    def record(self, module: nn.MultiheadAttention, call: Call) -> tuple[Tensor, Tensor | None]:
        given = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
        _check(module, given, call)
        need_weights = _optional(call, 4, "need_weights", True)
        causal = _optional(call, 7, "is_causal", False)
        key_padding = _additive(_optional(call, 3, "key_padding_mask", None), given[0].dtype, "key_padding_mask")
        mask = _optional(call, 5, "attn_mask", None)
        if causal and mask is None:
            raise InputError(f"{call.name}: is_causal=True is a hint about attn_mask, which must be given as well.")
        if causal and key_padding is None and not need_weights:
            mask = None
        else:
            causal = False
            mask = _additive(mask, given[0].dtype, "attn_mask")

        q, k, v = _projections(module, given, call)
        samples, heads = call.batch_size, module.num_heads
        if module.bias_k is not None and module.bias_v is not None:
            k = torch.cat([k, _for_each_sample(module.bias_k, call)], 1)
            v = torch.cat([v, _for_each_sample(module.bias_v, call)], 1)
            mask, key_padding = _one_more(mask), _one_more(key_padding)
        q, k, v = (t.unflatten(2, (heads, module.head_dim)).transpose(1, 2) for t in (q, k, v))
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask, key_padding = _one_more(mask), _one_more(key_padding)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (samples, heads))
        if key_padding is not None:
            padding = key_padding.view(samples, 1, 1, -1)
            mask = padding if mask is None else mask + padding

        dropout = module.dropout if module.training else 0.0
        averages: Tensor | None = None
        if need_weights:
            attended, averages = _explicit(q, k, v, mask, dropout)
            averages = averages.mean(1) if _optional(call, 6, "average_attn_weights", True) else averages
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        joined = attended.transpose(1, 2).flatten(2)
        output = _linear(module.out_proj.weight, module.out_proj.bias, joined, call)
        return output if module.batch_first else output.transpose(0, 1), averages


def _check(module: nn.MultiheadAttention, given: list[Tensor], call: Call) -> None:
    axis = 0 if module.batch_first else 1
    for tensor in given:
        if tensor.is_nested or tensor.dim() != 3 or tensor.shape[axis] != call.batch_size:
            shape = "nested" if tensor.is_nested else tuple(tensor.shape)
            raise UnsupportedModuleError(
                f"Module '{call.name}' (MultiheadAttention, batch_first={module.batch_first}) got an input of shape "
                f"{shape} in a batch of {call.batch_size} samples; it takes 3 axes, samples on axis {axis}. Set "
                f"batch_first={not module.batch_first} or transpose the input, or samples attend to each other."
            )


def _explicit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return weights @ v, weights


def _projections(module: nn.MultiheadAttention, given: list[Tensor], call: Call) -> list[Tensor]:
    """Queries, keys and values ``[n, positions, embed]``; inputs that are the same tensor share one product."""
    size, bias = module.embed_dim, module.in_proj_bias
    by_sample = {id(t): t if module.batch_first else t.transpose(0, 1) for t in given}
    if not module._qkv_same_embed_dim:
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return [
            _linear(weight, bias, by_sample[id(t)], call, bias_rows=slice(i * size, (i + 1) * size))
            for i, (weight, t) in enumerate(zip(separate, given, strict=True))
        ]
    result: list[Tensor] = []
    while len(result) < 3:
        first = len(result)
        count = 1
        while first + count < 3 and given[first + count] is given[first]:
            count += 1
        rows = slice(first * size, (first + count) * size)
        z = _linear(module.in_proj_weight, bias, by_sample[id(given[first])], call, rows=rows, bias_rows=rows)
        result.extend(z.chunk(count, -1))
    return result


def _linear(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    call: Call,
    *,
    rows: slice | None = None,
    bias_rows: slice | None = None,
) -> Tensor:
    """A linear map over positions by some rows of a weight, and what it contributes."""
    used, shift = weight if rows is None else weight[rows], bias
    if bias is not None and bias_rows is not None:
        shift = bias[bias_rows]
    z = F.linear(x, used, shift)
    if not call.trainable(weight) and not call.trainable(bias):
        return z
    z, tap = call.tap(z)
    if call.trainable(weight):
        call.contribute(
            LinearContribution(
                weight,
                tap,
                call.save(x),
                rows=_unless_all(rows, weight),
                strategy=call.strategy,
                options=call.options,
            )
        )
    if bias is not None and call.trainable(bias):
        call.contribute(ExplicitContribution(bias, tap, _over_positions, rows=_unless_all(bias_rows, bias)))
    return z


def _unless_all(rows: slice | None, parameter: Tensor) -> slice | None:
    return None if rows is not None and (rows.start, rows.stop) == (0, parameter.shape[0]) else rows


def _over_positions(gradient: Tensor) -> Tensor:
    return gradient.sum(1)


def _for_each_sample(parameter: Tensor, call: Call) -> Tensor:
    """A learned position ``[1, 1, embed]`` as a part of every sample, ``[n, 1, embed]``."""
    expanded = parameter.detach().expand(call.batch_size, 1, -1)
    if not call.trainable(parameter):
        return expanded
    z, tap = call.tap(expanded)
    call.contribute(ExplicitContribution(parameter, tap, lambda gradient: gradient.unsqueeze(1)))
    return z


def _one_more(mask: Tensor | None) -> Tensor | None:
    """Nothing hides the position that was added at the end."""
    return None if mask is None else F.pad(mask, (0, 1))


def _additive(mask: Tensor | None, dtype: torch.dtype, name: str) -> Tensor | None:
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise InputError(f"{name} of type {mask.dtype} is not allowed: it must be boolean or floating point.")
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -torch.inf)


def _optional(call: Call, position: int, keyword: str, default: Any) -> Any:
    return call.inputs[position] if len(call.inputs) > position else call.keywords.get(keyword, default)


register(nn.MultiheadAttention, AttentionRule())
