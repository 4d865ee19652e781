"""Per-sample gradient norms and weighted sums, in one backward pass. See docs/gradients.md."""

from sluice.gradients.chunk import Chunk, NonFiniteGradientWarning
from sluice.gradients.engine import PerSampleGradients
from sluice.gradients.fix import fix
from sluice.gradients.independence import check_independence
from sluice.gradients.layers import attention as _attention  # noqa: F401  (registers its rules, like those below)
from sluice.gradients.layers import bags as _bags  # noqa: F401
from sluice.gradients.layers import convolution as _convolution  # noqa: F401
from sluice.gradients.layers import embedding as _embedding  # noqa: F401
from sluice.gradients.layers import linear as _linear  # noqa: F401
from sluice.gradients.layers import normalisation as _normalisation  # noqa: F401
from sluice.gradients.layers import recurrent as _recurrent  # noqa: F401
from sluice.gradients.options import GradientOptions
from sluice.gradients.validation import problems

__all__ = [
    "Chunk",
    "GradientOptions",
    "NonFiniteGradientWarning",
    "PerSampleGradients",
    "check_independence",
    "fix",
    "problems",
]
