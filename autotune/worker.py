"""A warm worker process seen from the tuner: time-outs, a memory limit, and every way of dying as a record."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from fusewright.autotune.trial import Failure, FailureKind, Provider

PROGRAM = pathlib.Path(__file__).with_name("worker_main.py")
TICK_S = 0.05  # how often a busy worker is looked at; a worker that fills memory at 4 GB/s overshoots by 0.2 GB
PRINTED_TAIL = 2000  # bytes of the worker's own output that a failure record keeps
PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Limits:
    """What a worker may use before it is killed.

    Attributes:
        build_s: seconds for import, compilation and first step.
        run_s: seconds for any later request.
        memory_mb: resident memory of the process and its children, MiB; None: no limit but the machine's.
    """

    build_s: float = 600.0
    run_s: float = 120.0
    memory_mb: float | None = None


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Built:
    """A subject that is ready, with the seconds its parts took."""

    import_s: float
    make_s: float
    first_step_s: float
    facts: Mapping[str, Any]


class Worker:
    """One process that holds one subject. It starts at once, so that several load their libraries side by side.

    The first failure is final: the process is killed, and every later request returns the same record.
    """

    def __init__(
        self,
        provider: Provider,
        *,
        limits: Limits = DEFAULT_LIMITS,
        threads: int | None = None,
    ) -> None:
        self.provider = provider
        self.limits = limits
        self.failure: Failure | None = None
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker; close() closes it
        request_r, self._request_fd = os.pipe()
        self._reply_fd, reply_w = os.pipe()
        self._buffer = b""
        # Each process would order its sets differently, which is noise between two processes of one program.
        environment = {**os.environ, "PYTHONHASHSEED": "0", **provider.env}
        if threads is not None:
            environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        try:
            self._process = subprocess.Popen(
                # -P: the program's folder must not become importable, its module names are common words.
                [sys.executable, "-P", str(PROGRAM), str(request_r), str(reply_w)],
                stdin=subprocess.DEVNULL,
                stdout=self._printed,
                stderr=self._printed,
                pass_fds=(request_r, reply_w),
                env=environment,
                start_new_session=True,  # Ctrl-C reaches the tuner only, and one kill takes the worker's children too
            )
        finally:
            os.close(request_r)
            os.close(reply_w)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def build(self) -> Built | Failure:
        """Make the subject and run its first step."""
        reply = self._request(
            "build",
            self.limits.build_s,
            FailureKind.BUILD_TIMEOUT,
            factory=self.provider.factory,
            kwargs=dict(self.provider.kwargs),
            path=[os.path.abspath(entry) for entry in sys.path],
        )
        return reply if isinstance(reply, Failure) else Built(**reply)

    def warm(self, calls: int) -> float | Failure:
        """Run `calls` steps; seconds of the fastest."""
        return self._seconds("warm", calls)

    def sample(self, calls: int) -> float | Failure:
        """Mean seconds per step over `calls` steps."""
        return self._seconds("sample", calls)

    def check(self, seeds: Sequence[int], *, training: bool) -> dict[str, Any] | Failure:
        """The accuracy report of `fusewright.autotune.accuracy.check` as a dict."""
        kind = FailureKind.BUILD_TIMEOUT  # references and new buckets may compile
        return self._request("check", self.limits.build_s, kind, seeds=list(seeds), training=training)

    def costs(self) -> dict[str, float] | Failure:
        """What a step costs by the subject's own count; see `Subject`."""
        return self._request("costs", self.limits.run_s, FailureKind.RUN_TIMEOUT)

    def kill(self) -> None:
        """End the process and its children, also while another thread waits for a reply; that one gets a failure."""
        with contextlib.suppress(ProcessLookupError):  # already gone with all its children
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Kill the process and release the pipes; may be called twice."""
        if self._printed.closed:
            return
        self.kill()
        os.close(self._request_fd)
        os.close(self._reply_fd)
        self._printed.close()
        if self.failure is None:
            self.failure = Failure(FailureKind.EXIT, "the worker was closed")

    def _seconds(self, op: str, calls: int) -> float | Failure:
        reply = self._request(op, self.limits.run_s, FailureKind.RUN_TIMEOUT, calls=calls)
        return reply if isinstance(reply, Failure) else float(reply["seconds"])

    def _request(self, op: str, timeout_s: float, on_timeout: FailureKind, **fields: Any) -> dict[str, Any] | Failure:
        """Send one request and wait for its reply, the worker's death, its limit of memory or the time-out."""
        if self.failure is not None:
            return self.failure
        deadline = time.monotonic() + timeout_s
        line = json.dumps({"op": op, **fields}, allow_nan=False) + "\n"
        with contextlib.suppress(BrokenPipeError):  # it died between requests; the wait below finds out how
            os.write(self._request_fd, line.encode())
        text = self._wait(deadline, timeout_s, on_timeout)
        if isinstance(text, Failure):
            return self._fail(text)
        reply = json.loads(text)
        if "value" not in reply:
            return self._fail(Failure(FailureKind(reply["kind"]), reply["detail"]))
        value: dict[str, Any] = reply["value"]
        return value

    def _wait(self, deadline: float, timeout_s: float, on_timeout: FailureKind) -> bytes | Failure:
        """The next line of the reply pipe, or why there will be none."""
        poll = select.poll()
        poll.register(self._reply_fd, select.POLLIN)
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                return line
            if poll.poll(TICK_S * 1000):
                piece = os.read(self._reply_fd, 1 << 16)
                if not piece:
                    return self._autopsy()
                self._buffer += piece
                continue
            used_mb = resident_mb(self.pid)
            if self.limits.memory_mb is not None and used_mb > self.limits.memory_mb:
                text = f"{used_mb:.0f} MiB resident, {self.limits.memory_mb:.0f} MiB allowed"
                return Failure(FailureKind.OUT_OF_MEMORY, text)
            if time.monotonic() > deadline:
                return Failure(on_timeout, f"no answer within {timeout_s:g} s{self._tail()}")

    def _autopsy(self) -> Failure:
        """How the process died; its reply pipe is closed."""
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return Failure(FailureKind.EXIT, f"the worker closed its reply pipe and went on{self._tail()}")
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (perhaps by the kernel, for want of memory)" if -code == signal.SIGKILL else ""
            return Failure(FailureKind.SIGNAL, f"{name}{hint}{self._tail()}")
        return Failure(FailureKind.EXIT, f"exit code {code}{self._tail()}")

    def _tail(self) -> str:
        """The last lines that the worker printed, as an appendix to a detail."""
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(size - PRINTED_TAIL, 0))
        text = self._printed.read().decode(errors="replace").strip()
        return f"; it printed:\n{text}" if text else ""

    def _fail(self, failure: Failure) -> Failure:
        self.failure = failure
        self.kill()
        return failure


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its descendants, MiB; 0 for one that has ended."""
    total = 0.0
    try:
        total += int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_MB
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            total += sum(resident_mb(int(child)) for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total
