"""Store which tests passed with which inputs, so that unchanged tests do not run again.

The file ``.cache/passed.json`` contains, for each test that passed, a hash of everything that
can change its result. For a run of all tests, it contains a hash of the whole repository. The
option ``--no-cache`` ignores the file, and so does CI.
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
from worldsize.model.fingerprint import digest, file_hashes
from worldsize.testing.code_hashes import CodeHashes

ENGINE = tuple(
    ROOT / name
    for name in (
        "src/worldsize/model",
        "src/worldsize/execution",
        "src/worldsize/testing",
    )
)
CODE_OF = "code of "  # the beginning of an input; the name of a folder follows
WHOLE_RUN = "whole run"  # the key of a run of all tests
# Seconds for which the digest of a folder is reused. Thousands of tests name the same folders.
FOLDER_AGE = 5.0


class ResultCache:
    """The stored results of the tests of the book at ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        # the release of torch, if the environment names one
        release = Path(sys.prefix).name.removeprefix(".venv")
        self.path = root / ".cache" / f"passed{release}.json"
        self.known = self._read()
        self._folders: dict[str | Path, tuple[float, str]] = {}  # when it was read, its digest
        self._code_hashes = CodeHashes(root / ".cache" / "code_hashes.json")

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}

    def has(self, name: str, inputs: str) -> bool:
        """Return whether the test ``name`` has passed with these inputs."""
        return self.known.get(name) == inputs

    def add(self, news: dict[str, str | None]) -> None:
        """Store the inputs of tests that passed, and remove tests whose inputs are None.

        Results that other runs have stored in the meantime are kept.
        """
        if not news:
            return
        known = self._read() | news
        self.known = {name: inputs for name, inputs in known.items() if inputs}
        self.path.parent.mkdir(exist_ok=True)
        atomic_write(self.path, json.dumps(self.known, indent=0, sort_keys=True))

    def summary(self, digest: str) -> str:
        """Return the summary of a run of all tests with this digest; "" if not all passed."""
        known, _, summary = self.known.get(WHOLE_RUN, "").partition(" ")
        return summary if known == digest else ""

    def add_whole_run(self, digest: str, summary: str) -> None:
        """Store that all tests passed with this digest of the repository, and the summary."""
        self.add({WHOLE_RUN: f"{digest} {summary}"})

    def digest(self, *parts: str | Path) -> str:
        """Return a hash of texts, files and folders, and of the environment of all tests.

        A text `code of FOLDER` covers the files of this folder of the book, but neither the
        comments nor the docstrings of Python files.
        Changes of a folder in the last `FOLDER_AGE` seconds may be missing in the hash.
        """
        return digest(self.root, *map(self._folder_as_text, parts))

    def _folder_as_text(self, part: str | Path) -> str | Path:
        """Return the path and the digest of a folder; anything else unchanged."""
        code_only = isinstance(part, str) and part.startswith(CODE_OF)
        if not code_only and (isinstance(part, str) or not part.is_dir()):
            return part
        read_at, text = self._folders.get(part, (-math.inf, ""))
        if time.monotonic() - read_at > FOLDER_AGE:
            read_at = time.monotonic()
            if code_only:
                folder = self.root / part.removeprefix(CODE_OF)
                lines = "\0".join(self._code_hashes.of_folder(folder))
            else:
                lines = "\0".join(file_hashes(part))
            text = f"{part} {hashlib.sha256(lines.encode()).hexdigest()}"
            self._folders[part] = read_at, text
        return text

    def everything(self, *machine: str) -> str:
        """Return a hash of the repository and of the machine that the tests run on.

        The hash includes the times of the folders of PATH, because installing or upgrading a
        tool changes such a folder.
        """
        ignored = (self.root / ".gitignore").read_text("utf-8").replace("/", "").split()
        patterns = [".git", *ignored]
        included = [
            path
            for path in self.root.iterdir()
            if not any(fnmatch(path.name, pattern) for pattern in patterns)
        ]
        folders = [folder for folder in os.get_exec_path() if os.path.isdir(folder)]
        tools = [f"{folder} {os.stat(folder).st_mtime_ns}" for folder in folders]
        return self.digest(*machine, *tools, *sorted(included), self.root / ".git/index")
