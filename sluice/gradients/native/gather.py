"""Stored records as float32, by a compiled kernel. See `kernels`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sluice.gradients.native.kernels import available, require
from sluice.gradients.native.loading import loaded_library
from sluice.gradients.native.rows import is_index

_NO_SUCH_ROW = 2


def gather_rows(stored: Tensor, indices: Tensor, *, into: Tensor) -> bool:
    """``into[i] = stored[indices[i]]``, converted; false where there is no kernel for it and nothing was written.

    Args:
        stored: ``[any, ...]``, float16 or float32.
        indices: ``[n]``, int64.
        into: ``[n, ...]``, float32, contiguous.
    """
    usable = available(into) and stored.device.type == "cpu" and stored.is_contiguous()
    if not usable or stored.dtype not in (torch.float16, torch.float32):
        return False
    count = indices.shape[0]
    require(into.shape == (count, *stored.shape[1:]) and into.is_contiguous() and is_index(indices, count))
    width = math.prod(stored.shape[1:])
    failed: int = loaded_library().gather_rows(
        *(count, width, stored.shape[0], stored.data_ptr(), stored.element_size()),
        *(indices.data_ptr(), into.data_ptr(), torch.get_num_threads()),
    )
    require(failed != _NO_SUCH_ROW)
    return failed == 0
