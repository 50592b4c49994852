"""Writes what each pass did to a graph into `FUSEWRIGHT_DUMP`: before, after, diff, and one line in passes.jsonl."""

from __future__ import annotations

import difflib
import itertools
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
    """The dump of one run of the pipeline; without a folder every method does nothing.

    Attributes:
        folder: the run's own folder, or None.
        label: what is compiled: the graph and its bucket.
        attempt: 0 for the first, one more for each pass that was left out since.
        step: number of the next pass; it goes on counting over attempts, so that no file is written twice.
    """

    folder: pathlib.Path | None
    label: str
    attempt: int = 0
    step: int = 0

    @classmethod
    def open(cls, root: pathlib.Path | None, label: str) -> Dump:
        """Make a folder of its own for the run under `root`, or a dump that writes nothing where `root` is None."""
        if root is None:
            return cls(None, label)
        writable_folder(root, "FUSEWRIGHT_DUMP")
        name = re.sub(r"[^\w.=-]+", "_", label).strip("_") or "graph"
        for number in itertools.count(2):  # the same label again is another model, process or capture
            try:
                folder = root / name
                folder.mkdir()
            except FileExistsError:
                name = f"{name.removesuffix(f'.{number - 1}')}.{number}"
            else:
                break
        return cls(folder, label)

    def before(self, gm: fx.GraphModule) -> str:
        """Text of the graph before a pass; empty where nothing is dumped."""
        return str(gm.graph) if self.folder is not None else ""

    def after(
        self, gm: fx.GraphModule, name: str, before: str, rewrites: int, seconds: float, declines: Sequence[Decline]
    ) -> None:
        """Write the files of one pass that succeeded."""
        self._write(gm, name, before, {"rewrites": rewrites, "seconds": round(seconds, 6)}, declines)

    def failed(self, gm: fx.GraphModule, name: str, before: str, reason: str, declines: Sequence[Decline]) -> None:
        """Write the files of one pass that failed: "after" is what it left behind. What follows is a new attempt."""
        self._write(gm, name, before, {"failed": reason}, declines)
        self.attempt += 1

    def _write(
        self, gm: fx.GraphModule, name: str, before: str, facts: dict[str, object], declines: Sequence[Decline]
    ) -> None:
        if self.folder is None:
            return
        stem = f"{self.step:02d}_{name}"
        after = str(gm.graph)
        (self.folder / f"{stem}.before.txt").write_text(before)
        (self.folder / f"{stem}.after.txt").write_text(after)
        diff = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2)
        (self.folder / f"{stem}.diff").write_text("\n".join(diff))
        row = {"graph": self.label, "attempt": self.attempt, "pass": name, **facts, "nodes": len(gm.graph.nodes)}
        with (self.folder / "passes.jsonl").open("a") as file:
            file.write(json.dumps({**row, "declines": [asdict(d) for d in declines]}) + "\n")
        self.step += 1
