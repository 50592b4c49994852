"""Writes what each pass did to a graph into `FUSEWRIGHT_DUMP`: before, after, diff, and one line in passes.jsonl."""

from __future__ import annotations

import difflib
import json
import pathlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import fx

from fusewright.config import writable_folder
from fusewright.passes.base import Decline


@dataclass
class Dump:
    """The dump of one run of the pipeline; without a folder every method does nothing."""

    folder: pathlib.Path | None
    label: str
    step: int = 0

    @classmethod
    def open(cls, root: pathlib.Path | None, label: str) -> Dump:
        """Make the run's folder under `root`, or a dump that writes nothing where `root` is None."""
        if root is None:
            return cls(None, label)
        folder = root / re.sub(r"[^\w.=-]+", "_", label)
        return cls(writable_folder(folder, "FUSEWRIGHT_DUMP"), label)

    def before(self, gm: fx.GraphModule) -> str:
        """Text of the graph before a pass; empty where nothing is dumped."""
        return str(gm.graph) if self.folder is not None else ""

    def after(
        self, gm: fx.GraphModule, name: str, before: str, rewrites: int, seconds: float, declines: Sequence[Decline]
    ) -> None:
        """Write the files of one pass."""
        if self.folder is None:
            return
        stem = f"{self.step:02d}_{name}"
        after = str(gm.graph)
        (self.folder / f"{stem}.before.txt").write_text(before)
        (self.folder / f"{stem}.after.txt").write_text(after)
        diff = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2)
        (self.folder / f"{stem}.diff").write_text("\n".join(diff))
        row = {
            "graph": self.label,
            "pass": name,
            "rewrites": rewrites,
            "seconds": round(seconds, 6),
            "nodes": len(gm.graph.nodes),
            "declines": [asdict(d) for d in declines],
        }
        with (self.folder / "passes.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.step += 1
