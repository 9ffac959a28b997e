"""Releases: what torch changed, from the transcripts of its releases and `docs/releases.yml`.

`<!-- releases: changed -->` becomes the outputs that differ between two releases, the newest
change first, each with the sentence why; `held` becomes the table of what was run on which
release. A change without its sentence, or a sentence without its change, stops the build.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from worldsize.model import compatibility
from worldsize.model.program import programs, release
from worldsize.model.transcript import Command, Tolerances, difference
from worldsize.site import template, yaml_schema
from worldsize.site.embeds import printed_before, program_link
from worldsize.site.yaml_schema import Schema, SchemaError

FILE = "docs/releases.yml"


class Why(Schema):
    """Why a program prints something else after a release."""

    program: str
    until: str
    why: str


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- releases: WORDS -->`."""
    if words == ["changed"]:
        return _changed(root)
    if words == ["held"]:
        return _held(root)
    raise SchemaError("write `<!-- releases: changed -->` or `<!-- releases: held -->`")


def _changed(root: Path) -> str:
    reasons = {
        (each.program, each.until): each.why for each in yaml_schema.read(root, FILE, list[Why])
    }
    found: dict[str, list[dict]] = defaultdict(list)
    for program in programs(root):
        for until, changed in printed_before(program).items():
            if not (why := reasons.pop((program.name, until), "")):
                raise SchemaError(
                    f"{FILE} must say why {program.name} prints something else after {until}"
                )
            diff = [line for pair in changed for line in _diff(*pair, program.tolerances)]
            found[until].append(
                {"program": program_link(program.name), "why": why, "diff": diff}
            )
    if reasons:
        raise SchemaError(
            f"{FILE}: {' after '.join(next(iter(reasons)))} prints the same as before"
        )
    newest = sorted(found, key=release, reverse=True)
    return template.render("releases/changed", releases={each: found[each] for each in newest})


def _diff(before: Command, after: Command, tolerances: Tolerances) -> list[str]:
    """Return the command line, and the lines of its output that differ."""
    lines = difference(before.lines()[1:], after.lines()[1:], tolerances)
    return [f"  $ {before.command_line}", *lines]


def _held(root: Path) -> str:
    every = [program for program in programs(root) if "cpu" in program.devices]
    counted: dict[str, list[str]] = defaultdict(list)
    for program in every:
        for torch, date in compatibility.releases(program).items():
            counted[torch].append(date)
    rows = [(torch, max(dates), len(dates)) for torch, dates in counted.items()]
    rows.sort(key=lambda row: release(row[0]), reverse=True)
    return template.render("releases/compatibility", rows=rows, of=len(every))
