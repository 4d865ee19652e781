"""Models that no layer rule can record as they are: how they are run is chosen without being told."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.escalation import LoopWarning
from sluice.gradients.vmap import VmapRule

looping = pytest.mark.filterwarnings("ignore::sluice.gradients.escalation.LoopWarning")


class Parameters(nn.Module):
    """Weights in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(0.3 * torch.randn(6, 6)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(6))})

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x + self.named["shift"]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 4)
        self.bias = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return functional.linear(torch.relu(self.encoder(x)), self.encoder.weight.t(), self.bias)


class Experts(nn.Module):
    """A sparse mixture: each expert is called on the samples that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 5) for _ in range(3)])

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        best, output = shares.argmax(-1), x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero()[:, 0]
            output = output.index_add(0, rows, expert(x[rows]) * shares[rows, number : number + 1])
        return output


class MaskedExperts(Experts):
    """Experts that nobody is sent to are not called."""

    def forward(self, x):
        shares = self.gate(x).softmax(-1)
        best, output = shares.argmax(-1), x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                output[chosen] = expert(x[chosen]) * shares[chosen][:, number : number + 1]
        return output


class Decomposed(nn.Module):
    """DoRA: a low-rank update, direction and length apart."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.low, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(5, 2))
        self.length = nn.Parameter(torch.rand(5) + 0.5)

    def forward(self, x):
        weight = self.base.weight + self.up @ self.low
        scale = self.length / weight.norm(dim=1).detach()
        return functional.linear(x, weight * scale[:, None], self.base.bias)


class Rescaled(nn.Module):
    """IA3: inputs and outputs of a frozen layer times learned vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 5).requires_grad_(False)
        self.outputs, self.inputs = nn.Parameter(torch.ones(5, 1)), nn.Parameter(torch.ones(1, 6))

    def forward(self, x):
        return self.base(x * self.inputs.flatten()) * self.outputs.flatten()


class Prompted(nn.Module):
    """Prompt tuning: learned tokens in front of a frozen encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Embedding(3, 6)
        self.encoder = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0).requires_grad_(False)
        self.register_buffer("tokens", torch.arange(3))

    def forward(self, x):
        prompt = self.prompt(self.tokens.unsqueeze(0).expand(len(x), -1))
        return self.encoder(torch.cat([prompt, x], 1)).mean(1)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, a, b):
        return (self.net(a) - self.net(b)).square()


class SiameseAtOnce(Siamese):
    """Both branches in one call, one batch behind the other."""

    def forward(self, a, b):
        first, second = self.net(torch.cat([a, b])).chunk(2)
        return (first - second).square()


class Halves(SiameseAtOnce):
    """The same for pairs that come in one tensor."""

    def forward(self, x):
        return super().forward(x[:, 0], x[:, 1])


class Windows(nn.Module):
    """Swin: windows of an image are folded into the batch axis and attend within themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.bias = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        count, height, width, channels = x.shape
        windows = x.view(count, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        windows = self.norm(windows.reshape(-1, 4, channels))
        bias = self.bias.repeat(len(windows), 1, 1)
        windows = windows + self.attention(windows, windows, windows, attn_mask=bias, need_weights=False)[0]
        return windows.view(count, -1, channels).mean(1)


class Folded(nn.Module):
    """Two sequences of each sample, folded into the batch axis of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 4, batch_first=True)

    def forward(self, x):
        return self.recurrent(x.flatten(0, 1))[0].unflatten(0, (len(x), 2))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return checkpoint(self._inside, self.first(x), use_reentrant=False)

    def _inside(self, x):
        return self.second(torch.tanh(x * self.scale))


PAIRS = (torch.randn(5, 6), torch.randn(5, 6))
MODELS = [
    pytest.param(lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5))).eval(), PAIRS[0], id="spectral-norm"),
    pytest.param(Parameters, PAIRS[0], id="parameter-list"),
    pytest.param(Tied, PAIRS[0], id="tied"),
    pytest.param(Experts, PAIRS[0], id="experts"),
    pytest.param(MaskedExperts, PAIRS[0], id="masked-experts"),
    pytest.param(Decomposed, PAIRS[0], id="dora"),
    pytest.param(Rescaled, PAIRS[0], id="ia3"),
    pytest.param(Prompted, torch.randn(5, 4, 6), id="prompt-tuning"),
    pytest.param(Siamese, PAIRS, id="siamese"),
    pytest.param(SiameseAtOnce, PAIRS, id="siamese-at-once"),
    pytest.param(Windows, torch.randn(5, 2, 4, 4), id="windows"),
    pytest.param(Folded, torch.randn(5, 2, 3, 6), id="folded-recurrent"),
    pytest.param(Checkpointed, PAIRS[0], id="checkpoint"),
]


@looping
@pytest.mark.parametrize(("make", "x"), MODELS)
def test_a_way_to_record_is_chosen_and_agrees_with_the_oracle(matches, reaching_loss, make, x):
    # The last bias of a siamese net cancels; it counts as 1/256 of its terms.
    tolerance = 1e-4 if make is Siamese else 1e-5
    matches(make(), x, torch.randn(5), reaching_loss, verify=True, tolerance=tolerance)


def fallbacks(engine: PerSampleGradients) -> dict[str, bool]:
    """Modules that run under vmap (False) or one sample at a time (True)."""
    return {unit.name: unit.rule.by_loop for unit in engine._units.values() if isinstance(unit.rule, VmapRule)}


@pytest.mark.parametrize(
    ("make", "shape", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(6, 6), Experts(), nn.Tanh()), (6,), {"1": True}),
        (lambda: nn.Sequential(nn.Linear(6, 6), Halves(), nn.Linear(4, 2)), (2, 6), {"1": False}),
    ],
    ids=["experts", "halves"],
)
@looping
def test_only_the_smallest_module_that_needs_it_leaves_the_fast_way(oracle, reaching_loss, make, shape, expected):
    model, x, y = make(), torch.randn(5, *shape), torch.randn(5)
    engine = PerSampleGradients(model)
    norms = engine.norms(x, y, reaching_loss)
    torch.testing.assert_close(norms.double(), oracle(model, x, y, reaching_loss).norms, rtol=1e-5, atol=1e-6)
    assert fallbacks(engine) == expected


def test_running_one_sample_at_a_time_is_said_once_and_not_to_who_asked_for_it(reaching_loss):
    model, x, y = nn.Sequential(nn.Linear(6, 6), Experts()), torch.randn(5, 6), torch.randn(5)
    engine = PerSampleGradients(model)
    with pytest.warns(LoopWarning, match=r"'1' are computed one sample at a time.*strategy=\{'1': 'loop'\}"):
        engine.norms(x, y, reaching_loss)
    engine.norms(x[:2], y[:2], reaching_loss)
    asked = PerSampleGradients(model, options=GradientOptions(strategy={"1": "loop"}))
    torch.testing.assert_close(asked.norms(x, y, reaching_loss), engine.norms(x, y, reaching_loss))


def test_a_strategy_that_was_given_stays():
    engine = PerSampleGradients(
        nn.Sequential(nn.Linear(6, 6), Experts()), options=GradientOptions(strategy={"1": "vmap"})
    )
    with pytest.raises(UnsupportedModuleError, match=r"'1'.*'loop'"):
        engine.norms(torch.randn(5, 6), torch.randn(5), lambda output, y: output.sum(1))


class Standardised(nn.Module):
    """Mixes samples, but for one alone it is the same as doing nothing to its gradient."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True).detach() * (len(x) > 1)


def test_a_model_that_mixes_samples_is_not_run_apart_from_them():
    model = nn.Sequential(Experts(), Standardised())
    with pytest.raises(UnsupportedModuleError, match="cannot be recorded"):
        PerSampleGradients(model).norms(torch.randn(5, 6), torch.randn(5), lambda output, y: output.sum(1))
