from __future__ import annotations

import torch

from sluice.gradients.workspace import Workspace


def test_memory_is_used_again_once_its_loan_is_gone():
    space, like = Workspace(), torch.zeros(1)
    first, loan = space.empty("a", (4, 5), like)
    address = first.data_ptr()
    del first, loan
    second, _loan = space.empty("a", (3, 5), like)
    assert second.data_ptr() == address
    third, _ = space.empty("a", (3, 5), like)
    assert third.data_ptr() != address
    assert second.shape == third.shape == (3, 5)


def test_keys_and_types_do_not_share_memory():
    space = Workspace()
    tensors = [
        space.empty("a", (8,), torch.zeros(1)),
        space.empty("b", (8,), torch.zeros(1)),
        space.empty("a", (8,), torch.zeros(1, dtype=torch.float64)),
    ]
    assert len({tensor.data_ptr() for tensor, _ in tensors}) == 3
    assert tensors[2][0].dtype == torch.float64


def test_the_largest_is_kept():
    space, like = Workspace(), torch.zeros(1)
    large, _ = space.empty("a", (100,), like)
    address = large.data_ptr()
    del large, _
    small, loan = space.empty("a", (10,), like)
    del small, loan
    assert space.empty("a", (100,), like)[0].data_ptr() == address
