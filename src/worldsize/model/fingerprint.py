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
    """Return a hash of texts, files, folders, installed packages and pinned requirements.

    A part that is a string is a text, and a part that is a `Path` is a file or a folder.
    """
    fingerprint = hashlib.sha256(_installed_versions().encode())
    for part in (*parts, root / "requirements"):
        for text in [part] if isinstance(part, str) else file_hashes(part):
            fingerprint.update(f"\0{text}".encode())
    return fingerprint.hexdigest()


@cache
def _installed_versions() -> str:
    """Return the versions of the interpreter and of all installed packages."""
    found = {path.name for entry in sys.path for path in Path(entry).glob("*-info")}
    return "; ".join([sys.version, *sorted(found)])  # NAME-VERSION.dist-info


def file_hashes(path: Path) -> Iterator[str]:
    """Yield a line with the path and the hash of each file in a folder, without caches.

    ``path`` can also be a single file. The hash of a file that does not exist is "none".
    """
    if not path.is_dir():
        stat = path.stat() if path.exists() else None
        file_hash = _digest_file(path, stat.st_mtime_ns, stat.st_size) if stat else "none"
        yield f"{path} {file_hash}"
        return
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - _CACHES)
        for name in sorted(names):
            yield from file_hashes(Path(folder, name))


@lru_cache(maxsize=4096)
def _digest_file(path: Path, _mtime: int, _size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
