"""Compiled modules, activation checkpoints, complex parameters and short floats."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.engine import Chunk
from sluice.gradients.loop import LoopCapture


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 3))


def compiled(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, while it is imported
        result: nn.Module = torch.compile(module, backend="eager")
    return result


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inside = layers()
        self.scale = nn.Parameter(torch.randn(3))
        self.reentrant = reentrant

    def forward(self, x):
        def block(x):
            return self.inside(torch.tanh(x)) * self.scale

        x = checkpoint(block, self.first(x), use_reentrant=self.reentrant)
        return checkpoint_sequential(nn.Sequential(nn.Tanh(), nn.ReLU()), 2, x, use_reentrant=self.reentrant)


def in_a_loop(model: nn.Module, x, y, loss, options: GradientOptions | None = None) -> Chunk:
    """The gradients of a forward and a backward pass by the user."""
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="mean", options=options), rows=x.shape[0])
    capture.attach()
    try:
        capture.expect(x.shape[0])
        loss(model(x), y).mean().backward()
        return capture.collect()
    finally:
        capture.detach()


MODELS = {
    "whole": lambda: compiled(layers()),
    "child": lambda: nn.Sequential(compiled(nn.Linear(4, 4)), nn.Tanh(), compiled(layers())),
    "child-in-place": lambda: nn.Sequential(compiled_in_place(nn.Linear(4, 4)), nn.Tanh(), layers()),
    "reentrant": lambda: Checkpointed(reentrant=True),
    "not-reentrant": lambda: Checkpointed(reentrant=False),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_compiled_modules_and_checkpoints_agree_with_plain_ones(oracle, reaching_loss, make, training):
    model, x, y = make().train(training), torch.randn(5, 4), torch.randn(5)
    expected = oracle_of(oracle, model, x, y, reaching_loss)
    engine = PerSampleGradients(model)
    norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda norms: torch.ones_like(norms))
    torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-5, atol=1e-6)
    for name, value in expected.weighted_sum(torch.ones(5)).items():
        torch.testing.assert_close(sums[name].double(), value, rtol=1e-5, atol=1e-5)


def oracle_of(oracle, model, x, y, loss):
    """The oracle asks autograd for some gradients only, which reentrant checkpoints do not allow."""
    plain = copy.deepcopy(model)
    if isinstance(plain, Checkpointed) or (isinstance(plain, Words) and plain.reentrant):
        plain.reentrant = False
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global hooks")
        return oracle(plain, x, y, loss)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_they_work_in_an_ordinary_loop(oracle, reaching_loss, make):
    model, x, y = make(), torch.randn(5, 4), torch.randn(5)
    chunk = in_a_loop(model, x, y, reaching_loss)
    expected = oracle_of(oracle, model, x, y, reaching_loss)
    torch.testing.assert_close(chunk.norms.double(), expected.norms, rtol=1e-5, atol=1e-6)


class Words(nn.Module):
    """A small transformer whose blocks may be checkpointed."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.places = nn.Parameter(torch.randn(1, 3, 4))
        self.block: nn.Module = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.words(x) + self.places
        x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return x.mean(1)


def with_compiled_block() -> Words:
    model = Words()
    model.block = compiled(model.block)
    return model


TRANSFORMERS = {
    "reentrant": (lambda: Words(reentrant=True), "block"),
    "not-reentrant": (lambda: Words(reentrant=False), "block"),
    "compiled": (lambda: compiled(Words()), ""),
    "compiled-block": (with_compiled_block, "block"),
}


@pytest.mark.parametrize("way", ["chunks", "loop"])
@pytest.mark.parametrize("strategy", ["auto", "vmap", "loop"])
@pytest.mark.parametrize(("make", "part"), TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_transformers_with_them_agree_whatever_the_strategy(oracle, reaching_loss, make, part, strategy, way):
    model, x, y = make(), torch.randint(9, (5, 3)), torch.randn(5)
    expected = oracle_of(oracle, model, x, y, reaching_loss)
    options = GradientOptions(strategy={} if strategy == "auto" else {part: strategy})
    if way == "chunks":
        norms = PerSampleGradients(model, options=options).norms(x, y, reaching_loss)
    else:
        norms = in_a_loop(model, x, y, reaching_loss, options).norms
    torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_a_forward_of_a_modules_own_is_used_and_stays(oracle, reaching_loss, strategy):
    model, x, y = nn.Sequential(layers(), nn.Tanh()), torch.randn(5, 4), torch.randn(5)
    inner = model[0]
    written = inner.forward
    inner.forward = own = lambda x: written(2 * x)  # as libraries change modules
    options = GradientOptions(strategy={"0": strategy})
    norms = PerSampleGradients(model, options=options).norms(x, y, reaching_loss)
    assert inner.__dict__["forward"] is own
    del inner.forward
    doubled = nn.Sequential(nn.Linear(4, 4, bias=False).requires_grad_(False), model)
    torch.nn.init.eye_(doubled[0].weight).mul_(2)
    torch.testing.assert_close(norms.double(), oracle(doubled, x, y, reaching_loss).norms, rtol=1e-5, atol=1e-6)


def test_calling_compiled_code_in_an_ordinary_loop_is_refused(reaching_loss):
    model = compiled_in_place(layers())
    with pytest.raises(UnsupportedModuleError, match=r"torch\.compile"):
        in_a_loop(model, torch.randn(5, 4), torch.randn(5), reaching_loss)
    norms = PerSampleGradients(model).norms(torch.randn(5, 4), torch.randn(5), reaching_loss)
    assert norms.shape == (5,)


def test_calling_a_compiled_copy_of_the_private_module_is_refused(reaching_loss):
    model, x = layers(), torch.randn(5, 4)
    capture = LoopCapture(PerSampleGradients(model), rows=5)
    capture.attach()
    try:
        capture.expect(5)
        with warnings.catch_warnings(), pytest.raises(UnsupportedModuleError, match="call that one"):
            warnings.simplefilter("ignore")  # the compiler's
            compiled(model)(x)
    finally:
        capture.detach()


def test_checkpoints_are_themselves_again_afterwards(reaching_loss):
    before = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    PerSampleGradients(Checkpointed(reentrant=False)).norms(torch.randn(5, 4), torch.randn(5), reaching_loss)
    after = torch.utils.checkpoint.CheckpointFunction, torch.utils.checkpoint._checkpoint_without_reentrant_generator
    assert before == after


class Complex(nn.Module):
    """A product with complex numbers, stored as such or as pairs of real ones."""

    def __init__(self, *, real: bool) -> None:
        super().__init__()
        weight = torch.randn(4, 3, dtype=torch.complex64)
        self.weight = nn.Parameter(torch.view_as_real(weight).clone() if real else weight)

    def forward(self, x):
        weight = self.weight if self.weight.is_complex() else torch.view_as_complex(self.weight)
        return (x.to(weight.dtype) @ weight).abs()


def test_complex_parameters_are_refused_by_name_with_a_way_out(matches, reaching_loss):
    with pytest.raises(UnsupportedModuleError, match=r"'0\.weight' is complex.*view_as_real"):
        PerSampleGradients(nn.Sequential(Complex(real=False)))
    frozen = nn.Sequential(Complex(real=False).requires_grad_(False), nn.Linear(3, 2))
    PerSampleGradients(frozen).norms(torch.randn(5, 4), torch.randn(5), reaching_loss)
    matches(nn.Sequential(Complex(real=True), nn.Linear(3, 2)), torch.randn(5, 4), torch.randn(5), reaching_loss)


class Small(nn.Module):
    """A transformer's parts, with bare parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.gamma = nn.Parameter(0.5 + torch.rand(16))
        self.low = nn.Parameter(torch.randn(2, 16) / 4)
        self.up = nn.Parameter(torch.randn(16, 2) / 4)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.gamma * F.scaled_dot_product_attention(q, k, v)
        x = x + F.linear(F.linear(x, self.low), 2 * self.up)
        return self.head(x.mean(1)).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_short_floats_are_within_a_hundredth(oracle, reaching_loss, dtype):
    model, y = Small().to(dtype), torch.randn(16)
    x = torch.randn(16, 1, 16, 16).to(dtype)
    expected = oracle(model, x.float(), y, reaching_loss)
    engine = PerSampleGradients(model)
    norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda norms: torch.ones_like(norms))
    torch.testing.assert_close(norms.double(), expected.norms, rtol=1e-2, atol=0)
    whole = torch.cat([value.flatten() for value in expected.weighted_sum(torch.ones(16)).values()])
    found = torch.cat([value.double().flatten() for value in sums.values()])
    assert (found - whole).norm() <= 1e-2 * whole.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_short_floats_are_those_of_the_gradients_that_are_summed(reaching_loss, dtype):
    engine = PerSampleGradients(Small().to(dtype))
    (chunk,) = engine.chunks(torch.randn(6, 1, 16, 16).to(dtype), torch.randn(6), reaching_loss)
    for i, norm in enumerate(chunk.norms):
        total = engine.zeros()
        chunk.add_weighted_sum(torch.eye(6)[i], into=total)
        summed = torch.cat([value.double().flatten() for value in total.values()]).norm()
        torch.testing.assert_close(norm.double(), summed, rtol=1e-5, atol=0)
