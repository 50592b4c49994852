"""The digest of a graph's collectives: equal where ranks agree, different under every change that matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from fusewright.errors import FusewrightError
from fusewright.passes.comm.order_check import check_ranks_agree, collective_digest

f = torch.ops._c10d_functional


def graph_of(*calls: tuple[Any, int, torch.dtype, tuple[Any, ...]]) -> fx.GraphModule:
    """A graph of collectives, each given as operator, numel, dtype and its arguments after the tensor."""
    graph = fx.Graph()
    for i, (target, numel, dtype, arguments) in enumerate(calls):
        x = graph.placeholder(f"x{i}")
        x.meta["val"] = torch.empty(numel, dtype=dtype, device="meta")
        graph.call_function(f.wait_tensor.default, (graph.call_function(target, (x, *arguments)),))
    graph.output(())
    return fx.GraphModule(torch.nn.Module(), graph)


@pytest.fixture
def groups(fake_world: int) -> list[str]:
    """Names of the groups {0, 1} and {0, 2}."""
    assert fake_world == 4
    return [dist.new_group(ranks).group_name for ranks in ([0, 1], [0, 2])]


def test_each_change_changes_the_digest(groups: list[str]) -> None:
    low, across = groups
    gather = (f.all_gather_into_tensor.default, 4, torch.float32, (2, low))
    scatter = (f.reduce_scatter_tensor.default, 4, torch.float32, ("sum", 2, low))
    variants = [
        graph_of(gather, scatter),
        graph_of(scatter, gather),
        graph_of(gather),
        graph_of(gather, scatter, scatter),
        graph_of((gather[0], 5, *gather[2:]), scatter),
        graph_of((gather[0], 4, torch.bfloat16, gather[3]), scatter),
        graph_of((*gather[:3], (2, across)), scatter),
        graph_of(gather, (*scatter[:3], ("max", 2, low))),
    ]
    digests = [collective_digest(gm) for gm in variants]
    assert len(set(digests)) == len(digests)
    assert collective_digest(graph_of(gather, scatter)) == digests[0]


def test_names_of_groups_do_not_matter(groups: list[str]) -> None:
    """Ranks of one mesh see other members and other names in the same place."""
    low, _ = groups
    of_low = graph_of((f.all_gather_into_tensor.default, 4, torch.float32, (2, low)))
    again = dist.new_group([0, 1]).group_name
    assert again != low
    of_again = graph_of((f.all_gather_into_tensor.default, 4, torch.float32, (2, again)))
    assert collective_digest(of_low) == collective_digest(of_again)


def test_an_unknown_group_is_an_error() -> None:
    gm = graph_of((f.all_gather_into_tensor.default, 4, torch.float32, (2, "no such group")))
    with pytest.raises(FusewrightError, match="'no such group', which does not exist"):
        collective_digest(gm)


def test_ranks_agree_with_themselves(fake_world: int) -> None:
    alone = dist.new_group([0])
    check_ranks_agree(collective_digest(graph_of()), alone)
