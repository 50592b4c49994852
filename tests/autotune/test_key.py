"""A relevant change makes a new key, and nothing else does."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusewright.autotune.key import (
    NOT_IN_KEY,
    SOURCES,
    KeyContext,
    TuningKey,
    device_name,
    differences,
    reasons,
    source_digest,
)
from fusewright.capture.shapes import DimRange, ShapeBucket
from fusewright.config import Numerics
from fusewright.errors import UserInputError

BUCKET = ShapeBucket((DimRange("tokens", 2, 128),))


def key(**context: Any) -> TuningKey:
    return TuningKey("f" * 32, BUCKET, dataclasses.replace(KeyContext.current(), **context))


def flipped(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"other than {value}"


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(KeyContext)])
def test_a_change_of_any_field_of_the_context_makes_a_new_key(name: str) -> None:
    other = key(**{name: flipped(getattr(KeyContext.current(), name))})
    assert other.digest() != key().digest()
    assert [line.split(":")[0] for line in differences(key().to_dict(), other.to_dict())] == [name]


@pytest.mark.parametrize(
    "bucket",
    [
        ShapeBucket(),
        ShapeBucket((DimRange("tokens", 2, 129),)),
        ShapeBucket((DimRange("tokens", 3, 128),)),
        ShapeBucket((DimRange("frames", 2, 128),)),
        ShapeBucket((DimRange("tokens", 2, 128), DimRange("z", 2, 3))),
    ],
)
def test_another_bucket_or_graph_makes_a_new_key(bucket: ShapeBucket) -> None:
    assert dataclasses.replace(key(), bucket=bucket).digest() != key().digest()
    assert dataclasses.replace(key(), fingerprint="0" * 32).digest() != key().digest()


def test_every_field_says_why() -> None:
    names = {f.name for f in dataclasses.fields(KeyContext)} | {"fingerprint", "bucket"}
    assert reasons().keys() == names
    assert all(len(why) > 10 for why in [*reasons().values(), *NOT_IN_KEY.values()])


def test_a_key_survives_json() -> None:
    assert TuningKey.from_json(key().to_json()) == key()
    with pytest.raises(UserInputError, match="not a TuningKey"):
        TuningKey.from_json('{"fingerprint": "f"}')


def with_threads() -> KeyContext:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        return KeyContext.current()
    finally:
        torch.set_num_threads(before)


def with_determinism() -> KeyContext:
    torch.use_deterministic_algorithms(True)
    try:
        return KeyContext.current()
    finally:
        torch.use_deterministic_algorithms(False)


def with_matmul_precision() -> KeyContext:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return KeyContext.current()
    finally:
        torch.set_float32_matmul_precision(before)


def with_autocast() -> KeyContext:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return KeyContext.current()


def without_gradients() -> KeyContext:
    with torch.no_grad():
        return KeyContext.current()


def in_inference_mode() -> KeyContext:
    with torch.inference_mode():
        return KeyContext.current()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (with_threads, "threads"),
        (with_determinism, "deterministic"),
        (with_matmul_precision, "matmul_precision"),
        (with_autocast, "autocast"),
        (without_gradients, "mode"),
        (in_inference_mode, "mode"),
        (lambda: KeyContext.current("meta"), "device"),
        (lambda: KeyContext.current(numerics=Numerics.EXACT), "numerics"),
        (lambda: KeyContext.current(frozen_weights=True), "frozen_weights"),
        (lambda: KeyContext.current(user_passes="abc"), "user_passes"),
    ],
)
def test_the_process_state_that_changes_code_is_read(make: Callable[[], KeyContext], field: str) -> None:
    here, there = dataclasses.asdict(KeyContext.current()), dataclasses.asdict(make())
    changed = {name for name in here if here[name] != there[name]}
    assert changed == {field}


def test_another_process_folder_and_environment_give_the_same_key(tmp_path: pathlib.Path) -> None:
    root = pathlib.Path(__file__).resolve().parents[2]
    code = (
        "from fusewright.autotune.key import KeyContext, TuningKey\n"
        "from fusewright.capture.shapes import DimRange, ShapeBucket\n"
        "print(TuningKey('f' * 32, ShapeBucket((DimRange('tokens', 2, 128),)), KeyContext.current()).digest())"
    )
    env = os.environ | {
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "7",
        "USER": "somebody",
        "HOME": str(tmp_path),
        "HOSTNAME": "elsewhere",
        "RANK": "3",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == key().digest()


def make_sources(root: pathlib.Path) -> pathlib.Path:
    for folder in SOURCES:
        (root / folder / "inner").mkdir(parents=True)
        (root / folder / "inner" / "a.py").write_text("x = 1\n")
    return root


@pytest.mark.parametrize("folder", SOURCES)
def test_a_change_in_any_source_folder_changes_the_digest(tmp_path: pathlib.Path, folder: str) -> None:
    before = source_digest(make_sources(tmp_path / "one"))
    assert source_digest(make_sources(tmp_path / "two")) == before
    (tmp_path / "two" / folder / "inner" / "a.py").write_text("x = 2\n")
    source_digest.cache_clear()
    assert source_digest(tmp_path / "two") != before


def test_moving_text_between_files_or_renaming_one_changes_the_digest(tmp_path: pathlib.Path) -> None:
    before = source_digest(make_sources(tmp_path / "one"))
    moved = make_sources(tmp_path / "two") / "passes" / "inner"
    (moved / "a.py").rename(moved / "b.py")
    assert source_digest(tmp_path / "two") != before


def test_the_digest_covers_the_real_sources_through_the_links(tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert source_digest() != source_digest(empty)


def test_the_device_is_named_by_kind() -> None:
    name = device_name(torch.device("cpu"))
    assert name.startswith("cpu ")
    assert len(name) > len("cpu ")
