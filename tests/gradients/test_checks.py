"""Models and losses that mix samples are refused, in whatever mode they do it, and no record's values have a say in that."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients import GradientOptions, PerSampleGradients
from sluice.gradients.loop import LoopCapture


def norms(model, x, *, y=None, loss=None, reduction="none", **options):
    engine = PerSampleGradients(model, loss_reduction=reduction, options=GradientOptions(**options))
    y = torch.zeros(len(x[0] if isinstance(x, tuple) else x)) if y is None else y
    return engine.norms(x, y, loss or (lambda output, _: output.flatten(1).sum(1)))


class Inside(nn.Module):
    """A linear layer around something that happens in the middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 4), middle, nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.middle(torch.tanh(self.first(x))))


class CentredInTraining(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class CentredBehindDropout(nn.Module):
    def forward(self, x):
        x = functional.dropout(x, 0.5, self.training)
        return x - x.mean(0) if self.training else x


class FunctionalBatchNorm(nn.Module):
    def forward(self, x):
        return functional.batch_norm(x, None, None, training=self.training) if self.training else x


class NeighbourBefore(nn.Module):
    """The first sample of a batch never notices."""

    def forward(self, x):
        return torch.cat([x[:1], x[1:] + x[:-1]]) if self.training else x


class ScaledByBatchSize(nn.Module):
    def forward(self, x):
        return x / x.shape[0] if self.training else x


class MixedDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


class MixesBackwards(nn.Module):
    def forward(self, x):
        return MixedDerivative.apply(x) if self.training else x


@pytest.mark.parametrize(
    "middle",
    [CentredInTraining, CentredBehindDropout, FunctionalBatchNorm, NeighbourBefore],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_mixing_in_training_mode_only_is_refused_by_name(middle, dropout):
    model = nn.Sequential(nn.Dropout(dropout), Inside(middle()))
    with pytest.raises(UnsupportedModuleError, match=r"'1\.middle'"):
        norms(model, torch.randn(6, 5))
    norms(model.eval(), torch.randn(6, 5))


@pytest.mark.parametrize("middle", [MixesBackwards, ScaledByBatchSize])
def test_mixing_that_no_output_shows_is_refused(middle):
    with pytest.raises(UnsupportedModuleError, match=r"mixes samples|other samples"):
        norms(nn.Sequential(Inside(middle()), nn.Dropout(0.3)), torch.randn(6, 5))


def test_an_ordinary_loop_refuses_what_mixes_in_training_mode():
    model = Inside(CentredInTraining())
    capture = LoopCapture(PerSampleGradients(model, loss_reduction="mean"), rows=8)
    capture.attach()
    try:
        capture.expect(6)
        with pytest.raises(UnsupportedModuleError, match="'middle'"):
            model(torch.randn(6, 5))
    finally:
        capture.detach()


def test_mixing_that_begins_with_a_mode_or_with_a_shape_is_caught_when_it_begins():
    class OnLong(nn.Module):
        def forward(self, x):
            return x - x.mean(0) if x.shape[1] > 3 else x

    model = nn.Sequential(nn.Linear(5, 4), OnLong(), nn.Linear(4, 2))
    engine = PerSampleGradients(model)

    def loss(output, y):
        return output.flatten(1).sum(1)

    engine.norms(torch.randn(6, 3, 5), torch.zeros(6), loss)
    with pytest.raises(UnsupportedModuleError, match="'1'"):
        engine.norms(torch.randn(6, 4, 5), torch.zeros(6), loss)

    model = Inside(CentredInTraining()).eval()
    engine = PerSampleGradients(model)
    engine.norms(torch.randn(6, 5), torch.zeros(6), loss)
    model.middle.train()
    with pytest.raises(UnsupportedModuleError, match="'middle'"):
        engine.norms(torch.randn(6, 5), torch.zeros(6), loss)


class RunningMean(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("started", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            return x
        new = x.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.9).add_(new)
        elif self.how == "assigned":
            self.mean = 0.9 * self.mean + new
        elif self.how == "first batch" and not self.started:
            self.mean.copy_(new)
            self.started.fill_(1)
        elif self.how == "counter":
            self.started += 1
        return x - self.mean if self.how == "used" else x


@pytest.mark.parametrize(
    ("how", "name"),
    [("in place", "mean"), ("assigned", "mean"), ("first batch", "mean"), ("counter", "started")],
)
def test_buffers_that_follow_the_data_are_refused_by_name(how, name):
    model = Inside(RunningMean(how))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModuleError, match=rf"'middle\.{name}'.*GroupNorm|'middle\.{name}'.*eval\(\)"):
        norms(model, torch.randn(6, 5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class CachedPositions(nn.Module):
    """A table that is filled at the first call, from shapes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.table.shape[0] != x.shape[-1]:
            self.table = torch.arange(float(x.shape[-1]))
        return x + self.table


def test_buffers_that_depend_on_shapes_alone_are_allowed():
    assert norms(Inside(CachedPositions()), torch.randn(6, 5)).shape == (6,)


class Remembering(nn.Module):
    """Keeps something of the batch where no buffer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.zeros(4)

    def forward(self, x):
        result = x + self.last
        self.last = x.detach().mean(0)
        return result


def test_hidden_state_is_refused():
    with pytest.raises(UnsupportedModuleError, match="remember"):
        norms(Inside(Remembering()), torch.randn(6, 5))


class Lottery(nn.Module):
    def forward(self, x):
        factor = random.random() + np.random.rand() + float(torch.rand(()))  # noqa: NPY002
        return x * factor if self.training else x


def test_randomness_of_any_usual_source_is_no_reason_to_refuse():
    engine = PerSampleGradients(Inside(Lottery()))
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    engine.prepare(torch.zeros(6, 5))
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


class Probe(nn.Module):
    """Keeps what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(5, 3), []

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return self.layer(x)


def test_checks_never_see_a_record():
    model = Probe()
    x = torch.randn(6, 5) * 1e4
    PerSampleGradients(model).prepare(x)
    assert model.seen
    assert max(float(values.abs().max()) for values in model.seen) < 100


class Words(nn.Module):
    def __init__(self, lengths: bool = False) -> None:
        super().__init__()
        self.table, self.layer, self.lengths = nn.Embedding(3, 4), nn.LSTM(4, 3, batch_first=True), lengths

    def forward(self, x, lengths=None):
        embedded = self.table(x)
        if self.lengths:
            embedded = nn.utils.rnn.pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        return self.layer(embedded)[1][0][0]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, hidden):
        return self.attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0].mean(1)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Words(), torch.randint(0, 3, (6, 7))),
        (Words(lengths=True), (torch.randint(0, 3, (6, 7)), torch.randint(1, 8, (6,)))),
        (Masked(), (torch.randn(6, 7, 4), torch.arange(7).expand(6, 7) > 4)),
        (Masked(), (torch.randn(6, 7, 4), torch.arange(7).expand(6, 7) > 7)),
    ],
    ids=["words", "lengths", "mask", "no-mask"],
)
def test_integers_and_masks_are_made_up_so_that_the_model_runs(model, x):
    assert norms(model, x).isfinite().all()


class Picky(nn.Module):
    """Runs only on numbers between 40 and 50."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.layer, self.mixing = nn.Linear(5, 3), mixing

    def forward(self, x):
        if not bool(((x > 40) & (x < 50)).all()):
            raise ValueError("out of range")
        return self.layer(x - x.mean(0) if self.mixing else x)


def test_a_model_that_takes_no_synthetic_input_asks_for_a_public_example():
    x, example = 40 + 10 * torch.rand(6, 5), 40 + 10 * torch.rand(4, 5)
    with pytest.raises(UnsupportedModuleError, match=r"(?s)example=.*verify=False"):
        norms(Picky(), x)
    expected = norms(Picky(), x, verify=False)
    assert expected.shape == (6,)
    assert norms(Picky(), x, example=example).shape == (6,)
    with pytest.raises(UnsupportedModuleError, match="another output"):
        norms(Picky(mixing=True), x, example=example)
    with pytest.raises(InputError, match="example"):
        norms(Picky(), x, example=torch.zeros(4, 5))
    with pytest.raises(InputError, match="at least 2"):
        GradientOptions(example=torch.zeros(1, 5))


class NotFinite(nn.Module):
    """Its output is NaN but for positive input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        logarithm = x.log()
        return self.layer(logarithm - logarithm.mean(0))


def test_an_output_that_is_not_finite_hides_nothing():
    with pytest.raises(UnsupportedModuleError, match="another output"):
        norms(NotFinite(), torch.rand(6, 5))


def test_many_lengths_are_not_checked_again_and_again_but_samples_are_found_in_each():
    class Varying(nn.Module):
        """Sequence first for even lengths, samples first for odd ones."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 2), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x) if x.shape[1] % 2 else self.layer(x.transpose(0, 1)).transpose(0, 1)

    model = Varying()
    engine = PerSampleGradients(model)
    calls = []
    for length in range(1, 16):
        x = torch.randn(6, length, 3)
        before = model.calls
        found = engine.norms(x, torch.zeros(6), lambda o, y: o.square().flatten(1).sum(1))
        calls.append(model.calls - before)
        for i in range(6):
            model.zero_grad()
            model(x[i : i + 1]).square().sum().backward()
            expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            torch.testing.assert_close(found[i], expected, rtol=1e-5, atol=0)
    assert calls[0] > 10 > calls[-1]
    before = model.calls
    engine.norms(torch.randn(6, 15, 3), torch.zeros(6), lambda o, y: o.square().flatten(1).sum(1))
    assert model.calls == before + 1


# Losses

CLASSES = torch.tensor([1.0, 2.0, 3.0])


def masked_mean(output, y):
    target, mask = y
    return ((output[:, 0] - target) ** 2 * mask).sum() / mask.sum()


LABELS, TOKENS = torch.randint(0, 3, (6,)), torch.randint(0, 3, (6, 4))
MIXING = [
    ("mean", lambda o, y: functional.cross_entropy(o, y, weight=CLASSES), LABELS),
    ("mean", lambda o, y: functional.cross_entropy(o, y, ignore_index=0), LABELS),
    (
        "mean",
        lambda o, y: functional.cross_entropy(o.unsqueeze(1).expand(-1, 4, -1).flatten(0, 1), y.flatten()),
        TOKENS,
    ),
    ("mean", masked_mean, (torch.zeros(6), torch.ones(6))),
    ("mean", masked_mean, (torch.zeros(6), torch.ones(6, dtype=torch.bool))),
    ("mean", lambda o, y: functional.mse_loss(o[:, :1], y), torch.zeros(6)),
    ("sum", lambda o, y: functional.cross_entropy(o / o.norm(), y, reduction="sum"), LABELS),
    ("sum", lambda o, y: (o @ o.T).logsumexp(1).sum(), None),
    ("none", lambda o, y: functional.cross_entropy(o - o.mean(0), y, reduction="none"), LABELS),
    ("none", lambda o, y: functional.cross_entropy(o, y, reduction="none").flip(0), LABELS),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("reduction", "loss", "y"), MIXING, ids=range(len(MIXING)))
def test_losses_that_mix_samples_are_refused(reduction, loss, y):
    with pytest.raises(InputError, match=r"(?s)loss.*other samples.*reduction='none'"):
        norms(nn.Linear(5, 3), torch.randn(6, 5), y=y, loss=loss, reduction=reduction)
    norms(
        nn.Linear(5, 3), torch.randn(6, 5), y=y, loss=loss, reduction=reduction, verify=False
    ) if reduction != "none" else None


@pytest.mark.parametrize(
    ("reduction", "other"), [("mean", "sum"), ("sum", "mean")], ids=["sum-called-mean", "mean-called-sum"]
)
def test_a_loss_that_is_not_reduced_as_announced_is_refused(reduction, other):
    with pytest.raises(InputError, match=f"loss_reduction='{other}'"):
        norms(
            nn.Linear(5, 3),
            torch.randn(6, 5),
            y=LABELS,
            loss=lambda o, y: functional.cross_entropy(o, y, reduction=other),
            reduction=reduction,
        )


FINE = [
    ("mean", functional.cross_entropy, LABELS),
    ("mean", nn.CrossEntropyLoss(label_smoothing=0.1), LABELS),
    ("mean", lambda o, y: (functional.cross_entropy(o, y, reduction="none") * CLASSES[y]).mean(), LABELS),
    ("sum", nn.CrossEntropyLoss(weight=CLASSES, ignore_index=1, reduction="sum"), LABELS),
    ("none", nn.CrossEntropyLoss(weight=CLASSES, reduction="none"), LABELS),
    ("mean", functional.mse_loss, torch.zeros(6, 3)),
    ("mean", lambda o, y: functional.binary_cross_entropy(o.sigmoid()[:, 0], y), torch.zeros(6)),
    ("mean", lambda o, y: functional.binary_cross_entropy_with_logits(o, y), torch.zeros(6, 3)),
    ("mean", lambda o, y: functional.nll_loss(o.log_softmax(1), y), LABELS),
    ("mean", lambda o, y: functional.kl_div(o.log_softmax(1), y.softmax(1), reduction="batchmean"), torch.zeros(6, 3)),
    ("mean", lambda o, y: functional.multi_margin_loss(o, y), LABELS),
    ("mean", lambda o, y: functional.dropout(o, 0.5).square().mean(), None),
    ("sum", lambda o, y: (o * y["a"]).sum() - y["b"].float().sum(), {"a": torch.zeros(6, 3), "b": LABELS}),
    ("none", lambda o, y: functional.cross_entropy(o, y, reduction="none"), LABELS.to(torch.int64)),
    ("mean", lambda o, y: functional.cross_entropy(o, y - 7), LABELS + 7),
]


@pytest.mark.parametrize(("reduction", "loss", "y"), FINE, ids=range(len(FINE)))
def test_losses_that_treat_samples_one_by_one_are_accepted(reduction, loss, y):
    assert norms(nn.Linear(5, 3), torch.randn(6, 5), y=y, loss=loss, reduction=reduction).shape == (6,)


def test_losses_of_sequences_are_checked_token_by_token():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

        def forward(self, x):
            return self.head(self.table(x))

    x = y = torch.randint(0, 7, (6, 4))

    def by_token(o, y):
        return functional.cross_entropy(o.transpose(1, 2), y, reduction="none")

    norms(Model(), x, y=y, loss=lambda o, y: by_token(o, y).mean(1))
    norms(Model(), x, y=y, loss=lambda o, y: by_token(o, y).sum(), reduction="sum")
    with pytest.raises(InputError, match="other samples"):
        norms(Model(), x, y=y, loss=lambda o, y: functional.cross_entropy(o.transpose(1, 2), y), reduction="mean")


def test_a_loss_is_checked_once_and_its_random_numbers_are_not_used_up():
    calls = []

    def loss(output, y):
        calls.append(torch.rand(()))
        return output.sum(1)

    engine = PerSampleGradients(nn.Linear(5, 3))
    x, y = torch.randn(6, 5), torch.zeros(6)
    torch.manual_seed(1)
    engine.norms(x, y, loss)
    assert len(calls) > 1
    torch.manual_seed(1)
    assert torch.equal(calls[-1], torch.rand(()))
    calls.clear()
    engine.norms(x, y, loss)
    assert len(calls) == 1
