"""Models by the name a user types. Nets are named, not imported, so that their names are known without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from sluice._base import validate
from sluice._base.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from sluice.models.activations import Activation

DEFAULT_ACTIVATION = "tanh"
DEFAULT_VOCABULARY = 20_000
REGRESSORS = ("linear", "mlp")
"""The models that can have one output, a number."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    name: str
    input_shape: tuple[int, ...]
    classes: int
    activation: Activation
    vocabulary: int

    def refuse(self, allowed: str) -> InputError:
        return InputError(f"input_shape={self.input_shape} is not allowed for model {self.name!r}: {allowed}")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    summary: str
    build: Callable[[_Request], nn.Module]
    has_activation: bool = False
    reads_ids: bool = False


def model_names() -> list[str]:
    return sorted(_ENTRIES)


def describe_models() -> dict[str, str]:
    """One line for each model, by name."""
    return {name: _ENTRIES[name].summary for name in model_names()}


def activation_of(name: str, activation: Activation | None = None) -> Activation | None:
    """The activation that a model is made with where this one is asked for; None for a model that has none."""
    validate.one_of(_ENTRIES, model=name)
    if not _ENTRIES[name].has_activation:
        return None
    return DEFAULT_ACTIVATION if activation is None else activation


def create_model(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    activation: Activation | None = None,
    *,
    vocabulary: int | None = None,
) -> nn.Module:
    """A freshly initialised model.

    Args:
        name: one of :func:`model_names`.
        input_shape: the shape of one record, without the batch dimension: ``(channels, height, width)`` for images and
            scattering coefficients, ``(words,)`` for texts and bags of words, anything for ``linear``.
        classes: how many classes to tell apart; at least 2.
        activation: "tanh" (the default), "relu", "tempered-sigmoid[:s,T,o]" or a ``Tempering``; only for models
            that have one.
        vocabulary: how many different word ids there are (20,000 by default); only for models that read ids.
    """
    validate.positive_integer(classes=classes)
    if classes < 2:
        raise InputError(f"classes={classes} is not allowed: a classifier needs at least 2.")
    return _created(name, input_shape, classes, activation, vocabulary)


def create_regressor(name: str, input_shape: Sequence[int], activation: Activation | None = None) -> nn.Module:
    """A freshly initialised model with one output, ``(records, 1)``, that stands for a number.

    Args:
        name: one of `REGRESSORS`.
        input_shape, activation: as for `create_model`.
    """
    validate.one_of(REGRESSORS, model=name)
    return _created(name, input_shape, 1, activation, None)


def _created(
    name: str, input_shape: Sequence[int], classes: int, activation: Activation | None, vocabulary: int | None
) -> nn.Module:
    validate.one_of(_ENTRIES, model=name)
    entry = _ENTRIES[name]
    shape = tuple(input_shape)
    if not shape or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise InputError(f"input_shape={shape} is not allowed: give the sizes of one record, each an integer >= 1.")
    if activation is not None and not entry.has_activation:
        raise InputError(f"activation={activation!r} is not allowed for model {name!r}: it has none. Leave it out.")
    if vocabulary is not None and not entry.reads_ids:
        raise InputError(f"vocabulary={vocabulary!r} is not allowed for model {name!r}: it reads no ids. Leave it out.")
    words = DEFAULT_VOCABULARY if vocabulary is None else vocabulary
    validate.positive_integer(vocabulary=words)
    request = _Request(
        name=name,
        input_shape=shape,
        classes=classes,
        activation=DEFAULT_ACTIVATION if activation is None else activation,
        vocabulary=words,
    )
    return entry.build(request)


def _net(name: str) -> Callable[..., nn.Module]:
    """The class of a net, imported when it is made: the names of models can be read without torch."""
    module, net = name.split(":")
    found: Callable[..., nn.Module] = getattr(import_module(f"sluice.models.{module}"), net)
    return found


def _pixel_cnn(request: _Request) -> nn.Module:
    nets = {1: "images:GreyPixelNet", 3: "images:ColourPixelNet"}
    if len(request.input_shape) != 3 or request.input_shape[0] not in nets:
        raise request.refuse("it must be (1, height, width) or (3, height, width), the shape of one image.")
    channels, height, width = request.input_shape
    return _net(nets[channels])(height=height, width=width, classes=request.classes, activation=request.activation)


def _scattering_cnn(request: _Request) -> nn.Module:
    nets = {81: "images:GreyScatteringNet", 243: "images:ColourScatteringNet"}
    if len(request.input_shape) != 3 or request.input_shape[0] not in nets:
        raise request.refuse(
            "it must be (81, height, width) or (243, height, width), the scattering coefficients of grey or colour "
            "images. Transform the images first, or use pixel-cnn."
        )
    channels, height, width = request.input_shape
    return _net(nets[channels])(height=height, width=width, classes=request.classes, activation=request.activation)


def _require_words(request: _Request) -> None:
    if len(request.input_shape) != 1:
        raise request.refuse("it must be (words,), the length of one padded text. For images use pixel-cnn or linear.")


def _bilstm(request: _Request) -> nn.Module:
    _require_words(request)
    return _net("text:BidirectionalLSTM")(
        vocabulary=request.vocabulary, classes=request.classes, activation=request.activation
    )


def _embedding(request: _Request) -> nn.Module:
    _require_words(request)
    return _net("text:MeanEmbedding")(vocabulary=request.vocabulary, classes=request.classes)


def _bag_of_words(request: _Request) -> nn.Module:
    if len(request.input_shape) != 1:
        raise request.refuse("it must be (words,), the width of a bag of words. For other features use linear.")
    return _net("linear:BagOfWordsClassifier")(words=request.input_shape[0], classes=request.classes)


def _softmax(request: _Request) -> nn.Module:
    if len(request.input_shape) != 1:
        raise request.refuse("it must be (width,), the width of a row of features. For other records use linear.")
    return _net("linear:SoftmaxRegression")(width=request.input_shape[0], classes=request.classes)


def _weighted_words(request: _Request) -> nn.Module:
    if len(request.input_shape) != 1:
        raise request.refuse("it must be (columns,), the width of weighted words. For other features use linear.")
    return _net("linear:BagOfWordsClassifier")(words=request.input_shape[0], classes=request.classes, bias=False)


def _linear(request: _Request) -> nn.Module:
    return _net("linear:LinearClassifier")(input_shape=request.input_shape, classes=request.classes)


def _mlp(request: _Request) -> nn.Module:
    return _net("perceptron:Perceptron")(
        input_shape=request.input_shape, classes=request.classes, activation=request.activation
    )


_ENTRIES: dict[str, _Entry] = {
    "pixel-cnn": _Entry(summary="convolutional net on grey or colour pixels", build=_pixel_cnn, has_activation=True),
    "scattering-cnn": _Entry(
        summary="small convolutional net on scattering coefficients", build=_scattering_cnn, has_activation=True
    ),
    "bilstm": _Entry(summary="bidirectional LSTM on word ids", build=_bilstm, has_activation=True, reads_ids=True),
    "embedding": _Entry(summary="mean of word vectors, then linear, on word ids", build=_embedding, reads_ids=True),
    "bag-of-words": _Entry(summary="linear classifier on bags of words", build=_bag_of_words),
    "weighted-words": _Entry(summary="linear classifier without bias on weighted words", build=_weighted_words),
    "mlp": _Entry(summary="one hidden layer of 64 units on any features", build=_mlp, has_activation=True),
    "softmax": _Entry(summary="linear classifier without a bias, on rows of features", build=_softmax),
    "linear": _Entry(summary="linear classifier on any features", build=_linear),
}
