"""A reproducer is read back as a graph that passes can rewrite, bisect and shrink."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

from fusewright.capture.graph import CapturedGraph
from fusewright.capture.variant import DEFAULT_VARIANT
from fusewright.errors import UserInputError
from fusewright.fusion.match.attention.fuse import FuseAttention
from fusewright.passes.base import PassContext
from fusewright.runtime.reproducer import write_reproducer
from fusewright.tools.bisect import bisect
from fusewright.tools.pass_tester import Capture, capture
from fusewright.tools.reproduced import load
from tests.tools.planted import Retarget, chain, wrong_sigmoid


def written(taken: Capture, root: pathlib.Path) -> pathlib.Path:
    captured = CapturedGraph.build(taken.graph, taken.inputs, {})
    return write_reproducer(root, captured, taken.inputs, DEFAULT_VARIANT)


def test_passes_see_what_they_saw(tmp_path: pathlib.Path) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v

    taken = capture(attention, [torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3)])
    read = load(written(taken, tmp_path))
    for ours, theirs in zip(read.inputs, taken.inputs, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.requires_grad
    torch.testing.assert_close(read.graph(*read.inputs), taken.graph(*taken.inputs))
    for node in read.graph.graph.nodes:
        assert node.op == "output" or node.meta["example_value"].requires_grad
    assert FuseAttention().run(read.graph, PassContext(training=True)) == 1


def test_a_reproducer_can_be_bisected(tmp_path: pathlib.Path) -> None:
    read = load(written(capture(chain, (torch.randn(3, 5), torch.randn(3, 5))), tmp_path))
    found = bisect(read.graph, read.inputs, passes=[Retarget(torch.sigmoid, wrong_sigmoid)])
    assert found is not None
    assert (found.pass_name, found.rewrite) == ("retarget", 1)


def test_another_folder_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserInputError, match=r"is no reproducer; it lacks graph/module\.py, inputs\.pt, variant\.json"):
        load(tmp_path)
