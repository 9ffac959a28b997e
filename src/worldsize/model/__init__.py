"""The data model: programs, transcripts, pages. It imports no other layer of the package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class BookError(Exception):
    """Something in the book must be fixed; the message says which file, line and command."""


def atomic_write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file at once or not at all, by renaming a complete one over it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # it is there still where the disk is full
