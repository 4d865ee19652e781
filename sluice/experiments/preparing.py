"""From a data set's name to what a model sees: loaded, transformed once, and quick to read in random batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from sluice._base.errors import DataError, InputError
from sluice.data import (
    DataSplits,
    Examples,
    LabelledSequences,
    Sequences,
    TensorExamples,
    ToFloat,
    WeightedBagExamples,
    load,
    load_sequences,
    load_word_index,
    ranked,
)
from sluice.data import names as data_set_names
from sluice.data.loading import text_examples
from sluice.data.text import BagExamples
from sluice.data.transforms import unscaled
from sluice.experiments.objective import Objective
from sluice.experiments.settings import TrainSettings
from sluice.features import GroupNormalisation, RowFeatures, Scattering, scattering_features
from sluice.features.building import text_feature
from sluice.features.cache import PRODUCTS_ONLY, TRANSFORM_VERSION
from sluice.features.catalog import blocks_of
from sluice.features.examples import RowExamples
from sluice.features.words import WeightedWords

TEXT_DATA_SETS = ("imdb",)
BAG_OF_WORDS, WEIGHTED_WORDS = "bag-of-words", "weighted-words"
_OF_TEXTS = (BAG_OF_WORDS, WEIGHTED_WORDS)
MOST_RANKS = 2**31
NORMALISED_AT_ONCE = 1 << 30
"""Up to this many bytes, normalised coefficients are kept in memory; beyond, each batch is normalised when it is read."""

_ROWS_AT_ONCE = 1024
_normalise = GroupNormalisation()


def normalised(coefficients: Tensor) -> Tensor:
    """What a model sees of scattering coefficients: normalised within each image, rounded to float16, as float32.

    Guarantee:
        Row i is a function of row i alone. It is the same whether all rows are normalised at once or each batch when it
        is read, so that how many records there are, which decides that, changes no record.
    """
    return _rounded(coefficients).to(torch.float32)


def feature_versions(settings: TrainSettings) -> tuple[int, ...]:
    """Versions of the features that a run with these settings may have begun with, the present one first."""
    return (TRANSFORM_VERSION, PRODUCTS_ONLY) if settings.features == "scattering" else (TRANSFORM_VERSION,)


def prepare(
    settings: TrainSettings,
    *,
    data_dir: str | Path | None = None,
    show_progress: bool = True,
    features_version: int = TRANSFORM_VERSION,
) -> DataSplits:
    """The data that the settings name, with the features that they ask for.

    To resume a run, give the version of the features that it began with, one of `feature_versions`.

    Guarantee:
        Record i of the result is a function of record i of the data and of public constants alone, so that this costs
        no privacy.
    """
    block = blocks_of(settings.features)[0]
    if settings.predicts_numbers and (settings.dataset in data_set_names() or block.name in _OF_TEXTS):
        raise InputError(
            f"loss={settings.loss!r} is not allowed with dataset={settings.dataset!r} and features={settings.features!r}: numbers "
            "are predicted from arrays and tables of your own. Leave it out."
        )
    if block.name == WEIGHTED_WORDS:
        return _weighted(settings, text_feature(block), data_dir)
    if settings.features == "bag-of-words":
        if settings.dataset not in TEXT_DATA_SETS:
            raise InputError(
                f"features='bag-of-words' is not allowed for dataset={settings.dataset!r}: it is for texts "
                f"({', '.join(TEXT_DATA_SETS)}). Use 'plain'."
            )
        bags = load(settings.dataset, data_dir=data_dir, text_as="bag-of-words", classes=settings.classes)
        return _listed(bags) if settings.model == BAG_OF_WORDS else bags
    if settings.features != "plain" and settings.dataset in TEXT_DATA_SETS:
        raise _no_images(settings)
    splits = load(
        settings.dataset,
        data_dir=data_dir,
        classes=settings.classes,
        class_names=settings.class_names,
        target=settings.target,
        target_kind=Objective.of(settings).target_kind,
    )
    _require_classes(splits, settings)
    if settings.features == "plain":
        return splits
    if splits.kind != "image":
        raise _no_images(settings)
    if settings.has_rows:
        return _with_rows(splits, settings.features, show_progress)
    return replace(
        splits,
        train=_scattered(splits.train, features_version, show_progress),
        test=_scattered(splits.test, features_version, show_progress),
    )


def _weighted(settings: TrainSettings, words: WeightedWords, data_dir: str | Path | None) -> DataSplits:
    """Texts as weighted words; the user's own are rows of word ranks, the most frequent being 1, filled up with 0."""
    index = None
    if settings.dataset in TEXT_DATA_SETS:
        splits = replace(load(settings.dataset, data_dir=data_dir), kind="features")
        texts = load_sequences(settings.dataset, data_dir=data_dir)
        index = load_word_index(data_dir=data_dir) if words.negation else None
    elif settings.dataset in data_set_names():
        raise InputError(
            f"features={settings.features!r} is not allowed for dataset={settings.dataset!r}: it is for texts. "
            "See 'sluice features list'."
        )
    else:
        splits = load(
            settings.dataset,
            kind="text",
            vocabulary=MOST_RANKS,
            classes=settings.classes,
            class_names=settings.class_names,
            target=settings.target,
        )
        _require_classes(splits, settings)
        texts = _ranked(splits.train), _ranked(splits.test)
    train, test = (words.examples(part, word_index=index) for part in texts)
    weighted = replace(splits, train=train, test=test)
    return _listed(weighted) if settings.model == WEIGHTED_WORDS else weighted


def _require_classes(splits: DataSplits, settings: TrainSettings) -> None:
    if len(splits.classes) == 1:
        raise DataError(
            f"{settings.dataset} has only labels 0, which is one class, and a model needs two. Say how many there can be: "
            "--classes 2."
        )


def _ranked(examples: Examples) -> LabelledSequences:
    return LabelledSequences(sequences=ranked(_inputs(examples).numpy()), labels=examples.labels)


def with_features(
    settings: TrainSettings, raw: Examples, *, rows: RowFeatures | None = None, centre: Tensor | None = None
) -> Examples:
    """Records of the form of the training data as the model of a finished run sees them.

    Args:
        rows: the features of the run, where they are rows.
        centre: the released mean of the rows, where there is one.
    """
    if rows is not None:
        seen = rows.of_images(_inputs(raw), show_progress=False, cache=False)
        return RowExamples(seen, raw.labels, rows).presented(centre)
    if settings.features == "scattering":
        return _scattered(raw, TRANSFORM_VERSION, show_progress=False, cache=False)
    return raw


def text_with_features(settings: TrainSettings, sequences: Sequences, *, function_words: Mapping[str, int]) -> Examples:
    """Texts as the model of a finished run sees them.

    Args:
        function_words: those of the training texts (`WeightedBagExamples`), where the run has some.
    """
    texts = LabelledSequences(sequences=sequences, labels=torch.zeros(len(sequences), dtype=torch.int64))
    block = blocks_of(settings.features)[0]
    if block.name == WEIGHTED_WORDS:
        weighted = text_feature(block).examples(texts, word_index=function_words or None)
        return weighted.listed() if settings.model == WEIGHTED_WORDS else weighted
    if block.name == BAG_OF_WORDS:
        bags = text_examples(texts, text_as=BAG_OF_WORDS)
        return bags.listed() if settings.model == BAG_OF_WORDS and isinstance(bags, BagExamples) else bags
    return text_examples(texts)


def _with_rows(splits: DataSplits, expression: str, show_progress: bool) -> DataSplits:
    channels, height, width = splits.train.input_shape
    features = RowFeatures.of(expression, (channels, height, width), show_progress=show_progress)
    train, test = (
        RowExamples(
            features.of_images(_inputs(part), show_progress=show_progress),
            part.labels,
            features,
            digests=part.digests(),
        )
        for part in (splits.train, splits.test)
    )
    return replace(splits, train=train, test=test)


def _inputs(examples: Examples) -> Tensor:
    """All records as they were stored: images as bytes if they were bytes."""
    if isinstance(examples, TensorExamples) and examples.inputs.dtype == torch.uint8:
        return examples.inputs
    return examples.batch(torch.arange(len(examples)))[0]


def _listed(splits: DataSplits) -> DataSplits:
    """Bags of words as lists of columns: a batch then costs what its words cost, and the model computes the same."""
    train, test = (
        part.listed() if isinstance(part, BagExamples | WeightedBagExamples) else part
        for part in (splits.train, splits.test)
    )
    return replace(splits, train=train, test=test)


def _no_images(settings: TrainSettings) -> InputError:
    images = ", ".join(name for name in data_set_names() if name not in TEXT_DATA_SETS)
    return InputError(
        f"features={settings.features!r} is not allowed for dataset={settings.dataset!r}: it is for images ({images}, or "
        "your own). Use 'plain', or 'weighted-words' for imdb."
    )


def _scattered(examples: Examples, version: int, show_progress: bool, *, cache: bool = True) -> TensorExamples:
    coefficients, digests = _coefficients(examples, version, show_progress, cache), examples.digests()
    if coefficients.nbytes > NORMALISED_AT_ONCE:
        return TensorExamples(coefficients, examples.labels, normalised, digests=digests)
    kept = torch.empty(coefficients.shape, dtype=torch.float16)
    for start in range(0, len(coefficients), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        kept[part] = _rounded(coefficients[part])
    return TensorExamples(kept, examples.labels, unscaled, digests=digests)


def _rounded(coefficients: Tensor) -> Tensor:
    # Normalised values are of order 1, where float16 is right to 1 part in 2048, like the coefficients themselves.
    return _normalise(coefficients).to(torch.float16)


def _coefficients(examples: Examples, version: int, show_progress: bool, cache: bool) -> Tensor:
    if (
        isinstance(examples, TensorExamples)
        and examples.inputs.dtype == torch.uint8
        and isinstance(examples.transform, ToFloat)
    ):
        return scattering_features(
            examples.inputs, scaling=examples.transform, show_progress=show_progress, version=version, cache=cache
        )
    channels, height, width = examples.input_shape
    transform = Scattering(height=height, width=width, in_c=version > PRODUCTS_ONLY)
    parts = [
        transform(examples.batch(positions)[0].float()).to(torch.float16)
        for positions in torch.arange(len(examples)).split(_ROWS_AT_ONCE)
    ]
    return torch.cat(parts) if parts else transform(torch.zeros(0, channels, height, width)).to(torch.float16)
