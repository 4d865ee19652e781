"""Lists of columns give the linear model the same outputs, gradients and weights as rows of numbers do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sluice.data import BagExamples, Examples, LabelledSequences, Sequences, bag_of_words
from sluice.features.words import WeightedWords
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.models import LinearClassifier, SparseLinear, create_model
from sluice.training.engine import PrivacyEngine

WIDTH = 40


def lists_and_rows(n: int) -> tuple[Tensor, Tensor]:
    """Lists with repeated columns and empty ones, and the rows they stand for."""
    generator = torch.Generator().manual_seed(n)
    lists = torch.randint(0, WIDTH, (n, 9), generator=generator, dtype=torch.int32)
    lists[torch.rand(n, 9, generator=generator) < 0.4] = -1
    lists[::5] = -1
    rows = torch.zeros(n, WIDTH)
    for row, columns in zip(rows, lists.long(), strict=True):
        named = columns[columns >= 0]
        row.index_add_(0, named, torch.full((len(named),), max(len(named), 1) ** -0.5))
    return lists, rows


def weighted_lists_and_rows(n: int) -> tuple[Tensor, Tensor]:
    """The same with a value for each column, of either sign, and numbers that mean nothing where no column is named."""
    lists, rows = lists_and_rows(n)
    steps = torch.randint(-(2**24), 2**24, lists.shape, generator=torch.Generator().manual_seed(n), dtype=torch.int32)
    rows.zero_()
    for row, columns, values in zip(rows, lists.long(), steps / 2**24, strict=True):
        row.index_add_(0, columns[columns >= 0], values[columns >= 0])
    return torch.stack((lists, steps), dim=1), rows


@pytest.mark.parametrize("n", [0, 1, 7, 300])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("made", [lists_and_rows, weighted_lists_and_rows])
def test_gradients_agree_with_the_oracle(
    n: int, bias: bool, compiled: bool, made: Callable[[int], tuple[Tensor, Tensor]]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(SparseLinear(WIDTH, 3, bias=bias))
    lists, rows = made(n)
    y, weights = torch.randn(n), torch.rand(n)
    torch.testing.assert_close(model(lists), F.linear(rows, model[0].weight, model[0].bias), rtol=1e-5, atol=1e-6)

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return ((output - 0.3) ** 2).sum(1) + output[:, 0] * y

    engine = PerSampleGradients(model, options=GradientOptions(compiled=compiled))
    norms, sums = engine.weighted_sum(lists, y, loss, lambda norms: weights)
    exact = copy.deepcopy(model).double()
    squares, wanted = [], {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
    for i in range(n):
        value = loss(F.linear(rows[i : i + 1].double(), exact[0].weight, exact[0].bias), y[i : i + 1].double()).sum()
        gradients = torch.autograd.grad(value, list(exact.parameters()))
        squares.append(sum(float(g.square().sum()) for g in gradients))
        for (name, _), gradient in zip(exact.named_parameters(), gradients, strict=True):
            wanted[name] += weights[i].double() * gradient
    torch.testing.assert_close(norms.double(), torch.tensor(squares, dtype=torch.float64).sqrt(), rtol=1e-5, atol=1e-7)
    for name, value in wanted.items():
        torch.testing.assert_close(sums[name].double(), value.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("made", [lists_and_rows, weighted_lists_and_rows])
def test_a_broken_record_leaves_the_others_alone(compiled: bool, made: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    lists, _ = made(20)
    engine = PerSampleGradients(SparseLinear(WIDTH, 3), options=GradientOptions(compiled=compiled))

    def sums(y: Tensor, weights: Tensor) -> dict[str, Tensor]:
        return engine.weighted_sum(lists, y, lambda o, y: (o * y[:, None]).sum(1), lambda norms: weights)[1]

    y, weights = torch.ones(20), torch.ones(20)
    weights[3] = 0
    wanted = sums(y, weights)
    y[3] = torch.nan
    weights[3] = 1
    with pytest.warns(UserWarning, match="not finite"):
        found = sums(y, weights)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("made", [lists_and_rows, weighted_lists_and_rows])
def test_a_layer_that_is_called_twice(compiled: bool, made: Callable[[int], tuple[Tensor, Tensor]]) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SparseLinear(WIDTH, 3)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            return self.layer(first) + self.layer(second).sin()

    engine = PerSampleGradients(Twice(), options=GradientOptions(compiled=compiled))
    weights = torch.rand(20)

    def found(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return engine.weighted_sum((x, x.roll(1, 0)), None, lambda o, _: o.exp().sum(1), lambda norms: weights)

    (norms, sums), (wanted_norms, wanted) = (found(x) for x in made(20))
    torch.testing.assert_close(norms, wanted_norms, rtol=1e-5, atol=1e-6)
    for name, value in wanted.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong", [-2, WIDTH])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_column_that_is_not_there_is_an_error(wrong: int, compiled: bool) -> None:
    engine = PerSampleGradients(SparseLinear(WIDTH, 3), options=GradientOptions(compiled=compiled))
    lists = torch.tensor([[3, 4], [wrong, 5]], dtype=torch.int32)
    engine.norms(lists[:1], None, lambda o, _: o.sum(1))
    for use in (engine.module, lambda lists: engine.norms(lists, None, lambda o, _: o.sum(1))):
        with pytest.raises((IndexError, RuntimeError), match=r"idx|index"):
            use(lists)


def trained(examples: Examples, model: nn.Module) -> dict[str, Tensor]:
    engine = PrivacyEngine(seed=3)
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9),
        data_loader=examples,
        noise_multiplier=1.0,
        max_grad_norm=0.1,
        releases=8,
        sample_rate=0.5,
    )
    for _ in engine.releases(F.cross_entropy):
        pass
    return model.state_dict()


def test_training_on_lists_and_on_rows_gives_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    texts: list[Any] = [torch.randint(1, 60, (12,), generator=generator).tolist() for _ in range(200)]
    examples = BagExamples(bag_of_words(Sequences.from_lists(texts), WIDTH, 3), torch.arange(200) % 2)
    dense = trained(examples, LinearClassifier(input_shape=(WIDTH,), classes=2))
    rows = trained(examples, create_model("bag-of-words", (WIDTH,), 2))
    lists = trained(examples.listed(), create_model("bag-of-words", (WIDTH,), 2))
    assert list(dense) == list(rows) == list(lists) == ["classifier.weight", "classifier.bias"]
    assert dense["classifier.weight"].abs().max() > 0
    for name, value in dense.items():
        torch.testing.assert_close(rows[name], value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(lists[name], value, rtol=1e-4, atol=1e-6)


def test_weighted_lists_and_rows_give_the_same_weights() -> None:
    generator = torch.Generator().manual_seed(1)
    texts: list[Any] = [torch.randint(1, 60, (i % 15,), generator=generator).tolist() for i in range(200)]
    texts_with_labels = LabelledSequences(sequences=Sequences.from_lists(texts), labels=torch.arange(200) % 2)
    examples = WeightedWords(vocabulary=WIDTH, negation=0).examples(texts_with_labels)
    rows = trained(examples, create_model("weighted-words", (WIDTH,), 2))
    lists = trained(examples.listed(), create_model("weighted-words", (WIDTH,), 2))
    assert list(rows) == list(lists) == ["classifier.weight"]
    assert rows["classifier.weight"].abs().max() > 0
    torch.testing.assert_close(lists["classifier.weight"], rows["classifier.weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3,), (9000,), (2, 3), (2, 9000)])
def test_the_longest_text_does_not_decide_how_chunks_are_cut(shape: tuple[int, ...]) -> None:
    engine = PerSampleGradients(SparseLinear(WIDTH, 2), expected_batch_size=5000.0)
    engine.prepare(torch.zeros(2, *shape, dtype=torch.int32))
    assert engine.chunk_rows == 1024
