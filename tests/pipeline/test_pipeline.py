"""The pipeline selects by its rules, runs in order, and leaves out what fails, counted and explained."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from fusewright.capture.shapes import ShapeBucket
from fusewright.capture.variant import DEFAULT_VARIANT, GraphVariant
from fusewright.config import Numerics
from fusewright.errors import PassFailedError, UnknownNameError, UserInputError
from fusewright.passes.base import Pass, PassContext, Stage
from fusewright.pipeline.order import ORDER
from fusewright.pipeline.pipeline import Pipeline, insert_passes
from tests.pipeline.little import captured, doing, methods, pipeline, rewrite, settings, swap


def selected(line: Pipeline, *names: str, stage: Stage = Stage.FORWARD, device: str = "cpu") -> list[str]:
    variant = GraphVariant(passes=names) if names else DEFAULT_VARIANT
    return [p.name for p in line.select(variant, stage, PassContext(device=device))]


def test_passes_run_in_order() -> None:
    first, second = swap("first", "sin", "tanh"), swap("second", "tanh", "exp")
    gm, result, _ = rewrite(pipeline(first, second))
    assert methods(gm) == ["exp", "cos", "exp"]
    assert result.rewrites == {"first": 2, "second": 2}
    gm, result, _ = rewrite(pipeline(second, first))
    assert methods(gm) == ["tanh", "cos", "tanh"]
    assert result.rewrites == {"first": 2}
    assert gm.code.count("tanh") == 2, "the code is that of the rewritten graph"


def test_remarks_are_counted_per_pass() -> None:
    _, result, _ = rewrite(pipeline(swap("first", "sin", "tanh"), swap("second", "none", "exp")))
    assert result.recognised == {"sin": 2}
    assert result.declines == {
        ("first", "cos", "not sin"): 1,
        ("second", "sin", "not none"): 1,
        ("second", "cos", "not none"): 1,
        ("second", "sin_1", "not none"): 1,
    }
    assert set(result.seconds) == {"first", "second"}
    assert all(seconds > 0 for seconds in result.seconds.values())


def test_selection_by_stage_default_and_name() -> None:
    line = pipeline(
        swap("a", "sin", "cos"),
        swap("optional", "sin", "cos", default=False),
        swap("late", "sin", "cos", stage=Stage.JOINT),
    )
    assert selected(line) == ["a"]
    assert selected(line, stage=Stage.JOINT) == ["late"]
    assert selected(line, "optional", "a") == ["a", "optional"], "in the pipeline's order, not the variant's"
    assert selected(line, "late") == []


def test_selection_by_device_and_bucket() -> None:
    one = swap("a", "sin", "cos", applies=lambda self, bucket, device: device == "cuda" and bucket == ShapeBucket())
    assert selected(pipeline(one)) == []
    assert selected(pipeline(one), device="cuda") == ["a"]


@pytest.mark.parametrize(
    ("numerics", "expected"),
    [
        (Numerics.EXACT, ["exact"]),
        (Numerics.REASSOCIATED, ["exact", "reassociated"]),
        (Numerics.LOSSY, ["exact", "reassociated", "lossy"]),
    ],
)
def test_the_tier_limits(numerics: Numerics, expected: list[str]) -> None:
    passes = [swap(tier.value, "sin", "cos", numerics=tier) for tier in Numerics]
    assert selected(pipeline(*passes, numerics=numerics)) == expected


def test_the_skip_list() -> None:
    line = pipeline(swap("a", "sin", "cos"), swap("b", "sin", "cos"), skip=frozenset({"a"}))
    assert selected(line) == ["b"]
    assert selected(line, "a", "b") == ["b"], "a variant from the store does not beat the user"


@pytest.mark.parametrize("declared_by", ["earlier", "later"])
def test_of_two_that_conflict_the_earlier_runs(declared_by: str) -> None:
    earlier = swap("earlier", "sin", "cos", conflicts=("later",) if declared_by == "earlier" else ())
    later = swap("later", "sin", "cos", conflicts=("earlier",) if declared_by == "later" else ())
    assert selected(pipeline(earlier, later)) == ["earlier"]
    assert selected(pipeline(earlier, later), "later") == ["later"]


def test_requirements() -> None:
    giver = swap("giver", "sin", "cos", provides=("form",))
    taker = swap("taker", "sin", "cos", requires=("form",))
    user = swap("user", "sin", "cos", requires=("taker",))
    line = pipeline(giver, taker, user)
    assert selected(line) == ["giver", "taker", "user"]
    with pytest.raises(UserInputError, match=r"'taker' requires \['form'\], which no earlier pass provides"):
        pipeline(taker, giver)
    with pytest.raises(UserInputError, match=r"'user' requires 'taker'; ask for"):
        selected(line, "giver", "user")
    skipping = pipeline(giver, taker, user, skip=frozenset({"giver"}))
    assert selected(skipping) == [], "what needs a skipped pass, or needs what needs it, does not run"


def test_a_requirement_of_an_earlier_stage_counts_as_given() -> None:
    line = pipeline(swap("a", "sin", "cos"), swap("b", "sin", "cos", requires=("a",), stage=Stage.JOINT))
    assert selected(line, stage=Stage.JOINT) == ["b"]


def test_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match=r"'fuse_atention'.*Did you mean 'fuse_attention'\?"):
        Pipeline(ORDER, settings()).select(GraphVariant(passes=("fuse_atention",)), Stage.FORWARD, PassContext())
    with pytest.raises(UnknownNameError, match=r"FUSEWRIGHT_SKIP_PASSES 'canonicalise'.*'canonicalize'"):
        Pipeline(ORDER, settings(skip=frozenset({"canonicalise"})))
    with pytest.raises(UnknownNameError, match=r"before= 'fuse_norm'.*'fuse_rms_norm'"):
        insert_passes(ORDER, [swap("mine", "sin", "cos")], before="fuse_norm")


def test_two_passes_of_one_name() -> None:
    with pytest.raises(UserInputError, match="two passes are named 'a'"):
        pipeline(swap("a", "sin", "cos"), swap("a", "sin", "cos"))


def test_a_users_passes_are_inserted() -> None:
    mine, theirs = swap("mine", "sin", "cos"), swap("theirs", "sin", "cos")
    names = [p.name for p in ORDER]
    assert [p.name for p in insert_passes(ORDER, [mine], None)] == [*names, "mine"]
    at = names.index("fuse_attention")
    inserted = [p.name for p in insert_passes(ORDER, [mine, theirs], "fuse_attention")]
    assert inserted == [*names[:at], "mine", "theirs", *names[at:]]
    with pytest.raises(UserInputError, match=r"not an instance of fusewright\.Pass"):
        insert_passes(ORDER, [type(mine)], None)  # type: ignore[list-item]


def _raise(gm: fx.GraphModule) -> int:
    gm.graph.erase_node(gm.graph.output_node())
    raise KeyError("lost")


def _use_before_definition(gm: fx.GraphModule) -> int:
    nodes = list(gm.graph.nodes)
    nodes[1].args = (nodes[2],)
    return 1


def _rename_input(gm: fx.GraphModule) -> int:
    node = next(iter(gm.graph.nodes))
    node.name = node.target = "renamed"
    return 1


def _add_input(gm: fx.GraphModule) -> int:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")
    return 1


def _more_results(gm: fx.GraphModule) -> int:
    output = gm.graph.output_node()
    output.args = ((*output.args[0], output.args[0][0]),)  # type: ignore[index, misc]
    return 1


def _other_dtype(gm: fx.GraphModule) -> int:
    node = gm.graph.output_node().all_input_nodes[0]
    node.meta["example_value"] = node.meta["example_value"].double()
    return 1


def _without_value(gm: fx.GraphModule) -> int:
    node = next(n for n in gm.graph.nodes if n.op == "call_method")
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(torch.abs, (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return 1


def _after_output(gm: fx.GraphModule) -> int:
    with gm.graph.inserting_after(gm.graph.output_node()):
        gm.graph.call_function(torch.ones, (2,))
    return 1


def _without_output(gm: fx.GraphModule) -> int:
    gm.graph.erase_node(gm.graph.output_node())
    return 1


def _missing_attribute(gm: fx.GraphModule) -> int:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.create_node("call_module", "nowhere", ())
    return 1


def _silent_target(gm: fx.GraphModule) -> int:
    next(n for n in gm.graph.nodes if n.op == "call_method").target = "tan"
    return 0


def _silent_argument(gm: fx.GraphModule) -> int:
    node = next(n for n in gm.graph.nodes if n.target is operator.add)
    node.args = (node.args[0], 2.0)
    return 0


def _silent_addition(gm: fx.GraphModule) -> int:
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ones, (2,))
    return 0


def _silent_order(gm: fx.GraphModule) -> int:
    nodes = list(gm.graph.nodes)
    with gm.graph.inserting_before(nodes[-1]):
        gm.graph.node_copy(nodes[1], lambda n: n)
    gm.graph.erase_node(list(gm.graph.nodes)[-2])
    nodes[0].name = "other"
    return 0


FAILURES: dict[str, tuple[Callable[[fx.GraphModule], Any], str]] = {
    "raises": (_raise, r"KeyError: 'lost'"),
    "use before definition": (_use_before_definition, "illegal graph: structure: .*before it has been defined"),
    "after the output": (_after_output, "illegal graph: structure: the graph ends with ones"),
    "without output": (_without_output, "illegal graph: structure: the graph ends with add"),
    "missing attribute": (_missing_attribute, "illegal graph: structure: .*nowhere"),
    "renamed input": (_rename_input, r"illegal graph: interface: placeholders \['renamed'\]"),
    "added input": (_add_input, r"illegal graph: interface: placeholders \['more'"),
    "more results": (_more_results, "illegal graph: results: 2 instead of 1"),
    "other dtype": (_other_dtype, "illegal graph: results: number 0 is a torch.float64 tensor of rank 2"),
    "no fake value": (_without_value, "illegal graph: values: new node abs"),
    "0 but another target": (_silent_target, "broken contract: run returned 0 but changed sin"),
    "0 but another argument": (_silent_argument, "broken contract: run returned 0 but changed add"),
    "0 but more nodes": (_silent_addition, "broken contract: run returned 0 but changed ones"),
    "0 but renamed": (_silent_order, "broken contract: run returned 0 but changed other"),
    "no count": (lambda gm: None, "broken contract: run returned None"),
    "a bool": (lambda gm: True, "broken contract: run returned True"),
    "negative": (lambda gm: -1, "broken contract: run returned -1"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failing_pass_is_rolled_back_and_the_others_run(kind: str) -> None:
    what, reason = FAILURES[kind]
    pristine = captured()
    before = str(pristine.graph)
    line = pipeline(swap("first", "sin", "tanh"), doing(what), swap("last", "cos", "exp"))
    gm, result, _ = rewrite(line, pristine)
    assert methods(gm) == ["tanh", "exp", "tanh"]
    assert [name for name, _ in result.failures] == ["bad"]
    assert re.search(reason, result.failures[0][1], re.DOTALL), result.failures
    assert result.rewrites == {"first": 2, "last": 1}, "counted once, though the passes before it ran twice"
    assert str(pristine.graph) == before
    torch.testing.assert_close(gm(torch.ones(3, 4))[0], torch.ones(3, 4).tanh().exp().tanh() + 1)


@pytest.mark.parametrize("kind", ["raises", "renamed input", "0 but another target"])
def test_strict_raises(kind: str) -> None:
    what, _ = FAILURES[kind]
    with pytest.raises(PassFailedError, match="pass 'bad' failed on a graph: "):
        rewrite(pipeline(doing(what), strict=True))


def test_the_users_interrupt_is_no_failure_of_a_pass() -> None:
    def interrupted(gm: fx.GraphModule) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rewrite(pipeline(doing(interrupted)))


def test_what_requires_a_failed_pass_is_left_out_too() -> None:
    taker = swap("taker", "sin", "tanh", requires=("bad",))
    user = swap("user", "sin", "tanh", requires=("taker",))
    gm, result, _ = rewrite(pipeline(doing(_raise), taker, user, swap("other", "cos", "exp")))
    assert methods(gm) == ["sin", "exp", "sin"]
    assert result.failures[1:] == [
        ("taker", "requires 'bad', which failed"),
        ("user", "requires 'taker', which failed"),
    ]


def test_limits_stop_after_the_given_rewrites() -> None:
    for limit in range(4):
        gm, result, ctx = rewrite(pipeline(swap("a", "sin", "tanh")), limits={"a": limit})
        assert methods(gm).count("tanh") == result.rewrites["a"] == min(limit, 2)
        assert len(ctx.allowed) == min(limit, 2)
        assert sum("limited to" in d.reason for d in ctx.declines) == 2 - min(limit, 2)


def owner_of(gm: fx.GraphModule) -> fx.Graph:
    assert gm.graph.owning_module is gm
    return gm.graph


def test_in_place_rewrites_the_real_graph() -> None:
    gm = captured()
    line = pipeline(swap("a", "sin", "tanh"), swap("b", "none", "exp"))
    result = line.rewrite_in_place(owner_of(gm), line.order, PassContext(), "inside")
    assert methods(gm) == ["tanh", "cos", "tanh"]
    assert result.rewrites == {"a": 2}
    assert line.rewrite_in_place(owner_of(gm), (), PassContext(), "inside").rewrites == {}


@pytest.mark.parametrize("kind", FAILURES)
def test_in_place_never_leaves_it_half_rewritten(kind: str) -> None:
    gm = captured()
    before, nodes = str(gm.graph), list(gm.graph.nodes)
    bad = doing(FAILURES[kind][0])
    result = pipeline(bad).rewrite_in_place(owner_of(gm), (bad,), PassContext(), "inside")
    assert [name for name, _ in result.failures] == ["bad"]
    assert str(gm.graph) == before
    assert list(gm.graph.nodes) == nodes
    strict = pipeline(bad, swap("a", "sin", "tanh"), strict=True)
    with pytest.raises(PassFailedError):
        strict.rewrite_in_place(owner_of(gm), strict.order, PassContext(), "inside")
    assert str(gm.graph) == before


def test_a_digest_changes_with_source_and_options() -> None:
    class Optioned(Pass):
        name = "optioned"

        def __init__(self, size: int) -> None:
            self.size = size

        def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
            return 0

    assert Optioned(1).digest() == Optioned(1).digest() != Optioned(2).digest()
    assert swap("a", "sin", "cos").digest() != swap("b", "sin", "cos").digest()
