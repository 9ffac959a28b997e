"""Labs as pages: the cells of a script go through the book's own Markdown, as a chapter does,
and the script lies beside its page.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbformat import NotebookNode

from book.core.program import Program
from book.site import template
from book.site.embedded import transcript

LAB = re.compile(r"labs/lab\d\d_\w+\.py")
MARK = re.compile(r"^\s*# (>>>|<<<|hint:).*\n?", re.MULTILINE)


class Lab(File):
    """A script that is a page."""

    def is_documentation_page(self) -> bool:
        return True


def add(files: Files, config: MkDocsConfig) -> None:
    """Put a page, and the script beside it, in the place of each lab's script."""
    for file in [each for each in files if LAB.fullmatch(each.src_uri)]:
        files.remove(file)
        page = Lab(file.src_uri, file.src_dir, config.site_dir, config.use_directory_urls)
        files.append(page)
        beside = page.dest_uri.replace("index.html", Path(file.src_uri).name)
        around = {"abs_src_path": file.abs_src_path, "inclusion": InclusionLevel.INCLUDED}
        files.append(File.generated(config, beside, **around))


@functools.lru_cache(maxsize=64)
def cells(script: str) -> list[NotebookNode]:
    """The cells of a percent script."""
    return jupytext.reads(script, fmt="py:percent").cells


@functools.lru_cache(maxsize=64)
def to_markdown(script: str) -> str:
    """Return a percent script's cells as one Markdown text.

    The marks around solutions and the hints for blanks, which `start.py` reads, are left out.
    """
    parts = []
    for cell in cells(script):
        source = MARK.sub("", cell.source).rstrip()
        if cell.cell_type == "markdown":
            parts.append(source)
        elif source:
            parts.append(f"````python\n{source}\n````")
    return "\n\n".join(parts) + "\n"


def page_text(page: Page, root: Path, opens: dict[str, str]) -> str:
    """The Markdown of a lab's page, with links to where its notebook opens; sets its
    description where it has none."""
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
        opens=opens,
        cells=rest,
        transcript=transcript(program) if program.devices else "",
    )
