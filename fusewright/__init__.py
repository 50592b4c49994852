"""fusewright: a graph optimizer for PyTorch that is never silently wrong and never silently eager.

    fusewright.optimize(model)              # in place; then call the model as before
    print(fusewright.explain(model))        # what was captured, rewritten, verified, and what fell back

Names are loaded when they are first used: the compiler behind `optimize` takes seconds to import, and neither
`fusewright --help` nor a worker process that only times a model needs it.
"""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from fusewright import ops
    from fusewright.api import Optimizer, TrainStep, disabled, explain, optimize
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
    "TrainStep",
    "Workload",
    "disabled",
    "explain",
    "ops",
    "optimize",
]

_HOME = {
    "FusewrightError": "errors",
    "GraphVariant": "capture.variant",
    "Numerics": "config",
    "Optimizer": "api",
    "Pass": "passes.base",
    "PassContext": "passes.base",
    "ShapeBucket": "capture.shapes",
    "Stage": "passes.base",
    "TrainStep": "api",
    "Workload": "workload",
    "disabled": "api",
    "explain": "api",
    "optimize": "api",
}


def __getattr__(name: str) -> _typing.Any:
    if name == "ops":
        return _importlib.import_module("fusewright.ops")
    if name not in _HOME:
        raise AttributeError(f"module 'fusewright' has no attribute {name!r}")
    return getattr(_importlib.import_module(f"fusewright.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
