"""One training step by each method: ordinary training, this package, and every mode of Opacus."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from sluice.experiments.bench.scenarios import Scenario
from sluice.gradients.engine import PerSampleGradients
from sluice.mechanism.scaling import Clip

Step = Callable[[], None]
_LEARNING_RATE = 0.01
#: Opacus keeps every per-sample gradient of a physical batch; larger batches are cut so that these fit into this.
_OPACUS_BYTES = 2 * 2**30

FLOORS = ("plain", "channels last", "microbatches")
OURS = ("sluice", "sluice, norms only")
OPACUS_MODES = ("hooks", "functorch", "ew", "ghost")
METHODS = (*FLOORS, *OURS, *(f"opacus {mode}" for mode in OPACUS_MODES))


class Skipped(Exception):
    """A method cannot run a model; the message says why."""


def make_step(method: str, scenario: Scenario, model: nn.Module, size: int) -> Step:
    """A function that does one step of the method on one fixed batch, with a copy of the model."""
    x, y = scenario.batch(size)
    model = copy.deepcopy(model).train()
    if method in FLOORS:
        return _ordinary(method, scenario, model, x, y)
    if method in OURS:
        return _ours(model, x, y, norms_only=method == OURS[1])
    return _opacus(method.removeprefix("opacus "), model, x, y)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        for i in range(0, len(y), part):
            inputs = x[i : i + part]
            inputs = inputs.to(memory_format=torch.channels_last) if last else inputs
            (functional.cross_entropy(model(inputs), y[i : i + part], reduction="sum") / len(y)).backward()
        optimizer.step()

    return step


def _ours(model: nn.Module, x: Tensor, y: Tensor, *, norms_only: bool) -> Step:
    engine, rule = PerSampleGradients(model), Clip(max_grad_norm=1.0)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, reduction="none")

    def measure() -> None:
        engine.norms(x, y, loss)

    def step() -> None:
        _, sums = engine.weighted_sum(x, y, loss, rule)
        for name, total in sums.items():
            parameters[name].grad = total.add_(torch.randn_like(total)).div_(len(y))
        optimizer.step()

    return measure if norms_only else step


def _opacus(mode: str, model: nn.Module, x: Tensor, y: Tensor) -> Step:
    try:
        from opacus.grad_sample.utils import wrap_model
        from opacus.optimizers import get_optimizer_class
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
        from opacus.validators import ModuleValidator
    except ImportError as error:
        raise Skipped("Opacus is not installed: pip install 'sluice[bench]'") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = ModuleValidator.fix(model)
        wrapped = wrap_model(model, grad_sample_mode=mode, batch_first=True, loss_reduction="mean")
    bytes_each = 4 * sum(p.numel() for p in model.parameters())
    part = len(y) if mode == "ghost" else max(1, min(len(y), _OPACUS_BYTES // bytes_each))
    kind = get_optimizer_class(clipping="flat", distributed=False, grad_sample_mode=mode)
    optimizer = kind(
        torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=len(y),
    )
    criterion: Callable[..., Tensor] = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for i in range(0, len(y), part):
                optimizer.signal_skip_step(do_skip=i + part < len(y))
                criterion(wrapped(x[i : i + part]), y[i : i + part]).backward()
                optimizer.step()
                optimizer.zero_grad()

    return step
