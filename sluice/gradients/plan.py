"""Which modules of a model are recorded, and by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize

from sluice._base.errors import InputError, UnsupportedModuleError
from sluice.gradients.options import GradientOptions
from sluice.gradients.rules import Rule, rule_for


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A module whose calls are recorded as a whole."""

    name: str
    module: nn.Module
    rule: Rule


def plan(model: nn.Module, *, options: GradientOptions, fallback: Rule) -> Mapping[nn.Module, Unit]:
    """Cut the model into units: modules with a rule, and the smallest subtrees around anything else, for the fallback.

    A module that has trainable parameters of its own but no rule goes to the fallback together with all that it contains.
    """
    names = {name for name, _ in model.named_modules()}
    for name in options.strategy:
        if name not in names:
            raise InputError(f"strategy names the module {name!r}, which the model does not have.")
    units: dict[nn.Module, Unit] = {}

    def visit(module: nn.Module, name: str) -> None:
        if module in units or not any(parameter.requires_grad for parameter in module.parameters()):
            return
        rule = None if _needs_vmap(module, options.strategy.get(name, "auto")) else rule_for(module)
        if rule is None and _has_own_parameters(module, options.strategy.get(name, "auto")):
            rule = fallback
        if rule is not None:
            units[module] = Unit(name=name, module=module, rule=rule)
            return
        for child_name, child in module.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name)

    visit(model, "")
    _refuse_scripts(model)
    return units


def _needs_vmap(module: nn.Module, strategy: str) -> bool:
    # Parametrized weights and forward pre-hooks (the older weight_norm) compute what the module uses as its weight.
    return strategy in ("vmap", "loop") or parametrize.is_parametrized(module) or bool(module._forward_pre_hooks)


def _has_own_parameters(module: nn.Module, strategy: str) -> bool:
    own = any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    return own or strategy in ("vmap", "loop") or parametrize.is_parametrized(module)


def _refuse_scripts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModuleError(
                f"Module '{name}' is a TorchScript module, into which per-sample gradients cannot see. Use the Python "
                "module it was made from."
            )
