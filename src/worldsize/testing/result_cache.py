"""Passed: what has passed with exactly these inputs, and so need not run again.

The record lies in ``.cache/passed.json``: for each test a digest of everything its outcome can
depend on, and for a whole run that passed a digest of the whole repository. With ``--no-cache``
(and in CI) it is not used.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from worldsize.model import ROOT, atomic_write
from worldsize.model.fingerprint import contents, digest

MACHINE = (
    "graders/__init__.py",
    "graders/host_checks.py",
)  # what the engine takes of the checker
ENGINE = tuple(
    ROOT / name
    for name in (
        "src/worldsize/model",
        "src/worldsize/execution",
        "src/worldsize/testing",
        *MACHINE,
    )
)
EVERYTHING = "everything"  # the name under which a whole run is known
# Seconds for which the digest of a folder is reused. Thousands of tests name the same folders.
FOLDER_AGE = 5.0


class ResultCache:
    """The record of what passed, for the book at ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        release = Path(sys.prefix).name.removeprefix(".venv")  # of torch, where it was named
        self.path = root / ".cache" / f"passed{release}.json"
        self.known = self._read()
        self._folders: dict[Path, tuple[float, str]] = {}  # when each was read, and its digest

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}

    def has(self, name: str, inputs: str) -> bool:
        """Whether test ``name`` passed with these inputs."""
        return self.known.get(name) == inputs

    def add(self, news: dict[str, str | None]) -> None:
        """Note what passed (and, as None, what failed), beside what other runs noted."""
        if not news:
            return
        known = self._read() | news
        self.known = {name: inputs for name, inputs in known.items() if inputs}
        self.path.parent.mkdir(exist_ok=True)
        atomic_write(self.path, json.dumps(self.known, indent=0, sort_keys=True))

    def summary(self, digest: str) -> str:
        """What a whole run with this digest of everything came to, if all passed; else ""."""
        known, _, summary = self.known.get(EVERYTHING, "").partition(" ")
        return summary if known == digest else ""

    def add_whole_run(self, digest: str, summary: str) -> None:
        """Note that a whole run passed with this digest of everything, and what it came to."""
        self.add({EVERYTHING: f"{digest} {summary}"})

    def digest(self, *parts: str | Path) -> str:
        """A digest of texts, files and folders, and of what every test depends on.

        It covers a folder as it is now, or as it was at most `FOLDER_AGE` seconds ago.
        """
        return digest(self.root, *map(self._folder_as_text, parts))

    def _folder_as_text(self, part: str | Path) -> str | Path:
        """The path and the digest of a folder; anything else unchanged."""
        if isinstance(part, str) or not part.is_dir():
            return part
        read_at, text = self._folders.get(part, (-math.inf, ""))
        if time.monotonic() - read_at > FOLDER_AGE:
            read_at = time.monotonic()
            lines = "\0".join(contents(part))
            text = f"{part} {hashlib.sha256(lines.encode()).hexdigest()}"
            self._folders[part] = read_at, text
        return text

    def everything(self, *machine: str) -> str:
        """A digest of the repository, and of what its tests may find on this machine.

        A tool that is installed or upgraded changes a folder of the path.
        """
        made = [".git", *(self.root / ".gitignore").read_text("utf-8").replace("/", "").split()]
        here = [
            p for p in self.root.iterdir() if not any(fnmatch(p.name, each) for each in made)
        ]
        folders = [each for each in os.get_exec_path() if os.path.isdir(each)]
        tools = [f"{each} {os.stat(each).st_mtime_ns}" for each in folders]
        return self.digest(*machine, *tools, *sorted(here), self.root / ".git/index")
