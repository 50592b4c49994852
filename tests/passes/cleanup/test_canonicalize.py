"""Idle nodes go, bit for bit; whatever does something stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fusewright.passes.cleanup.canonicalize import Canonicalize
from fusewright.tools.pass_tester import PassTester, capture

Function = Callable[[Tensor], Any]

IDLE: dict[str, tuple[Function, int]] = {
    "dropout p=0": (lambda x: functional.dropout(x.sin(), 0.0, True).cos(), 1),
    "dropout eval": (lambda x: functional.dropout(x.sin(), 0.3, False).cos(), 1),
    "dropout keyword": (lambda x: functional.dropout(x.sin(), p=0.3, training=False).cos(), 1),
    "to dtype": (lambda x: x.sin().to(torch.float32).cos(), 1),
    "float": (lambda x: x.sin().float().cos(), 1),
    "type_as": (lambda x: x.sin().type_as(x).cos(), 1),
    "to device": (lambda x: x.sin().to("cpu").cos(), 1),
    "copy of a copy": (lambda x: x.mT.contiguous().contiguous().cos(), 1),
    "two transposes": (lambda x: x.sin().transpose(0, 1).transpose(-1, 0).cos(), 1),
    "several": (lambda x: functional.dropout(x.sin().to(x.dtype).float(), 0.1, False).exp(), 3),
    "returned": (lambda x: functional.dropout(x.sin(), 0.0), 1),
}


@pytest.mark.parametrize("name", IDLE)
def test_idle_node_goes(name: str) -> None:
    function, count = IDLE[name]
    x = torch.randn(3, 4, requires_grad=True)
    report = PassTester(Canonicalize()).check(function, (x,), expect_rewrites=count)
    assert len(report.after.graph.nodes) <= len(report.before.graph.nodes) - count


STAYS: dict[str, Function] = {
    "dropout": lambda x: functional.dropout(x.sin(), 0.3),
    "other dtype": lambda x: x.sin().to(torch.float64),
    "asked copy": lambda x: x.sin().to(torch.float32, copy=True),
    "asked copy by position": lambda x: x.sin().to(torch.float32, False, True),
    "memory format": lambda x: x[None, None].sin().to(memory_format=torch.channels_last),
    "one contiguous": lambda x: x.mT.contiguous(),
    "other axes": lambda x: x[None].sin().transpose(0, 1).transpose(1, 2).cos(),
    "returned view": lambda x: x.sin().transpose(0, 1).transpose(0, 1),
    "adding 0": lambda x: x.neg() + 0,
    "written view": lambda x: x.sin().transpose(0, 1).transpose(0, 1).add_(1),
}


@pytest.mark.parametrize("name", STAYS)
def test_working_node_stays(name: str) -> None:
    captured = capture(STAYS[name], (torch.randn(3, 4, requires_grad=True),))
    report = PassTester(Canonicalize()).run(captured, training=True)
    assert report.rewrites == 0
    assert report.after.code == captured.graph.code
