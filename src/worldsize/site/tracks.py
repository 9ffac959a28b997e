"""Tracks: ways through the book, from `docs/tracks/NAME.yml` into the page beside it.

A page asks for a picture, a table or a list by a comment line:

    <!-- track: NAME path -->           the learning path
    <!-- track: NAME overview -->       its parts, what each needs, and how long they take
    <!-- track: NAME rows GROUP -->     what the parts of a group teach, where, by what program
    <!-- track: NAME checklist -->      what shows that you can do it; docs/assets/checklist.js

How each looks is said in `templates/track/`. A row names sections and lab steps as
`worldsize.site.cross_references` has them, and the program to run, which one of its sections
must embed; its
time is what those sections take to read, less what an earlier row has read. What is unknown,
missing or said twice stops the build and names the file and the row.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from pathlib import Path

import msgspec

from worldsize.model import ROOT
from worldsize.site import template, yaml_schema
from worldsize.site.cross_references import Link, link, section
from worldsize.site.embeds import program_link
from worldsize.site.page_stats import reading_minutes
from worldsize.site.yaml_schema import Schema, SchemaError

# ---- the schema of the file


class Row(Schema, dict=True):
    topic: str
    can: str
    read: list[str]
    run: str = ""
    said: int | None = msgspec.field(default=None, name="minutes")

    def __post_init__(self) -> None:
        self.minutes = self.said or 0  # counted where the row does not say it
        self.program = ""  # the path of what `run` names
        if not self.read:
            raise SchemaError("names no section")

    @property
    def stated(self) -> bool:
        """Its time stands in the row itself."""
        return self.said is not None

    @property
    def at_lab(self) -> bool:
        return any(target.startswith("lab") for target in self.read)


class Part(Schema, dict=True):
    id: str
    name: str
    rows: list[Row]
    short: str = ""
    minutes: int = 0
    needs: str = ""
    labs: tuple[str, ...] = ()
    say: str = ""

    def __post_init__(self) -> None:
        yaml_schema.require_unique(row.topic for row in self.rows)

    @property
    def reading(self) -> int:
        return sum(row.minutes for row in self.rows)

    @property
    def stated(self) -> bool:
        """Its rows say their time themselves; none of it is counted reading."""
        return all(row.stated for row in self.rows)


class Group(Schema):
    id: str
    parts: list[Part]
    head: str = "topic | you will be able to | read | run | minutes"
    short: str = ""  # of a group that is one line of the overview
    needs: str = ""

    @property
    def timed(self) -> bool:
        """Its table has a column for the time: without one, rows are there to be looked up."""
        return self.head.count("|") == 4


class Criterion(Schema, dict=True):
    id: str
    can: str
    how: str
    shown: list[str]

    def __post_init__(self) -> None:
        if not self.shown:
            raise SchemaError("nothing shows it")


class Stop(msgspec.Struct):
    """A line of the overview and a box of the path: a part, or a group with a short name."""

    name: str
    needs: str
    parts: list[Part]

    @property
    def link(self) -> str:
        return f"[{self.name}](#{self.parts[0].id})"

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    @property
    def reading(self) -> int:
        return sum(part.reading for part in self.parts if not part.stated)

    @property
    def labs(self) -> dict[str, Link]:
        return {lab: link for part in self.parts for lab, link in part.lab_links.items()}


class Track(Schema, dict=True):
    """A track; `load` gives it its `name`, and links to what can be read."""

    title: str
    path: list[list[str]]  # its stages: parts, and groups with a short name
    groups: list[Group]
    checklist: list[Criterion]

    def __post_init__(self) -> None:
        yaml_schema.require_unique(part.id for part in self.parts)
        yaml_schema.require_unique(each.id for each in self.checklist)
        for name in (name for stage in self.path for name in stage):
            if name not in self.stops:
                raise SchemaError(f"path: there is no part or short group {name!r}")

    @property
    def parts(self) -> list[Part]:
        return [part for group in self.groups for part in group.parts]

    @property
    def stops(self) -> dict[str, Stop]:
        """What takes time, by its id and in its order."""
        found = {}
        for group in self.groups:
            timed = [part for part in group.parts if part.minutes]
            if group.short and timed:
                found[group.id] = Stop(group.short, group.needs, timed)
            else:
                found |= {p.id: Stop(p.short or p.name, p.needs, [p]) for p in timed}
        return found

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    # ---- what the page shows

    @property
    def stages(self) -> list[list[tuple[Stop, list[Link]]]]:
        """The path: for each of its stages the stops, with the labs that none before has."""
        stages, shown = [], set()
        for stage in self.path:
            stages.append([])
            for stop in (self.stops[name] for name in stage):
                labs = [link for lab, link in stop.labs.items() if lab not in shown]
                shown.update(stop.labs)
                stages[-1].append((stop, labs))
        return stages

    def show(self, what: str, group_id: str = "") -> str:
        """The Markdown of its path, overview or checklist, or of the rows of a group."""
        group = next((each for each in self.groups if each.id == group_id), None)
        if what == "rows" and group_id:
            if group is None:
                raise SchemaError(f"there is no group {group_id}")
        elif what not in ("path", "overview", "checklist") or group_id:
            raise SchemaError("is nothing that a track shows")
        return template.render(
            f"track/{what}", track=self, group=group, hours=hours, program_link=program_link
        )


def hours(minutes: int) -> str:
    """`50 min`, `3 h`, `2 h 30`."""
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60:02d}" if minutes % 60 else "")


# ---- a track, held against the book


def load(name: str, root: Path = ROOT) -> Track:
    """Read a track; raise DataError where it does not hold."""
    file = f"docs/tracks/{name}.yml"
    track = yaml_schema.read(root, file, Track)
    track.name = name
    seen: dict[str, set[int]] = defaultdict(set)  # lines of pages that an earlier row has read
    for group in track.groups:
        for part in group.parts:
            for row in part.rows:
                with yaml_schema.naming(file, part.id, row.topic):
                    _find(row, root)
                    if group.timed and part.minutes and not row.stated:
                        row.minutes = _minutes(row.read, seen, root)
            with yaml_schema.naming(file, part.id):
                _hold(part, root)
    for each in track.checklist:
        with yaml_schema.naming(file, f"criterion {each.id}"):
            each.links = [link(target, root) for target in each.shown]
    return track


def _find(row: Row, root: Path) -> None:
    """Follow the links of a row, and find its program in a section of a chapter."""
    shown: set[str] = set()
    taught = False  # by a lab, or a page that needs no program
    row.links = [link(target, root) for target in row.read]
    for target in row.read:
        if re.match(r"(?!11)\d\d_", target):
            page, lines = section(target, root)
            shown |= {embed.file for embed in page.embeds if embed.line in lines}
        else:
            taught = True
    found = [each for each in shown if row.run in (Path(each).name, Path(each).stem)]
    if row.run and len(found) != 1:
        raise SchemaError(f"its sections embed no program {row.run!r}")
    if not row.run and not taught:
        raise SchemaError("says no program to run, and leads to no lab")
    row.program = found[0] if row.run else ""


def _minutes(targets: list[str], seen: dict[str, set[int]], root: Path) -> int:
    """What the sections take to read; sections that an earlier row read count nothing."""
    total = 0.0
    for target in targets:
        if re.match(r"\d\d_", target):
            page, lines = section(target, root)
            known = seen[target.partition("#")[0]]
            total += reading_minutes(page, set(lines) - known)
            known.update(lines)
    return max(1, round(total)) if total > 0.2 else 0


def _hold(part: Part, root: Path) -> None:
    """Raise Fault where a part's time and that of its rows do not go together."""
    part.lab_links = {lab: link(f"lab{lab}", root) for lab in part.labs}
    if part.minutes and part.stated and part.reading != part.minutes:
        raise SchemaError(f"{part.minutes} minutes, its rows {part.reading}")
    if part.minutes and part.reading > part.minutes:
        raise SchemaError(
            f"its rows take {part.reading} minutes to read, more than {part.minutes}"
        )


loaded = functools.cache(load)  # for the many comments of a page; a new build forgets them


def show(words: list[str], root: Path) -> str:
    """The Markdown of what a comment asks of a track."""
    name, what, group = [*words, "", ""][:3]
    return loaded(name, root).show(what, group)
