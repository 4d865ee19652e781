"""LiRA and RMIA on synthetic scores whose distributions are known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from sluice._base.errors import InputError
from sluice.attacks.evaluation import evaluate
from sluice.attacks.lira import lira_scores
from sluice.attacks.references import References
from sluice.attacks.rmia import chosen_offline_slope, likelihood_ratios, rmia_scores

SHIFT = 1.0


def synthetic(*, models, records=4000, seed=0, spread=1.0, shift=SHIFT):
    """Each record has a mean of its own; IN models lie a shift above it, all with the same deviation 1."""
    generator = np.random.default_rng(seed)
    mean = generator.normal(size=records) * 3
    inside = generator.random((models, records)).argsort(axis=0) < models // 2
    truth = generator.random(records) < 0.5
    deviation = generator.uniform(1 / spread, spread, records)
    shadows = mean + shift * inside + deviation * generator.normal(size=inside.shape)
    target = mean + shift * truth + deviation * generator.normal(size=records)
    return References.of(target=target, shadows=shadows, inside=inside), truth


@pytest.mark.parametrize("variant", ["online", "offline"])
@pytest.mark.parametrize("variance", ["pooled", "per-record", "auto"])
def test_lira_reaches_the_closed_form_with_many_models(variant, variance):
    references, truth = synthetic(models=256)
    auc = evaluate(lira_scores(references, variant=variant, variance=variance), truth).auc
    assert auc == pytest.approx(norm.cdf(SHIFT / np.sqrt(2)), abs=0.02)


def test_online_score_is_the_log_likelihood_ratio():
    references, _ = synthetic(models=4, records=5)
    score = lira_scores(references, variance="per-record")[2]
    outs = references.shadows[~references.inside[:, 2], 2]
    ins = references.shadows[references.inside[:, 2], 2]
    at = references.target[2]
    expected = norm.logpdf(at, ins.mean(), ins.std(ddof=1)) - norm.logpdf(at, outs.mean(), outs.std(ddof=1))
    assert score == pytest.approx(expected)
    offline = lira_scores(references, variant="offline", variance="per-record")[2]
    assert offline == pytest.approx((at - outs.mean()) / outs.std(ddof=1))


def test_pooled_deviation_is_within_records_not_between_them():
    references, _ = synthetic(models=16)
    offline = lira_scores(references, variant="offline", variance="pooled")
    deviation = (references.target - references.means("OUT")) / offline
    assert deviation == pytest.approx(np.ones(len(deviation)), abs=0.02)  # between records it is 3


def test_pooled_beats_per_record_with_few_models_and_auto_is_pooled_then():
    for seed in range(3):
        references, truth = synthetic(models=4, seed=seed)
        found = {
            name: evaluate(lira_scores(references, variance=name), truth) for name in ("pooled", "per-record", "auto")
        }
        assert found["pooled"].auc > found["per-record"].auc + 0.02
        assert found["auto"].auc == found["pooled"].auc


def test_per_record_beats_pooled_with_many_models_where_records_differ():
    references, truth = synthetic(models=256, spread=6.0)
    pooled, own = (evaluate(lira_scores(references, variance=name), truth).auc for name in ("pooled", "per-record"))
    assert own > pooled + 0.01
    np.testing.assert_array_equal(lira_scores(references), lira_scores(references, variance="per-record"))


def test_equal_shadow_scores_give_finite_lira_scores():
    inside = np.array([[True], [True], [False], [False]])
    references = References.of(target=[1.0], shadows=np.zeros((4, 1)), inside=inside)
    assert np.isfinite(lira_scores(references, variance="per-record")).all()


def test_refuses_records_without_out_models():
    inside = np.array([[True, False], [True, True]])
    with pytest.raises(InputError, match="record 0 has 0 OUT models"):
        References.of(target=[0.0, 0.0], shadows=np.zeros((2, 2)), inside=inside)
    references = References.of(target=[0.0], shadows=np.zeros((2, 1)), inside=np.zeros((2, 1), dtype=bool))
    with pytest.raises(InputError, match="has 0 IN models"):
        lira_scores(references)
    with pytest.raises(InputError, match="NaN"):
        References.of(target=[np.nan], shadows=np.zeros((2, 1)), inside=np.zeros((2, 1), dtype=bool))


def probabilities(seed=0, models=8):
    references, truth = synthetic(models=models, records=2000, seed=seed)
    squash = lambda values: 1 / (1 + np.exp(-values))  # noqa: E731
    return References.of(
        target=squash(references.target), shadows=squash(references.shadows), inside=references.inside
    ), truth


@pytest.mark.parametrize("variant", ["online", "offline"])
def test_rmia_finds_members(variant):
    references, truth = probabilities()
    assert evaluate(rmia_scores(references, variant=variant), truth).auc > 0.6


def test_rmia_is_the_share_of_the_population_beaten_and_ties_go_by_ratio():
    references, _ = probabilities()
    ratios = likelihood_ratios(references, offline_slope=0.3)
    population = np.linspace(0.5, 2.0, 50)
    scores = rmia_scores(references, offline_slope=0.3, gamma=2.0, population=population)
    brute = np.array([(ratio / population >= 2.0).mean() for ratio in ratios])
    assert np.abs(scores - brute).max() <= 1 / (2 * len(population))
    tied = brute == 0
    assert tied.sum() > 100
    assert (np.diff(scores[tied][np.argsort(ratios[tied])]) >= 0).all()
    assert len(np.unique(scores[tied])) == len(np.unique(ratios[tied]))


def test_rmia_offline_formula_and_choice_of_slope():
    references, _ = probabilities()
    p_out = references.means("OUT")
    expected = references.target / ((1.3 * p_out + 0.7) / 2)
    np.testing.assert_allclose(likelihood_ratios(references, offline_slope=0.3), expected)
    assert chosen_offline_slope(references) in [number / 10 for number in range(11)]
    flipped = References.of(target=references.target[::-1], shadows=references.shadows, inside=references.inside)
    assert chosen_offline_slope(flipped) == chosen_offline_slope(references)  # the target plays no role
    with pytest.raises(InputError, match="offline_slope=2"):
        likelihood_ratios(references, offline_slope=2.0)
    with pytest.raises(InputError, match="probabilities"):
        likelihood_ratios(synthetic(models=4)[0], offline_slope=0.3)
