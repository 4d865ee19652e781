"""What cannot be followed goes to vmap or is refused by name; what is followed costs nothing elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, NonFiniteGradientWarning, PerSampleGradients
from sluice.gradients.vmap import VmapRule


class Hidden(torch.autograd.Function):
    """A product that torch's functions do not show, but vmap can run."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(4))
        self.inside = nn.Linear(4, 4)

    def forward(self, x):
        return Hidden.apply(self.inside(x), self.gamma)


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.first = nn.Linear(4, 4)
        self.opaque = Opaque()

    def forward(self, x):
        return self.opaque(torch.tanh(self.first(x))) * self.scale


def in_vmap(engine: PerSampleGradients) -> list[str]:
    return [unit.name for unit in engine._units.values() if isinstance(unit.rule, VmapRule)]


@pytest.mark.parametrize("verify", [True, False])
def test_only_the_smallest_module_around_what_cannot_be_followed_goes_to_vmap(oracle, reaching_loss, verify):
    model, x, y = Outside(), torch.randn(5, 4), torch.randn(5)
    engine = PerSampleGradients(model, options=GradientOptions(verify=verify))
    norms = engine.norms(x, y, reaching_loss)
    torch.testing.assert_close(norms.double(), oracle(model, x, y, reaching_loss).norms, rtol=1e-5, atol=1e-6)
    assert in_vmap(engine) == ["opaque"]


class OneByOne(nn.Module):
    """Goes through the samples in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.stack([torch.tanh(sample) * torch.exp(self.gamma) for sample in x])


def test_functions_that_change_with_the_number_of_samples_go_to_vmap(oracle, reaching_loss):
    model, x, y = nn.Sequential(nn.Linear(4, 4), OneByOne()), torch.randn(5, 4), torch.randn(5)
    engine = PerSampleGradients(model)
    norms = engine.norms(x, y, reaching_loss)
    torch.testing.assert_close(norms.double(), oracle(model, x, y, reaching_loss).norms, rtol=1e-5, atol=1e-6)
    assert in_vmap(engine) == ["1"]


class Judging(nn.Module):
    """Uses a parameter for some samples only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gamma = nn.Parameter(torch.ones(3))

    def forward(self, x):
        z = self.layer(x)
        return z * self.gamma if x.abs().max() < 100 else z


@pytest.mark.parametrize("verify", [True, False])
def test_another_use_of_parameters_than_on_made_up_samples_is_refused(reaching_loss, verify):
    engine = PerSampleGradients(Judging(), options=GradientOptions(verify=verify))
    assert engine.norms(torch.randn(4, 3), torch.randn(4), reaching_loss).isfinite().all()
    with pytest.raises(UnsupportedModuleError, match=r"'gamma'.*another way"):
        engine.norms(1000 * torch.ones(4, 3), torch.randn(4), reaching_loss)
    assert engine.norms(torch.randn(4, 3), torch.randn(4), reaching_loss).isfinite().all()


class Returned(nn.Module):
    """A parameter goes straight into the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gamma = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x), self.gamma


def test_a_parameter_that_is_returned_is_refused():
    with pytest.raises(UnsupportedModuleError, match=r"returns a tensor of shape \(3,\)"):
        PerSampleGradients(Returned()).norms(torch.randn(4, 3), None, lambda o, y: (o[0] * o[1]).sum(1))


class Keeping(nn.Module):
    """Keeps what it computed from a parameter, graph and all, for the next forward pass in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(3))
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.kept = None

    def forward(self, x):
        if self.training or self.kept is None:
            self.kept = self.gamma[self.order]
        return x * self.kept


def test_a_graph_that_outlives_a_forward_pass_is_refused(reaching_loss):
    with pytest.raises(UnsupportedModuleError, match=r"kept from one forward pass to the next|remembers something"):
        PerSampleGradients(Keeping().eval()).norms(torch.randn(4, 3), torch.randn(4), reaching_loss)


class Many(nn.Module):
    """A value computed from two parameters, a scaled view and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.shift = nn.Parameter(torch.randn(8))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        x = F.linear(self.layer(x), self.up @ self.low) + 0.5 * self.shift[2:6]
        return x @ self.low.t() @ (3 * self.up).t()


def test_a_broken_sample_adds_exactly_zero(reaching_loss):
    model, x, y = Many(), torch.randn(6, 4), torch.randn(6)
    engine = PerSampleGradients(model)
    x[2] = torch.nan
    with pytest.warns(NonFiniteGradientWarning):
        norms, sums = engine.weighted_sum(x, y, reaching_loss, lambda norms: torch.ones_like(norms))
    assert not norms[2].isfinite()
    kept = [0, 1, 3, 4, 5]
    _, expected = engine.weighted_sum(x[kept], y[kept], reaching_loss, lambda norms: torch.ones_like(norms))
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_norms_are_those_of_the_sums_at_any_scale(reaching_loss, scale):
    model, x, y = Many(), torch.randn(5, 4), torch.randn(5)
    engine = PerSampleGradients(model)

    def loss(output, y):
        return scale * reaching_loss(output, y)

    norms = engine.norms(x, y, loss)
    for i in range(5):
        _, sums = engine.weighted_sum(x[i : i + 1], y[i : i + 1], loss, lambda norms: torch.ones_like(norms))
        whole = torch.cat([value.double().flatten() for value in sums.values()]).norm()
        torch.testing.assert_close(norms[i].double(), whole, rtol=1e-5, atol=0)
    assert in_vmap(engine) == []


def test_norms_by_layer_count_bare_parameters_where_they_are(reaching_loss):
    engine = PerSampleGradients(Many())
    (chunk,) = engine.chunks(torch.randn(5, 4), torch.randn(5), reaching_loss)
    layers = chunk.norms_by_layer()
    assert set(layers) == {"", "layer"}
    torch.testing.assert_close(torch.stack(list(layers.values())).norm(dim=0), chunk.norms)


def test_an_error_in_the_forward_pass_leaves_nothing_behind(reaching_loss):
    model = Many()
    engine = PerSampleGradients(model)
    x, y = torch.randn(5, 4), torch.randn(5)
    expected = engine.norms(x, y, reaching_loss)
    handle = model.layer.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.norms(x, y, reaching_loss)
    handle.remove()
    assert all(p.requires_grad and type(p) is nn.Parameter for p in model.parameters())
    torch.testing.assert_close(engine.norms(x, y, reaching_loss), expected)


class Adapted(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.low, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.low), self.up)


class Modules(nn.Module):
    """The same, of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.low, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.low(x))


@pytest.mark.parametrize("kind", [Adapted, Modules])
def test_frozen_layers_are_neither_recorded_nor_differentiated_before_the_first_trained_one(kind):
    frozen = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).requires_grad_(False)
    model = nn.Sequential(frozen, kind(), nn.Linear(4, 4).requires_grad_(False))
    engine = PerSampleGradients(model)
    x = torch.randn(5, 4)
    engine.prepare(x)
    needed: list[bool] = []
    handle = frozen.register_forward_hook(lambda module, inputs, output: needed.append(output.requires_grad))
    with engine._watch.record(batch_size=5, parameters=engine._parameters) as recording:
        model(x)
    handle.remove()
    assert needed == [False]
    assert len(recording._taps) == 2  # at the outputs of the two small products
    assert len(recording._saved) == 2
