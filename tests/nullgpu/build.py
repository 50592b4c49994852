"""Builds the stand-in CUDA library for the torch that is installed, once, into a cache folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
# The runtime, driver and cuBLAS entry points that torch binds at load. cuFile is another library, and real.
_OURS = re.compile(r"(__cuda|cuda[A-Z]|cu(?!File)[A-Z]|cublas)\w+")
# What of cuBLAS is work on a stream rather than a setting or a handle: all of it takes the handle first.
_BLAS_WORK = re.compile(r"cublas(?!Set|Get|Create|Destroy|Logger|Lt)\w+")


class NullGpuUnavailableError(Exception):
    """The null GPU cannot be built or used on this machine; the message says why."""


def build() -> Path:
    """Return the folder that holds `libcuda.so.1`, building it first (a few seconds) if it is not cached.

    The cache key covers our sources, torch's version and Python's platform. Safe to call from several processes.

    Raises:
        NullGpuUnavailableError: gcc, nm, the CUDA headers of the wheels or a CUDA build of torch is missing.
    """
    torch_folder = _package_folder("torch")
    if not (torch_folder / "lib" / "libtorch_cuda.so").exists():
        raise NullGpuUnavailableError("torch is installed without CUDA (no libtorch_cuda.so)")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise NullGpuUnavailableError(f"{tool} is not installed")
    includes = _include_folders(torch_folder.parent)
    target = _cache_root() / _key()
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=target.parent))
    try:
        _compile(work, includes, torch_folder / "lib")
        for rest in work.glob("*.o"):
            rest.unlink()
        for name in ("libcuda.so.1", "libcuda.so"):
            (work / name).symlink_to("libnullgpu.so")
        work.rename(target)
    except OSError:
        if not target.exists():  # else another process was faster, and its library is the same
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise NullGpuUnavailableError(f"{name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _include_folders(site: Path) -> list[Path]:
    """Folders of CUDA headers: the runtime's wheel first; Triton's wheel adds `crt/`, which that one lacks."""
    runtime = [path.parent for path in sorted(site.glob("nvidia/*/include/cuda_runtime_api.h"))]
    if not runtime:
        raise NullGpuUnavailableError(
            "the CUDA headers are missing (wheel nvidia-cuda-runtime, folder nvidia/*/include)"
        )
    triton = site / "triton" / "backends" / "nvidia" / "include"
    if not (triton / "crt" / "host_defines.h").exists():
        raise NullGpuUnavailableError("triton is not installed, or its wheel brings no CUDA headers")
    return [*runtime, triton]


def _cache_root() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fusewright-tests" / "nullgpu"


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.iterdir(), Path(__file__)]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    versions = [importlib.metadata.version(name) for name in ("torch", "triton")]
    digest.update(repr((versions, sys.platform, os.uname().machine)).encode())
    return digest.hexdigest()[:24]


def _compile(work: Path, includes: list[Path], torch_libs: Path) -> None:
    flags = ["-O1", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
    _run(["gcc", "-c", *flags, *(f"-I{path}" for path in includes), *sources], cwd=work)
    objects = sorted(str(path) for path in work.glob("*.o"))
    defined = _symbols(["--defined-only", "--extern-only", *objects])
    wanted = {
        name for name in _symbols(["-D", "--undefined-only", *_torch_libraries(torch_libs)]) if _OURS.fullmatch(name)
    }
    (work / "stubs.c").write_text(stub_source(wanted - defined))
    # Stubs take no arguments: under the C calling convention a callee may ignore what it is given.
    _run(["gcc", "-c", *flags, "stubs.c"], cwd=work)
    link = ["-shared", "-Wl,-soname,libcuda.so.1", "-ldl", "-lpthread", "-o", "libnullgpu.so"]
    _run(["gcc", *objects, "stubs.o", *link], cwd=work)


def _torch_libraries(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("lib*.so") if "torch" in path.name or "cuda" in path.name)


def stub_source(names: set[str]) -> str:
    """Return C code with one function per name: cuBLAS products log a launch, all others log that they are stubs."""
    lines = [
        "/* Generated: functions of CUDA that torch binds and the null GPU does not model. */",
        "struct blas;",
        "extern int ng_blas(const char *, const struct blas *);",
        "extern void ng_stub(const char *);",
        '#define BLAS(f) __attribute__((visibility("default"))) int f(const struct blas *h) { return ng_blas(#f, h); }',
        '#define STUB(f) __attribute__((visibility("default"))) int f(void) { ng_stub(#f); return 0; }',
    ]
    lines += [f"{'BLAS' if _BLAS_WORK.fullmatch(name) else 'STUB'}({name})" for name in sorted(names)]
    return "\n".join(lines) + "\n"


def _symbols(nm_arguments: list[str]) -> set[str]:
    out = _run(["nm", "--format=posix", *nm_arguments], cwd=Path.cwd())
    return {line.split()[0].split("@")[0] for line in out.splitlines() if line and not line.endswith(":")}


def _run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:2])} ... failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build())
