"""References: the entries of `docs/references.yml` as tables on a page.

A Python-Markdown extension. A line `<!-- references: entries -->` becomes one table for each
topic; `counts`, `orders` and `syllabus` in place of entries become what their functions say.
The tables are written as Markdown, so their links are checked like those of any page. The marks
that `docs/assets/references.js` filters by are attributes of each entry's link.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import yaml

from book import ROOT
from book.data import DataError, extension

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
# What an entry rests on. What was opened says nothing; the rest says so in the table.
BASES = {
    "opened": "",
    "chapters": "Sections as the chapter cites them.",
    "outline": "Rests on its table of contents.",
    "abstract": "Rests on its abstract.",
    "description": "Neither opened nor watched for this list.",
}
FIELDS = {
    "id", "title", "by", "year", "where", "url", "kind", "topic", "priority", "minutes",
    "focus", "insight", "basis", "book",
}  # fmt: skip
OPTIONAL = {"also", "labs", "formerly", "was", "rests"}
ADDRESS = re.compile(r"https://[\w.-]+(/[^\s?#]*)?(\?v=[\w-]{11})?(#[\w.-]+)?")


def load(text: str) -> dict:
    """The data, checked. Raises DataError, which names the file, the line and the entry."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{FILE}: {error}") from error
    if not isinstance(data, dict) or set(data) != {"topics", "entries", "orders", "syllabus"}:
        raise DataError(f"{FILE}: its parts are topics, entries, orders and syllabus")
    seen: set[str] = set()
    for entry in data["entries"]:
        if why := fault(entry, data["topics"], seen):
            raise DataError(f"{FILE}:{_line(text, entry)}: entry {entry.get('id')!r}: {why}")
        seen.add(entry["id"])
    for part, fields in (("orders", ("read",)), ("syllabus", ("video", "post"))):
        for item in data[part]:
            for name in _names(item, fields):
                if name not in seen:
                    raise DataError(f"{FILE}: {part}, {item['title']!r}: no entry {name!r}")
    return data


def fault(entry: dict, topics: dict, seen: set[str]) -> str:
    """Say what is wrong with an entry; "" where nothing is."""
    if missing := FIELDS - set(entry):
        return f"{', '.join(sorted(missing))} missing"
    if unknown := set(entry) - FIELDS - OPTIONAL:
        return f"{', '.join(sorted(unknown))} unknown"
    if entry["id"] in seen:
        return "this id stands twice"
    for field, known in (
        ("kind", KINDS),
        ("priority", PRIORITIES),
        ("basis", BASES),
        ("topic", topics),
    ):
        if entry[field] not in known:
            return f"{field} {entry[field]!r} is none of {', '.join(known)}"
    if unknown := set(entry.get("also", [])) - set(topics):
        return f"also {', '.join(sorted(unknown))}: no such topic"
    if not isinstance(entry["minutes"], int) or not 0 <= entry["minutes"] <= 6000:
        return "minutes is no whole number from 0 to 6000"
    if not ADDRESS.fullmatch(entry["url"]):
        return f"url {entry['url']!r} is not https, or has parameters"
    if "arxiv.org" in entry["url"] and not re.search(r"/abs/\d{4}\.\d{5}$", entry["url"]):
        return "an arXiv link is https://arxiv.org/abs/ and its number, without a version"
    if entry["basis"] == "description" and not entry.get("rests"):
        return "rests missing: on what a description of something unopened rests"
    for field in ("focus", "insight"):
        if "|" in entry[field] or not entry[field].rstrip().endswith((".", "?", ")")):
            return f"{field} is no sentence that fits into a table"
    if not all(_lab(each) for each in entry.get("labs", [])):
        return f"labs {entry['labs']}: no such lab"
    return ""


def _line(text: str, entry: dict) -> int:
    place = re.search(rf"^- id: {re.escape(str(entry.get('id')))}$", text, re.MULTILINE)
    return text.count("\n", 0, place.start()) + 1 if place else 1


def _names(item: dict, fields: tuple[str, ...]) -> list[str]:
    found = [item[field] for field in fields if item.get(field)]
    return [name for each in found for name in (each if isinstance(each, list) else [each])]


def _lab(number: str) -> str:
    """The file of a lab, from the folder docs/: "" where there is none."""
    found = sorted((ROOT / "labs").glob(f"lab{number}_*.py"))
    return f"labs/{found[0].name}" if found else ""


def duration(minutes: int) -> str:
    """Minutes as one reads them: 45 min, 1¼ h, 12 h; "" for what has no time of its own."""
    if minutes == 0:
        return ""
    if minutes < 60:
        return f"{minutes} min"
    if minutes >= 600:
        return f"{round(minutes / 60)} h"
    hours, quarters = divmod(round(minutes / 15), 4)
    return f"{hours}{['', '¼', '½', '¾'][quarters]} h"


def counts(data: dict) -> list[str]:
    """How many entries there are of each kind and priority, and how many were opened."""
    entries = data["entries"]
    kinds = Counter(entry["kind"] for entry in entries)
    priorities = Counter(entry["priority"] for entry in entries)
    rests = Counter(entry["basis"] for entry in entries)
    hours = sum(entry["minutes"] for entry in entries if entry["priority"] == "must") / 60
    of_kinds = ", ".join(f"{kinds[kind]} {plural}" for kind, plural in KINDS.items())
    return [
        f"There are {len(entries)} entries: {of_kinds}. {priorities['must']} are marked must "
        f"(together some {hours:.0f} hours), {priorities['should']} should, "
        f"{priorities['deep']} are for a deep dive. "
        f"{rests['opened']} were opened for this list; "
        f"of {rests['chapters']} the sections are those that the chapters cite, "
        f"of {rests['outline'] + rests['abstract']} a table of contents or an abstract; "
        f"{rests['description']} could not be opened, and say on what their lines rest."
    ]


def tables(data: dict) -> list[str]:
    """One heading and one table for each topic, in the order of the file."""
    lines = ['<div class="reference-filter"></div>', ""]
    for name, topic in data["topics"].items():
        chosen = [entry for entry in data["entries"] if entry["topic"] == name]
        chosen.sort(key=lambda entry: list(PRIORITIES).index(entry["priority"]))
        lines += [
            f"### {topic['title']}",
            "",
            topic["about"],
            "",
            "| source | what to read it for | in this book |",
            "|---|---|---|",
            *map(row, chosen),
            "",
        ]
    return lines


def row(entry: dict) -> str:
    """An entry as a row of its table."""
    topics = " ".join([entry["topic"], *entry.get("also", [])])
    marks = (
        f'{{ #{entry["id"]} .reference data-topics="{topics}" data-kind="{entry["kind"]}" '
        f'data-priority="{entry["priority"]}" }}'
    )
    time = duration(entry["minutes"]).replace(" ", "\u00a0")
    facts = [entry["kind"], f"**{PRIORITIES[entry['priority']]}**", time]
    source = [
        f"[{entry['title']}]({entry['url']}){marks}",
        _origin(entry),
        " · ".join(filter(None, facts)),
    ]
    why = [f"**Focus:** {entry['focus']}", f"**Insight:** {entry['insight']}"]
    if note := " ".join(filter(None, [BASES[entry["basis"]], entry.get("rests", "")])):
        why.append(f"*{note}*")
    if entry.get("was"):
        why.append(f"*{entry['was']}*")
    here = [entry["book"], *(f"[Lab {n}]({_lab(n)})" for n in entry.get("labs", []))]
    cells = ("<br>".join(_flat(cell)) for cell in (source, why, here))
    return "| " + " | ".join(cells) + " |"


def _origin(entry: dict) -> str:
    """Who, when and where: no year for what is kept up to date, and no publisher twice."""
    if entry["year"] != "living":
        return f"{entry['by']} ({entry['year']}). {entry['where']}"
    named = entry["by"] in entry["where"]
    return entry["where"] if named else f"{entry['by']}. {entry['where']}"


def _flat(lines: list[str]) -> list[str]:
    return [" ".join(line.split()) for line in lines]


def orders(data: dict) -> list[str]:
    """The reading orders: what, in which order, and how long all of it takes."""
    known = {entry["id"]: entry for entry in data["entries"]}
    lines = []
    for place, order in enumerate(data["orders"], start=1):
        total = duration(sum(known[name]["minutes"] for name in order["read"]))
        lines += [f"### {order['title']}: {total} {{ #order-{place} }}", "", order["why"], ""]
        for number, name in enumerate(order["read"], start=1):
            entry = known[name]
            lines.append(f"{number}. [{entry['title']}](#{name}), {duration(entry['minutes'])}")
        lines.append("")
    return lines


def syllabus(data: dict) -> list[str]:
    """The topics of the PyTorch-components track with the video and the post of each."""
    known = {entry["id"]: entry for entry in data["entries"]}

    def link(item: dict, field: str) -> str:
        name = item[field]
        part = item.get(f"{field}_part")
        mark = "{ .watch }" if field == "video" else ""
        return f"[{known[name]['title']}](#{name}){mark}" + (f", {part}" if part else "")

    lines = [
        "| topic | video | post or page | what to take from them, and where it is here |",
        "|---|---|---|---|",
    ]
    for item in data["syllabus"]:
        cells = [
            f"{item['number']} {item['title']}",
            link(item, "video"),
            link(item, "post"),
            f"{item['take']} {item['book']}.",
        ]
        lines.append("| " + " | ".join(_flat(cells)) + " |")
    return [*lines, ""]


PARTS = {"counts": counts, "entries": tables, "orders": orders, "syllabus": syllabus}


@functools.lru_cache(maxsize=2)
def _loaded(text: str) -> dict:
    return load(text)


def render(lines: list[str], root: Path = ROOT) -> list[str]:
    """A page's Markdown with its references shown."""
    out: list[str] = []
    for line in lines:
        match = re.fullmatch(r"<!-- references: (\w+) -->", line)
        if match is None:
            out.append(line)
            continue
        if match[1] not in PARTS:
            raise DataError(f"<!-- references: {match[1]} -->: none of {', '.join(PARTS)}")
        out += PARTS[match[1]](_loaded((root / FILE).read_text("utf-8")))
    return out


makeExtension = extension("book_references", render)
