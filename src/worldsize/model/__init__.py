"""The data model: programs, transcripts and pages. It imports no other layer of the package."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


class BookError(Exception):
    """An error in the book. Its message names the file or the command, and how to fix it."""


def atomic_write(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file completely or not at all, by renaming a temporary file to its name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # it still exists after an error
