"""Update the mutants in `tests/mutants/` after programs were edited: `make update-mutants`.

A mutant replaces a piece of a program that occurs exactly once. After you rename a variable,
this piece may no longer occur. This tool then looks for the most similar piece of the program.
If only one piece is similar enough, the tool writes this piece into the list, and it applies
the same renaming to the text that replaces it. Otherwise it prints the most similar lines, and
you edit the list yourself.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from worldsize.model import ROOT, atomic_write

SIMILAR = 0.6  # the fraction of equal tokens that a piece needs
MARGIN = 0.1  # the similarity by which the best piece must exceed the next piece
SHOWN = 3  # the number of candidates that are printed
_TOKEN = re.compile(r"\w+|[^\w\s]")
_STRING = re.compile(r'"""[\s\S]*?"""|\'\'\'[\s\S]*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'')


@dataclass(frozen=True)
class Candidate:
    """A piece of a program that is similar to a text."""

    similarity: float  # the fraction of equal tokens
    line: int
    text: str
    renamings: tuple[tuple[str, str], ...]  # each old token with the token of this piece


def candidates(old: str, source: str) -> list[Candidate]:
    """Return the pieces with the same number of tokens as `old`, the most similar piece first.

    A piece begins and ends with the same blanks and line breaks as `old`.
    """
    old_tokens, found = _TOKEN.findall(old), list(_TOKEN.finditer(source))
    before = old[: len(old) - len(old.lstrip())]
    after = old[len(old.rstrip()) :]
    pieces = []
    for start in range(len(found) - len(old_tokens) + 1):
        tokens = found[start : start + len(old_tokens)]
        pairs = [(a, b[0]) for a, b in zip(old_tokens, tokens, strict=True) if a != b[0]]
        first, last = tokens[0].start(), tokens[-1].end()
        if not (source.endswith(before, 0, first) and source.startswith(after, last)):
            continue
        pieces.append(
            Candidate(
                1 - len(pairs) / len(old_tokens),
                source.count("\n", 0, first) + 1,
                before + source[first:last] + after,
                tuple(dict.fromkeys(pairs)),
            )
        )
    return sorted(pieces, key=lambda each: -each.similarity)


def only_match(found: list[Candidate], source: str) -> Candidate | None:
    """Return the first candidate, if it is similar enough and clearly the most similar one."""
    if not found or found[0].similarity < SIMILAR or source.count(found[0].text) != 1:
        return None
    close = [each for each in found[1:] if each.similarity > found[0].similarity - MARGIN]
    return None if close else found[0]


def apply_renamings(text: str, renamings: tuple[tuple[str, str], ...]) -> str:
    """Return the text, with every old token replaced by its new token."""
    new = dict(renamings)
    return _TOKEN.sub(lambda match: new.get(match[0], match[0]), text)


def toml_string(text: str, quoted: str) -> str:
    """Return a text as a TOML string, with the quotation marks of `quoted` if possible."""
    mark = '"""' if quoted.startswith('"""') else quoted[0]
    allowed = {
        '"': not set('"\\\n') & set(text),
        "'": not set("'\n") & set(text),
        '"""': '"""' not in text and "\\" not in text and text[-1:] != '"',
    }
    if not allowed[mark]:
        return json.dumps(text, ensure_ascii=False)
    newline = "\n" if mark == '"""' and text.startswith("\n") else ""
    return f"{mark}{newline}{text}{mark}"


def replace_entry(toml: str, program: str, what: str, change: tuple[str, str]) -> str:
    """Return the TOML text of a list, with a new pair of texts in the entry `what`.

    Raise ValueError if the entry is written in a form that this tool cannot edit.
    """
    expected = tomllib.loads(toml)
    expected[program][what][:2] = change
    header = re.search(rf"(?m)^\[[\"']{re.escape(program)}[\"']\]", toml)
    keys = (json.dumps(what, ensure_ascii=False), f"'{what}'")
    for key in re.finditer("(?m)^(?:" + "|".join(map(re.escape, keys)) + r")\s*=\s*\[", toml):
        if header is None or key.start() < header.end():
            continue
        strings = _STRING.finditer(toml, key.end())
        old, new = next(strings, None), next(strings, None)
        if old is None or new is None:
            break
        edited = (
            toml[: old.start()]
            + toml_string(change[0], old[0])
            + toml[old.end() : new.start()]
            + toml_string(change[1], new[0])
            + toml[new.end() :]
        )
        if tomllib.loads(edited) == expected:
            return edited
        break
    raise ValueError(f"the entry {what!r} cannot be edited")


def update(path: Path, root: Path, only: list[str]) -> Iterator[str]:
    """Update a list of mutants; yield messages about entries that must change."""
    toml = path.read_text("utf-8")
    for program, entries in tomllib.loads(toml).items():
        file = root / program
        if not file.is_file() or (only and not any(map(program.startswith, only))):
            continue
        source = file.read_text("utf-8")
        for what, change in entries.items():
            if what == "tests" or source.count(change[0]) == 1:
                continue
            found = candidates(change[0], source)
            match, where = only_match(found, source), f"{program}, {what!r}"
            if match is None:
                yield f"edit {path.relative_to(root)} yourself: {where}: {change[0]}"
                yield from (
                    f"  {program}:{each.line}: {each.text}"
                    for each in found[:SHOWN]
                    if each.similarity > 0
                )
                continue
            pair = match.text, apply_renamings(change[1], match.renamings)
            try:
                toml = replace_entry(toml, program, what, pair)
            except ValueError:
                yield f"edit {path.relative_to(root)} yourself: {where}: {change[0]}"
                yield f"  {program}:{match.line}: {match.text}"
                continue
            yield f"updated {where}: {pair[0]} becomes {pair[1]}"
    if toml != path.read_text("utf-8"):
        atomic_write(path, toml)


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Update the lists of all or some programs; return 1 if you must edit an entry yourself."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("programs", nargs="*", help="programs or folders; the default is all")
    only = parser.parse_args(arguments).programs
    messages = [
        message
        for path in sorted((root / "tests/mutants").glob("*.toml"))
        for message in update(path, root, only)
    ]
    print("\n".join(messages) or "Every mutant names a text that occurs once in its program.")
    return int(any(message.startswith("edit ") for message in messages))


if __name__ == "__main__":
    sys.exit(main())
