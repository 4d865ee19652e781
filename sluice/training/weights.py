"""The optimizer of the ordinary loop: its ``step()`` releases an update, or forgets the attempt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.hooks import RemovableHandle

from sluice._base.errors import InputError
from sluice.gradients.digest import digest_of
from sluice.gradients.sharding import is_sharded
from sluice.gradients.spectral import advance


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What a trial has to put back."""

    hooks: Mapping[str, Any]
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] | None = None


class WeightUpdater:
    """Applies released gradients through the user's own optimizer and watches that nothing else changes weights.

    Args:
        optimizer: the user's optimizer over the module's trainable parameters.
        lr_scheduler: advanced by one with every release.
        after_release: called when an update has been applied (averaging of weights has its place here).
        observe: called with each released gradient before it is applied (an audit has its place here).
    """

    def __init__(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        lr_scheduler: LRScheduler | None = None,
        after_release: Callable[[], None] | None = None,
        observe: Callable[[Mapping[str, Tensor]], None] | None = None,
    ) -> None:
        self._module = module
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self._before_trial: _Before | None = None
        self._pins_settings = False
        self._after_release = after_release
        self._observe = observe
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in self._parameters.items() if id(p) not in held]
        if missing:
            raise InputError(
                f"the optimizer does not hold the trainable parameters {', '.join(missing[:5])}: make it from "
                "module.parameters(), or set requires_grad=False on what is not to be trained."
            )
        foreign = len(held - {id(p) for p in module.parameters()})
        if foreign:
            raise InputError(
                f"the optimizer holds {foreign} parameters that are not the module's: they would be trained without "
                "privacy. Make the optimizer from module.parameters()."
            )
        self.remember()

    def apply(self, released: Mapping[str, Tensor]) -> None:
        """One step of the user's optimizer with a released gradient: post-processing of what is already public."""
        if self._observe is not None:
            self._observe(released)
        self.step(released)
        self.keep()

    @contextmanager
    def trial(self) -> Iterator[dict[str, Tensor]]:
        """The trained parameters by name, which may be set, or stepped by `step`, inside the block, and come back.

        Guarantee:
            Afterwards weights and all of the optimizer's state are bit for bit as before, also where the block ends by
            an exception. If even that is interrupted, `put_back` ends it before anything else looks at the weights. No hook
            of the optimizer is called: what hooks see and count is public.
        """
        hooks = {name: value for name, value in vars(self.optimizer).items() if name.endswith("_hooks")}
        self._before_trial = _Before(hooks=hooks)
        try:
            vars(self.optimizer).update({name: type(value)() for name, value in hooks.items()})
            state = copy.deepcopy(self.optimizer.state_dict())
            self._before_trial = _Before(hooks=hooks, weights=self.weights(), state=state)
            yield dict(self._parameters)
        finally:
            self.put_back()

    def put_back(self) -> None:
        """Undo a trial that was interrupted before it could undo itself."""
        before = self._before_trial
        if before is not None:
            if before.state is not None:
                self._set(before.weights)
                self.optimizer.load_state_dict(before.state)
            vars(self.optimizer).update(before.hooks)
            # Entries are those of the last release again, or something else has changed them: `check_untouched` tells.
            for name, parameter in self._parameters.items():
                self._weights[name] = (parameter._version, self._weights[name][1])
            self._before_trial = None

    def move(self, weights: Mapping[str, Tensor]) -> None:
        """Set the weights as a release says, past the optimizer; schedule and average advance as with `apply`."""
        self._set(weights)
        self.keep()

    def _set(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights that are trained, by name."""
        return {name: p.detach().clone() for name, p in self._parameters.items()}

    def converted(self, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A gradient in the type and on the device of each parameter that is trained."""
        return {
            name: gradient[name].to(dtype=parameter.dtype, device=parameter.device)
            for name, parameter in self._parameters.items()
        }

    def step(self, gradient: Mapping[str, Tensor]) -> None:
        """The optimizer's step alone; `keep` ends the release that one or more of them belong to."""
        # The optimizer steps whatever has a gradient, such as one that a backward pass left in a parameter that is frozen.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        for name, part in self.converted(gradient).items():
            self._parameters[name].grad = part
        self.optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def keep(self) -> None:
        """Take the present weights as released: schedule, spectral norms and average advance."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        advance(self._module)
        if self._after_release is not None:
            self._after_release()
        self.remember()

    def remember(self) -> None:
        """Take the present weights as those that the last release left."""
        self._weights = {name: (p._version, digest_of(p)) for name, p in self._parameters.items()}
        self._frozen_versions = {name: p._version for name, p in self._frozen.items()}
        self._settings: list[dict[str, Any]] | None = self.settings() if self._pins_settings else None

    def pin_settings(self) -> None:
        """From now on, refuse settings that change other than by ``lr_scheduler``; call it again to take the present ones."""
        self._pins_settings = True
        self._settings = self.settings()

    def nothing_released(self) -> None:
        """Note that a step ended without a release: settings may not move before the next one."""
        self._settings = self.settings()

    def check_untouched(self, *, entries: bool = True) -> None:
        """Refuse to continue if something other than a release changed weights or settings since the last one.

        Args:
            entries: whether the entries of what is trained are read, which sees changes behind autograd's back, too.
        """
        self.put_back()
        for name, parameter in self._parameters.items():
            version, digest = self._weights[name]
            if parameter._version != version or (entries and digest_of(parameter) != digest):
                self._refuse_change(name)
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InputError(
                    f"parameter '{name}' was frozen when training began and requires a gradient now, which would be neither "
                    "clipped nor noised. Call make_private again to train it, or set its requires_grad=False."
                )
            # There may be many more of them than are trained: their entries are not read.
            if parameter._version != self._frozen_versions[name]:
                self._refuse_change(name)

    def _refuse_change(self, name: str) -> None:
        raise InputError(
            f"parameter '{name}' was changed by hand since the last release, or by the model's forward pass, so what is released "
            "next would not be what is accounted for. Change weights before make_private, or call engine.accept_weights() "
            "if the change did not depend on the private data."
        )

    def check_settings(self) -> None:
        """Refuse learning rates that moved though nothing was released."""
        if self._settings is None or self.settings() == self._settings:
            return
        if self._pins_settings:
            raise InputError(
                "the learning rate (or another setting of the optimizer) changed within a pass over the loader. Batches of this "
                "run are so small that one may be empty; it is released without a turn of the loop, and a schedule that goes by "
                "turns would tell. Pass the scheduler to make_private(lr_scheduler=...), which advances it by release."
            )
        raise InputError(
            "the learning rate (or another setting of the optimizer) changed though nothing was released: an "
            "attempt was forgotten, or a batch is not complete yet. Pass the scheduler to "
            "make_private(lr_scheduler=...), which advances it by release."
        )

    def digest(self) -> list[tuple[int, ...]]:
        """That of the weights that the last release left."""
        return [found for _, found in self._weights.values()]

    def settings(self) -> list[dict[str, Any]]:
        """The optimizer's settings, learning rates among them, by group."""
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups
        ]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `settings`."""
        for group, wanted in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(wanted)


def averaged(module: nn.Module, *, decay: float) -> AveragedModel:
    """An exponential average of the weights, which are now the first ones."""
    if any(map(is_sharded, module.parameters())):
        raise InputError(
            f"ema_decay={decay} is not allowed for a sharded model, of which PyTorch makes no copy (fully_shard): leave it out."
        )
    return AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))


class PrivateOptimizer(Optimizer):
    """Stands in for the user's optimizer in the ordinary loop.

    ``step()`` consumes the backward pass that was just made. With the last piece of a batch it decides: the update is
    applied through the user's optimizer, or the attempt is forgotten and weights, optimizer state and learning rate
    stay bit for bit what they were. Like PyTorch's it returns None either way; which of the two happened is sensitive.

    Hooks of a step are called with each release, never with a piece of a batch or a forgotten attempt, so what they count is
    public. They run inside the user's own optimizer, around its update, and are given that optimizer.
    """

    def __init__(self, updater: WeightUpdater, *, consume: Callable[[], None]) -> None:
        # Optimizer.__init__ is not called: groups, state and defaults are those of the user's optimizer.
        self._updater = updater
        self._consume = consume

    @property
    def original_optimizer(self) -> Optimizer:
        return self._updater.optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._updater.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self._updater.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self._updater.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self._updater.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._updater.optimizer.load_state_dict(dict(state_dict))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._updater.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise InputError("a parameter group cannot be added to a private optimizer: call make_private again with it.")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise InputError(
                "step(closure) is not allowed: a closure would look at the data more often than is accounted for. Call "
                "loss.backward() and then step()."
            )
        self._consume()

    def register_step_pre_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> RemovableHandle:
        return self.original_optimizer.register_step_post_hook(hook)

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.original_optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.original_optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.original_optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        return self.original_optimizer.register_load_state_dict_post_hook(hook, prepend)

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self._updater.optimizer!r})"


__all__ = ["PrivateOptimizer", "WeightUpdater", "averaged"]
