"""One way in: a name, a path or a data set of the user's own becomes ``DataSplits``."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from sluice._base.errors import DataError, InputError
from sluice._base.extras import needing_extras
from sluice._base.validate import one_of, open_fraction, positive_integer
from sluice.data import own
from sluice.data.catalog import CATALOG, DIGITS, IMDB, entry_named, names
from sluice.data.download import download as fetch
from sluice.data.examples import DataSplits, Examples, TensorExamples
from sluice.data.files import (
    CatalogEntry,
    DataFile,
    Kind,
    Location,
    download_root,
    locate,
    read_verified,
    repair_command,
    search_roots,
)
from sluice.data.hugging_face import is_hugging_face, read_hugging_face
from sluice.data.labels import MOST_CLASSES, class_names_from
from sluice.data.targets import TARGET_KINDS, TargetKind, Targets
from sluice.data.text import BagExamples, LabelledSequences, Sequences, bag_of_words, padded
from sluice.data.unlabelled import DIGITS_SCALE
from sluice.data.unpacked import unpacked

DEFAULT_VOCABULARY = 20_000
DIGITS_TEST_SIZE = 360
DIGITS_SPLIT_SEED = 0
DIGITS_SHA256 = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"

Source = str | Path | Dataset[Any] | DataSplits


def load(
    source: Source,
    *,
    test: Dataset[Any] | None = None,
    data_dir: str | Path | None = None,
    download: bool = True,
    vocabulary: int | None = None,
    length: int | None = None,
    text_as: Literal["ids", "bag-of-words"] = "ids",
    kind: Kind | None = None,
    test_fraction: float = 0.2,
    classes: int | None = None,
    class_names: str | Sequence[str] | None = None,
    target: str | None = None,
    target_kind: TargetKind = "class",
) -> DataSplits:
    """Load a data set by name, or the user's own from a path or a torch data set.

    Names: ``digits``, ``mnist``, ``fashion-mnist``, ``cifar-10``, ``imdb``. Their files are looked for in
    ``data_dir``, ``$SLUICE_DATA`` and the user's cache, and downloaded into the cache if ``download`` allows.

    ``vocabulary``, ``length`` and ``text_as`` are for texts: ids below 20,000, cut or padded to 80, by default; as
    bags of words, the 10,000 most frequent words after the 50 commonest.

    ``test``, ``kind``, ``test_fraction`` and ``classes`` are for the user's own data: a test set, what the records are
    (guessed from their shape otherwise), the share that becomes the test set where the data has none, and how many
    classes there can be. Without ``classes`` the highest label tells, and that there is such a label becomes public.
    ``class_names`` says what the classes are called, in the order of their numbers; labels that are strings need it. In tables
    that declare no types, every label is then one of these names, otherwise a number. ``target``
    is the column of a table, or of a Hugging Face data set, to predict. ``target_kind`` says that targets of files and Hugging Face
    data sets are a "number" or a "count" for each record; ``labels`` are float32 then, and there are no classes.
    ``vocabulary`` is also for files with ``kind="text"``: their ids must lie below it.

    **Guarantee.** No file is parsed before its sha256 was checked (the user's own files are read without pickle
    instead). Each record of the result, and whether it is for training or for testing, depends on that record of the
    source alone.
    """
    if isinstance(source, DataSplits):
        return source
    is_own = not (isinstance(source, str) and source in names())
    one_of(TARGET_KINDS, target_kind=target_kind)
    given = (test, kind, classes, class_names, target)
    if not is_own and (target_kind != "class" or not all(each is None for each in given)):
        raise InputError(
            f"test, kind, classes, class_names, target and numbers to predict are for your own data; {source!r} has its own "
            "test set and classes."
        )
    named = class_names_from(class_names)
    is_own_text = isinstance(source, str | Path) and is_own and kind == "text"
    if source != IMDB.name and (length is not None or text_as != "ids" or not (vocabulary is None or is_own_text)):
        raise InputError(
            f"vocabulary, length and text_as are only allowed for 'imdb', not for {_label(source)}; vocabulary also for "
            "files of your own with kind='text'."
        )
    if source == DIGITS:
        return _digits()
    if source == IMDB.name:
        return _imdb(data_dir, download, vocabulary, length, text_as)
    if isinstance(source, str) and source in CATALOG:
        return _images(CATALOG[source], data_dir, download)
    if test_fraction != 0:
        open_fraction(test_fraction=test_fraction)
    if classes is not None:
        positive_integer(classes=classes)
        if not 2 <= classes <= MOST_CLASSES:
            raise InputError(f"classes={classes} is not allowed: it must be from 2 to {MOST_CLASSES}.")
    if is_hugging_face(source):
        arrays, declared = read_hugging_face(source, test=test, target=target)
        return own.from_arrays(
            arrays,
            name=type(source).__name__,
            where="the data set",
            kind=kind,
            test_fraction=test_fraction,
            vocabulary=DEFAULT_VOCABULARY,
            targets=Targets(classes=classes, names=named, kind=target_kind).of_declared(declared, "the data set"),
        )
    if not isinstance(source, str | Path):
        if named or target is not None or target_kind != "class":
            raise InputError(
                "class_names, target and target_kind are for files and Hugging Face data sets: give a torch data set with integer labels an "
                "attribute classes."
            )
        return own.from_dataset(source, test=test, kind=kind, test_fraction=test_fraction, classes=classes)
    path = _own_path(source, test)
    words = DEFAULT_VOCABULARY if vocabulary is None else vocabulary
    positive_integer(vocabulary=words)
    return own.from_path(
        path,
        kind=kind,
        test_fraction=test_fraction,
        vocabulary=words,
        targets=Targets(classes=classes, names=named, kind=target_kind),
        target=target,
    )


def load_sequences(
    name: str = "imdb", *, data_dir: str | Path | None = None, download: bool = True
) -> tuple[LabelledSequences, LabelledSequences]:
    """The texts of a data set as lists of plain word ranks, with their labels: train, test."""
    entry = entry_named(name)
    if entry.kind != "text":
        raise InputError(f"name={name!r} is not allowed: {name} holds no texts; imdb does.")
    train, test, _ = _sequences(entry, data_dir, download)
    return train, test


def load_word_index(*, data_dir: str | Path | None = None, download: bool = True) -> dict[str, int]:
    """The public word index of imdb: each word's frequency rank, 1 for the most frequent."""
    contents, _ = read_files(IMDB, data_dir=data_dir, download=download, only="imdb_word_index.json")
    index: dict[str, int] = json.loads(contents["imdb_word_index.json"])
    return index


def read_files(
    entry: CatalogEntry, *, data_dir: str | Path | None, download: bool, only: str | None = None
) -> tuple[dict[str, bytes], str]:
    """The verified bytes of an entry's files, and the sha256 that stands for all of them together."""
    location = locate(entry, search_roots(data_dir))
    contents, joint = {}, hashlib.sha256()
    for file in location.layout:
        if file.optional if only is None else file.name != only:
            continue
        path = location.paths.get(file.name) or _fetched(entry, file, location, data_dir, download)
        contents[file.name], digest = read_verified(path, file, entry_name=entry.name)
        joint.update(f"{file.name} {digest}\n".encode())
    return contents, joint.hexdigest()


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The 1,797 images of scikit-learn's digits, values 0 to 16, checked like any file."""
    rows = _embedded_digits()
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1]
    found = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    if found != DIGITS_SHA256:
        raise DataError(
            f"digits, embedded in scikit-learn, is damaged: expected sha256 {DIGITS_SHA256}; found {found}.\n"
            "Repair it with: pip install --force-reinstall scikit-learn"
        )
    return images, labels


def _embedded_digits() -> np.ndarray:
    """A row for each image, its label last. The file is read past scikit-learn, whose import takes far longer."""
    package = find_spec("sklearn")
    path = Path(package.origin if package and package.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        with needing_extras():
            from sklearn.datasets import load_digits

        return np.column_stack(load_digits(return_X_y=True)).astype(np.uint8)
    try:
        return np.loadtxt(gzip.decompress(path.read_bytes()).splitlines(), delimiter=",").astype(np.uint8)
    except (EOFError, OSError, ValueError, zlib.error) as error:
        raise DataError(
            f"digits, embedded in scikit-learn, is damaged: {path} cannot be read ({error}).\n"
            "Repair it with: pip install --force-reinstall scikit-learn"
        ) from error


def _fetched(
    entry: CatalogEntry, file: DataFile, location: Location, data_dir: str | Path | None, download: bool
) -> Path:
    if file.mirrors and download:
        return fetch(file, download_root())
    searched = ", ".join(str(root) for root in search_roots(data_dir))
    raise DataError(
        f"{entry.name}: {file.name} is missing: expected {file.expected}; found nothing in {searched}.\n"
        f"Repair it with: {repair_command(entry.name, None if file.mirrors else location.root)}"
    )


def _arrays(entry: CatalogEntry, data_dir: str | Path | None, download: bool) -> tuple[Mapping[str, np.ndarray], str]:
    contents, digest = read_files(entry, data_dir=data_dir, download=download)
    return unpacked(entry.name, digest, lambda: entry.unpack(contents)), digest


def _images(entry: CatalogEntry, data_dir: str | Path | None, download: bool) -> DataSplits:
    arrays, digest = _arrays(entry, data_dir, download)
    train, test = (
        TensorExamples(
            torch.from_numpy(arrays[f"{part}_inputs"]), torch.from_numpy(arrays[f"{part}_labels"]), entry.transform
        )
        for part in ("train", "test")
    )
    return DataSplits(
        name=entry.name, kind=entry.kind, classes=entry.classes, train=train, test=test, fingerprint=digest
    )


def _sequences(
    entry: CatalogEntry, data_dir: str | Path | None, download: bool
) -> tuple[LabelledSequences, LabelledSequences, str]:
    arrays, digest = _arrays(entry, data_dir, download)
    train, test = (
        LabelledSequences(
            sequences=Sequences(
                ids=torch.from_numpy(arrays[f"{part}_ids"]), offsets=torch.from_numpy(arrays[f"{part}_offsets"])
            ),
            labels=torch.from_numpy(arrays[f"{part}_labels"]).to(torch.int64),
        )
        for part in ("train", "test")
    )
    return train, test, digest


def _imdb(
    data_dir: str | Path | None, download: bool, vocabulary: int | None, length: int | None, text_as: str
) -> DataSplits:
    one_of(("ids", "bag-of-words"), text_as=text_as)
    if text_as == "bag-of-words" and length is not None:
        raise InputError(f"length={length} is not allowed with text_as='bag-of-words': a bag has no length.")
    *parts, digest = _sequences(IMDB, data_dir, download)
    train, test = (text_examples(part, vocabulary, length, text_as) for part in parts)
    kind: Kind = "features" if text_as == "bag-of-words" else "text"
    return DataSplits(name=IMDB.name, kind=kind, classes=IMDB.classes, train=train, test=test, fingerprint=digest)


def text_examples(
    part: LabelledSequences, vocabulary: int | None = None, length: int | None = None, text_as: str = "ids"
) -> Examples:
    """Texts as a model reads them: padded ids, or bags of words."""
    if text_as == "bag-of-words":
        return BagExamples(bag_of_words(part.sequences, 10_000 if vocabulary is None else vocabulary), part.labels)
    words, columns = DEFAULT_VOCABULARY if vocabulary is None else vocabulary, 80 if length is None else length
    return TensorExamples(padded(part.sequences, vocabulary=words, length=columns), part.labels, IMDB.transform)


def _digits() -> DataSplits:
    images, labels = read_digits()
    whole = TensorExamples(torch.from_numpy(images), torch.from_numpy(labels), DIGITS_SCALE)
    # numpy froze this generator: the split is the same on every machine and with every later version.
    order = np.random.RandomState(DIGITS_SPLIT_SEED).permutation(len(whole))
    return DataSplits(
        name=DIGITS,
        kind="image",
        classes=tuple("0123456789"),
        train=whole.subset(order[DIGITS_TEST_SIZE:]),
        test=whole.subset(order[:DIGITS_TEST_SIZE]),
        fingerprint=DIGITS_SHA256,
    )


def _own_path(source: str | Path, test: Dataset[Any] | None) -> Path:
    path = Path(source).expanduser()
    if not path.exists():
        raise InputError(
            f"{str(source)!r} is neither a data set ({', '.join(names())}) nor a file or folder. "
            "Give one of these names, or your own data: a .npz, .csv or .parquet file, or a folder."
        )
    if test is not None:
        raise InputError("test is for torch data sets; put x_test and y_test into the file instead.")
    return path


def _label(source: Source) -> str:
    return repr(str(source)) if isinstance(source, str | Path) else type(source).__name__
