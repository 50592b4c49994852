"""The mended interpreter: bfloat16 as a GPU rounds it, library functions, and nothing left behind after a launch."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language.extra import libdevice
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction

from fusewright.testing.interpreter import bf16_to_f32, f32_to_bf16, interpreted


@triton.jit
def _double(x):
    return x + x


@triton.jit
def elementwise(x_ptr, y_ptr, out_ptr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    y = tl.load(y_ptr + i)
    if KIND == "add":
        z = x + y
    elif KIND == "mul":
        z = x * y
    elif KIND == "div":
        z = x / y
    elif KIND == "neg":
        z = -x
    elif KIND == "abs":
        z = tl.abs(x)
    elif KIND == "max":
        z = tl.maximum(x, y)
    elif KIND == "where":
        z = tl.where(x < y, x, y * 2.0)
    elif KIND == "exp":
        z = tl.exp(x.to(tl.float32))
    elif KIND == "half":
        z = x.to(tl.float16)
    elif KIND == "int":
        z = (x * 8.0).to(tl.int32)
    elif KIND == "tanh":
        z = libdevice.tanh(x.to(tl.float32))
    elif KIND == "helper":
        z = _double(x)
    else:
        z = tl.full((BLOCK,), 1.00390625, tl.bfloat16) + x * 0.0
    tl.store(out_ptr + i, z.to(out_ptr.dtype.element_ty))


EXPECTED = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "max": torch.maximum,
    "where": lambda x, y: torch.where(x < y, x, y * 2),
    "exp": lambda x, y: x.float().exp(),
    "half": lambda x, y: x.half(),
    "int": lambda x, y: (x * 8).int(),
    "tanh": lambda x, y: x.float().tanh(),
    "helper": lambda x, y: x + x,
    "constant": lambda x, y: torch.full_like(x, 1.00390625),
}


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("kind", EXPECTED)
def test_bf16_elementwise_equals_torch(kind: str) -> None:
    x, y = bf16(256), bf16(256)
    out = torch.full_like(x, torch.nan)
    interpreted(elementwise)[(1,)](x, y, out, KIND=kind, BLOCK=256)
    expected = EXPECTED[kind](x, y).to(torch.bfloat16)
    if kind in ("exp", "tanh"):  # NumPy's and torch's float32 functions may differ in the last bit
        torch.testing.assert_close(out, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(out, expected)


def test_rounding_is_to_nearest_even_on_every_kind_of_value() -> None:
    every = np.arange(65536, dtype=np.uint16)
    values = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(bf16_to_f32(every), values, equal_nan=True)
    finite = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        halfway = (finite.view(np.uint32) | np.uint32(0x8000)).view(np.float32)  # exact ties, both parities
        near = np.concatenate(
            [halfway, np.nextafter(halfway, np.float32(np.inf)), np.nextafter(halfway, np.float32(0))]
        )
    cases = np.concatenate([near, values])
    expected = torch.from_numpy(cases).bfloat16().float().numpy()
    assert np.array_equal(bf16_to_f32(f32_to_bf16(cases)), expected, equal_nan=True)


@triton.jit
def reductions(x_ptr, sum_ptr, max_ptr, arg_ptr, scan_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + i[:, None] * BLOCK_N + j[None, :])
    tl.store(sum_ptr + i, tl.sum(x, 1))
    tl.store(max_ptr + i, tl.max(x, 1))
    tl.store(arg_ptr + i, tl.argmin(x, 1))
    tl.store(scan_ptr + i[:, None] * BLOCK_N + j[None, :], tl.cumsum(x, 1))


def test_bf16_reductions_and_scans_act_on_values() -> None:
    x = bf16(4, 32)
    total, peak, scan = (torch.full(s, torch.nan, dtype=torch.bfloat16) for s in ((4,), (4,), (4, 32)))
    low = torch.full((4,), -1, dtype=torch.int32)
    interpreted(reductions)[(1,)](x, total, peak, low, scan, BLOCK_M=4, BLOCK_N=32)
    assert torch.equal(total, x.float().sum(1).bfloat16())
    assert torch.equal(peak, x.amax(1))
    assert torch.equal(low.long(), x.float().argmin(1))
    torch.testing.assert_close(scan, x.float().cumsum(1).bfloat16(), rtol=2**-7, atol=2**-7)


@triton.jit
def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + n[:, None] * K + k[None, :])
    tl.store(out_ptr + m[:, None] * N + n[None, :], tl.dot(a, tl.trans(b)).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_accumulates_in_float32(dtype: torch.dtype) -> None:
    a, b = torch.randn(16, 64).to(dtype), torch.randn(32, 64).to(dtype)
    out = torch.full((16, 32), torch.nan)
    interpreted(product)[(1,)](a, b, out, M=16, N=32, K=64)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T, rtol=1e-5, atol=1e-5)


@triton.jit
def add_atomically(x_ptr, out_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)))


def test_bf16_atomics_raise_instead_of_adding_bits() -> None:
    with pytest.raises(InterpreterError, match="bfloat16 atomics are not interpreted"):
        interpreted(add_atomically)[(1,)](bf16(8), torch.zeros(8).bfloat16(), BLOCK=8)
    out = torch.zeros(8)
    interpreted(add_atomically)[(1,)](torch.ones(8), out, BLOCK=8)
    assert torch.equal(out, torch.ones(8))


def _language_state() -> tuple[object, ...]:
    return tl.load, tl.core.load, tl.range, JITFunction.__call__, libdevice.tanh, vars(tl.tensor).get("__index__")


def test_a_launch_leaves_no_patch_behind_and_the_kernel_still_compiles() -> None:
    assert os.environ.get("TRITON_INTERPRET", "0") == "0"
    before, names = _language_state(), set(elementwise.fn.__globals__)
    x = bf16(16)
    interpreted(elementwise)[(1,)](x, x, torch.empty_like(x), KIND="helper", BLOCK=16)
    with pytest.raises(InterpreterError):  # a launch that fails half-way restores as well
        interpreted(add_atomically)[(1,)](x, x, BLOCK=16)
    assert _language_state() == before
    assert set(elementwise.fn.__globals__) == names
    signature = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*bf16", "KIND": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(elementwise, signature=signature, constexprs={"KIND": "helper", "BLOCK": 16})
    assert "add" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


@triton.jit
def count(out_ptr, n):
    total = 0
    for i in range(tl.program_id(0), n):
        total += i
    tl.store(out_ptr + tl.program_id(0), total)


def test_a_tensor_bounds_a_loop_and_each_program_runs_once() -> None:
    out = torch.full((3,), -1, dtype=torch.int32)
    interpreted(count)[(3,)](out, 5)
    assert out.tolist() == [10, 10, 9]


def test_only_kernels_are_taken() -> None:
    with pytest.raises(TypeError, match=r"kernel must be a function made by triton\.jit, got function"):
        interpreted(elementwise.fn)
