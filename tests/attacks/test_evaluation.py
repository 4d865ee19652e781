"""Judging scores: against scikit-learn, with ties, and at small false positive rates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from sluice._base.errors import InputError
from sluice.attacks.evaluation import (
    clopper_pearson,
    evaluate,
    largest_true_positive_rate,
    roc_curve,
    true_positive_rate,
)
from sluice.attacks.roc_plot import roc_plot


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=60), st.integers(1, 3))
def test_agrees_with_scikit_learn_ties_included(records, divisor):
    scores = np.array([score // divisor for score, _ in records], dtype=float)
    members = np.array([member for _, member in records])
    if members.all() or not members.any():
        return
    curve = roc_curve(scores, members)
    false, true, _ = metrics.roc_curve(members, scores, drop_intermediate=False)
    np.testing.assert_allclose(curve.false_positive_rates, false)
    np.testing.assert_allclose(curve.true_positive_rates, true)
    found = evaluate(scores, members, threshold=1.0)
    assert found.auc == pytest.approx(metrics.roc_auc_score(members, scores))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(members, scores > 1.0))
    assert found.best_balanced_accuracy == pytest.approx(0.5 + (true - false).max() / 2)


def test_equal_scores_pass_a_threshold_together():
    members = np.array([True] * 50 + [False] * 100)
    found = evaluate(np.zeros(150), members)
    assert found.auc == found.best_balanced_accuracy == 0.5
    assert [(rate.asked, rate.rate) for rate in found.rates] == [(0.01, 0.0)]


def test_rate_is_at_the_largest_false_positive_rate_that_is_attained():
    scores = np.concatenate([[10.0, 9.0, 7.0, -1.0], [8.0, 8.0], np.zeros(198)])
    members = np.array([True] * 4 + [False] * 200)
    found = true_positive_rate(roc_curve(scores, members), at=0.01)
    assert (found.attained, found.rate) == (0.01, 0.75)
    scores[6] = 8.0  # now three share the place, and 1.5 % is too many
    found = true_positive_rate(roc_curve(scores, members), at=0.01)
    assert (found.attained, found.rate) == (0.0, 0.5)
    assert (found.low, found.high) == clopper_pearson(2, 4)


@pytest.mark.parametrize(("non_members", "allowed"), [(999, False), (1000, True)])
def test_small_rates_need_many_non_members(non_members, allowed):
    members = np.array([True] * 10 + [False] * non_members)
    scores = np.random.default_rng(0).random(len(members))
    assert (0.001 in [rate.asked for rate in evaluate(scores, members).rates]) is allowed
    if not allowed:
        with pytest.raises(InputError, match="at least 1000"):
            true_positive_rate(roc_curve(scores, members), at=0.001)


def test_clopper_pearson_fixed_points():
    assert clopper_pearson(0, 100) == (0.0, pytest.approx(1 - 0.025 ** (1 / 100)))
    assert clopper_pearson(100, 100) == (pytest.approx(0.025 ** (1 / 100)), 1.0)
    assert clopper_pearson(5, 10) == (pytest.approx(0.187086, abs=1e-6), pytest.approx(0.812914, abs=1e-6))
    with pytest.raises(InputError, match="hits=11"):
        clopper_pearson(11, 10)


def test_limit_is_that_of_differential_privacy():
    limit = largest_true_positive_rate([0.0, 0.1, 1.0], epsilon=1.0, delta=0.01)
    assert limit == pytest.approx([0.01, 0.1 * np.e + 0.01, 1.0])
    assert largest_true_positive_rate([0.5], epsilon=1.0, delta=0.0) == pytest.approx([1 - 0.5 / np.e])


@pytest.mark.parametrize(
    ("scores", "members"),
    [([1.0, np.nan], [True, False]), ([1.0, 2.0], [True, True]), ([1.0, 2.0], [1, 0]), ([1.0], [True, False])],
)
def test_refuses_what_cannot_be_judged(scores, members):
    with pytest.raises(InputError, match="not allowed"):
        evaluate(scores, np.array(members))


def test_plot_is_a_picture_and_the_same_each_time():
    curve = roc_curve([3.0, 2.0, 1.0, 0.0], np.array([True, False, True, False]))
    drawn = roc_plot({"loss": curve}, epsilon=1.0)
    assert drawn.startswith(b"\x89PNG")
    assert drawn == roc_plot({"loss": curve}, epsilon=1.0)
