"""Noticing that a tensor has changed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sluice.gradients.sharding import own_part

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensor: Tensor) -> tuple[int, ...]:
    """Numbers that change when the tensor does, also behind autograd's back (``p.data``); they cost one reading.

    It is read in words of eight bytes, which takes a tenth of the time that words of four do.
    """
    flat = own_part(tensor).detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    together = 8 // flat.element_size()
    rest = flat.numel() % together if flat.storage_offset() % together == 0 else flat.numel()
    whole, integers = flat.numel() - rest, flat.view(_INTEGERS[flat.element_size()])
    if flat.is_cpu:
        # Of small tensors numpy makes the same sums in a fraction of the time.
        values = integers.numpy()
        return int(np.add.reduce(values[:whole].view(np.int64))), int(np.add.reduce(values[whole:], dtype=np.int64))
    total = int(integers[:whole].view(torch.int64).sum()) if whole else 0
    return total, int(integers[whole:].sum(dtype=torch.int64)) if rest else 0
