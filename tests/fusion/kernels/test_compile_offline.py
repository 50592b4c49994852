"""What the kernels become on GPUs that are not there: the default configurations, and the reader of the code."""
# H head size, N row size

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest
import torch
import triton

from fusewright.fusion.kernels import attention_launch, rms_norm
from fusewright.fusion.kernels.compile_offline import (
    LIMITS,
    KernelReport,
    OfflineCompilationError,
    OfflineCompiler,
    blocks_per_multiprocessor,
    case_key,
    compile_case,
)
from fusewright.fusion.kernels.launch import KernelCase

CASES = {
    case.name: case
    for case in (
        *rms_norm.offline_cases(N=4096),
        *attention_launch.offline_cases(H=64),
        *attention_launch.offline_cases(H=128),
        *attention_launch.offline_cases(H=128, causal=False, mask="additive"),
    )
}

# The defaults were chosen with Triton 3.8. The register allocation of 3.6 spills a few values of the backward kernels
# (up to 36 stores, measured on sm_90); older compilers are not worth a second table.
SPILL_ALLOWED = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 160


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OfflineCompiler]:
    return OfflineCompiler(tmp_path_factory.mktemp("reports"))


@pytest.mark.parametrize("name", CASES)
def test_default_configurations_fit_on_sm_90(compiler: OfflineCompiler, name: str) -> None:
    report = compiler.report(CASES[name], 90)
    assert report.spill_bytes <= SPILL_ALLOWED, report
    assert bool({"STL", "LDL"} & set(report.opcodes)) == (report.spill_bytes > 0)
    assert report.shared_bytes <= LIMITS[90].shared_bytes_per_block
    assert report.blocks_per_multiprocessor >= 1
    assert 0 < report.occupancy <= 1
    if name.startswith("attention"):
        assert report.opcodes.get("HGMMA", 0) > 0, report.opcodes
        assert report.opcodes.get("FFMA", 0) < 2000  # no product left the tensor cores


@pytest.mark.parametrize(("capability", "opcode"), [(80, "HMMA"), (100, "UTCHMMA")])
def test_other_generations_use_their_tensor_cores(compiler: OfflineCompiler, capability: int, opcode: str) -> None:
    forward = attention_launch.offline_cases(H=64)[0]
    report = compiler.report(forward, capability)
    assert report.fits, report
    assert report.opcodes.get(opcode, 0) > 0, report


def test_float32_keeps_its_accuracy_on_tensor_cores(compiler: OfflineCompiler) -> None:
    forward = attention_launch.offline_cases(H=64, dtype=torch.float32)[0]
    report = compiler.report(forward, 90)
    assert report.fits, report
    assert report.tensor_core_instructions > 0, report
    single = dataclasses.replace(forward, constants={**forward.constants, "PRECISION": "tf32"})
    assert report.tensor_core_instructions >= 3 * compiler.report(single, 90).tensor_core_instructions


def test_a_tile_that_does_not_fit_is_seen(compiler: OfflineCompiler) -> None:
    assert 2 * rms_norm.WIDEST_ROW == 32768
    report = compiler.report(rms_norm.offline_cases(N=32768)[1], 90)
    assert report.spill_bytes > 256
    assert not report.fits


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "blocks"),
    [
        (32, 0, 4, 16),  # 64 warps / 4
        (128, 0, 8, 2),  # 65536 / (128 * 32) = 16 warps
        (255, 0, 8, 1),
        (40, 100 * 1024, 4, 2),  # 228 KiB / (100 + 1) KiB
        (40, 227 * 1024, 4, 1),
        (40, 228 * 1024, 4, 0),  # above the limit of a block
        (32, 0, 1, 32),  # resident blocks
    ],
)
def test_occupancy_formula(registers: int, shared: int, warps: int, blocks: int) -> None:
    assert blocks_per_multiprocessor(90, registers, shared, warps) == blocks


def _small() -> KernelCase:
    return rms_norm.offline_cases(N=64)[0]


def test_reports_are_kept_under_all_that_decides_them(tmp_path: pathlib.Path) -> None:
    case = _small()

    def fake(case: KernelCase, capability: int) -> KernelReport:
        return KernelReport(case.name, capability, 32, 0, 0, {"MUFU": 2}, 16, 1.0)

    first = OfflineCompiler(tmp_path, fake)
    report = first.report(case, 90)
    assert first.report(case, 90) == report
    assert first.compiled == 1
    again = OfflineCompiler(tmp_path, fake)
    assert again.report(case, 90) == report
    assert again.compiled == 0
    changes = {
        "types": {**case.types, "x_ptr": "*fp16"},
        "constants": {**case.constants, "BLOCK_M": 4},
        "divisible": (),
        "num_warps": 8,
        "num_stages": 5,
        "extra_options": {"maxnreg": 64},
        "kernel": rms_norm.rms_norm_backward,
    }
    keys = {case_key(dataclasses.replace(case, **{field: value}), 90) for field, value in changes.items()}
    keys |= {case_key(case, 90), case_key(case, 80)}
    assert len(keys) == len(changes) + 2
    assert case_key(dataclasses.replace(case, name="other"), 90) == case_key(case, 90)


def test_errors_say_what_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"argument 'capability' is 70; known are \[80, 90, 100\]"):
        compile_case(_small(), 70)
    broken = dataclasses.replace(_small(), constants={**_small().constants, "BLOCK_N": 63})
    with pytest.raises(OfflineCompilationError, match=r"rms_norm_forward\[N=64,bf16\] for sm_90"):
        compile_case(broken, 90)
