"""A replacement that computes something else is dropped and counted, and a proof is made once per distinct site."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusewright.fusion.match import proof
from fusewright.fusion.match.attention import build, fuse
from fusewright.fusion.match.attention.build import Plan
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.fusion.match.attention.masks import MaskKind
from fusewright.tools.pass_tester import PassTester, Report, capture
from tests.fusion.match.corpus import ATTENTION, Case


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_VERDICTS", {})


def spoiled(monkeypatch: pytest.MonkeyPatch, name: str, spoil: Callable[[Plan], Plan], training: bool = True) -> Report:
    """The report of a run whose replacements are built from a plan that `spoil` made wrong."""
    honest = build.build
    monkeypatch.setattr(build, "build", lambda plan: honest(spoil(plan)))
    case = next(case for case in ATTENTION if case.function.__name__ == name)
    return PassTester(FuseAttention()).run(capture(case.function, case.args(training=training)), training=training)


def swapped_tokens(plan: Plan) -> Plan:
    return dataclasses.replace(plan, q=dataclasses.replace(plan.q, perm=(0, 1, 2, 3)), out_perm=(0, 1, 2, 3))


WRONG = {
    "scale": ("divided", lambda plan: dataclasses.replace(plan, scale=plan.scale * 1.02)),
    "causal": ("no_scale", lambda plan: dataclasses.replace(plan, mask=MaskKind.CAUSAL)),
    "not causal": ("masked_fill_causal", lambda plan: dataclasses.replace(plan, mask=MaskKind.NONE)),
    "inverted": (
        "where_kept",
        lambda plan: dataclasses.replace(plan, terms=(dataclasses.replace(plan.terms[0], inverted=False),)),
    ),
    "sign": (
        "additive_mask",
        lambda plan: dataclasses.replace(plan, terms=(dataclasses.replace(plan.terms[0], sign=-1),)),
    ),
    "layout": ("einsum_tokens_first", swapped_tokens),
    "hidden rows": ("masked_fill_in_place", lambda plan: dataclasses.replace(plan, fill=-math.inf)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_replacement_is_dropped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = spoiled(monkeypatch, *WRONG[name])
    assert report.rewrites == 0, report.after.code
    assert report.recognised == {"attention": 1}
    assert report.declines[0].reason.startswith("proof failed: "), report.declines


def test_gradients_are_proven_in_training_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill lets no gradient through a hidden row; what is right for a forward pass is wrong in training."""

    def untrained(plan: Plan) -> Plan:
        return dataclasses.replace(plan, training=False)

    assert spoiled(monkeypatch, "where_kept", untrained, training=False).rewrites == 1
    report = spoiled(monkeypatch, "where_kept", untrained, training=True)
    assert report.rewrites == 0, report.after.code
    assert "gradient" in report.declines[0].reason


def test_equal_layers_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proven: list[Any] = []
    honest = proof.prove

    def counting(*args: Any, **kwargs: Any) -> str | None:
        proven.append(args)
        return honest(*args, **kwargs)

    monkeypatch.setattr(proof, "prove", counting)

    def layers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for _ in range(3):
            q = (q @ k.mT * 0.3).softmax(-1) @ v
        return (q @ k.mT * 0.4).softmax(-1) @ v

    PassTester(FuseAttention()).check(layers, Case(layers).args(), expect_rewrites=4)
    assert len(proven) == 2, "three layers share a scale, the fourth has its own"


def test_sizes_of_a_proof_do_not_grow_with_the_model() -> None:
    args = tuple(torch.empty(64, 4, 2048, 64, device="meta") for _ in range(3))
    captured = capture(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, args)
    anchor = next(node for node in captured.graph.graph.nodes if node.target == "softmax")
    op = fuse.view.normalize(anchor)
    assert op is not None
    place, _ = fuse._plan(fuse.recognise(op), {}, training=True)
    assert all(math.prod(place.shape(node)) < 10_000 for node in place.inputs)
