"""Reads the folder of a reproducer back as a captured graph with fake values, for bisection and minifying."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from fusewright.errors import UserInputError
from fusewright.tools.pass_tester import Capture

FILES = ("graph/module.py", "inputs.pt", "variant.json")


def load(folder: pathlib.Path) -> Capture:
    """The graph and the arguments that `runtime.reproducer.write_reproducer` saved.

    Sizes are those of the saved call; the graph is read as one of fixed shapes.

    Raises:
        UserInputError: the folder is no reproducer.
    """
    check_folder(folder)
    saved = torch.load(folder / "inputs.pt", weights_only=True)
    args = tuple(
        a.requires_grad_(grad) if isinstance(a, torch.Tensor) else a
        for a, grad in zip(saved["args"], saved["grads"], strict=True)
    )
    spec = importlib.util.spec_from_file_location(f"reproduced_{folder.name}", folder / "graph" / "module.py")
    assert spec is not None, folder
    assert spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    gm = fx.symbolic_trace(module.Captured())
    fill_values(gm, args)
    return Capture(gm, args)


def check_folder(folder: pathlib.Path) -> None:
    """Refuse a folder that `runtime.reproducer.write_reproducer` did not write.

    Raises:
        UserInputError: naming what it lacks.
    """
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise UserInputError(f"folder: {folder} is no reproducer; it lacks {', '.join(missing)}.")


def fill_values(gm: fx.GraphModule, args: Sequence[Any]) -> None:
    """Note on every node of `gm` what it computes for `args`, as a fake value, so that passes can read it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a, static_shapes=True) if isinstance(a, torch.Tensor) else a for a in args]
    with mode, torch.enable_grad():
        _Noting(gm).run(*fakes)


class _Noting(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = value
        return value
