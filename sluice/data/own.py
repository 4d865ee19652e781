"""A user's own records: arrays, tables, folders of images, or any map-style data set."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from sluice._base.errors import DataError, InputError
from sluice._base.validate import one_of
from sluice.data import tables
from sluice.data.array_files import SPLIT_KEYS, WHOLE_KEYS, read_arrays
from sluice.data.examples import DataSplits, Examples, Indices, TensorExamples
from sluice.data.files import Kind
from sluice.data.image_folder import is_image_folder, read_image_folder
from sluice.data.labels import class_labels, one_hot_width
from sluice.data.splitting import split_off
from sluice.data.targets import Targets
from sluice.data.transforms import Transform, to_float, to_ids, unscaled

SPLIT_SEED = 0
CHANNELS = (1, 3, 4)


class DatasetExamples(Examples):
    """Any map-style torch data set that yields (x, y); each batch is read record by record, as a loader would.

    The labels are read once at the start. The guarantee of ``Examples`` holds if it does for the data set.
    """

    def __init__(self, dataset: Dataset[Any], labels: Tensor, chosen: Tensor | None = None) -> None:
        self.dataset = dataset
        self.labels = labels
        self._chosen = torch.arange(len(labels)) if chosen is None else chosen

    def inputs_at(self, indices: Tensor) -> Tensor:
        if len(indices) == 0:
            return self._inputs([int(self._chosen[0])])[:0]
        return self._inputs(self._chosen[indices].tolist())

    def subset(self, indices: Indices) -> Self:
        positions = self.positions(indices)
        return type(self)(self.dataset, self.labels[positions], self._chosen[positions])

    def _inputs(self, positions: list[int]) -> Tensor:
        try:
            inputs = default_collate([self.dataset[position][0] for position in positions])
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"The inputs of {type(self.dataset).__name__} cannot be stacked into one tensor: {error}. "
                "Make every x a tensor (or array or number) of one shape."
            ) from error
        if not isinstance(inputs, Tensor):
            raise DataError(f"Each x of {type(self.dataset).__name__} must be one tensor, not {type(inputs).__name__}.")
        return inputs.to(torch.float32) if inputs.dtype == torch.float64 else inputs


def from_path(
    path: Path,
    *,
    kind: Kind | None,
    test_fraction: float,
    vocabulary: int,
    targets: Targets,
    target: str | None = None,
) -> DataSplits:
    """Read x and y (or x_train, y_train, x_test, y_test) from ``path`` and check that they fit together.

    **Guarantee.** Records are only read and checked; none is changed by what another one holds, nor does its side of the
    split depend on another. What is taken to be public is the layout: the shape of a record, the type of the arrays and,
    where classes are not counted beforehand, the highest label.
    """
    arrays, own_names = read(path, target=target, targets=targets)
    return from_arrays(
        arrays,
        name=path.stem,
        where=path,
        kind=kind,
        test_fraction=test_fraction,
        vocabulary=vocabulary,
        targets=targets.of_declared(own_names, str(path)),
    )


def read(
    path: Path, *, target: str | None, targets: Targets, require_targets: bool = True
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The arrays that a path holds, in whatever form, and the names of classes where it tells them."""
    if path.suffix in tables.ENDINGS or (path.is_dir() and tables.table_parts(path)):
        return tables.read_table(path, target=target, targets=targets, require_target=require_targets), ()
    if target is not None and require_targets:
        raise InputError(f"target={target!r} is not allowed for {path}: only tables have columns with names.")
    if path.is_dir() and not any(path.glob("*.npy")) and is_image_folder(path):
        return read_image_folder(path, at_least=2 if require_targets else 1)
    return read_arrays(path, require_labels=require_targets), ()


def from_arrays(
    arrays: dict[str, np.ndarray],
    *,
    name: str,
    where: Path | str,
    kind: Kind | None,
    test_fraction: float,
    vocabulary: int,
    targets: Targets,
) -> DataSplits:
    """Records from x and y, or from x_train, y_train, x_test and y_test. Guarantee: that of `from_path`."""
    path = where
    names = WHOLE_KEYS if set(WHOLE_KEYS) <= arrays.keys() else SPLIT_KEYS
    parts = {each: _examples(path, each, arrays, kind, vocabulary, targets) for each in names if each.startswith("x")}
    classes, class_names = targets.classes, targets.names
    if classes is not None and class_names and classes != len(class_names):
        raise InputError(f"classes={classes} contradicts the {len(class_names)} class_names: give one of them.")
    numbered: tuple[str, ...] = ()
    if targets.are_classes:
        width = one_hot_width(arrays["y" if names is WHOLE_KEYS else "y_train"])
        numbered = _classes(*parts.values(), count=len(class_names) or classes or width, where=str(path))
    train = parts["x" if names is WHOLE_KEYS else "x_train"]
    if names is WHOLE_KEYS:
        train, test = split(train, test_fraction)
    else:
        test = parts["x_test"]
        if train.inputs.shape[1:] != test.inputs.shape[1:]:
            raise DataError(
                f"{path}: x_train has records of shape {tuple(train.inputs.shape[1:])}, x_test of "
                f"{tuple(test.inputs.shape[1:])}. Both must have the same shape."
            )
    digest = hashlib.sha256()
    for each in names:
        digest.update(f"{each} {arrays[each].dtype.str} {arrays[each].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[each]).tobytes())
    return DataSplits(
        name=name,
        kind=kind or kind_of(arrays["x" if names is WHOLE_KEYS else "x_train"]),
        classes=class_names or numbered,
        train=train,
        test=test,
        fingerprint=digest.hexdigest(),
    )


def from_dataset(
    dataset: Dataset[Any],
    *,
    test: Dataset[Any] | None,
    kind: Kind | None,
    test_fraction: float,
    classes: int | None,
) -> DataSplits:
    """Wrap the user's data set; without ``test``, a share of its records becomes the test set.

    **Guarantee.** That of `from_path`, for a data set that gives a record by itself and always alike.
    """
    train = wrap(dataset, "the data set")
    held: Examples = wrap(test, "test") if test is not None else train
    named = _named_classes(dataset) if classes is None else ()
    class_names = _classes(train, held, count=len(named) or classes, where=type(dataset).__name__)
    if test is None:
        train, held = split(train, test_fraction)
    elif train.input_shape != held.input_shape:
        raise DataError(f"Records of shape {train.input_shape} cannot be tested on records of {held.input_shape}.")
    inputs = train.batch([])[0]
    return DataSplits(
        name=type(dataset).__name__,
        kind=kind or ("image" if inputs.ndim == 4 else "features"),
        classes=named or class_names,
        train=train,
        test=held,
    )


def wrap(dataset: Dataset[Any], what: str) -> Examples:
    """Records of any map-style data set, read by index. Tensor data sets keep their speed."""
    if isinstance(dataset, Examples):
        return dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            f"{what} ({type(dataset).__name__}) is not allowed: random batches need __len__ and __getitem__. "
            "Read the stream into a TensorDataset first."
        )
    size = len(dataset)
    if size == 0:
        raise DataError(f"{what} ({type(dataset).__name__}) is empty.")
    first = dataset[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise DataError(f"{what} ({type(dataset).__name__}) must yield (x, y); record 0 is a {type(first).__name__}.")
    if isinstance(dataset, TensorDataset):
        inputs, labels = dataset.tensors
        return TensorExamples(inputs, class_labels(labels.numpy(force=True), what), _identity)
    DatasetExamples(dataset, torch.zeros(1, dtype=torch.int64)).batch([0])
    labels = class_labels(np.array([_read_label(dataset, i, first[0], what) for i in range(size)]), what)
    return DatasetExamples(dataset, labels)


def split(examples: Examples, test_fraction: float) -> tuple[Any, Any]:
    """Train and test parts, each record's side decided by itself; a fraction of 0 leaves the test part empty."""
    if test_fraction == 0:
        return examples, examples.subset([])
    return split_off(examples, test_fraction, part="test", seed=SPLIT_SEED)


def _identity(inputs: Tensor) -> Tensor:
    return inputs


def _examples(
    path: Path | str,
    x_name: str,
    arrays: dict[str, np.ndarray],
    kind: Kind | None,
    vocabulary: int,
    targets: Targets,
) -> TensorExamples:
    y_name = x_name.replace("x", "y", 1)
    x, y = arrays[x_name], arrays[y_name]
    where = f"{path}[{x_name}]"
    require_records(x, where)
    labels = targets.read(y, f"{path}[{y_name}]")
    require_pairs(x, labels, where, y_name)
    inputs, transform = model_inputs(x, kind or kind_of(x), where, vocabulary)
    return TensorExamples(inputs, labels, transform)


def require_records(x: np.ndarray, where: str) -> None:
    """Refuse what is no array of at least one record of finite numbers."""
    if x.ndim < 2 or x.size == 0:
        raise DataError(f"{where} has shape {x.shape}; it must be (records, ...) with at least one of each.")
    if x.dtype.kind not in "buif" or (x.dtype.kind == "f" and not np.isfinite(x).all()):
        found = f"type {x.dtype}" if x.dtype.kind not in "buif" else "NaN or infinite values"
        raise DataError(f"{where} has {found}; it must hold finite numbers.")


def require_pairs(x: np.ndarray, labels: Tensor, where: str, y_name: str) -> None:
    """Refuse labels that are more or fewer than the records."""
    if len(x) != len(labels):
        raise DataError(
            f"{where} has {len(x)} records, {y_name} has {len(labels)} labels; they must be equal in number."
        )


def kind_of(x: np.ndarray) -> Kind:
    return "image" if x.ndim == 4 or (x.ndim == 3 and x.dtype == np.uint8) else "features"


def model_inputs(x: np.ndarray, kind: Kind, where: str, vocabulary: int = 20_000) -> tuple[Tensor, Transform]:
    """An array as it is kept, and what makes model inputs of a batch of it; refuses what is not of its kind."""
    one_of(("image", "text", "features"), kind=kind)
    if kind == "text":
        # An id beyond the vocabulary would end the run when its record is drawn, which everybody could see.
        if x.ndim != 2 or x.dtype.kind not in "ui" or x.min() < 0 or x.max() >= vocabulary:
            raise DataError(
                f"{where} ({x.dtype}, shape {x.shape}) is not text: rows of word ids from 0 to {vocabulary - 1} are "
                "needed (vocabulary sets the limit)."
            )
        return torch.from_numpy(x.astype(np.int64)), to_ids
    if kind == "image":
        x = x[:, None] if x.ndim == 3 else x
        if x.ndim == 4 and x.shape[1] not in CHANNELS and x.shape[3] in CHANNELS:
            x = np.moveaxis(x, 3, 1)
        if x.ndim != 4 or x.shape[1] not in CHANNELS:
            raise DataError(
                f"{where} has shape {x.shape}; images must be (N, height, width), (N, channels, height, width) or "
                "(N, height, width, channels) with 1, 3 or 4 channels."
            )
    if x.dtype == np.uint8:
        return torch.from_numpy(np.array(x, order="C")), to_float if kind == "image" else unscaled
    with np.errstate(over="ignore"):
        values = np.array(x, dtype=np.float32, order="C")
    if not np.isfinite(values).all():
        raise DataError(f"{where} holds values too large for float32; scale them down.")
    return torch.from_numpy(values), unscaled


def _read_label(dataset: Dataset[Any], index: int, first: Any, what: str) -> float:
    """The label of a record, whose input must have the shape and type of the first.

    A run that ends on another shape would show that there is such a record, and a batch takes the type that holds all of its records.
    """
    inputs, label = dataset[index]
    if np.shape(inputs) != np.shape(first) or _type_of(inputs) != _type_of(first):
        raise DataError(
            f"The inputs of {type(dataset).__name__} cannot be stacked into one tensor: {what} has a record {index} of "
            f"shape {tuple(np.shape(inputs))} ({_type_of(inputs)}) beside a record 0 of shape {tuple(np.shape(first))} "
            f"({_type_of(first)}). Make every x of one shape and type."
        )
    try:
        return label.item() if hasattr(label, "item") else float(label)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what}: label {index} is {label!r}; labels must be integers from 0.") from error


def _type_of(inputs: Any) -> str:
    return str(getattr(inputs, "dtype", type(inputs).__name__))


def _classes(*parts: Examples, count: int | None, where: str) -> tuple[str, ...]:
    highest = max(int(part.labels.max()) for part in parts)
    if count is not None and highest >= count:
        raise DataError(
            f"{where} has labels up to {highest}, which classes={count} does not allow: they must be below it. "
            "Give the number of classes that there can be."
        )
    return tuple(str(number) for number in range(highest + 1 if count is None else count))


def _named_classes(dataset: Dataset[Any]) -> tuple[str, ...]:
    return tuple(str(name) for name in getattr(dataset, "classes", ()))
