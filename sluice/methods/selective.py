"""From settings to the mechanism of selective release, before any record is read."""

from __future__ import annotations

from dataclasses import replace

import scipy

from sluice.accounting import create_accountant
from sluice.accounting.gate_calibration import REFERENCE_RATIO
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise, ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import Tempered, ThinningGate
from sluice.methods.base import RunSettings

DEFAULT_STRENGTH = 1.0


def selective_mechanism(settings: RunSettings, dataset_size: int) -> SelectiveRelease:
    """The mechanism of a run with a gate, or of plain DP-SGD: with the noise that is given, or calibrated to the budget by the sound accountant.

    Where ``noise_multiplier`` is given, a gate noise that is left open is the same number, as in the DPSR-CG paper, and
    a reference noise five times that.
    """
    batch_size = settings.batch_size or dataset_size
    rate = exact_sample_rate(batch_size=batch_size, dataset_size=dataset_size)
    scaling = _tempered(settings, scaling_rule(settings), sample_rate=rate)
    gate = _open_gate(settings)
    if gate is not None:
        gate = gate.for_batches_of(rate * dataset_size, small_norm=scaling.unclipped_norm)
    mechanism = _with_noise(
        settings,
        SelectiveRelease(
            sample_rate=rate if gate is None else gate.candidate_rate(rate),
            expected_batch_size=rate * dataset_size,
            scaling=scaling,
            releases=settings.releases,
            gate=gate,
            prior_releases=() if settings.mean_noise is None else (settings.mean_noise,),
        ),
    )
    gate = mechanism.gate
    if gate is not None and gate.max_attempts is not None and mechanism.provable:
        # The accountant refuses a cap on attempts that costs more than delta; better now than after training.
        create_accountant(settings.accountant).compose(mechanism.dp_event).get_epsilon(settings.delta)
    return mechanism


def _with_noise(settings: RunSettings, open_mechanism: SelectiveRelease) -> SelectiveRelease:
    sigma = settings.noise_multiplier
    if settings.chosen_gate == "coin":
        # The blur of a calibrated clipping-bias gate is that of the gradient noise, so the coin falls as often.
        blur = _calibrated(settings, open_mechanism).sigma if sigma is None else sigma
        open_mechanism = replace(open_mechanism, gate=_coin(settings, gate_noise=blur))
    if sigma is None:
        return _calibrated(settings, open_mechanism)
    gate = open_mechanism.gate
    if isinstance(gate, ClippingBiasGate):
        gate_noise = sigma if settings.gate_noise is None else settings.gate_noise
        reference_noise = REFERENCE_RATIO * sigma if settings.reference_noise is None else settings.reference_noise
        gate = replace(gate, gate_noise=gate_noise, reference_noise=reference_noise)
    return replace(open_mechanism, noise_multiplier=sigma, gate=gate)


def _calibrated(settings: RunSettings, open_mechanism: SelectiveRelease) -> SelectiveRelease:
    return open_mechanism.calibrate(epsilon=settings.epsilon, delta=settings.delta, accountant=settings.accountant)


def scaling_rule(settings: RunSettings) -> ScalingRule:
    """From gradient norms to weights, as the settings name it."""
    if settings.scaling == "clip":
        return Clip(max_grad_norm=settings.max_grad_norm)
    if settings.scaling == "global":
        return GlobalScaling(max_grad_norm=settings.max_grad_norm, bound=settings.scaling_bound)
    return Normalise(max_grad_norm=settings.max_grad_norm, gamma=settings.scaling_bound)


def _tempered(settings: RunSettings, rule: ScalingRule, *, sample_rate: float) -> ScalingRule:
    """The rule, times the probabilities that a gate of the same strength would keep records with."""
    if settings.tempering is None:
        return rule
    gate = ThinningGate(strength=settings.tempering, large_norm=settings.large_norm)
    return Tempered(
        max_grad_norm=rule.max_grad_norm, base=rule, gate=gate, sample_rate=gate.candidate_rate(sample_rate)
    )


def _open_gate(settings: RunSettings) -> Gate | None:
    """The gate as far as settings tell, its open noises for calibration to choose; coins come later."""
    if settings.chosen_gate == "thinning":
        strength = DEFAULT_STRENGTH if settings.strength is None else settings.strength
        return ThinningGate(strength=strength, large_norm=settings.large_norm)
    if settings.chosen_gate != "clipping-bias":
        return None
    return ClippingBiasGate(
        beta=settings.beta,
        clip_range=settings.clip_range,
        gate_noise=settings.gate_noise,
        reference_noise=settings.reference_noise,
        large_norm=settings.large_norm,
        reference_decay=settings.reference_decay,
        max_attempts=settings.max_attempts,
        hidden_reference=settings.hidden_reference,
    )


def _coin(settings: RunSettings, *, gate_noise: float) -> CoinGate:
    probability = settings.coin_probability
    if probability is None:
        probability = float(scipy.special.ndtr(-settings.beta / (4 * gate_noise)))
    return CoinGate(probability=probability, max_attempts=settings.max_attempts)
