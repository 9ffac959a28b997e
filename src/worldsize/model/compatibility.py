"""Record which programs reproduced their transcripts on which releases of torch, and when.

The table ``snippets/compatibility.csv`` has a row for each program and a column for each
release. A cell contains the hash of the program at the time of the run. `make
test-torch-versions` writes the table. Pages show only entries whose hash equals the hash of the
program today, because the result says nothing about a program that has changed since.
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
    """Return the hash of a program, its dependencies and its data, as 8 hexadecimal digits."""
    files = [program.path, *(each.path for each in program.dependencies()), *program.data()]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()[:8]


@cache
def releases(program: Program) -> dict[str, str]:
    """Return the date of the successful run of this program, for each release of torch.

    The results are cached, because a build needs them several times. Each build calls
    ``releases.cache_clear()`` first.
    """
    dates, rows = _read(program.root)
    mine, now = rows.get(program.name, {}), digest(program)
    return {torch: date for torch, date in dates.items() if mine.get(torch) == now}


def newest(root: Path) -> str:
    """Return the newest release of torch in the table; "0.0" if there is none."""
    return max(_read(root)[0], key=release, default="0.0")


def note(root: Path, torch: str, date: str, passed: dict[Program, bool]) -> None:
    """Write the results of one release of torch into the table, and keep the other results.

    ``passed`` contains, for each program that ran, whether it reproduced its transcript.
    """
    dates, rows = _read(root)
    dates = dates | {torch: date}
    for program, success in passed.items():
        rows.setdefault(program.name, {})[torch] = digest(program) if success else ""
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
    """Return the date of each release, and the hash of each release for each program."""
    path = root / TABLE
    return _table(path, path.stat().st_mtime_ns) if path.exists() else ({}, {})


@lru_cache(maxsize=2)
def _table(path: Path, _mtime: int) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    (_, *heads), *lines = csv.reader(path.read_text("utf-8").splitlines())
    dates = dict(head.split(" on ") for head in heads)
    return dates, {name: dict(zip(dates, cells, strict=True)) for name, *cells in lines}
