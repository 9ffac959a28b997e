"""Tracks: ways through the book, from `docs/tracks/NAME.yml` into the page beside it.

A Python-Markdown extension. A page asks for a picture, a table or a list by a comment line:

    <!-- track: NAME path -->           the learning path
    <!-- track: NAME overview -->       its parts, what each needs, and how long they take
    <!-- track: NAME rows GROUP -->     what the parts of a group teach, where, by what program
    <!-- track: NAME checklist -->      what shows that you can do it; docs/assets/checklist.js

It becomes Markdown, so MkDocs checks every link. A row names sections (`02_ddp#overlap`), lab
steps (`lab02#step-6`) and the program to run, which one of its sections must embed; its time is
what those sections take to read, less what an earlier row has read. What is unknown, missing or
said twice stops the build and names the file and the row.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path

from markdown.extensions.toc import slugify

from book import ROOT
from book.data import DataError, check_fields, extension, read_yaml
from book.embeds import EMBED, target_file
from book.markdown import program_page
from book.site import reading_minutes

# Pages that a track may name before they are written: a name without a link until they are.
COMING = {
    "assessment/quiz": "Quiz",
    "assessment/exercise": "Practical exercise",
    "assessment/capstone": "Capstone",
    "assessment/assignments": "Assignments",
}
_COMMENT = re.compile(r"<!-- track: (?P<name>\w+) (?P<what>[a-z]+)(?: (?P<group>[\w-]+))? -->$")
_FIELDS = {
    "track": ({"title", "path", "groups", "checklist"}, set()),
    "group": ({"id", "parts"}, {"head", "short", "needs"}),
    "part": ({"id", "name", "covers", "rows"}, {"short", "minutes", "needs", "labs", "say"}),
    "row": ({"topic", "can", "read"}, {"run", "minutes"}),
    "criterion": ({"id", "can", "how", "shown"}, set()),
}


# ---- what the book holds


@dataclass
class Heading:
    line: int
    level: int
    text: str
    anchor: str
    end: int = 0  # the line behind the section, its subsections included


@dataclass
class Source:
    """A chapter, lab or other page: its headings, and what each section embeds."""

    path: Path
    lines: list[str]
    headings: dict[str, Heading]

    @property
    def title(self) -> str:
        return next(iter(self.headings.values())).text

    def section(self, anchor: str) -> range:
        """The lines of a section; of the whole page for no anchor."""
        if not anchor:
            return range(len(self.lines))
        return range(self.headings[anchor].line, self.headings[anchor].end)

    def programs(self, anchor: str) -> list[str]:
        """The programs that a section embeds: `snippets/02_ddp/naive.py`."""
        found = (EMBED.match(self.lines[number]) for number in self.section(anchor))
        names = [target_file(match["target"]) for match in found if match]
        return [name for name in dict.fromkeys(names) if not name.endswith(".txt")]


def read_source(path: Path) -> Source:
    text = path.read_text("utf-8")
    if path.suffix == ".py":  # a lab: its text cells, at their lines
        text = re.sub(r"^(?!# ).*$", "", text, flags=re.MULTILINE)
        text = re.sub(r"^# ", "", text, flags=re.MULTILINE)
    lines, headings, fence = text.split("\n"), {}, None
    for number, line in enumerate(lines):
        if mark := re.match(r"\s*(`{3,})", line):
            if fence is None:
                fence = mark[1]
            elif line.strip().startswith(fence):
                fence = None
        elif fence is None and (match := re.match(r"(#{1,4}) (.+?)\s*$", line)):
            words, own = match[2], re.search(r"\s*\{[^}]*#([\w-]+)[^}]*\}$", match[2])
            if own:
                words = words[: own.start()]
            anchor = own[1] if own else slugify(re.sub(r"[`*$]", "", words), "-")
            for earlier in headings.values():
                if not earlier.end and earlier.level >= len(match[1]):
                    earlier.end = number
            headings[anchor] = Heading(number, len(match[1]), words, anchor)
    for heading in headings.values():
        heading.end = heading.end or len(lines)
    return Source(path, lines, headings)


# ---- a track


@dataclass
class Row:
    topic: str
    can: str
    read: list[str]
    run: str = ""
    minutes: int = 0
    stated: bool = False  # by the row itself, not counted


@dataclass
class Part:
    id: str
    name: str
    covers: list[str]
    rows: list[Row]
    short: str = ""
    minutes: int = 0
    needs: str = ""
    labs: list[str] = field(default_factory=list)
    say: str = ""

    @property
    def reading(self) -> int:
        return sum(row.minutes for row in self.rows)

    @property
    def stated(self) -> bool:
        """Its rows say their time themselves; none of it is counted reading."""
        return all(row.stated for row in self.rows)


@dataclass
class Group:
    id: str
    parts: list[Part]
    head: str = ""
    short: str = ""  # of a group that is one line of the overview
    needs: str = ""


@dataclass
class Stop:
    """A box of the learning path: a part, or a group that has a short name."""

    name: str
    anchor: str
    minutes: int
    labs: list[str]

    @classmethod
    def at(cls, parts: list[Part], name: str) -> Stop:
        labs = list(dict.fromkeys(lab for part in parts for lab in part.labs))
        return cls(name, parts[0].id, sum(part.minutes for part in parts), labs)


@dataclass
class Criterion:
    id: str
    can: str
    how: str
    shown: list[str]


def hours(minutes: int) -> str:
    """`50 min`, `3 h`, `2 h 30`."""
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h" + (f" {minutes % 60:02d}" if minutes % 60 else "")


class Track:
    """One track, read from its file and held against the book."""

    def __init__(self, name: str, root: Path = ROOT) -> None:
        self.name, self.root = name, root
        self.file = f"docs/tracks/{name}.yml"
        path = root / self.file
        if not path.is_file():
            raise DataError(f"there is no track {name}: {self.file}")
        data = read_yaml(path, self.file)
        self._fields("track", data, "the track")
        self.title: str = data["title"]
        self._read: dict[Path, set[int]] = {}
        self._ids: set[str] = set()
        self.groups = [self._group(each) for each in data["groups"]]
        self.checklist = [self._criterion(each) for each in data["checklist"]]
        stops = {part.id: Stop.at([part], part.short or part.name) for part in self.parts}
        stops |= {
            each.id: Stop.at(each.parts, each.short) for each in self.groups if each.short
        }
        self.path: list[list[Stop]] = []
        for stage in data["path"]:
            unknown = [each for each in stage if each not in stops]
            if unknown:
                raise self._fault("path", f"there is no part or short group {unknown[0]!r}")
            self.path.append([stops[each] for each in stage])

    @property
    def parts(self) -> list[Part]:
        return [part for group in self.groups for part in group.parts]

    @property
    def minutes(self) -> int:
        return sum(part.minutes for part in self.parts)

    def _fault(self, where: str, why: str) -> DataError:
        return DataError(f"{self.file}: {where}: {why}")

    def _fields(self, kind: str, data: object, where: str) -> None:
        check_fields(data, f"a {kind}", *_FIELDS[kind], f"{self.file}: {where}")

    def _new(self, kind: str, name: str) -> None:
        if name in self._ids:
            raise self._fault(name, f"a second {kind} of this name")
        self._ids.add(name)

    def _group(self, data: dict) -> Group:
        self._fields("group", data, f"group {data.get('id') if data else data}")
        # rows without a column for their time are there to be looked up: nothing is counted
        timed = data.get("head", "").count("|") in (0, 4)
        return Group(**{**data, "parts": [self._part(each, timed) for each in data["parts"]]})

    def _part(self, data: dict, timed: bool) -> Part:
        self._fields("part", data, f"part {data.get('id') if data else data}")
        self._new("part", data["id"])
        rows = [
            self._row(each, data["id"], timed and bool(data.get("minutes")))
            for each in data["rows"]
        ]
        part = Part(**{**data, "rows": rows})
        for lab in part.labs:
            self.link(f"lab{lab}", part.id)
        if part.minutes and part.stated and part.reading != part.minutes:
            raise self._fault(part.id, f"{part.minutes} minutes, its rows {part.reading}")
        if part.minutes and part.reading > part.minutes:
            raise self._fault(
                part.id,
                f"its rows take {part.reading} minutes to read, more than {part.minutes}",
            )
        return part

    def _row(self, data: dict, part: str, timed: bool) -> Row:
        where = f"{part}: {data.get('topic') if isinstance(data, dict) else data}"
        self._fields("row", data, where)
        self._new("row", where)
        row = Row(**data, stated="minutes" in data)
        if not row.read:
            raise self._fault(where, "names no section")
        shown = [self._programs(target, where) for target in row.read]
        if row.run:
            names = [name for each in shown for name in each or [] if _is(name, row.run)]
            if len(set(names)) != 1:
                raise self._fault(where, f"its sections embed no program {row.run!r}")
            row.run = names[0]
        elif not any(each is None for each in shown):
            raise self._fault(where, "says no program to run, and leads to no lab")
        if timed and not row.stated:
            row.minutes = self._minutes(row.read)
        return row

    def _criterion(self, data: dict) -> Criterion:
        where = f"criterion {data.get('id') if isinstance(data, dict) else data}"
        self._fields("criterion", data, where)
        self._new("criterion", where)
        for target in data["shown"]:
            self.link(target, where)
        if not data["shown"]:
            raise self._fault(where, "nothing shows it")
        return Criterion(**data)

    # -- links

    def _source(self, page: str) -> Source | None:
        """The page, or None for one that is still to come."""
        if match := re.fullmatch(r"lab(\d\d)", page):
            found = sorted((self.root / "labs").glob(f"lab{match[1]}_*.py"))
            path = found[0] if found else None
        else:
            path = self.root / "docs" / f"{page}.md"
        if path is not None and path.is_file():
            return _cached_source(path, path.stat().st_mtime_ns)
        if page in COMING:
            return None
        raise KeyError(page)

    def link(self, target: str, where: str) -> str:
        """The Markdown link to a section, lab step, program or question."""
        if target.startswith("program:"):
            name = f"snippets/{target.removeprefix('program:')}"
            if not (self.root / name).is_file():
                raise self._fault(where, f"there is no program {name}")
            return f"[{Path(name).name}]({program_page(name)})"
        page, mark, rest = re.fullmatch(r"([\w/]+)([#?]?)(.*)", target, re.DOTALL).groups()
        try:
            source = self._source(page)
        except KeyError:
            raise self._fault(where, f"there is no page {page}") from None
        if source is None:
            return COMING[page]
        lab = source.path.suffix == ".py"
        number = re.match(r"\d\d", page)
        place = f"Lab {page[3:]}" if lab else number[0] if number else ""
        url = f"/labs/{source.path.name}" if lab else f"/{page}.md"
        if mark == "?":
            title = self._question(source, rest, where)
            return f"[{place} · “{title}”]({url}#check-yourself)"
        if not rest:
            title = COMING.get(page) or (
                source.title if lab else f"{place} · {source.title.split(':')[0]}"
            )
            return f"[{title.removeprefix(' · ')}]({url})"
        if lab:  # `step-4` stands for `step-4-average-the-gradients`
            rest = next((each for each in source.headings if each.startswith(f"{rest}-")), rest)
        if rest not in source.headings:
            if title := self._entry(page, rest):
                return f"[{place} · {title}]({url}#{rest})"
            raise self._fault(where, f"{page} has no section #{rest}")
        return f"[{place} · {source.headings[rest].text}]({url}#{rest})".replace("[ · ", "[")

    def _entry(self, page: str, name: str) -> str | None:
        """The title of an entry of chapter 11, whose page is made from data."""
        data = self.root / "docs/references.yml"
        if page != "11_references" or not data.is_file():
            return None
        return _entries(data, data.stat().st_mtime_ns).get(name)

    def _question(self, source: Source, start: str, where: str) -> str:
        asked = [
            m[1] for line in source.lines if (m := re.match(r'\?\?\? question "(.*)"', line))
        ]
        found = [question for question in asked if question.startswith(start)]
        if len(found) != 1:
            raise self._fault(where, f"{len(found)} questions of {source.path.name}: {start!r}")
        return re.match(r".+?[.?](?= |$)", found[0])[0]

    def _programs(self, target: str, where: str) -> list[str] | None:
        """What the section embeds; None for a lab, or a page that needs no program."""
        self.link(target, where)
        page, _, anchor = target.partition("#")
        if not re.match(r"(?!11)\d\d_", page):
            return None
        return self._source(page).programs(anchor)

    def _minutes(self, targets: list[str]) -> int:
        """What the sections take to read; sections that an earlier row read count nothing."""
        total = 0.0
        for target in targets:
            page, _, anchor = target.partition("#")
            source = self._source(page) if re.match(r"\d\d_", page) else None
            if source is None:
                continue
            seen = self._read.setdefault(source.path, set())
            lines = source.section(anchor if anchor in source.headings else "")
            fresh = [number for number in lines if number not in seen]
            seen.update(fresh)
            total += reading_minutes("\n".join(source.lines[number] for number in fresh))
        return max(1, round(total)) if total > 0.2 else 0

    # -- what the page shows

    def show_path(self) -> list[str]:
        out, shown = ['<ol class="track-path" markdown="1">', ""], set()
        for stage in self.path:
            out += [
                '<li class="track-any" markdown="1">' if stage[1:] else '<li markdown="1">',
                "",
            ]
            for stop in stage:
                out += ['<div class="track-pair" markdown="1">', ""]
                out += ['<p class="track-stop" markdown="span">']
                out += [f"[{stop.name}](#{stop.anchor}) <span>{hours(stop.minutes)}</span>"]
                out += ["</p>", ""]
                labs = [lab for lab in stop.labs if lab not in shown]  # each stands once
                shown.update(labs)
                if labs:
                    out += ['<div class="track-labs" markdown="1">', ""]
                    for lab in labs:
                        out += [f'<p markdown="span">{self.link(f"lab{lab}", "path")}</p>', ""]
                    out += ["</div>", ""]
                out += ["</div>", ""]
            out += ["</li>", ""]
        return [*out, "</ol>", ""]

    def show_overview(self) -> list[str]:
        out = ["| part | labs | read | do | total | needs |", "|---|---|--:|--:|--:|---|"]
        read = 0
        for group in self.groups:
            timed = [part for part in group.parts if part.minutes]
            for parts in [timed] if group.short and timed else [[part] for part in timed]:
                first = parts[0]
                name, needs = (
                    (group.short, group.needs)
                    if group.short
                    else (first.short or first.name, first.needs)
                )
                reading = sum(part.reading for part in parts if not part.stated)
                minutes = sum(part.minutes for part in parts)
                read += reading
                labs = sorted({lab for part in parts for lab in part.labs})
                out.append(
                    f"| [{name}](#{first.id}) | {', '.join(map(self._lab_number, labs))} "
                    f"| {hours(reading) if reading else '–'} | {hours(minutes - reading)} "
                    f"| {hours(minutes)} | {needs} |"
                )
        out.append(
            f"| **all of it** | | **{hours(read)}** | **{hours(self.minutes - read)}** "
            f"| **{hours(self.minutes)}** | |"
        )
        return ['<div class="track-overview" markdown="1">', "", *out, "", "</div>", ""]

    def _lab_number(self, lab: str) -> str:
        link = self.link(f"lab{lab}", "labs")
        return re.sub(r"^\[.*\]", f"[{lab}]", link) if link.startswith("[") else lab

    def show_rows(self, group_id: str) -> list[str]:
        group = next((each for each in self.groups if each.id == group_id), None)
        if group is None:
            raise self._fault(f"group {group_id}", "there is none")
        out = []
        for part in group.parts:
            out += [f"### {part.name} {{ #{part.id} }}", ""]
            facts = []
            if part.minutes and (part.stated or not part.reading):
                facts.append(hours(part.minutes))
            elif part.minutes:
                facts.append(
                    f"{hours(part.minutes)}: {hours(part.reading)} to read, "
                    f"{hours(part.minutes - part.reading)} to run, change and answer"
                )
            facts += [self.link(f"lab{lab}", part.id) for lab in part.labs]
            if facts:
                out += [" · ".join(facts), "{ .page-facts }", ""]
            if part.say:
                out += [part.say, ""]
            head = group.head or "topic | you will be able to | read | run | minutes"
            wide = head.count("|") == 4
            out += ['<div class="track-rows" markdown="1">', ""]
            out += [f"| {head} |", "|---|---|---|---|--:|" if wide else "|---|---|---|---|"]
            for row in part.rows:
                read = "<br>".join(
                    dict.fromkeys(self.link(target, part.id) for target in row.read)
                )
                run = (
                    f"[{Path(row.run).name}]({program_page(row.run)})" if row.run else "the lab"
                )
                if not row.run and not any(each.startswith("lab") for each in row.read):
                    run = "–"
                time = hours(row.minutes) if row.stated else str(row.minutes)
                cells = [row.topic, row.can, read, run, *([time] if wide else [])]
                out.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
            out += ["", "</div>", ""]
        return out

    def show_checklist(self) -> list[str]:
        out = [f'<div class="checklist" data-checklist="{self.name}" markdown="1">', ""]
        for each in self.checklist:
            box = f"shown-{self.name}-{each.id}".replace("_", "-")
            links = " · ".join(self.link(target, each.id) for target in each.shown)
            out += [
                f'- <input type="checkbox" id="{box}" autocomplete="off">'
                f'<label for="{box}">{each.can}</label>',
                "",
                f"    {each.how} {links}",
                "",
            ]
        return [*out, "</div>", ""]

    def show(self, what: str, group: str | None) -> list[str]:
        if what == "rows" and group:
            return self.show_rows(group)
        if what in ("path", "overview", "checklist") and not group:
            return getattr(self, f"show_{what}")()
        raise self._fault(what, "is nothing that a track shows")


def _is(name: str, run: str) -> bool:
    return run in (Path(name).name, Path(name).stem)


@functools.lru_cache(maxsize=2)
def _entries(data: Path, changed: int) -> dict[str, str]:
    entries = read_yaml(data, data.name)["entries"]
    return {entry["id"]: entry["title"] for entry in entries}


@functools.lru_cache(maxsize=64)
def _cached_source(path: Path, changed: int) -> Source:
    return read_source(path)


def render(lines: list[str], root: Path = ROOT) -> list[str]:
    """A page's Markdown with its tracks shown."""
    out: list[str] = []
    tracks: dict[str, Track] = {}
    for line in lines:
        if "<!-- track:" not in line:
            out.append(line)
            continue
        match = _COMMENT.fullmatch(line.strip())
        if match is None:
            raise DataError(f"not understood: {line.strip()}")
        if match["name"] not in tracks:
            tracks[match["name"]] = Track(match["name"], root)
        track = tracks[match["name"]]
        out += ["", *track.show(match["what"], match["group"])]
    return out


makeExtension = extension("book_tracks", render)
