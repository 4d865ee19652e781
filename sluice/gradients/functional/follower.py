"""Going along with a recorded forward pass where it uses parameters outside the layers that have a rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from sluice.gradients.contributions import ExplicitContribution
from sluice.gradients.functional import layers, products  # noqa: F401  (they register their rules)
from sluice.gradients.functional.arguments import changed_leaves, leaves, tensors_among
from sluice.gradients.functional.meeting import Meeting
from sluice.gradients.functional.pullback import Root, Value
from sluice.gradients.functional.rules import RULES, keeps_norms
from sluice.gradients.functional.trace import (
    Event,
    Function,
    NotFollowedError,
    Place,
    changed,
    is_attribute,
)
from sluice.gradients.options import GradientOptions
from sluice.gradients.workspace import Workspace

if TYPE_CHECKING:
    from sluice.gradients.capture import Recording


class Follower(TorchFunctionMode):
    """Follows the trainable parameters of a model through one forward pass.

    What is computed from parameters alone keeps autograd's graph back to them. Where it meets the samples, a rule for that
    function records per-sample gradients with respect to it.

    Args:
        names: trainable parameters to their names.
        events: what is to be expected, from `sluice.gradients.functional.trace`.
    """

    def __init__(
        self,
        recording: Recording,
        *,
        names: Mapping[Tensor, str],
        events: tuple[Event, ...],
        options: GradientOptions,
        workspace: Workspace,
    ) -> None:
        super().__init__()
        #: How many calls of modules with a rule are under way; nothing is followed inside them.
        self.paused = 0
        self._recording = recording
        self._parameters = {id(parameter): (parameter, name) for parameter, name in names.items()}
        self._events = events
        self._seen = 0
        self._options = options
        self._workspace = workspace
        self._values: dict[int, Value] = {}

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or not torch.is_grad_enabled() or not (self._any(args) or self._any(kwargs.values())):
            return func(*args, **kwargs)
        if is_attribute(func):
            output = func(*args, **kwargs)
            if not isinstance(output, Tensor):
                return output
        return self._follow(func, args, kwargs)

    def check_complete(self) -> None:
        """Raise if the forward pass did not use all parameters as it did on made-up samples."""
        if self._seen != len(self._events):
            raise self._unexpected()

    def _any(self, items: Iterable[Any]) -> bool:
        for item in items:
            if id(item) in self._parameters or id(item) in self._values:
                return True
            if isinstance(item, list | tuple) and self._any(item):
                return True
        return False

    def _value(self, item: Any) -> Any:
        """The value that a tensor is, if it is one; anything else as it is."""
        found = self._values.get(id(item))
        if found is None and id(item) in self._parameters:
            parameter, name = self._parameters[id(item)]
            leaf = parameter.detach().requires_grad_(True)
            found = Value(tensor=leaf, roots=(Root(parameter=parameter, name=name, leaf=leaf),), scale=1.0)
            # Later uses of the parameter, and of the leaf, are the same value.
            self._values[id(parameter)] = self._values[id(leaf)] = found
        return item if found is None else found

    def _follow(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_among(args, kwargs)
        args, kwargs = changed_leaves(self._value, args, kwargs)
        event = self._events[self._seen] if self._seen < len(self._events) else None
        if event is None or event.function != func or len(event.inputs) != len(given):
            raise self._unexpected()
        self._seen += 1
        if event.kind != "meeting":
            return self._inner(func, args, kwargs)
        values = _values(args, kwargs)
        meeting = Meeting(
            event=event,
            owner=sorted(values[0].names)[0],
            places={id(t): place for t, place in zip(given, event.inputs, strict=True)},
            recording=self._recording,
            options=self._options,
            lender=partial(self._workspace.empty, ("function", self._seen)),
        )
        try:
            return _met(meeting, func, args, kwargs)
        except (RuntimeError, IndexError) as error:
            names = {name for value in values for name in value.names}
            described = f"torch.func.vmap cannot run {_name(func)} ({str(error)[:200]})."
            raise NotFollowedError(names, described) from error

    def _inner(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = _run(func, args, kwargs, lambda value: value.tensor)
        values = _values(args, kwargs)
        roots = tuple({id(root): root for value in values for root in value.roots}.values())
        scale = None
        if len(values) == 1 and values[0].scale is not None:
            factor = keeps_norms(_name(func), args, kwargs)
            scale = None if factor is None else factor * values[0].scale
        for result in changed(func, _plain_arguments(args), output):
            # What is the same tensor keeps its value, unless it was changed in place.
            if result.requires_grad and (id(result) not in self._values or not _out_of_place(func)):
                self._values[id(result)] = Value(tensor=result, roots=roots, scale=scale)
        return output

    def _unexpected(self) -> NotFollowedError:
        names = [name for _, name in self._parameters.values()]
        return NotFollowedError(
            {name for value in self._values.values() for name in value.names} or set(names[:1]),
            "the forward pass uses it in another way than on made-up samples of the same shape. Compute the same "
            "functions of parameters whatever the values of samples are, or set GradientOptions(strategy={'NAME': 'loop'}) for "
            "the module that decides by values, '' being the whole model: it then runs one sample at a time.",
        )


def _name(func: Function) -> str:
    return getattr(func, "__name__", str(func))


def _out_of_place(func: Function) -> bool:
    name = _name(func)
    return not name.endswith("_") or (name.startswith("__") and not name.startswith(("__i", "__set")))


def _values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Value]:
    return list({id(leaf): leaf for leaf in leaves(args, kwargs) if isinstance(leaf, Value)}.values())


def _plain_arguments(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.tensor if isinstance(arg, Value) else arg for arg in args)


def _run(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Callable[[Value], Tensor]) -> Any:
    args, kwargs = changed_leaves(lambda leaf: tensor(leaf) if isinstance(leaf, Value) else leaf, args, kwargs)
    return func(*args, **kwargs)


def _met(meeting: Meeting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result, by its own rule, or else sample by sample."""
    if all(place is None for place in meeting.places.values()):
        return _samples_appear(meeting, func, args, kwargs)
    rule = RULES.get(_name(func))
    output = NotImplemented if rule is None else rule(meeting, func, *args, **kwargs)
    return _by_vmap(meeting, func, args, kwargs) if output is NotImplemented else output


def _samples_appear(meeting: Meeting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``token.expand(n, -1, -1)``, say: a copy for each sample, made from parameters and numbers alone."""
    place, values = meeting.output, _values(args, kwargs)
    whole = _run(func, args, kwargs, lambda value: value.tensor)
    if place is None or not isinstance(whole, Tensor) or len(meeting.event.outputs) != 1:
        raise RuntimeError("no axis of the result holds the samples")
    axis, fold = place.axis, place.fold
    one = whole.narrow(axis, 0, fold)
    repeated = one.repeat(*(meeting.samples if i == axis else 1 for i in range(whole.dim())))
    if whole.shape != repeated.shape or not torch.equal(whole, repeated):
        raise RuntimeError("samples get different values")
    roots = tuple({id(root): root for value in values for root in value.roots}.values())
    only_copied = len(values) == 1 and _name(func) in _COPYING and one.numel() == values[0].tensor.numel()
    value = Value(tensor=one, roots=roots, scale=values[0].scale if only_copied else None)
    own, tap = meeting.tap(whole.detach())
    meeting.contribute(
        value, lambda parameter: ExplicitContribution(parameter, tap, lambda b: meeting.by_sample(b, place))
    )
    return own


_COPYING = frozenset(("expand", "expand_as", "repeat", "tile", "broadcast_to"))


def _by_vmap(meeting: Meeting, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any function that treats samples one by one: each gets its own copy of the values."""
    given, structure = tree_flatten((args, kwargs))
    inputs: list[Any] = []
    axes: list[int | None] = []
    for leaf in given:
        place = meeting.place(leaf)
        if place is not None and place.fold != 1:
            raise RuntimeError("samples are folded into another axis")
        inputs.append(meeting.copies(leaf) if isinstance(leaf, Value) else leaf)
        axes.append(0 if isinstance(leaf, Value) else None if place is None else place.axis)
    own = [isinstance(leaf, Value) for leaf in given]

    def one_sample(values: list[Any]) -> Any:
        single = [
            value if axis is None or copy else value.unsqueeze(axis)
            for value, axis, copy in zip(values, axes, own, strict=True)
        ]
        arguments, keywords = tree_unflatten(single, structure)
        return func(*arguments, **keywords)

    with warnings.catch_warnings():
        # vmap runs some operations one sample at a time; that this path is slow then needs no warning.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        flat, result = tree_flatten(vmap(one_sample, in_dims=(axes,), randomness="different")(inputs))
    places = iter(meeting.event.outputs)
    return tree_unflatten(
        [_joined(value, next(places)) if isinstance(value, Tensor) else value for value in flat], result
    )


def _joined(value: Tensor, place: Place | None) -> Tensor:
    """``[n, ..., 1, ...]`` with the single sample of each call on the samples' axis, to ``[..., n, ...]``."""
    if place is None or place.fold != 1 or value.shape[place.axis + 1] != 1:
        raise RuntimeError("no axis of the result holds the samples")
    return value.movedim(0, place.axis).flatten(place.axis, place.axis + 1)
