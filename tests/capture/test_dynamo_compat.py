"""What is changed for one compilation is as before after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fusewright.capture import dynamo_compat
from fusewright.capture.dynamo_compat import short_collections
from tests.runtime.dispatch_models import cheap


@pytest.fixture(autouse=True)
def nothing_frozen() -> Iterator[None]:
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def test_what_lives_before_a_compilation_is_no_matter_of_collections_in_it() -> None:
    with short_collections():
        assert gc.get_freeze_count() > 10_000
        with short_collections():  # lowering inside of a capture
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with short_collections():
        pass
    assert gc.get_freeze_count() == before


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(7, 7)


def test_nothing_stays_frozen_after_a_first_call_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    mark = dynamo_compat.compile_options

    def noting(limit: int, *, duck_shape: bool) -> object:
        entered.append(gc.get_freeze_count())
        return mark(limit, duck_shape=duck_shape)

    monkeypatch.setattr(dynamo_compat, "compile_options", noting)
    with pytest.raises(RuntimeError, match="shape"):
        cheap(Raises())(torch.ones(3))
    assert entered
    assert min(entered) > 10_000
    assert gc.get_freeze_count() == 0
