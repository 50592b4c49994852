"""Turns a rewritten graph and a variant into a callable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusewright.capture.graph import copy_graph
from fusewright.capture.variant import GraphVariant, Launch, Lowering
from fusewright.config import read_settings
from fusewright.errors import unknown_name
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.passes.frozen.hoist import UnfitWeightsError, hoist
from fusewright.pipeline.pipeline import Pipeline, PipelineResult
from fusewright.runtime.cudagraph import launch
from fusewright.runtime.fakes import BucketInputs
from fusewright.runtime.inductor.pattern_proofs import PatternProofs
from fusewright.runtime.reproducer import REPRODUCERS

Callee = Callable[..., Any]
Refuse = Callable[[str, str], None]

HOOKS = {Stage.JOINT: "joint_custom_post_pass", Stage.POST_GRAD: "post_grad_custom_pre_pass"}


class GraphHook(CustomGraphPass):
    """All passes of one stage as the single custom pass that Inductor takes there.

    The uuid is part of Inductor's cache key: it hashes the passes' sources and options, so that a changed pass never
    meets a graph that its older self made.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        passes: Sequence[Pass],
        ctx: PassContext,
        label: str,
        report: Callable[[PipelineResult], None],
    ) -> None:
        self._pipeline, self._passes, self._ctx, self._label, self._report = pipeline, tuple(passes), ctx, label, report

    def __call__(self, graph: fx.Graph) -> None:
        self._report(self._pipeline.rewrite_in_place(graph, self._passes, self._ctx, self._label))

    def uuid(self) -> bytes:
        h = hashlib.sha256(f"{self._ctx.bucket}|{self._ctx.frozen_weights}".encode())
        for one in self._passes:
            h.update(one.digest().encode())
        return h.digest()


def check_options(variant: GraphVariant) -> None:
    """Refuse options that the lowering does not have.

    Raises:
        UnknownNameError: naming the nearest known option.
    """
    known = inductor_config.get_config_copy().keys() if variant.lowering is Lowering.INDUCTOR else ()
    for name, _ in variant.options:
        if name not in known:
            raise unknown_name(f"{variant.lowering.value} option", name, known)


def _write_numbers(gm: fx.GraphModule, values: Sequence[Any]) -> None:
    """Put plain numbers among `values` where the graph uses them: AOTAutograd would make symbols of them again."""
    numbers: dict[fx.Node, Any] = {
        node: value
        for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True)
        if type(value) is int
    }
    for user in {user for node in numbers for user in node.users}:
        user.args = fx.node.map_arg(user.args, lambda arg: numbers.get(arg, arg))
        user.kwargs = fx.node.map_arg(user.kwargs, lambda arg: numbers.get(arg, arg))
    if numbers:
        gm.recompile()


def lower(
    gm: fx.GraphModule,
    inputs: BucketInputs,
    variant: GraphVariant,
    hooks: dict[Stage, GraphHook],
    refuse: Refuse,
) -> tuple[Callee, tuple[int, ...] | None]:
    """Compile `gm`, which this takes over, for `inputs`; in training the backward too.

    `refuse(node, reason)` is told of each rewrite of Inductor's own that its proof did not allow.

    Left to itself, AOTAutograd compiles a backward that saves no size when it is first called, where a failure could
    no longer lead to another lowering.

    Returns:
        A callable that takes the graph's arguments one by one, and the positions of the arguments that it mutates
        (None where the lowering does not tell).
    """
    check_options(variant)
    _write_numbers(gm, inputs.values)
    if variant.lowering is Lowering.EAGER:
        return gm.forward, None
    compiled: Any
    backward_now = functorch_config.patch(force_non_lazy_backward_lowering=True)
    with tracing(TracingContext(inputs.mode)) as context, backward_now:
        if variant.lowering is Lowering.AOT_EAGER:
            compiled = torch._dynamo.lookup_backend("aot_eager")(gm, inputs.values)
        else:
            proofs = PatternProofs(refuse, read_settings().cache_dir / REPRODUCERS)
            patches: dict[str, Any] = {HOOKS[stage]: hook for stage, hook in hooks.items()}
            patches |= {"joint_custom_pre_pass": proofs, **dict(variant.options)}
            patches |= launch.PATCHES if variant.launch is Launch.CUDA_GRAPHS else {}
            with proofs.watching():
                compiled = compile_fx(gm, inputs.values, config_patches=patches)
        assert context is not None
        metadata = context.fw_metadata
    # not `mutated_inp_runtime_indices`: that leaves out the inputs that the compiled graph itself writes to
    mutated = None if metadata is None else tuple(i for i, x in enumerate(metadata.input_info) if x.mutates_data)
    assert callable(compiled), compiled
    return compiled, mutated


def lower_frozen(
    gm: fx.GraphModule,
    inputs: BucketInputs,
    variant: GraphVariant,
    hooks: dict[Stage, GraphHook],
    refuse: Refuse,
    args: Sequence[Any],
    *,
    eager: Callee,
    report: Callable[[str], None],
) -> tuple[Callee, tuple[int, ...] | None]:
    """`lower`, but what `gm` computes from weights alone is computed once, and again when one has changed.

    Args:
        args: real arguments of the call that is lowered for.
        eager: runs the pristine graph, where cached values must not be used.
        report: told why, each time that happens.
    """
    hoisted = hoist(copy_graph(gm), args)
    if hoisted is None:
        return lower(gm, inputs, variant, hooks, refuse)
    try:
        values = hoisted.lowered_values(inputs.mode, inputs.values, args)
    except UnfitWeightsError as error:
        report(str(error))
        return lower(gm, inputs, variant, hooks, refuse)
    inputs.values = values
    call, mutated = lower(hoisted.main, inputs, variant, hooks, refuse)
    return hoisted.bind(call, mutated, eager, report)
