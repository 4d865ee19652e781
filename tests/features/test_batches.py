from __future__ import annotations

import threading

import pytest
import torch

from sluice.features.batches import in_batches


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 30])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_in_order_and_shapes_all_alike(count, threads):
    images = torch.arange(count * 4.0).view(count, 1, 2, 2)
    shapes, inner_threads = set(), set()

    def compute(part: torch.Tensor) -> torch.Tensor:
        shapes.add(tuple(part.shape))
        inner_threads.add(torch.get_num_threads())
        return 2 * part.flatten(1)

    configured = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = in_batches(compute, images, batch=8, width=4)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(configured)
    assert torch.equal(rows, 2 * images.flatten(1))
    assert shapes <= {(8, 1, 2, 2)}
    assert inner_threads <= {1}


def test_an_error_reaches_the_caller():
    def fail(part: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(threading.current_thread().name)

    with pytest.raises(RuntimeError):
        in_batches(fail, torch.zeros(3, 1, 2, 2), batch=2, width=4)
