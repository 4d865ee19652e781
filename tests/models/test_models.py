from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from sluice._base.errors import InputError
from sluice.models import (
    LinearClassifier,
    MeanEmbedding,
    TemperedSigmoid,
    Tempering,
    activation_of,
    create_activation,
    create_model,
    describe_models,
    model_names,
)

MODELS = {
    "grey pixels": ("pixel-cnn", (1, 28, 28), 10, 26_010),
    "colour pixels": ("pixel-cnn", (3, 32, 32), 10, 550_570),
    "grey scattering": ("scattering-cnn", (81, 7, 7), 10, 33_066),
    "colour scattering": ("scattering-cnn", (243, 8, 8), 10, 187_210),
    "bilstm": ("bilstm", (80,), 2, 2_021_202),
    "embedding": ("embedding", (80,), 2, 20_000 * 32 + 32 * 2 + 2),
    "bag of words": ("bag-of-words", (10_000,), 2, 20_002),
    "weighted words": ("weighted-words", (5000,), 2, 10_000),
    "mlp": ("mlp", (1, 8, 8), 10, 4_810),
    "linear": ("linear", (1, 8, 8), 10, 650),
}


def inputs(name: str, shape: tuple[int, ...], count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    if name in ("bilstm", "embedding"):
        return torch.randint(0, 20_000, (count, *shape), generator=generator)
    return torch.rand(count, *shape, generator=generator)


@pytest.mark.parametrize(("name", "shape", "classes", "parameters"), MODELS.values(), ids=MODELS)
class TestEveryModel:
    def test_has_the_stated_number_of_parameters(self, name, shape, classes, parameters):
        model = create_model(name, shape, classes)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_gives_one_row_of_scores_for_each_record(self, name, shape, classes, parameters, count):
        scores = create_model(name, shape, classes)(inputs(name, shape, count))
        assert scores.shape == (count, classes)
        assert torch.isfinite(scores).all()

    def test_an_empty_batch_has_zero_gradients(self, name, shape, classes, parameters):
        model = create_model(name, shape, classes)
        model(inputs(name, shape, 0)).sum().backward()
        assert all(p.grad is None or p.grad.count_nonzero() == 0 for p in model.parameters())

    def test_scores_of_a_record_do_not_depend_on_the_others(self, name, shape, classes, parameters):
        torch.manual_seed(0)
        model = create_model(name, shape, classes).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        records = inputs(name, shape, 3)
        with torch.no_grad():
            together = model(records)
            alone = torch.cat([model(record[None]) for record in records])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)

    def test_copies_and_saves(self, name, shape, classes, parameters):
        model = create_model(name, shape, classes)
        records = inputs(name, shape, 2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        fresh = create_model(name, shape, classes)
        fresh.load_state_dict(model.state_dict())
        for other in (copy.deepcopy(model), loaded, fresh):
            assert torch.equal(other(records), model(records))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pixel-cnn", (1, 16, 17)),
        ("pixel-cnn", (3, 8, 15)),
        ("scattering-cnn", (81, 2, 1)),
        ("scattering-cnn", (243, 2, 3)),
    ],
)
def test_other_image_sizes_work(name, shape):
    assert create_model(name, shape, 7)(inputs(name, shape, 2)).shape == (2, 7)


@pytest.mark.parametrize(("activation", "kind"), [("tanh", nn.Tanh), ("relu", nn.ReLU), (Tempering(), TemperedSigmoid)])
@pytest.mark.parametrize(
    "case", ["grey pixels", "colour pixels", "grey scattering", "colour scattering", "bilstm", "mlp"]
)
def test_the_activation_is_used_everywhere(case, activation, kind):
    name, shape, classes, _ = MODELS[case]
    modules = list(create_model(name, shape, classes, activation).modules())
    used = [module for module in modules if isinstance(module, nn.Tanh | nn.ReLU | TemperedSigmoid)]
    expected = {
        "grey pixels": 3,
        "colour pixels": 7,
        "grey scattering": 3,
        "colour scattering": 2,
        "bilstm": 2,
        "mlp": 1,
    }[case]
    assert len(used) == expected
    assert all(isinstance(module, kind) for module in used)
    assert len(set(map(id, used))) == expected


class TestTemperedSigmoid:
    def test_is_tanh_by_default(self):
        points = torch.linspace(-8, 8, 1001, dtype=torch.float64)
        torch.testing.assert_close(TemperedSigmoid()(points), torch.tanh(points), rtol=0, atol=1e-15)

    def test_follows_its_formula(self):
        points = torch.linspace(-3, 3, 101, dtype=torch.float64)
        activation = create_activation("tempered-sigmoid:1.58,3,0.71")
        torch.testing.assert_close(activation(points), 1.58 / (1 + torch.exp(-3 * points)) - 0.71)
        assert "s=1.58, T=3.0, o=0.71" in repr(activation)

    def test_its_constants_cannot_change(self):
        with pytest.raises(AttributeError):
            TemperedSigmoid().tempering.scale = 3.0

    @pytest.mark.parametrize("constants", [{"scale": 0.0}, {"inverse_temperature": -1.0}, {"offset": float("nan")}])
    def test_refuses_senseless_constants(self, constants):
        with pytest.raises(InputError, match=next(iter(constants))):
            Tempering(**constants)


@pytest.mark.parametrize("text", ["sigmoid", "", "tanh:1,2,3", "tempered-sigmoid:1,2", "tempered-sigmoid:a,b,c"])
def test_unknown_activations_are_refused(text):
    with pytest.raises(InputError, match="activation="):
        create_activation(text)


def test_padding_does_not_move_the_mean_embedding():
    model = MeanEmbedding(vocabulary=50)
    text = torch.randint(1, 50, (4, 9))
    padded = torch.cat([text, torch.zeros(4, 5, dtype=torch.int64)], dim=1)
    torch.testing.assert_close(model(padded), model(text))
    torch.testing.assert_close(model(torch.zeros(1, 9, dtype=torch.int64))[0], model.classifier.bias)


def test_a_linear_model_begins_at_zero():
    assert LinearClassifier(input_shape=(3,), classes=2)(torch.ones(1, 3)).count_nonzero() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet", (1, 28, 28), 10), "must be one of bag-of-words, bilstm"),
        (("pixel-cnn", (28, 28), 10), r"input_shape=\(28, 28\) is not allowed for model 'pixel-cnn'"),
        (("pixel-cnn", (2, 28, 28), 10), "the shape of one image"),
        (("pixel-cnn", (1, 8, 8), 10), "at least 16x16. Use scattering-cnn or linear"),
        (("pixel-cnn", (3, 7, 32), 10), "at least 8x8"),
        (("scattering-cnn", (1, 28, 28), 10), "Transform the images first"),
        (("scattering-cnn", (243, 1, 1), 10), "at least 2x2"),
        (("bilstm", (1, 28, 28), 2), "the length of one padded text"),
        (("embedding", (1, 28, 28), 2), "the length of one padded text"),
        (("bag-of-words", (80, 2), 2), "the width of a bag"),
        (("weighted-words", (80, 2), 2), "the width of weighted words"),
        (("linear", (), 2), "sizes of one record"),
        (("linear", (3, 0), 2), "sizes of one record"),
        (("linear", (3,), 1), "at least 2"),
        (("linear", (3,), "2"), "classes='2'"),
        (("linear", (3,), 2, "relu"), "activation='relu' is not allowed for model 'linear'"),
        (("pixel-cnn", (1, 28, 28), 10, "swish"), "activation='swish'"),
    ],
)
def test_bad_combinations_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        create_model(*arguments)


def test_vocabulary_is_only_for_models_that_read_ids():
    assert create_model("embedding", (80,), 2, vocabulary=100).embedding.num_embeddings == 100
    with pytest.raises(InputError, match="vocabulary=100 is not allowed for model 'linear'"):
        create_model("linear", (80,), 2, vocabulary=100)
    with pytest.raises(InputError, match="vocabulary=0"):
        create_model("bilstm", (80,), 2, vocabulary=0)


def test_the_activation_of_a_model_is_known_before_it_is_made():
    assert activation_of("mlp") == "tanh"
    assert activation_of("mlp", "relu") == "relu"
    assert activation_of("linear") is None
    with pytest.raises(InputError, match="model='resnet'"):
        activation_of("resnet")


def test_every_model_is_described():
    assert {"pixel-cnn", "scattering-cnn", "bilstm", "embedding", "linear"} <= set(model_names())
    assert list(describe_models()) == model_names()
    assert all(describe_models().values())
