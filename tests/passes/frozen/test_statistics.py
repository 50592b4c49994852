"""Contents of small buffers are compared; parameters, integers and large buffers are left to their versions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusewright.passes.frozen.statistics import LARGEST, Contents

SMALL = {
    "vectors": [torch.zeros(3), torch.ones(5)],
    "one vector": [torch.zeros(LARGEST)],
    "a number": [torch.tensor(0.0)],
    "other ranks": [torch.zeros(2, 3).t(), torch.zeros(2, 2, 2), torch.zeros(())],
    "other dtypes": [torch.zeros(3), torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.bfloat16)],
}


@pytest.mark.parametrize("name", SMALL)
def test_every_element_counts(name: str) -> None:
    tensors = [torch.ones(4, dtype=torch.int64), nn.Parameter(torch.ones(2)), *(t.clone() for t in SMALL[name])]
    contents = Contents.of(tensors)
    assert contents.unchanged(tensors)
    for tensor in tensors[2:]:
        last = tensor[(-1,) * tensor.dim()]
        kept = last.item()
        last.fill_(kept + 1)
        assert not contents.unchanged(tensors)
        last.fill_(kept)
        assert contents.unchanged(tensors)


LEFT = {
    "a parameter": nn.Parameter(torch.zeros(3), requires_grad=False),
    "integers": torch.zeros((), dtype=torch.int64),
    "a large buffer": torch.zeros(LARGEST + 1),
}


@pytest.mark.parametrize("name", LEFT)
def test_leaves(name: str) -> None:
    assert Contents.of([LEFT[name]]).groups == ()


def test_what_is_no_number_is_never_unchanged() -> None:
    tensors = [torch.full((2,), float("nan"))]
    assert not Contents.of(tensors).unchanged(tensors)


def test_not_compared_while_a_cuda_graph_is_captured() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    tensors = [torch.zeros(3, device="cuda")]
    contents = Contents.of(tensors)
    tensors[0].add_(1)
    assert not contents.unchanged(tensors)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert contents.unchanged(tensors)
