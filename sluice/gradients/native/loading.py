"""Kernels in C, built once by the machine's own compiler for exactly its processor, and kept in the user's cache.

Torch has no operation for what they do: many small products that share their operands, whose norms are wanted and not
always the results. Where no compiler is found, where building fails, or with ``SLUICE_NATIVE=0``, everything runs on torch
operations instead; results are the same up to rounding.

They are plain C behind `ctypes`: torch's own builder of extensions needs ninja, and half a minute for its headers. They
run in torch's threads, because torch's OpenMP library is the one that is already loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from sluice._base.files import cache_dir, replaced_atomically

_FOLDER = Path(__file__).parent
_ALWAYS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno")
#: The first set of flags that builds something which works is taken.
_VARIANTS: tuple[tuple[str, ...], ...] = (("-march=native", "-fopenmp"), ("-march=native",), ())
_SECONDS = 120

_TAKE_A_STRUCT = (
    *("correlate_groups", "lstm_forward", "lstm_backward", "gru_forward", "gru_backward"),
    *("rows_norm_backward", "group_norm_backward", "group_norm_backward_channels_last"),
)

_log = logging.getLogger(__name__)
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


@cache
def library() -> ctypes.CDLL | None:
    """The kernels, built now if they have not been built on this machine; None where that cannot be done."""
    if os.environ.get("SLUICE_NATIVE") == "0":
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        _log.info("No C compiler was found: kernels run on torch operations.")
        return None
    for flags in _VARIANTS:
        try:
            loaded = _load(_built(compiler, flags))
        except (OSError, subprocess.SubprocessError) as error:
            _log.info("Kernels cannot be built with %s: %s", " ".join(flags) or "no flags", error)
        else:
            if _works(loaded):
                return loaded
    return None


def loaded_library() -> ctypes.CDLL:
    """The kernels, for a caller who knows that there are some."""
    found = library()
    if found is None:
        raise AssertionError("compiled kernels were called where there are none")
    return found


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's file. Its name tells the sources, the flags, and the compiler and processor they were used with."""
    # All macros that the compiler defines: its version, and what it takes the processor to be able to do.
    target = _run(compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)
    sources = sorted(_FOLDER.glob("*.[ch]"))
    content = "\0".join((*_ALWAYS, *flags, target, *(path.read_text() for path in sources)))
    file = cache_dir() / "native" / f"kernels-{hashlib.sha256(content.encode()).hexdigest()[:24]}.so"
    if not file.exists():
        with replaced_atomically(file, owner_only=True) as temporary, tempfile.TemporaryDirectory() as folder:
            compiled = str(Path(folder) / "kernels.o")
            _run(compiler, *_ALWAYS, *flags, "-c", str(_FOLDER / "kernels.c"), "-o", compiled)
            # Linked without -fopenmp: what that needs is found in the library that torch has loaded.
            _run(compiler, "-shared", compiled, "-lm", "-o", str(temporary))
            temporary.chmod(0o700)
    return file


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def _load(file: Path) -> ctypes.CDLL:
    _refuse_if_not_own(file)
    loaded = ctypes.CDLL(str(file))
    loaded.correlate.restype = ctypes.c_int
    loaded.correlate.argtypes = [
        *[_integer] * 6,
        *(_pointer, _integer, _pointer, _pointer),
        *(_pointer, _integer, _integer),
        *(_pointer, _integer, _integer, _pointer, ctypes.c_int),
    ]
    loaded.add_rows.restype = None
    loaded.add_rows.argtypes = [_integer, _integer, *[_pointer] * 5, ctypes.c_int]
    for name in _TAKE_A_STRUCT:
        kernel = getattr(loaded, name)
        kernel.restype, kernel.argtypes = ctypes.c_int, [_pointer]
    return loaded


def _refuse_if_not_own(file: Path) -> None:
    """A cache may lie where others can write; code that somebody else put there must not run."""
    if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
        raise PermissionError(f"{file} belongs to another user")


def _works(loaded: ctypes.CDLL) -> bool:
    """Whether it gives the exact result for small integers; a broken compiler must not change anybody's norms."""
    inputs, outputs = torch.arange(2 * 3 * 7.0).view(2, 3, 7), torch.arange(2 * 3 * 17.0).view(2, 3, 17)
    windows, places = torch.arange(7), torch.arange(3) * 7
    found, squares = torch.empty(2, 7, 17), torch.empty(2)
    loaded.correlate(
        *(2, 3, 7, 17, 1, 0, inputs.data_ptr(), 21, windows.data_ptr(), places.data_ptr()),
        *(outputs.data_ptr(), 51, 17, found.data_ptr(), 7 * 17, 7, squares.data_ptr(), 1),
    )
    expected = torch.einsum("ntc,nto->nco", inputs, outputs)
    return bool((found == expected).all()) and torch.allclose(squares, expected.square().sum((1, 2)), rtol=1e-5)
