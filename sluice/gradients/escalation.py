"""Choosing how modules are recorded where the usual way fails: larger modules, under vmap, then sample by sample.

Whatever is chosen passes the same checks against ordinary backward passes as any other plan.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.functional.trace import NotFollowedError
from sluice.gradients.independence import TOLERANCE
from sluice.gradients.plan import Unit, enclose, outside, user_of
from sluice.gradients.probe import undisturbed
from sluice.gradients.synthetic import Samples
from sluice.gradients.trees import apply, take, tensors_in
from sluice.gradients.verification import Subject, norm, quiet
from sluice.gradients.vmap import VmapRule


class LoopWarning(UserWarning):
    """A module runs one sample at a time, which is slow."""


class Escalation:
    """What to try next for a model whose plan failed a check on made-up samples.

    First the smallest modules around parameters that cannot be followed go to vmap. If that does not help, and the model
    itself treats samples one by one, the module that failed is run one sample at a time, then the one around it under
    vmap, and so on, up to the whole model.

    Args:
        units: the plan, which is changed in place.
        chosen: modules that the user gave a strategy to, which stay as they are.
    """

    def __init__(self, subject: Subject, units: dict[nn.Module, Unit], *, chosen: frozenset[str]) -> None:
        self._subject = subject
        self._units = units
        self._chosen = chosen
        self._independent: bool | None = None
        self.first: Exception | None = None

    @property
    def looping(self) -> list[str]:
        """Modules that run one sample at a time without anybody having asked for it."""
        return [
            unit.name
            for unit in self._units.values()
            if isinstance(unit.rule, VmapRule) and unit.rule.by_loop and unit.name not in self._chosen
        ]

    def next(self, error: Exception, samples: Samples) -> bool:
        """Change the plan after this error; False where nothing is left to try."""
        if self._follow_less(error):
            return True
        if self._independent is None:
            self._independent = independent(self._subject, samples)
        return self._independent and self._enlarge(_culprit(error))

    def _follow_less(self, error: Exception) -> bool:
        """Give what cannot be followed to vmap, in the smallest modules that use it."""
        if not isinstance(error, UnsupportedModuleError):
            return False
        lost = outside(self._subject.model, self._units)
        lost = lost & error.parameters if isinstance(error, NotFollowedError) else lost
        for parameter in lost:
            name = user_of(self._subject.model, parameter)
            enclose(self._subject.model, self._units, name, rule=VmapRule())
        return bool(lost)

    def _enlarge(self, name: str) -> bool:
        """One step up from how a module is recorded now."""
        model = self._subject.model
        around = [unit for unit in self._units.values() if _holds(unit.name, name)]
        if around and around[0].name in self._chosen:
            return False
        if around and isinstance(around[0].rule, VmapRule):
            if not around[0].rule.by_loop:
                enclose(model, self._units, around[0].name, rule=VmapRule(by_loop=True))
                return True
            name = around[0].name
        elif not around:
            enclose(model, self._units, name, rule=VmapRule())
            return True
        if not name:
            if around and not isinstance(around[0].rule, VmapRule):
                enclose(model, self._units, "", rule=VmapRule())
                return True
            return False
        if any(_holds(name, chosen) for chosen in self._chosen):
            return False
        enclose(model, self._units, user_of(model, name), rule=VmapRule())
        return True


def _holds(outer: str, inner: str) -> bool:
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _culprit(error: Exception) -> str:
    """The module that an error is about; the whole model where it does not tell."""
    if isinstance(error, NotFollowedError):
        return sorted(error.parameters)[0].rpartition(".")[0]
    return getattr(error, "module", None) or ""


def independent(subject: Subject, samples: Samples) -> bool:
    """Whether ordinary passes give for two samples together what they give for each alone: outputs and gradients.

    Only then may samples run apart from each other: a model that mixes them would become another one.
    """
    pair = samples.few(2)
    singles = [take(pair, slice(i, i + 1)) for i in (0, 1)]
    try:
        with undisturbed(subject.model), torch.enable_grad():
            quiet(subject.model)
            together = subject.autograd(pair)
            apart = [subject.autograd(single) for single in singles]
            outputs = [_outputs(subject.model, x) for x in (pair, *singles)]
    except Exception:  # whatever a model raises on one sample alone
        return False
    difference = {name: value - apart[0][name] - apart[1][name] for name, value in together.items()}
    if not bool(norm(difference) <= 100 * TOLERANCE * norm(together) + 1e-30):
        return False
    return len({len(found) for found in outputs}) == 1 and all(
        _same(*tensors) for tensors in zip(*outputs, strict=True)
    )


def _outputs(model: nn.Module, x: Any) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        return list(tensors_in(apply(model, x)))


def _same(pair: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> bool:
    if pair.dim() != first.dim() or first.shape != second.shape:
        return False
    axes = [i for i, (two, one) in enumerate(zip(pair.shape, first.shape, strict=True)) if two != one]
    if len(axes) != 1 or pair.shape[axes[0]] != 2 * first.shape[axes[0]]:
        return False
    joined = torch.cat([first, second], axes[0])
    if not pair.is_floating_point():
        return bool(torch.equal(pair, joined))
    return bool(torch.allclose(pair, joined, rtol=1e-3, atol=1e-3 * float(joined.abs().max()), equal_nan=True))


def cannot_be_recorded(error: Exception) -> UnsupportedModuleError:
    """What a user is told where recording a model raised something that is not meant for users."""
    return UnsupportedModuleError(
        f"The model cannot be recorded: {type(error).__name__}: {str(error)[:200]}. It runs by itself, but what it computes for a "
        "sample depends on the other samples or on how many there are. Make it treat samples one by one; "
        "sluice.gradients.check_independence(module, example) finds the module that does not."
    )


def warn_of_loops(names: list[str]) -> None:
    """Say once that training will be slow, and why."""
    if names:
        named = ", ".join(f"'{name}'" if name else "the whole model" for name in names)
        warnings.warn(
            f"Gradients of {named} are computed one sample at a time, since neither layer rules nor torch.func.vmap can "
            "record it. They are exact, but slow. Name it to accept that without this warning: "
            f"GradientOptions(strategy={{{', '.join(f'{name!r}: {chr(39)}loop{chr(39)}' for name in names)}}}).",
            LoopWarning,
            stacklevel=2,
        )
