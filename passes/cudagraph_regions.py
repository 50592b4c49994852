"""Plans which runs of an ATen graph one CUDA graph each can hold, and says why each run ends where it ends.

A CUDA graph replays device work with the addresses, sizes and host values of its capture. So a node stays outside if it
runs on the host, reads the device from the host, takes a number that was read so, copies between devices, has effects
beyond its outputs, or belongs to a collective: its wait looks up work that a replay never registers.

The analysis is static and errs to the safe side for operators it can see into; a custom operator that synchronizes in
secret is caught at capture, by `fusewright.runtime.cudagraph.runner`, and counted there.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass, field

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from fusewright.capture.values import value_of

__all__ = ["Boundary", "Reason", "Region", "plan_regions"]


class Boundary(enum.Enum):
    """Why a region starts or ends, or why a node cannot be captured."""

    GRAPH_START = "the graph starts"
    GRAPH_END = "the graph ends"
    CPU_OP = "runs on the host"
    HOST_SCALAR = "takes a number from host memory that a replay would not read again"
    DEVICE_COPY = "copies between devices"
    DEVICE_CHANGE = "another device goes on"
    HOST_READ = "the host waits for the device and reads from it"
    UNBACKED_SIZE = "depends on a number that the host reads from the device"
    EFFECT = "has an effect beyond its outputs"
    COLLECTIVE = "starts or waits for communication"
    CONTROL_FLOW = "the host chooses what runs next"
    UNSAFE_OP = "cannot be replayed"
    UNKNOWN = "nothing is known about it"
    NO_WORK = "starts no work on the device"


@dataclass(frozen=True)
class Reason:
    """One boundary or refusal: its kind, the node it is about ("" at the ends of the graph), and words for a reader."""

    kind: Boundary
    node: str
    text: str


@dataclass(frozen=True)
class Region:
    """Nodes that run together.

    Attributes:
        nodes: names in graph order. Over all regions: every call in the graph once, but for `constants`.
        capturable: whether one CUDA graph can hold them.
        device: where a capturable region runs, else None.
        launches: nodes that start device work; views and allocations are not counted.
        constants: names of host numbers known now (such as the -inf of a mask) that the region uses. Several regions
            can use one; each needs its own copy, since a region takes no host tensors.
        starts: why the region before ended.
        ends: why this region ends; equals `starts` of the next.
        refusals: one for each node that cannot be captured; empty if `capturable`.
    """

    nodes: tuple[str, ...]
    capturable: bool
    device: torch.device | None
    launches: int
    constants: tuple[str, ...]
    starts: Reason
    ends: Reason
    refusals: tuple[Reason, ...]


def plan_regions(gm: fx.GraphModule, *, inlines_constants: bool = False) -> list[Region]:
    """Split an ATen-form graph, whose nodes carry fake values in `meta["val"]`, into regions in execution order.

    Changes nothing. Takes time linear in nodes plus edges.

    Args:
        gm: the graph.
        inlines_constants: whether regions will be compiled by something that writes host constants into its kernels, as
            Inductor does. ATen's own `where`, the usual place of a mask's -inf, copies them to the device instead.
    """
    constants = _host_constants(gm)
    runs: list[_Run] = []
    run_of: dict[fx.Node, _Run] = {}
    waiting: list[fx.Node] = []  # sizes before the first region
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or node in constants:
            continue
        verdict = _judge(node, constants, inlines_constants)
        if verdict is None:  # a size, or one part of a result: goes where its producer is
            home = (
                next((run_of[arg] for arg in node.all_input_nodes if arg in run_of), None) if _is_part(node) else None
            )
            home = home or (runs[-1] if runs else None)
            if home is None:
                waiting.append(node)
                continue
        else:
            home = _home(runs, node, verdict)
        home.nodes.append(node)
        run_of[node] = home
    if waiting and not runs:
        runs.append(_Run(None, refusals=[Reason(Boundary.NO_WORK, waiting[0].name, Boundary.NO_WORK.value)]))
    if waiting:
        runs[0].nodes[:0] = waiting
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    return _regions(_merge_idle(runs), constants, order)


@dataclass
class _Run:
    """A region in the making: on `device` if capturable, else with `refusals`."""

    device: torch.device | None
    refusals: list[Reason] = field(default_factory=list)
    nodes: list[fx.Node] = field(default_factory=list)
    launches: int = 0


def _home(runs: list[_Run], node: fx.Node, verdict: torch.device | Reason) -> _Run:
    """The run that `node` joins: the last one if it is of the same kind and device, else a new one."""
    device = verdict if isinstance(verdict, torch.device) else None
    if not runs or runs[-1].device != device:
        runs.append(_Run(device))
    if isinstance(verdict, Reason):
        runs[-1].refusals.append(verdict)
    else:
        runs[-1].launches += _launches(node)
    return runs[-1]


def _merge_idle(runs: list[_Run]) -> list[_Run]:
    """Turn capturable runs that start no work into refused ones, and join refused neighbours."""
    merged: list[_Run] = []
    for run in runs:
        if run.device is not None and run.launches == 0:
            reason = Reason(Boundary.NO_WORK, run.nodes[0].name, f"{run.nodes[0].name} {Boundary.NO_WORK.value}")
            run = _Run(None, [reason], run.nodes)
        if merged and merged[-1].device is None and run.device is None:
            merged[-1].refusals += run.refusals
            merged[-1].nodes += run.nodes
        else:
            merged.append(run)
    return merged


def _regions(runs: list[_Run], constants: set[fx.Node], order: dict[fx.Node, int]) -> list[Region]:
    starts = Reason(Boundary.GRAPH_START, "", Boundary.GRAPH_START.value)
    regions = []
    for position, run in enumerate(runs):
        ends = _boundary(run, runs[position + 1] if position + 1 < len(runs) else None)
        regions.append(
            Region(
                nodes=tuple(node.name for node in sorted(run.nodes, key=order.__getitem__)),
                capturable=run.device is not None,
                device=run.device,
                launches=run.launches,
                constants=_needed_constants(run, constants, order),
                starts=starts,
                ends=ends,
                refusals=tuple(run.refusals),
            )
        )
        starts = ends
    return regions


def _boundary(run: _Run, following: _Run | None) -> Reason:
    if following is None:
        return Reason(Boundary.GRAPH_END, "", Boundary.GRAPH_END.value)
    if following.refusals:
        return following.refusals[0]
    if run.refusals:
        return run.refusals[-1]
    first = following.nodes[0].name
    return Reason(
        Boundary.DEVICE_CHANGE, first, f"{first} runs on {following.device}, the nodes before on {run.device}"
    )


def _needed_constants(run: _Run, constants: set[fx.Node], order: dict[fx.Node, int]) -> tuple[str, ...]:
    needed: set[fx.Node] = set()
    todo = [arg for node in run.nodes for arg in node.all_input_nodes if arg in constants]
    while todo:
        node = todo.pop()
        if node not in needed:
            needed.add(node)
            todo += [arg for arg in node.all_input_nodes if arg in constants]
    return tuple(node.name for node in sorted(needed, key=order.__getitem__))


# ---- one node


def _judge(node: fx.Node, constants: set[fx.Node], inlines: bool) -> torch.device | Reason | None:
    """The device `node` can be captured on, or why it cannot, or None where it starts nothing and fits anywhere."""
    refusal = _refuse_by_operator(node)
    if refusal is None and (_is_part(node) or _is_size(node)):
        return None
    refusal = refusal or _refuse_by_sizes(node)
    if refusal is None:
        device_or_refusal = _device(node, constants, inlines)
        if isinstance(device_or_refusal, torch.device):
            return device_or_refusal
        refusal = device_or_refusal
    kind, detail = refusal
    return Reason(kind, node.name, f"{node.name} ({node.target}) {kind.value}{': ' if detail else ''}{detail}")


_Refusal = tuple[Boundary, str]

_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem"})
# Tags of torch name most operators that read on the host; these lack one.
_READ_ON_HOST = frozenset({"aten::is_nonzero", "aten::_linalg_check_errors", "aten::_ctc_loss", "aten::item"})
_UNSAFE = {
    "aten::_linalg_eigh": "cuSOLVER's solver cannot be captured",
    "aten::set_": "changes which memory a tensor has",
    "aten::resize_": "changes the memory of a tensor",
    "inductor::resize_storage_bytes_": "changes the memory of a tensor",
    "aten::_fused_moving_avg_obs_fq_helper": "branches on the host",
    "aten::_fused_moving_avg_obs_fq_helper_functional": "branches on the host",
}
_HOP_CAPTURABLE = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "graphsafe_run_with_rng_state",
        "triton_kernel_wrapper_functional",
        "triton_kernel_wrapper_mutation",
    }
)
_HOP_REFUSED = {
    "with_effects": (Boundary.EFFECT, ""),
    "cond": (Boundary.CONTROL_FLOW, ""),
    "switch": (Boundary.CONTROL_FLOW, ""),
    "while_loop": (Boundary.CONTROL_FLOW, ""),
    "run_and_save_rng_state": (Boundary.UNSAFE_OP, "moves the generator's state over the host"),
    "run_with_rng_state": (Boundary.UNSAFE_OP, "moves the generator's state over the host"),
}


def _refuse_by_operator(node: fx.Node) -> _Refusal | None:
    """Refuse for what the operator is, whatever its tensors."""
    if node.op != "call_function":
        return Boundary.UNKNOWN, f"a {node.op} is not ATen form"
    target = node.target
    if isinstance(target, HigherOrderOperator):
        name = target.name()
        if name not in _HOP_CAPTURABLE:
            return _HOP_REFUSED.get(name, (Boundary.UNKNOWN, "a higher-order operator"))
        wrapped = node.args[0] if name.startswith("auto_functionalized") else None
        return _refuse_overload(wrapped, node) if isinstance(wrapped, OpOverload) else None
    return _refuse_overload(target, node) if isinstance(target, OpOverload) else None


def _refuse_overload(op: OpOverload, node: fx.Node) -> _Refusal | None:
    schema = op._schema
    if op.namespace in _COLLECTIVES:
        return Boundary.COLLECTIVE, ""
    if schema.name in _UNSAFE:
        return Boundary.UNSAFE_OP, _UNSAFE[schema.name]
    if torch.Tag.cudagraph_unsafe in op.tags:
        return Boundary.UNSAFE_OP, "its author says so"
    if schema.name in _READ_ON_HOST or torch.Tag.data_dependent_output in op.tags:
        return Boundary.HOST_READ, ""
    if schema.name in ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index_put"):
        return (Boundary.HOST_READ, "counts the true entries of a mask") if _has_mask_index(node) else None
    if torch.Tag.dynamic_output_shape in op.tags:
        return Boundary.HOST_READ, "the size of its output"
    if (not schema.returns and not schema.is_mutable) or _impure(node, op):
        return Boundary.EFFECT, ""
    return None


def _impure(node: fx.Node, op: OpOverload) -> bool:
    """Whether torch lists the operator as having side effects; writing to an argument alone does not count."""
    return not op._schema.is_mutable and node.is_impure(impure_random=False)


def _has_mask_index(node: fx.Node) -> bool:
    indices = node.args[1] if len(node.args) > 1 else node.kwargs["indices"]
    tensors = _tensors([value_of(index) for index in indices if isinstance(index, fx.Node)])  # type: ignore[union-attr]
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _refuse_by_sizes(node: fx.Node) -> _Refusal | None:
    if not isinstance(node.target, OpOverload | HigherOrderOperator):
        return Boundary.UNKNOWN, "not an ATen operator"
    if value_of(node) is None and not (isinstance(node.target, OpOverload) and not node.target._schema.returns):
        return Boundary.UNKNOWN, "no meta['val']"
    for value in (value_of(node), *(value_of(arg) for arg in node.all_input_nodes)):
        symbols = free_unbacked_symbols(value) if value is not None else ()
        if symbols:
            return Boundary.UNBACKED_SIZE, ", ".join(sorted(map(str, symbols)))
    return None


def _device(node: fx.Node, constants: set[fx.Node], inlines: bool) -> torch.device | _Refusal:
    """The one CUDA device that all tensors of `node` lie on, or why there is none."""
    outputs = [tensor.device for tensor in _tensors(value_of(node))]
    inputs = [
        (arg, tensor) for arg in node.all_input_nodes if arg not in constants for tensor in _tensors(value_of(arg))
    ]
    if any(tensor.layout != torch.strided for tensor in (*_tensors(value_of(node)), *(t for _, t in inputs))):
        return Boundary.UNSAFE_OP, "a sparse tensor"
    devices = {*outputs, *(tensor.device for _, tensor in inputs)}
    on_cuda = {device for device in devices if device.type == "cuda"}
    if not on_cuda:
        return Boundary.CPU_OP, ", ".join(sorted(map(str, devices)))
    pointwise = isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
    if devices == on_cuda and len(on_cuda) == 1:
        # A pointwise kernel takes a host number as an argument; every other operator copies it to the device.
        takes_number = pointwise and (inlines or node.target != torch.ops.aten.where.self)
        if any(arg in constants for arg in node.all_input_nodes) and not takes_number:
            return Boundary.DEVICE_COPY, "of a host constant"
        return on_cuda.pop()
    scalars = [arg for arg, tensor in inputs if tensor.device.type == "cpu" and tensor.dim() == 0]
    if pointwise and scalars and all(tensor.is_cuda or arg in scalars for arg, tensor in inputs):
        return Boundary.HOST_SCALAR, scalars[0].name
    return Boundary.DEVICE_COPY, " and ".join(sorted(map(str, devices)))


def _launches(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return True
    schema = node.target._schema
    view = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in schema.returns)
    return not view and not schema.name.startswith(("aten::empty", "aten::new_empty", "aten::_unsafe_view"))


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def _is_size(node: fx.Node) -> bool:
    """Whether `node` is arithmetic on sizes: no tensor goes in or comes out, or only a size is asked of one."""
    if isinstance(node.target, OpOverload) and node.target._schema.name.startswith("aten::sym_"):
        return not _tensors(value_of(node)) and bool(node.target._schema.returns)
    return isinstance(value_of(node), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool) and not any(
        _tensors(value_of(arg)) for arg in node.all_input_nodes
    )


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


# ---- numbers in host memory that are known now


def _host_constants(gm: fx.GraphModule) -> set[fx.Node]:
    """Host tensors without dimensions whose value cannot change between replays."""
    constants: set[fx.Node] = set()
    for node in gm.graph.nodes:
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.dim() != 0:
            continue
        if any(_writes(user) for user in node.users):
            continue
        if node.op == "get_attr":
            fixed = str(node.target).startswith("_tensor_constant")  # what tracing made of torch.tensor(0.5)
        else:
            fixed = node.op == "call_function" and _is_fixed_call(node, constants)
        if fixed:
            constants.add(node)
    return constants


def _is_fixed_call(node: fx.Node, constants: set[fx.Node]) -> bool:
    op = node.target
    if not isinstance(op, OpOverload) or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if op._schema.name.startswith("aten::empty") or _refuse_overload(op, node) is not None:
        return False
    return all(arg in constants for arg in node.all_input_nodes)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
