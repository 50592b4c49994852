"""The process that `run_in_null_gpu` starts: prepares torch, runs one function or script, leaves hard."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class StructureOnlyError(Exception):
    """Code on the null GPU tried to compare values; kernels write nothing there, so the answer would mean nothing."""


def mark(label: str) -> None:
    """Write `label` into the event log, so that `Result.phase(label)` finds what follows."""
    ctypes.CDLL(None).nullgpu_mark(label.encode())


def memory() -> tuple[int, int]:
    """Return device bytes allocated now and at the peak, as the driver sees them."""
    used, peak = ctypes.c_size_t(), ctypes.c_size_t()
    ctypes.CDLL(None).nullgpu_memory(ctypes.byref(used), ctypes.byref(peak))
    return used.value, peak.value


def _forbid_comparing_values() -> None:
    import torch

    def guard(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, torch.Tensor) and a.is_cuda for a in (*args, *kwargs.values())):
                raise StructureOnlyError(f"{name} on a tensor of the null GPU: nothing was computed there")
            return original(*args, **kwargs)

        setattr(owner, name, refuse)

    for owner in (torch, torch.Tensor):
        for name in ("allclose", "equal", "isclose"):
            guard(owner, name)
    guard(torch.testing, "assert_close")


def _prepare_torch() -> None:
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch does not see the null GPU")
    # cuDNN is real and asks its device for more than a stand-in can answer.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    _forbid_comparing_values()


def _load(file: str) -> Any:
    name = "nullgpu_target_" + Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _run(request: dict[str, Any]) -> None:
    if "script" in request:
        runpy.run_path(request["script"], run_name="__main__")
        return
    function: Callable[..., Any] = getattr(_load(request["file"]), request["function"])
    answer = json.dumps(function(**request["arguments"]))
    print(answer, flush=True)


def main() -> NoReturn:
    """Run the request in `sys.argv[1]` and leave by `os._exit`: torch's clean-up at exit can crash on a stand-in."""
    status = 0
    try:
        _prepare_torch()
        _run(json.loads(sys.argv[1]))
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must see it and the process must not linger
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
