"""Libraries in C, built once by the machine's own compiler for exactly its processor, and kept in the user's cache.

They are plain C behind `ctypes`: torch's own builder of extensions needs ninja, and half a minute for its headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from sluice._base.files import cache_dir, replaced_atomically

_ALWAYS = ("-O3", "-std=gnu11", "-fPIC", "-fno-math-errno")
#: The first set of flags that builds something which works is taken.
_VARIANTS: tuple[tuple[str, ...], ...] = (("-march=native", "-fopenmp"), ("-march=native",), ())
_SECONDS = 120

_log = logging.getLogger(__name__)


def built_library(
    source: Path, *, declare: Callable[[ctypes.CDLL], None], works: Callable[[ctypes.CDLL], bool]
) -> ctypes.CDLL | None:
    """The library of one C file, built now if it has not been built on this machine; None where that cannot be done.

    None also with ``SLUICE_NATIVE=0``. OpenMP's functions are looked up among what is loaded already, so torch must be
    for a library to run in (torch's own) threads; without it the library is built for one thread.

    Args:
        source: may include other ``.c`` and ``.h`` files of its folder.
        declare: sets the types of its functions.
        works: whether it gives the right results; a broken compiler must not change anybody's.
    """
    if os.environ.get("SLUICE_NATIVE") == "0":
        return None
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))), None)
    if compiler is None:
        _log.info("No C compiler was found: %s runs on torch operations.", source.stem)
        return None
    for flags in _VARIANTS:
        try:
            loaded = _loaded(_built(source, compiler, flags))
        except (OSError, subprocess.SubprocessError) as error:
            _log.info("%s cannot be built with %s: %s", source.stem, " ".join(flags) or "no flags", error)
        else:
            declare(loaded)
            if works(loaded):
                return loaded
            _log.warning("%s, built with %s, gives wrong results and is not used.", source.stem, " ".join(flags))
    return None


def required(library: ctypes.CDLL | None) -> ctypes.CDLL:
    """The library, for a caller who knows that there is one."""
    if library is None:
        raise AssertionError("compiled kernels were called where there are none")
    return library


def _built(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library's file. Its name tells the sources, the flags, and the compiler and processor they were used with."""
    # All macros that the compiler defines: its version, and what it takes the processor to be able to do.
    target = _run(compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)
    sources = sorted(source.parent.glob("*.[ch]"))
    content = "\0".join((*_ALWAYS, *flags, target, *(path.read_text() for path in sources)))
    file = cache_dir() / "native" / f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:24]}.so"
    if not file.exists():
        with replaced_atomically(file, owner_only=True) as temporary, tempfile.TemporaryDirectory() as folder:
            compiled = str(Path(folder) / f"{source.stem}.o")
            _run(compiler, *_ALWAYS, *flags, "-c", str(source), "-o", compiled)
            # Linked without -fopenmp: what that needs is found in the library that torch has loaded.
            _run(compiler, "-shared", compiled, "-lm", "-o", str(temporary))
            temporary.chmod(0o700)
    return file


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout


def _loaded(file: Path) -> ctypes.CDLL:
    """A cache may lie where others can write; code that somebody else put there must not run."""
    if hasattr(os, "getuid") and file.stat().st_uid != os.getuid():
        raise PermissionError(f"{file} belongs to another user")
    return ctypes.CDLL(str(file))
