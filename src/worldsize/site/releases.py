"""Show which outputs differ between releases of torch, and where each program was tested.

The comment `<!-- releases: changed -->` becomes the outputs that differ between two releases,
the newest change first. `docs/releases.yml` contains the reason of each change. A change
without a reason, or a reason without a change, stops the build. The comment
`<!-- releases: compatibility -->` becomes a table of the number of programs that passed on each
release.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from worldsize.model import compatibility
from worldsize.model.program import programs, release
from worldsize.model.transcript import Command, Tolerances, difference
from worldsize.site import template, yaml_schema
from worldsize.site.embeds import older_outputs, program_link
from worldsize.site.yaml_schema import Schema, SchemaError

FILE = "docs/releases.yml"


class Reason(Schema):
    """The reason why a program prints a different output after a release."""

    program: str
    until: str
    why: str


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- releases: WORDS -->`."""
    if words == ["changed"]:
        return _changed(root)
    if words == ["compatibility"]:
        return _compatibility(root)
    raise SchemaError(
        "write `<!-- releases: changed -->` or `<!-- releases: compatibility -->`"
    )


def _changed(root: Path) -> str:
    """Return the Markdown of all outputs that differ between two releases."""
    reasons = {
        (each.program, each.until): each.why
        for each in yaml_schema.read(root, FILE, list[Reason])
    }
    found: dict[str, list[dict]] = defaultdict(list)
    for program in programs(root):
        for until, changed in older_outputs(program).items():
            if not (why := reasons.pop((program.name, until), "")):
                raise SchemaError(
                    f"{FILE} must contain the reason why {program.name} prints "
                    f"a different output after torch {until}"
                )
            diff = [line for pair in changed for line in _diff(*pair, program.tolerances)]
            found[until].append(
                {"program": program_link(program.name), "why": why, "diff": diff}
            )
    if reasons:
        name, until = next(iter(reasons))
        raise SchemaError(
            f"{FILE}: remove the entry of {name}, "
            f"because its output does not change after torch {until}"
        )
    newest = sorted(found, key=release, reverse=True)
    return template.render("releases/changed", releases={each: found[each] for each in newest})


def _diff(before: Command, after: Command, tolerances: Tolerances) -> list[str]:
    """Return the command line, and the lines of its output that differ."""
    lines = difference(before.lines()[1:], after.lines()[1:], tolerances)
    return [f"  $ {before.command_line}", *lines]


def _compatibility(root: Path) -> str:
    """Return the Markdown of the table of releases, with the numbers of passed programs."""
    recorded = [program for program in programs(root) if "cpu" in program.devices]
    dates: dict[str, list[str]] = defaultdict(list)  # by the release of torch
    for program in recorded:
        for torch, date in compatibility.releases(program).items():
            dates[torch].append(date)
    rows = [(torch, max(each), len(each)) for torch, each in dates.items()]
    rows.sort(key=lambda row: release(row[0]), reverse=True)
    return template.render("releases/compatibility", rows=rows, total=len(recorded))
