"""Runs the Python blocks of the documentation, and compares its tables with the code they describe."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest

from fusewright.config import VARIABLES

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^(?P<fence>`{3,}) *(?P<info>[^\n`]*)\n(?P<code>.*?)^(?P=fence) *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


def blocks_to_run(text: str) -> Iterator[tuple[int, str]]:
    """(line above the code, code) of each block whose info string is `python` and nothing more."""
    for match in FENCE.finditer(text):
        if match["info"].strip() == "python":
            yield text.count("\n", 0, match.start("code")), match["code"]


def run_page(page: pathlib.Path, text: str) -> int:
    """Run a page's blocks in one namespace; a traceback shows the page's own line. Returns how many ran."""
    namespace = {"__name__": f"docs.{page.stem}"}
    count = 0
    for line, code in blocks_to_run(text):
        exec(compile("\n" * line + code, str(page), "exec"), namespace)
        count += 1
    return count


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_run(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example writes stays out of the repository
    text = page.read_text()
    assert run_page(page, text) == sum(1 for _ in blocks_to_run(text))


def test_what_counts_as_an_example() -> None:
    skipped = "```python no-run\nx = 1 / 0\n```\n```\nno\n```\n"
    text = f"a\n```python\nx = 1\n```\n{skipped}```python\ny = x + 1\nassert y == 2\n```\n"
    assert list(blocks_to_run(text)) == [(2, "x = 1\n"), (11, "y = x + 1\nassert y == 2\n")]
    assert run_page(pathlib.Path("page.md"), text) == 2
    with pytest.raises(ZeroDivisionError):
        run_page(pathlib.Path("page.md"), text.replace("python no-run", "python"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    missing = [target for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()]
    assert missing == []


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = set(re.findall(r"^\| `(FUSEWRIGHT_\w+)` \|", page, re.MULTILINE))
    assert table == set(VARIABLES)
