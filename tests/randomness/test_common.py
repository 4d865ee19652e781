"""What several workers draw alike, and that nothing of it can be drawn twice."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import pytest
import torch

from sluice._base.errors import InputError
from sluice._base.grids import release_grid
from sluice.randomness.common import CommonNoise, CommonSeededNoise
from sluice.randomness.noise import SecureNoise, SeededNoise, noisy_sum
from sluice.randomness.rounded_normal import Entries

KEY = bytes(range(32))


def test_workers_with_one_key_draw_alike_and_never_the_same_twice():
    first, second = CommonNoise(KEY), CommonNoise(KEY)
    draws = [first.uniform((4,)) for _ in range(3)]
    assert all(torch.equal(draw, second.uniform((4,))) for draw in draws)
    assert len({tuple(draw.tolist()) for draw in draws}) == 3
    order = torch.arange(50)
    shuffled = first.random_order(order)
    assert torch.equal(shuffled, second.random_order(order))
    assert not torch.equal(shuffled, first.random_order(order))
    assert first.calls == 5


def test_the_state_of_models_is_each_workers_own():
    first, second = CommonNoise(KEY), CommonNoise(KEY)
    mine, other = (noise.side_keystream("model").read(8, np.uint64) for noise in (first, second))
    assert (mine != other).all()
    assert first.calls == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_cannot_be_copied(copied):
    with pytest.raises(InputError, match="cannot be copied"):
        copied(CommonNoise(KEY))


def test_a_forked_child_is_refused(monkeypatch):
    noise = CommonNoise(KEY)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(InputError, match="another process"):
        noise.uniform((1,))


def test_its_checkpoints_are_those_of_any_secure_source():
    SecureNoise().load_state_dict(CommonNoise(KEY).state_dict())
    CommonNoise(KEY).load_state_dict(SecureNoise().state_dict())


def test_a_seeded_source_is_that_of_one_worker_but_for_the_state_of_models():
    alone = SeededNoise(3)
    alone.uniform((2,))
    first, second = (CommonSeededNoise(3, rank=rank, state=alone.state_dict()) for rank in (0, 1))
    expected = alone.uniform((4,))
    assert torch.equal(first.uniform((4,)), expected)
    assert torch.equal(second.uniform((4,)), expected)
    assert first.calls == second.calls == 2
    mine, other, single = (noise.side_keystream("model")._key for noise in (first, second, alone))
    assert mine == single != other


def test_parts_of_a_sum_are_on_the_grid_of_the_whole():
    part = torch.full((100,), 0.3, dtype=torch.float64)
    noisy_sum([part], noise_multiplier=1.0, sensitivity=1.0, noise=SeededNoise(1), part_of=1000)
    (whole, std), (alone, _) = (release_grid(noise_multiplier=1.0, sensitivity=1.0, entries=n) for n in (1000, 100))
    assert whole < alone
    assert bool((part / whole == (part / whole).round()).all())
    assert not bool((part / alone == (part / alone).round()).all())
    drawn = torch.full((100,), 0.3, dtype=torch.float64)
    SeededNoise(1).add_rounded_normal(Entries([drawn]), scale=std / whole, step=whole)
    assert torch.equal(part, drawn)
