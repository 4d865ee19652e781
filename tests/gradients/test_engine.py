from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients import GradientOptions, NonFiniteGradientWarning, PerSampleGradients
from sluice.gradients.rules import rule_for


class Tied(nn.Module):
    """One layer called three times, and a decoder that shares the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x):
        x = torch.tanh(self.encode(torch.tanh(self.encode(x))))
        x = self.conv(torch.tanh(self.conv(x)))
        return self.decode(x)


class Bare(nn.Module):
    """Parameters of its own beside layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return self.inner(x * self.scale) + self.scale.sum()


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.blocked = nn.Linear(3, 2), nn.Linear(3, 2), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            x = x + self.blocked(x)
        self.unused(x)
        return self.used(x)


class Hidden(torch.autograd.Function):
    """A product that torch functions do not see."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class BehindTheBack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return Hidden.apply(torch.tanh(self.layer(x)), self.layer.weight)


class Folded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x.transpose(0, 1).flatten(0, 1)).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class ChangesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        x = x * 1.0
        z = self.layer(x)
        x += 1.0
        return z + x


def weight_normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("n", [0, 1, 7, 64])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Tied(), (2, 6)),
        (Bare(), (3, 4)),
        (Unused(), (3,)),
        (SequenceFirst(), (7, 3)),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU(inplace=True)), (5, 3)),
        (nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Bilinear(1, 1, 1).eval(), nn.Identity())[:2], (4,)),
        (weight_normed(), (4,)),
    ],
    ids=["tied", "bare", "unused", "sequence-first", "in-place", "prelu", "weight-norm"],
)
def test_unusual_models_agree_with_the_oracle(matches, reaching_loss, model, shape, n):
    matches(model, torch.randn(n, *shape), torch.randn(n), reaching_loss)


@pytest.mark.parametrize("strategy", ["vmap", "loop"])
def test_modules_without_a_rule_agree_with_the_oracle(matches, reaching_loss, strategy):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))
    matches(model, torch.randn(5, 2, 4, 4), torch.randn(5), reaching_loss, strategy={"": strategy})


def test_every_convolution_and_linear_layer_has_a_rule():
    layers = [nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.Conv2d(1, 1, 1), nn.Conv3d(1, 1, 1), nn.ConvTranspose2d(1, 1, 1)]
    assert all(rule_for(layer) is not None for layer in layers)


def test_frozen_parameters_do_not_count(matches, reaching_loss):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    matches(model, torch.randn(7, 4), torch.randn(7), reaching_loss)


def test_frozen_layers_count_when_chunks_are_sized():
    rows = []
    for frozen in (0, 3):
        model = nn.Sequential(nn.Linear(4, 30_000), nn.Tanh(), nn.Linear(30_000, 4), nn.Linear(4, 2))
        model[:frozen].requires_grad_(False)
        engine = PerSampleGradients(model, expected_batch_size=64.0)
        engine.prepare(torch.randn(3, 4))
        rows.append(engine.chunk_rows)
    assert rows[0] == rows[1] < 64


def test_inputs_may_be_tuples_or_dicts(matches, reaching_loss):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

        def forward(self, left, right):
            return self.left(left) * self.right(right)

    left, right, y = torch.randn(7, 3), torch.randn(7, 4), torch.randn(7)
    matches(Two(), (left, right), y, reaching_loss)
    matches(Two(), {"right": right, "left": left}, y, reaching_loss)


def test_dropout_uses_the_same_mask_for_value_and_gradient():
    """With the mask known from the output, each sample's gradient is known too; also inside a module without a rule."""
    for strategy in ("auto", "vmap", "loop"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5))
        x, seen = torch.randn(9, 4), []

        def loss(output, y, seen=seen):
            seen.append(output.detach())
            return output.sum(1)

        engine = PerSampleGradients(
            model, options=GradientOptions(strategy={"": strategy} if strategy != "auto" else {})
        )
        norms = engine.norms(x, torch.zeros(9), loss)
        kept = (seen[-1] != 0).sum(1)
        torch.testing.assert_close(norms, 2 * (kept * (x.square().sum(1) + 1)).sqrt())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_reduction_of_the_loss_makes_no_difference(reduction):
    model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(0, 3, (10,))
    engine = PerSampleGradients(model, loss_reduction=reduction, options=GradientOptions(chunk_size=4))
    norms = engine.norms(x, y, lambda o, t: functional.cross_entropy(o, t, reduction=reduction))
    expected = PerSampleGradients(model).norms(x, y, lambda o, t: functional.cross_entropy(o, t, reduction="none"))
    torch.testing.assert_close(norms, expected)


def test_batches_of_another_kind_can_be_refused_instead_of_looked_into():
    def loss(output, target):
        return output.flatten(1).square().sum(1)

    gradients = PerSampleGradients(nn.Linear(3, 2))
    gradients.norms(torch.randn(5, 4, 3), None, loss)
    gradients.refuse_other_batches()
    assert len(gradients.norms(torch.randn(7, 4, 3), None, loss)) == 7
    with pytest.raises(InputError, match="records of another shape or type"):
        gradients.norms(torch.randn(5, 6, 3), None, loss)


def test_a_chunk_without_samples_counts_for_nothing():
    gradients = PerSampleGradients(nn.Linear(3, 2), expected_batch_size=4)
    x, y = torch.full((1, 3), torch.nan), torch.zeros(1, dtype=torch.long)
    chunk = gradients.idle_chunk(
        x, y, lambda output, target: functional.cross_entropy(output, target, reduction="none")
    )
    sums: dict[str, torch.Tensor] = {}
    chunk.add_weighted_sum(torch.zeros(0), into=sums)
    assert len(chunk) == 0
    assert chunk.norms.shape == (0,)
    assert all(bool((part == 0).all()) for part in sums.values())


def test_a_loss_of_another_shape_is_refused():
    engine = PerSampleGradients(nn.Linear(4, 3))
    with pytest.raises(InputError, match="loss_reduction='mean'"):
        engine.norms(torch.randn(5, 4), torch.zeros(5), lambda o, y: o.mean())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("strategy", ["auto", "gram", "explicit", "vmap"])
def test_a_sample_without_a_finite_gradient_counts_as_zero(bad, strategy):
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    x, y = torch.randn(6, 2, 4, 4), torch.randn(6)
    good = torch.tensor([0, 1, 3, 4, 5])

    def loss(output, y):
        return (output**2).sum(1) + output[:, 0] * y

    chosen = {"0": strategy, "2": strategy}
    engine = PerSampleGradients(model, options=GradientOptions(strategy=chosen))
    wanted_norms, wanted = engine.weighted_sum(x[good], y[good], loss, lambda n: 1 / n)
    x[2, 0, 1, 1] = bad
    with pytest.warns(NonFiniteGradientWarning) as caught:
        norms, sums = engine.weighted_sum(x, y, loss, lambda n: torch.where(n.isfinite(), 1 / n, 1.0))
    assert all("2" not in str(w.message) for w in caught)
    assert not norms[2].isfinite()
    torch.testing.assert_close(norms[good], wanted_norms, rtol=1e-5, atol=0)
    for name, value in sums.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


def test_an_empty_batch_gives_no_norms_and_a_zero_sum():
    engine = PerSampleGradients(nn.Linear(3, 2))
    norms, sums = engine.weighted_sum(torch.zeros(0, 3), torch.zeros(0), lambda o, y: o.sum(1), lambda n: n)
    assert norms.shape == (0,)
    assert {name: tuple(s.shape) for name, s in sums.items()} == {"weight": (2, 3), "bias": (2,)}
    assert all(float(s.abs().sum()) == 0 for s in sums.values())


def test_chunks_do_not_change_results():
    model, x, y = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(33, 5), torch.randn(33)
    results = [
        PerSampleGradients(model, options=GradientOptions(chunk_size=size)).weighted_sum(
            x, y, lambda o, t: (o[:, 0] - t) ** 2, lambda n: 1 / (n + 1)
        )
        for size in (1, 7, 33, 100)
    ]
    for norms, sums in results[1:]:
        torch.testing.assert_close(norms, results[0][0])
        for name in sums:
            torch.testing.assert_close(sums[name], results[0][1][name])


def test_reading_may_stop_after_any_chunk():
    calls = []
    engine = PerSampleGradients(nn.Linear(3, 1), options=GradientOptions(chunk_size=4, verify=False))

    def loss(output, y):
        calls.append(len(y))
        return output[:, 0]

    for chunk in engine.chunks(torch.randn(20, 3), torch.zeros(20), loss):
        assert len(chunk) == 4
        if chunk.samples.stop == 8:
            break
    assert calls == [4, 4]


def test_bfloat16_autocast_gives_norms_in_float32(oracle, reaching_loss):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, 4))
    x, y = torch.randn(7, 3, 8, 8), torch.randn(7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        norms, sums = PerSampleGradients(model).weighted_sum(x, y, reaching_loss, torch.ones_like)
    assert norms.dtype == torch.float32
    assert all(value.dtype == torch.float32 for value in sums.values())
    torch.testing.assert_close(norms.double(), oracle(model, x, y, reaching_loss).norms, rtol=0.03, atol=0)


def test_nothing_is_left_on_the_model():
    model = nn.Sequential(nn.Linear(3, 4), Bare(), nn.LSTM(4, 2, batch_first=True))
    state, flags = list(model.state_dict()), [p.requires_grad for p in model.parameters()]
    attributes = [set(vars(part)) for part in model.modules()]
    hooks = dict(torch.nn.modules.module._global_forward_hooks)

    def loss(output, y):
        copied = copy.deepcopy(model)
        assert list(copied.state_dict()) == state
        torch.save(model, io.BytesIO())
        raise ZeroDivisionError

    engine = PerSampleGradients(model)
    with pytest.raises(ZeroDivisionError):
        engine.norms(torch.randn(4, 5, 3), torch.zeros(4), loss)
    engine.norms(torch.randn(4, 5, 3), torch.zeros(4), lambda o, y: o[0].flatten(1).sum(1))
    assert list(model.state_dict()) == state
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [set(vars(part)) for part in model.modules()] == attributes
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
    assert dict(torch.nn.modules.module._global_forward_hooks) == hooks
    assert all(p.grad is None for p in model.parameters())


def test_random_numbers_and_buffers_are_not_disturbed_by_the_checks():
    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) + torch.rand(())

    model = nn.Sequential(Noisy().requires_grad_(False), nn.Linear(2, 1))
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    with pytest.raises(UnsupportedModuleError, match=r"'0\.calls'"):
        PerSampleGradients(model).norms(x, torch.zeros(4), lambda o, y: o[:, 0])
    assert float(model[0].calls) == 0
    PerSampleGradients(model, options=GradientOptions(verify=False)).norms(x, torch.zeros(4), lambda o, y: o[:, 0])
    assert float(model[0].calls) == 1
    after = torch.rand(())
    torch.manual_seed(3)
    torch.randn(4, 3), torch.rand(())
    assert torch.equal(after, torch.rand(()))


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (ChangesInput(), torch.randn(4, 3), "'layer' was changed in place"),
        (nn.Sequential(nn.Linear(3, 2), nn.Softmax(dim=0)), torch.randn(4, 3), "'1' gives another output"),
    ],
    ids=["in-place", "mixing"],
)
def test_what_cannot_be_recorded_is_refused(model, x, message):
    with pytest.raises(UnsupportedModuleError, match=message):
        PerSampleGradients(model).norms(x, torch.zeros(4), lambda o, y: o.flatten(1).sum(1))


@pytest.mark.parametrize(
    ("model", "x"),
    [(BehindTheBack(), torch.randn(4, 3)), (Folded(), torch.randn(4, 5, 3))],
    ids=["behind-the-back", "folded"],
)
@pytest.mark.filterwarnings("ignore::sluice.gradients.escalation.LoopWarning")
def test_what_no_rule_can_record_is_recorded_sample_by_sample(matches, reaching_loss, model, x):
    matches(model, x, torch.randn(4), reaching_loss, verify=True)


def test_bad_weights_and_options_are_refused():
    engine = PerSampleGradients(nn.Linear(3, 2))
    chunk = next(engine.chunks(torch.randn(4, 3), torch.zeros(4), lambda o, y: o.sum(1)))
    with pytest.raises(InputError, match="4 samples"):
        chunk.add_weighted_sum(torch.ones(3), into=engine.zeros())
    with pytest.raises(InputError, match="NaN or infinity"):
        chunk.add_weighted_sum(torch.full((4,), torch.inf), into=engine.zeros())
    with pytest.raises(InputError, match="does not have"):
        PerSampleGradients(nn.Linear(3, 2), options=GradientOptions(strategy={"head": "gram"}))
    with pytest.raises(InputError, match="no trainable parameter"):
        PerSampleGradients(nn.Linear(3, 2).requires_grad_(False))


def test_finite_gradients_cause_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PerSampleGradients(nn.Linear(3, 2)).norms(torch.randn(4, 3), torch.zeros(4), lambda o, y: o.sum(1))
