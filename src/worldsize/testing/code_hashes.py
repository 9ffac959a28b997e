"""Compute hashes of Python code that do not change with comments, docstrings and layout.

A test that only runs or parses programs does not need to run again after a change of a comment.
The markers of sections are comments, too, but they decide which code a page shows. A change of
a marker therefore changes the hash.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from worldsize.model import atomic_write
from worldsize.model.fingerprint import file_hashes

# the comment at the beginning or at the end of a section
_MARKER = re.compile(rb"^([ \t]*)#[ \t]*(--8<--[ \t]*\[.*\])[ \t\r]*$", re.MULTILINE)
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class CodeHashes:
    """The hashes of Python files. The file ``path`` stores them, because parsing is slow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, str] | None = None  # hash of the file → hash of its code

    def of_folder(self, folder: Path) -> Iterator[str]:
        """Yield a line with the path and a hash of each file.

        For a Python file, this is the hash of its code.
        """
        if self.known is None:
            self.known = self._read()
        new = {}
        for line in file_hashes(folder):
            name, _, file_hash = line.rpartition(" ")
            if name.endswith(".py"):
                if file_hash not in self.known:
                    new[file_hash] = self.known[file_hash] = code_hash(Path(name).read_bytes())
                line = f"{name} {self.known[file_hash]}"
            yield line
        if new:
            self.path.parent.mkdir(exist_ok=True)
            atomic_write(self.path, json.dumps(self._read() | new, indent=0, sort_keys=True))

    def _read(self) -> dict[str, str]:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}


def code_hash(source: bytes) -> str:
    """Return the hash of the syntax tree of a program, without its docstrings.

    Each marker of a section becomes a statement of the tree. If the result is not valid Python,
    return the hash of the text.
    """
    try:
        tree = ast.parse(_MARKER.sub(rb'\1_("\2")', source))
    except (SyntaxError, ValueError):
        return hashlib.sha256(source).hexdigest()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
