"""Writes the skeleton of a new pass: its file, its failing test, its line in the order, its row in the docs."""

from __future__ import annotations

import ast
import itertools
import keyword
import pathlib
import re

from fusewright.errors import UserInputError, unknown_name

ORDER_FILE = pathlib.PurePath("fusewright", "pipeline", "order.py")
TABLE_FILE = pathlib.PurePath("docs", "passes.md")

PASS_TEMPLATE = '''"""One line: what the pass `{name}` rewrites into what, and why that is faster."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from fusewright.config import Numerics
from fusewright.passes.base import Pass, PassContext, Stage


class {class_name}(Pass):
    """Formula before, formula after, and what of them is checked (constants, dtypes, strides, other users)."""

    name: ClassVar[str] = "{name}"
    stage: ClassVar[Stage] = Stage.FORWARD
    numerics: ClassVar[Numerics] = Numerics.EXACT

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> int:
        """Rewrite `gm` in place and return the number of rewrites; `ctx.declined` says what was left alone and why."""
        return 0
'''

TEST_TEMPLATE = '''"""Tests of the pass `{name}`: it matches, it declines a near miss, the numbers agree."""

from __future__ import annotations

import pytest
import torch

from fusewright.passes.{group}.{name} import {class_name}
from fusewright.tools.pass_tester import PassTester


def matching(x: torch.Tensor) -> torch.Tensor:
    """Replace by the smallest function that the pass rewrites once."""
    return x.relu()


def near_miss(x: torch.Tensor) -> torch.Tensor:
    """Replace by a function that differs from `matching` in the one detail that must stop the pass."""
    return x.sigmoid()


@pytest.mark.parametrize("shape", [(4, 8), (3, 7), (1, 1)])
def test_{name}_rewrites_and_keeps_the_numbers(shape: tuple[int, ...]) -> None:
    PassTester({class_name}()).check(matching, [torch.randn(shape, requires_grad=True)], expect_rewrites=1)


def test_{name}_declines_a_near_miss() -> None:
    PassTester({class_name}()).check_declines(near_miss, [torch.randn(4, 8)], reason="replace by the reason it gives")
'''


def add_pass(name: str, group: str, root: pathlib.Path) -> list[pathlib.Path]:
    """Write the skeleton of a pass into a checkout. The new test fails until it and the pass are filled in.

    Args:
        name: snake_case; the pass's name and its file's.
        group: a folder of `passes/`, such as "cleanup".
        root: the checkout's top folder.

    Returns:
        The files written or extended: pass, test, order, table.

    Raises:
        UserInputError: the name or the checkout does not fit, or the pass exists; nothing was written.
    """
    _check(name, group, root)
    names = {"name": name, "group": group, "class_name": "".join(part.title() for part in name.split("_"))}
    order = root / ORDER_FILE
    table = root / TABLE_FILE
    contents = {
        root / "passes" / group / f"{name}.py": PASS_TEMPLATE.format(**names),
        root / "tests" / "passes" / group / f"test_{name}.py": TEST_TEMPLATE.format(**names),
        order: _with_pass_in_order(order.read_text(), **names),
        table: _with_row(table.read_text(), name),
    }
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(contents)


def _check(name: str, group: str, root: pathlib.Path) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise UserInputError(f"name: {name!r} is no snake_case module name, such as fuse_norm.")
    for needed in (ORDER_FILE, TABLE_FILE):
        if not (root / needed).is_file():
            raise UserInputError(f"root: {root} has no {needed}; run in a checkout of fusewright.")
    groups = sorted(path.parent.name for path in (root / "passes").glob("*/__init__.py"))
    if group not in groups:
        raise unknown_name("group", group, groups)
    test = root / "tests" / "passes" / group / f"test_{name}.py"
    for taken in itertools.chain((root / "passes").rglob(f"{name}.py"), [test] if test.exists() else []):
        raise UserInputError(f"name: {taken.relative_to(root)} exists already; choose another name.")


def _with_pass_in_order(source: str, *, name: str, group: str, class_name: str) -> str:
    """`source` of order.py with an instance of the pass at the end of ORDER, and its import in sorted place."""
    order = _order_tuple(source)
    text = source.encode()  # ast counts columns in bytes
    bracket = _end_offset(text, order) - 1
    instance = f"{class_name}(),"
    if order.elts:
        after_last = _end_offset(text, order.elts[-1])
        between = text[after_last:bracket].rstrip()  # a comma and comments, if any: they stay with the last element
        head = text[:after_last] + (b"" if between.lstrip().startswith(b",") else b",") + between
        instance = f"\n    {instance}\n"
    else:
        head = text[:bracket]
    text = head + instance.encode() + text[bracket:]
    return _with_import(text.decode(), f"fusewright.passes.{group}.{name}", class_name)


def _end_offset(text: bytes, node: ast.expr) -> int:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return sum(len(line) for line in text.splitlines(keepends=True)[: node.end_lineno - 1]) + node.end_col_offset


def _order_tuple(source: str) -> ast.Tuple:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Tuple):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "ORDER":
                return node.value
    raise UserInputError(f"root: {ORDER_FILE} has no literal `ORDER = (...)` to extend.")


def _with_import(source: str, module: str, class_name: str) -> str:
    """`source` with `from module import class_name` before the first of our imports that sorts behind it."""
    ours = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("fusewright.")
    ]
    if not ours:
        raise UserInputError(f"root: {ORDER_FILE} imports nothing of fusewright's; is it the right file?")
    behind = [node.lineno - 1 for node in ours if (node.module or "") > module]
    lines = source.splitlines(keepends=True)
    lines.insert(behind[0] if behind else ours[-1].end_lineno or 0, f"from {module} import {class_name}\n")
    return "".join(lines)


def _with_row(source: str, name: str) -> str:
    """`source` of passes.md with a row at the end of its first table, as many cells as the header has."""
    lines = source.splitlines(keepends=True)
    rule = next((i for i, line in enumerate(lines) if re.fullmatch(r"\|( *-+ *\|)+\s*", line)), None)
    if rule is None:
        raise UserInputError(f"root: {TABLE_FILE} has no table to extend.")
    end = next((i for i in range(rule, len(lines)) if not lines[i].startswith("|")), len(lines))
    cells = [f"`{name}`", *["-"] * (lines[rule].count("|") - 2)]
    lines.insert(end, "| " + " | ".join(cells) + " |\n")
    return "".join(lines)
