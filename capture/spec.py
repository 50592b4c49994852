"""What a legal graph is; the pipeline checks it after every pass that rewrote something."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from fusewright.capture.values import value_of


class IllegalGraph(Exception):
    """A graph breaks a rule; the message names the rule and the node. The pipeline turns it into a rollback."""


def check_graph(
    gm: fx.GraphModule, *, placeholders: Sequence[str] | None = None, known: Collection[str] | None = None
) -> None:
    """Check the rules that every graph must keep between two passes.

    1. Structure: `Graph.lint` (defined before use, unique names, targets exist).
    2. Interface: placeholders keep their number, order and names.
    3. Values: a node that a pass made and others use carries a fake value, so that later passes can reason about it.

    Args:
        gm: the graph after a pass.
        placeholders: their names before the pass.
        known: names of all nodes before the pass.

    Raises:
        IllegalGraph: naming the rule and the node.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise IllegalGraph(f"structure: {error}") from error
    ours = [n.name for n in gm.graph.nodes if n.op == "placeholder"]
    if placeholders is not None and ours != list(placeholders):
        raise IllegalGraph(f"interface: placeholders {ours[:8]} are not those before the pass {list(placeholders)[:8]}")
    for node in gm.graph.nodes if known is not None else ():
        if node.op == "call_function" and node.users and node.name not in known and value_of(node) is None:
            raise IllegalGraph(f"values: new node {node.name} ({node.target}) carries no fake value")
