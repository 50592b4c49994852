"""The command line says what was wrong in one line, keeps brackets, and never succeeds at nothing."""

from __future__ import annotations

import pathlib

import pytest

from fusewright.cli import main

JOB = str(pathlib.Path(__file__).parent / "data" / "mini_job.py")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", JOB, "--length", "7"], "mini has no length 7; it has 16, 64"),
        (["explain", JOB, "--length", "foo"], "--length: foo is no number"),
        (["bench", JOB, "--only", "mimi"], "Did you mean 'mini'?"),
        (["tune", JOB, "--mode", "trainig"], "Did you mean 'training'?"),
        (["check", "/nowhere/[/x].py"], "job file /nowhere/[/x].py does not exist"),
        (["bench", JOB, "--resume"], "--resume: needs --output"),
        (["bench", JOB, "-o", "/proc/none/rows.jsonl"], "rows.jsonl cannot be written"),
        (["tune", JOB, "--effort", "none"], "use 'quick' or 'full'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_job_without_workloads(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.py"
    job.write_text("x = 1\n")
    with pytest.raises(SystemExit):
        main(["check", str(job)])
    assert "WORKLOADS = [fusewright.Workload(...)]" in " ".join(capsys.readouterr().err.split())


def test_a_store_that_is_not_there(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["store", "ls", "--store", str(tmp_path / "none.sqlite")])
    assert "does not exist" in " ".join(capsys.readouterr().err.split())
