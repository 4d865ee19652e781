from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from sluice._base.errors import InputError
from sluice.data import TensorExamples, standardised, to_float
from sluice.data.transforms import unscaled


def examples(count: int) -> TensorExamples:
    """Record i holds the number i in every pixel and has label i."""
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 2, 2).clone()
    return TensorExamples(images, torch.arange(count), to_float)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda i: np.array(i, dtype=np.int32)])
def test_batches_are_read_by_any_row_of_numbers(kind: Any) -> None:
    x, y = examples(10).batch(kind([7, 2, 7]))
    assert y.tolist() == [7, 2, 7]
    assert (x.dtype, y.dtype, x.shape) == (torch.float32, torch.int64, (3, 3, 2, 2))
    torch.testing.assert_close(x[:, 0, 0, 0], torch.tensor([7, 2, 7]) / 255)


@pytest.mark.parametrize("nothing", [[], np.array([]), torch.tensor([]), torch.tensor([], dtype=torch.int64)])
def test_an_empty_batch_has_the_right_shape(nothing: Any) -> None:
    x, y = examples(4).batch(nothing)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((0, 3, 2, 2), torch.float32, (0,), torch.int64)


@pytest.mark.parametrize("wrong", [[-1], [10], [0.5], [[1, 2]], torch.tensor([True, False])])
def test_indices_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="indices"):
        examples(10).batch(wrong)


def test_it_is_a_torch_data_set() -> None:
    data = examples(7)
    x, y = data[-1]
    assert (x.shape, int(y)) == ((3, 2, 2), 6)
    assert len(list(data)) == 7
    batches = list(DataLoader(data, batch_size=3))
    assert [labels.tolist() for _, labels in batches] == [[0, 1, 2], [3, 4, 5], [6]]
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), data.batch(range(7))[0])
    assert data.input_shape == (3, 2, 2)
    assert data.to("cpu").inputs.dtype == torch.uint8


def test_inputs_and_labels_must_be_equally_many() -> None:
    with pytest.raises(InputError, match="equal in number"):
        TensorExamples(torch.zeros(3, 2), torch.zeros(2), to_float)


def test_standardising_uses_the_constants_of_imagenet() -> None:
    x = standardised(torch.full((1, 3, 1, 1), 255, dtype=torch.uint8)).flatten()
    torch.testing.assert_close(x, torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]))


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.bfloat16])
def test_stored_features_are_read_as_they_are_and_stay_when_more_are_read(kind: torch.dtype) -> None:
    features = torch.randn(9, 3, 5).to(kind)
    data = TensorExamples(features, torch.arange(9), unscaled)
    batches = [data.batch([i, 0, i]) for i in range(9)]
    assert all(torch.equal(x, features[[i, 0, i]].float()) for i, (x, _) in enumerate(batches))
