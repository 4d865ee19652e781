"""Refusing models in which samples reach each other in training mode, within a batch or from one batch to the next.

Dropout does not stand in the way: with the same seed and the same shapes its masks are the same, so that a sample's output
and gradient must not change, whatever the other samples are.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.digest import digest_of
from sluice.gradients.independence import TOLERANCE, close, first_difference, mixing_message
from sluice.gradients.probe import Axes, seed, undisturbed
from sluice.gradients.synthetic import Samples
from sluice.gradients.trees import apply
from sluice.gradients.verification import Subject, norm

_COUNT = 3


def refuse_changing_state(model: nn.Module, samples: Samples) -> None:
    """Raise if a forward pass writes to a parameter, or leaves something of the batch, or of the number of passes, in a buffer.

    A buffer that holds the same after any first pass, and keeps it, is a cache of something that no sample decides.
    """
    one, other = samples.few(_COUNT), samples.others(_COUNT)
    # The objects themselves: sharded models put others in their place while they run.
    parameters = [(name, parameter, digest_of(parameter)) for name, parameter in model.named_parameters()]
    states = [_buffers_after(model, passes) for passes in ((one,), (other,), (one, other))]
    for name, parameter, before in parameters:
        if digest_of(parameter) != before:
            raise UnsupportedModuleError(
                f"Parameter '{name}' is changed by the forward pass in training mode. It would carry data that no noise "
                "protects into later releases, rejected batches included, and into the published model. Keep such state out of the "
                "model (of an embedding: max_norm=None), or freeze it with .eval(), after model.train(), if it is public."
            )
    names = sorted(set().union(*states))
    for name in names:
        values = [state.get(name) for state in states]
        if not all(_equal(values[0], value) for value in values):
            raise UnsupportedModuleError(
                f"Buffer '{name}' changes with every forward pass in training mode. It would carry data that no noise "
                "protects into later releases, rejected batches included, and into the published model. Replace the "
                "module by one that keeps no statistics (nn.GroupNorm, nn.LayerNorm; "
                "torch.nn.utils.parametrizations.spectral_norm for the older torch.nn.utils.spectral_norm), or freeze it with "
                ".eval(), after model.train(), if its state is public."
            )


def _buffers_after(model: nn.Module, passes: tuple[Any, ...]) -> dict[str, Tensor]:
    with undisturbed(model), torch.no_grad():
        for x in passes:
            seed(0)
            apply(model, x)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def refuse_interference(subject: Subject, samples: Samples, outputs: Axes) -> None:
    """Raise if a sample's output or gradient changes when the others do, or when other batches went before.

    Args:
        outputs: the axis of each tensor of the output that holds the samples.
    """
    with undisturbed(subject.model), torch.enable_grad():
        x = samples.few(_COUNT)
        expected, chunk = subject.recorded(x, _COUNT)
        for i in range(_COUNT):
            weights = torch.eye(_COUNT)[i]
            found, other_chunk = subject.recorded(samples.others(_COUNT, but=i), _COUNT)
            gradients = subject.weighted_sum(chunk, weights), subject.weighted_sum(other_chunk, weights)
            if not (_same_outputs(expected, found, outputs, i) and _same_gradients(*gradients)):
                _refuse_state(subject, samples)
                _refuse_mixing(subject.model, samples, outputs, parameter=_most_different(*gradients))
        _refuse_state(subject, samples)


def _same_outputs(expected: list[Tensor], found: list[Tensor], axes: Axes, row: int) -> bool:
    if len(expected) != len(found):
        return False
    pairs = zip(expected, found, axes, strict=True) if len(axes) == len(expected) else ()
    return all(
        a.shape == b.shape and close(a.select(axis, row), b.select(axis, row))
        for a, b, axis in pairs
        if axis is not None
    )


def _same_gradients(expected: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    error = norm({name: value - expected[name] for name, value in found.items()})
    return bool(error <= TOLERANCE * norm(expected) + 1e-30)


def _most_different(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    return max(expected, key=lambda name: float((expected[name] - found[name]).norm()))


def _refuse_state(subject: Subject, samples: Samples) -> None:
    """Raise if the same batch, with the same random numbers, gives another output after another batch."""
    model = subject.model
    results = []
    for _ in range(2):
        results.append(subject.recorded(samples.few(_COUNT), _COUNT)[0])
        seed(0)
        with torch.no_grad():
            apply(model, samples.others(_COUNT))
    if not all(a.shape == b.shape and close(a, b) for a, b in zip(*results, strict=True)):
        raise UnsupportedModuleError(
            "The model gives another output for the same batch after it has seen another one: it remembers something in "
            "an attribute, or draws from a random generator of its own. What it remembers would carry data, or the number "
            "of rejected batches, past the noise. Compute the output from the batch and the parameters alone, with "
            "torch's, numpy's or Python's global generators."
        )


def _refuse_mixing(model: nn.Module, samples: Samples, outputs: Axes, *, parameter: str) -> NoReturn:
    for row in range(_COUNT):
        name = first_difference(model, samples.few(_COUNT), samples.others(_COUNT, but=row), size=_COUNT, row=row)
        if name is not None:
            raise UnsupportedModuleError(mixing_message(model, name))
    if None in outputs:
        raise UnsupportedModuleError(
            "The model returns a tensor that is about the batch as a whole, such as the loss that Hugging Face's models compute "
            "from labels, and a sample's gradient changes through it when the others do. Call the model without labels, and "
            "compute a loss of each sample from its output."
        )
    error = UnsupportedModuleError(
        "A sample's gradient changes when the other samples of its batch do, although no module's output shows it: some "
        "operation mixes samples in its backward pass. Replace it by one that treats samples one by one."
    )
    error.module = parameter.rpartition(".")[0]
    raise error
