"""Subjects with a known speed or a known way of dying, built inside real worker processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


class Spin:
    """Keeps the CPU busy for `seconds` a step."""

    def __init__(self, seconds: float, keys: list[Any]) -> None:
        self.seconds = seconds
        self.keys = keys

    def step(self) -> None:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass

    def facts(self) -> dict[str, Any]:
        return {"keys": self.keys, "pid": os.getpid(), "threads": os.environ.get("OMP_NUM_THREADS")}


def spin(seconds: float = 0.0005, keys: list[Any] | None = None) -> Spin:
    return Spin(seconds, keys or [])


class Once:
    """Runs `action` in the first step (`at` 0) or in a later one."""

    def __init__(self, action: Callable[[], object], at: int) -> None:
        self.action = action
        self.left = at

    def step(self) -> None:
        if self.left == 0:
            self.action()
        self.left -= 1


def fill_memory() -> None:
    hoard = []
    while True:
        hoard.append(bytearray(8 << 20))
        time.sleep(0.002)


def fill_memory_in_a_child() -> None:
    code = "import time; hoard = [bytearray(300 << 20)]; time.sleep(60)"
    subprocess.run([sys.executable, "-c", code], check=True)


def hang() -> None:
    while True:
        pass


def raise_memory_error() -> None:
    raise MemoryError


def raise_value_error() -> None:
    raise ValueError("the step is wrong")


def shout_and_die() -> None:
    print("last words", flush=True)
    os._exit(7)


ACTIONS: dict[str, Callable[[], object]] = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": shout_and_die,
    "sys_exit": lambda: sys.exit(3),
    "hang": hang,
    "memory": fill_memory,
    "child_memory": fill_memory_in_a_child,
    "memory_error": raise_memory_error,
    "value_error": raise_value_error,
}


def dying(action: str, at: int = 0) -> Once:
    return Once(ACTIONS[action], at)


class Noisy(Spin):
    """Prints what looks like replies, through Python and past it."""

    def step(self) -> None:
        print('{"value": {"seconds": 0.0}}', flush=True)
        os.write(1, b'{"value": {}}\n')
        os.write(2, b"\xff\xfe\n")
        super().step()


def noisy() -> Noisy:
    return Noisy(0.0005, [])


def with_child(pid_file: str) -> Spin:
    """Leaves a child behind that would outlive the worker."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    return spin()


def broken(message: str) -> Spin:
    raise RuntimeError(message)


class Grower(Spin):
    """Says that it holds `mb`."""

    def __init__(self, mb: int) -> None:
        super().__init__(0.0, [])
        self.mb = mb

    def costs(self) -> dict[str, float]:
        return {"peak_mb": self.mb, "flops": 2}


def from_environment(variable: str) -> Spin:
    """Spins for as long as an environment variable says."""
    return Spin(float(os.environ[variable]), [])


def grower(mb: int) -> Grower:
    return Grower(mb)


def logged(folder: str) -> Spin:
    """Leaves a file named by its process."""
    with open(os.path.join(folder, str(os.getpid())), "w") as file:
        file.write("built")
    return spin()


class Variable(Spin):
    """Runs as the options of a variant say: `seconds` a step, `error` in its output, `die` in its first step."""

    def __init__(self, options: dict[str, Any], keys: list[Any]) -> None:
        super().__init__(options.get("seconds", 0.001), keys)
        self.options = options

    def step(self) -> None:
        if self.options.get("die", False):
            os.kill(os.getpid(), signal.SIGSEGV)
        super().step()

    def facts(self) -> dict[str, Any]:
        made = {"rewrites": {"some_pass": self.options["rewrites"]}} if "rewrites" in self.options else {}
        return super().facts() | made

    def outputs(self, seed: int, role: Any) -> dict[str, Any]:
        import torch

        wrong = role.value == "candidate" and self.options.get("error", False)
        return {"output": torch.full((4,), 1.5 if wrong else 1.0)}


def variable(variant: str, keys: list[Any]) -> Variable:
    return Variable(dict(json.loads(variant)["options"]), keys)
