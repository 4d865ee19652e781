"""Spectral norms: the same for all samples, still while gradients are recorded, moved by releases."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.loop import LoopCapture
from sluice.gradients.spectral import advance


def network() -> nn.Sequential:
    """With one weight that is normalised twice, and one along another axis."""
    twice = spectral_norm(weight_norm(nn.Linear(8, 4)))
    return nn.Sequential(
        spectral_norm(nn.Conv2d(1, 2, 3)), nn.Tanh(), spectral_norm(nn.ConvTranspose2d(2, 2, 1)), nn.Flatten(), twice
    )


def vectors(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def frozen(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).eval()


def test_gradients_are_those_of_the_norm_as_it_stands(oracle, reaching_loss):
    model, x, y = network().train(), torch.randn(5, 1, 4, 4), torch.randn(5)
    expected = oracle(frozen(model), x, y, reaching_loss)
    norms, sums = PerSampleGradients(model).weighted_sum(x, y, reaching_loss, torch.ones_like)
    torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-5, atol=1e-6)
    for name, value in expected.weighted_sum(torch.ones(5)).items():
        torch.testing.assert_close(sums[name].double(), value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_whatever_the_strategy(oracle, reaching_loss, strategy):
    model, x, y = nn.Sequential(nn.Linear(4, 4), spectral_norm(nn.Linear(4, 3))), torch.randn(5, 4), torch.randn(5)
    engine = PerSampleGradients(model, options=GradientOptions(strategy={"1": strategy}))
    expected = oracle(frozen(model), x, y, reaching_loss)
    torch.testing.assert_close(engine.norms(x, y, reaching_loss).double(), expected.norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [2, 5])
def test_forward_passes_move_nothing_however_many_there_are(reaching_loss, chunk_size):
    model = network()
    before = vectors(model)
    engine = PerSampleGradients(model, options=GradientOptions(chunk_size=chunk_size))
    for _ in range(3):
        engine.norms(torch.randn(5, 1, 4, 4), torch.randn(5), reaching_loss)
    for name, value in vectors(model).items():
        assert torch.equal(value, before[name])
    model(torch.randn(1, 1, 4, 4))
    assert not torch.equal(vectors(model)["0.parametrizations.weight.0._u"], before["0.parametrizations.weight.0._u"])


@pytest.mark.parametrize("whole", [True, False])
def test_nor_do_those_of_an_ordinary_loop(oracle, reaching_loss, whole):
    layer = spectral_norm(nn.Linear(4, 3))
    model = layer if whole else nn.Sequential(layer, nn.Tanh())
    before, x, y = vectors(model), torch.randn(5, 4), torch.randn(5)
    expected = oracle(frozen(model), x, y, reaching_loss)
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="sum"), rows=5)
    capture.attach()
    try:
        capture.expect(5)
        reaching_loss(model(x), y).sum().backward()
        norms = capture.collect().norms
    finally:
        capture.detach()
    torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in vectors(model).items())


def test_advancing_is_what_one_forward_pass_does():
    model = network()
    ordinary = copy.deepcopy(model)
    ordinary(torch.randn(1, 1, 4, 4))
    advance(model)
    for name, value in vectors(ordinary).items():
        assert torch.equal(value, vectors(model)[name])


def test_advancing_holds_the_largest_singular_value_at_one():
    layer = spectral_norm(nn.Linear(6, 5))
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(5, 6))
    for _ in range(200):
        advance(layer)
    assert torch.linalg.matrix_norm(layer.eval().weight, 2).item() == pytest.approx(1, abs=1e-3)


def test_a_norm_in_evaluation_mode_stays_where_it_is():
    model = network()
    model[0].parametrizations.eval()
    before = vectors(model)
    advance(model)
    after = vectors(model)
    moved = {name.partition(".")[0] for name, value in after.items() if not torch.equal(value, before[name])}
    assert moved
    assert "0" not in moved


def test_the_older_spectral_norm_is_refused_and_what_the_message_says_works(oracle, reaching_loss):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where torch deprecates it
        model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(4, 3)))
    x, y = torch.randn(5, 4), torch.randn(5)
    model(x)
    with pytest.raises(UnsupportedModuleError, match=r"parametrizations\.spectral_norm.*\.eval\(\)"):
        PerSampleGradients(model).norms(x, y, reaching_loss)
    model.eval()
    with torch.no_grad():
        weight = model[0].weight_orig / (model[0].weight_u @ model[0].weight_orig @ model[0].weight_v)
    plain = nn.Sequential(nn.Linear(4, 3))
    plain[0].load_state_dict({"weight": weight, "bias": model[0].bias})
    torch.testing.assert_close(model(x), plain(x))
    norms = PerSampleGradients(model).norms(x, y, reaching_loss)
    bias = PerSampleGradients(model).weighted_sum(x, y, reaching_loss, torch.ones_like)[1]["0.bias"]
    expected = oracle(plain, x, y, reaching_loss).weighted_sum(torch.ones(5))["0.bias"]
    torch.testing.assert_close(bias.double(), expected, rtol=1e-5, atol=1e-5)
    assert norms.isfinite().all()


def test_a_sharded_weight_is_refused_unless_its_norm_is_frozen(monkeypatch):
    monkeypatch.setattr("sluice.gradients.spectral.is_sharded", lambda parameter: True)
    model = nn.Sequential(spectral_norm(nn.Linear(4, 3)))
    with pytest.raises(UnsupportedModuleError, match=r"sharded.*parametrizations\.weight\.eval"):
        PerSampleGradients(model)
    model[0].parametrizations.weight.eval()
    PerSampleGradients(model)
