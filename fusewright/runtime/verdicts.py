"""Verdicts on lowered graphs, kept on disk so that a warm start does not verify again."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor import config as inductor_config

from fusewright.config import writable_folder


@functools.cache
def stack_digest() -> str:
    """Hash of what decides the code that a graph is lowered to, beside the graph: torch, processor, our own sources."""
    h = hashlib.sha256()
    root = pathlib.Path(__file__).resolve().parents[1]
    for folder in (root, root / "capture", root / "passes", root / "fusion"):
        for path in sorted(folder.resolve().rglob("*.py")):
            h.update(path.read_bytes())
    cpu = torch.backends.cpu.get_cpu_capability()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    for fact in (torch.__version__, torch.version.git_version, platform.machine(), cpu, gpu):
        h.update(f"{fact}|".encode())
    return h.hexdigest()


def ambient_digest() -> str:
    """Hash of the process's state that AOTAutograd and Inductor read while lowering."""
    autocast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    facts = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_num_threads() > 1)
    return hashlib.sha256(repr(facts).encode() + inductor_config.get_hash()).hexdigest()


def verdict_key(parts: Sequence[str]) -> str:
    """Name of a verdict: hash of the graph, bucket, variant and pass digests in `parts`, the stack and the state."""
    return hashlib.sha256("\n".join((*parts, stack_digest(), ambient_digest())).encode()).hexdigest()


@dataclass(frozen=True)
class VerdictFolder:
    """A folder of small JSON files, one a verdict, passed or failed: a warm start repeats neither."""

    folder: pathlib.Path

    @classmethod
    def under(cls, cache_dir: pathlib.Path) -> VerdictFolder:
        """The verdicts below `cache_dir`.

        Raises:
            CacheFolderError: the folder cannot be written.
        """
        return cls(writable_folder(cache_dir / "verdicts", "FUSEWRIGHT_CACHE_DIR"))

    def read(self, key: str) -> dict[str, Any] | None:
        """The record of `key`, or None; a file that is no JSON (a torn disk) counts as absent."""
        try:
            record = json.loads((self.folder / f"{key}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return record if isinstance(record, dict) else None

    def write(self, key: str, record: dict[str, Any]) -> None:
        """Write a record so that a reader sees all of it or nothing."""
        handle, name = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(record, file)
        os.replace(name, self.folder / f"{key}.json")
