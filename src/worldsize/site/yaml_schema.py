"""Data that becomes part of a page: YAML files with a schema, and directives in comments.

The schema of a file consists of classes. A field that is missing, unknown or of a different
type stops the build, and the message names the file, the line, the entry and the field. The
message of a `SchemaError`, which other modules raise while they check an entry, gets the same
names.
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
    """A data file or a directive is wrong. The message names the place."""


class SchemaError(ValueError):
    """An entry is wrong. The caller adds the names of the file and the entry."""


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping in a data file, which has only the fields of its class."""


def read(root: Path, file: str, kind: type[T]) -> T:
    """Return the content of a file of the book as an instance of `kind`.

    Raises DataError if the file cannot be read or does not fit the class.
    """
    try:
        return decode((root / file).read_text("utf-8"), file, kind)
    except OSError as error:
        raise DataError(f"{file}: {error}") from None


def decode(text: str, file: str, kind: type[T]) -> T:
    """Return the same as `read`, from the text of the file."""
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
    """Convert a SchemaError into a DataError that also names the place."""
    try:
        yield
    except SchemaError as why:
        raise DataError(": ".join([*where, str(why)])) from None


def require_unique(names: Iterable[str]) -> None:
    """Raise SchemaError if a name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"{name}: occurs twice")


def expand_directives(lines: list[str], shows: dict[str, Callable], root: Path) -> list[str]:
    """Replace each line `<!-- word: a b -->` by the lines of `shows[word](["a", "b"], root)`.

    Raises DataError if a comment has a different form, or if the function raises SchemaError.
    """
    out, comment = [], re.compile(rf"<!-- ({'|'.join(shows)}):")
    for line in lines:
        found = comment.search(line)
        if found is None:
            out.append(line)
            continue
        asked = re.fullmatch(rf"( *){found[0]} ([\w -]+) -->", line.rstrip())
        if asked is None:
            raise DataError(
                f"this comment must have the form <!-- word: a b -->: {line.strip()}"
            )
        with naming(line.strip()):
            shown = shows[found[1]](asked[2].split(), root).split("\n")
        out += ["", *(asked[1] + each if each else "" for each in shown), ""]
    return out
