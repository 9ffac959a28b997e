"""Hints: the texts that check.py prints below a mistake. Each grader has a file of hints.

The hints of graders/labs/lab02_ddp.py are in graders/labs/lab02_ddp.hints.toml::

    [hints]

    not_divided = \"""
    An all-reduce adds the gradients of all ranks. Divide the sum by the number of ranks.
    \"""

A line break in a text counts as a space. The table `fixes` is optional. It contains, under the
names of hints, texts that explain how to fix the mistake. `check.py --more` prints them. The
hints in graders/common.hints.toml belong to all graders.
"""

import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

SUFFIX = ".hints.toml"


@dataclass(frozen=True)
class Hints:
    """The hints of one grader. The keys are the names of the hints."""

    texts: dict[str, str]
    fixes: dict[str, str] = field(default_factory=dict)  # how to fix the mistakes


def read_hints(path: Path) -> Hints:
    """Return the hints in a TOML file.

    Raises `FileNotFoundError` or `ValueError` if the file does not exist or is not valid.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} does not exist. Every grader needs a file with its hints, which begins "
            "with the line [hints]."
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    if unknown := sorted(set(tables) - {"hints", "fixes"}):
        raise ValueError(
            f"{path} contains {unknown[0]} outside of the tables [hints] and [fixes]. Move it "
            "into one of them."
        )
    for table, entries in tables.items():
        for name, text in entries.items():
            if not isinstance(text, str) or not text.strip():
                raise ValueError(f"{path}: the value of {name} in [{table}] must be a text")
    texts, fixes = (
        {name: " ".join(text.split()) for name, text in tables.get(table, {}).items()}
        for table in ("hints", "fixes")
    )
    if unknown := sorted(set(fixes) - set(texts)):
        raise ValueError(
            f"{path}: [fixes] has a text for {unknown[0]}, but [hints] has none. Add one."
        )
    return Hints(texts, fixes)


def hints_of(grader: Path) -> Hints:
    """Return the hints of a grader, from the file with the same name."""
    return read_hints(grader.with_suffix(SUFFIX))


@functools.cache
def common_hints() -> dict[str, str]:
    """Return the hints for mistakes that every grader recognises, such as a hang."""
    return read_hints(Path(__file__).with_name("common" + SUFFIX)).texts
