from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sluice.gradients.digest import digest_of

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (2,), (7,), (5, 9)])
def test_digests_are_sums_of_words_and_of_what_is_left(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    """Journals hold digests, so what they are must not change."""
    tensor = torch.randn(shape).to(kind)
    together = 8 // tensor.element_size()
    flat = tensor.reshape(-1)
    whole = flat.numel() // together * together
    words = flat[:whole].clone().view(torch.int64).sum() if whole else torch.tensor(0)
    left = flat[whole:].view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
    assert digest_of(tensor) == (int(words), int(left))


@pytest.mark.parametrize("tensor", [torch.randn(6, 7).t(), torch.randn(11)[3:], torch.randn(4, 1).expand(4, 3)])
def test_any_entry_changes_the_digest(tensor: Tensor) -> None:
    before = digest_of(tensor)
    changed = tensor.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[-1] += 1
    assert digest_of(changed) != before
    assert digest_of(tensor) == before
