"""Tracks: paths through the book, from `docs/tracks/NAME.yml` to the page `NAME.md`.

A comment line of the page becomes a picture, a table or a list:

    <!-- track: NAME path -->           the learning path
    <!-- track: NAME overview -->       its parts, what each needs, and how long they take
    <!-- track: NAME rows GROUP -->     what the parts of a group teach, where, by what program
    <!-- track: NAME checklist -->      a checklist; see docs/assets/checklist.js

The templates in `templates/track/` determine how these look. A row names sections and lab steps
in the form that `worldsize.site.cross_references` describes. It also names the program to run,
which one of its sections must embed. The time of a row is the reading time of its sections,
without the sections that an earlier row contains. A field that is missing, unknown or given
twice stops the build, and the message names the file and the row.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import msgspec

from worldsize.model import ROOT
from worldsize.model.program import memoized_while_unchanged
from worldsize.site import template, yaml_schema
from worldsize.site.cross_references import Link, link, section
from worldsize.site.embeds import program_link
from worldsize.site.page_stats import reading_minutes
from worldsize.site.yaml_schema import Schema, SchemaError

# ---- the schema of the file


class Row(Schema, dict=True):
    topic: str
    outcome: str
    read: list[str]
    run: str = ""
    said: int | None = msgspec.field(default=None, name="minutes")

    def __post_init__(self) -> None:
        self.minutes = self.said or 0  # computed by `load` if the row does not give it
        self.program = ""  # the path of what `run` names
        if not self.read:
            raise SchemaError("`read` is empty: it must name a section")

    @property
    def stated(self) -> bool:
        """Whether the row itself gives its time."""
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
    explanation: str = ""

    def __post_init__(self) -> None:
        yaml_schema.require_unique(row.topic for row in self.rows)

    @property
    def reading(self) -> int:
        return sum(row.minutes for row in self.rows)

    @property
    def stated(self) -> bool:
        """Whether every row gives its time, so that no reading time is computed."""
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
    outcome: str
    how: str
    shown: list[str]

    def __post_init__(self) -> None:
        if not self.shown:
            raise SchemaError("`shown` is empty: it must name a section")


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
                raise SchemaError(
                    f"path: no part, and no group with `short`, has the id {name!r}"
                )

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
                raise SchemaError(f"no group has the id {group_id!r}")
        elif what not in ("path", "overview", "checklist") or group_id:
            raise SchemaError(
                "a track has only `path`, `overview`, `checklist` and `rows GROUP`"
            )
        return template.render(
            f"track/{what}", track=self, group=group, hours=hours, program_link=program_link
        )


def hours(minutes: int) -> str:
    """`50 min`, `3 h`, `2 h 30`."""
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60:02d}" if minutes % 60 else "")


# ---- comparing a track with the book


def load(name: str, root: Path = ROOT) -> Track:
    """Return a track. Raises DataError, which names the file and the wrong row."""
    file = f"docs/tracks/{name}.yml"
    track = yaml_schema.read(root, file, Track)
    track.name = name
    seen: dict[str, set[int]] = defaultdict(set)  # lines of pages that an earlier row has read
    for group in track.groups:
        for part in group.parts:
            for row in part.rows:
                with yaml_schema.locate_errors(file, part.id, row.topic):
                    _find(row, root)
                    if group.timed and part.minutes and not row.stated:
                        row.minutes = _minutes(row.read, seen, root)
            with yaml_schema.locate_errors(file, part.id):
                _check_minutes(part, root)
    for each in track.checklist:
        with yaml_schema.locate_errors(file, f"criterion {each.id}"):
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
        raise SchemaError(f"the sections of the row do not embed the program {row.run!r}")
    if not row.run and not taught:
        raise SchemaError("the row needs a program to `run`, or a lab in `read`")
    row.program = found[0] if row.run else ""


def _minutes(targets: list[str], seen: dict[str, set[int]], root: Path) -> int:
    """Return the reading time of the sections that no earlier row contains."""
    total = 0.0
    for target in targets:
        if re.match(r"\d\d_", target):
            page, lines = section(target, root)
            known = seen[target.partition("#")[0]]
            total += reading_minutes(page, set(lines) - known)
            known.update(lines)
    return max(1, round(total)) if total > 0.2 else 0


def _check_minutes(part: Part, root: Path) -> None:
    """Raise SchemaError if the minutes of a part do not agree with those of its rows."""
    part.lab_links = {lab: link(f"lab{lab}", root) for lab in part.labs}
    if part.minutes and part.stated and part.reading != part.minutes:
        raise SchemaError(
            f"the part has {part.minutes} minutes, but its rows have {part.reading}"
        )
    if part.minutes and part.reading > part.minutes:
        raise SchemaError(
            f"its rows need {part.reading} minutes, more than the {part.minutes} of the part"
        )


loaded = memoized_while_unchanged(load)  # for the many comments of a page


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- track: WORDS -->`."""
    name, what, group = [*words, "", ""][:3]
    return loaded(name, root).show(what, group)
