"""What graphs stand for: the fake value of a node, whoever traced it, and the device of a call's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx


def value_of(node: fx.Node) -> Any:
    """The fake value of `node`: meta "val" in ATen graphs, "example_value" in Dynamo's; None where unknown."""
    if "val" in node.meta:
        return node.meta["val"]
    return node.meta.get("example_value")


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor of `node`, or None where it is no node or holds something else."""
    value = value_of(node) if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def device_of(args: Sequence[Any]) -> torch.device:
    """Where a graph with these arguments runs: on the accelerator that a tensor lies on, else on the CPU.

    Numbers such as a timestep often stay on the host while the work does not.
    """
    devices = [a.device for a in args if isinstance(a, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def shape_env_of(gm: fx.GraphModule) -> Any:
    """The ShapeEnv of the graph's symbolic sizes, or None where all sizes are numbers."""
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = value_of(node)
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            for size in sizes:
                if isinstance(size, torch.SymInt):
                    return size.node.shape_env
    return None
