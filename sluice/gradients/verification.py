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


def verify(model: nn.Module, watch: Watch, names: Mapping[Tensor, str], x: Any, *, kept_bytes: int) -> None:
    """Raise if the norms or the sum for two samples differ from one ordinary backward pass for each of them.

    What this finds is not rounding but parameters that are used without calling their module, and samples that are
    not where they seem to be. It runs in evaluation mode (dropout would differ between the two ways), and leaves
    random numbers, buffers and modes as they were.
    """
    pair = first_rows(x, 2)
    device = next(iter(names)).device
    with undisturbed(model), torch.enable_grad():
        model.eval()
        with watch.record(batch_size=2, parameters=frozenset(names)) as recording:
            outputs = list(tensors_in(apply(model, pair)))
        low = any(t.dtype in (torch.bfloat16, torch.float16) for t in outputs)
        recording.backward(probing_loss(outputs))
        chunk = Chunk(
            recording, samples=slice(0, 2), names=names, kept_bytes=kept_bytes, keep=False, device=device, warn=False
        )
        expected = [_one(model, names, take(pair, slice(i, i + 1))) for i in (0, 1)]
        sums = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p, name in names.items()}
        found = chunk.norms.double()
        chunk.add_weighted_sum(torch.ones(2, device=device), into=sums)
    _compare(expected, found, sums, tolerance=0.2 if low else 0.01)


def _one(model: nn.Module, names: Mapping[Tensor, str], x: Any) -> dict[str, Tensor]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        value = probing_loss(list(tensors_in(apply(model, x))))
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    parameters = list(names)
    gradients = (
        torch.autograd.grad(value, parameters, allow_unused=True) if value.requires_grad else [None] * len(names)
    )
    return {
        names[p]: torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().double()
        for p, g in zip(parameters, gradients, strict=True)
    }


def _compare(expected: list[dict[str, Tensor]], found: Tensor, sums: dict[str, Tensor], *, tolerance: float) -> None:
    norms = torch.stack([torch.stack([g.norm() for g in one.values()]).norm() for one in expected])
    if not bool(torch.isfinite(norms).all()):
        return
    scale = float(norms.max())
    for name, value in sums.items():
        wanted = expected[0][name] + expected[1][name]
        if float((value - wanted).norm()) > tolerance * scale + 1e-30:
            raise UnsupportedModuleError(
                f"The gradient of parameter '{name}' cannot be recorded: it is used without calling the module it "
                f"belongs to, or that module's forward is not what its class says. Call the module instead of using "
                f"its parameter, or set GradientOptions(strategy={{'{name.rpartition('.')[0].rpartition('.')[0]}': "
                "'vmap'}) for the module that uses it."
            )
    if bool(((found - norms).abs() > tolerance * scale + 1e-30).any()):
        raise UnsupportedModuleError(
            "Per-sample gradient norms differ from those of a batch of one: some module mixes samples, or takes "
            "another axis for the samples. Run sluice.gradients.check_independence(module, example) to find it."
        )
