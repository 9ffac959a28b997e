"""The data model: programs, transcripts, pages. It imports no other layer of the package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class BookError(Exception):
    """An error in the book; its message names the file or command, and says how to fix it."""


def atomic_write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file completely or not at all, by renaming a temporary file to its name."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.chmod(mode)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # after an error, it still exists
