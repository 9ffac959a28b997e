"""Read and write the table of the torch releases on which each program was run.

The table ``snippets/compatibility.csv`` has a row for each program and a column for each
release. A cell contains the hash of the program if the program reproduced its transcript. `make
test-torch-versions` writes the table. Pages show only entries whose hash equals the current
hash of the program, because the result is not valid for a program that has changed since then.
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
    """Return the date of the successful run of this program for each release of torch.

    Releases without a successful run of the current version of the program are left out.

    The results are cached, because a build needs them several times. Each build calls
    ``releases.cache_clear()`` first.
    """
    dates, rows = _read(program.root)
    row, current = rows.get(program.name, {}), digest(program)
    return {torch: date for torch, date in dates.items() if row.get(torch) == current}


def newest_release(root: Path) -> str:
    """Return the newest release of torch in the table; "0.0" if there is none."""
    return max(_read(root)[0], key=release, default="0.0")


def write_results(root: Path, torch: str, date: str, results: dict[Program, bool]) -> None:
    """Write the results of one release of torch into the table, and keep the other results.

    ``results`` contains, for each program that ran, whether it reproduced its transcript. Rows
    of programs that no longer exist are removed.
    """
    dates, rows = _read(root)
    dates = dates | {torch: date}
    for program, success in results.items():
        rows.setdefault(program.name, {})[torch] = digest(program) if success else ""
    columns = sorted(dates, key=release)
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["program", *(f"{each} on {dates[each]}" for each in columns)])
    for name in sorted(rows):
        if (root / name).exists():
            table.writerow([name, *(rows[name].get(each, "") for each in columns)])
    atomic_write(root / TABLE, text.getvalue())
    releases.cache_clear()


def _read(root: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the date for each release, and the hashes by program and release."""
    path = root / TABLE
    return _table(path, path.stat().st_mtime_ns) if path.exists() else ({}, {})


@lru_cache(maxsize=2)
def _table(path: Path, _mtime: int) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    (_, *heads), *lines = csv.reader(path.read_text("utf-8").splitlines())
    dates = dict(head.split(" on ") for head in heads)
    return dates, {name: dict(zip(dates, cells, strict=True)) for name, *cells in lines}
