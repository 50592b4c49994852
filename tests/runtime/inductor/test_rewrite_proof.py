"""A pattern's rewrite is judged and undone in the graph itself, for patterns of every kind that Inductor has."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import CallFunction, KeywordArg, PatternMatcherPass
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright.runtime.inductor import pattern_proofs
from fusewright.runtime.inductor.pattern_proofs import PatternProofs
from fusewright.runtime.inductor.rewrite_proof import NotComparableError, Region, difference

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern_proofs, "_VERDICTS", {})


def chain(x: Tensor, y: Tensor) -> Tensor:
    return (torch.mul(x, 2) + y).cos() - x


def traced(function: Callable[..., Tensor] = chain, *args: Tensor) -> fx.GraphModule:
    given = args or (torch.randn(3, 4), torch.randn(3, 4))
    return make_fx(function, tracing_mode="fake")(*given)


def handled(make: Callable[[fx.Graph, fx.Node, fx.Node], fx.Node]) -> PatternMatcherPass:
    """A pass whose handler replaces `2 * x + y` by what `make` builds."""
    patterns = PatternMatcherPass()

    @pattern_matcher.register_graph_pattern(
        CallFunction(aten.add.Tensor, CallFunction(aten.mul.Tensor, KeywordArg("x"), 2), KeywordArg("y")),
        pass_dict=patterns,
    )
    def handler(match: Any, x: fx.Node, y: fx.Node) -> None:
        old = match.output_node()
        with match.graph.inserting_before(old):
            new = make(match.graph, x, y)
        old.replace_all_uses_with(new)
        match.erase_nodes()

    return patterns


def right(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, (y, x), {"alpha": 2})


def wrong(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.add.Tensor, (x, y), {"alpha": 2})


def operand(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return x


def failing(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.view.default, (x, [7]))


def other_dtype(graph: fx.Graph, x: fx.Node, y: fx.Node) -> fx.Node:
    return graph.call_function(aten.to.dtype, (right(graph, x, y), torch.float64))


def watched(
    patterns: PatternMatcherPass, gm: fx.GraphModule, folder: pathlib.Path | None = None
) -> list[tuple[str, str]]:
    refused: list[tuple[str, str]] = []
    with PatternProofs(lambda node, reason: refused.append((node, reason)), folder).watching():
        patterns.apply(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return refused


def assert_unchanged_meaning(gm: fx.GraphModule) -> None:
    args = torch.randn(3, 4), torch.randn(3, 4)
    torch.testing.assert_close(gm(*args), chain(*args))


def test_a_right_rewrite_stands() -> None:
    gm = traced()
    assert watched(handled(right), gm) == []
    assert "alpha = 2" in gm.code
    assert_unchanged_meaning(gm)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (wrong, "1 of 1 leaves differ"),
        (operand, "1 of 1 leaves differ"),
        (failing, "it fails: RuntimeError"),
        (other_dtype, "torch.float32 (3, 4) becomes torch.float64 (3, 4)"),
    ],
)
def test_a_wrong_rewrite_is_undone(make: Callable[..., fx.Node], reason: str) -> None:
    gm = traced()
    refused = watched(handled(make), gm)
    assert [node for node, _ in refused] == ["add"]
    assert reason in refused[0][1]
    assert_unchanged_meaning(gm)
    values = [n.meta.get("val") for n in gm.graph.nodes if n.op == "call_function"]
    assert all(isinstance(value, Tensor) for value in values), "what was put back keeps its fake values"


def test_without_proofs_nothing_is_held_back() -> None:
    """In another thread too, while this one has proofs."""
    gm, other = traced(), traced()
    with PatternProofs(lambda node, reason: None).watching():
        thread = threading.Thread(target=lambda: handled(wrong).apply(other.graph))
        thread.start()
        thread.join()
    handled(wrong).apply(gm.graph)
    for graph in (gm.graph, other.graph):
        assert any(node.kwargs.get("alpha") == 2 for node in graph.nodes)


def test_threads_that_compile_by_turns_keep_their_guards() -> None:
    """The first to leave must not take the other's guard with it."""
    inside, done = threading.Event(), threading.Event()
    found: list[list[tuple[str, str]]] = []

    def other() -> None:
        gm = traced()
        refused: list[tuple[str, str]] = []
        with PatternProofs(lambda node, reason: refused.append((node, reason))).watching():
            inside.set()
            done.wait(10)
            handled(wrong).apply(gm.graph)
        found.append(refused)

    plain = pattern_matcher.GraphPatternEntry.apply
    thread = threading.Thread(target=other)
    with PatternProofs(lambda node, reason: None).watching():
        thread.start()
        inside.wait(0.5)  # it may have to wait for this block to end
    done.set()
    thread.join(20)
    assert [len(refused) for refused in found] == [1]
    assert pattern_matcher.GraphPatternEntry.apply is plain


def test_a_users_pass_in_the_same_place_still_runs() -> None:
    seen: list[int] = []

    class Theirs(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(len(graph.nodes))

        def uuid(self) -> bytes:
            return b"theirs"

    alone = PatternProofs(lambda node, reason: None)
    with inductor_config.patch(joint_custom_pre_pass=Theirs()):
        with_theirs = PatternProofs(lambda node, reason: None)
    with_theirs(traced().graph)
    assert len(seen) == 1
    assert with_theirs.uuid() not in (None, alone.uuid())
    with inductor_config.patch(joint_custom_pre_pass=lambda graph: None):
        assert PatternProofs(lambda node, reason: None).uuid() is None, "what cannot be told apart is not cached"


def test_random_functions_before_autograd_are_left_alone() -> None:
    """There the nodes are torch functions, whose tags do not tell that they draw."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    dropped = graph.call_function(torch.nn.functional.dropout, (x, 0.5))
    graph.output(dropped)
    for node in (x, dropped):
        node.meta["example_value"] = torch.randn(64)
    with pytest.raises(NotComparableError, match="random"):
        difference(Region([dropped], [dropped], [], set()), [dropped], lambda values: [values[x]])


def reproduced(refused: list[tuple[str, str]]) -> str:
    """What the script prints that the reason of the only refusal names."""
    ((_, reason),) = refused
    folder = pathlib.Path(reason.partition("(reproducer: ")[2].rstrip(")"))
    assert reason.partition(" (reproducer")[0].partition("draw")[2] in (folder / "run.py").read_text()
    done = subprocess.run([sys.executable, folder / "run.py"], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_refusal_comes_with_a_script_that_shows_it(tmp_path: pathlib.Path) -> None:
    by_handler = reproduced(watched(handled(wrong), traced(), tmp_path))
    assert "output 0: torch.float32 (3, 4) before, torch.float32 (3, 4) after" in by_handler
    assert float(by_handler.rpartition(" ")[2]) > 0.1

    def search(x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y

    by_replacement = reproduced(watched(replaced(search, lambda x, y: x - y), traced(), tmp_path))
    assert float(by_replacement.rpartition(" ")[2]) > 0.1
    assert len(list(tmp_path.iterdir())) == 2
    watched(handled(wrong), traced(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # an equal rewrite is the same folder


def test_no_place_for_a_reproducer_is_said_and_costs_nothing_else(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    ((_, reason),) = watched(handled(wrong), traced(), tmp_path / "file" / "below")
    assert "no reproducer: " in reason


def test_equal_sites_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    original = pattern_proofs.rewrite_proof.difference
    monkeypatch.setattr(pattern_proofs.rewrite_proof, "difference", lambda *a: runs.append(1) or original(*a))

    def layers(x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = (x * 2 + y).sin()
        return x

    gm = traced(layers)
    assert sorted(node for node, _ in watched(handled(wrong), gm)) == ["add", "add_1", "add_2"]
    assert len(runs) == 1


def test_sizes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict on one shape is no verdict on another."""
    watched(handled(right), traced())
    watched(handled(right), traced(chain, torch.randn(3, 4), torch.randn(1, 4)))
    assert len(pattern_proofs._VERDICTS) == 2


def replaced(search: Callable[..., Tensor], replacement: Callable[..., Tensor]) -> PatternMatcherPass:
    patterns = PatternMatcherPass()
    examples = [torch.randn(2, 3, 4), torch.randn(2, 3, 4)]
    pattern_matcher.register_replacement(search, replacement, examples, pattern_matcher.fwd_only, [patterns])
    return patterns


@pytest.mark.parametrize("good", [True, False])
def test_a_replacement_is_judged_before_it_is_made(good: bool) -> None:
    def search(x: Tensor, y: Tensor) -> Tensor:
        return aten.add.Tensor(aten.mul.Tensor(x, 2), y)

    gm = traced()
    before = gm.code
    refused = watched(replaced(search, (lambda x, y: torch.add(y, x, alpha=2)) if good else lambda x, y: x - y), gm)
    assert_unchanged_meaning(gm)
    assert bool(refused) != good
    assert (gm.code == before) != good


def test_what_cannot_be_compared_is_left_to_a_handler_and_refused_to_a_replacement() -> None:
    def noisy(x: Tensor, y: Tensor) -> Tensor:
        return torch.rand_like(x) * 2 + y

    gm = traced(noisy)
    assert watched(handled(right), gm) == []
    assert "alpha = 2" in gm.code, "the random numbers lie outside of what was matched"

    def search(x: Tensor, y: Tensor) -> Tensor:
        return aten.add.Tensor(aten.mul.Tensor(x, 2), y)

    gm = traced()
    refused = watched(replaced(search, lambda x, y: torch.rand_like(x) + y), gm)
    assert "it draws random numbers" in refused[0][1]
    assert_unchanged_meaning(gm)
