"""What every test shares: own cache folders, a fresh compiler, options for golden graphs and GPU results."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CACHE_VARIABLES = {
    "FUSEWRIGHT_CACHE_DIR": "fusewright",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden graphs and show what changed")
    parser.addoption("--gpu-results", type=pathlib.Path, help="file to which GPU tests append a JSON line per result")


def pytest_configure(config: pytest.Config) -> None:
    """Point every cache that is not set at one folder of this session, so that no test meets an older run's verdicts.

    pytest-xdist's workers inherit the variables, and so share the folder of the process that started them.
    """
    unset = [name for name in CACHE_VARIABLES if name not in os.environ]
    if unset:
        folder = tempfile.mkdtemp(prefix="fusewright-test.")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        for name in unset:
            os.environ[name] = os.path.join(folder, CACHE_VARIABLES[name])
    os.environ.setdefault("FUSEWRIGHT_COST", "off")  # test models are so small that hardly a rewrite pays
    os.environ["HF_HUB_OFFLINE"] = "1"  # weights are random; a test that downloads any should fail at once


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs a real GPU (scripts/gpu)"))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Seed before a test, and drop what Dynamo compiled after it. Costs nothing where torch was never imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten instead of compared."""
    return bool(request.config.getoption("--update-golden"))


@pytest.fixture
def gpu_record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`gpu_record(metric="...", value=..., ...)` appends a JSON line with test, device, versions and time (UTC).

    Without --gpu-results the row is printed instead, so that a run by hand shows it too.
    """
    target: pathlib.Path | None = request.config.getoption("--gpu-results")

    def record(**fields: Any) -> None:
        import torch
        import triton

        row = {
            "test": request.node.nodeid,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **fields,
        }
        line = json.dumps(row, sort_keys=True)
        if target is None:
            print(line)
            return
        with target.open("a") as file:
            file.write(line + "\n")

    return record
