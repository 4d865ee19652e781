"""A check, on two samples, that recorded gradients are those of autograd."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sluice.errors import UnsupportedModuleError
from sluice.gradients.capture import Watch
from sluice.gradients.chunk import Chunk
from sluice.gradients.probe import probing_loss, undisturbed
from sluice.gradients.trees import apply, first_rows, take, tensors_in

_Gradients = dict[str, Tensor]


def verify(model: nn.Module, watch: Watch, names: Mapping[Tensor, str], x: Any, *, kept_bytes: int) -> None:
    """Raise if the sum for two samples, or the norm for each of them, is not what ordinary backward passes give.

    What this finds is not rounding but parameters that are used without calling their module, and samples that are
    mixed or not where they seem to be. It runs in evaluation mode, since dropout differs between a batch of two and two
    of one, and leaves random numbers, buffers and modes as they were. Models that are random even so are not compared
    where random numbers would have to agree.
    """
    pair = first_rows(x, 2)
    device = next(iter(names)).device
    with undisturbed(model), torch.enable_grad():
        model.eval()
        random = _is_random(model, pair)
        torch.manual_seed(0)
        with watch.record(batch_size=2, parameters=frozenset(names)) as recording:
            outputs = list(tensors_in(apply(model, pair)))
        recording.backward(probing_loss(outputs))
        chunk = Chunk(
            recording, samples=slice(0, 2), names=names, kept_bytes=kept_bytes, keep=False, device=device, warn=False
        )
        norms = chunk.norms.double()
        sums = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p, name in names.items()}
        chunk.add_weighted_sum(torch.ones(2, device=device), into=sums)
        tolerance = 0.2 if any(t.dtype in (torch.bfloat16, torch.float16) for t in outputs) else 0.01
        if not (random and watch.has_opaque):
            _compare_sums(_autograd(model, names, pair), sums, tolerance)
        if not random:
            _compare_norms([_autograd(model, names, take(pair, slice(i, i + 1))) for i in (0, 1)], norms, tolerance)


def _is_random(model: nn.Module, pair: Any) -> bool:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            results.append(list(tensors_in(apply(model, pair))))
    return any(not torch.allclose(a, b, equal_nan=True) for a, b in zip(*results, strict=True))


def _autograd(model: nn.Module, names: Mapping[Tensor, str], x: Any) -> _Gradients:
    torch.manual_seed(0)
    value = probing_loss(list(tensors_in(apply(model, x))))
    parameters = list(names)
    if not value.requires_grad:
        return {name: torch.zeros_like(p, dtype=torch.float64) for p, name in names.items()}
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    return {
        names[p]: torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().double()
        for p, g in zip(parameters, gradients, strict=True)
    }


def _norm(gradients: _Gradients) -> Tensor:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm()


def _compare_sums(expected: _Gradients, found: _Gradients, tolerance: float) -> None:
    scale = float(_norm(expected))
    for name, value in found.items():
        if float((value - expected[name]).norm()) > tolerance * scale + 1e-30:
            owner = name.rpartition(".")[0].rpartition(".")[0]
            raise UnsupportedModuleError(
                f"The gradient of parameter '{name}' cannot be recorded: it is used without calling the module it "
                "belongs to, or that module's forward is not what its class says. Call the module instead of using its "
                f"parameter, or set GradientOptions(strategy={{{owner!r}: 'vmap'}}) for the module that uses it."
            )


def _compare_norms(expected: list[_Gradients], found: Tensor, tolerance: float) -> None:
    norms = torch.stack([_norm(one) for one in expected])
    if bool(((found - norms).abs() > tolerance * norms.max() + 1e-30).any()):
        raise UnsupportedModuleError(
            "Per-sample gradient norms differ from those of a batch of one: some module mixes samples, or takes "
            "another axis for the samples. Run sluice.gradients.check_independence(module, example) to find it."
        )
