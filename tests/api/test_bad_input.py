"""Wrong input gives an error that names argument and remedy, and the model is left as it was."""

from __future__ import annotations

import pathlib
import sqlite3
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright import config
from fusewright.autotune.storage import store as tuning_store
from fusewright.errors import (
    CacheFolderError,
    DimsError,
    FusewrightError,
    StoreVersionError,
    UnknownNameError,
    UnsupportedTorchError,
    UserInputError,
)
from tests.api.nets import Net, batch
from tests.runtime.dispatch_models import cheap


def check_refused(call: Callable[[nn.Module], Any], error: type[FusewrightError], match: str) -> None:
    """`call` raises `error`, and the model's call is what it was."""
    model = Net().eval()
    before = model(batch())
    attributes = set(vars(model))
    with pytest.raises(error, match=match):
        call(model)
    assert set(vars(model)) == attributes
    assert model._compiled_call_impl is None
    torch.testing.assert_close(model(batch()), before, rtol=0, atol=0)


@pytest.mark.parametrize("thing", [3, "model", None, [nn.Linear(2, 2)]])
def test_not_a_module_or_function(thing: Any) -> None:
    with pytest.raises(UserInputError, match=r"model: expected an nn.Module or a function, got \w+"):
        fusewright.optimize(thing)


def test_a_class_instead_of_an_instance() -> None:
    with pytest.raises(UserInputError, match="Net is a class; pass an instance"):
        fusewright.optimize(Net)


BAD_DIMS = [
    ({"y": {0: "batch"}}, {}, r"no argument 'y'; it takes x"),
    ({"x": ["batch"]}, {}, r"dims\['x'\]: expected \{dimension: name\}"),
    ({"x": {-1: "batch"}}, {}, r"dimension -1 must be an int >= 0"),
    ({"x": {0: "a batch"}}, {}, r"'a batch' must be an identifier"),
    ({"x": {0: "batch"}}, {"rows": [8]}, r"'rows' is not named in dims; dims names batch"),
    ({"x": {0: "batch"}}, {"batch": []}, r"buckets\['batch'\] is empty; give upper edges"),
    ({"x": {0: "batch"}}, {"batch": [8, 8]}, r"edges must ascend"),
    ({"x": {0: "batch"}}, {"batch": [1]}, r"edge 1 is below 2"),
    ({"x": {0: "batch"}}, {"batch": [(9, 3)]}, r"range \(9, 3\) is empty"),
    ({"x": {0: "batch"}}, {"batch": [(2, 8), (6, 20)]}, r"range \(6, 20\) overlaps.*should start at 9"),
    ({"x": {0: "batch"}}, {"batch": [(2, 8), (12, 20)]}, r"range \(12, 20\) leaves a gap.*should start at 9"),
]


@pytest.mark.parametrize(("dims", "buckets", "match"), BAD_DIMS)
def test_contradictory_dims_and_buckets(dims: Any, buckets: Any, match: str) -> None:
    check_refused(lambda model: fusewright.optimize(model, dims=dims, buckets=buckets), DimsError, match)


@pytest.mark.parametrize(
    ("keyword", "value", "match"),
    [
        ("numerics", "reasociated", r"numerics 'reasociated'. Did you mean 'reassociated'"),
        ("verify", "first", r"verify 'first'. Did you mean 'first_call'"),
        ("effort", "ful", r"effort 'ful'. Did you mean 'full'"),
    ],
)
def test_unknown_keyword_values(keyword: str, value: str, match: str) -> None:
    check_refused(lambda model: fusewright.optimize(model, **{keyword: value}), UnknownNameError, match)


def test_unknown_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    match = r"'fuse_atention'.*Did you mean 'fuse_attention'"
    check_refused(lambda model: fusewright.optimize(model, before="fuse_atention"), UnknownNameError, match)
    check_refused(
        lambda model: fusewright.optimize(model, passes=[object()]),
        UserInputError,
        "is not an instance of fusewright.Pass",
    )
    monkeypatch.setenv("FUSEWRIGHT_SKIP_PASSES", "fuse_atention")
    check_refused(lambda model: fusewright.optimize(model), UnknownNameError, match)


def test_unknown_variables_warn_and_wrong_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_DISABEL", "1")
    with pytest.warns(UserWarning, match=r"FUSEWRIGHT_DISABEL is not known.*Did you mean 'FUSEWRIGHT_DISABLE'"):
        fusewright.optimize(Net())
    monkeypatch.delenv("FUSEWRIGHT_DISABEL")
    monkeypatch.setenv("FUSEWRIGHT_STRICT", "yes")
    check_refused(lambda model: fusewright.optimize(model), UserInputError, "FUSEWRIGHT_STRICT must be 0 or 1")


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "file"))  # root may write anywhere but below a file
    match = r"cannot write to .*; set FUSEWRIGHT_CACHE_DIR to a writable folder"
    check_refused(lambda model: fusewright.optimize(model), CacheFolderError, match)


def test_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    match = r"torch 2.10.1\+cpu is not supported; install torch >= 2.11"
    check_refused(lambda model: fusewright.optimize(model), UnsupportedTorchError, match)


def test_a_store_of_another_version(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "store.sqlite"
    tuning_store.TuningStore(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = '999' WHERE name = 'schema'")
    check_refused(lambda model: fusewright.optimize(model, store=path), StoreVersionError, "schema 999")


def test_inputs_that_contradict_dims_or_buckets() -> None:
    model = cheap(Net().eval(), dims={"x": {0: "batch"}}, buckets={"batch": [8]})
    with pytest.raises(DimsError, match=r"size 9 is above the last edge 8; add a larger edge"):
        model(batch(9))
    assert model(batch(8)).shape == (8, 3)
    deep = cheap(nn.ReLU(), dims={"input": {2: "depth"}})
    with pytest.raises(DimsError, match=r"dims\['input'\]: dimension 2 is named, but the tensor has shape \(5, 8\)"):
        deep(batch())


class Fixed(nn.Module):
    """Works for six rows only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(6, 8) * 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_model_that_fixes_a_named_dimension(strict: bool) -> None:
    model = cheap(Fixed(), dims={"x": {0: "rows"}}, strict=strict)
    with pytest.raises(DimsError, match=r"cannot stay dynamic .*Remove its name from dims"):
        model(batch(6))


class CustomError(Exception):
    """An exception that needs two arguments."""

    def __init__(self, text: str, code: int) -> None:
        Exception.__init__(self, text)
        self.code = code


class Raises(nn.Module):
    """Raises in forward in one of several ways where x has three rows."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Embedding(3, 8)
        self.error = CustomError("mine", 7)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "index":
            result: Tensor = self.table(x.argmax(-1) + x.shape[0])
            return result
        if x.shape[0] == 3:
            if self.way == "value":
                raise ValueError("three rows")
            if self.way == "custom":
                raise self.error
            if self.way == "attribute":
                return self.missing
            return x @ x
        return x + 1


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", ["value", "custom", "attribute", "shape", "index"])
def test_an_exception_of_the_model_reaches_the_caller_unchanged(way: str, strict: bool) -> None:
    model = Raises(way)
    bad, good = torch.ones(3, 8), torch.ones(2, 8)
    with pytest.raises(Exception) as expected:  # noqa: PT011  whatever eager raises is right
        model(bad)
    good_result = model(good)
    cheap(model, strict=strict)
    for _ in range(2):
        with pytest.raises(type(expected.value)) as found:
            model(bad)
        assert type(found.value) is type(expected.value)
        assert str(found.value) == str(expected.value)
        torch.testing.assert_close(model(good), good_result)
    data = fusewright.explain(model).to_dict()
    assert data["dispatched"] >= 2, "one bad call must not make the good ones run eagerly"
    assert {b["variant"] for b in data["buckets"]} == {"aot_eager"}


def test_an_interrupted_compilation_leaves_a_model_that_compiles_at_the_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fusewright.runtime import fragment

    model = Net().eval()
    expected = model(batch())
    cheap(model)
    lower = fragment.lower

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(fragment, "lower", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    monkeypatch.setattr(fragment, "lower", lower)
    torch.testing.assert_close(model(batch()), expected)
    data = fusewright.explain(model).to_dict()
    assert (data["dispatched"], data["lowerings"], data["fallbacks"]) == (2, 1, [])
    other = threading.Thread(target=lambda: model(batch()))  # the lock was given back
    other.start()
    other.join(60)
    assert not other.is_alive()


def test_no_variable_of_ours_is_unknown_to_ourselves() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config.read_settings()
    assert caught == []
