"""Links: how data files name a place of the book, and the Markdown link that it becomes.

    02_ddp                   a page             02_ddp#overlap     a section of it
    lab02                    a lab              lab02#step-6       a step of it
    02_ddp?Why does          a question         11_references#zero an entry of the reading list
    program:02_ddp/naive.py  a program

A Fault says what is not there.
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
    title: str
    url: str

    def __str__(self) -> str:
        return f"[{self.title}]({self.url})"


def _path(name: str, root: Path) -> Path:
    """The file of a page or a lab."""
    if lab := re.fullmatch(r"lab(\d\d)", name):
        found = sorted((root / "labs").glob(f"lab{lab[1]}_*.py"))
    else:
        found = [path for path in [root / "docs" / f"{name}.md"] if path.is_file()]
    if not found:
        raise SchemaError(f"there is no page {name}")
    return found[0]


def section(target: str, root: Path) -> tuple[Page, range]:
    """The page of a section, and its lines; all lines for an entry, which comes from data."""
    name, _, anchor = target.partition("#")
    page = read(_path(name, root))
    return page, page.section(anchor if anchor in page.headings else "")


def link(target: str, root: Path) -> Link:
    """The link to a target, with the title of the place it leads to."""
    if target.startswith("program:"):
        program = f"snippets/{target.removeprefix('program:')}"
        if not (root / program).is_file():
            raise SchemaError(f"there is no program {program}")
        return Link(Path(program).name, program_page(program))
    name, mark, rest = re.fullmatch(r"([\w/]+)([#?]?)(.*)", target, re.DOTALL).groups()
    path = _path(name, root)
    page, lab = read(path), path.suffix == ".py"
    number = re.match(r"(?:lab)?(\d\d)", path.name)
    before = f"{'Lab ' if lab else ''}{number[1]} · " if number else ""
    url = f"/labs/{path.name}" if lab else f"/{name}.md"
    if mark == "?":
        return Link(f"{before}“{_question(page, path, rest)}”", f"{url}#check-yourself")
    if not rest:
        title = page.title if lab else before + page.title.split(":")[0]
        return Link(title, url)
    if lab:  # `step-4` stands for `step-4-average-the-gradients`
        rest = next((each for each in page.headings if each.startswith(f"{rest}-")), rest)
    known = {anchor: heading.text for anchor, heading in page.headings.items()}
    if name == "11_references":  # whose tables are made from data
        known |= references.titles(root)
    if rest not in known:
        raise SchemaError(f"{name} has no section #{rest}")
    return Link(f"{before}{known[rest]}", f"{url}#{rest}")


def _question(page: Page, path: Path, start: str) -> str:
    """The first sentence of the one question of a page that begins so."""
    asked = (re.match(r'\?\?\? question "(.*)"', line) for _, line in page.prose())
    found = [match[1] for match in asked if match and match[1].startswith(start)]
    if len(found) != 1:
        raise SchemaError(f"{len(found)} questions of {path.name}: {start!r}")
    return re.match(r".+?[.?](?= |$)", found[0])[0]
