"""LSTM, GRU and RNN: multi-layer, bidirectional, padded or packed, by `recurrent_cells` and `recurrent_weights`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.contributions import ExplicitContribution, Tap
from sluice.gradients.layers.recurrent_cells import Cell, GRUCell, LSTMCell, PlainCell
from sluice.gradients.layers.recurrent_layer import recurrent_layer
from sluice.gradients.layers.recurrent_memory import Borrowed, Lengths, Memory, Weights
from sluice.gradients.layers.recurrent_weights import FusedContribution, FusedGradients, SortedBatch, pick
from sluice.gradients.native import kernels
from sluice.gradients.positions import LinearContribution, gram_is_cheaper
from sluice.gradients.rules import Call, Rule, register
from sluice.gradients.workspace import Loan


class RecurrentRule(Rule):
    """``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``."""

    replaces_forward = True
    owns_batch_axis = True

    def unsupported(self, module: nn.Module) -> str | None:
        named = dict(module.named_parameters(recurse=False))
        missing = [name for name in module._flat_weights_names if name not in named]  # type: ignore[union-attr]
        return f"{missing[0]} is computed from other tensors" if missing else None

    def record(self, module: Any, call: Call) -> Any:
        source = call.argument(0, "input")
        hx = call.inputs[1] if len(call.inputs) > 1 else call.keywords.get("hx")
        batch = _sorted_batch(module, source, call)
        is_lstm, directions = isinstance(module, nn.LSTM), 2 if module.bidirectional else 1
        h0, c0 = hx if is_lstm and hx is not None else (hx, None)
        x, n = batch.x, batch.x.shape[1]
        states = []
        for layer in range(module.num_layers):
            if layer and module.dropout:
                x = nn.functional.dropout(x, module.dropout, module.training)
            part = slice(layer * directions, (layer + 1) * directions)
            width = (module.proj_size or module.hidden_size) if is_lstm else module.hidden_size
            first = [
                x.new_zeros(directions, n, size) if given is None else pick(given.to(x.dtype), batch.to_sorted, 1)[part]
                for given, size in ((h0, width), (c0, module.hidden_size if is_lstm else 0))
            ]
            x, *final = self._layer(module, layer, x, first, batch, call)
            states.append([pick(s, batch.to_original, 1) for s in final[: 2 if is_lstm else 1]])
        h_n, *c_n = (torch.cat(layers) for layers in zip(*states, strict=True))
        return _as_given(module, source, x), (h_n, c_n[0]) if is_lstm else h_n

    def _layer(
        self, module: Any, layer: int, x: Tensor, first: list[Tensor], batch: SortedBatch, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        cell = _cell(module)
        suffixes = [f"_l{layer}", f"_l{layer}_reverse"][: 2 if module.bidirectional else 1]
        weights = _weights(module, cell, suffixes)
        here = SortedBatch(x=x, lengths=batch.lengths, to_sorted=batch.to_sorted, to_original=batch.to_original)
        borrowed = _borrowed(cell, weights, x, batch.lengths, call, layer, module.mode)
        memory, steps = borrowed.memory, x.shape[0]
        offset, tap = _zero_tap(call, memory.z)
        projection, state_tap = x.new_empty(0), None
        if any(call.trainable(getattr(module, f"weight_hr{suffix}", None)) for suffix in suffixes):
            projection, state_tap = _zero_tap(call, memory.h[:, 1:])
        result = recurrent_layer(cell, weights, borrowed, x, *first, offset, projection)
        for direction, suffix in enumerate(suffixes):
            shared = FusedGradients(tap, direction, borrowed, cell, here, call.options)
            for state in (False, True):
                _contribute(module, suffix, state, shared, tap, steps, call)
            if state_tap is not None:
                _contribute_projection(module, suffix, state_tap, direction, borrowed, here, call)
        return result


def _contribute(
    module: Any, suffix: str, state: bool, shared: FusedGradients, tap: Tap, steps: int, call: Call
) -> None:
    name = "hh" if state else "ih"
    weight, bias = getattr(module, f"weight_{name}{suffix}"), getattr(module, f"bias_{name}{suffix}", None)
    if call.trainable(weight):
        by_gram = call.strategy == "gram" or (call.strategy == "auto" and gram_is_cheaper(steps, *weight.shape))
        call.contribute(
            shared.as_linear(weight, state, "gram") if by_gram else FusedContribution(weight, shared, state=state)
        )
    if bias is not None and call.trainable(bias):
        call.contribute(ExplicitContribution(bias, tap, lambda _: shared.bias_gradients(state)))


def _contribute_projection(
    module: Any, suffix: str, tap: Tap, direction: int, borrowed: Borrowed, batch: SortedBatch, call: Call
) -> None:
    weight = getattr(module, f"weight_hr{suffix}")
    if not call.trainable(weight):
        return
    projected, to_original = borrowed.memory.projected, batch.to_original
    assert projected is not None
    call.contribute(
        LinearContribution(
            weight,
            tap,
            pick(projected[direction].transpose(0, 1), to_original),
            view=lambda d: pick(d[direction].transpose(0, 1), to_original),
            strategy=call.strategy,
            options=call.options,
        ).holding(borrowed)
    )


def _borrowed(cell: Cell, weights: Weights, x: Tensor, lengths: Lengths, call: Call, layer: int, mode: str) -> Borrowed:
    """Buffers for one layer, those of the chunk before where they have the same size. Padding needs new ones."""
    steps, n, features = x.shape
    lstm = isinstance(cell, LSTMCell)
    has_kernel = isinstance(cell, LSTMCell | GRUCell) and weights.projection is None
    compiled = call.options.compiled and has_kernel and kernels.available(x, weights.fused)

    def make() -> Memory:
        return Memory(lengths, weights, n=n, in_features=features, gates=cell.gates, lstm=lstm, compiled=compiled)

    if lengths.each is not None:
        return Borrowed(Loan(make()))

    def fits(kept: Memory) -> bool:
        directions, columns, width = weights.fused.shape
        return kept.z.shape == (directions, steps, n, width) and kept.inputs.shape[3] == columns

    key = (call.name, call.number, layer, mode, compiled, weights.fused.dtype, weights.fused.device)
    return Borrowed(call.workspace.borrow(key, make, fits=fits, size=steps * n))


def _zero_tap(call: Call, like: Tensor) -> tuple[Tensor, Tap]:
    return call.tap(like.new_zeros(()).expand(like.shape))


def _cell(module: Any) -> Cell:
    if isinstance(module, nn.LSTM):
        return LSTMCell()
    return GRUCell() if isinstance(module, nn.GRU) else PlainCell(module.nonlinearity)


def _weights(module: Any, cell: Cell, suffixes: list[str]) -> Weights:
    hidden = module.hidden_size
    first, second = (getattr(module, f"weight_{name}{suffixes[0]}") for name in ("ih", "hh"))
    split, width = first.shape[1], cell.gates * hidden
    fused = first.new_zeros(len(suffixes), split + second.shape[1], width)
    bias = first.new_zeros(len(suffixes), 1, width)
    parts = (("ih", slice(0, split), cell.input_order), ("hh", slice(split, None), cell.state_order))
    for direction, suffix in enumerate(suffixes):
        for name, rows, order in parts:
            weight = getattr(module, f"weight_{name}{suffix}").detach().t()
            shift = getattr(module, f"bias_{name}{suffix}").detach() if module.bias else None
            for theirs, ours in enumerate(order):
                source = slice(theirs * hidden, (theirs + 1) * hidden)
                target = slice(ours * hidden, (ours + 1) * hidden)
                fused[direction, rows, target] = weight[:, source]
                if shift is not None:
                    bias[direction, 0, target] += shift[source]
    projection = None
    if getattr(module, "proj_size", 0):
        projection = torch.stack([getattr(module, f"weight_hr{suffix}").detach().t() for suffix in suffixes])
    return Weights(fused=fused, bias=bias, projection=projection)


def _sorted_batch(module: Any, source: Any, call: Call) -> SortedBatch:
    dtype = module.weight_ih_l0.dtype
    if isinstance(source, PackedSequence):
        # The sorted order itself is wanted, so the sequence is unpacked as if it had been sorted from the start.
        x, lengths = pad_packed_sequence(PackedSequence(source.data, source.batch_sizes))
        each = lengths.to(x.device)
        uniform = bool((lengths == lengths.max()).all()) if len(lengths) else True
        return SortedBatch(
            x=x.to(dtype),
            lengths=Lengths(active=tuple(source.batch_sizes.tolist()), each=None if uniform else each),
            to_sorted=source.sorted_indices,
            to_original=source.unsorted_indices,
        )
    if source.dim() != 3:
        raise UnsupportedModuleError(
            f"{call.name}: its input has {source.dim()} axes, which {type(module).__name__} reads as one sequence "
            "without a batch axis, so per-sample gradients do not exist. Pass a batch of sequences with 3 axes."
        )
    x = source.transpose(0, 1) if module.batch_first else source
    if x.shape[1] != call.batch_size:
        raise UnsupportedModuleError(
            f"{call.name}: it finds {x.shape[1]} sequences in an input of shape {tuple(source.shape)}, but the batch "
            f"has {call.batch_size} samples, so time and samples are mixed up. With batch_first={module.batch_first} "
            f"the samples must be on axis {0 if module.batch_first else 1}; set "
            f"batch_first={not module.batch_first} or transpose the input."
        )
    return SortedBatch(
        x=x.to(dtype), lengths=Lengths(active=(x.shape[1],) * x.shape[0], each=None), to_sorted=None, to_original=None
    )


def _as_given(module: Any, source: Any, y: Tensor) -> Any:
    """The output in the layout of the input."""
    if not isinstance(source, PackedSequence):
        return y.transpose(0, 1) if module.batch_first else y
    running = torch.arange(y.shape[1], device=y.device) < source.batch_sizes.to(y.device).unsqueeze(1)
    return PackedSequence(y[running], source.batch_sizes, source.sorted_indices, source.unsorted_indices)


for _kind in (nn.LSTM, nn.GRU, nn.RNN):
    register(_kind, RecurrentRule())
