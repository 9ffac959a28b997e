"""Data that becomes part of a page: YAML read by a schema, shown where a comment line asks.

The schema of a file is a few classes: what is missing, unknown or of another type stops the
build, and the message names the file, the line, the entry and the field. So does a
`SchemaError` that
is raised while an entry is read, or held against the rest of the book.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from mkdocs.exceptions import BuildError  # printed with the page's name, without a trace

NAMES = ("id", "topic", "title")  # the field that names an entry
T = TypeVar("T")


class DataError(BuildError):
    """Data that cannot be shown as it is written."""


class SchemaError(ValueError):
    """What is wrong with an entry; who reads the file says with which."""


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping of a data file: no field but those that its class names."""


def read(root: Path, file: str, kind: type[T]) -> T:
    """What the file of the book at `root` holds, as a `kind`.

    Raises DataError where it cannot be read, or is not of that kind.
    """
    try:
        return decode((root / file).read_text("utf-8"), file, kind)
    except OSError as error:
        raise DataError(f"{file}: {error}") from None


def decode(text: str, file: str, kind: type[T]) -> T:
    """The same for the text of a file."""
    try:
        return msgspec.yaml.decode(text, type=kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        raise DataError(f"{file}{_place(text, path)}: {why}") from None
    except msgspec.DecodeError as error:
        raise DataError(f"{file}: {error}") from None


def _place(text: str, path: str) -> str:
    """`:12: lesson-1: ridge: slips 0` for `$.lessons[0].questions[0].slips[0]`."""
    data, names, rest = msgspec.yaml.decode(text), [], []
    position = entry = 0  # behind what was passed on the way, and of the entry's own line
    for step in re.findall(r"\w+", path):
        if isinstance(data, list):
            data = data[int(step)]
        else:
            data = data.get(step) if isinstance(data, dict) else None
        field = next((f for f in NAMES if isinstance(data, dict) and f in data), None)
        if field is None:
            rest.append(step)
            if isinstance(data, list):  # another list may have an entry of the same name
                found = re.compile(rf"\b{step}:").search(text, position)
                position = found.end() if found else position
            continue
        names, rest = [*names, str(data[field])], []
        found = re.compile(rf"\b{field}: [\"']?{re.escape(names[-1])}\b").search(text, position)
        position = entry = found.start() if found else position
    line = f":{text.count(chr(10), 0, entry) + 1}" if entry else ""
    return ": ".join([line, *names, *filter(None, [" ".join(rest)])])


@contextmanager
def naming(*where: str) -> Iterator[None]:
    """Turn a Fault into a DataError that says where it is."""
    try:
        yield
    except SchemaError as why:
        raise DataError(": ".join([*where, str(why)])) from None


def require_unique(names: Iterable[str]) -> None:
    """Raise a Fault for a name that stands there twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"{name}: said twice")


def expand_directives(lines: list[str], shows: dict[str, Callable], root: Path) -> list[str]:
    """The lines, with what `shows[word](["a", "b"], root)` makes of `<!-- word: a b -->`.

    Raises DataError for a comment that is written otherwise, or of which that knows nothing.
    """
    out, comment = [], re.compile(rf"<!-- ({'|'.join(shows)}):")
    for line in lines:
        found = comment.search(line)
        if found is None:
            out.append(line)
            continue
        asked = re.fullmatch(rf"( *){found[0]} ([\w -]+) -->", line.rstrip())
        if asked is None:
            raise DataError(f"not understood: {line.strip()}")
        with naming(line.strip()):
            shown = shows[found[1]](asked[2].split(), root).split("\n")
        out += ["", *(asked[1] + each if each else "" for each in shown), ""]
    return out
