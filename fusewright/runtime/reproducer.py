"""Writes a folder from which a disagreement with eager can be seen again without the user's program."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusewright.capture.fingerprint import fingerprint_text
from fusewright.capture.graph import CapturedGraph
from fusewright.capture.variant import GraphVariant
from fusewright.config import writable_folder

REPRODUCERS = "reproducers"  # folder below the cache folder
_SCRIPT = '''"""Shows where a lowering of this graph disagrees with eager. Run: python {name}/run.py"""

import pathlib

import torch

from fusewright.tools.replay import replay

replay(pathlib.Path(__file__).parent)
'''

_REWRITE = '''"""What Inductor would put in the place of a part of a graph, beside that part. Needs nothing but torch.

{reason}

Run: python {name}/run.py
"""

import pathlib
from math import inf, nan

import torch
from torch import device

{before}

{after}

inputs = torch.load(pathlib.Path(__file__).parent / "inputs.pt", weights_only=True)
results = [
    function(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)) for function in (before, after)
]
for number, (old, new) in enumerate(zip(*results)):
    print(f"output {{number}}: {{old.dtype}} {{tuple(old.shape)}} before, {{new.dtype}} {{tuple(new.shape)}} after")
    if old.shape == new.shape:
        print(f"  largest difference: {{(old.double() - new.double()).abs().max().item()}}")
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


def write_rewrite(
    folder: pathlib.Path, before: fx.GraphModule, after: fx.GraphModule, inputs: Sequence[Any], reason: str
) -> None:
    """Write a script that runs part of a graph and what would replace it on `inputs`, unless it is there.

    Raises:
        CacheFolderError: the folder cannot be written.
    """
    if (folder / "run.py").exists():
        return
    writable_folder(folder, "FUSEWRIGHT_CACHE_DIR")
    torch.save(
        [x.detach().clone() if isinstance(x, torch.Tensor) else _number(x) for x in inputs], folder / "inputs.pt"
    )
    texts = {
        name: gm.code.strip().replace("def forward(self, ", f"def {name}(", 1)
        for name, gm in (("before", before), ("after", after))
    }
    (folder / "run.py").write_text(_REWRITE.format(name=folder.name, reason=reason, **texts))


def _number(value: Any) -> int | float:
    """A Python number: floats and truth values stay what they are, symbolic integers get their value."""
    return value if isinstance(value, int | float) else int(value)
