"""Data that becomes part of a page: YAML files with a schema, and directives in comments.

The schema of a file consists of classes. A field that is missing, unknown or of a different
type stops the build, and the message names the file, the line, the entry and the field. Other
modules raise `SchemaError` while they check an entry. `locate_errors` then adds the names of
the file and the entry to the message.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from mkdocs.exceptions import BuildError  # MkDocs prints it without a traceback

NAMES = ("id", "topic", "title")  # the field that names an entry
T = TypeVar("T")


class DataError(BuildError):
    """A data file or a directive is wrong. The message names the place."""


class SchemaError(ValueError):
    """An entry is wrong. The caller adds the names of the file and the entry."""


def check_comments(
    path: Path, root: Path, comment: re.Pattern[str], check: Callable[[str], object]
) -> None:
    """Call `check` with the text in group 1 of each line of a page that matches `comment`.

    If `check` raises SchemaError, raise DataError with the file and the line.
    """
    for number, line in enumerate(path.read_text("utf-8").split("\n"), 1):
        if found := comment.match(line):
            try:
                check(found[1].strip())
            except SchemaError as error:
                raise DataError(f"{path.relative_to(root)}:{number}: {error}") from None


class Schema(msgspec.Struct, forbid_unknown_fields=True):
    """A mapping in a data file, which has only the fields of its class."""


def read(root: Path, file: str, kind: type[T]) -> T:
    """Return the content of a file of the book as an instance of `kind`.

    Raise DataError if the file cannot be read or does not fit the class.
    """
    try:
        return decode((root / file).read_text("utf-8"), file, kind)
    except OSError as error:
        raise DataError(f"{file}: {error}") from None


def decode(text: str, file: str, kind: type[T]) -> T:
    """Return the same as `read`, but from the text of the file."""
    try:
        return msgspec.yaml.decode(text, type=kind)
    except msgspec.ValidationError as error:
        why, _, path = str(error).partition(" - at ")
        raise DataError(f"{file}{_place(text, path)}: {why}") from None
    except msgspec.DecodeError as error:
        raise DataError(f"{file}: {error}") from None


def _place(text: str, path: str) -> str:
    """Return the line and the names of an entry, from its path in the data.

    For example, return `:12: lesson-1: ridge: wrong_values 0` for the path
    `$.lessons[0].questions[0].wrong_values[0]`.
    """
    data, names, rest = msgspec.yaml.decode(text), [], []
    position = entry = 0  # offsets in the text: where to search next, and of the last name
    for step in re.findall(r"\w+", path):
        if isinstance(data, list):
            data = data[int(step)]
        else:
            data = data.get(step) if isinstance(data, dict) else None
        field = next((f for f in NAMES if isinstance(data, dict) and f in data), None)
        if field is None:
            rest.append(step)
            if isinstance(data, list):  # an earlier list may have an entry of the same name
                found = re.compile(rf"\b{step}:").search(text, position)
                position = found.end() if found else position
            continue
        names, rest = [*names, str(data[field])], []
        found = re.compile(rf"\b{field}: [\"']?{re.escape(names[-1])}\b").search(text, position)
        position = entry = found.start() if found else position
    line = f":{text.count(chr(10), 0, entry) + 1}" if entry else ""
    return ": ".join([line, *names, *filter(None, [" ".join(rest)])])


@contextmanager
def locate_errors(*where: str) -> Iterator[None]:
    """Convert a SchemaError into a DataError whose message begins with the names in `where`."""
    try:
        yield
    except SchemaError as error:
        raise DataError(": ".join([*where, str(error)])) from None


def require_unique(names: Iterable[str]) -> None:
    """Raise SchemaError if a name occurs twice."""
    for name, count in Counter(names).items():
        if count > 1:
            raise SchemaError(f"{name}: occurs twice")


def expand_directives(
    lines: list[str], directives: dict[str, Callable], root: Path
) -> list[str]:
    """Return the lines, with each line `<!-- word: a b -->` replaced.

    The replacement is the text of `directives[word](["a", "b"], root)`. A word can also have
    the form `setting=value`, or be a text in double quotes, which the function gets with its
    quotes. A comment in inline code stays as it is.

    Raise DataError if a comment has a different form, or if the function raises SchemaError.
    """
    out, comment = [], re.compile(rf"(?<!`)<!-- ({'|'.join(directives)}):")
    for line in lines:
        found = comment.search(line)
        if found is None:
            out.append(line)
            continue
        directive = re.fullmatch(rf'( *){found[0]} ((?:"[^"]*"|[\w=. -])+) -->', line.rstrip())
        if directive is None:
            raise DataError(
                f"this comment must have the form <!-- word: a b -->: {line.strip()}"
            )
        with locate_errors(line.strip()):
            words = re.findall(r'"[^"]*"|\S+', directive[2])
            text = directives[found[1]](words, root)
        indent = directive[1]
        out += ["", *(indent + each if each else "" for each in text.split("\n")), ""]
    return out
