"""FUSEWRIGHT_DUMP shows each pass before, after, as a diff, and one JSON line; a failed pass too."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from torch import fx

from fusewright.errors import CacheFolderError
from fusewright.passes.base import PassContext
from tests.pipeline.little import captured, doing, pipeline, rewrite, swap


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "passes.jsonl").read_text().splitlines()]


def test_files_of_every_pass(tmp_path: pathlib.Path) -> None:
    rewrite(pipeline(swap("first", "sin", "tanh"), swap("idle", "none", "exp"), dump=tmp_path / "new"))
    folder = tmp_path / "new" / "a_graph"
    assert sorted(p.name for p in folder.iterdir()) == [
        *(f"00_first.{kind}" for kind in ("after.txt", "before.txt", "diff")),
        *(f"01_idle.{kind}" for kind in ("after.txt", "before.txt", "diff")),
        "passes.jsonl",
    ]
    before, after = ((folder / f"00_first.{kind}.txt").read_text() for kind in ("before", "after"))
    assert before.count("[target=sin]") == 2
    assert after == before.replace("[target=sin]", "[target=tanh]")
    assert (folder / "01_idle.before.txt").read_text() == after
    diff = (folder / "00_first.diff").read_text().splitlines()
    assert sum(line.startswith("-") and "target=sin" in line for line in diff) == 2
    assert sum(line.startswith("+") and "target=tanh" in line for line in diff) == 2
    assert (folder / "01_idle.diff").read_text() == ""

    first, idle = rows(folder)
    assert first["seconds"] > 0
    del first["seconds"]
    assert first == {
        "graph": "a graph", "attempt": 0, "pass": "first", "rewrites": 2, "nodes": len(captured().graph.nodes),
        "declines": [{"pass_name": "first", "node": "cos", "reason": "not sin"}],
    }  # fmt: skip
    assert (idle["pass"], idle["rewrites"], len(idle["declines"])) == ("idle", 0, 3)


def test_a_failed_pass_shows_what_it_left_and_is_told_apart(tmp_path: pathlib.Path) -> None:
    def bad(gm: fx.GraphModule) -> int:
        next(n for n in gm.graph.nodes if n.target == "cos").target = "tan"
        raise ValueError("no")

    rewrite(pipeline(swap("first", "sin", "tanh"), doing(bad), swap("last", "cos", "exp"), dump=tmp_path))
    folder = tmp_path / "a_graph"
    assert [(r["attempt"], r["pass"], r.get("rewrites"), r.get("failed")) for r in rows(folder)] == [
        (0, "first", 2, None),
        (0, "bad", None, "ValueError: no"),
        (1, "first", 2, None),
        (1, "last", 1, None),
    ]
    assert "+" in (folder / "01_bad.diff").read_text()
    assert "target=tan]" in (folder / "01_bad.after.txt").read_text()
    assert "target=cos]" in (folder / "03_last.before.txt").read_text()


def test_a_second_run_never_overwrites_the_first(tmp_path: pathlib.Path) -> None:
    for name in ("one", "two", "three"):
        rewrite(pipeline(swap(name, "sin", "tanh"), dump=tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a_graph", "a_graph.2", "a_graph.3"]
    assert [rows(tmp_path / f"a_graph{end}")[0]["pass"] for end in ("", ".2", ".3")] == ["one", "two", "three"]


def test_a_rehearsal_is_dumped_once(tmp_path: pathlib.Path) -> None:
    line = pipeline(swap("a", "sin", "tanh"), dump=tmp_path)
    line.rewrite_in_place(captured().graph, line.order, PassContext(), "tokens=2..128 joint")
    assert [r["pass"] for r in rows(tmp_path / "tokens=2..128_joint")] == ["a"]


def test_a_folder_that_cannot_be_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match="set FUSEWRIGHT_DUMP to a writable folder"):
        rewrite(pipeline(swap("a", "sin", "tanh"), dump=tmp_path / "file"))


def test_nothing_is_written_without_a_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewrite(pipeline(swap("a", "sin", "tanh")))
    assert list(tmp_path.iterdir()) == []
