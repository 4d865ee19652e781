"""The contract of every release: one record more moves sums and metrics by no more than what is charged.

Each method runs on D and on D' = D + z, in both loops where it has them. Batches hold every record, in orders that are
coupled as in the proof (docs/noise.md, section 6): z takes a place, and the record that was there moves to the end.
What goes into the noise is taken down on the way, and the difference is compared with what the noise is made for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from sluice.accounting.matrix.strategy import BandedToeplitz
from sluice.gradients import PerSampleGradients
from sluice.mechanism.base import Mechanism
from sluice.mechanism.gates import ClippingBiasGate, Gate
from sluice.mechanism.scaling import Clip, GlobalScaling, Normalise, ScalingRule
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.mechanism.thinning import ThinningGate
from sluice.methods.dpagd import AdaptiveBudget
from sluice.methods.dpagd import execution as dpagd_descent
from sluice.methods.dpagd.execution import LOSS_PARTS
from sluice.methods.dpis import ImportanceSampling
from sluice.methods.dpis import execution as dpis_release
from sluice.methods.dpsur import DpsurMechanism
from sluice.methods.matrix import MatrixMechanism
from sluice.randomness import correlated as matrix_noise
from sluice.randomness import grouped_sampling as batches_module
from sluice.randomness import noise as noise_module
from sluice.randomness.noise import SeededNoise
from sluice.randomness.sampling import PoissonSampler
from sluice.training.batches import Batches
from sluice.training.distributed import workers as workers_module
from sluice.training.engine import PrivacyEngine
from sluice.training.options import TrainingOptions

CLASSES, FEATURES = 3, 12
CLIP = 0.7


# Neighbouring data sets.


@dataclass(frozen=True)
class Neighbours:
    """The records of D, and the one that D' has beside them."""

    x: Tensor
    y: Tensor
    z: Tensor
    label: int

    def data(self, *, with_z: bool) -> TensorDataset:
        if not with_z:
            return TensorDataset(self.x, self.y)
        return TensorDataset(torch.cat([self.x, self.z[None]]), torch.cat([self.y, torch.tensor([self.label])]))


def random_records(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, FEATURES, generator=generator), torch.arange(size) % CLASSES


def others(kind: str, size: int) -> tuple[Tensor, Tensor]:
    x, y = random_records(size)
    if kind == "equal":
        x, y = x[:1].repeat(size, 1), y[:1].repeat(size)
    elif kind == "saturated":
        # Logits so large that the softmax is decided by their last bits.
        x = x[:1].repeat(size, 1) * 1e8
        y = y[:1].repeat(size)
    elif kind == "all scales":
        x = x * torch.logspace(-30, 30, size)[:, None]
    elif kind == "broken":
        x = x.clone()
        x[::7] = math.nan
        x[3::11] = math.inf
    return x, y


def added(kind: str, x: Tensor) -> Tensor:
    direction = torch.linspace(-1, 1, FEATURES)
    scales = {"huge": 1e30, "large": 1e6, "overflowing": 3e38, "tiny": 1e-30, "denormal": 1e-42, "zero": 0.0}
    if kind in scales:
        return direction * scales[kind]
    if kind == "equal to another":
        return x[0].clone()
    return torch.full((FEATURES,), {"nan": math.nan, "infinite": math.inf}[kind])


OTHERS = ["random", "equal", "saturated", "all scales", "broken"]
ADDED = ["huge", "large", "overflowing", "tiny", "denormal", "zero", "equal to another", "nan", "infinite"]


# Models that mix nothing, with layers of each kind of kernel.


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, CLASSES))


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, CLASSES))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 5, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(5, 4, 3),
        nn.Flatten(),
        nn.Linear(4 * (FEATURES - 2), CLASSES),
    )


class Repeated(nn.Module):
    """So many inputs that the kernel for few outputs is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(16 * FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(x.repeat(1, 16))
        return logits


class Bags(nn.Module):
    """Numbers as words, most of which many records share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(9, 5, mode="sum")
        self.classifier = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.words(x.nan_to_num(0, 0, 0).clamp(-4, 4).long() + 4))
        return logits


MODELS = {"linear": linear, "deep": deep, "convolutional": convolutional, "repeated": Repeated, "bags": Bags}


def built(model: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return MODELS[model]()


# Taking down what noise is added to.


@dataclass(frozen=True)
class Entry:
    raw: list[Tensor]
    sensitivity: float
    sum_error: float

    @property
    def charged(self) -> float:
        return self.sensitivity + 2 * self.sum_error


class Everybody(SeededNoise):
    """Seeded noise, and batches that hold every record in coupled orders. Coins of DPIS belong to records."""

    def __init__(self, size: int, *, with_z: bool) -> None:
        super().__init__(5)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(size, generator=generator)
        self._coins = torch.rand(size + 1, generator=generator, dtype=torch.float64)
        if with_z:
            place = size // 3
            moved = order[place].clone()
            order[place] = size
            order = torch.cat([order, moved[None]])
        self._order = order

    def random_order(self, indices: Tensor) -> Tensor:
        assert len(indices) == len(self._order)
        return self._order

    def bernoulli(self, count: int, probability: float) -> Tensor:
        return torch.ones(count, dtype=torch.bool)

    def uniform(self, shape: Any) -> Tensor:
        return self._coins[self._order] if tuple(shape) == (len(self._order),) else super().uniform(shape)


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Every sum to which noise was added, in order; and summed losses, of which each candidate's is charged alike."""
    found: list[Entry] = []

    def taken_down(raw_sum: Any, *, sensitivity: float, sum_error: float = 0.0, **options: Any) -> Any:
        raw = [tensor.detach().double().clone() for tensor in raw_sum]
        found.append(Entry(raw, sensitivity, sum_error))
        for tensor in raw_sum:
            tensor.fill_(0.01)  # what is released: the same for both, since later steps are compared for the same past
        return raw_sum

    for module in (workers_module, noise_module, matrix_noise, dpis_release):
        monkeypatch.setattr(module, "noisy_sum", taken_down)
    minimum = dpagd_descent.noisy_minimum

    def losses(raw_sums: Tensor, **options: Any) -> int:
        # The selection is bounded if each sum moves by 0 to LOSS_PARTS.
        found.extend(Entry([value.double()], float(LOSS_PARTS), 0.0) for value in raw_sums)
        minimum(raw_sums, **options)
        return 1

    monkeypatch.setattr(dpagd_descent, "noisy_minimum", losses)
    monkeypatch.setattr(PoissonSampler, "sample", lambda self: torch.arange(self.dataset_size))
    monkeypatch.setattr(batches_module.CyclicPoisson, "batch_of", lambda self, step: torch.arange(self.dataset_size))
    return found


def compare(without: list[Entry], with_z: list[Entry]) -> None:
    assert len(without) == len(with_z) > 0
    for one, other in zip(without, with_z, strict=True):
        # The ordinary loop takes the number of records as public, so what it charges for rounding moves a little with it.
        charged = min(one.charged, other.charged)
        assert charged == pytest.approx(max(one.charged, other.charged), rel=1e-4)
        shift = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(one.raw, other.raw, strict=True)))
        assert shift <= charged


# The mechanisms.

SIZE = 150


def gate_for(model: str, neighbours: Neighbours) -> ClippingBiasGate:
    """A gate whose metric begins to rise exactly at the norm of a record, where a jump would be worst."""
    engine = PerSampleGradients(built(model), expected_batch_size=float(SIZE))
    norms = engine.norms(neighbours.x, neighbours.y, lambda o, t: F.cross_entropy(o, t, reduction="none"))
    finite = norms[norms.isfinite() & (norms > 0)]
    small = float(finite[0]) if len(finite) else 0.1
    small = min(max(small, 1e-20), 1e20)
    gate = ClippingBiasGate(
        beta=-3.0,
        gate_noise=2.0,
        reference_noise=10.0,
        small_norm=small,
        large_norm=2 * small,
        initial_reference=1e6,
    )
    return gate.for_batches_of(SIZE, small_norm=small)


def selective(rule: ScalingRule, gate: Gate | None) -> SelectiveRelease:
    return SelectiveRelease(
        sample_rate=0.5, expected_batch_size=float(SIZE), scaling=rule, noise_multiplier=2.0, releases=1, gate=gate
    )


MECHANISMS: dict[str, Mechanism] = {
    "dpsur": DpsurMechanism(
        sample_rate=0.5,
        expected_batch_size=float(SIZE),
        scaling=Clip(max_grad_norm=CLIP),
        noise_multiplier=2.0,
        validation_rate=0.5,
        expected_validation_size=float(SIZE),
        validation_noise=1.3,
        loss_clip=0.1,
        threshold=50.0,
        releases=1,
    ),
    "dpis": ImportanceSampling(
        dataset_size=SIZE,
        wanted_rate=0.5,
        sample_rate=0.5,
        first_clip_norm=CLIP,
        noise_multiplier=2.0,
        norm_noise=10.0,
        count_noise=5.0,
        norm_decay=0.5,
        clip_rate=0.2,
        clip_target=0.5,
        releases=1,
    ),
    "dpagd": AdaptiveBudget(
        rho=1.0,
        gradient_rho=0.16,
        selection_rho=0.04,
        max_grad_norm=CLIP,
        gamma=0.5,
        candidates=2,
        first_reach=0.3,
        refresh_every=2,
        reach_growth=0.1,
        loss_clip=3.0,
        gradient_rate=1.0,
        loss_rate=1.0,
        releases=8,
    ),
    "matrix": MatrixMechanism(
        strategy=BandedToeplitz(diagonals=(1.0, 0.5)),
        batches="cyclic-poisson",
        groups=2,
        sample_rate=0.5,
        expected_batch_size=float(SIZE),
        max_grad_norm=CLIP,
        noise_multiplier=2.0,
        releases=2,
    ),
}


def release_once(mechanism: Mechanism, model: str, neighbours: Neighbours, *, with_z: bool) -> None:
    module = built(model)
    engine = PrivacyEngine(seed=0)
    engine.noise = Everybody(len(neighbours.y), with_z=with_z)
    engine.make_private_by(
        mechanism,
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=neighbours.data(with_z=with_z),
        options=TrainingOptions(max_physical_batch_size=64),
    )
    next(engine.releases(F.cross_entropy))


def loop_once(mechanism: SelectiveRelease, model: str, neighbours: Neighbours, *, with_z: bool) -> None:
    module = built(model)
    engine = PrivacyEngine(seed=0)
    engine.noise = Everybody(len(neighbours.y), with_z=with_z)
    _, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data_loader=DataLoader(neighbours.data(with_z=with_z), batch_size=8),
        noise_multiplier=2.0,
        max_grad_norm=CLIP,
        sample_rate=0.99 if mechanism.gate is not None and mechanism.gate.thins else 1.0,
        scaling=mechanism.scaling,
        gate=mechanism.gate,
        releases=1,
        max_physical_batch_size=64,
    )
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    engine.close()


Once = Callable[..., None]


def measured(once: Once, mechanism: Mechanism, model: str, neighbours: Neighbours, entries: list[Entry]) -> None:
    found = []
    for with_z in (False, True):
        entries.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of gradients that are not finite
            once(mechanism, model, neighbours, with_z=with_z)
        found.append(list(entries))
    compare(*found)


def pair(kind: str, z: str, size: int = SIZE) -> Neighbours:
    x, y = others(kind, size)
    return Neighbours(x, y, added(z, x), 1)


@pytest.mark.parametrize("once", [release_once, loop_once])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_selective_release_and_dpsgd(once, gated, kind, entries):
    cases = [("deep", z) for z in ADDED] + [(model, z) for model in MODELS for z in ("large", "equal to another")]
    for model, z in cases:
        neighbours = pair(kind, z)
        gate = gate_for(model, neighbours) if gated else None
        measured(once, selective(Clip(max_grad_norm=CLIP), gate), model, neighbours, entries)


@pytest.mark.parametrize("once", [release_once, loop_once])
@pytest.mark.parametrize("rule", [GlobalScaling(max_grad_norm=CLIP, bound=3.0), Normalise(max_grad_norm=CLIP)])
def test_other_scaling_rules(once, rule, entries):
    for kind in OTHERS:
        for z in ("huge", "equal to another", "nan"):
            measured(once, selective(rule, None), "deep", pair(kind, z), entries)


@pytest.mark.parametrize("method", MECHANISMS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_methods(method, kind, entries):
    for z in ADDED:
        measured(release_once, MECHANISMS[method], "deep", pair(kind, z), entries)


def test_losses_in_a_selection_can_only_rise(entries):
    """DPAGD's selection is monotone: that is what its smaller noise needs."""
    neighbours = pair("random", "large")
    for with_z in (False, True):
        release_once(MECHANISMS["dpagd"], "deep", neighbours, with_z=with_z)
    sums = [float(entry.raw[0]) for entry in entries if entry.sensitivity == LOSS_PARTS]
    before, after = sums[:3], sums[3:]
    assert all(0 <= b - a <= LOSS_PARTS for a, b in zip(before, after, strict=True))


# Gates that decide record by record: whose probabilities change with z, and how far.


THINNING = ThinningGate(strength=3.0, small_norm=0.0, large_norm=30.0)


def probabilities(once: Once, model: str, neighbours: Neighbours, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each record of D is kept with, by number, without and with z among the candidates."""
    found = []
    mechanism = selective(Clip(max_grad_norm=CLIP), THINNING)
    for with_z in (False, True):
        parts: list[Tensor] = []
        original = ThinningGate.keep_probability

        def taken_down(
            gate: Any, norms: Tensor, *, parts: list[Tensor] = parts, original: Any = original, **rate: Any
        ) -> Tensor:
            parts.append(original(gate, norms, **rate))
            return parts[-1]

        with monkeypatch.context() as patched, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patched.setattr(ThinningGate, "keep_probability", taken_down)
            once(mechanism, model, neighbours, with_z=with_z)
        order = Everybody(len(neighbours.y), with_z=with_z).random_order(torch.arange(len(neighbours.y) + with_z))
        by_number = torch.empty(len(order), dtype=torch.float64)
        by_number[order] = torch.cat(parts)
        found.append(by_number[: len(neighbours.y)])
    return found


@pytest.mark.parametrize(("once", "moved"), [(release_once, 1), (loop_once, 64)])
@pytest.mark.parametrize("kind", ["random", "equal", "broken"])
def test_few_probabilities_change_with_z_and_those_by_less_than_what_is_charged(
    once, moved, kind, entries, monkeypatch
):
    charged = THINNING.acceptance.ratio_max  # for one record
    for model in ("deep", "repeated"):
        without, with_z = probabilities(once, model, pair(kind, "large"), monkeypatch)
        assert int((without != with_z).sum()) <= moved
        for one, other in ((without, with_z), (1 - without, 1 - with_z)):
            assert float((one / other).max()) <= charged
            assert float((other / one).max()) <= charged


def test_a_mean_over_another_number_of_records_moves_more_than_one(entries, monkeypatch):
    """Why the ordinary loop is charged for all records of a piece."""
    without, with_z = probabilities(loop_once, "deep", pair("random", "large"), monkeypatch)
    assert int((without != with_z).sum()) > 1


@pytest.mark.parametrize("once", [release_once, loop_once])
@pytest.mark.parametrize("kind", ["random", "broken"])
def test_thinned_sums(once, kind, entries):
    for model, z in (("deep", "huge"), ("deep", "nan"), ("convolutional", "large"), ("bags", "equal to another")):
        measured(once, selective(Clip(max_grad_norm=CLIP), THINNING), model, pair(kind, z), entries)


# That the test sees what it is there to see.


def test_too_little_noise_is_noticed(entries):
    """A scaling rule that lets contributions be 2 % longer than it says fails the comparison."""

    class Longer(Clip):
        def _weights(self, norms: Tensor) -> Tensor:
            return super()._weights(norms) * 1.02

    with pytest.raises(AssertionError):
        measured(release_once, selective(Longer(max_grad_norm=CLIP), None), "deep", pair("random", "large"), entries)


def test_records_that_depend_on_their_neighbours_are_noticed(entries, monkeypatch):
    """Chunks whose shape follows the batch, as they would without being filled up, move saturated records."""
    x, y = saturated_on_the_edge()
    neighbours = Neighbours(x, y, added("zero", x), 1)
    measured(release_once, selective(Clip(max_grad_norm=CLIP), None), "linear", neighbours, entries)
    monkeypatch.setattr("sluice.gradients.engine.padded", lambda tree, count: tree)
    monkeypatch.setattr("sluice.training.batches.Batches.full_pieces", unfilled)
    with pytest.raises(AssertionError):
        measured(release_once, selective(Clip(max_grad_norm=CLIP), None), "linear", neighbours, entries)


def unfilled(batches: Batches, indices: Tensor, size: int) -> Iterator[tuple[Any, int]]:
    for part in indices.split(size):
        yield from ((piece, len(part)) for piece in batches.pieces(part, size))


def saturated_on_the_edge() -> tuple[Tensor, Tensor]:
    """One record, of whose two largest logits another one wins when it is not alone in its batch."""
    model = built("linear")
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for _ in range(20_000):
            x = torch.randn(1, FEATURES, generator=generator) * 1e10
            # Move the record so that two logits nearly agree.
            weight = model[0].weight
            normal = weight[0] - weight[1]
            x -= ((x @ normal + model[0].bias[0] - model[0].bias[1]) / normal.square().sum())[:, None] * normal
            alone, beside = model(x)[0], model(x.repeat(2, 1))[0]
            if F.softmax(alone, 0)[0] == 1 and F.softmax(beside, 0)[0] < 0.6:
                return x, torch.zeros(1, dtype=torch.int64)
    pytest.skip("the kernels of this machine round all batches alike")


@pytest.mark.parametrize("model", ["deep", "repeated", "bags"])
@pytest.mark.parametrize("kind", ["random", "equal", "broken"])
def test_several_chunks_that_are_summed_in_parts(model, kind, entries):
    mechanism = replace(selective(Clip(max_grad_norm=CLIP), None), expected_batch_size=2500.0)
    for z in ("large", "equal to another", "nan"):
        measured(release_once, mechanism, model, pair(kind, z, 2500), entries)


@pytest.mark.slow
@pytest.mark.parametrize("once", [release_once, loop_once])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_ten_thousand_records(once, gated, kind, entries):
    for z in ADDED:
        neighbours = pair(kind, z, 10_000)
        gate = gate_for("deep", neighbours) if gated else None
        mechanism = replace(selective(Clip(max_grad_norm=CLIP), gate), expected_batch_size=10_000.0)
        measured(once, mechanism, "deep", neighbours, entries)
