"""The interface of layer rules: how the per-sample gradients of one kind of module are recorded.

A rule is called once for each call of its module inside the recorded forward pass. It makes taps where it wants the
loss's derivative and says what each tap contributes to which parameter::

    class LinearRule(Rule):
        def record(self, module, call):
            z, tap = call.tap(call.output)
            a = call.save(call.inputs[0])
            if call.trainable(module.weight):
                call.contribute(LinearContribution(module.weight, tap, positions(a), view=positions))
            return z

    register(nn.Linear, LinearRule())

A rule with ``replaces_forward = True`` runs the module itself, decomposed however it wants (``call.output`` is None then);
the others find the ordinary forward's result in ``call.output``. While a rule runs, no parameter requires grad.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from sluice.gradients.contributions import Contribution, Tap
from sluice.gradients.options import GradientOptions
from sluice.gradients.sharding import of_fsdp
from sluice.gradients.workspace import Lender, Workspace

if TYPE_CHECKING:
    from sluice.gradients.capture import Recording


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of one module during the recorded forward pass.

    Attributes:
        name: the module's name in the model, for messages.
        inputs: positional arguments.
        keywords: keyword arguments.
        output: what the module's own forward returned; None for a rule that replaces it.
        batch_size: number of samples in this forward pass.
        batch_axes: for each tensor among the arguments (in the order of `sluice.gradients.trees.leaves_in`), the
            axis that holds the samples, found by probing with two batch sizes; None where no axis does.
        number: how often the module was called before in this forward pass.
        workspace: where large buffers can be borrowed.
    """

    name: str
    inputs: tuple[Any, ...]
    keywords: Mapping[str, Any]
    output: Any
    batch_size: int
    batch_axes: tuple[int | None, ...]
    options: GradientOptions
    recording: Recording
    number: int
    workspace: Workspace

    def tap(self, z: Tensor) -> tuple[Tensor, Tap]:
        """Ask for the loss's derivative at z. The returned tensor must be used in place of z from here on."""
        return self.recording.tap(z)

    def save(self, tensor: Tensor) -> Tensor:
        """The tensor, detached, to be used after the backward pass; changing it in place until then is an error."""
        return self.recording.save(tensor, owner=self.name)

    def trainable(self, parameter: Tensor | None) -> bool:
        """Whether the user asked for this parameter's gradient."""
        return parameter is not None and self.recording.trainable(parameter)

    def contribute(self, contribution: Contribution) -> None:
        self.recording.contribute(contribution)

    @property
    def batch_axis(self) -> int:
        """The axis of the first batched argument that holds the samples, usually 0.

        Rules for modules that define their own batch axis (``batch_first``) ignore it.
        """
        return next((axis for axis in self.batch_axes if axis is not None), 0)

    def argument(self, position: int, keyword: str) -> Any:
        """An argument of the call, however it was passed."""
        return self.inputs[position] if len(self.inputs) > position else self.keywords[keyword]

    @property
    def lender(self) -> Lender:
        """Lends one tensor to this call, that of the chunk before where that one is gone."""
        return partial(self.workspace.empty, (self.name, self.number))

    @property
    def strategy(self) -> str:
        return self.options.strategy.get(self.name, "auto")


class Rule(ABC):
    """How one kind of module is recorded."""

    replaces_forward: ClassVar[bool] = False
    #: Whether the module itself says where the samples are (``batch_first``); else its inputs are checked to have
    #: the samples on ``call.batch_axis``.
    owns_batch_axis: ClassVar[bool] = False
    #: Whether weighted sums are made of parts that are small enough for the noise to pay for their rounding, however many
    #: samples a chunk has (`sluice.gradients.contributions.blocks`). Chunks of models with other rules are small.
    sums_in_blocks: ClassVar[bool] = False

    def variant(self, module: Any) -> Rule:
        """The rule for just this module, where its shape decides between several; usually this one."""
        return self

    def unsupported(self, module: nn.Module) -> str | None:
        """Why this module cannot be handled by this rule (its parameters are followed then), or None."""
        return None

    @abstractmethod
    def record(self, module: Any, call: Call) -> Any:
        """Make taps and contributions for one call, and return the module's output with the taps in it."""


_RULES: dict[type[nn.Module], Rule] = {}


def register(kind: type[nn.Module], rule: Rule) -> None:
    """Use the rule for modules of this class, and of subclasses that change nothing but how they are made and shown."""
    _RULES[kind] = rule


def rule_for(module: nn.Module) -> Rule | None:
    """The rule of this module, if there is one that supports it as it is configured."""
    rule = None if "forward" in vars(module) else _inherited(type(module))
    return rule.variant(module) if rule is not None and rule.unsupported(module) is None else None


#: What a subclass may define without computing anything else.
_HARMLESS = frozenset(
    (
        *("__init__", "__repr__", "extra_repr", "reset_parameters", "_reset_parameters", "__constants__"),
        *("__module__", "__qualname__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__orig_bases__"),
        *("__parameters__", "__static_attributes__", "__firstlineno__", "__annotate__", "__abstractmethods__"),
    )
)


def _inherited(kind: type[nn.Module]) -> Rule | None:
    """The rule of the nearest base class that has one, if all attributes on the way there are harmless or new."""
    changed: set[str] = set()
    for base in kind.__mro__:
        if of_fsdp(base):
            continue
        if base in _RULES:
            overridden = changed & {*dir(base), "weight", "bias"}
            return None if overridden - _HARMLESS else _RULES[base]
        changed.update(vars(base))
    return None
