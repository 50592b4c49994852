"""A matched place: the nodes it covers, the tensors it reads, and how its replacement is put in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fusewright.fusion.match.sizes import same
from fusewright.fusion.match.view import shape_of, spelling
from fusewright.fusion.match.writes import written_since
from fusewright.passes.base import tensor_of, value_of

Labels = tuple[str | int, ...]
"""The name of each axis ("b", "n", "t", ...), or 1 for an axis of one element."""


class RefusedError(Exception):
    """A place that was looked at is not what the matcher looks for; carries the node that differs and why."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Site:
    """One place that a matcher understood.

    Attributes:
        output: the node whose value the replacement takes over.
        inputs: the tensors that replacement and original read, in the order of the replacement's placeholders.
        labels: named axes of each input, and of each matched node whose arguments spell out a shape.
        sizes: concrete size of each axis name for a proof; a name that is missing has no meaning there.
        magnitudes: standard deviation of the inputs in each draw of a proof.
        nodes: everything from the inputs to the output, in graph order.
        autocast: the dtype that an ambient autocast made matmuls run in, or None.
        masks: those of `inputs` that are masks, and the sign with which they are added; a proof draws them with hidden
            keys and hidden rows.
        causal: masks that are known to be causal, and whether True keeps a key (additive ones: False).
        classes: those of `inputs` that hold class numbers: how many classes there are, and the number that is ignored.
    """

    output: fx.Node
    inputs: tuple[fx.Node, ...]
    labels: Mapping[fx.Node, Labels]
    sizes: Mapping[str, int]
    autocast: torch.dtype | None = None
    masks: Mapping[fx.Node, int] = field(default_factory=dict)
    causal: Mapping[fx.Node, bool] = field(default_factory=dict)
    classes: Mapping[fx.Node, tuple[int, int]] = field(default_factory=dict)
    magnitudes: tuple[float, float, float] = (1.0, 1.0, 1.0)
    nodes: tuple[fx.Node, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", _between(self.inputs, self.output))

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of `node` in a proof."""
        return tuple(axis if isinstance(axis, int) else self.sizes[axis] for axis in self.labels[node])


def _between(inputs: Iterable[fx.Node], output: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes of tensors on the paths from `inputs` to `output`, the latter included, in the order of the graph."""
    known, found, stack = set(inputs), {output}, [output]
    while stack:
        for parent in stack.pop().all_input_nodes:
            if parent in known or parent in found or tensor_of(parent) is None:
                continue
            if parent.op not in ("call_function", "call_method"):
                raise RefusedError(output, f"it also reads {parent.name}")
            found.add(parent)
            stack.append(parent)
    return tuple(sorted(found))  # nodes compare by their place in the graph


def same_meta(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fake tensors agree in what the rest of the graph was traced for; strides may differ."""
    return a.dtype == b.dtype and a.device == b.device and a.dim() == b.dim()


def splice(
    gm: fx.GraphModule, site: Site, replacement: fx.GraphModule, shared: dict[str, fx.Node] | None = None
) -> fx.Node:
    """Put the nodes of `replacement` in front of the site's output with fake values, and return its result.

    shared: what earlier sites of this graph made of masks alone, by its text; one with equal text is used again.
    """
    values: dict[fx.Node, fx.Node] = {}
    of_masks = set(site.masks)
    feeds = iter(site.inputs)
    result: fx.Node | None = None
    with gm.graph.inserting_before(site.output):
        for node in replacement.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(feeds)
            elif node.op == "output":
                result = values[node.args[0]]
            else:
                key, used = _text(node, values), [values[n] for n in node.all_input_nodes]
                known = shared.get(key) if shared is not None and of_masks.issuperset(used) else None
                if known is None or known > site.output or any(written_since(n, known) for n in used):
                    known = gm.graph.node_copy(node, values.__getitem__)
                    set_fake_value(known, site.output)
                values[node] = known
                if shared is not None and of_masks.issuperset(used):
                    shared[key] = known
                    of_masks.add(known)
    assert result is not None, replacement.code
    old, new = tensor_of(site.output), tensor_of(result)
    assert old is not None, site.output
    assert new is not None, result
    assert same_meta(old, new), (old, new, replacement.code)
    return result


def _text(node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> str:
    """What `node` does to which nodes; names are unique in a graph."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return f"{node.op} {node.target} {args} {kwargs}"


def erase(gm: fx.GraphModule, nodes: Iterable[fx.Node]) -> None:
    """Remove those of `nodes` that nothing uses any more, last ones first."""
    # In-place nodes among them wrote to tensors that only their own site read.
    for node in reversed(tuple(nodes)):
        if not node.users:
            gm.graph.erase_node(node)


def fake_key(node: fx.Node) -> str:
    """Where this graph keeps fake values: "val" (ATen) or "example_value" (Dynamo)."""
    return "val" if "val" in node.meta else "example_value"


def set_fake_value(node: fx.Node, like: fx.Node) -> None:
    """Run `node` on the fake values of its arguments and note the result; its provenance is that of `like`."""
    mode = value_of(like).fake_mode
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    with mode, torch.enable_grad():
        value = call(node, args, kwargs)
    node.meta[fake_key(like)] = value
    for name in ("stack_trace", "nn_module_stack", "source_fn_stack"):
        if name in like.meta:
            node.meta[name] = like.meta[name]


def call(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Do what `node` does with other arguments."""
    if node.op == "call_method":
        assert isinstance(node.target, str), node
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    assert node.op == "call_function", node
    assert callable(node.target), node
    return node.target(*args, **kwargs)


def on_cpu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a node with every device replaced by the CPU."""
    cpu = torch.device("cpu")
    kept = {key: cpu if key == "device" else value for key, value in kwargs.items()}
    swapped: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda x: cpu if isinstance(x, torch.device) else x, (tuple(args), kept)
    )
    return swapped


def describe_users(node: fx.Node, but: fx.Node | None = None) -> str:
    """The users of `node` in words, for a reason."""
    others = [user for user in node.users if user is not but]
    if any(user.op == "output" for user in others):
        return "returned by the model"
    return "also used by " + ", ".join(f"{user.name} ({spelling(user)})" for user in others[:3])


def broadcast_labels(node: fx.Node, full: tuple[Any, ...], names: Labels) -> Labels | None:
    """Labels of a tensor that broadcasts to `full` from the right; None where it does not."""
    shape = tuple(shape_of(node))
    if len(shape) > len(full):
        return None
    labels: list[str | int] = []
    for size, whole, name in zip(shape, full[len(full) - len(shape) :], names[len(full) - len(shape) :], strict=True):
        if same(size, whole):
            labels.append(name)
        elif same(size, 1):
            labels.append(1)
        else:
            return None
    return tuple(labels)
