"""Guards what is installed: the package list, the links, the wheel's contents, the entry points, the scripts."""

from __future__ import annotations

import importlib
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib
import zipfile
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPTS = ("bench", "check", "demo", "gpu", "install", "test")
STAGES = ("autotune", "capture", "fusion", "passes")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folder_of_package(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """Every folder that holds an __init__.py, by the name it is imported under."""
    found = {}
    for top in ("fusewright", *STAGES):
        for parent, _, names in os.walk(root / top):  # links are not followed: each folder comes once
            if "__init__.py" in names:
                parts = pathlib.Path(parent).relative_to(root).parts
                found[".".join(parts if top == "fusewright" else ("fusewright", *parts))] = pathlib.Path(parent)
    return found


def test_package_list_is_complete() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert listed == sorted(folder_of_package()), "tool.setuptools.packages: list every package, sorted"


def test_no_module_lies_outside_a_package() -> None:
    known = set(folder_of_package().values())
    stray = [
        str(path.relative_to(ROOT))
        for top in ("fusewright", *STAGES)
        for path in (ROOT / top).rglob("*.py")
        if path.parent not in known and not any(parent.is_symlink() for parent in path.parents)
    ]
    assert stray == [], "these folders need an __init__.py, or their modules are missing from the wheel"


def test_each_link_leads_to_its_stage() -> None:
    links = {path.name: os.readlink(path) for path in (ROOT / "fusewright").iterdir() if path.is_symlink()}
    assert links == {stage: f"../{stage}" for stage in STAGES}
    folders = project()["tool"]["setuptools"]["package-dir"]
    assert folders == {"fusewright": "fusewright", **{f"fusewright.{stage}": stage for stage in STAGES}}


def test_stages_are_one_module_each() -> None:
    for stage in STAGES:
        module = importlib.import_module(f"fusewright.{stage}")
        assert module.__file__ is not None
        assert pathlib.Path(module.__file__).resolve() == ROOT / stage / "__init__.py"
        assert stage not in sys.modules, f"{stage} was imported past fusewright.{stage}"


def test_one_version() -> None:
    version = project()["project"]["version"]
    assert importlib.import_module("fusewright").__version__ == version
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_wheel_holds_every_file(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "source"  # a copy: setuptools leaves build folders beside what it builds
    for top in ("fusewright", *STAGES):
        shutil.copytree(ROOT / top, source / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    expected = {
        "/".join((*package.split("."), path.name))
        for package, folder in folder_of_package(source).items()
        for path in folder.iterdir()
        if path.is_file()
    }
    built = subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = {name.split("/")[-1]: name for name in archive.namelist() if ".dist-info/" in name}
        entry_points = archive.read(metadata["entry_points.txt"]).decode()
    assert held == expected
    assert "LICENSE" in metadata
    assert "fusewright = fusewright.api:backend" in entry_points


@pytest.mark.parametrize("table", ["scripts", "entry-points"])
def test_entry_points_exist(table: str) -> None:
    declared = project()["project"][table]
    targets = [declared["fusewright"]] if table == "scripts" else [t for g in declared.values() for t in g.values()]
    assert targets
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_strict_and_explain_themselves(name: str) -> None:
    script = ROOT / "scripts" / name
    assert "\nset -euo pipefail\n" in script.read_text()
    helped = subprocess.run([script, "--help"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert helped.returncode == 0, helped.stderr
    assert f"scripts/{name} " in helped.stdout
    assert not helped.stdout.startswith("#")


def test_no_script_is_left_untested() -> None:
    assert sorted(path.name for path in (ROOT / "scripts").iterdir() if path.name != "common.sh") == list(SCRIPTS)


def bare_machine(tmp_path: pathlib.Path, *, tools: str = "") -> tuple[pathlib.Path, dict[str, str]]:
    """A copy of the scripts and an environment whose PATH has a shell, python and `tools`, but no compiler."""
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "basename", "cat", "cut", "dirname", "env", "sed", "sha256sum", *tools.split()):
        found = shutil.which(tool)
        assert found is not None, tool
        (tmp_path / "bin" / tool).symlink_to(found)
    shutil.copytree(ROOT / "scripts", tmp_path / "repo" / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "repo")
    return tmp_path / "repo" / "scripts", {"PATH": str(tmp_path / "bin"), "PYTHON": sys.executable}


def test_install_names_missing_debian_packages(tmp_path: pathlib.Path) -> None:
    scripts, environment = bare_machine(tmp_path)
    refused = subprocess.run([scripts / "install"], env=environment, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "g++" in refused.stderr
    assert "apt-get install" in refused.stderr
    assert not (tmp_path / "repo" / ".venv").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--torch", "2.9"], "torch 2.11 or later"),
        (["--torch", "nightly"], "not 'nightly'"),
        (["--torch"], "needs a version"),
        (["--fast"], "unknown argument '--fast'"),
    ],
)
def test_install_refuses(tmp_path: pathlib.Path, arguments: list[str], said: str) -> None:
    scripts, environment = bare_machine(tmp_path)
    refused = subprocess.run([scripts / "install", *arguments], env=environment, capture_output=True, text=True)
    assert refused.returncode == 2
    assert said in refused.stderr


def test_install_refuses_an_unsupported_python(tmp_path: pathlib.Path) -> None:
    scripts, environment = bare_machine(tmp_path)
    old = tmp_path / "bin" / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")  # what the version question answers there
    old.chmod(0o755)
    refused = subprocess.run(
        [scripts / "install"], env={**environment, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert refused.returncode == 1
    assert "3.11 to 3.13" in refused.stderr


def test_gpu_script_says_that_there_is_none(tmp_path: pathlib.Path) -> None:
    scripts, environment = bare_machine(tmp_path)
    hidden = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    refused = subprocess.run([scripts / "gpu"], env=hidden, capture_output=True, text=True)
    assert refused.returncode == 3
    assert refused.stderr.startswith("gpu: no GPU: ")
    assert refused.stderr.count("\n") == 1
