"""One training step by each method: ordinary training, this package, per-sample gradients by vmap, and other libraries."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import TensorDataset

from sluice.experiments.bench.peers import FASTDP_MODES, OPACUS_MODES, Skipped, fastdp, opacus
from sluice.experiments.bench.scenarios import Scenario, losses, mean_loss, sgd
from sluice.gradients import PerSampleGradients
from sluice.mechanism.scaling import Clip
from sluice.mechanism.selective_release import SelectiveRelease
from sluice.training.engine import PrivacyEngine

Step = Callable[[], None]
#: Batches are drawn from a data set this many times as large.
_RECORDS_PER_BATCH = 8

FLOORS = ("plain", "channels last", "microbatches")
OURS = ("sluice", "sluice, gradients only", "sluice, norms only")
PEERS = (
    "vmap",
    *(f"opacus {mode}" for mode in OPACUS_MODES),
    *(f"fastdp {mode}" for mode in FASTDP_MODES),
)
METHODS = (*FLOORS, *OURS, *PEERS)


def make_step(method: str, scenario: Scenario, model: nn.Module, size: int) -> Step:
    """A function that does one step of the method on batches of one size, with a copy of the model.

    "sluice" is a whole release as users make it, so its batches are Poisson samples, of this size on average.
    """
    model = copy.deepcopy(model).train()
    if method == OURS[0]:
        return release_step(scenario, model, size)
    x, y = scenario.batch(size)
    if method in FLOORS:
        return _ordinary(method, scenario, model, x, y)
    if method in OURS:
        return _gradients(model, x, y, norms_only=method == OURS[2])
    if method == "vmap":
        return _vmap(model, x, y)
    library, mode = method.split()
    return {"opacus": opacus, "fastdp": fastdp}[library](mode, model, x, y)


def _ordinary(method: str, scenario: Scenario, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    last = method != "plain"
    if last and not scenario.has_images:
        if method == "channels last":
            raise Skipped("the input has no channels")
        last = False
    if last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    part = 256 if "microbatches" in method else len(y)
    if part >= len(y) and "microbatches" in method:
        part = max(1, len(y) // 4)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        for i in range(0, len(y), part):
            inputs = x[i : i + part]
            inputs = inputs.to(memory_format=torch.channels_last) if last else inputs
            (mean_loss(model(inputs), y[i : i + part]) * (len(inputs) / len(y))).backward()
        optimizer.step()

    return step


def release_step(scenario: Scenario, model: nn.Module, size: int) -> Step:
    """Everything that happens in a release with the default settings: sampling, reading, gradients, secure noise, update."""
    records = _RECORDS_PER_BATCH * size
    engine = PrivacyEngine()
    engine.make_private_by(
        SelectiveRelease(
            sample_rate=size / records,
            expected_batch_size=size,
            scaling=Clip(max_grad_norm=1.0),
            noise_multiplier=1.0,
            releases=10**6,
        ),
        module=model,
        optimizer=sgd(model),
        data_loader=TensorDataset(*scenario.batch(records)),
    )
    releases = engine.releases(mean_loss)
    return lambda: [next(releases)].clear()


def _gradients(model: nn.Module, x: Tensor, y: Tensor, *, norms_only: bool) -> Step:
    engine, rule = PerSampleGradients(model), Clip(max_grad_norm=1.0)
    parameters = dict(model.named_parameters())
    optimizer = sgd(model)

    def measure() -> None:
        engine.norms(x, y, losses)

    def step() -> None:
        _, sums = engine.weighted_sum(x, y, losses, rule)
        for name, total in sums.items():
            parameters[name].grad = total.div_(len(y))
        optimizer.step()

    return measure if norms_only else step


def _vmap(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    """What a few lines of torch.func do: per-sample gradients in full, 64 records at a time."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        return mean_loss(functional_call(model, parameters, (one_x.unsqueeze(0),)), one_y.unsqueeze(0))

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
    rule, optimizer = Clip(max_grad_norm=1.0), sgd(model)

    def step() -> None:
        values = {name: p.detach() for name, p in trained.items()}
        totals = {name: torch.randn_like(p) for name, p in values.items()}
        for i in range(0, len(y), 64):
            gradients = per_sample(values, x[i : i + 64], y[i : i + 64])
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            for name, g in gradients.items():
                totals[name] += torch.tensordot(rule(norms), g, dims=1)
        for name, p in trained.items():
            p.grad = totals[name].div_(len(y))
        optimizer.step()

    return step
