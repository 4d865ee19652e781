from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, NonFiniteGradientWarning, PerSampleGradients, tied
from sluice.gradients.combine import combined
from sluice.gradients.contributions import SINGLE, Tap
from sluice.gradients.layers.embedding import Lookups, RowContribution, uses
from sluice.gradients.positions import LinearContribution

SIZES = st.sampled_from([0, 1, 7, 64])


@settings(max_examples=30)
@given(
    n=SIZES,
    inner=st.lists(st.integers(1, 6), max_size=2),
    rows=st.integers(1, 12),
    width=st.integers(1, 6),
    padding=st.booleans(),
    by_frequency=st.booleans(),
)
def test_embedding_agrees_with_the_oracle(matches, reaching_loss, n, inner, rows, width, padding, by_frequency):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(rows, width, padding_idx=rows - 1 if padding else None, scale_grad_by_freq=by_frequency),
        nn.Linear(width, 3),
        nn.Tanh(),
    )
    matches(model, torch.randint(0, rows, (n, *inner)), torch.randn(n), reaching_loss)


def test_sparse_embedding_gets_a_dense_sum(matches, reaching_loss):
    dense = nn.Embedding(9, 3)
    sparse = nn.Embedding(9, 3, sparse=True, _weight=dense.weight.detach().clone())
    x, y = torch.randint(0, 9, (7, 4)), torch.randn(7)
    results = [
        PerSampleGradients(nn.Sequential(e), options=GradientOptions(verify=False)).weighted_sum(
            x, y, reaching_loss, torch.ones_like
        )
        for e in (dense, sparse)
    ]
    torch.testing.assert_close(results[1][0], results[0][0])
    torch.testing.assert_close(results[1][1]["0.weight"], results[0][1]["0.weight"])


def test_samples_on_the_second_axis(matches, reaching_loss):
    class TimeMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 3, padding_idx=0)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.embedding(tokens.t()).transpose(0, 1)

    matches(TimeMajor(), torch.randint(0, 8, (7, 5)), torch.randn(7), reaching_loss)


class Tied(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, rows: int = 11, width: int = 4, padding: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width, padding_idx=padding)
        self.middle = nn.Linear(width, width)
        self.out = nn.Linear(width, rows)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.middle(self.embedding(tokens))))


@pytest.mark.parametrize("n", [0, 1, 7, 64])
def test_tied_weights(matches, reaching_loss, n):
    matches(Tied(), torch.randint(0, 11, (n, 5)), torch.randn(n), reaching_loss)


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("length", [1, 2, 30])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_large_tied_weights(matches, reaching_loss, n, length, padding):
    """Short sequences take Gram matrices over positions and lookups, long ones form gradients; rows occur repeatedly."""
    matches(Tied(60, 50, padding), torch.randint(0, 3, (n, length)), torch.randn(n), reaching_loss)


def test_tied_parts_that_cancel_do_not_make_a_norm_too_small():
    """A token's two gradients are nearly opposite, so that almost nothing of either is left."""
    n, rows, width = 20, 60, 50
    table, tokens = torch.zeros(rows, width), torch.randint(0, rows, (n, 1))
    a = torch.rand(n, 1, width) + 0.5
    b = torch.zeros(n, 1, rows).scatter_(2, tokens.unsqueeze(1), 1.0)
    for spread in (1e-1, 1e-3, 1e-5):
        rest = -a * (1 + spread * torch.randn(n, 1, width))
        taps = [Tap(value.shape, value.dtype, value.device) for value in (b, rest)]
        for tap, value in zip(taps, (b, rest), strict=True):
            tap.bind(value)
        lookups = Lookups(tokens=tokens.flatten(), owners=torch.arange(n), factors=None, batch_size=n)
        parts = [
            RowContribution(table, uses(taps[1], lookups, lambda gradient: gradient.flatten(0, 1))),
            LinearContribution(table, taps[0], a),
        ]
        assert tied.pair(parts).gram_is_cheaper
        (whole,) = combined(parts, batch_size=n, kept_bytes=2**20)
        found = whole.norms_squared(keep=True).sqrt()
        truth = (a.double() + rest.double()).flatten(1).norm(dim=1)
        assert bool((found >= truth * (1 - 5e-6)).all())
        terms = a.double().flatten(1).norm(dim=1) + rest.double().flatten(1).norm(dim=1)
        most = (truth * (1 + 5e-6) + 3e-7 * terms).maximum(terms / SINGLE * (1 + 1e-12))
        assert bool((found <= most).all())


@pytest.mark.filterwarnings("ignore:A sample's gradient is not finite")
@pytest.mark.parametrize(("rows", "width"), [(11, 4), (60, 50)])
def test_broken_samples_of_tied_weights_add_nothing(reaching_loss, rows, width):
    net, tokens = Tied(rows, width), torch.randint(0, rows, (6, 2))
    y = torch.randn(6)
    kept = [0, 1, 3, 4, 5]

    def sums(rows_, y):
        return PerSampleGradients(net).weighted_sum(
            tokens[rows_], y[rows_], reaching_loss, lambda n: torch.ones_like(n)
        )

    norms, expected = sums(kept, y)
    y[2] = float("inf")
    found, got = sums(list(range(6)), y)
    assert not found[2].isfinite()
    torch.testing.assert_close(found[kept], norms)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 7, 64])
def test_called_twice(matches, reaching_loss, n):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(6, 3)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return torch.cat([self.embedding(first), self.embedding(second).sin()], 1)

    batch = (torch.randint(0, 6, (n, 4)), torch.randint(0, 6, (n, 5)))
    matches(Pair(), batch, torch.randn(n), reaching_loss)


@settings(max_examples=30)
@given(
    n=SIZES,
    length=st.integers(1, 7),
    rows=st.integers(1, 9),
    mode=st.sampled_from(["sum", "mean", "max"]),
    padding=st.booleans(),
    weighted=st.booleans(),
)
def test_bags_agree_with_the_oracle(matches, reaching_loss, n, length, rows, mode, padding, weighted):
    torch.manual_seed(0)

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(rows, 4, mode=mode, padding_idx=0 if padding else None)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens: Tensor, factors: Tensor) -> Tensor:
            use = weighted and mode == "sum"
            return self.out(self.bag(tokens, per_sample_weights=factors if use else None))

    batch = (torch.randint(0, rows, (n, length)), torch.randn(n, length))
    matches(Bags(), batch, torch.randn(n), reaching_loss)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
def test_ragged_bags_agree_with_the_oracle(matches, reaching_loss, mode, last):
    class Ragged(nn.Module):
        """Every sample's first ``length`` tokens (there may be none) are its bag."""

        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=last, padding_idx=3)

        def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
            used = torch.arange(tokens.shape[1]) < lengths.unsqueeze(1)
            ends = lengths.cumsum(0)
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends]) if last else ends - lengths
            return self.bag(tokens[used], offsets)

    lengths = torch.tensor([2, 0, 5, 1, 0, 3, 0])
    matches(Ragged(), (torch.randint(0, 9, (7, 5)), lengths), torch.randn(7), reaching_loss)


@pytest.mark.parametrize("padding", [None, 2])
def test_bag_called_twice(matches, reaching_loss, padding):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3, mode="mean", padding_idx=padding)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return torch.cat([self.bag(first), self.bag(second).sin()], 1)

    matches(Pair(), (torch.randint(0, 6, (7, 4)), torch.randint(0, 6, (7, 5))), torch.randn(7), reaching_loss)


def test_learned_factors_keep_their_gradient(matches, reaching_loss):
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Linear(4, 4)
            self.bag = nn.EmbeddingBag(6, 3, mode="sum")

        def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
            return self.bag(tokens, per_sample_weights=self.factor(x))

    matches(Weighted(), (torch.randint(0, 6, (7, 4)), torch.randn(7, 4)), torch.randn(7), reaching_loss)


def test_several_bags_for_each_sample_are_refused(reaching_loss):
    class TwoBags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bag(tokens.flatten(0, 1)).view(tokens.shape[0], -1)

    engine = PerSampleGradients(TwoBags(), options=GradientOptions(verify=False))
    with pytest.raises(UnsupportedModuleError, match="one bag"):
        engine.norms(torch.randint(0, 6, (7, 2, 4)), torch.randn(7), reaching_loss)


@pytest.mark.filterwarnings("ignore:A sample's gradient is not finite")
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("factor", [float("inf"), float("nan")])
def test_a_factor_that_is_not_finite_adds_nothing(factor, compiled):
    """Its derivative is set to zero, and nothing times infinity would be NaN."""

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3, mode="sum")

        def forward(self, words, factors):
            return self.bag(words, per_sample_weights=factors)

    engine = PerSampleGradients(Factors(), options=GradientOptions(compiled=compiled))
    words, factors = torch.randint(0, 6, (4, 5)), torch.randn(4, 5)
    factors[1, 2] = factor
    norms, sums = engine.weighted_sum((words, factors), torch.zeros(4), squared, lambda n: n.isfinite().float())
    assert norms.isfinite().tolist() == [True, False, True, True]
    others = torch.tensor([0, 2, 3])
    _, expected = engine.weighted_sum((words[others], factors[others]), torch.zeros(3), squared, torch.ones_like)
    torch.testing.assert_close(sums, expected)


def squared(output, _):
    return output.square().sum(1)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_max_norm_is_refused_before_it_changes_a_weight(reaching_loss, kind):
    model = nn.Sequential(kind(6, 3, max_norm=0.1))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedModuleError, match=r"'0'.*max_norm=0.1"):
        PerSampleGradients(model).norms(torch.randint(0, 6, (7, 4)), torch.randn(7), reaching_loss)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("model", [Tied(), nn.Sequential(nn.EmbeddingBag(11, 4)), nn.Sequential(nn.Embedding(11, 4))])
def test_broken_sample_leaves_the_others_alone(reaching_loss, model):
    x, y = torch.randint(0, 11, (7, 5)), torch.randn(7)
    spoilt = y.clone()
    spoilt[2] = float("nan")
    engine = PerSampleGradients(model)
    weights = torch.tensor([1.0, 1, 0, 1, 1, 1, 1])
    norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda _: weights)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        broken_norms, broken_sums = engine.weighted_sum(x, spoilt, reaching_loss, torch.ones_like)
    assert [w.category for w in caught] == [NonFiniteGradientWarning]
    others = torch.arange(7) != 2
    torch.testing.assert_close(broken_norms[others], norms[others])
    for name, value in sums.items():
        torch.testing.assert_close(broken_sums[name], value)


def test_large_table_is_never_formed_for_each_sample(reaching_loss):
    """A table of 4 million numbers and 64 samples: 1 GB if per-sample gradients were formed."""
    model = nn.Sequential(nn.Embedding(1_000_000, 4))
    x, y = torch.randint(0, 1_000_000, (64, 3)), torch.randn(64)
    engine = PerSampleGradients(model, options=GradientOptions(verify=False))
    engine.norms(x, y, reaching_loss)
    largest = 0
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    (chunk,) = engine.chunks(x, y, reaching_loss)
    total = engine.zeros()
    with Watching():
        weights = torch.ones_like(chunk.norms)
        chunk.add_weighted_sum(weights, into=total)
    # index_add_ returns its target, the table itself; nothing is larger.
    assert largest <= 4_000_000
    assert total["0.weight"].abs().sum() > 0
