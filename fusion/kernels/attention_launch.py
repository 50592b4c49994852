"""Launch, default configurations and ahead-of-time cases of the attention kernels."""
# B batch, N query heads, K key/value heads, T query tokens, S key tokens, H head size

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fusewright.fusion.kernels import attention as kernels
from fusewright.fusion.kernels.launch import KernelCase, KernelConfig, Wrap, identity

_LOG2E = 1.0 / math.log(2.0)
_TRITON_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class AttentionConfig:
    """Blocks and launch options of the three kernels."""

    forward: KernelConfig
    dq: KernelConfig
    dkdv: KernelConfig


def _config(block_t: int, block_s: int, warps: int, stages: int) -> KernelConfig:
    return KernelConfig({"BLOCK_T": block_t, "BLOCK_S": block_s}, num_warps=warps, num_stages=stages)


# The default tiles as (BLOCK_T, BLOCK_S, warps, stages) of forward, dq and dk/dv, by the widest head they serve. Chosen
# from compiled code, not from times: of the tiles tried on sm_90 none that spills, then the most tensor-core work a
# block, then the most blocks in flight. A mask costs registers, so it has rows of its own.
_HALF: Mapping[tuple[int, bool], tuple[KernelConfig, KernelConfig, KernelConfig]] = {
    (64, False): (_config(128, 64, 8, 3), _config(64, 64, 4, 2), _config(32, 64, 4, 2)),
    (64, True): (_config(64, 64, 4, 3), _config(64, 64, 4, 2), _config(32, 64, 4, 2)),
    (128, False): (_config(128, 64, 8, 2), _config(64, 64, 4, 2), _config(32, 64, 8, 2)),
    (128, True): (_config(128, 32, 8, 2), _config(64, 64, 8, 2), _config(32, 64, 8, 2)),
    (256, False): (_config(64, 32, 8, 2), _config(32, 32, 8, 1), _config(32, 32, 8, 1)),
    (256, True): (_config(64, 32, 8, 2), _config(32, 32, 8, 1), _config(32, 32, 8, 1)),
}
_FLOAT32: Mapping[tuple[int, bool], tuple[KernelConfig, KernelConfig, KernelConfig]] = {
    (64, False): (_config(32, 32, 4, 2), _config(32, 32, 4, 1), _config(16, 32, 4, 1)),
    (64, True): (_config(32, 32, 4, 2), _config(32, 32, 4, 1), _config(16, 32, 4, 1)),
    (128, False): (_config(32, 32, 8, 2), _config(32, 32, 8, 1), _config(32, 16, 8, 1)),
    (128, True): (_config(32, 32, 8, 2), _config(32, 32, 8, 1), _config(32, 16, 8, 1)),
}
_WIDEST_HEAD = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}


def supports(H: int, dtype: torch.dtype) -> bool:
    """Whether the kernels take this head size and dtype: wider heads find no tile without spills."""
    return dtype in _WIDEST_HEAD and H <= _WIDEST_HEAD[dtype]


def default_config(H: int, dtype: torch.dtype, masked: bool) -> AttentionConfig:
    """The default tiles for head size H and dtype that `supports` accepts, with or without a mask."""
    table = _FLOAT32 if dtype == torch.float32 else _HALF
    widest = next(limit for limit in (64, 128, 256) if limit >= H)
    return AttentionConfig(*table[widest, masked])


def _precision(dtype: torch.dtype) -> str:
    # Three tf32 products keep float32's accuracy on tensor cores; one would lose 13 bits of every score.
    return "tf32x3" if dtype == torch.float32 else "ieee"


def _strides(prefix: str, x: Tensor) -> dict[str, int]:
    b, h, t, _ = x.stride()
    return {f"st_{prefix}b": b, f"st_{prefix}h": h, f"st_{prefix}t": t}


def _mask_arguments(q: Tensor, k: Tensor, mask: Tensor | None) -> dict[str, Any]:
    if mask is None:
        zeros = dict.fromkeys(("st_mb", "st_mh", "st_mt", "st_ms"), 0)
        return {"mask_ptr": None, **zeros, "MASK": kernels.NO_MASK.value}
    kind = kernels.BOOLEAN if mask.dtype == torch.bool else kernels.ADDITIVE
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)  # Triton has no pointer to bits
    b, h, t, s = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).stride()
    return {"mask_ptr": mask, "st_mb": b, "st_mh": h, "st_mt": t, "st_ms": s, "MASK": kind.value}


def _common(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, lse: Tensor, causal: bool, scale: float
) -> dict[str, Any]:
    batch_stride, head_stride, token_stride = lse.stride()
    mask_arguments = _mask_arguments(q, k, mask)
    base_two = 1.0 if mask_arguments["MASK"] == kernels.ADDITIVE.value else _LOG2E
    return {
        **{"q_ptr": q, "k_ptr": k, "v_ptr": v, "lse_ptr": lse},
        **_strides("q", q) | _strides("k", k) | _strides("v", v) | mask_arguments,
        **{"st_lb": batch_stride, "st_lh": head_stride, "st_lt": token_stride},
        **{"N": q.shape[1], "GROUP": q.shape[1] // k.shape[1], "T": q.shape[2], "S": k.shape[2]},
        **{"scale": scale * base_two, "HEAD": q.shape[3], "CAUSAL": causal, "PRECISION": _precision(q.dtype)},
        "BLOCK_H": max(16, triton.next_power_of_2(q.shape[3])),  # tensor cores take tiles of 16 and more
    }


def _launch(wrap: Wrap, kernel: Any, config: KernelConfig, programs: int, arguments: Mapping[str, Any]) -> None:
    wrap(kernel)[(programs,)](**arguments, **config.blocks, num_warps=config.num_warps, num_stages=config.num_stages)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor, causal: bool, scale: float,
    config: AttentionConfig | None = None, wrap: Wrap = identity,
) -> None:  # fmt: skip
    """Fill out (as q) and lse (B, N, T) float32. Last dims contiguous; mask 4-D and broadcastable, or None."""
    chosen = (config or default_config(q.shape[3], q.dtype, mask is not None)).forward
    arguments = _common(q, k, v, mask, lse, causal, scale) | {"o_ptr": out} | _strides("o", out)
    programs = triton.cdiv(q.shape[2], chosen.blocks["BLOCK_T"]) * q.shape[0] * q.shape[1]
    _launch(wrap, kernels.attention_forward, chosen, programs, arguments)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, causal: bool, scale: float,
    config: AttentionConfig | None = None, wrap: Wrap = identity,
) -> None:  # fmt: skip
    """Fill dq, dk and dv. Last dims contiguous; no gradient is made for the mask."""
    chosen = config or default_config(q.shape[3], q.dtype, mask is not None)
    delta = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    mass = torch.empty_like(delta) if mask is not None and mask.dtype != torch.bool else None
    shared = _common(q, k, v, mask, lse, causal, scale) | {"do_ptr": dout} | _strides("do", dout)
    shared |= {"delta_ptr": delta, "mass_ptr": mass, "grad_scale": scale}
    programs = triton.cdiv(q.shape[2], chosen.dq.blocks["BLOCK_T"]) * q.shape[0] * q.shape[1]
    own = {"o_ptr": out, "dq_ptr": dq, **_strides("o", out), **_strides("dq", dq)}
    _launch(wrap, kernels.attention_backward_dq, chosen.dq, programs, shared | own)
    programs = triton.cdiv(k.shape[2], chosen.dkdv.blocks["BLOCK_S"]) * k.shape[0] * k.shape[1]
    own = {"dk_ptr": dk, "dv_ptr": dv, **_strides("dk", dk), **_strides("dv", dv)}
    _launch(wrap, kernels.attention_backward_dkdv, chosen.dkdv, programs, shared | own)


def offline_cases(
    H: int, dtype: torch.dtype = torch.bfloat16, causal: bool = True, mask: str | None = None,
    config: AttentionConfig | None = None,
) -> list[KernelCase]:  # fmt: skip
    """The three kernels as launched for head size H, for compilation ahead. mask: None, "additive" or "boolean"."""
    chosen = config or default_config(H, dtype, mask is not None)
    name = _TRITON_DTYPES[dtype]
    kind = {None: kernels.NO_MASK, "additive": kernels.ADDITIVE, "boolean": kernels.BOOLEAN}[mask].value
    pointers = {f"{p}_ptr": f"*{name}" for p in ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
    pointers |= {f"{p}_ptr": "*fp32" for p in ("lse", "delta", "mass")}
    constants = {"HEAD": H, "MASK": kind, "CAUSAL": causal, "PRECISION": _precision(dtype)}
    constants |= {"BLOCK_H": max(16, triton.next_power_of_2(H))}
    if mask is not None:
        pointers["mask_ptr"] = "*u8" if mask == "boolean" else f"*{name}"
    # The launcher makes a stride of 1 a constant too: the keys' stride of a mask.
    absent: dict[str, int | None] = {"mask_ptr": None} if mask is None else {"st_ms": 1}
    absent |= {} if mask == "additive" else {"mass_ptr": None}
    cases = []
    for kernel, blocks in (
        (kernels.attention_forward, chosen.forward),
        (kernels.attention_backward_dq, chosen.dq),
        (kernels.attention_backward_dkdv, chosen.dkdv),
    ):
        fixed = constants | dict(blocks.blocks) | {a: v for a, v in absent.items() if a in kernel.arg_names}
        types = {
            a: pointers.get(a, "fp32" if a.endswith("scale") else "i32") for a in kernel.arg_names if a not in fixed
        }
        strides = tuple(a for a in types if a.startswith("st_") and not a.startswith(("st_l", "st_m")))
        cases.append(
            KernelCase(
                name=f"{kernel.fn.__name__}[H={H},{name},causal={causal},mask={mask}]",
                kernel=kernel,
                types=types,
                constants=fixed,
                divisible=tuple(a for a in types if a.endswith("_ptr")) + strides,
                num_warps=blocks.num_warps,
                num_stages=blocks.num_stages,
            )
        )
    return cases
