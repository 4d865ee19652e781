"""Which records each model is trained on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.experiments.attacks.split import drawn_records, four_way_split, half_of, shadow_membership


@given(st.integers(6, 500), st.integers(0, 10))
def test_four_parts_are_disjoint_and_two_to_one(records, seed):
    split = four_way_split(records, seed=seed)
    parts = [split.target_train, split.target_test, split.shadow_train, split.shadow_test]
    n = records // 6
    assert [len(part) for part in parts] == [2 * n, n, 2 * n, n]
    joined = np.concatenate(parts)
    assert len(set(joined.tolist())) == 6 * n
    assert 0 <= joined.min() <= joined.max() < records


def test_split_is_permuted_by_the_seed_and_repeats_with_it():
    first, again, other = (four_way_split(600, seed=seed).target_train for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert set(first.tolist()) != set(other.tolist())
    assert set(first.tolist()) != set(range(200))
    assert abs(first.mean() - 299.5) < 60  # 5 standard errors of a random fifth


def test_every_record_is_out_of_half_of_the_shadow_models():
    inside = shadow_membership(300, shadows=8, seed=0)
    assert (inside.sum(axis=0) == 4).all()
    assert abs(inside.sum(axis=1) - 150).max() < 50
    assert (shadow_membership(300, shadows=5, seed=0).sum(axis=0) == 2).all()
    with pytest.raises(InputError, match="shadows=1"):
        shadow_membership(10, shadows=1, seed=0)


def test_targets_are_drawn_apart_from_each_other_and_from_shadow_models():
    first, second = (half_of(1000, seed=0, target=number) for number in (0, 1))
    assert first.sum() == second.sum() == 500
    assert 150 < (first & second).sum() < 350
    shadows = shadow_membership(1000, shadows=2, seed=0)
    assert 150 < (first & shadows[0]).sum() < 350


def test_records_are_drawn_once_each():
    drawn = drawn_records(50, of=100, seed=0)
    assert len(set(drawn.tolist())) == 50
    with pytest.raises(InputError, match="records=101"):
        drawn_records(101, of=100, seed=0)
    with pytest.raises(InputError, match="records=5"):
        four_way_split(5, seed=0)
