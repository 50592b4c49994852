"""Lets our `RegionRunner` launch what Inductor compiles, in the place where torch would put its CUDA-graph trees."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch._inductor import compile_fx
from torch._inductor.utils import ALIGNMENT

from fusewright.capture.variant import GraphVariant, Launch
from fusewright.config import Verify
from fusewright.runtime.cudagraph.runner import GraphPool, RegionRunner
from fusewright.runtime.cudagraph.tensors import buffer_like, without_repeats

Callee = Callable[..., Any]

# Inductor cuts a graph where something cannot be captured and asks for each part in between to be wrapped.
PATCHES: dict[str, Any] = {"triton.cudagraphs": True, "graph_partition": True}


def why_not_captured(variant: GraphVariant, device: str, training: bool, verify: Verify) -> str | None:
    """Why a graph cannot be launched as `variant` asks; None where it can.

    Args:
        device: type of the device that the graph runs on.
        training: whether autograd records the graph: its backward would keep the memory of a replay alive.
    """
    if variant.launch is Launch.PLAIN:
        return None
    if device != "cuda":
        return f"CUDA graphs need a CUDA device, and this graph runs on {device}"
    if verify is Verify.ALWAYS:
        return "verify='always' compares every call on copies, whose addresses no graph can follow"
    return "graphs that autograd records are not captured" if training else None


@contextlib.contextmanager
def captured_regions(pool: GraphPool, on_plain: Callable[[str], None]) -> Iterator[list[RegionRunner]]:
    """Inside the block, what this thread compiles for inference is launched by runners, which the yielded list gets.

    Call with `capture_lock` held: the place that is taken over belongs to the whole process.

    Args:
        pool: memory that the runners share.
        on_plain: told why, at every call of a region that no graph answers although its shapes are known.
    """
    own, torch_s = threading.get_ident(), compile_fx.cudagraphify
    runners: list[RegionRunner] = []

    def cudagraphify(model: Callee, static_input_idxs: Sequence[int] = (), **given: Any) -> Callee:
        if threading.get_ident() != own or not given["is_inference"]:
            return torch_s(model, static_input_idxs, **given)
        mutated = given["mutated_input_idxs"]
        runner = RegionRunner(
            _aligned(model, mutated),
            static_inputs=static_input_idxs,
            mutated_inputs=mutated,
            pool=pool,
            on_plain=on_plain,
        )
        runners.append(runner)
        return _boxed(runner)

    with mock.patch.object(compile_fx, "cudagraphify", cudagraphify):
        yield runners


def _aligned(model: Callee, mutated: Collection[int]) -> Callee:
    """`model`, with tensors that lie askew copied to whole addresses: Inductor's kernels load 16 bytes at once.

    Where CUDA graphs are on, torch leaves that to whoever launches them.
    """

    def region(*args: Any) -> Any:
        inputs, written = list(args), []
        for position, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and arg.data_ptr() % ALIGNMENT:
                copied = inputs[position] = buffer_like(arg)
                without_repeats(copied).copy_(without_repeats(arg))
                written += [(arg, copied)] if position in mutated else []
        outputs = model(inputs)
        for arg, copied in written:
            arg.copy_(copied)
        return outputs

    return region


def _boxed(runner: RegionRunner) -> Callee:
    """Inductor's calling convention: one list, emptied so that the caller keeps no argument alive."""

    def run(inputs: list[Any]) -> Any:
        args = tuple(inputs)
        inputs.clear()
        return runner(*args)

    return run
