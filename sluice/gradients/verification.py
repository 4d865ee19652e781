"""A check, on two samples, that recorded gradients are those of autograd."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.capture import Watch
from sluice.gradients.chunk import Chunk
from sluice.gradients.functional.trace import NotFollowedError
from sluice.gradients.plan import Unit
from sluice.gradients.probe import Layout, layout, probing_loss, seed, undisturbed
from sluice.gradients.synthetic import Samples
from sluice.gradients.trees import apply, take, tensors_in

_Gradients = dict[str, Tensor]

#: Modules whose training flag switches dropout on and does nothing else.
_ONLY_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.LSTM, nn.GRU, nn.RNN, nn.MultiheadAttention),
)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model that is checked.

    Attributes:
        names: trainable parameters to their names.
    """

    model: nn.Module
    watch: Watch
    units: Mapping[nn.Module, Unit]
    names: Mapping[Tensor, str]
    kept_bytes: int

    def probe(self, samples: Samples) -> Layout:
        """Find out what the model does with samples in its present mode, for the forward passes that come next."""
        self.watch.layout = layout(self.model, self.units, samples, names=self.names)
        return self.watch.layout

    @property
    def device(self) -> torch.device:
        return next(iter(self.names)).device

    def recorded(self, x: Any, size: int) -> tuple[list[Tensor], Chunk]:
        """Outputs of a forward pass with fixed random numbers, and the gradients of `probing_loss`."""
        seed(0)
        with self.watch.record(batch_size=size, parameters=frozenset(self.names)) as recording:
            outputs = list(tensors_in(apply(self.model, x)))
        recording.backward(probing_loss(outputs))
        chunk = Chunk(
            recording,
            samples=slice(0, size),
            names=self.names,
            kept_bytes=self.kept_bytes,
            keep=False,
            device=self.device,
            warn=False,
        )
        return [output.detach() for output in outputs], chunk

    def weighted_sum(self, chunk: Chunk, weights: Tensor) -> _Gradients:
        sums = {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p, name in self.names.items()}
        chunk.add_weighted_sum(weights.to(self.device), into=sums)
        return sums

    def autograd(self, x: Any) -> _Gradients:
        """The gradient of `probing_loss` for a whole batch, by an ordinary backward pass."""
        seed(0)
        value = probing_loss(list(tensors_in(apply(self.model, x))))
        if not value.requires_grad:
            return {name: torch.zeros_like(p, dtype=torch.float64) for p, name in self.names.items()}
        try:
            gradients = torch.autograd.grad(value, list(self.names), allow_unused=True)
        except RuntimeError as error:
            mode = "training" if self.model.training else "evaluation"
            raise UnsupportedModuleError(
                f"The model cannot be checked: an ordinary backward pass on made-up samples, in {mode} mode, raises "
                f"{str(error)[:200]!r}. Something computed from parameters may be kept from one forward pass to the next: "
                "compute it in each."
            ) from error
        return {
            name: torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().double()
            for (p, name), g in zip(self.names.items(), gradients, strict=True)
        }


def verify(subject: Subject, samples: Samples) -> None:
    """Raise if the sum for two samples, or the norm for each of them, is not what ordinary backward passes give.

    What this finds is not rounding but parameters that are used without calling their module, and samples that are
    mixed or not where they seem to be. Dropout differs between a batch of two and two of one, so this runs in evaluation
    mode, and in the present mode with known dropout modules quiet. Models that are random even so are not compared where
    random numbers would have to agree.
    """
    model, pair = subject.model, samples.few(2)
    training = any(module.training for module in model.modules())
    with undisturbed(model), torch.enable_grad():
        model.eval()
        subject.probe(samples)
        _compare(subject, pair)
    if training:
        with undisturbed(model), torch.enable_grad():
            quiet(model)
            subject.probe(samples)
            _compare(subject, pair)


def quiet(model: nn.Module) -> None:
    """Switch dropout off where nothing else hangs on a module's mode."""
    for module in model.modules():
        module.training = module.training and type(module) not in _ONLY_DROPOUT


def _compare(subject: Subject, pair: Any) -> None:
    random = _is_random(subject.model, pair)
    outputs, chunk = subject.recorded(pair, 2)
    tolerance = 0.2 if any(t.dtype in (torch.bfloat16, torch.float16) for t in outputs) else 0.01
    found = subject.weighted_sum(chunk, torch.ones(2))
    if random:
        if not subject.watch.has_vmap:
            _refuse_difference(_different(subject.autograd(pair), found, tolerance))
        return
    singles = [subject.autograd(take(pair, slice(i, i + 1))) for i in (0, 1)]
    different = _different({name: singles[0][name] + singles[1][name] for name in found}, found, tolerance)
    if different is not None and _different(subject.autograd(pair), found, tolerance) is not None:
        _refuse_difference(different)
    norms = torch.stack([norm(one) for one in singles])
    if different is not None or not bool(
        ((chunk.norms.double() - norms).abs() <= tolerance * norms.max() + 1e-30).all()
    ):
        raise UnsupportedModuleError(
            "Per-sample gradients differ from those of a batch of one: some module mixes samples, or takes another axis "
            "for the samples. Run sluice.gradients.check_independence(module, example) to find it."
        )


def _is_random(model: nn.Module, pair: Any) -> bool:
    """Whether the model draws random numbers, seen or not: weights of zero hide them from the output."""
    results = []
    for number in (1, 2):
        seed(number)
        before = torch.get_rng_state()
        with torch.no_grad():
            results.append(list(tensors_in(apply(model, pair))))
        if not torch.equal(torch.get_rng_state(), before):
            return True
    return any(not torch.allclose(a, b, equal_nan=True) for a, b in zip(*results, strict=True))


def norm(gradients: _Gradients) -> Tensor:
    whole: Tensor = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    return whole


def _different(expected: _Gradients, found: _Gradients, tolerance: float) -> str | None:
    """The first parameter whose gradient is not as expected."""
    scale = float(norm(expected))
    wrong = (n for n, value in found.items() if not float((value - expected[n]).norm()) <= tolerance * scale + 1e-30)
    return next(wrong, None)


def _refuse_difference(name: str | None) -> None:
    if name is None:
        return
    owner = name.rpartition(".")[0].rpartition(".")[0]
    raise NotFollowedError(
        {name},
        "it is used without calling the module it belongs to, in a way that cannot be followed, or that module's forward is "
        "not what its class says. Call the module instead of using its parameter, or set "
        f"GradientOptions(strategy={{{owner!r}: 'vmap'}}) for the module that uses it.",
    )
