"""Show the tracks, which are paths through the book, from the files `docs/tracks/NAME.yml`.

A comment on the page of a track becomes a picture, a table or a list:

    <!-- track: NAME path -->           the learning path
    <!-- track: NAME overview -->       the parts, with their requirements and their times
    <!-- track: NAME rows GROUP -->     the topics of a group, with their sections and programs
    <!-- track: NAME checklist -->      a checklist; see docs/assets/checklist.js

The templates in `templates/track/` determine the appearance. A row names sections and lab steps
in the form that `worldsize.site.cross_references` describes. It can also name a program to run,
and one of its sections must embed this program. The time of a row is the reading time of its
sections, without the sections that an earlier row contains. A field that is missing, unknown or
given twice stops the build, and the message names the file and the row.
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
    """A topic of a track: what to read, and which program to run."""

    topic: str
    outcome: str
    read: list[str]
    run: str = ""
    stated_minutes: int | None = msgspec.field(default=None, name="minutes")

    def __post_init__(self) -> None:
        self.minutes = self.stated_minutes or 0  # `load` computes them if they are not stated
        self.program = ""  # the path of the program that `run` names
        if not self.read:
            raise SchemaError("`read` is empty: it must name a section")

    @property
    def states_minutes(self) -> bool:
        """Return whether the file states the minutes of the row."""
        return self.stated_minutes is not None

    @property
    def has_lab(self) -> bool:
        """Return whether the row names a lab."""
        return any(target.startswith("lab") for target in self.read)


class Part(Schema, dict=True):
    """A part of a track, such as a lesson."""

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
    def reading_minutes(self) -> int:
        """Return the sum of the minutes of all rows."""
        return sum(row.minutes for row in self.rows)

    @property
    def states_minutes(self) -> bool:
        """Return whether the file states the minutes of every row."""
        return all(row.states_minutes for row in self.rows)


class Group(Schema):
    """Parts of a track that are shown together."""

    id: str
    parts: list[Part]
    head: str = "topic | you will be able to | read | run | minutes"
    short: str = ""  # the name of a group that is one line of the overview
    needs: str = ""

    @property
    def has_times(self) -> bool:
        """Return whether the table of the group has a column for the time."""
        return self.head.count("|") == 4


class Criterion(Schema, dict=True):
    """An item of the checklist: an ability, and how a learner can show it."""

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
        """Return the Markdown link to its first part."""
        return f"[{self.name}](#{self.parts[0].id})"

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    @property
    def reading_minutes(self) -> int:
        """Return the computed reading time of its parts."""
        return sum(part.reading_minutes for part in self.parts if not part.states_minutes)

    @property
    def labs(self) -> dict[str, Link]:
        """Return the links to the labs of its parts, by their numbers."""
        return {lab: link for part in self.parts for lab, link in part.lab_links.items()}


class Track(Schema, dict=True):
    """A track. `load` sets its `name`, and the links of its rows and criteria."""

    title: str
    path: list[list[str]]  # the ids of the stops in each stage
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
        """Return the parts of all groups."""
        return [part for group in self.groups for part in group.parts]

    @property
    def stops(self) -> dict[str, Stop]:
        """Return the stops by their ids: all parts with minutes, and groups of such parts."""
        found = {}
        for group in self.groups:
            parts = [part for part in group.parts if part.minutes]
            if group.short and parts:
                found[group.id] = Stop(group.short, group.needs, parts)
            else:
                found |= {p.id: Stop(p.short or p.name, p.needs, [p]) for p in parts}
        return found

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    # ---- what the page shows

    @property
    def stages(self) -> list[list[tuple[Stop, list[Link]]]]:
        """Return the stops of each stage, with the labs that no earlier stop contains."""
        stages, shown = [], set()
        for stage in self.path:
            stages.append([])
            for stop in (self.stops[name] for name in stage):
                labs = [link for lab, link in stop.labs.items() if lab not in shown]
                shown.update(stop.labs)
                stages[-1].append((stop, labs))
        return stages

    def show(self, what: str, group_id: str = "") -> str:
        """Return the Markdown of the path, overview or checklist, or of the rows of a group."""
        group = next((each for each in self.groups if each.id == group_id), None)
        if what == "rows" and group_id:
            if group is None:
                raise SchemaError(f"no group has the id {group_id!r}")
        elif what not in ("path", "overview", "checklist") or group_id:
            raise SchemaError(
                "write `path`, `overview`, `checklist` or `rows GROUP` after the track's name"
            )
        return template.render(
            f"track/{what}", track=self, group=group, hours=hours, program_link=program_link
        )


def hours(minutes: int) -> str:
    """Return minutes as text, such as `50 min`, `3 h` or `2 h 30`."""
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60:02d}" if minutes % 60 else "")


# ---- comparing a track with the book


def load(name: str, root: Path = ROOT) -> Track:
    """Return a track. Raise DataError, with the file and the row, if it is wrong."""
    file = f"docs/tracks/{name}.yml"
    track = yaml_schema.read(root, file, Track)
    track.name = name
    seen: dict[str, set[int]] = defaultdict(set)  # by the page: the lines of earlier rows
    for group in track.groups:
        for part in group.parts:
            for row in part.rows:
                with yaml_schema.locate_errors(file, part.id, row.topic):
                    _find(row, root)
                    if group.has_times and part.minutes and not row.states_minutes:
                        row.minutes = _minutes(row.read, seen, root)
            with yaml_schema.locate_errors(file, part.id):
                _check_minutes(part, root)
    for each in track.checklist:
        with yaml_schema.locate_errors(file, f"criterion {each.id}"):
            each.links = [link(target, root) for target in each.shown]
    return track


def _find(row: Row, root: Path) -> None:
    """Set the links of a row, and the program, which one of its sections must embed."""
    shown: set[str] = set()
    needs_program = True  # unless the row names a lab, or a page that is not a chapter
    row.links = [link(target, root) for target in row.read]
    for target in row.read:
        if re.match(r"(?!11)\d\d_|clusters/", target):
            page, lines = section(target, root)
            shown |= {embed.file for embed in page.embeds if embed.line in lines}
        else:
            needs_program = False
    found = [each for each in shown if row.run in (Path(each).name, Path(each).stem)]
    if row.run and len(found) != 1:
        raise SchemaError(f"the sections of the row do not embed the program {row.run!r}")
    if not row.run and needs_program:
        raise SchemaError("the row needs a program to `run`, or a lab in `read`")
    row.program = found[0] if row.run else ""


def _minutes(targets: list[str], seen: dict[str, set[int]], root: Path) -> int:
    """Return the reading time of the sections that no earlier row contains."""
    total = 0.0
    for target in targets:
        if re.match(r"\d\d_", target):
            page, lines = section(target, root)
            earlier = seen[target.partition("#")[0]]
            total += reading_minutes(page, set(lines) - earlier)
            earlier.update(lines)
    return max(1, round(total)) if total > 0.2 else 0


def _check_minutes(part: Part, root: Path) -> None:
    """Raise SchemaError if the minutes of a part contradict the minutes of its rows.

    Also set the links to the labs of the part.
    """
    part.lab_links = {lab: link(f"lab{lab}", root) for lab in part.labs}
    if part.minutes and part.states_minutes and part.reading_minutes != part.minutes:
        raise SchemaError(
            f"the part has {part.minutes} minutes, but its rows have {part.reading_minutes}"
        )
    if part.minutes and part.reading_minutes > part.minutes:
        raise SchemaError(
            f"the part has {part.minutes} minutes, but its rows need {part.reading_minutes}"
        )


load_once = memoized_while_unchanged(load)  # a page has many comments of the same track


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- track: WORDS -->`."""
    name, what, group = [*words, "", ""][:3]
    return load_once(name, root).show(what, group)
