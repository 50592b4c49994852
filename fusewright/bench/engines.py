"""Inference engines as rivals: ONNX Runtime and OpenVINO in the place of a module's forward, each at its best."""

from __future__ import annotations

import importlib.util
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]

# By provider: the modules that it needs, and the extra that installs them.
NEEDS = {"onnxruntime": (("onnx", "onnxscript", "onnxruntime"), "onnx"), "openvino": (("openvino",), "openvino")}


def missing(provider: str) -> str | None:
    """What to tell a user who asks for an engine that is not installed; None where nothing is missing."""
    modules, extra = NEEDS.get(provider, ((), ""))
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{provider} is left out: {', '.join(absent)} not installed (pip install 'fusewright[{extra}]')"


@dataclass(frozen=True)
class Engine:
    """One exported model in an engine, which holds the weights of the moment of export as constants.

    Attributes:
        forward: takes and returns what the model's own forward does.
        proof: what shows that the settings took.
    """

    forward: Callable[..., Any]
    proof: dict[str, Any]


def onnx_runtime(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Engine:
    """All graph optimizations and torch's thread count, at the sizes of these inputs.

    Sources: torch.onnx.export(dynamo=True); ONNX Runtime's "Graph optimizations" and "Thread management" pages.
    """
    import onnxruntime

    program, result = _export(model, args, kwargs)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = pathlib.Path(folder) / "model.onnx"
        torch.onnx.export(program, dynamo=True, verbose=False, external_data=True, f=path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [found.name for found in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    told = session.get_session_options()
    proof = {
        "engine": f"onnxruntime {onnxruntime.__version__}",
        "device": session.get_providers(),
        "threads": told.intra_op_num_threads,
        "graph_optimization": str(told.graph_optimization_level).rpartition(".")[2],
    }
    return Engine(_as_forward(run, result), proof)


def openvino(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Engine:
    """The latency hint and torch's thread count, in float32, at the sizes of these inputs.

    Without the precision hint, OpenVINO computes in bfloat16 where the processor can. Sources: its documentation's
    "Converting a PyTorch model", "Performance hints" and "CPU device".
    """
    import openvino as ov

    program, result = _export(model, args, kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = ov.convert_model(program)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = ov.compile_model(converted, "CPU", settings)
    request = compiled.create_infer_request()

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = request.infer([tensor.numpy() for tensor in inputs], share_inputs=True)
        return [torch.from_numpy(found[port]) for port in compiled.outputs]

    proof = {
        "engine": f"openvino {ov.__version__}",
        "device": compiled.get_property("EXECUTION_DEVICES"),
        "threads": compiled.get_property("INFERENCE_NUM_THREADS"),
        "precision": compiled.get_property("INFERENCE_PRECISION_HINT").to_string(),
    }
    return Engine(_as_forward(run, result), proof)


ENGINES: dict[str, Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], Engine]] = {
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
}


class _TensorsOnly(nn.Module):
    """`model` as a function from the tensors of one call to those of its result; engines know no flags and no None."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.given = _Structure((args, dict(kwargs)))
        with torch.no_grad():
            self.result = _Structure(model(*args, **kwargs))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.given.around(tensors)
        return tuple(_tensors(self.model(*args, **kwargs)))


class _Structure:
    """A tree without its tensors."""

    def __init__(self, tree: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(tree)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The tree with `tensors` in place of its own."""
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[ExportedProgram, _Structure]:
    wrapped = _TensorsOnly(model, args, kwargs)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(wrapped, tuple(_tensors((args, kwargs))), strict=False)
        return program.run_decompositions({}), wrapped.result


def _as_forward(run: Run, result: _Structure) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return result.around(run(_tensors((args, kwargs))))

    return forward
