from __future__ import annotations

import math

import pytest
from dp_accounting import rdp
from scipy.stats import norm

from sluice._base.errors import InputError
from sluice.accounting import create_accountant
from sluice.experiments.settings import settings_from
from sluice.mechanism.gates import ClippingBiasGate, CoinGate
from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import Tempered, ThinningGate
from sluice.methods import planned_mechanism

SIZE = 1437


def planned(**overrides: object) -> SelectiveRelease:
    return planned_mechanism(settings_from({"releases": 40, **overrides}), dataset_size=SIZE)


def epsilon(mechanism: SelectiveRelease, accountant: str = "pld", delta: float = 1e-5) -> float:
    return float(create_accountant(accountant).compose(mechanism.dp_event).get_epsilon(delta))


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("gate", ["clipping-bias", "thinning", "coin", "none"])
def test_the_plan_just_keeps_the_budget(gate, accountant):
    mechanism = planned(gate=gate, accountant=accountant, epsilon=2.0)
    assert 1.98 < epsilon(mechanism, accountant) <= 2.0


def test_the_gate_takes_part_in_the_budget():
    assert planned().noise_multiplier > planned(method="dpsgd").noise_multiplier
    assert planned(gate="coin").noise_multiplier == pytest.approx(planned(gate="none").noise_multiplier, rel=1e-3)


def test_thinning_needs_the_noise_of_plain_training():
    thinned, plain = planned(gate="thinning", strength=4.0), planned(gate="none")
    assert thinned.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=3e-3)
    assert (thinned.sample_rate, thinned.expected_batch_size) == (plain.sample_rate, plain.expected_batch_size)
    gate = thinned.gate
    assert isinstance(gate, ThinningGate)
    assert (gate.strength, gate.small_norm, gate.large_norm, gate.moved_records) == (4.0, 1.0, 11.0, 1)
    assert isinstance(planned(gate="thinning").gate, ThinningGate)


def test_preferring_large_gradients_is_charged_at_the_rate_of_candidates():
    thinned, plain = planned(gate="thinning", strength=-1.0), planned(gate="none")
    odds = plain.sample_rate / (1 - plain.sample_rate) * math.e
    assert thinned.sample_rate == pytest.approx(odds / (1 + odds))
    assert thinned.expected_batch_size == plain.expected_batch_size
    assert thinned.noise_multiplier > 1.5 * plain.noise_multiplier
    assert epsilon(thinned) <= 3.0


def test_tempering_is_a_scaling_rule_and_costs_nothing():
    tempered, plain = planned(gate="none", tempering=2.0), planned(gate="none")
    assert tempered.noise_multiplier == plain.noise_multiplier
    rule = tempered.scaling
    assert isinstance(rule, Tempered)
    assert (rule.base, rule.gate.strength, rule.sample_rate) == (plain.scaling, 2.0, plain.sample_rate)
    assert planned(tempering=2.0).gate == planned().gate


def test_given_noise_is_kept():
    mechanism = planned(noise_multiplier=1.5, gate_noise=2.0, reference_noise=math.inf)
    assert mechanism.noise_multiplier == 1.5
    assert isinstance(mechanism.gate, ClippingBiasGate)
    assert (mechanism.gate.gate_noise, mechanism.gate.reference_noise) == (2.0, math.inf)
    with_budget = planned(gate_noise=2.0, reference_noise=30.0, epsilon=1.0)
    assert isinstance(with_budget.gate, ClippingBiasGate)
    assert (with_budget.gate.gate_noise, with_budget.gate.reference_noise) == (2.0, 30.0)
    assert epsilon(with_budget) <= 1.0


def test_given_gradient_noise_sets_the_gates_own():
    gate = planned(noise_multiplier=1.5).gate
    assert isinstance(gate, ClippingBiasGate)
    assert (gate.gate_noise, gate.reference_noise) == (1.5, 7.5)


def test_the_coin_falls_as_often_as_an_even_comparison_passes():
    gate = planned(gate="coin", noise_multiplier=2.0).gate
    assert isinstance(gate, CoinGate)
    assert gate.probability == pytest.approx(norm.sf(3 / 8))
    chosen = planned(gate="coin", coin_probability=0.25).gate
    assert isinstance(chosen, CoinGate)
    assert chosen.probability == 0.25


@pytest.mark.parametrize(
    ("scaling", "rule", "small_norm"),
    [
        ("clip", Clip(max_grad_norm=2.0), 2.0),
        ("global", GlobalScaling(max_grad_norm=2.0, bound=0.5), 0.5),
        ("normalise", Normalise(max_grad_norm=2.0, gamma=0.5), 2.0),
    ],
)
def test_the_scaling_rule_and_what_the_gate_counts(scaling, rule, small_norm, tmp_path):
    overrides = {"scaling": scaling, "max_grad_norm": 2.0, "noise_multiplier": 1.0}
    if scaling != "clip":
        overrides["scaling_bound"] = 0.5
    mechanism = planned(**overrides)
    assert mechanism.scaling == rule
    assert isinstance(mechanism.gate, ClippingBiasGate)
    assert mechanism.gate.small_norm == small_norm


def test_the_sample_rate_is_exact():
    mechanism = planned(batch_size=100, noise_multiplier=1.0)
    assert mechanism.sample_rate == 100 / SIZE
    assert mechanism.expected_batch_size == mechanism.sample_rate * SIZE
    with pytest.raises(InputError, match="batch_size"):
        planned(batch_size=SIZE + 1)


def test_a_cap_on_attempts_that_costs_more_than_delta_is_refused_before_training():
    with pytest.raises(InputError, match="max_attempts"):
        planned(noise_multiplier=2.0, max_attempts=2)
    assert planned(noise_multiplier=2.0, max_attempts=1000).gate.max_attempts == 1000


def test_a_hidden_reference_proves_nothing():
    mechanism = planned(hidden_reference=True, noise_multiplier=1.0)
    assert not mechanism.provable
    figures = mechanism.report(delta=1e-5)
    assert [figure.accountant for figure in figures] == ["claimed (paper)", "claimed (paper)"]
    assert not any(figure.guaranteed for figure in figures)


def test_the_figures_are_those_of_the_accountants():
    mechanism = planned(noise_multiplier=2.0)
    pld, renyi, claimed, _ = mechanism.report(delta=1e-5)
    assert pld.value == epsilon(mechanism)
    assert renyi.value == epsilon(mechanism, "rdp")
    assert pld.value <= renyi.value
    assert (pld.guaranteed, renyi.guaranteed, claimed.guaranteed) == (True, True, False)
    assert "no guarantee" in claimed.meaning


def test_plain_dp_sgd_costs_what_dp_accounting_says():
    mechanism = planned(method="dpsgd", noise_multiplier=2.0)
    pld, renyi = mechanism.report(delta=1e-5)
    assert pld.guaranteed
    known = rdp.RdpAccountant().compose(mechanism.dp_event).get_epsilon(1e-5)
    assert renyi.value == pytest.approx(known, rel=0.02)
