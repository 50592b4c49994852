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
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass

from fusewright import numerics, trees
from fusewright.fusion.match import proof, site
from fusewright.runtime.inductor import rewrite_proof
from fusewright.runtime.inductor.rewrite_proof import Region

_VERDICTS: dict[str, str | None] = {}
"""Why a rewrite is refused (None: proven) by its text; a repeated layer is proven once in a process."""

_ACTIVE = threading.local()
_LOCK = threading.RLock()  # two threads that patched by turns would take off each other's guard


class PatternProofs(CustomGraphPass):
    """Guards the pattern rewrites of the compilations inside `watching()`, of this thread alone.

    Given to Inductor as a custom pass that changes nothing, so that its digest is part of the cache keys: what a plain
    torch.compile made of the same graph is never taken for ours. A custom pass that the user has set in the same place
    runs too; patterns that it applies are proven like Inductor's.
    """

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        """`refuse(node, reason)` is told about each match that is not rewritten."""
        self._refuse = refuse
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
        if self._allows(region, text, list(replacement.graph.nodes), replaced, unknown=False):
            plain(entry, match, graph, node)

    def _handle(self, plain: Callable[..., None], entry: Any, match: Any, graph: fx.Graph, node: fx.Node) -> None:
        """A pattern whose handler changes the graph itself: judged afterwards, by what its users read, and undone."""
        inside = set(match.nodes)
        outputs = [n for n in inside if any(user not in inside for user in n.users)]
        region = Region(match.nodes, outputs, [], set())
        uses = rewrite_proof.Uses(outputs, inside)
        plain(entry, match, graph, node)
        made = uses.now(region.inputs)
        if made is None or self._allows(region, made.text(region), made.nodes, made.run, unknown=True):
            return
        uses.restore(region, made, graph)

    def _allows(
        self,
        region: Region,
        text: str,
        made: list[fx.Node],
        replaced: Callable[[dict[fx.Node, Any]], list[Tensor]],
        *,
        unknown: bool,
    ) -> bool:
        """Whether the rewrite may stand; `unknown` is the answer where running it does not tell."""
        if not region.on_cpu():
            return True
        key = f"{region.text()}\n{text}"
        if key not in _VERDICTS:
            try:
                _VERDICTS[key] = rewrite_proof.difference(region, made, replaced)
            except rewrite_proof.NotComparableError as error:
                _VERDICTS[key] = None if unknown else str(error)
            except Exception as error:  # noqa: BLE001  a dtype without random numbers, for one
                why = f"it cannot be compared: {type(error).__name__}: {str(error)[:200]}"
                _VERDICTS[key] = None if unknown else why
        reason = _VERDICTS[key]
        if reason is not None:
            self._refuse(region.outputs[0].name, f"torch's own rewrite is refused: {reason}")
        return reason is None


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
