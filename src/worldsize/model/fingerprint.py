"""Compute fingerprints, which change whenever an input of a result changes.

A fingerprint covers texts, files and folders. It always includes the interpreter, the installed
packages and the pinned requirements.
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
    """Return a hash of texts, files, folders, installed packages and pinned requirements."""
    whole = hashlib.sha256(_surroundings().encode())
    for part in (*parts, root / "requirements"):
        for text in [part] if isinstance(part, str) else contents(part):
            whole.update(f"\0{text}".encode())
    return whole.hexdigest()


@cache
def _surroundings() -> str:
    """Return the version of the interpreter and of every package installed for it."""
    found = {path.name for entry in sys.path for path in Path(entry).glob("*-info")}
    return "; ".join([sys.version, *sorted(found)])  # NAME-VERSION.dist-info


def contents(path: Path) -> Iterator[str]:
    """Yield a line with the path and the hash of each file of a folder, except of caches."""
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
