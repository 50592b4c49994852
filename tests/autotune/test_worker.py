"""Every way in which a candidate can die costs that candidate and leaves a record."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fusewright.autotune.trial import Failure, FailureKind, Provider
from fusewright.autotune.worker import Built, Limits, Worker, resident_mb
from fusewright.errors import UserInputError

pytestmark = pytest.mark.multiprocess
HERE = "tests.autotune.providers"
QUICK = Limits(build_s=30.0, run_s=1.0, memory_mb=200.0)


def provider(name: str, **kwargs: object) -> Provider:
    return Provider(f"{HERE}:{name}", kwargs)  # type: ignore[arg-type]


def has_ended(pid: int, within_s: float = 5.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_worker_times_the_steps_it_is_asked_for() -> None:
    with Worker(provider("spin", seconds=0.002), limits=QUICK, threads=1) as worker:
        built = worker.build()
        assert isinstance(built, Built)
        assert built.facts["pid"] == worker.pid != os.getpid()
        assert built.facts["threads"] == "1"
        # a step spins for 2 ms at least; another process on the core may stretch it, nothing may shorten it
        assert 0.002 <= built.first_step_s < 0.5
        warm, sample = worker.warm(3), worker.sample(5)
        assert isinstance(warm, float)
        assert isinstance(sample, float)
        assert 0.002 <= warm < 0.05
        assert 0.002 <= sample < 0.05
    assert has_ended(worker.pid)
    assert isinstance(worker.sample(1), Failure)


DEATHS = [
    ("segv", FailureKind.SIGNAL, "SIGSEGV"),
    ("kill", FailureKind.SIGNAL, "SIGKILL"),
    ("exit", FailureKind.EXIT, "exit code 7; it printed:\nlast words"),
    ("sys_exit", FailureKind.EXIT, "exit code 3"),
    ("memory", FailureKind.OUT_OF_MEMORY, "200 MiB allowed"),
    ("child_memory", FailureKind.OUT_OF_MEMORY, "200 MiB allowed"),
    ("memory_error", FailureKind.OUT_OF_MEMORY, "MemoryError"),
    ("value_error", FailureKind.EXCEPTION, "the step is wrong"),
    ("hang", FailureKind.RUN_TIMEOUT, "no answer within 1 s"),
]


@pytest.mark.parametrize(("action", "kind", "text"), DEATHS)
def test_a_death_in_a_later_step_is_recorded(action: str, kind: FailureKind, text: str) -> None:
    with Worker(provider("dying", action=action, at=3), limits=QUICK) as worker:
        assert isinstance(worker.build(), Built)
        failure = worker.warm(10)
        assert isinstance(failure, Failure)
        assert failure.kind is kind
        assert text in failure.detail
        assert has_ended(worker.pid)
        assert worker.sample(1) is failure


def test_a_death_while_building_is_recorded() -> None:
    limits = Limits(build_s=1.0, run_s=30.0)
    with Worker(provider("dying", action="hang"), limits=limits) as slow:
        assert isinstance(slow.build(), Failure)
        assert slow.failure is not None
        assert slow.failure.kind is FailureKind.BUILD_TIMEOUT
    with Worker(provider("broken", message="no such kernel")) as broken:
        assert "no such kernel" in str(broken.build())
    with Worker(Provider("no.such.module:make")) as missing:
        assert "ModuleNotFoundError" in str(missing.build())


def test_what_a_provider_prints_does_not_break_the_protocol() -> None:
    with Worker(provider("noisy"), limits=QUICK) as worker:
        assert isinstance(worker.build(), Built)
        for _ in range(3):
            assert worker.sample(2) == pytest.approx(0.0005, rel=1.0)


def test_the_children_of_a_worker_end_with_it(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "pid"
    with Worker(provider("with_child", pid_file=str(file))) as worker:
        assert isinstance(worker.build(), Built)
        assert not has_ended(int(file.read_text()), within_s=0.1)
    assert has_ended(int(file.read_text()))


def test_a_worker_ends_when_its_parent_is_killed_in_the_middle_of_a_step(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys\n"
        "from fusewright.autotune.trial import Provider\n"
        "from fusewright.autotune.worker import Worker\n"
        f"worker = Worker(Provider('{HERE}:dying', dict(action='hang', at=1)))\n"
        "worker.build()\n"
        "print(worker.pid, flush=True)\n"
        "worker.warm(5)\n"
    )
    root = pathlib.Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)], cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    assert not has_ended(pid, within_s=0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert has_ended(pid)


def test_costs_are_what_the_subject_counts() -> None:
    with Worker(provider("grower", mb=64)) as worker:
        assert isinstance(worker.build(), Built)
        assert worker.costs() == {"peak_mb": 64, "flops": 2}


def test_a_worker_runs_in_the_environment_of_its_provider() -> None:
    changed = replace(provider("from_environment", variable="FW_TEST_SECONDS"), env={"FW_TEST_SECONDS": "0.02"})
    with Worker(changed) as worker:
        assert isinstance(worker.build(), Built)
        seconds = worker.warm(1)
        assert isinstance(seconds, float)
        assert seconds >= 0.02


def test_resident_memory_of_an_ended_process_is_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert resident_mb(child.pid) == 0.0
    assert resident_mb(os.getpid()) > 5


@pytest.mark.parametrize("factory", ["", "module", ":f", "module:"])
def test_a_factory_that_names_no_function_is_refused(factory: str) -> None:
    with pytest.raises(UserInputError, match="module:function"):
        Provider(factory)


def test_arguments_that_are_not_json_are_refused() -> None:
    with pytest.raises(UserInputError, match="plain JSON"):
        provider("spin", seconds={1, 2})
