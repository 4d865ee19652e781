"""From settings to the mechanism of selective release, before any record is read."""

from __future__ import annotations

from dataclasses import replace

from scipy.stats import norm

from sluice.accounting import create_accountant
from sluice.accounting.calibration import Calibration, calibrate
from sluice.accounting.gate_calibration import REFERENCE_RATIO
from sluice.mechanism.gates import ClippingBiasGate, CoinGate, Gate
from sluice.mechanism.rates import exact_sample_rate
from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise, ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.methods.base import RunSettings


def selective_mechanism(settings: RunSettings, dataset_size: int) -> SelectiveRelease:
    """The mechanism of a run with a gate, or of plain DP-SGD: with the noise that is given, or calibrated to the budget by the sound accountant.

    Where ``noise_multiplier`` is given, a gate noise that is left open is the same number, as in the DPSR-CG paper, and
    a reference noise five times that.
    """
    rate = exact_sample_rate(batch_size=settings.batch_size, dataset_size=dataset_size)
    noise_multiplier, gate = _noise_and_gate(settings, rate, expected_batch_size=rate * dataset_size)
    mechanism = SelectiveRelease(
        sample_rate=rate,
        expected_batch_size=rate * dataset_size,
        scaling=scaling_rule(settings),
        noise_multiplier=noise_multiplier,
        releases=settings.releases,
        gate=gate,
    )
    if gate is not None and gate.max_attempts is not None and mechanism.provable:
        # The accountant refuses a cap on attempts that costs more than delta; better now than after training.
        create_accountant(settings.accountant).compose(mechanism.dp_event).get_epsilon(settings.delta)
    return mechanism


def _noise_and_gate(settings: RunSettings, rate: float, *, expected_batch_size: float) -> tuple[float, Gate | None]:
    gate = _bias_gate(settings, expected_batch_size)
    if settings.noise_multiplier is not None:
        sigma = settings.noise_multiplier
        if settings.chosen_gate == "coin":
            return sigma, _coin(settings, gate_noise=sigma)
        return sigma, None if gate is None else _with_noise(gate, settings, sigma)
    chosen = _calibrated(settings, rate, gate)
    if settings.chosen_gate == "coin":
        # The blur of a calibrated clipping-bias gate is that of the gradient noise, so the coin falls as often.
        chosen = _calibrated(settings, rate, _coin(settings, gate_noise=chosen.noise_multiplier))
    return chosen.noise_multiplier, chosen.gate


def _calibrated(settings: RunSettings, rate: float, gate: Gate | None) -> Calibration:
    return calibrate(
        sample_rate=rate,
        releases=settings.releases,
        target_epsilon=settings.epsilon,
        target_delta=settings.delta,
        gate=gate,
        accountant=settings.accountant,
    )


def _with_noise(gate: ClippingBiasGate, settings: RunSettings, sigma: float) -> ClippingBiasGate:
    gate_noise = sigma if settings.gate_noise is None else settings.gate_noise
    reference_noise = REFERENCE_RATIO * sigma if settings.reference_noise is None else settings.reference_noise
    return replace(gate, gate_noise=gate_noise, reference_noise=reference_noise)


def scaling_rule(settings: RunSettings) -> ScalingRule:
    """From gradient norms to weights, as the settings name it."""
    if settings.scaling == "clip":
        return Clip(max_grad_norm=settings.max_grad_norm)
    if settings.scaling == "global":
        return GlobalScaling(max_grad_norm=settings.max_grad_norm, bound=settings.scaling_bound)
    return Normalise(max_grad_norm=settings.max_grad_norm, gamma=settings.scaling_bound)


def _bias_gate(settings: RunSettings, expected_batch_size: float) -> ClippingBiasGate | None:
    """The gate as far as settings tell, its open noises for calibration to choose."""
    if settings.chosen_gate != "clipping-bias":
        return None
    small = settings.scaling_bound if settings.scaling == "global" else settings.max_grad_norm
    gate = ClippingBiasGate(
        beta=settings.beta,
        clip_range=settings.clip_range,
        gate_noise=settings.gate_noise,
        reference_noise=settings.reference_noise,
        large_norm=settings.large_norm,
        reference_decay=settings.reference_decay,
        max_attempts=settings.max_attempts,
        hidden_reference=settings.hidden_reference,
    )
    return gate.for_batches_of(expected_batch_size, small_norm=small)


def _coin(settings: RunSettings, *, gate_noise: float) -> CoinGate:
    probability = settings.coin_probability
    if probability is None:
        probability = float(norm.sf(settings.beta / (4 * gate_noise)))
    return CoinGate(probability=probability, max_attempts=settings.max_attempts)
