"""Proves what Inductor's own patterns put in place of what, match by match.

Inductor finds attention by patterns traced from examples. They compare operators and ignore every integer and list, so
that a softmax over another axis, a permutation of other axes or a fill with another constant counts as the same. What
such a match covers and what replaces it are run here on random inputs, hidden rows among them, with float64 as the
judge. Where they differ the graph stays as it was. What a handler of Inductor's rewrites and cannot be run (random
numbers, too large) stands unproven, a traced replacement does not; patterns that only choose a lowering are not seen.

CPU only: no GPU has run these proofs yet, so that a match there is left to the verification of the first call.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils._python_dispatch import _disable_current_modes

from fusewright import numerics, trees
from fusewright.fusion.match import proof, site
from fusewright.runtime.inductor import rewrite_proof
from fusewright.runtime.inductor.rewrite_proof import Refusal, Region
from fusewright.runtime.reproducer import write_rewrite

_VERDICTS: dict[str, Refusal | None] = {}
"""Why a rewrite is refused (None: proven) by its text; a repeated layer is proven once in a process."""

_ACTIVE = threading.local()
_LOCK = threading.RLock()  # two threads that patched by turns would take off each other's guard


class PatternProofs(CustomGraphPass):
    """Guards the pattern rewrites of the compilations inside `watching()`, of this thread alone.

    Given to Inductor as a custom pass that changes nothing, so that its digest is part of the cache keys: what a plain
    torch.compile made of the same graph is never taken for ours. A custom pass that the user has set in the same place
    runs too; patterns that it applies are proven like Inductor's.
    """

    def __init__(self, refuse: Callable[[str, str], None], folder: pathlib.Path | None = None) -> None:
        """`refuse(node, reason)` is told about each match that is not rewritten; reproducers go below `folder`."""
        self._refuse, self._folder = refuse, folder
        theirs = inductor_config.joint_custom_pre_pass
        self._theirs: list[Any] = theirs if isinstance(theirs, list) else [theirs] if theirs else []

    def __call__(self, graph: fx.Graph) -> None:
        """Run the user's own passes; the proofs are made where a pattern has matched."""
        for one in self._theirs:
            one(graph)

    def uuid(self) -> Any:
        """Digest of the code that proves and of the user's passes; None where one of those cannot be cached."""
        digests = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self._theirs]
        if None in digests:
            return None
        modules = (rewrite_proof, numerics, proof, site, trees, sys.modules[__name__])
        source = "\n".join(map(inspect.getsource, modules)) + repr(digests)
        return hashlib.sha256(source.encode()).digest()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Prove each rewrite that one of Inductor's patterns makes inside the block."""
        before = getattr(_ACTIVE, "proofs", None)
        _ACTIVE.proofs = self
        try:
            with (
                _LOCK,
                _guarded("ReplacementPatternEntry", PatternProofs._replace),
                _guarded("GraphPatternEntry", PatternProofs._handle),
            ):
                yield
        finally:
            _ACTIVE.proofs = before

    def _replace(self, plain: Callable[..., None], entry: Any, match: Any, graph: fx.Graph, node: fx.Node) -> None:
        """A pattern that brings its replacement along: judged before the graph is changed."""
        masks = {x for name, x in match.kwargs.items() if "mask" in name and isinstance(x, fx.Node)}
        args = entry.normalize_args(*match.args, **match.kwargs)
        kept = [i for i, output in enumerate(match.output_nodes()) if output is not None]
        region = Region(match.nodes, [match.output_nodes()[i] for i in kept], _nodes_of(args), masks)
        replacement: fx.GraphModule = match.replacement_graph

        def replaced(values: dict[fx.Node, Any]) -> list[Tensor]:
            given = [x.clone() if isinstance(x, Tensor) else x for x in fx.map_arg(args, values.__getitem__)]
            found = fx.Interpreter(replacement).run(*given)
            results = list(found) if isinstance(found, list | tuple) else [found]
            return [results[i] for i in kept] if len(results) == len(match.output_nodes()) else results

        text = f"{fx.map_arg(args, region.name)} {replacement.code}"
        after = functools.partial(rewrite_proof.applied, region, args, replacement, kept)
        if self._allows(region, text, list(replacement.graph.nodes), replaced, after, unknown=False):
            plain(entry, match, graph, node)

    def _handle(self, plain: Callable[..., None], entry: Any, match: Any, graph: fx.Graph, node: fx.Node) -> None:
        """A pattern whose handler changes the graph itself: judged afterwards, by what its users read, and undone."""
        inside = set(match.nodes)
        outputs = [n for n in inside if any(user not in inside for user in n.users)]
        region = Region(match.nodes, outputs, [], set())
        uses = rewrite_proof.Uses(outputs, inside)
        plain(entry, match, graph, node)
        made = uses.now(region.inputs)
        if made is None:
            return
        after = functools.partial(made.graph_module, region)
        if self._allows(region, made.text(region), made.nodes, made.run, after, unknown=True):
            return
        uses.restore(region, made, graph)

    def _allows(
        self,
        region: Region,
        text: str,
        made: list[fx.Node],
        replaced: Callable[[dict[fx.Node, Any]], list[Tensor]],
        after: Callable[[], fx.GraphModule],
        *,
        unknown: bool,
    ) -> bool:
        """Whether the rewrite may stand; `unknown` is the answer where running it does not tell.

        `after` makes the replacement as a function of the region's inputs.
        """
        if not region.on_cpu():
            return True
        key = f"{region.text()}\n{text}"
        if key not in _VERDICTS:
            try:
                _VERDICTS[key] = rewrite_proof.difference(region, made, replaced)
            except rewrite_proof.NotComparableError as error:
                _VERDICTS[key] = None if unknown else Refusal(str(error))
            except Exception as error:  # noqa: BLE001  a dtype without random numbers, for one
                why = f"it cannot be compared: {type(error).__name__}: {str(error)[:200]}"
                _VERDICTS[key] = None if unknown else Refusal(why)
        refusal = _VERDICTS[key]
        if refusal is not None:
            where = self._reproducer(key, region, after, refusal)
            self._refuse(region.outputs[0].name, f"torch's own rewrite is refused: {refusal.reason}{where}")
        return refusal is None

    def _reproducer(self, key: str, region: Region, after: Callable[[], fx.GraphModule], refusal: Refusal) -> str:
        """Write down how the rewrite is wrong; text that names the folder, empty where none can be written."""
        if self._folder is None or refusal.draw is None:
            return ""
        folder = self._folder / f"inductor-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        values = list(rewrite_proof.drawn_inputs(region, refusal.draw).values())
        try:
            with _disable_current_modes():
                write_rewrite(folder, region.graph_module(), after(), values, refusal.reason)
        except Exception as error:  # noqa: BLE001  whatever it is, it must not cost the compilation
            return f" (no reproducer: {type(error).__name__}: {error})"
        return f" (reproducer: {folder})"


Rule = Callable[[PatternProofs, Callable[..., None], Any, Any, fx.Graph, fx.Node], None]


@contextlib.contextmanager
def _guarded(kind: str, rule: Rule) -> Iterator[None]:
    """Send matches of this kind of pattern to `rule` where this thread has proofs; other threads notice nothing."""
    owner = getattr(pattern_matcher, kind)
    plain = owner.apply

    def apply(entry: Any, match: Any, graph: fx.Graph, node: fx.Node) -> None:
        proofs: PatternProofs | None = getattr(_ACTIVE, "proofs", None)
        if proofs is None:
            plain(entry, match, graph, node)
        else:
            rule(proofs, plain, entry, match, graph, node)

    with mock.patch.object(owner, "apply", apply):
        yield


def _nodes_of(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(args, found.append)
    return found
