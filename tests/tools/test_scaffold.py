"""Tests of `add_pass`: what it writes fits the checkout and fails until filled in; what does not fit writes nothing."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from fusewright.errors import UnknownNameError, UserInputError
from fusewright.tools.scaffold import add_pass

ROOT = pathlib.Path(__file__).resolve().parents[2]
COPIED = ("autotune", "capture", "fusewright", "fusion", "passes")

ORDER = '''"""é: columns are counted in bytes."""

from fusewright.passes.base import Pass
from fusewright.passes.comm.b import B

ORDER: tuple[Pass, ...] = {literal}
'''


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what a pass needs, without the tests that are there already."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "passes.md", tmp_path / "docs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout: pathlib.Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *command], cwd=checkout, capture_output=True, text=True)


def snapshot(checkout: pathlib.Path) -> dict[pathlib.Path, str]:
    return {path: path.read_text() for path in checkout.rglob("*") if path.suffix in (".py", ".md")}


def test_it_writes_a_pass_that_imports_and_a_test_that_fails_until_filled_in(checkout: pathlib.Path) -> None:
    written = add_pass("swap_twice", "cleanup", checkout)
    assert [str(path.relative_to(checkout)) for path in written] == [
        "passes/cleanup/swap_twice.py",
        "tests/passes/cleanup/test_swap_twice.py",
        "fusewright/pipeline/order.py",
        "docs/passes.md",
    ]
    assert "SwapTwice()" in written[2].read_text()
    assert "| `swap_twice` | -" in written[3].read_text()

    linted = run(checkout, "ruff", "check", "--no-cache", *map(str, written[:3]))
    assert linted.returncode == 0, linted.stdout
    formatted = run(checkout, "ruff", "format", "--no-cache", "--diff", *map(str, written[:3]))
    assert formatted.returncode == 0, formatted.stdout

    # One process for both questions: importing torch is what takes time here.
    asking = (
        "import sys, pytest; from fusewright.pipeline.order import ORDER; print([p.name for p in ORDER]);"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"
    )
    tested = subprocess.run(
        [sys.executable, "-c", asking, written[1]], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert tested.returncode == 1, tested.stdout + tested.stderr
    assert tested.stdout.splitlines()[0].endswith("'swap_twice']"), "the new pass is last in ORDER"
    assert "4 failed" in tested.stdout
    assert "0 rewrites instead of 1" in tested.stdout
    assert "no reason contains 'replace by the reason it gives'" in tested.stdout


@pytest.mark.parametrize(
    ("literal", "expected"),
    [
        ("()", "(New(),)"),
        ("(B(),)", "(B(),\n    New(),\n)"),
        ("(B(), B())", "(B(), B(),\n    New(),\n)"),
        ("(\n    B(),\n)", "(\n    B(),\n    New(),\n)"),
        (
            '(\n    B("é"),  # é, stays (here)\n    # and this\n)',
            '(\n    B("é"),  # é, stays (here)\n    # and this\n    New(),\n)',
        ),
        ("(\n    B(),\n    B()  # no comma, yet\n)", "(\n    B(),\n    B(),  # no comma, yet\n    New(),\n)"),
    ],
)
def test_the_order_keeps_what_it_had(checkout: pathlib.Path, literal: str, expected: str) -> None:
    order = checkout / "fusewright" / "pipeline" / "order.py"
    order.write_text(ORDER.format(literal=literal))
    add_pass("new", "cleanup", checkout)
    before, _, after = order.read_text().partition("ORDER: tuple[Pass, ...] = ")
    assert after == expected + "\n"
    assert [line.split()[1] for line in before.splitlines() if line.startswith("from")] == [
        "fusewright.passes.base",
        "fusewright.passes.cleanup.new",
        "fusewright.passes.comm.b",
    ]


@pytest.mark.parametrize(
    ("name", "group", "said"),
    [
        ("FuseNorm", "cleanup", "snake_case"),
        ("class", "cleanup", "snake_case"),
        ("../evil", "cleanup", "snake_case"),
        ("base", "cleanup", "exists already"),
        ("fuse_norm", "cleanupp", "Did you mean 'cleanup'"),
        ("fuse_norm", "..", "unknown group"),
    ],
)
def test_what_does_not_fit_changes_nothing(checkout: pathlib.Path, name: str, group: str, said: str) -> None:
    before = snapshot(checkout)
    with pytest.raises(UserInputError, match=said):
        add_pass(name, group, checkout)
    assert snapshot(checkout) == before


def test_twice_is_refused(checkout: pathlib.Path) -> None:
    add_pass("swap_twice", "cleanup", checkout)
    before = snapshot(checkout)
    with pytest.raises(UserInputError, match="exists already"):
        add_pass("swap_twice", "comm", checkout)
    assert snapshot(checkout) == before


def test_an_unknown_group_is_an_unknown_name(checkout: pathlib.Path) -> None:
    with pytest.raises(UnknownNameError, match=r"cleanup.*comm"):
        add_pass("fuse_norm", "nothing_like_it", checkout)


def test_elsewhere_than_a_checkout(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UserInputError, match="run in a checkout"):
        add_pass("fuse_norm", "cleanup", tmp_path)


@pytest.mark.parametrize("text", ["ORDER = [1]\n", "X = (1,)\n"])
def test_an_order_that_is_no_literal(checkout: pathlib.Path, text: str) -> None:
    (checkout / "fusewright" / "pipeline" / "order.py").write_text(text)
    before = snapshot(checkout)
    with pytest.raises(UserInputError, match="no literal"):
        add_pass("fuse_norm", "cleanup", checkout)
    assert snapshot(checkout) == before
