from __future__ import annotations

import torch

from sluice.gradients.workspace import Pool, Workspace


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


def test_a_pool_lends_memory_again_when_no_view_of_it_is_left():
    pool = Pool()
    first = pool.empty((4, 5))
    address, view = first.data_ptr(), first[2:].t()
    del first
    second = pool.empty((4, 5))
    assert second.data_ptr() != address
    del view
    third = pool.empty((3, 5))
    assert third.data_ptr() == address
    assert third.shape == (3, 5)
    assert third.is_contiguous()


def test_memory_in_a_graph_stays_with_it():
    pool = Pool()
    weight = torch.ones(6, requires_grad=True)
    total = (pool.empty((6,)).fill_(2.0) * weight).sum()
    pool.empty((6,)).fill_(7.0)
    total.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 6


def test_a_pool_keeps_few_blocks_of_fitting_size():
    pool = Pool(blocks=2, largest=100)
    lent = [pool.empty((50,)) for _ in range(4)]
    assert len({tensor.data_ptr() for tensor in lent}) == 4
    lent.clear()
    kept = {block.ctypes.data for block in pool._free}
    assert len(kept) == 2
    small = pool.empty((20,))  # does not fit: either block stays free
    assert {block.ctypes.data for block in pool._free} == kept
    fitting = pool.empty((40,))
    assert fitting.data_ptr() in kept
    del fitting
    assert small.data_ptr() not in kept
    assert pool.empty((101,)).shape == (101,)
    assert pool.empty((0, 3)).shape == (0, 3)
    assert {block.ctypes.data for block in pool._free} == kept
