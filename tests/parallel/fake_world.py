"""A default process group of four ranks of which only rank 0 exists; its collectives do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def fake_world() -> Iterator[int]:
    """Number of ranks; the group is gone after the test."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield 4
    dist.destroy_process_group()
