"""Convert the names that data files use for places in the book into Markdown links.

    02_ddp                   a page             02_ddp#overlap     a section of a page
    lab02                    a lab              lab02#step-6       a step of a lab
    02_ddp?Why does          a question         11_references#zero an entry of the reading list
    program:02_ddp/naive.py  a program

The functions raise SchemaError if there is no such place.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from worldsize.model.page import Page, read
from worldsize.site import references
from worldsize.site.embeds import program_page
from worldsize.site.yaml_schema import SchemaError


class Link(NamedTuple):
    """A link to a place in the book. `str(link)` is its Markdown."""

    title: str
    url: str

    def __str__(self) -> str:
        return f"[{self.title}]({self.url})"


def _path(name: str, root: Path) -> Path:
    """Return the file of a page or a lab. Raise SchemaError if there is none."""
    if lab := re.fullmatch(r"lab(\d\d)", name):
        found = sorted((root / "labs").glob(f"lab{lab[1]}_*.py"))
    else:
        found = [path for path in [root / "docs" / f"{name}.md"] if path.is_file()]
    if not found:
        raise SchemaError(f"there is no page {name}")
    return found[0]


def section(target: str, root: Path) -> tuple[Page, range]:
    """Return the page of a section, and the numbers of the lines of the section.

    These are all lines of the page if the target names no section, or if the section is an
    entry of the reading list, whose headings come from data.
    """
    name, _, anchor = target.partition("#")
    page = read(_path(name, root))
    return page, page.section(anchor if anchor in page.headings else "")


def link(target: str, root: Path) -> Link:
    """Return the link to a target. Its title is the title of that place."""
    if target.startswith("program:"):
        program = f"snippets/{target.removeprefix('program:')}"
        if not (root / program).is_file():
            raise SchemaError(f"there is no program {program}")
        return Link(Path(program).name, program_page(program))
    name, mark, rest = re.fullmatch(r"([\w/]+)([#?]?)(.*)", target, re.DOTALL).groups()
    path = _path(name, root)
    page, lab = read(path), path.suffix == ".py"
    number = re.match(r"(?:lab)?(\d\d)", path.name)
    prefix = f"{'Lab ' if lab else ''}{number[1]} · " if number else ""
    url = f"/labs/{path.name}" if lab else f"/{name}.md"
    if mark == "?":
        return Link(f"{prefix}“{_question(page, path, rest)}”", f"{url}#check-yourself")
    if not rest:
        title = page.title if lab else prefix + page.title.split(":")[0]
        return Link(title, url)
    if lab:  # `step-4` is short for `step-4-average-the-gradients`
        rest = next((each for each in page.headings if each.startswith(f"{rest}-")), rest)
    titles = {anchor: heading.text for anchor, heading in page.headings.items()}
    if name == "11_references":  # its tables are made from data
        titles |= references.titles(root)
    if rest not in titles:
        raise SchemaError(f"{name} has no section #{rest}")
    return Link(f"{prefix}{titles[rest]}", f"{url}#{rest}")


def _question(page: Page, path: Path, start: str) -> str:
    """Return the first sentence of the question that begins with `start`.

    Raise SchemaError unless exactly one question of the page begins with this text.
    """
    matches = (re.match(r'\?\?\? question "(.*)"', line) for _, line in page.prose())
    found = [match[1] for match in matches if match and match[1].startswith(start)]
    if len(found) != 1:
        raise SchemaError(f"{len(found)} questions of {path.name} begin with {start!r}, not 1")
    return re.match(r".+?[.?](?= |$)", found[0])[0]
