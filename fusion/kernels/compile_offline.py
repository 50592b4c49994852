"""Compile kernels for GPUs that are not there and read from the machine code what decides their speed.

Only code is judged: registers, spills, shared memory, tensor-core instructions, blocks per multiprocessor. Times and
values need a GPU. Uses the assembler and the disassemblers that Triton's wheel ships.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fusewright.fusion.kernels.launch import KernelCase

_TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# Raised when what is read from the code changes, so that cached reports of an older reader are not served.
_READER_VERSION = 1

# Instructions counted in a report: matrix products per architecture (HMMA sm_80, HGMMA sm_90, UTCHMMA sm_100), copies
# to shared memory (LDGSTS, UTMALDG), special functions (MUFU), and spills to local memory (STL, LDL).
TENSOR_CORE_OPCODES = ("HMMA", "HGMMA", "UTCHMMA")
_COUNTED = (*TENSOR_CORE_OPCODES, "FFMA", "LDGSTS", "UTMALDG", "MUFU", "STL", "LDL")


class OfflineCompilationError(RuntimeError):
    """The compiler or a disassembler refused; the message carries what it said."""


@dataclass(frozen=True)
class MultiprocessorLimits:
    """What one multiprocessor holds. Source: CUDA C++ Programming Guide, "Technical Specifications per Compute
    Capability": registers 64 Ki, 64 resident warps and 32 resident blocks on all three; shared memory differs."""

    shared_bytes: int
    shared_bytes_per_block: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32
    registers_per_thread: int = 255


LIMITS: Mapping[int, MultiprocessorLimits] = {
    80: MultiprocessorLimits(shared_bytes=164 * 1024, shared_bytes_per_block=163 * 1024),
    90: MultiprocessorLimits(shared_bytes=228 * 1024, shared_bytes_per_block=227 * 1024),
    100: MultiprocessorLimits(shared_bytes=228 * 1024, shared_bytes_per_block=227 * 1024),
}


@dataclass(frozen=True)
class KernelReport:
    """What one kernel became on one target.

    registers: per thread. spill_bytes: local memory per thread. shared_bytes: static and dynamic, per block.
    opcodes: instruction counts in the text of the kernel, not executions. occupancy: resident warps / 64.
    """

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    opcodes: Mapping[str, int]
    blocks_per_multiprocessor: int
    occupancy: float

    @property
    def tensor_core_instructions(self) -> int:
        return sum(self.opcodes.get(o, 0) for o in TENSOR_CORE_OPCODES)

    @property
    def fits(self) -> bool:
        """Launchable and without spills."""
        return self.spill_bytes == 0 and self.blocks_per_multiprocessor > 0


def blocks_per_multiprocessor(capability: int, registers: int, shared_bytes: int, num_warps: int) -> int:
    """Blocks resident at once on a multiprocessor; 0 where a block cannot be launched at all.

    Registers are given out to a warp in units of 256 and warps to four schedulers; a block takes its shared memory in
    units of 128 bytes plus 1 KiB for the system. Source: the CUDA occupancy calculator's rules for capability 8 and up.
    """
    limits = LIMITS[capability]
    if shared_bytes > limits.shared_bytes_per_block or registers > limits.registers_per_thread:
        return 0
    per_warp = -(-max(registers, 1) * 32 // 256) * 256
    by_registers = limits.registers // per_warp // 4 * 4 // num_warps
    by_shared = limits.shared_bytes // (-(-(shared_bytes + 1024) // 128) * 128)
    return min(by_registers, by_shared, limits.warps // num_warps, limits.blocks)


def _run_tool(tool: str, *arguments: str) -> str:
    done = subprocess.run([str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise OfflineCompilationError(f"{tool} failed ({done.returncode}): {done.stderr.strip()[:500]}")
    return done.stdout


def _read_binary(cubin: bytes) -> tuple[int, int, int, dict[str, int]]:
    """Registers, local bytes and static shared bytes per thread or block, and the counted opcodes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _run_tool("cuobjdump", "--dump-resource-usage", file.name)
        listing = _run_tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    if found is None:
        raise OfflineCompilationError(f"cuobjdump printed no resource usage: {usage.strip()[:500]}")
    registers, stack, shared, local = map(int, found.groups())
    opcodes = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9]+)", listing, re.MULTILINE))
    return registers, stack + local, shared, {o: opcodes[o] for o in _COUNTED if opcodes[o]}


def _options(case: KernelCase) -> dict[str, Any]:
    return {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.extra_options}


def compile_case(case: KernelCase, capability: int) -> KernelReport:
    """Compile for sm_<capability> (80, 90 or 100) and read the result; about a second, more for large tiles.

    Raises:
        ValueError: an unknown capability.
        OfflineCompilationError: the kernel does not compile there.
    """
    if capability not in LIMITS:
        raise ValueError(f"argument 'capability' is {capability}; known are {sorted(LIMITS)}")
    arguments = case.kernel.arg_names
    signature = {a: case.types.get(a, "constexpr") for a in arguments}
    divisible = {(arguments.index(a),): [["tt.divisibility", 16]] for a in case.divisible}
    source = ASTSource(case.kernel, signature=signature, constexprs=dict(case.constants), attrs=divisible)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=_options(case))
    except Exception as error:  # whatever the compiler raises means the same here
        raise OfflineCompilationError(f"{case.name} for sm_{capability}: {error}") from error
    registers, spilled, static, opcodes = _read_binary(compiled.asm["cubin"])
    # Triton asks for its shared memory at launch; the binary's own figure is the static part only.
    shared = max(static, compiled.metadata.shared)
    # Warp specialization may have added warps to those asked for.
    blocks = blocks_per_multiprocessor(capability, registers, shared, compiled.metadata.num_warps)
    occupancy = blocks * compiled.metadata.num_warps / LIMITS[capability].warps
    return KernelReport(case.name, capability, registers, spilled, shared, opcodes, blocks, occupancy)


def case_key(case: KernelCase, capability: int) -> str:
    """Digest of everything that decides the report: source with its callees, types, constants, options, compiler."""
    parts = {
        "source": case.kernel.cache_key,
        "types": dict(case.types),
        "constants": {name: repr(value) for name, value in case.constants.items()},
        "divisible": sorted(case.divisible),
        "options": {name: repr(value) for name, value in _options(case).items()},
        "capability": capability,
        "triton": triton.__version__,
        "reader": _READER_VERSION,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class OfflineCompiler:
    """Compiles cases once; the reports are kept as JSON files in `folder` (made if missing), one per key."""

    def __init__(
        self, folder: pathlib.Path, compile_one: Callable[[KernelCase, int], KernelReport] = compile_case
    ) -> None:
        self.folder = folder
        self.compiled = 0  # how many were not served from the folder
        self._compile_one = compile_one
        folder.mkdir(parents=True, exist_ok=True)

    def report(self, case: KernelCase, capability: int) -> KernelReport:
        """The report of `case` on sm_<capability>, from the folder where it is known; raises as `compile_case`."""
        path = self.folder / f"{case_key(case, capability)}.json"
        if path.exists():
            return KernelReport(**json.loads(path.read_text()))
        report = self._compile_one(case, capability)
        self.compiled += 1
        with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".tmp", delete=False) as file:
            json.dump(asdict(report), file)
        pathlib.Path(file.name).replace(path)  # whole or absent, also with several processes
        return report
