"""Which cells `pytest benchmarks/` runs."""

from __future__ import annotations

import pytest

from fusewright.bench.cells import SuiteCell, candidates_of, plan_cells
from fusewright.bench.engines import missing
from fusewright.errors import UserInputError

QUICK = "mlp,bert,resnet50,llama_eager"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose cells."""
    group = parser.getgroup("fusewright")
    group.addoption("--workloads", default=QUICK, help=f"comma-separated names; default {QUICK}")
    group.addoption("--modes", default="inference,training", help="default both: inference,training")
    group.addoption("--providers", default="eager,compile,onnxruntime,openvino,fusewright", help="who runs each cell")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes `cell` and `provider` at the middle length of the chosen workloads."""
    if not {"cell", "provider"} <= set(metafunc.fixturenames):
        return
    only, modes, providers = (
        metafunc.config.getoption(name).split(",") for name in ("workloads", "modes", "providers")
    )
    found = []
    for name in only:
        for mode in modes:
            try:
                cells: list[SuiteCell] = plan_cells("benchmarks.workloads:COMPARABLE", [name], [mode])
            except UserInputError as error:
                raise pytest.UsageError(str(error)) from error
            found += [(cells[len(cells) // 2], one) for one in candidates_of(providers, mode)] if cells else []
    marked = [
        pytest.param(cell, one, id=f"{cell.name}-{one}", marks=[pytest.mark.skip(reason=why)] if why else [])
        for cell, one in found
        for why in [missing(one)]
    ]
    metafunc.parametrize(("cell", "provider"), marked)
