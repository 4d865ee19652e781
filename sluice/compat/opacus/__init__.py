"""Opacus's names, with Sluice behind them: change the import line of a program and run it (docs/opacus.md).

What cannot be kept stops with a sentence that says what to write instead, and why. Modules have the names that they have in
Opacus: ``from opacus.layers import DPLSTM`` becomes ``from sluice.compat.opacus.layers import DPLSTM``.
"""

from sluice.compat.opacus.engine import PrivacyEngine
from sluice.compat.opacus.grad_sample import GradSampleModule

__all__ = ["GradSampleModule", "PrivacyEngine"]
