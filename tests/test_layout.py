"""Guards the shape of the tree: who may import whom, sizes, docstrings, public names, tests that test."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
import re
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
STAGES = ("autotune", "capture", "fusion", "passes")  # top-level folders reached as fusewright.<stage>
PACKAGE_FOLDERS = ("fusewright", *STAGES)
PYTHON_FOLDERS = (*PACKAGE_FOLDERS, "benchmarks", "examples", "tests")
OUTSIDE_THE_WHEEL = ("benchmarks", "examples", "tests")

# A module imports from its own level and from those before it. `fusewright` is the facade, fusewright/__init__.py.
LEVELS = (
    ("errors", "config", "numerics", "trees", "workload", "job_file"),
    ("costs",),
    ("capture",),
    ("passes",),
    ("fusion",),
    ("ops",),
    ("pipeline",),
    ("runtime",),
    ("autotune",),
    ("bench",),
    ("parallel",),
    ("installation",),
    ("report", "testing", "tools"),
    ("api",),
    ("fusewright",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_FOLDER_MODULES = 12
# Kernels are as long as the mathematics, and tables as long as the list: they are read a piece at a time.
PATTERN_TABLES: tuple[str, ...] = ()


def is_free_of_budgets(path: pathlib.PurePath) -> bool:
    return "kernels" in path.parts or path.as_posix() in PATTERN_TABLES


def python_files(*folders: str) -> Iterator[pathlib.Path]:
    """Python files below `folders`, relative to the root; links are not followed, so each file comes once."""
    for folder in folders:
        for parent, children, names in os.walk(ROOT / folder):
            children[:] = sorted(child for child in children if child != "__pycache__")
            for name in sorted(names):
                if name.endswith(".py"):
                    yield (pathlib.Path(parent) / name).relative_to(ROOT)


def find(rule: Callable[[pathlib.PurePath, str], Iterator[str]], *folders: str) -> list[str]:
    """What `rule` has against the files below `folders`."""
    return [complaint for path in python_files(*folders) for complaint in rule(path, (ROOT / path).read_text())]


def lines(found: list[str]) -> str:
    """All complaints, one a line: pytest would cut the list."""
    return "\n".join(["", *found])


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def unit_of_file(path: pathlib.PurePath) -> str:
    """The name in LEVELS that a file belongs to: passes/x.py -> passes, fusewright/costs/y.py -> costs."""
    parts = path.with_suffix("").parts
    if parts[0] != "fusewright":
        return parts[0]
    return "fusewright" if parts[1] == "__init__" else parts[1]


def imported_units(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, unit, dotted name) of each import of ours or of a folder outside the wheel, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "fusewright":
            names = [f"fusewright.{a.name}" if a.name in LEVEL_OF else "fusewright" for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "fusewright":
                yield node.lineno, parts[1] if len(parts) > 1 else "fusewright", name
            elif parts[0] in OUTSIDE_THE_WHEEL:
                yield node.lineno, parts[0], name


def import_order(path: pathlib.PurePath, source: str) -> Iterator[str]:
    own = unit_of_file(path)
    if own not in LEVEL_OF:
        yield f"{path}: '{own}' has no place in LEVELS of tests/test_layout.py; give it one"
        return
    for line, unit, name in imported_units(ast.parse(source)):
        if unit in OUTSIDE_THE_WHEEL:
            yield f"{path}:{line}: imports {name}, but {unit}/ is not in the wheel"
        elif unit not in LEVEL_OF:
            yield f"{path}:{line}: imports {name}, and '{unit}' has no place in LEVELS of tests/test_layout.py"
        elif LEVEL_OF[unit] > LEVEL_OF[own]:
            order = " -> ".join(", ".join(level) for level in LEVELS)
            yield f"{path}:{line}: imports {name}, but '{own}' comes before '{unit}' in the order {order}"


def docstring(path: pathlib.PurePath, source: str) -> Iterator[str]:
    if not ast.get_docstring(ast.parse(source)):
        yield f"{path}: no docstring that says why the file exists"


def file_length(path: pathlib.PurePath, source: str) -> Iterator[str]:
    length = source.count("\n")
    if length > MAX_FILE_LINES and not is_free_of_budgets(path):
        yield f"{path}: {length} lines, at most {MAX_FILE_LINES}"


def function_length(path: pathlib.PurePath, source: str) -> Iterator[str]:
    if is_free_of_budgets(path):
        return
    for function in functions(ast.parse(source)):
        assert function.end_lineno is not None
        length = function.end_lineno - function.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{path}:{function.lineno}: {function.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


CHECKING_CALL = re.compile(r"assert|check|raises|warns|expect|verify|fail|opcheck")


def checks(function: ast.AST, helpers: frozenset[str]) -> bool:
    """Whether a function holds an assertion, or calls what asserts: by its name, or because it is one of `helpers`."""
    calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
    return any(isinstance(node, ast.Assert) for node in ast.walk(function)) or any(
        CHECKING_CALL.search(call) or call.rpartition(".")[2] in helpers for call in calls
    )


def able_to_fail(path: pathlib.PurePath, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    helpers: frozenset[str] = frozenset()
    while True:  # a helper's helper counts too
        more = frozenset(function.name for function in functions(tree) if checks(function, helpers))
        if more == helpers:
            break
        helpers = more
    for function in functions(tree):
        if function.name.startswith("test_") and function.name not in helpers:
            yield f"{path}:{function.lineno}: {function.name} asserts nothing"


def public_names(tree: ast.Module) -> set[str]:
    """Names without an underscore that the top level of a module imports, assigns or defines."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
    return {name for name in names if not name.startswith("_")}


def test_modules_import_only_from_stages_before_them() -> None:
    found = find(import_order, *PACKAGE_FOLDERS)
    assert not found, lines(found)


@pytest.mark.parametrize(
    ("path", "source", "said"),
    [
        ("passes/a.py", "from fusewright.runtime.lower import lower", "'passes' comes before 'runtime'"),
        ("passes/a.py", "def f():\n    import fusewright.fusion", "passes/a.py:2"),
        ("fusewright/costs/a.py", "from fusewright import capture", "'costs' comes before 'capture'"),
        ("fusewright/runtime/a.py", "from fusewright import optimize", "'runtime' comes before 'fusewright'"),
        ("autotune/a.py", "import benchmarks.workloads", "not in the wheel"),
        ("fusewright/new.py", "", "no place in LEVELS"),
        ("passes/a.py", "import fusewright.misc", "no place in LEVELS"),
    ],
)
def test_the_import_rule_sees(path: str, source: str, said: str) -> None:
    (complaint,) = import_order(pathlib.PurePosixPath(path), source)
    assert said in complaint


def test_the_import_rule_allows_earlier_and_own_stages() -> None:
    source = "import torch\nfrom fusewright.passes.base import Pass\nfrom fusewright.errors import UserInputError\n"
    assert list(import_order(pathlib.PurePosixPath("passes/cleanup/a.py"), source)) == []


def test_every_file_says_why_it_exists() -> None:
    found = find(docstring, *PYTHON_FOLDERS)
    assert not found, lines(found)


def test_files_and_functions_keep_their_budgets() -> None:
    found = find(file_length, *PYTHON_FOLDERS) + find(function_length, *PYTHON_FOLDERS)
    assert not found, lines(found)


def test_budget_rules_see() -> None:
    path = pathlib.PurePosixPath("passes/a.py")
    long_function = "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert "f has 61 lines" in next(function_length(path, long_function))
    assert "401 lines" in next(file_length(path, "\n" * 401))
    assert list(function_length(pathlib.PurePosixPath("fusion/kernels/a.py"), long_function)) == []


def test_folders_keep_their_budget() -> None:
    modules: dict[pathlib.Path, int] = {}
    for path in python_files(*PYTHON_FOLDERS):
        if path.name not in ("__init__.py", "conftest.py") and not is_free_of_budgets(path):
            modules[path.parent] = modules.get(path.parent, 0) + 1
    assert modules, "no module found: the walk is broken"
    assert {str(folder): n for folder, n in modules.items() if n > MAX_FOLDER_MODULES} == {}


def test_every_test_asserts() -> None:
    found = find(able_to_fail, "tests", "benchmarks")
    assert not found, lines(found)


def test_the_assertion_rule_sees() -> None:
    path = pathlib.PurePosixPath("tests/test_a.py")
    helper = "def same(a):\n    assert a\n"
    assert len(list(able_to_fail(path, "def test_a():\n    print(1)\n"))) == 1
    assert list(able_to_fail(path, helper + "def test_a():\n    same(1)\n")) == []
    outer = helper + "class P:\n    def go(self):\n        same(1)\n"
    assert list(able_to_fail(path, outer + "def test_a():\n    P().go()\n")) == []
    assert list(able_to_fail(path, "def test_a():\n    with pytest.raises(ValueError):\n        f()\n")) == []


def test_public_names_are_those_in_all() -> None:
    package = importlib.import_module("fusewright")
    assert hasattr(package, "__all__"), "fusewright/__init__.py needs an __all__ with every public name"
    listed = list(package.__all__)
    assert listed == sorted(set(listed)), "fusewright.__all__ is not sorted, or lists a name twice"
    missing = [name for name in listed if not hasattr(package, name)]
    assert not missing, f"in fusewright.__all__ but not there: {missing}"
    tree = ast.parse((ROOT / "fusewright" / "__init__.py").read_text())
    assert public_names(tree) <= set(listed), "bound in fusewright/__init__.py but neither in __all__ nor private"


def test_public_names_rule_sees() -> None:
    source = "from a import b, c as d\nimport x.y\n_private = 1\ne: int = 2\ndef f(): ...\n"
    assert public_names(ast.parse(source)) == {"b", "d", "x", "e", "f"}


# A home or work folder of somebody's machine; put together here so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("work", "root", "home")) + r")/\w")
NOT_OURS = re.compile(r"^(\.git|\.venv.*|build|dist|__pycache__|\..*_cache|\.hypothesis|\.benchmarks|.*\.egg-info)$")


def text_files() -> Iterator[tuple[pathlib.Path, str]]:
    for parent, children, names in os.walk(ROOT):
        children[:] = [child for child in children if not NOT_OURS.match(child)]
        for name in names:
            content = (pathlib.Path(parent) / name).read_bytes()
            if b"\0" not in content:
                yield (pathlib.Path(parent) / name).relative_to(ROOT), content.decode()


def test_no_path_of_a_machine_in_the_tree() -> None:
    found = [
        f"{path}:{number}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found, lines(found)
    assert MACHINE_PATH.search("cd /" + "home/me")
    assert not MACHINE_PATH.search("https://example.org/" + "home/x")
