"""Render the pages of labs, which mkdocs-jupyter finds.

mkdocs-jupyter finds the lab scripts, creates a page for each of them, and copies each script
into the folder of its page. However, its HTML contains 600 kB of notebook styles, and loads a
script from a different host. No option removes these. The plugin of the book therefore renders
labs itself. The cells of a lab become Markdown, with the same code blocks, formulas, table of
contents and dark scheme as a chapter.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jupytext
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page
from nbformat import NotebookNode

from worldsize.model.program import Program
from worldsize.site import template
from worldsize.site.embeds import transcript

LAB = re.compile(r"labs/lab\d\d_\w+\.py")
MARK = re.compile(r"^\s*(?:#|//) (>>>|<<<|hint:).*\n?", re.MULTILINE)


def is_lab(file: File) -> bool:
    """Return whether a file of the site is the script of a lab."""
    return bool(LAB.fullmatch(file.src_uri))


@functools.lru_cache(maxsize=64)
def cells(script: str) -> list[NotebookNode]:
    """Return the cells of a percent script."""
    return jupytext.reads(script, fmt="py:percent").cells


@functools.lru_cache(maxsize=64)
def to_markdown(script: str) -> str:
    """Return the cells of a percent script as one Markdown text.

    The text does not contain the marks around solutions and the hints, which `start.py` reads.
    """
    parts = []
    for cell in cells(script):
        source = MARK.sub("", cell.source).rstrip()
        if cell.cell_type == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"````python\n{source}\n````")
    return "\n\n".join(parts) + "\n"


def page_text(page: Page, root: Path, notebook_links: dict[str, str]) -> str:
    """Return the Markdown of the page of a lab, with links that open its notebook.

    Also set the description of the page, if it has none. Raise ValueError if the lab does not
    begin with a title.
    """
    text = to_markdown(Path(page.file.abs_src_path).read_text("utf-8"))
    title, _, rest = text.partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"{page.file.src_uri}: the first cell must begin with '# Title'")
    paragraph = re.search(r"^[A-Z].*?(?=\n\n|\Z)", rest, re.MULTILINE | re.DOTALL)
    if paragraph and "description" not in page.meta:
        words = re.sub(r"[`*$\\]|\s+", " ", paragraph[0]).strip()
        page.meta["description"] = re.match(r".{0,300}(?:[.:](?= |$)|$)|.{300}", words)[0]
    program = Program(root, root / page.file.src_uri)
    page.meta["made_of"] = program.name
    return template.render(
        "lab",
        title=title,
        name=program.path.stem,
        notebook_links=notebook_links,
        cells=rest,
        transcript=transcript(program) if program.devices else "",
    )
