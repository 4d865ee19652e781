"""Thinning: what each record is kept with, what is charged for it, and the twin that weights instead of leaving out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.mechanism.gates import ClippingBiasGate
from sluice.mechanism.registry import mechanism_from_dict
from sluice.mechanism.rounding_error import NORM_ERROR
from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise, ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import LARGEST_SHARE, TABLE_STEPS, Tempered, ThinningGate

GATE = ThinningGate(strength=1.5, small_norm=0.2, large_norm=2.0)
STRANGE = torch.tensor([0.0, -1.0, 1e-30, 0.2, 2.0, 1e30, math.inf, math.nan])


def mechanism(**changes: object) -> SelectiveRelease:
    plain = SelectiveRelease(
        sample_rate=0.1, expected_batch_size=100.0, scaling=Clip(), noise_multiplier=2.0, releases=50, gate=GATE
    )
    return replace(plain, **changes)


@pytest.mark.parametrize("strength", [0.0, 0.1, 1.0, 4.0, 10.0, -0.5, -3.0, -10.0])
@pytest.mark.parametrize("rate", [1e-6, 0.017, 0.5, 0.999])
def test_probabilities_follow_the_formula(strength, rate):
    gate = replace(GATE, strength=strength)
    norms = torch.linspace(0, 2.5, 501, dtype=torch.float64)
    metric = gate.measure(norms)
    factor = torch.exp(-strength * metric + min(0.0, strength))
    expected = LARGEST_SHARE * factor / (1 - rate + rate * factor)
    kept = gate.keep_probability(norms, sample_rate=rate)
    # Straight lines between steps of the table: relative to the value, up to an eighth of the step's square.
    assert torch.allclose(kept, expected, rtol=2 * (strength / TABLE_STEPS) ** 2 + 1e-9, atol=2.0**-52)
    assert kept.min() > 0
    assert kept.max() == LARGEST_SHARE


def test_probabilities_are_exact_coins():
    """A 53-bit uniform is below it exactly as often as it says."""
    kept = GATE.keep_probability(torch.linspace(0, 3, 1001), sample_rate=0.3)
    assert torch.equal(kept * 2.0**53, (kept * 2.0**53).floor())


@given(st.lists(st.floats(0, 4), min_size=1, max_size=70), st.floats(-4, 4))
def test_a_probability_depends_on_its_own_norm_alone(norms, strength):
    gate = replace(GATE, strength=strength)
    together = gate.keep_probability(torch.tensor(norms), sample_rate=0.1)
    alone = [float(gate.keep_probability(torch.tensor([norm]), sample_rate=0.1)) for norm in norms]
    assert together.tolist() == alone
    ordered = gate.keep_probability(torch.tensor(sorted(norms)), sample_rate=0.1).diff()
    assert bool((ordered <= 0).all() if strength >= 0 else (ordered >= 0).all())


def test_norms_that_are_not_finite_count_fully():
    rarest = float(GATE.keep_probability(torch.tensor([5.0]), sample_rate=0.1))
    kept = GATE.keep_probability(STRANGE, sample_rate=0.1).tolist()
    assert kept == [LARGEST_SHARE] * 4 + [rarest, rarest, rarest, rarest]


def test_the_metric_is_that_of_the_clipping_bias_gate():
    norms = torch.cat([torch.linspace(0, 3, 301), STRANGE])
    other = ClippingBiasGate(small_norm=0.2, large_norm=2.0)
    assert torch.equal(GATE.measure(norms), other.measure(norms))


@given(st.floats(1e-4, 0.99), st.floats(-5, 5))
def test_candidates_are_drawn_at_the_largest_rate(rate, strength):
    gate = replace(GATE, strength=strength)
    candidates = gate.candidate_rate(rate)
    assert rate <= candidates < 1
    assert gate.plain_rate(candidates) == pytest.approx(rate)
    small, large = (candidates * gate.keep_probability(torch.tensor([0.0, 9.0]), sample_rate=candidates)).tolist()
    small, large = small / LARGEST_SHARE, large / LARGEST_SHARE
    assert small == pytest.approx(rate, rel=1e-6)
    assert large / (1 - large) == pytest.approx(math.exp(-strength) * rate / (1 - rate), rel=1e-6)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_it_costs_what_plain_sampling_costs_but_for_rounding(accountant):
    thinned = mechanism()
    plain = create_accountant(accountant).compose(mechanism(gate=None).dp_event).get_epsilon(1e-5)
    assert plain <= thinned.epsilon_after(50, delta=1e-5, accountant=accountant) <= 1.002 * plain
    assert "section 13" in thinned.theorem(accountant)
    assert not thinned.releases_metric
    assert thinned.provable


@pytest.mark.parametrize(("strength", "moved"), [(0.1, 1), (1.0, 1), (10.0, 1), (1.0, 256), (-4.0, 1)])
def test_what_rounding_can_do_is_charged(strength, moved):
    """Norms with the largest error on either side, at every place of the metric."""
    gate = replace(GATE, strength=strength, moved_records=moved)
    norms = torch.linspace(0, 2.2, 4001, dtype=torch.float64)
    low, high = (gate.keep_probability(norms * (1 + sign * NORM_ERROR), sample_rate=0.1) for sign in (-1, 1))
    acceptance = gate.acceptance
    for one, other in ((low, high), (1 - low, 1 - high)):
        worst = max(float((one / other).max()), float((other / one).max()))
        assert worst**moved <= acceptance.ratio_max == 1 / acceptance.ratio_min
    assert acceptance.probability_min == 1


def test_preferring_large_gradients_costs_more():
    gate = replace(GATE, strength=-1.0)
    charged = mechanism(gate=gate, sample_rate=gate.candidate_rate(0.1))
    assert charged.epsilon_after(50, delta=1e-5, accountant="rdp") > mechanism().epsilon_after(
        50, delta=1e-5, accountant="rdp"
    )
    assert charged.expected_candidates == pytest.approx(100 * charged.sample_rate / 0.1)
    assert mechanism().expected_candidates == 100


def test_what_is_still_open_is_charged_as_the_steepest():
    open_gate = replace(GATE, small_norm=None)
    filled = [open_gate.for_batches_of(1.0, small_norm=small) for small in (0.0, 0.5, 1.8, 9.0)]
    assert all(gate.acceptance.ratio_max <= open_gate.acceptance.ratio_max for gate in filled)


def test_ledgers_keep_both():
    tempered = Tempered(base=GlobalScaling(bound=0.5), gate=ThinningGate(strength=-2.0), sample_rate=0.3)
    for each in (mechanism(), mechanism(gate=None, scaling=tempered), mechanism(scaling=tempered)):
        assert mechanism_from_dict(each.to_dict()) == each
    assert dict(mechanism().summary)["gate"].startswith("thinning, strength 1.5")
    assert dict(mechanism(scaling=tempered).summary)["scaling"] == "global-scaling, tempered with strength -2"


@given(
    st.sampled_from([Clip(), GlobalScaling(bound=0.4), Normalise(gamma=0.1)]),
    st.floats(-10, 10),
    st.floats(1e-3, 1.0),
    st.floats(0, 1e6),
)
def test_the_twin_never_lengthens_a_gradient(base, strength, bound, norm):
    rule = Tempered(max_grad_norm=bound, base=base, gate=replace(GATE, strength=strength), sample_rate=0.2)
    norms = torch.tensor([norm])
    weight, plain = float(rule(norms)), float(replace(base, max_grad_norm=bound)(norms))
    assert 0 <= weight <= plain
    assert weight * float(norms) <= rule.sensitivity == bound


def test_the_twin_is_the_mean_of_the_gate():
    base, norms = GlobalScaling(max_grad_norm=0.5, bound=0.3), torch.cat([torch.linspace(0, 3, 50), STRANGE])
    rule = Tempered(max_grad_norm=0.5, base=base, gate=GATE, sample_rate=0.2)
    expected = base(norms).double() * GATE.keep_probability(norms, sample_rate=0.2) / LARGEST_SHARE
    assert torch.allclose(rule(norms).double(), expected, rtol=1e-6)
    assert rule(STRANGE).tolist()[-2:] == [0.0, 0.0]


def test_what_is_left_open_is_filled_in():
    gate = ThinningGate(large_norm=2.0)
    assert gate.for_batches_of(10.0, small_norm=0.3).small_norm == 0.3
    assert gate.for_batches_of(10.0, small_norm=5.0).small_norm == pytest.approx(1.8)
    assert GATE.for_batches_of(10.0, small_norm=0.3) == GATE
    rule: ScalingRule = Tempered(max_grad_norm=0.5, base=Clip(), gate=gate, sample_rate=0.1)
    assert isinstance(rule, Tempered)
    assert (rule.base.max_grad_norm, rule.gate.small_norm, rule.unclipped_norm) == (0.5, 0.5, 0.5)
    assert replace(Tempered(base=Clip(), gate=GATE, sample_rate=0.1), max_grad_norm=3.0).sensitivity == 3.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ThinningGate(strength=math.nan), "strength=nan"),
        (lambda: ThinningGate(strength=11.0), "strength=11.0 is not allowed: it must be from -10 to 10"),
        (lambda: ThinningGate(moved_records=0), "moved_records=0"),
        (lambda: ThinningGate(large_norm=0.0), "large_norm=0"),
        (lambda: ThinningGate(small_norm=1.0, large_norm=1.05), "small_norm=1.0 is not allowed: it must be at most 0.9"),
        (lambda: ThinningGate().measure(STRANGE), "small_norm=None"),
        (lambda: mechanism(sample_rate=1.0), "sample_rate=1 is not allowed with a gate that thins"),
        (lambda: Tempered(base=Clip(max_grad_norm=2.0), gate=GATE, sample_rate=0.1), "base.max_grad_norm=2.0 contradicts"),
        (lambda: Tempered(base=Clip(), gate=GATE, sample_rate=0.0), "sample_rate=0"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
