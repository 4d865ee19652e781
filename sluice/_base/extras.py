"""Packages that not everybody needs: which extra brings each, and what is said where it is absent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice._base.errors import SluiceError

#: Top-level module to extra of this package.
EXTRAS = {
    "dask": "cluster",
    "distributed": "cluster",
    "joblib": "study",
    "kymatio": "bench",
    "matplotlib": "plots",
    "opacus": "opacus",
    "PIL": "images",
    "pooch": "data",
    "pyarrow": "tables",
    "ray": "ray",
    "requests": "data",
    "sklearn": "data",
    "tensorboard": "tensorboard",
}


class MissingPackageError(SluiceError, ImportError):
    """Something asked for needs a package that is not installed; the message says how to get it."""


@contextmanager
def needing_extras() -> Iterator[None]:
    """Inside, a package that is absent becomes an error that names the extra which brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise MissingPackageError(
            f"this needs {package}, which is not installed. Get it with: pip install 'sluice[{EXTRAS[package]}]'"
        ) from error
