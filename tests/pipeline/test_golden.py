"""The graphs of the three mini models after the forward passes are those under tests/golden."""

from __future__ import annotations

import difflib
import pathlib

import pytest
import torch
from torch import Tensor, fx

from fusewright.capture.fingerprint import fingerprint_text
from fusewright.capture.graph import copy_graph
from fusewright.capture.variant import DEFAULT_VARIANT
from fusewright.passes.base import PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, PipelineResult
from tests.models.mini import MINI
from tests.pipeline.little import settings

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "golden"
TORCH = "2.14"  # Dynamo spells a graph differently in every version; one is enough to see what a change of ours does


def forward_graph(name: str) -> fx.GraphModule:
    """The training forward of a mini model as Dynamo hands it over, with the model's named dimensions dynamic."""
    workload = MINI[name]
    torch.manual_seed(0)
    model = workload.model().train()
    args, kwargs = workload.inputs(workload.lengths[1], 0)
    names = dict(zip(model.forward.__code__.co_varnames[1:], args, strict=False)) | kwargs
    for argument, dims in workload.dims.items():
        for dim in dims if isinstance(names.get(argument), Tensor) else ():
            torch._dynamo.mark_dynamic(names[argument], dim)
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example_inputs: list[object]) -> object:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args, **kwargs)
    (gm,) = graphs
    return gm


def golden_text(gm: fx.GraphModule, result: PipelineResult) -> str:
    """What the passes did, and the rewritten graph, a node a line with numbers for names."""
    declined = sorted((name, reason, count) for (name, _, reason), count in result.declines.items())
    told = [f"rewrites {name}: {count}" for name, count in sorted(result.rewrites.items())]
    told += [f"recognised {kind}: {count}" for kind, count in sorted(result.recognised.items())]
    told += [f"declined {name}: {count} x {reason}" for name, reason, count in declined]
    return "\n".join([*told, "", fingerprint_text(gm), ""])


@pytest.mark.models
@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"golden graphs are those of torch {TORCH}")
@pytest.mark.parametrize("name", MINI)
def test_the_graph_is_golden(name: str, update_golden: bool) -> None:
    pristine = forward_graph(name)
    line = Pipeline(ORDER, settings())
    ctx = PassContext(device="cuda", training=True)  # where every pass applies; the graph itself is on the CPU
    gm, result = line.rewrite(lambda: copy_graph(pristine), line.select(DEFAULT_VARIANT, Stage.FORWARD, ctx), ctx, name)
    assert result.failures == []
    text, path = golden_text(gm, result), FOLDER / f"{name}.txt"
    stored = path.read_text() if path.exists() else ""
    diff = "\n".join(difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", lineterm="", n=1))
    if update_golden:
        path.write_text(text)
        print(diff or f"{path.name}: unchanged")
    else:
        assert stored == text, f"{path.name} differs; if it should, run pytest --update-golden -s\n{diff}"
