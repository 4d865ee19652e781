from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, NonFiniteGradientWarning, PerSampleGradients
from sluice.gradients.capture import Recording
from sluice.gradients.layers.recurrent import RecurrentRule
from sluice.gradients.rules import Call
from sluice.gradients.workspace import Workspace

KINDS = ["LSTM", "GRU", "tanh", "relu"]


def make(kind: str, inputs: int, hidden: int, **settings_: object) -> nn.Module:
    if kind in ("tanh", "relu"):
        return nn.RNN(inputs, hidden, nonlinearity=kind, **settings_)  # type: ignore[arg-type]
    return getattr(nn, kind)(inputs, hidden, **settings_)


def tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, PackedSequence):
        return [result.data]
    return [tensor for part in result for tensor in tensors(part)]  # type: ignore[attr-defined]


def recorded(module: nn.Module, *inputs: object, n: int) -> tuple[object, Recording]:
    recording = Recording(batch_size=n, parameters=frozenset(module.parameters()))
    call = Call(
        name="rnn",
        inputs=inputs,
        keywords={},
        output=None,
        batch_size=n,
        batch_axes=(0,),
        options=GradientOptions(),
        recording=recording,
        number=0,
        workspace=Workspace(),
    )
    return RecurrentRule().record(module, call), recording


class Reader(nn.Module):
    """Uses everything that a recurrent module returns."""

    def __init__(self, rnn: nn.Module, packed: bool = False) -> None:
        super().__init__()
        self.rnn = rnn
        self.packed = packed

    def forward(self, x: Tensor, lengths: Tensor | None = None, h0: Tensor | None = None) -> Tensor:
        first = None if h0 is None else h0.transpose(0, 1).contiguous()
        if first is not None and isinstance(self.rnn, nn.LSTM):
            first = (first, first.flip(2))
        batch_first = self.rnn.batch_first
        if not batch_first:
            x = x.transpose(0, 1)
        if lengths is None:
            y, final = self.rnn(x, first)
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
            y, final = self.rnn(packed, first)
            y, _ = pad_packed_sequence(y, batch_first=batch_first, total_length=x.shape[1 if batch_first else 0])
        y = y if batch_first else y.transpose(0, 1)
        ends = final if isinstance(final, tuple) else (final,)
        return torch.cat([y.flatten(1), *(end.transpose(0, 1).flatten(1) for end in ends)], 1)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15)
@given(
    n=st.sampled_from([0, 1, 7, 64]),
    steps=st.integers(1, 6),
    inputs=st.integers(1, 5),
    hidden=st.integers(1, 6),
    layers=st.integers(1, 2),
    bidirectional=st.booleans(),
    batch_first=st.booleans(),
    bias=st.booleans(),
    initial=st.booleans(),
    packed=st.booleans(),
    strategy=st.sampled_from(["auto", "gram", "explicit"]),
    kept_bytes=st.sampled_from([1, 2**26]),
)
def test_every_configuration_agrees_with_the_oracle(
    matches,
    reaching_loss,
    kind,
    n,
    steps,
    inputs,
    hidden,
    layers,
    bidirectional,
    batch_first,
    bias,
    initial,
    packed,
    strategy,
    kept_bytes,
):
    torch.manual_seed(0)
    rnn = make(kind, inputs, hidden, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, bias=bias)
    batch = {"x": torch.randn(n, steps, inputs)}
    if packed:
        batch["lengths"] = torch.randint(1, steps + 1, (n,))
    if initial:
        batch["h0"] = torch.randn(n, layers * (1 + bidirectional), hidden)
    matches(Reader(rnn), batch, torch.randn(n), reaching_loss, strategy={"rnn": strategy}, kept_bytes=kept_bytes)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_projected_lstm_agrees_with_the_oracle(matches, reaching_loss, bidirectional, packed):
    rnn = nn.LSTM(3, 6, num_layers=2, proj_size=2, bidirectional=bidirectional, batch_first=True)
    batch = {"x": torch.randn(7, 5, 3)}
    if packed:
        batch["lengths"] = torch.randint(1, 6, (7,))
    matches(Reader(rnn), batch, torch.randn(7), reaching_loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("ragged", ["no", "sorted", "unsorted"])
def test_output_and_input_gradients_are_torchs_own(kind, bidirectional, ragged):
    module = make(kind, 3, 5, num_layers=2, bidirectional=bidirectional).double()
    x = torch.randn(6, 4, 3, dtype=torch.float64, requires_grad=True)
    h0 = torch.randn(4 if bidirectional else 2, 4, 5, dtype=torch.float64, requires_grad=True)
    first = (h0, h0.sin()) if kind == "LSTM" else h0
    source: object = x
    if ragged != "no":
        lengths = torch.tensor([6, 4, 4, 1]) if ragged == "sorted" else torch.tensor([2, 6, 1, 5])
        source = pack_padded_sequence(x, lengths, enforce_sorted=ragged == "sorted")
    expected = tensors(module(source, first))
    found = tensors(recorded(module, source, first, n=4)[0])
    weights = [torch.randn_like(value) for value in expected]
    wanted = torch.autograd.grad(expected, [x, h0], weights, retain_graph=True)
    got = torch.autograd.grad(found, [x, h0], weights)
    for a, b in zip([*found, *got], [*expected, *wanted], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_packed_result_is_packed_as_torch_packs_it():
    module = nn.GRU(3, 4)
    packed = pack_padded_sequence(torch.randn(5, 3, 3), torch.tensor([2, 5, 3]), enforce_sorted=False)
    expected, _ = module(packed)
    found, _ = recorded(module, packed, n=3)[0]
    assert torch.equal(found.batch_sizes, expected.batch_sizes)
    assert torch.equal(found.sorted_indices, expected.sorted_indices)
    assert torch.equal(found.unsorted_indices, expected.unsorted_indices)
    torch.testing.assert_close(found.data, expected.data)


@pytest.mark.parametrize("kind", KINDS)
def test_called_twice(matches, reaching_loss, kind):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = make(kind, 4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(self.rnn(x)[0])[0]

    matches(Twice(), torch.randn(7, 5, 4), torch.randn(7), reaching_loss)


def test_only_some_parameters_are_trained(matches, reaching_loss):
    rnn = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    for name, parameter in rnn.named_parameters():
        parameter.requires_grad_(name in ("weight_hh_l0", "bias_ih_l1", "weight_ih_l1"))
    matches(Reader(rnn), torch.randn(7, 5, 3), torch.randn(7), reaching_loss)


def test_dropout_lies_between_layers_in_training_mode_only():
    torch.manual_seed(1)
    rnn = nn.LSTM(3, 4, num_layers=2, dropout=1.0, batch_first=True)
    x = torch.randn(5, 6, 3)
    found = recorded(rnn, x, n=5)[0]
    torch.testing.assert_close(found[0], rnn(x)[0])
    rnn.eval()
    torch.testing.assert_close(recorded(rnn, x, n=5)[0][0], rnn(x)[0])
    # With everything dropped the second layer sees zeros, so the first layer's weights have no gradient.
    rnn.train()
    engine = PerSampleGradients(Reader(rnn), options=GradientOptions(verify=False))
    _, sums = engine.weighted_sum(
        x, torch.randn(5), lambda out, y: out[:, :24].square().sum(1), lambda norms: torch.ones_like(norms)
    )
    assert sums["rnn.weight_ih_l0"].abs().max() == 0
    assert sums["rnn.weight_hh_l1"].abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kept_bytes", [1, 2**26])
def test_broken_sample_leaves_the_others_alone(reaching_loss, kind, value, kept_bytes):
    model = Reader(make(kind, 3, 4, bidirectional=True, batch_first=True))
    x, y = torch.randn(7, 5, 3), torch.randn(7)
    spoilt = x.clone()
    spoilt[2, 3, 1] = value
    y_spoilt = y.clone()
    y_spoilt[2] = float("nan")
    options = GradientOptions(kept_bytes=kept_bytes, strategy={"rnn": "explicit"})
    engine = PerSampleGradients(model, options=options)
    weights = torch.tensor([1.0, 1, 0, 1, 1, 1, 1])
    norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda _: weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken_norms, broken_sums = engine.weighted_sum(spoilt, y_spoilt, reaching_loss, lambda n: torch.ones_like(n))
    assert [w.category for w in caught] == [NonFiniteGradientWarning]
    others = torch.arange(7) != 2
    torch.testing.assert_close(broken_norms[others], norms[others])
    for name, value_ in sums.items():
        torch.testing.assert_close(broken_sums[name], value_, msg=name)


def test_batch_on_the_wrong_axis_is_refused(reaching_loss):
    model = nn.Sequential(nn.LSTM(3, 4))
    engine = PerSampleGradients(model, options=GradientOptions(verify=False))
    with pytest.raises(UnsupportedModuleError, match="batch_first=True"):
        engine.norms(torch.randn(7, 5, 3), torch.randn(7), lambda out, y: reaching_loss(out[0], y))


def test_single_sequence_is_refused():
    with pytest.raises(UnsupportedModuleError, match="2 axes"):
        recorded(nn.GRU(3, 4), torch.randn(5, 3), n=5)


def test_module_is_left_as_it_was(reaching_loss):
    model = Reader(nn.LSTM(3, 4, batch_first=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    PerSampleGradients(model).norms(torch.randn(7, 5, 3), torch.randn(7), reaching_loss)
    assert "forward" not in model.rnn.__dict__
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_second_backward_through_one_recording_is_refused():
    module = nn.GRU(3, 4)
    x = torch.randn(5, 2, 3, requires_grad=True)
    y, _ = recorded(module, x, n=2)[0]
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(ValueError, match="differentiated once"):
        torch.autograd.grad(y.sum(), x)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("strategy", ["gram", "explicit"])
@pytest.mark.parametrize("kept_bytes", [1, 2**26])
@pytest.mark.parametrize("projected", [0, 2])
def test_chunks_that_are_held_keep_their_gradients(reaching_loss, strategy, kept_bytes, projected):
    """Buffers are used again by the next chunk, but not while somebody may still ask for what is in them."""
    model = Reader(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True, proj_size=projected))
    x, y = torch.randn(12, 5, 3), torch.randn(12)
    options = GradientOptions(chunk_size=4, strategy={"rnn": strategy}, kept_bytes=kept_bytes)
    engine = PerSampleGradients(model, options=options)
    norms, expected = engine.weighted_sum(x, y, reaching_loss, lambda n: torch.ones_like(n))
    chunks = list(engine.chunks(x, y, reaching_loss))
    sums = engine.zeros()
    found = [chunk.norms for chunk in reversed(chunks)][::-1]
    for chunk in chunks:
        chunk.add_weighted_sum(torch.ones(4), into=sums)
    torch.testing.assert_close(torch.cat(found), norms)
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, msg=name)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4])
def test_small_states_keep_their_digits(matches, reaching_loss, size):
    """Without biases the whole gradient is proportional to inputs and states, however small they are."""
    rnn = nn.LSTM(3, 8, batch_first=True, bidirectional=True, bias=False)
    matches(Reader(rnn), size * torch.randn(7, 12, 3), torch.randn(7), reaching_loss)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("kind", "projected"), [("LSTM", 0), ("LSTM", 8), ("GRU", 0), ("tanh", 0)])
def test_a_record_of_small_numbers_changes_no_bit_of_the_others(kind, projected, compiled):
    """Which arithmetic a chunk gets must not be for one of its records to decide."""
    torch.manual_seed(0)
    recurrent = make(kind, 6, 12, batch_first=True, **({"proj_size": projected} if projected else {}))
    model = LastOutput(recurrent, projected or 12)
    x, y = torch.randn(64, 9, 6), torch.arange(64) % 2
    gradients = PerSampleGradients(
        model, expected_batch_size=64.0, options=GradientOptions(compiled=compiled, chunk_size=64)
    )

    def norms(first: Tensor) -> Tensor:
        (chunk,) = gradients.chunks(torch.cat([first[None], x[1:]]), y, nn.CrossEntropyLoss(reduction="none"))
        return chunk.norms

    usual = norms(x[0])[1:]
    for odd in (torch.full((9, 6), 1e-6), torch.zeros(9, 6), torch.full((9, 6), 1e10)):
        assert torch.equal(norms(odd)[1:], usual)


class LastOutput(nn.Module):
    """Two classes from the last output of a recurrent layer without biases, whose states are small where inputs are."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.recurrent, self.classifier = recurrent, nn.Linear(width, 2)
        for name, parameter in recurrent.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.recurrent(x)[0][:, -1])
        return logits
