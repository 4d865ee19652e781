"""Parameters that are used outside the layers that have a rule, against the oracle, and that nothing goes to vmap for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from sluice.gradients import PerSampleGradients
from sluice.gradients.vmap import VmapRule


class Net(nn.Module):
    """A module made of parameters, children and a forward pass."""

    def __init__(self, forward, parameters=None, **children) -> None:
        super().__init__()
        for name, shape in (parameters or {}).items():
            self.register_parameter(name, nn.Parameter(0.5 * torch.randn(shape)))
        for name, child in children.items():
            self.add_module(name, child)
        self.run = forward

    def forward(self, *inputs):
        return self.run(self, *inputs)


def class_token(net, x):
    x = torch.cat([net.token.expand(x.shape[0], -1, -1), net.inside(x)], 1) + net.positions[:, : x.shape[1] + 1]
    return net.head(torch.tanh(net.block(x)))[:, 0]


def sequence_first(net, x):
    x = net.inside(x.transpose(0, 1)) + net.positions.unsqueeze(1)
    return net.head(torch.tanh(x * net.scale)).transpose(0, 1)


def written(net, x):
    z = x.new_zeros(x.shape[0], x.shape[1] + 1, x.shape[2])
    z[:, 0] = net.token
    z[:, 1:] = x
    z += net.shift
    return net.layer(z)


def masked(net, x):
    hidden = net.layer(x)
    return net.layer(torch.where((x[..., :1] > 0), net.token, hidden))


def attention(net, x):
    q, k, v = (layer(x).unflatten(-1, (2, 2)).transpose(1, 2) for layer in (net.q, net.k, net.v))
    bias = net.table[torch.arange(3)[:, None] - torch.arange(3)[None] + 2].permute(2, 0, 1)
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
    scores = (q @ k.transpose(-1, -2) * net.temperature.exp() + bias).softmax(-1)
    return (first + scores @ v).transpose(1, 2).flatten(2)


def einsums(net, x):
    a = torch.einsum("btd,de->bte", x, net.a)
    b = torch.einsum("oi,bti->bto", net.b, a)
    c = torch.einsum("bthd,hde->bthe", b.unflatten(-1, (2, 2)), net.c)
    d = torch.einsum("bti,jki->btjk", b, net.d)
    return torch.cat([b, c.flatten(2), d.flatten(2), torch.einsum("btd,d->bt", b, net.e)[..., None]], -1)


def rms(net, x):
    z = net.layer(x)
    return net.layer(net.weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-6)))


def temperature(net, x):
    return net.layer(x) / net.temperature.clamp(min=0.1) - F.softplus(net.shift)


def looked_up(net, ids):
    return torch.tanh(F.embedding(ids, net.table)) + net.other[ids] * 2 + torch.tanh(net.other[ids - 3])


def positions(net, ids):
    x = net.words(ids) + net.places(torch.arange(ids.shape[1]))
    return F.linear(torch.tanh(x), net.words.weight)


def buckets(net, ids):
    """Positions share rows of a table, of which one is padding."""
    bias = net.buckets(torch.arange(ids.shape[1]) // 2)
    return torch.tanh(net.words(ids) + bias) * net.padded(torch.arange(ids.shape[1]))


def through_a_child(net, x):
    return net.child(x, net.table) + net.head(net.token)


def standardised(net, x):
    w = net.weight - net.weight.mean((1, 2, 3), keepdim=True)
    w = w / (w.std((1, 2, 3), keepdim=True) + 1e-3)
    return F.conv2d(torch.tanh(F.conv2d(x, w, net.bias, padding=1)), net.second, stride=2, groups=2)


def normalised(net, x):
    x = F.layer_norm(x.permute(0, 2, 3, 1), (4,), net.weight, net.bias).permute(0, 3, 1, 2)
    parts = [
        F.group_norm(x, 2, net.weight, net.bias),
        F.batch_norm(x, x.new_zeros(4), x.new_ones(4), net.weight, net.bias),
        F.instance_norm(x, weight=net.weight, eps=0.1),
        F.rms_norm(x, (3, 3), net.last, eps=0.1),
        F.prelu(x, net.bias),
    ]
    return torch.cat(parts, 1)


def matrices(net, x):
    a = net.mix @ x + x @ net.square + torch.matmul(x, net.vector)[..., None]
    b = a.flatten(0, 1) @ net.square + net.shift
    c = torch.addmm(net.shift, b, net.square).view_as(x)
    return c.unsqueeze(1) @ net.heads + (c.transpose(0, 1) @ net.square).transpose(0, 1).unsqueeze(1)


def merged_lora(net, x):
    return F.linear(x, net.base.weight + 0.5 * net.b @ net.a, net.base.bias)


def functional_lora(net, x):
    return net.base(x) + F.linear(F.linear(x, net.a), net.b) * 0.25


def folded(net, x):
    z = x.flatten(0, 1) * net.scale + net.shift
    return F.linear(z, net.weight).view(x.shape[0], -1)


def unknown_function(net, x):
    return F.bilinear(x, torch.tanh(x), net.weight, net.bias) + torch.cdist(x, net.points)


def from_a_list(net, x):
    for weight in net.weights:
        x = torch.tanh(x @ weight)
    return x * net.named["scale"]


def twice(net, x):
    return net.layer(torch.tanh(net.layer(x))) * net.gamma


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, table):
        return self.layer(x + table[0]) * table[1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.gamma * self.layer(x)


def lists() -> nn.Module:
    net = Net(from_a_list)
    net.weights = nn.ParameterList([torch.randn(4, 4), torch.randn(4, 4)])
    net.named = nn.ParameterDict({"scale": torch.randn(4)})
    return net


def frozen_base(forward) -> nn.Module:
    net = Net(forward, {"a": (2, 4), "b": (3, 2)}, base=nn.Linear(4, 3))
    net.base.requires_grad_(False)
    return net


def _linear(inputs=4, outputs=4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


SEQUENCES = {
    "class-token": lambda: Net(
        class_token, {"token": (1, 1, 4), "positions": (1, 6, 4)}, inside=_linear(), block=_linear(), head=_linear()
    ),
    "sequence-first": lambda: Net(
        sequence_first, {"positions": (3, 4), "scale": (4,)}, inside=_linear(), head=_linear()
    ),
    "written": lambda: Net(written, {"token": (4,), "shift": (4, 4)}, layer=_linear()),
    "mask-token": lambda: Net(masked, {"token": (4,)}, layer=_linear()),
    "attention-bias": lambda: Net(
        attention, {"table": (5, 2), "temperature": ()}, q=_linear(), k=_linear(), v=_linear()
    ),
    "einsum": lambda: Net(einsums, {"a": (4, 3), "b": (4, 3), "c": (2, 2, 3), "d": (2, 3, 4), "e": (4,)}),
    "rms-norm": lambda: Net(rms, {"weight": (4,)}, layer=_linear()),
    "temperature": lambda: Net(temperature, {"temperature": (), "shift": (1,)}, layer=_linear()),
    "through-a-child": lambda: Net(through_a_child, {"table": (2, 4), "token": (4,)}, child=Child(), head=_linear()),
    "matrices": lambda: Net(
        matrices, {"mix": (3, 3), "square": (4, 4), "vector": (4,), "shift": (4,), "heads": (2, 4, 4)}
    ),
    "merged-lora": lambda: frozen_base(merged_lora),
    "functional-lora": lambda: frozen_base(functional_lora),
    "trained-base": lambda: Net(merged_lora, {"a": (2, 4), "b": (3, 2)}, base=nn.Linear(4, 3)),
    "folded": lambda: Net(folded, {"scale": (4,), "shift": (1, 4), "weight": (3, 4)}),
    "unknown-function": lambda: Net(unknown_function, {"weight": (5, 4, 4), "bias": (5,), "points": (5, 4)}),
    "lists": lists,
    "layer-called-twice": lambda: Net(twice, {"gamma": (4,)}, layer=Scaled()),
    "weight-norm": lambda: nn.Sequential(parametrizations.weight_norm(_linear()), nn.Tanh(), _linear(4, 2)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(_linear()), nn.Tanh(), _linear(4, 2)),
    "scaled-block": lambda: nn.Sequential(Scaled(), nn.Tanh(), Scaled()),
}


def in_vmap(engine: PerSampleGradients) -> list[str]:
    return [unit.name for unit in engine._units.values() if isinstance(unit.rule, VmapRule)]


@pytest.mark.parametrize("n", [1, 4, 7])
@pytest.mark.parametrize("make", SEQUENCES.values(), ids=SEQUENCES)
def test_bare_parameters_agree_with_the_oracle(matches, reaching_loss, make, n):
    model, x = make(), torch.randn(n, 3, 4)
    matches(model, x, torch.randn(n), reaching_loss)
    engine = PerSampleGradients(model)
    engine.norms(x, torch.randn(n), reaching_loss)
    assert in_vmap(engine) == []


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (lambda: Net(standardised, {"weight": (4, 2, 3, 3), "bias": (4,), "second": (2, 2, 2, 2)}), (2, 6, 6)),
        (lambda: Net(normalised, {"weight": (4,), "bias": (4,), "last": (3, 3)}), (4, 3, 3)),
        (lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.PReLU(), nn.PReLU(4), nn.BatchNorm2d(4).eval()), (4, 3, 3)),
        (lambda: nn.Sequential(parametrizations.weight_norm(nn.Conv2d(4, 3, 3)), nn.Conv2d(3, 2, 1)), (4, 3, 3)),
    ],
    ids=["weight-standardisation", "normalised", "prelu", "weight-norm"],
)
def test_images_agree_with_the_oracle(matches, reaching_loss, model, x, n):
    net = model()
    matches(net, torch.randn(n, *x), torch.randn(n), reaching_loss)
    engine = PerSampleGradients(net)
    engine.norms(torch.randn(n, *x), torch.randn(n), reaching_loss)
    assert in_vmap(engine) == []


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(
    "model",
    [
        lambda: Net(looked_up, {"table": (9, 3), "other": (9, 3)}),
        lambda: Net(positions, words=nn.Embedding(9, 3, padding_idx=0), places=nn.Embedding(8, 3)),
        lambda: Net(
            buckets, words=nn.Embedding(9, 3), buckets=nn.Embedding(4, 3), padded=nn.Embedding(8, 3, padding_idx=2)
        ),
    ],
    ids=["tables", "position-embedding-and-tied-head", "buckets"],
)
def test_tables_agree_with_the_oracle(matches, reaching_loss, model, n):
    net, ids = model(), torch.randint(0, 9, (n, 6))
    matches(net, ids, torch.randn(n), reaching_loss)
