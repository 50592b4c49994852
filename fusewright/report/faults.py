"""Narrows a saved disagreement with eager down: to a pass and a rewrite (`bisect`), to a few nodes (`minify`)."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from torch import fx

from fusewright.capture.graph import CapturedGraph, copy_graph
from fusewright.errors import UserInputError
from fusewright.runtime.reproducer import write_reproducer
from fusewright.tools.bisect import Culprit, bisect
from fusewright.tools.minify import Fails, fails_by_passes, minify
from fusewright.tools.oracle import context_of, forward_passes
from fusewright.tools.replay import compare_lowered, lowered_mismatch, variant_of
from fusewright.tools.reproduced import load


def find_culprit(folder: pathlib.Path, console: Console) -> Culprit | None:
    """The first pass and rewrite after which the saved graph is wrong: in eager, else as the saved variant lowers it.

    Args:
        folder: a reproducer, as fallbacks of the kind `verification` name it.
        console: told what is going on.

    Returns:
        None where everything agrees on this machine and these versions. Frozen weights, passes of the user's own and
        launches by CUDA graphs are not replayed.

    Raises:
        UserInputError: the folder is no reproducer.
    """
    taken, variant = load(folder), variant_of(folder)
    passes = forward_passes(context_of(taken.inputs))
    if variant.passes is not None:
        passes = tuple(one for one in passes if one.name in variant.passes)
    with console.status("rewriting, and comparing in eager"):
        found = bisect(taken.graph, taken.inputs, passes=passes)
    if found is not None:
        return found
    with console.status(f"no rewrite is wrong in eager; lowering each half by {variant.label()}"):
        found = bisect(taken.graph, taken.inputs, passes=passes, verdict=lowered_mismatch(variant))
        if found is not None:
            return found
        whole = compare_lowered(taken.graph, taken.inputs, variant)
    if whole.ok is not False:
        return None
    return Culprit("of a later stage", None, "", f"only after autograd does it disagree: {whole.detail}", (), 1)


def shrink(folder: pathlib.Path, output: pathlib.Path, console: Console) -> tuple[pathlib.Path, int, int]:
    """Write the smallest graph found that still disagrees as a reproducer below `output`; Ctrl-C keeps the best so far.

    Returns:
        The new reproducer, and the number of nodes before and after.

    Raises:
        UserInputError: the folder is no reproducer, or its graph agrees with eager on this machine.
    """
    taken, variant = load(folder), variant_of(folder)
    with console.status("looking for the failure") as status:
        fails: Fails = fails_by_passes()
        if not fails(copy_graph(taken.graph), taken.inputs):
            fails = lambda gm, args: compare_lowered(gm, args, variant).ok is False  # noqa: E731
        kept = _Kept(fails, lambda nodes, tries: status.update(f"{nodes} nodes after {tries} tries"))
        try:
            minify(taken.graph, taken.inputs, kept)
        except KeyboardInterrupt:
            if kept.best is None:
                raise
    assert kept.best is not None, "minify raises where the whole graph does not fail"
    graph, args = kept.best
    small = CapturedGraph.build(graph, list(args), {})
    written = write_reproducer(writable(output), small, args, variant)
    again = load(written)
    assert fails(again.graph, again.inputs), f"{written} does not fail any more when it is read back"
    return written, len(taken.graph.graph.nodes), len(graph.graph.nodes)


def writable(output: pathlib.Path) -> pathlib.Path:
    """`output`, made if need be.

    Raises:
        UserInputError: it cannot be written to.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"--output: {output} cannot be made: {error.strerror}.") from error
    if not os.access(output, os.W_OK):
        raise UserInputError(f"--output: {output} cannot be written to.")
    return output


class _Kept:
    """A predicate that keeps the smallest graph it was true for."""

    def __init__(self, fails: Fails, tell: Callable[[int, int], None]) -> None:
        self._fails, self._tell, self._tries = fails, tell, 0
        self.best: tuple[fx.GraphModule, tuple[Any, ...]] | None = None

    def __call__(self, gm: fx.GraphModule, args: Sequence[Any]) -> bool:
        self._tries += 1
        failed = self._fails(copy_graph(gm), args)
        if failed and (self.best is None or len(gm.graph.nodes) <= len(self.best[0].graph.nodes)):
            self.best = (gm, tuple(args))
        if self.best is not None:
            self._tell(len(self.best[0].graph.nodes), self._tries)
        return failed


def folder_of(text: str) -> pathlib.Path:
    """The reproducer that a user named by its folder or by the script in it.

    Raises:
        UserInputError: there is no such folder.
    """
    path = pathlib.Path(text)
    folder = path.parent if path.name == "run.py" else path
    if not folder.is_dir():
        raise UserInputError(
            f"folder: {folder} does not exist; give a reproducer, as a `verification` fallback names it."
        )
    return folder
