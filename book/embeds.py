"""Embeds: the ``--8<--`` lines of a chapter, and the program text they stand for.

The syntax is that of pymdownx.snippets, whose own code cuts out line ranges and marked
sections. One thing is added: a section of a Python file may also be named by a function or
class, so that a program carries no marker comments only to be quoted::

    --8<-- "snippets/02_ddp/naive.py:train"
"""

from __future__ import annotations

import ast
import re
import textwrap
from functools import lru_cache
from pathlib import Path

from book import BookError

EMBED = re.compile(r'^(?P<indent>[ \t]*)--8<--[ \t]+"(?P<target>[^"]+)"[ \t]*$')
_MARKER = re.compile(r"--8<--[ \t]+\[[ \t]*(start|end)[ \t]*:[ \t]*([\w-]+)[ \t]*\]")


def target_file(target: str) -> str:
    """The path part of ``path``, ``path:section`` or ``path:10:20``."""
    return target.split(":", 1)[0]


def embedded_files(root: Path) -> dict[str, list[str]]:
    """Each file that a chapter embeds, with the places (``docs/x.md:12``) that embed it."""
    found: dict[str, list[str]] = {}
    for page in sorted((root / "docs").rglob("*.md")):
        for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
            if match := EMBED.match(line):
                place = f"{page.relative_to(root)}:{number}"
                found.setdefault(target_file(match["target"]), []).append(place)
    return found


def _named(source: str) -> dict[str, tuple[int, int]]:
    """First and last line of every function and class, outermost first."""
    named: dict[str, tuple[int, int]] = {}
    level = [ast.parse(source)]
    while level:
        children = [child for node in level for child in ast.iter_child_nodes(node)]
        for node in children:
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                named.setdefault(node.name, (first, node.end_lineno or first))
        level = children
    return named


@lru_cache(maxsize=1)
def _snippets():
    """The preprocessor of pymdownx.snippets, used for its line ranges and marked sections."""
    import markdown
    from pymdownx.snippets import SnippetExtension, SnippetPreprocessor

    extension = SnippetExtension(base_path=["."])
    return SnippetPreprocessor(extension.getConfigs(), markdown.Markdown())


def resolve(target: str, root: Path) -> tuple[list[str], int]:
    """The lines that an embed stands for, dedented, and the number of the first of them.

    Raises BookError where the file or the section does not exist.
    """
    name = target_file(target)
    path = root / name
    if not path.is_file() or not path.resolve().is_relative_to(root.resolve()):
        raise BookError(f"there is no file {name} to embed")
    text = path.read_text("utf-8")
    lines, first = text.splitlines(), 1
    _, ranges, section = _snippets().split_path(target)
    if section:
        section = section[1:]
        marks = [(m[1], m[2]) for line in lines if (m := _MARKER.search(line))]
        named = _named(text) if path.suffix == ".py" else {}
        if ("start", section) in marks:
            if ("end", section) not in marks:
                raise BookError(f"{name} starts section {section!r} and never ends it")
            first = 2 + next(
                n
                for n, line in enumerate(lines)
                if (m := _MARKER.search(line)) and (m[1], m[2]) == ("start", section)
            )
            lines = _snippets().extract_section(section, lines)
        elif section in named:
            first, last = named[section]
            lines = lines[first - 1 : last]
        else:
            known = sorted({mark for _, mark in marks} | set(named))
            raise BookError(
                f"{name} has no section, function or class {section!r}; "
                f"it has: {', '.join(known)}"
            )
    elif ranges:
        start, _, end = ranges[1:].partition(":")
        first = int(start or 1)
        lines = lines[first - 1 : int(end) if end else None]
        if not lines:
            raise BookError(f"{name} has no lines {ranges[1:]}")
    lines = [line for line in lines if not _MARKER.search(line)]
    return textwrap.dedent("\n".join(lines)).strip("\n").split("\n"), first


def expand(text: str, root: Path, page: str) -> tuple[str, list[int]]:
    """A chapter with its embeds resolved, and for each new line the chapter's line it is from.

    Raises BookError naming ``page`` and line.
    """
    out: list[str] = []
    origin: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if match := EMBED.match(line):
            try:
                body, _ = resolve(match["target"], root)
            except BookError as error:
                raise BookError(f"{page}:{number}: {error}") from None
            out += [match["indent"] + inner if inner else "" for inner in body]
            origin += [number] * len(body)
        else:
            out.append(line)
            origin.append(number)
    return "\n".join(out), origin
