"""Recording one forward pass: which modules are watched, and what is kept of them.

Nothing is ever stored on the user's modules outside a forward pass: watching is done by process-wide module hooks
that look the module up, so state dicts, copies and pickles stay what they were. During a forward pass parameters do
not require grad (autograd then computes no weight gradients) and some forwards are replaced; both are put back when
it ends, also by an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients.contributions import Contribution, Tap
from sluice.gradients.eager import as_written, forget_removed_hooks
from sluice.gradients.functional.follower import Follower
from sluice.gradients.functional.trace import UnitCall
from sluice.gradients.options import GradientOptions
from sluice.gradients.plan import Unit
from sluice.gradients.probe import Axes, Layout
from sluice.gradients.rules import Call
from sluice.gradients.trees import leaves_in
from sluice.gradients.vmap import VmapRule
from sluice.gradients.workspace import Workspace


class _Begin(torch.autograd.Function):
    """Starts a graph at a tensor that has none, without making it a leaf (leaves cannot be changed in place)."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, box: list[Tensor]) -> Tensor:
        return box[0].data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        return None, None


_begin: Callable[[Tensor, list[Tensor]], Tensor] = _Begin.apply


@dataclass(eq=False)
class Recording:
    """What one forward pass left: taps, what was saved for them, and what they contribute to which parameter.

    Attributes:
        checks: raise if the forward pass was not what it was expected to be.
        by_hooks: derivatives arrive by an ordinary ``loss.backward()`` instead of `backward`.
        scale: what these have to be multiplied with: the batch size, where the loss is a mean over the batch.
    """

    batch_size: int
    parameters: frozenset[Tensor]
    by_hooks: bool = False
    scale: float = 1.0
    contributions: list[Contribution] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    _taps: list[Tap] = field(default_factory=list)
    _edges: list[GradientEdge] = field(default_factory=list)
    _saved: list[tuple[Tensor, int, str]] = field(default_factory=list)
    _calls: dict[str, int] = field(default_factory=dict)

    def tap(self, z: Tensor) -> tuple[Tensor, Tap]:
        if not z.requires_grad:
            anchor = torch.zeros((), dtype=z.dtype, device=z.device, requires_grad=True)
            z = _begin(anchor, [z])
        elif z._is_view():
            # The history of a view is rewritten when it is changed in place, which would lose the tap.
            z = torch.ops.aten._unsafe_view(z, z.shape)
        tap = Tap(z.shape, z.dtype, z.device)
        self._taps.append(tap)
        if self.by_hooks:
            z.register_hook(partial(_bind_once, tap, self.scale))
        else:
            self._edges.append(get_gradient_edge(z))
        return z, tap

    def tap_leaf(self, leaf: Tensor) -> Tap:
        """A tap at a tensor that the rule made itself, which requires grad and has no history."""
        tap = Tap(leaf.shape, leaf.dtype, leaf.device)
        self._taps.append(tap)
        if self.by_hooks:
            leaf.register_hook(partial(_bind_once, tap, self.scale))
        else:
            self._edges.append(get_gradient_edge(leaf))
        return tap

    def save(self, tensor: Tensor, *, owner: str) -> Tensor:
        kept = tensor.detach()
        self._saved.append((kept, kept._version, owner))
        return kept

    def trainable(self, parameter: Tensor) -> bool:
        return parameter in self.parameters

    def contribute(self, contribution: Contribution) -> None:
        self.contributions.append(contribution)

    def call_of(self, name: str) -> UnitCall:
        """The next call of a unit, or the one under way."""
        return name, self._calls.get(name, 0)

    def count_call(self, name: str) -> None:
        self._calls[name] = self._calls.get(name, 0) + 1

    @property
    def reached(self) -> bool:
        """Whether a backward pass has come to any tap."""
        return any(tap.bound for tap in self._taps)

    def backward(self, total: Tensor) -> None:
        """Find the derivative of ``total`` at every tap, in one backward pass that computes no weight gradient."""
        if self._edges and total.requires_grad:
            gradients = torch.autograd.grad(total, self._edges, allow_unused=True)
            for tap, gradient in zip(self._taps, gradients, strict=True):
                tap.bind(gradient)
        self._edges.clear()

    def release(self) -> list[Contribution]:
        """The contributions, after a check that what they need is still what was saved. Empties the recording.

        Contributions may refer to the recording; keeping them here as well would tie both into a cycle, and a chunk's
        memory would wait for the garbage collector.
        """
        for check in self.checks:
            check()
        self.checks.clear()
        for tensor, version, owner in self._saved:
            if tensor._version != version:
                raise UnsupportedModuleError(
                    f"The input of module '{owner}' was changed in place after the module had used it, so its gradient "
                    "is lost. Use the out-of-place operation there (x = x + y, nn.ReLU(inplace=False))."
                )
        contributions, self.contributions = self.contributions, []
        self._saved.clear()
        return contributions


def _bind_once(tap: Tap, scale: float, gradient: Tensor) -> None:
    if tap.bound:
        raise InputError(
            "backward() ran twice through one forward pass. Per-sample gradients are read from the first; call the "
            "model again before the next backward()."
        )
    tap.bind(gradient if scale == 1.0 else gradient * scale)


@contextmanager
def _about(unit: Unit) -> Iterator[None]:
    """An error that a rule raises is about its unit, unless it says that it is about another one."""
    try:
        yield
    except UnsupportedModuleError as error:
        error.module = error.module if error.module is not None else unit.name
        raise


class Watch:
    """Watches the forward passes of one model.

    Args:
        units: the modules that have parameters to be recorded.
        names: trainable parameters to their names.
        parts: what a sharded model has of them outside a forward pass; whether it requires grad goes over to the whole.

    Attributes:
        layout: what `sluice.gradients.probe.layout` found for the forward passes that come next.
    """

    def __init__(
        self,
        units: Mapping[nn.Module, Unit],
        *,
        names: Mapping[Tensor, str],
        options: GradientOptions,
        parts: Sequence[Tensor] = (),
    ) -> None:
        self.layout = Layout(axes={}, outputs=(), bytes_per_sample=0)
        self._units = units
        self._names = names
        self._parts = parts
        self._options = options
        self._workspace = Workspace()
        self._recording: Recording | None = None
        self._follower: Follower | None = None
        self._idle: list[RemovableHandle] = []
        #: What modules have as a forward of their own, beside that of their class: compiled ones, and those that a library changed.
        self._forwards: dict[nn.Module, Any] = {}

    @property
    def has_vmap(self) -> bool:
        """Whether some unit draws its random numbers in another order than its own forward would."""
        return any(isinstance(unit.rule, VmapRule) for unit in self._units.values())

    @contextmanager
    def record(self, *, batch_size: int, parameters: frozenset[Tensor], by_hooks: bool = False) -> Iterator[Recording]:
        """Record the forward pass that happens inside the block."""
        recording = Recording(batch_size=batch_size, parameters=parameters, by_hooks=by_hooks)
        end = self.begin(recording)
        try:
            yield recording
        finally:
            end()

    def begin(self, recording: Recording) -> Callable[..., None]:
        """Start recording; the returned function ends it and puts everything back.

        With ``hooks_stay=True`` it leaves hooks, which do nothing any more, to be removed before the next recording: torch
        iterates over them when a forward pass has raised.
        """
        if self._recording is not None:
            raise InputError("The model was called inside its own forward pass while gradients are being recorded.")
        surroundings = ExitStack()
        surroundings.enter_context(as_written())
        while self._idle:
            self._idle.pop().remove()
        forget_removed_hooks()
        self._recording = recording
        handles = [register_module_forward_hook(self._after_forward, with_kwargs=True)]
        replaced = [unit for unit in self._units.values() if unit.rule.replaces_forward]
        self._forwards = {unit.module: unit.module.__dict__.get("forward") for unit in replaced}
        for unit in replaced:
            unit.module.__dict__["forward"] = partial(self._replacement, unit)
        frozen = (*recording.parameters, *self._parts)
        for parameter in frozen:
            parameter.requires_grad_(False)
        if self.layout.events:
            handles.append(register_module_forward_pre_hook(self._before_forward))
            self._follower = surroundings.enter_context(self._following(recording))

        def end(*, hooks_stay: bool = False) -> None:
            surroundings.close()
            for parameter in frozen:
                parameter.requires_grad_(True)
            for unit in replaced:
                self._put_back_forward(unit.module)
            self._idle.extend(handles)
            while self._idle and not hooks_stay:
                self._idle.pop().remove()
            self._recording = self._follower = None

        return end

    def _following(self, recording: Recording) -> Follower:
        follower = Follower(
            recording,
            names=self._names,
            events=self.layout.events,
            options=self._options,
            workspace=self._workspace,
        )
        recording.checks.append(follower.check_complete)
        return follower

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        unit = self._units.get(module)
        if unit is not None and self._follower is not None and torch.is_grad_enabled() and not self._is_followed(unit):
            self._follower.paused += 1

    def _is_followed(self, unit: Unit) -> bool:
        """Whether the parameters of a unit are followed through its next, or present, call instead of recorded."""
        return self._recording is not None and self._recording.call_of(unit.name) in self.layout.followed

    def _after_forward(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> Any | None:
        unit = self._units.get(module)
        if unit is None or self._recording is None or not torch.is_grad_enabled():
            return None
        if self._is_followed(unit):
            self._advance(unit)
            return None
        if not unit.rule.replaces_forward:
            with _about(unit):
                output = unit.rule.record(module, self._call(unit, inputs, keywords, output))
        self._advance(unit)
        if self._follower is not None:
            self._follower.paused -= 1
        return output

    def record_under_way(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> Any:
        """The output of a call that had begun when recording did, so that neither hooks nor a replaced forward saw it."""
        unit = self._units.get(module)
        if unit is None:
            return output
        if unit.rule.replaces_forward:
            return self._replacement(unit, *inputs, **keywords)
        recorded = self._after_forward(module, inputs, keywords, output)
        return output if recorded is None else recorded

    def _advance(self, unit: Unit) -> None:
        if self._recording is not None:
            self._recording.count_call(unit.name)

    def _replacement(self, unit: Unit, *inputs: Any, **keywords: Any) -> Any:
        replacement = unit.module.__dict__["forward"]
        self._put_back_forward(unit.module)
        try:
            if not torch.is_grad_enabled() or self._is_followed(unit):
                return unit.module.forward(*inputs, **keywords)
            with _about(unit):
                return unit.rule.record(unit.module, self._call(unit, inputs, keywords, None))
        finally:
            unit.module.__dict__["forward"] = replacement

    def _put_back_forward(self, module: nn.Module) -> None:
        module.__dict__.pop("forward", None)
        if self._forwards[module] is not None:
            module.__dict__["forward"] = self._forwards[module]

    def _call(self, unit: Unit, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Call:
        recording = self._recording
        if recording is None:
            raise InputError(f"Module '{unit.name}' ran after its forward pass had been recorded.")
        key = recording.call_of(unit.name)
        tensors = leaves_in(inputs, keywords)
        axes = self.layout.axes.get(key) or self.layout.axes.get((unit.name, 0), ())
        if not unit.rule.owns_batch_axis:
            self._check(unit, tensors, axes, recording.batch_size)
        return Call(
            name=unit.name,
            inputs=inputs,
            keywords=keywords,
            output=output,
            batch_size=recording.batch_size,
            batch_axes=axes,
            options=self._options,
            recording=recording,
            number=key[1],
            workspace=self._workspace,
        )

    def _check(self, unit: Unit, tensors: list[Tensor], axes: Axes, size: int) -> None:
        wrong = [t for t, axis in zip(tensors, axes, strict=False) if axis is not None and t.shape[axis] != size]
        if len(tensors) != len(axes) or wrong or all(axis is None for axis in axes):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise UnsupportedModuleError(
                f"Module '{unit.name}' got inputs of shape {shapes} in a batch of {size} samples, and no axis of them "
                "holds just the samples. Keep samples on an axis of their own (nn.Linear takes any number of other "
                "axes), so that each sample's gradient can be told apart."
            )
