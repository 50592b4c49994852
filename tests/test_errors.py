"""The tree of errors is the one that errors.py draws, and names are suggested where they are near."""

from __future__ import annotations

import inspect
import re

import pytest

from fusewright import errors
from fusewright.errors import FusewrightError, UnknownNameError, UserInputError, did_you_mean, unknown_name


def drawn() -> dict[str, str]:
    """Class -> parent, read from the drawing in the module's docstring."""
    parents: dict[str, str] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^((?:\|   )*)(?:\+-- )?(\w+)(?: \(also ValueError\))?(?:  .*)?$", line)
        if found is None or not inspect.isclass(getattr(errors, found[2], None)):
            continue
        depth = 0 if "+--" not in line else len(found[1]) // 4 + 1
        path[depth:] = [found[2]]
        if depth:
            parents[found[2]] = path[depth - 1]
    return parents


def test_the_drawing_is_the_tree() -> None:
    ours = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FusewrightError)]
    assert drawn() == {c.__name__: c.__bases__[0].__name__ for c in ours if c is not FusewrightError}


def test_every_error_says_when() -> None:
    ours = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FusewrightError)]
    assert len(ours) > 10
    for kind in ours:
        assert inspect.getdoc(kind), kind


def test_wrong_input_is_a_value_error() -> None:
    assert issubclass(UserInputError, ValueError)
    assert not issubclass(errors.FallbackError, ValueError)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fuse_atention", " Did you mean 'fuse_attention'?"),
        ("fuse_attention", " Did you mean 'fuse_attention'?"),
        ("zzz", ""),
    ],
)
def test_did_you_mean(name: str, expected: str) -> None:
    assert did_you_mean(name, ["canonicalize", "fuse_attention"]) == expected


def test_an_unknown_name_lists_the_known_ones() -> None:
    error = unknown_name("pass", "cannonicalize", iter(["fuse_attention", "canonicalize"]))
    assert isinstance(error, UnknownNameError)
    assert str(error) == (
        "unknown pass 'cannonicalize'. Did you mean 'canonicalize'? Known: canonicalize, fuse_attention."
    )
    assert str(unknown_name("pass", "x", [])) == "unknown pass 'x'. Known: none."
