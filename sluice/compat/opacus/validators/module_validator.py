"""Whether a module can be trained privately, and what to replace if not."""

from __future__ import annotations

from torch import nn

from sluice._base.errors import UnsupportedModuleError
from sluice.gradients.fix import fix
from sluice.gradients.validation import problems


class ModuleValidator:
    """Opacus's names for `sluice.gradients.validation.problems` and `sluice.gradients.fix`.

    What mixes samples in ways that only show when the model runs is found when it does: the first batch of a run is checked.
    """

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[UnsupportedModuleError]:
        """What is wrong with a module, one error each; with ``strict`` they are raised together."""
        found = [] if module.training else ["The model must be in training mode: call model.train()."]
        found += problems(module)
        if strict and found:
            raise UnsupportedModuleError("\n".join(found))
        return [UnsupportedModuleError(each) for each in found]

    @classmethod
    def is_valid(cls, module: nn.Module) -> bool:
        return not cls.validate(module)

    @classmethod
    def fix(cls, module: nn.Module, *, replace_bn_with_in: bool = False) -> nn.Module:
        """A copy without layers that mix samples: `sluice.gradients.fix`. BatchNorm becomes GroupNorm."""
        if replace_bn_with_in:
            raise UnsupportedModuleError(
                "replace_bn_with_in=True is not offered: BatchNorm becomes GroupNorm. Replace it by nn.InstanceNorm2d yourself."
            )
        return fix(module)

    @classmethod
    def fix_and_validate(cls, module: nn.Module) -> nn.Module:
        fixed = cls.fix(module)
        cls.validate(fixed, strict=True)
        return fixed
