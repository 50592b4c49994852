"""Writes a folder from which a disagreement with eager can be seen again without the user's program."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from fusewright.capture.fingerprint import fingerprint_text
from fusewright.capture.graph import CapturedGraph
from fusewright.capture.variant import GraphVariant
from fusewright.config import writable_folder

_SCRIPT = '''"""Shows where a lowering of this graph disagrees with eager. Run: python {name}/run.py"""

import pathlib

import torch

from fusewright.tools.replay import replay

replay(pathlib.Path(__file__).parent)
'''


def write_reproducer(
    root: pathlib.Path, captured: CapturedGraph, args: Sequence[Any], variant: GraphVariant
) -> pathlib.Path:
    """Write graph, variant, inputs and a script; return the folder.

    Tensors are saved with `torch.save` as plain tensors, readable with `weights_only=True`.
    """
    folder = writable_folder(root / f"{captured.print}", "FUSEWRIGHT_CACHE_DIR")
    captured.copy().to_folder(folder / "graph", "Captured")
    (folder / "fingerprint.txt").write_text(fingerprint_text(captured.gm))
    (folder / "variant.json").write_text(variant.to_json())
    plain = [a.detach().clone() if isinstance(a, torch.Tensor) else _number(a) for a in args]
    torch.save(
        {"args": plain, "grads": [isinstance(a, torch.Tensor) and a.requires_grad for a in args]}, folder / "inputs.pt"
    )
    (folder / "run.py").write_text(_SCRIPT.format(name=folder.name))
    return folder


def _number(value: Any) -> int | float:
    """A Python number: floats and truth values stay what they are, symbolic integers get their value."""
    return value if isinstance(value, int | float) else int(value)
