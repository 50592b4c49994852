"""Captures one lowered region into CUDA graphs, one per bucket of shapes, and replays them.

    run = RegionRunner(region, static_inputs=(0, 1))   # arguments 0 and 1 are parameters: they stay where they are
    outputs = run(weight, bias, x)                     # per bucket: warm-up, then capture and replay, then replay

Every call executes the region exactly once, captured or not. Whatever cannot be captured runs as a plain call and is
counted with its reason in `run.stats.plain`, so that a lost graph is never silent.

What a region may not do (`passes/cudagraph_regions.py` finds such places beforehand): wait for the device or read from
it, depend on values on the host, use another device. What it may do: write to its inputs, draw random numbers from
torch's default generators, return inputs that are static, return None or integers.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from fusewright.runtime.cudagraph.tensors import (
    CannotCaptureError,
    HandOut,
    Value,
    as_tensor,
    buffer_like,
    check_outputs,
    hand_out,
    how_to_hand_out,
    overlapping_mutation,
    storage_of,
    without_repeats,
)

Region: TypeAlias = Callable[..., Sequence[Value]]
_Key: TypeAlias = tuple[object, ...]

OUTER_CAPTURE = "the caller is capturing a graph itself"
AUTOGRAD = "autograd would record this call, and a replay is not recorded"
TOO_MANY_BUCKETS = "more shapes than max_graphs"
MOVING_INPUTS = "static inputs moved more than max_recaptures times"


@dataclass
class RegionStats:
    """Counts of one runner. Always `calls == warmups + replays + plain.total()`.

    Attributes:
        calls: how often the runner was called.
        warmups: calls that ran plainly because their bucket was new.
        captures: graphs captured, recaptures included.
        recaptures: captures made because a static input had moved.
        replays: calls answered by launching a graph.
        plain: calls that ran plainly for good, by reason.
        reserved_bytes: device memory by which torch's allocator grew during captures.
    """

    calls: int = 0
    warmups: int = 0
    captures: int = 0
    recaptures: int = 0
    replays: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    reserved_bytes: int = 0


class GraphPool:
    """Memory and a capture stream that the graphs of several runners share; one of them runs at a time.

    The graphs reuse each other's intermediate memory. That is sound because a runner copies its outputs out before any
    other graph of the pool may start: calls hold `lock`, and calls on different streams wait for each other.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._device: torch.device | None = None
        self._last: torch.cuda.Stream | None = None
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def open(self, device: torch.device) -> None:
        """Bind the pool to `device` at first use. Call with `lock` held."""
        if self._device is None:
            self._device = device
            # cuBLAS keeps a workspace per stream: with a stream of its own no other pool's graphs write to it.
            self.stream = torch.cuda.Stream(device)
        assert self._device == device, (self._device, device)

    def handle(self) -> torch.cuda._POOL_HANDLE:
        """Torch's name for the memory to capture into. Call with `lock` held."""
        if not self._graphs:  # torch drops the memory of a name with its last graph and then no longer accepts the name
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def adopt(self, graph: torch.cuda.CUDAGraph) -> None:
        """Note a graph that was captured into this pool. Call with `lock` held."""
        self._graphs.add(graph)

    def release(self, graph: torch.cuda.CUDAGraph) -> None:
        """Free a graph of this pool once it has run. Call with `lock` held."""
        torch.cuda.synchronize(self._device)
        graph.reset()
        self._graphs.discard(graph)

    def take_turn(self) -> torch.cuda.Stream:
        """Order the current stream after the pool's last user and return it. Call with `lock` held."""
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current
        return current


@dataclass
class _Captured:
    """One graph and the addresses that are part of it."""

    graph: torch.cuda.CUDAGraph
    static_addresses: list[int]
    moving: list[int]  # positions of the tensors that are not static
    buffers: list[Tensor]  # the graph's own copies of those
    outputs: list[Value]
    hand_out: list[HandOut]  # how the caller gets each output


@dataclass
class _Bucket:
    """State of one combination of shapes: warmed up, then captured or refused."""

    mutated: frozenset[int]
    captured: _Captured | None = None
    recaptures: int = 0
    refused: str | None = None


class RegionRunner:
    """Runs a region by CUDA graphs where it can, plainly where it cannot.

    Args:
        region: takes the flat arguments, returns a sequence of tensors, integers and Nones. Must not clear its inputs.
        static_inputs: positions of tensors that normally keep their address, dtype, shape and strides, such as
            parameters. The graph reads and writes them in place. Addresses are checked at each call; a new one makes a
            new capture. The rest is trusted, as Dynamo's guards see to it.
        mutated_inputs: positions of tensors the region writes to. Writes by ATen operators are also noticed during the
            warm-up; those by hand-written kernels must be named here.
        pool: memory to share with other runners; None: an own pool.
        alias_outputs: return the graph's own output tensors, valid until the next call, instead of copies.
        max_graphs: how many buckets are captured before new ones run plainly.
        max_recaptures: how often a bucket is captured anew before it runs plainly.
        on_plain: told why, at each call that runs plainly for good (not at warm-ups).

    Raises:
        ValueError: `alias_outputs` with a shared pool, where another graph would overwrite the outputs.
    """

    def __init__(
        self,
        region: Region,
        *,
        static_inputs: Collection[int] = (),
        mutated_inputs: Collection[int] = (),
        pool: GraphPool | None = None,
        alias_outputs: bool = False,
        max_graphs: int = 16,
        max_recaptures: int = 4,
        on_plain: Callable[[str], object] | None = None,
    ) -> None:
        if alias_outputs and pool is not None:
            raise ValueError("alias_outputs=True needs a pool of its own: leave pool=None")
        self.stats = RegionStats()
        self._region = region
        self._static = tuple(sorted(static_inputs))
        self._mutated = frozenset(mutated_inputs)
        self._pool = pool if pool is not None else GraphPool()
        self._alias_outputs = alias_outputs
        self._max_graphs = max_graphs
        self._max_recaptures = max_recaptures
        self._on_plain = on_plain
        self._buckets: dict[_Key, _Bucket] = {}
        self._moving: list[int] | None = None  # positions of the arguments that are not static

    def __call__(self, *args: Value) -> list[Value]:
        """Run the region once on `args` and return its outputs."""
        if self._moving is None:
            self._moving = [position for position in range(len(args)) if position not in self._static]
        reason = self._unfit_call(args)
        if reason is None:
            with self._pool.lock:
                self._pool.open(_device_of(args))
                reason_or_outputs = self._run(args)
            if not isinstance(reason_or_outputs, str):
                return reason_or_outputs
            reason = reason_or_outputs
        with self._pool.lock:
            self.stats.calls += 1
            self.stats.plain[reason] += 1
        if self._on_plain is not None:
            self._on_plain(reason)
        return list(self._region(*args))

    def reset(self) -> None:
        """Free every graph and forget every bucket; statistics stay. The next call of a bucket warms up again."""
        with self._pool.lock:
            for bucket in self._buckets.values():
                if bucket.captured is not None:
                    self._pool.release(bucket.captured.graph)
            self._buckets.clear()

    def _run(self, args: tuple[Value, ...]) -> list[Value] | str:
        """Answer the call by warm-up or replay, or return the reason for a plain call."""
        key = self._key(args)
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._max_graphs:
                return TOO_MANY_BUCKETS
            return self._warm_up(key, args)
        if bucket.refused is not None:
            return bucket.refused
        captured = bucket.captured
        if captured is None or captured.static_addresses != self._addresses(args):
            captured = self._capture(bucket, args)
            if captured is None:
                assert bucket.refused is not None
                return bucket.refused
        return self._replay(bucket, captured, args)

    def _unfit_call(self, args: tuple[Value, ...]) -> str | None:
        """Say why this call cannot use a graph whatever its bucket, or None."""
        assert self._moving is not None
        # There may be hundreds of static inputs. One stands for them: later only their addresses are looked at.
        reason = _unfit_device(args, [*self._static[:1], *self._moving])
        if reason is not None:
            return reason
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return AUTOGRAD
        return OUTER_CAPTURE if torch.cuda.is_current_stream_capturing() else None

    def _key(self, args: tuple[Value, ...]) -> _Key:
        assert self._moving is not None
        moving = (args[position] for position in self._moving)
        return tuple((arg.dtype, arg.shape, arg.stride()) if isinstance(arg, Tensor) else arg for arg in moving)

    def _addresses(self, args: tuple[Value, ...]) -> list[int]:
        return [as_tensor(args[position]).data_ptr() for position in self._static]

    def _warm_up(self, key: _Key, args: tuple[Value, ...]) -> list[Value]:
        """Run the region for real, on the stream that will capture: libraries and Triton initialize themselves here."""
        versions = [_version(arg) for arg in args]
        caller, side = self._pool.take_turn(), self._pool.stream
        side.wait_stream(caller)
        try:
            with torch.cuda.stream(side):
                outputs = list(self._region(*args))
        finally:
            caller.wait_stream(side)
        for output in outputs:
            if isinstance(output, Tensor) and output.is_cuda:
                output.record_stream(caller)
        written = {p for p, (arg, old) in enumerate(zip(args, versions, strict=True)) if _version(arg) != old}
        bucket = _Bucket(self._mutated | written)
        bucket.refused = _unfit_device(args, range(len(args))) or overlapping_mutation(
            args, bucket.mutated, self._static
        )
        self._buckets[key] = bucket
        self.stats.calls += 1
        self.stats.warmups += 1
        return outputs

    def _capture(self, bucket: _Bucket, args: tuple[Value, ...]) -> _Captured | None:
        """Capture `bucket` anew, or refuse it with a reason and return None. Executes nothing of the region."""
        caller = self._pool.take_turn()
        again = bucket.captured is not None
        if bucket.captured is not None:
            self._pool.release(bucket.captured.graph)
            bucket.captured = None
            if bucket.recaptures >= self._max_recaptures:
                bucket.refused = MOVING_INPUTS
                return None
        try:
            # torch.cuda.graph leaves its own stream current when ending a capture fails; the outer context mends that.
            with torch.cuda.stream(caller):
                bucket.captured = self._captured(args)
        except CannotCaptureError as why:
            bucket.refused = str(why)
        except RuntimeError as error:  # every error of CUDA, the allocator and a forbidden synchronization is one
            bucket.refused = f"capture failed: {_first_cause(error)}"
        if bucket.captured is not None:
            self._pool.adopt(bucket.captured.graph)
            self.stats.captures += 1
            self.stats.recaptures += again
            bucket.recaptures += again
        return bucket.captured

    def _captured(self, args: tuple[Value, ...]) -> _Captured:
        assert self._moving is not None
        moving = [position for position in self._moving if isinstance(args[position], Tensor)]
        with torch.inference_mode(False):  # else calls outside inference mode could not write to the buffers
            buffers = [buffer_like(as_tensor(args[p])) for p in moving]
        inputs = list(args)
        for position, buffer in zip(moving, buffers, strict=True):
            inputs[position] = buffer
        device = buffers[0].device if buffers else _device_of(args)
        torch.cuda.empty_cache()  # torch.cuda.graph does so too; done here, the growth below is the capture's own
        before = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: allocations by other threads, such as data loading, must not break the capture.
        with torch.cuda.graph(
            graph, pool=self._pool.handle(), stream=self._pool.stream, capture_error_mode="thread_local"
        ):
            outputs = list(self._region(*inputs))
        self.stats.reserved_bytes += torch.cuda.memory_reserved(device) - before
        check_outputs(outputs, buffers, device)
        static = {storage_of(as_tensor(args[p])) for p in self._static}
        hows = [how_to_hand_out(output, outputs, static, self._alias_outputs) for output in outputs]
        return _Captured(graph, self._addresses(args), moving, buffers, outputs, hows)

    def _replay(self, bucket: _Bucket, captured: _Captured, args: tuple[Value, ...]) -> list[Value]:
        self._pool.take_turn()
        with torch.no_grad():
            moving = [(as_tensor(args[p]), buffer) for p, buffer in zip(captured.moving, captured.buffers, strict=True)]
            if moving:
                torch._foreach_copy_(
                    [without_repeats(buffer) for _, buffer in moving], [without_repeats(arg) for arg, _ in moving]
                )
            captured.graph.replay()
            for position, (arg, buffer) in zip(captured.moving, moving, strict=True):
                if position in bucket.mutated:
                    arg.copy_(buffer)
            for position in bucket.mutated.intersection(self._static):
                arg = as_tensor(args[position])
                if not arg.is_inference():  # autograd must notice the write, as it does in a plain call
                    torch.autograd.graph.increment_version(arg)
            outputs = hand_out(captured.outputs, captured.hand_out)
        self.stats.calls += 1
        self.stats.replays += 1
        return outputs


def _unfit_device(args: tuple[Value, ...], positions: Iterable[int]) -> str | None:
    device = None
    for position in positions:
        arg = args[position]
        if not isinstance(arg, Tensor):
            continue
        if not arg.is_cuda:
            return f"input {position} is on {arg.device.type}"
        if device is not None and arg.device != device:
            return "inputs lie on several devices"
        device = arg.device
    return "no tensor among the inputs" if device is None else None


def _version(value: Value) -> int:
    """Counter of ATen writes to a tensor; 0 for what has none."""
    return 0 if not isinstance(value, Tensor) or value.is_inference() else value._version


def _device_of(args: tuple[Value, ...]) -> torch.device:
    return next(arg.device for arg in args if isinstance(arg, Tensor))


def _first_cause(error: BaseException) -> str:
    """The first line of the error that came first: ending a broken capture raises a second one on top."""
    while error.__context__ is not None:
        error = error.__context__
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
