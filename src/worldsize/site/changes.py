"""Show the changes in `docs/changes.yml` on a page and in an RSS feed."""

from __future__ import annotations

import datetime
import re
from email.utils import format_datetime
from itertools import groupby
from pathlib import Path
from xml.etree import ElementTree

from mkdocs.config.defaults import MkDocsConfig

from worldsize.site import template, yaml_schema
from worldsize.site.yaml_schema import Schema, SchemaError

FILE = "docs/changes.yml"
FEED = "changes.xml"


class Change(Schema):
    """A change of the book that a reader would notice."""

    date: datetime.date
    title: str
    what: str
    corrects: bool = False  # whether the book was wrong before


def _read(root: Path) -> list[Change]:
    """Return all changes, the newest first. Raise DataError if the file is wrong."""
    changes = yaml_schema.read(root, FILE, list[Change])
    with yaml_schema.locate_errors(FILE):
        yaml_schema.require_unique(each.title for each in changes)
        if changes != sorted(changes, key=lambda each: each.date, reverse=True):
            raise SchemaError("the entries must be in order, with the newest first")
    return changes


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- changes: all -->`."""
    if words != ["all"]:
        raise SchemaError("write `<!-- changes: all -->`")
    days = [
        (day, list(group)) for day, group in groupby(_read(root), key=lambda each: each.date)
    ]
    return template.render("changes", days=days)


def feed(root: Path, config: MkDocsConfig) -> str:
    """Return the changes as RSS 2.0."""
    rss = ElementTree.Element("rss", version="2.0")
    channel, page = ElementTree.SubElement(rss, "channel"), f"{config.site_url}changes/"
    about = {"title": f"{config.site_name}: changes", "link": page}
    _fill(channel, about | {"description": "What readers would notice."})
    for each in _read(root):
        at = datetime.datetime.combine(each.date, datetime.time(), datetime.UTC)
        fields = {
            "title": each.title,
            "link": page,
            "guid": f"{page}#{each.date} {each.title}",
            "pubDate": format_datetime(at, usegmt=True),
            "description": re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", each.what),
        }
        _fill(ElementTree.SubElement(channel, "item"), fields)
    ElementTree.indent(rss)
    return ElementTree.tostring(rss, "unicode", xml_declaration=True) + "\n"


def _fill(parent: ElementTree.Element, fields: dict[str, str]) -> None:
    """Add an element for each field."""
    for name, text in fields.items():
        attributes = {"isPermaLink": "false"} if name == "guid" else {}
        ElementTree.SubElement(parent, name, attributes).text = text
