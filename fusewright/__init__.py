"""fusewright: a graph optimizer for PyTorch that is never silently wrong and never silently eager.

fusewright.optimize(model)              # in place; then call the model as before
print(fusewright.explain(model))        # what was captured, rewritten, verified, and what fell back
"""

from fusewright.api import Optimizer, disabled, explain, optimize
from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import GraphVariant
from fusewright.config import Numerics
from fusewright.errors import FusewrightError
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.workload import Workload

__version__ = "0.1"
__all__ = [
    "FusewrightError",
    "GraphVariant",
    "Numerics",
    "Optimizer",
    "Pass",
    "PassContext",
    "ShapeBucket",
    "Stage",
    "Workload",
    "disabled",
    "explain",
    "optimize",
]
