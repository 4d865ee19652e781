"""Which functions trainable parameters go through in a forward pass, outside the layers that have a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.functional.arguments import tensors_among

#: A call of a module that has a rule: its name, and how often it was called before.
UnitCall = tuple[str, int]
Function = Callable[..., Any]


class NotFollowedError(UnsupportedModuleError):
    """A parameter that is used outside a layer with a rule goes where it cannot be followed.

    Attributes:
        parameters: the names of the parameters.
    """

    def __init__(self, parameters: Collection[str], reason: str) -> None:
        self.parameters = frozenset(parameters)
        named = ", ".join(f"'{name}'" for name in sorted(parameters))
        super().__init__(f"The gradient of {named} cannot be recorded: {reason}")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor has the samples: on this axis, each with ``fold`` entries in a row."""

    axis: int
    fold: int


def place(two: torch.Size, three: torch.Size) -> Place | None:
    """The axis that holds the samples, from the shapes for two samples and for three."""
    if len(two) != len(three):
        return None
    changed = [i for i, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if len(changed) != 1:
        return None
    axis = changed[0]
    fold = three[axis] - two[axis]
    return Place(axis=axis, fold=fold) if fold > 0 and two[axis] == 2 * fold else None


@dataclass(frozen=True, kw_only=True)
class Event:
    """A function that is given a parameter, or something computed from parameters alone.

    Attributes:
        kind: "inner" if the result depends on parameters alone, "meeting" if it has the samples in it, "ignored" if no
            gradient goes through.
        inputs: for each tensor among the arguments, where it has the samples.
        outputs: for each tensor of the result, where it has the samples.
        names: the parameters that it is given, or from which what it is given was computed.
    """

    function: Function
    kind: str
    names: frozenset[str]
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | None, ...]


def is_attribute(function: Function) -> bool:
    """Whether this reads an attribute of a tensor (its shape, say)."""
    return getattr(function, "__name__", "") == "__get__"


@dataclass(frozen=True, kw_only=True)
class _Step:
    function: Function
    unit: UnitCall | None
    sources: tuple[int | str | None, ...]
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]
    differentiable: bool


class Tracer(TorchFunctionMode):
    """Notes every function that anything computed from trainable parameters goes through.

    Args:
        names: trainable parameters to their names.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        super().__init__()
        self.steps: list[_Step] = []
        #: The call of a module with a rule that is under way.
        self.unit: UnitCall | None = None
        # Tensors are kept, so that no other one gets the same identity.
        self._sources: dict[int, tuple[Tensor, int | str]] = {id(p): (p, name) for p, name in names.items()}

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = tensors_among(args, kwargs)
        sources = tuple(self._sources[id(t)][1] if id(t) in self._sources else None for t in given)
        shapes = tuple(t.shape for t in given)
        output = func(*args, **kwargs)
        if all(source is None for source in sources) or not torch.is_grad_enabled():
            return output
        if is_attribute(func) and not isinstance(output, Tensor):
            return output
        results = changed(func, args, output)
        for result in results:
            if result.requires_grad:
                self._sources[id(result)] = result, len(self.steps)
        step = _Step(
            function=func,
            unit=self.unit,
            sources=sources,
            inputs=shapes,
            outputs=tuple(result.shape for result in results),
            differentiable=any(result.requires_grad for result in results),
        )
        self.steps.append(step)
        return output


def changed(function: Function, args: tuple[Any, ...], output: Any) -> list[Tensor]:
    """The tensors that a function made, or wrote into where it returns nothing."""
    if getattr(function, "__name__", "") == "__setitem__":
        return [args[0]]
    return tensors_among((output,), {})


def events(two: Tracer, three: Tracer, *, followed: Collection[UnitCall]) -> tuple[Event, ...]:
    """What a recorded forward pass has to follow, from traces for two samples and for three.

    Args:
        followed: calls of modules with a rule that cannot record them; their parameters are followed.
    """
    found: list[Event] = []
    first, second = _Walk(two.steps, followed), _Walk(three.steps, followed)
    for a in first:
        b = next(second, None)
        if b is None or a.function != b.function or len(a.outputs) != len(b.outputs) or len(a.inputs) != len(b.inputs):
            raise NotFollowedError(first.names, _CHANGES)
        same = a.outputs == b.outputs
        kind = "ignored" if not a.differentiable else "inner" if same else "meeting"
        if kind == "inner":
            first.follow()
            second.follow()
        inputs = tuple(place(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
        outputs = tuple(place(x, y) for x, y in zip(a.outputs, b.outputs, strict=True))
        found.append(Event(function=a.function, kind=kind, names=first.names, inputs=inputs, outputs=outputs))
    if next(second, None) is not None:
        raise NotFollowedError(second.names, _CHANGES)
    return tuple(found)


_CHANGES = "the functions that it goes through change with the number of samples."


class _Walk(Iterator[_Step]):
    """The steps that take something computed from parameters alone; `follow` says that the last one's result is such.

    Attributes:
        names: the parameters from which the last step's arguments were computed.
    """

    def __init__(self, steps: list[_Step], followed: Collection[UnitCall]) -> None:
        self._steps = iter(enumerate(steps))
        self._calls = followed
        self.names: frozenset[str] = frozenset()
        self._followed: dict[int, frozenset[str]] = {}
        self._last = -1

    def __next__(self) -> _Step:
        for index, step in self._steps:
            if step.unit is not None and step.unit not in self._calls:
                continue
            names = frozenset[str]().union(*(self._names(source) for source in step.sources))
            if names:
                self._last, self.names = index, names
                return step
        raise StopIteration

    def follow(self) -> None:
        self._followed[self._last] = self.names

    def _names(self, source: int | str | None) -> frozenset[str]:
        """The parameters that a tensor was computed from, if from nothing else."""
        if source is None:
            return frozenset()
        return frozenset((source,)) if isinstance(source, str) else self._followed.get(source, frozenset())
