"""Per-sample gradient norms and weighted sums, in one backward pass. See docs/gradients.md."""

from sluice.gradients import linear as _linear  # noqa: F401  (registers its rules)
from sluice.gradients.chunk import Chunk, NonFiniteGradientWarning
from sluice.gradients.engine import PerSampleGradients
from sluice.gradients.options import GradientOptions

__all__ = ["Chunk", "GradientOptions", "NonFiniteGradientWarning", "PerSampleGradients"]
