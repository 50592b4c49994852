"""The program inside a worker process: builds one subject, then answers one request at a time.

It is run by its path and imports nothing but the standard library, so that a worker starts in milliseconds and carries
no more of fusewright or torch than its provider asks for. Requests and replies are JSON lines on two pipes of their
own; whatever the provider prints goes elsewhere and cannot break them.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

Reply = dict[str, Any]


class Session:
    """One subject and what may be asked of it; every method named `do_*` is a request."""

    def __init__(self) -> None:
        self.subject: Any = None

    def do_build(self, factory: str, kwargs: dict[str, Any], path: list[str]) -> Reply:
        """Import the factory, make the subject, run its first step, which compiles; seconds of each, and its facts."""
        sys.path[:] = path  # as in the parent: what is importable there is importable here
        started = time.perf_counter()
        module, _, function = factory.partition(":")
        make: Callable[..., Any] = getattr(importlib.import_module(module), function)
        imported = time.perf_counter()
        self.subject = make(**kwargs)
        made = time.perf_counter()
        self.subject.step()
        stepped = time.perf_counter()
        gc.collect()
        return {
            "import_s": imported - started,
            "make_s": made - imported,
            "first_step_s": stepped - made,
            "facts": self.subject.facts() if hasattr(self.subject, "facts") else {},
        }

    def do_warm(self, calls: int) -> Reply:
        """Run `calls` steps; seconds of the fastest."""
        return {"seconds": min(self._timed(1) for _ in range(calls))}

    def do_sample(self, calls: int) -> Reply:
        """Mean seconds of one step over `calls` steps, after one untimed step that brings the caches back."""
        self.subject.step()
        return {"seconds": self._timed(calls) / calls}

    def do_check(self, seeds: list[int], training: bool) -> Reply:
        """Compare the candidate with eager on each seed."""
        accuracy = importlib.import_module("fusewright.autotune.accuracy")
        report: Reply = accuracy.check(self.subject, seeds, training=training).to_dict()
        return report

    def do_costs(self) -> Reply:
        """What a step costs by the subject's own count."""
        costs: Reply = self.subject.costs()
        return costs

    def _timed(self, calls: int) -> float:
        step = self.subject.step
        gc.disable()  # a collection belongs to no single sample
        try:
            started = time.perf_counter_ns()
            for _ in range(calls):
                step()
            return (time.perf_counter_ns() - started) / 1e9
        finally:
            gc.enable()


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises a plain RuntimeError on CPU; its OutOfMemoryError goes by name, because torch may not be loaded here.
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in text
        or "not enough memory" in text
    )


def answer(session: Session, request: dict[str, Any]) -> Reply:
    """Run one request; an exception of the subject becomes a reply. SystemExit is left alone: it ends the process."""
    handler: Callable[..., Reply] = getattr(session, "do_" + request.pop("op"))
    try:
        return {"value": handler(**request)}
    except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its result, and the parent records it
        kind = "out_of_memory" if _is_out_of_memory(error) else "exception"
        return {"kind": kind, "detail": traceback.format_exc()}


def _listen(descriptor: int, requests: queue.SimpleQueue[dict[str, Any]]) -> None:
    """Pass requests on; when the parent is gone, end this process and its children even in the middle of a step."""
    with os.fdopen(descriptor) as lines:
        for line in lines:
            requests.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)


def main(request_fd: int, reply_fd: int) -> None:
    """Serve until the request pipe closes."""
    for descriptor in (request_fd, reply_fd):
        os.set_inheritable(descriptor, False)  # a grandchild that holds the reply pipe would hide our death
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel takes this process and not the tuner
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(request_fd, requests), daemon=True).start()
    session = Session()
    with os.fdopen(reply_fd, "w") as replies:
        while True:
            replies.write(json.dumps(answer(session, requests.get())) + "\n")
            replies.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
