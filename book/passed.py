"""Passed: what has passed with exactly these inputs, and so need not run again.

The record lies in ``.cache/passed.json``: for each test a digest of everything its outcome can
depend on. ``--all`` (and CI) ignores it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "numpy",
    "matplotlib",
    "deepspeed",
    "onnxruntime",
    "torchao",
    "pytest",
    "pytest-codeblocks",
    "mkdocs-material",
)


@lru_cache(maxsize=1)
def surroundings() -> str:
    """The interpreter and the packages that programs may use."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} none")
    return "; ".join([sys.version, *versions])


@lru_cache(maxsize=512)
def _digest_file(path: str, _mtime: int, _size: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def digest(*parts: str | Path) -> str:
    """A digest of strings, files and folders (all in them but hidden files and caches)."""
    whole = hashlib.sha256(surroundings().encode())
    for part in parts:
        if isinstance(part, str):
            whole.update(f"\0{part}".encode())
            continue
        if part.is_dir():
            files = []
            for folder, folders, names in os.walk(part):
                folders[:] = sorted(
                    f for f in folders if not f.startswith(".") and f != "__pycache__"
                )
                files += [
                    Path(folder, name) for name in sorted(names) if not name.startswith(".")
                ]
        else:
            files = [part]
        for file in files:
            if not file.exists():
                whole.update(f"\0{file} none".encode())
                continue
            stat = file.stat()
            whole.update(
                f"\0{file} {_digest_file(str(file), stat.st_mtime_ns, stat.st_size)}".encode()
            )
    return whole.hexdigest()


class Passed:
    """The record of what passed, for the book at ``root``."""

    def __init__(self, root: Path) -> None:
        self.path = root / ".cache" / "passed.json"
        try:
            self.known = json.loads(self.path.read_text())
        except (OSError, ValueError):
            self.known = {}

    def has(self, name: str, inputs: str) -> bool:
        """Whether test ``name`` passed with these inputs."""
        return self.known.get(name) == inputs

    def add(self, news: dict[str, str | None]) -> None:
        """Note what passed (and, as None, what failed), beside what other runs noted."""
        if not news:
            return
        self.known = Passed(self.path.parent.parent).known | news
        self.known = {name: inputs for name, inputs in self.known.items() if inputs}
        self.path.parent.mkdir(exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(self.known, indent=0, sort_keys=True))
        partial.replace(self.path)
