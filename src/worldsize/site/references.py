"""Show the entries of `docs/references.yml` as tables on a page.

The comment `<!-- references: entries -->` becomes one table for each topic. The words `counts`,
`orders` and `syllabus` become the texts of the templates with these names.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from worldsize.model import ROOT
from worldsize.site import template, yaml_schema
from worldsize.site.yaml_schema import Schema, SchemaError

FILE = "docs/references.yml"
KINDS = {
    "paper": "papers",
    "documentation": "pages of documentation",
    "code": "repositories",
    "tutorial": "tutorials",
    "post": "posts and reports",
    "video": "videos",
    "book": "books and courses",
    "community": "communities",
    "tool": "tools",
}
PRIORITIES = {"must": "must", "should": "should", "deep": "deep dive"}
# How much of a source we read, and the note that the table shows.
BASES = {
    "opened": "",
    "chapters": "We checked only the parts that the chapters cite.",
    "outline": "We read only its table of contents.",
    "abstract": "We read only its abstract.",
    "part": "We read only a part of it.",
    "title": "We know only its title.",
}
PARTS = ("counts", "entries", "orders", "syllabus")
ADDRESS = re.compile(r"https://[\w.-]+(/[^\s?#]*)?(\?v=[\w-]{11})?(#[\w.-]+)?")


# ---- the schema of the file


class Topic(Schema):
    title: str
    about: str


class Entry(Schema, kw_only=True):
    """A source, such as a paper or a video: why to read it, and where the book needs it."""

    id: str
    title: str
    by: str
    year: int | str  # `living` for a source that is kept up to date
    where: str
    url: str
    kind: Literal[*KINDS]
    topic: str
    also: tuple[str, ...] = ()  # further topics
    priority: Literal[*PRIORITIES]
    minutes: Annotated[int, msgspec.Meta(ge=0, le=6000)]
    basis: Literal[*BASES]
    focus: str
    insight: str
    book: str  # Markdown links
    labs: tuple[str, ...] = ()
    formerly: tuple[str, ...] = ()  # older addresses of the source
    history: str = ""  # a note for readers of older lists
    read_scope: str = ""  # which part of the source we read

    def __post_init__(self) -> None:
        if not ADDRESS.fullmatch(self.url):
            raise SchemaError(
                f"url {self.url!r} must begin with https:// and must not have parameters"
            )
        if "arxiv.org" in self.url and not re.search(r"/abs/\d{4}\.\d{5}$", self.url):
            raise SchemaError(
                "an arXiv link must be https://arxiv.org/abs/NUMBER, without a version"
            )
        if self.basis == "part" and not self.read_scope:
            raise SchemaError("`read_scope` is missing: it must name the part that was read")
        for field in ("focus", "insight"):
            text = getattr(self, field)
            if "|" in text or not text.rstrip().endswith((".", "?", ")")):
                raise SchemaError(f"{field} must be a sentence and must not contain `|`")
        if unknown := [each for each in self.labs if not _lab(each)]:
            raise SchemaError(f"labs: there is no lab {unknown[0]}")

    @property
    def topics(self) -> list[str]:
        """Return all topics of the entry, its main topic first."""
        return [self.topic, *self.also]

    @property
    def origin(self) -> str:
        """Return the author, the year and the publisher.

        A source that is kept up to date has no year. A publisher is not repeated as the author.
        """
        if self.year != "living":
            return f"{self.by} ({self.year}). {self.where}"
        return self.where if self.by in self.where else f"{self.by}. {self.where}"

    @property
    def notes(self) -> list[str]:
        """Return the notes of the entry: how much of it we read, and its history."""
        return list(
            filter(None, [f"{BASES[self.basis]} {self.read_scope}".strip(), self.history])
        )


class Order(Schema):
    title: str
    why: str
    read: list[str]


class Item(Schema, kw_only=True):
    """A topic of the syllabus, with the ids of the entries of its video and its text."""

    number: str
    title: str
    video: str
    video_part: str = ""
    post: str
    post_part: str = ""
    take: str
    book: str


class References(Schema):
    topics: dict[str, Topic]
    entries: list[Entry]
    orders: list[Order]
    syllabus: list[Item]

    @property
    def by_id(self) -> dict[str, Entry]:
        return {entry.id: entry for entry in self.entries}

    @property
    def must_minutes(self) -> int:
        return sum(entry.minutes for entry in self.entries if entry.priority == "must")

    def count(self, **wanted: str) -> int:
        """Return the number of entries whose fields have these values."""
        return sum(
            all(getattr(entry, field) == value for field, value in wanted.items())
            for entry in self.entries
        )

    def entries_in(self, order: Order) -> list[Entry]:
        """Return the entries of a reading order."""
        return [self.by_id[name] for name in order.read]

    def entries_of(self, topic: str) -> list[Entry]:
        """Return the entries of a topic, those with the highest priority first."""
        chosen = [entry for entry in self.entries if entry.topic == topic]
        return sorted(chosen, key=lambda entry: list(PRIORITIES).index(entry.priority))

    def __post_init__(self) -> None:
        yaml_schema.require_unique(entry.id for entry in self.entries)
        for entry in self.entries:
            if unknown := set(entry.topics) - self.topics.keys():
                raise SchemaError(f"{entry.id}: there is no topic {', '.join(sorted(unknown))}")
        named = [(each.title, each.read) for each in self.orders]
        named += [(each.title, [each.video, each.post]) for each in self.syllabus]
        for title, names in named:
            if unknown := [name for name in names if name not in self.by_id]:
                raise SchemaError(f"{title}: there is no entry {unknown[0]!r}")


@functools.lru_cache(maxsize=2)
def load(text: str) -> References:
    """Return the references in a YAML text.

    Raise DataError, whose message names the file, the line and the entry, if the text is wrong.
    """
    return yaml_schema.decode(text, FILE, References)


def titles(root: Path) -> dict[str, str]:
    """Return the title of each entry, by the anchor of its row."""
    path = root / FILE
    entries = load(path.read_text("utf-8")).by_id if path.is_file() else {}
    return {name: entry.title for name, entry in entries.items()}


def _lab(number: str) -> str:
    """Return the link to a lab from the folder docs/; an empty string if there is none."""
    found = sorted((ROOT / "labs").glob(f"lab{number}_*.py"))
    return f"labs/{found[0].name}" if found else ""


# ---- what the page shows


def duration(minutes: int) -> str:
    """Return minutes as text, such as `45 min`, `1¼ h` or `12 h`; an empty string for 0."""
    if minutes == 0:
        return ""
    if minutes < 60:
        return f"{minutes} min"
    if minutes >= 600:
        return f"{round(minutes / 60)} h"
    hours, quarters = divmod(round(minutes / 15), 4)
    return f"{hours}{['', '¼', '½', '¾'][quarters]} h"


def render(part: str, references: References) -> str:
    """Return the Markdown of one of the PARTS."""
    return template.render(
        f"references/{part}",
        references=references,
        kinds=KINDS,
        priorities=PRIORITIES,
        duration=duration,
        lab=_lab,
    )


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- references: WORDS -->`."""
    if words[0] not in PARTS or words[1:]:
        raise SchemaError(f"write one of the words {', '.join(PARTS)}")
    return render(words[0], load((root / FILE).read_text("utf-8")))
