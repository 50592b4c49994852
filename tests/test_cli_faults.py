"""`fusewright bisect` and `fusewright minify` on saved disagreements: one of a pass of ours, one of Inductor."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

from fusewright.capture.graph import CapturedGraph
from fusewright.capture.variant import DEFAULT_VARIANT
from fusewright.cli import main
from fusewright.errors import UserInputError
from fusewright.report.faults import writable
from fusewright.runtime.reproducer import write_reproducer
from fusewright.tools.pass_tester import capture
from fusewright.tools.replay import replay
from tests.tools.planted import Retarget, chain, without_pattern_proofs, wrong_sigmoid


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax over the queries, which Inductor takes for one over the keys, between nodes that do no harm."""
    q, v = q.sin() + 1, v.cos() * 0.5
    return (((q @ k.mT) * 0.35).softmax(-2) @ v).tanh() - v


def saved(function: object, args: tuple[Tensor, ...], root: pathlib.Path) -> pathlib.Path:
    taken = capture(function, args)  # type: ignore[arg-type]
    return write_reproducer(root, CapturedGraph.build(taken.graph, taken.inputs, {}), taken.inputs, DEFAULT_VARIANT)


def said(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert (stopped.value.code or 0) == code
    return " ".join(capsys.readouterr().out.split())


def test_a_wrong_rewrite_is_named_and_its_graph_shrunk(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(chain, (torch.randn(3, 5), torch.randn(3, 5)), tmp_path)
    monkeypatch.setattr("fusewright.tools.oracle.ORDER", (Retarget(torch.sigmoid, wrong_sigmoid),))
    assert said(["bisect", str(folder)], 1, capsys).startswith("pass retarget, rewrite 1 at sigmoid")
    text = said(["minify", str(folder / "run.py"), "-o", str(tmp_path / "small")], 0, capsys)
    assert "nodes became 3: python" in text
    (small,) = (tmp_path / "small").iterdir()
    assert said(["bisect", str(small)], 1, capsys).startswith("pass retarget, rewrite 1")


def test_a_fault_of_inductor_is_told_from_ours_and_shrunk(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pattern_proofs(monkeypatch)
    folder = saved(over_queries, tuple(torch.randn(2, 4, 16, 8) for _ in range(3)), tmp_path)
    assert said(["bisect", str(folder)], 1, capsys).startswith("the captured graph is bad before any pass: inductor")
    said(["minify", str(folder)], 0, capsys)
    (small,) = (folder / "minified").iterdir()
    assert replay(small).ok is False
    module = (small / "graph" / "module.py").read_text()
    assert "softmax" in module
    assert not any(name in module for name in ("sin(", "cos(", "tanh("))


def test_a_graph_that_agrees_is_said_to(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(torch.sin, (torch.randn(3),), tmp_path)
    assert said(["bisect", str(folder)], 0, capsys).startswith("agrees with eager here")
    with pytest.raises(SystemExit) as stopped:
        main(["minify", str(folder)])
    assert stopped.value.code == 2
    assert "nothing to shrink" in " ".join(capsys.readouterr().err.split())


def test_a_lifted_float_is_saved_as_it_is(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(x: Tensor) -> Tensor:
        return torch.sigmoid(x.cos() * (x.size(0) / 4)) + x

    taken = capture(halved, (torch.randn(6, 5),), dynamic=True)
    folder = write_reproducer(
        tmp_path, CapturedGraph.build(taken.graph, taken.inputs, {}), taken.inputs, DEFAULT_VARIANT
    )
    monkeypatch.setattr("fusewright.tools.oracle.ORDER", (Retarget(torch.sigmoid, wrong_sigmoid),))
    said(["minify", str(folder), "-o", str(tmp_path / "small")], 0, capsys)
    (small,) = (tmp_path / "small").iterdir()
    assert said(["bisect", str(small)], 1, capsys).startswith("pass retarget, rewrite 1")


def test_an_output_that_cannot_be_made(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserInputError, match=r"--output: .* cannot be made: Not a directory"):
        writable(tmp_path / "file" / "below")


@pytest.mark.parametrize("command", ["bisect", "minify"])
def test_a_folder_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "/nowhere/at/all"])
    assert stopped.value.code == 2
    assert "folder: /nowhere/at/all does not exist" in " ".join(capsys.readouterr().err.split())
