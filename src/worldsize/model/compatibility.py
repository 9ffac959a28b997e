"""Held: which programs held to their transcripts on which releases of torch, and when.

``snippets/compatibility.csv`` has a row for each program, a column for each release, and in
each cell
the digest of the program as it was. `make test-torch-versions` writes it. What a page says of a
program is
true of it as it is: once it has changed, it has to be held again.
"""

from __future__ import annotations

import csv
import hashlib
import io
from functools import cache, lru_cache
from pathlib import Path

from worldsize.model import atomic_write
from worldsize.model.program import Program, release

TABLE = "snippets/compatibility.csv"


def digest(program: Program) -> str:
    """What stands for a program in a cell, and for what it needs beside it."""
    files = [program.path, *(each.path for each in program.dependencies()), *program.data()]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


@cache
def releases(program: Program) -> dict[str, str]:
    """The releases of torch on which the program, as it is, held, each with the date.

    What a build knows of a program it asks for several times; each build begins anew, by
    ``releases.cache_clear()``.
    """
    dates, rows = _read(program.root)
    mine, now = rows.get(program.name, {}), digest(program)
    return {torch: date for torch, date in dates.items() if mine.get(torch) == now}


def newest(root: Path) -> str:
    """The newest release of torch that programs were held on; "0.0" where none was noted."""
    return max(_read(root)[0], key=release, default="0.0")


def note(root: Path, torch: str, date: str, held: dict[Program, bool]) -> None:
    """Write down which programs held on a release of torch, beside what is known of others."""
    dates, rows = _read(root)
    dates = dates | {torch: date}
    for program, well in held.items():
        rows.setdefault(program.name, {})[torch] = digest(program) if well else ""
    known = sorted(dates, key=release)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["program", *(f"{each} on {dates[each]}" for each in known)])
    for name in sorted(rows):
        if (root / name).exists():
            table.writerow([name, *(rows[name].get(each, "") for each in known)])
    atomic_write(root / TABLE, text.getvalue())
    releases.cache_clear()


def _read(root: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The dates by release, and by program the digests by release."""
    path = root / TABLE
    return _table(path, path.stat().st_mtime_ns) if path.exists() else ({}, {})


@lru_cache(maxsize=2)
def _table(path: Path, _mtime: int) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    (_, *heads), *lines = csv.reader(path.read_text("utf-8").splitlines())
    dates = dict(head.split(" on ") for head in heads)
    return dates, {name: dict(zip(dates, cells, strict=True)) for name, *cells in lines}
