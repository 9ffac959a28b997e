"""Digest: whether anything changed of what an outcome depends on.

It covers texts, files and folders, and always the interpreter, the packages that are installed
for it, and the pinned requirements.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

_CACHES = {"__pycache__", ".cache", ".pytest_cache", ".ruff_cache"}


def digest(root: Path, *parts: str | Path) -> str:
    """A digest of texts, files and folders, and of what everything in the book depends on."""
    whole = hashlib.sha256(_surroundings().encode())
    for part in (*parts, root / "requirements"):
        for text in [part] if isinstance(part, str) else contents(part):
            whole.update(f"\0{text}".encode())
    return whole.hexdigest()


@cache
def _surroundings() -> str:
    """The interpreter, and every package that is installed for it, with its version."""
    found = {path.name for entry in sys.path for path in Path(entry).glob("*-info")}
    return "; ".join([sys.version, *sorted(found)])  # NAME-VERSION.dist-info


def contents(path: Path) -> Iterator[str]:
    """A line for each file of a folder (but those of caches), or for one file."""
    if not path.is_dir():
        found = path.stat() if path.exists() else None
        known = _digest_file(path, found.st_mtime_ns, found.st_size) if found else "none"
        yield f"{path} {known}"
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - _CACHES)
        for name in sorted(names):
            yield from contents(Path(folder, name))


@lru_cache(maxsize=4096)
def _digest_file(path: Path, _mtime: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
