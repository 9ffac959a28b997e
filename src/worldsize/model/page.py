"""Parse a page into headings, code blocks and prose.

This is the only parser of pages, and no other module searches for code blocks. A page is a
Markdown file or a lab. The text cells of a lab are comments, which contain Markdown after
``# ``. Line numbers start at 1, as in an editor.

An embed is a line of a code block that is replaced by a file of the book, or by a part of a
file. It has the syntax of pymdownx.snippets, with one addition: for a Python file, the part can
also be the name of a function or a class. Programs therefore need no marker comments::

    --8<-- "snippets/02_ddp/naive.py:train"
"""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
import unicodedata
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

from worldsize.model import BookError

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<ticks>`{3,})(?P<header>.*)$")
_HEADER = re.compile(r"^\s*\{?\s*\.?(?P<language>[\w+#-]*)(?P<options>.*?)\}?\s*$")
_OPTION = re.compile(r'([\w-]+)=(?:"([^"]*)"|(\S+))')
_HEADING = re.compile(r"(#{1,6}) (.+?)\s*$")
_OWN_ANCHOR = re.compile(r"\s*\{[^}]*#([\w-]+)[^}]*\}$")
_EMBED = re.compile(r'^(?P<indent>[ \t]*)--8<--[ \t]+"(?P<target>[^"]+)"[ \t]*$')
_CALLOUTS = re.compile(r'\s*<div class="callouts" markdown(?:="1")?>\s*$')
_CALLOUT = re.compile(r"\s*\d+\. +(`+)(?P<quote>.+?)\1(?= |$)")
_MARKER = re.compile(r"--8<--[ \t]+\[[ \t]*(start|end)[ \t]*:[ \t]*([\w-]+)[ \t]*\]")


@dataclass(frozen=True)
class Embed:
    """A line of a page that embeds a file, a section of a file, or some of its lines."""

    line: int
    indent: str
    target: str  # `path`, `path:section` or `path:10:20`

    @property
    def file(self) -> str:
        """Return the path in the target."""
        return self.target.partition(":")[0]

    @property
    def part(self) -> str:
        """Return the text after the path: `section`, `10:20`, or nothing."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Callout:
    """An explanation of one line of a code block. It quotes a part of this line."""

    line: int  # line number of the explanation on the page
    quote: str


@dataclass(frozen=True)
class Heading:
    """A heading and its section, which includes its subsections. Its last line is `end`."""

    line: int
    level: int
    text: str
    anchor: str
    end: int


@dataclass(frozen=True)
class Fence:
    """A code block of a page, from its opening line `line` to its closing line `end`."""

    line: int
    end: int
    indent: str
    ticks: str
    header: str
    lines: tuple[str, ...]
    embeds: tuple[Embed, ...] = ()

    @property
    def language(self) -> str:
        return _HEADER.match(self.header)["language"]

    @property
    def options(self) -> dict[str, str]:
        """Return the options in the header, for example `title="x.py" hl_lines="2"`."""
        found = _OPTION.findall(_HEADER.match(self.header)["options"])
        return {name: quoted or unquoted for name, quoted, unquoted in found}

    def dedent(self, line: str) -> str:
        """Return a line of the block without the indentation of the block."""
        spaces = len(line) - len(line.lstrip())
        return line[min(spaces, len(self.indent)) :]

    @property
    def has_only_embeds(self) -> bool:
        """Return whether the block contains only embeds."""
        nonempty = [line for line in self.lines if line.strip()]
        return bool(self.embeds) and len(nonempty) == len(self.embeds)


@dataclass
class Page:
    """A parsed page."""

    lines: list[str]
    fences: list[Fence] = field(default_factory=list)
    headings: dict[str, Heading] = field(default_factory=dict)  # by anchor, in order
    stray_embeds: list[Embed] = field(default_factory=list)  # embeds outside of code blocks

    @property
    def title(self) -> str:
        return next(iter(self.headings.values())).text if self.headings else ""

    @property
    def embeds(self) -> list[Embed]:
        return [embed for fence in self.fences for embed in fence.embeds]

    def section(self, anchor: str = "") -> range:
        """Return the line numbers of a section with its heading; of the page for no anchor."""
        if not anchor:
            return range(1, len(self.lines) + 1)
        return range(self.headings[anchor].line, self.headings[anchor].end + 1)

    def text(self, anchor: str = "") -> str:
        """Return the text of a section with its heading; of the page for no anchor."""
        return "\n".join(self.lines[number - 1] for number in self.section(anchor))

    @cached_property
    def code(self) -> set[int]:
        """Return the numbers of all lines that belong to code blocks."""
        return {n for fence in self.fences for n in range(fence.line, fence.end + 1)}

    def callouts(self, fence: Fence) -> list[Callout]:
        """Return the explanations that directly follow a code block::

            <div class="callouts" markdown>

            1. `part of a line` What the line does.

            </div>

        Raises BookError if an explanation does not begin with a quote.
        """
        numbers = range(fence.end + 1, len(self.lines) + 1)
        first = next((n for n in numbers if self.lines[n - 1].strip()), 0)
        if not first or not _CALLOUTS.match(self.lines[first - 1]):
            return []
        found = []
        for number in range(first + 1, len(self.lines) + 1):
            line = self.lines[number - 1]
            if line.strip() == "</div>":
                break
            if match := _CALLOUT.match(line):
                found.append(Callout(number, match["quote"].strip()))
            elif re.match(r"\s*\d+\. ", line):
                raise BookError(
                    f"{number}: a callout must begin with a quote: write a part of the "
                    "explained line between backticks"
                )
        return found

    def prose(self) -> list[tuple[int, str]]:
        """Return the lines outside of code blocks, with their numbers."""
        return [(n, line) for n, line in enumerate(self.lines, 1) if n not in self.code]


def parse(text: str) -> Page:
    """Parse the Markdown text of a page."""
    page = Page(text.split("\n"))
    heads: list[tuple[int, int, str, str]] = []  # (line number, level, text, own anchor)
    number = 1
    while number <= len(page.lines):
        line = page.lines[number - 1]
        if match := _FENCE.match(line):
            fence = _fence(page.lines, number, match)
            page.fences.append(fence)
            number = fence.end
        elif match := _EMBED.match(line):
            page.stray_embeds.append(Embed(number, match["indent"], match["target"]))
        elif match := _HEADING.match(line):
            own = _OWN_ANCHOR.search(match[2])
            words = match[2][: own.start()] if own else match[2]
            heads.append((number, len(match[1]), words, own[1] if own else ""))
        number += 1
    for place, (number, level, words, own) in enumerate(heads):
        next_heads = (n for n, other, _, _ in heads[place + 1 :] if other <= level)
        end = next(next_heads, len(page.lines) + 1) - 1
        anchor = own or _unique(slug(words), page.headings)
        page.headings[anchor] = Heading(number, level, words, anchor, end)
    return page


def _fence(lines: list[str], number: int, opening: re.Match[str]) -> Fence:
    """Return the code block that opens on line `number`.

    If no line closes the block, `end` is the line after the page.
    """
    closing = re.compile(rf"\s*{opening['ticks']}`*\s*")
    after = range(number + 1, len(lines) + 1)
    end = next((n for n in after if closing.fullmatch(lines[n - 1])), len(lines) + 1)
    body = lines[number : end - 1]
    found = ((n, _EMBED.match(line)) for n, line in enumerate(body, number + 1))
    embeds = tuple(Embed(n, m["indent"], m["target"]) for n, m in found if m)
    return Fence(
        number, end, opening["indent"], opening["ticks"], opening["header"], tuple(body), embeds
    )


def slug(words: str) -> str:
    """Return the anchor that Python-Markdown gives to the first heading with this text."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", words)
    text = unicodedata.normalize("NFKD", re.sub(r"[`*$]", "", words))
    text = text.encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def _unique(anchor: str, used: Collection[str]) -> str:
    """Return the anchor, or the anchor with a number if it is used, for example `adam_1`."""
    numbered = (f"{anchor}_{number}" for number in itertools.count(1))
    return next(each for each in itertools.chain([anchor], numbered) if each not in used)


def read(path: Path) -> Page:
    """Return the parsed page of a file; the result is cached until the file changes."""
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=128)
def _read(path: Path, _mtime: int) -> Page:
    text = path.read_text("utf-8")
    if path.suffix == ".py":  # a lab: keep only the text cells, with their line numbers
        text = re.sub(r"^(?!# ).*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^# ", "", text, flags=re.MULTILINE)
    return parse(text)


def check_embeds(path: Path, root: Path) -> None:
    """Raise BookError, with file and line, if an embed of the page cannot be resolved."""
    for embed in read(path).embeds:
        try:
            resolve(embed, root)
        except BookError as error:
            raise BookError(f"{path.relative_to(root)}:{embed.line}: {error}") from None


def embedded_files(root: Path) -> dict[str, list[str]]:
    """Return each file that pages embed, with the places (``docs/x.md:12``) that embed it."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "docs").rglob("*.md")):
        for embed in read(path).embeds:
            place = f"{path.relative_to(root)}:{embed.line}"
            found.setdefault(embed.file, []).append(place)
    return found


# --- resolving embeds ------------------------------------------------------------------------


def expand_embeds(fence: Fence, root: Path) -> list[str]:
    """Return the lines of a code block with its embeds resolved.

    Empty lines separate two embeds. Raises BookError if an embed cannot be resolved.
    """
    embeds = {embed.line: embed for embed in fence.embeds}
    found: list[str] = []
    for number, line in enumerate(fence.lines, fence.line + 1):
        if number not in embeds:
            found.append(fence.dedent(line))
            continue
        if number > fence.embeds[0].line:
            is_python = fence.embeds[0].file.endswith(".py")
            is_method = "." in embeds[number].part
            found += [""] * (2 if is_python and not is_method else 1)  # as in PEP 8
        indent = fence.dedent(embeds[number].indent)
        found += [indent + text if text else "" for text in resolve(embeds[number], root)]
    return found


def resolve(embed: Embed, root: Path) -> list[str]:
    """Return the lines that an embed inserts, without their common indentation.

    Raises BookError if the file, the section or the lines do not exist.
    """
    path = root / embed.file
    if not path.is_file() or not _is_inside(path, root):
        raise BookError(
            f"the embedded file {embed.file} does not exist in the book: correct its path"
        )
    return list(_lines_of(path, embed.file, embed.part, path.stat().st_mtime_ns))


@lru_cache(maxsize=8192)
def _lines_of(path: Path, file: str, part: str, _mtime: int) -> list[str]:
    """Return the dedented lines of a part of a file; cached until the file changes."""
    text = path.read_text("utf-8")
    lines = text.splitlines()
    if match := re.fullmatch(r":?(\d*)(?::(\d*))?", part):
        first, last = int(match[1] or 1), int(match[2] or 0) or None
        lines = lines[first - 1 : last]
        if not lines:
            raise BookError(f"{file} does not have the lines {part}: correct the numbers")
    else:
        lines = _section(file, part, text, lines)
    lines = [line for line in lines if not _MARKER.search(line)]
    return textwrap.dedent("\n".join(lines)).strip("\n").split("\n")


@lru_cache(maxsize=4096)
def _is_inside(path: Path, root: Path) -> bool:
    """Return whether a file is inside a folder, after symbolic links are resolved."""
    return path.resolve().is_relative_to(root.resolve())


def _section(file: str, part: str, text: str, lines: list[str]) -> list[str]:
    """Return the lines between the markers of a section, or those of a function or class."""
    marks = {(m[1], m[2]): n for n, line in enumerate(lines) if (m := _MARKER.search(line))}
    if ("start", part) in marks:
        if ("end", part) not in marks:
            raise BookError(
                f"{file} has a start marker of the section {part!r} but no end "
                "marker: add the end marker"
            )
        return lines[marks["start", part] + 1 : marks["end", part]]
    definitions = _definitions(text) if file.endswith(".py") else {}
    if part in definitions:
        first, last = definitions[part]
        return lines[first - 1 : last]
    names = sorted({name for _, name in marks} | set(definitions))
    raise BookError(
        f"{file} has no section, function or class {part!r}: choose one of {', '.join(names)}"
    )


@lru_cache(maxsize=1024)
def _definitions(source: str) -> dict[str, tuple[int, int]]:
    """Return the first and the last line of every function and class, by name.

    A method has two names, without and with its class: ``launch`` and ``Bucket.launch``. The
    same is true for a nested function. If a name occurs twice, the outermost definition counts.
    """
    definitions: dict[str, tuple[int, int]] = {}
    level: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    statements = (ast.stmt, ast.excepthandler, ast.match_case)  # only these contain functions
    while level:
        below = []
        for prefix, node in level:
            for child in ast.iter_child_nodes(node):
                if not isinstance(child, statements):
                    continue
                inside = prefix
                if isinstance(child, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                    first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                    lines = first, child.end_lineno or first
                    definitions.setdefault(child.name, lines)
                    definitions.setdefault(f"{prefix}{child.name}", lines)
                    inside = f"{prefix}{child.name}."
                below.append((inside, child))
        level = below
    return definitions
