"""How the process keeps its memory."""

from __future__ import annotations

import ctypes
import os
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_KEPT = 1 << 29
_LARGEST_KEPT = 1 << 25
_CHOSEN_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep up to 512 MB that were freed, in blocks of up to 32 MB, for what is allocated next; whether that could be arranged.

    Training allocates and frees the same large tensors in every step. By default glibc gives such memory back to the system,
    depending on what else was allocated meanwhile, and gets it page by page again, which costs up to a third of a step. For
    programs of our own: in a library it would decide for its users.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _CHOSEN_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT))
