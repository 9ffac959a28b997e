"""Labs as pages: MkDocs hooks beside mkdocs-jupyter.

mkdocs-jupyter makes a page of each lab script and puts the script beside it. Its HTML brings
along 600 kB of notebook styles and asks another host for a script, so these hooks give the
cells to the book's own Markdown instead: the same code blocks, formulas, table of contents
and dark scheme as in a chapter. They also write the notebook beside the page.
"""

import re
from pathlib import Path

import jupytext
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from book.markdown import transcript_lines
from book.program import Program

BUTTONS = """\
<p class="lab-files">
<a class="md-button" href="{name}.py" download>Download the script</a>
<a class="md-button" href="{name}.ipynb" download>Download the notebook</a>
</p>
"""


def is_lab(page: Page) -> bool:
    return page.file.src_uri.startswith("labs/") and page.file.src_uri.endswith(".py")


def to_markdown(script: str) -> str:
    """Return a percent script's cells as one Markdown text.

    The marks around solutions and the hints for blanks, which `start.py` reads, are left out.
    """
    script = re.sub(r"^\s*# (>>>|<<<|hint:).*\n", "", script, flags=re.MULTILINE)
    parts = []
    for cell in jupytext.reads(script, fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        elif cell.source.strip():
            parts.append(f"````python\n{cell.source}\n````")
    return "\n\n".join(parts) + "\n"


def to_notebook(script: str) -> str:
    """Return a percent script as a notebook, the same text each time."""
    notebook = jupytext.reads(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells, start=1):
        cell["id"] = f"cell-{number}"
    notebook.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    return jupytext.writes(notebook, fmt="ipynb")


def on_pre_page(page: Page, config: MkDocsConfig, files: Files) -> Page:
    if is_lab(page):
        vars(page).pop("render", None)  # mkdocs-jupyter's: the cells are rendered as Markdown
        if page.edit_url:  # docs/labs is a link to labs, which the forge does not follow
            page.edit_url = page.edit_url.replace("/docs/labs/", "/labs/")
    return page


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if not is_lab(page):
        return markdown
    text = to_markdown(Path(page.file.abs_src_path).read_text(encoding="utf-8"))
    title, _, rest = text.partition("\n")
    if not title.startswith("# "):
        raise ValueError(f"{page.file.src_uri}: the first cell must begin with '# Title'")
    paragraph = re.search(r"^[A-Z].*?(?=\n\n|\Z)", rest, re.MULTILINE | re.DOTALL)
    if paragraph and "description" not in page.meta:
        words = re.sub(r"[`*$\\]|\s+", " ", paragraph[0]).strip()
        page.meta["description"] = re.match(r".{0,300}(?:[.:](?= |$)|$)|.{300}", words)[0]
    root = Path(config.config_file_path).resolve().parent
    program = Program(root, root / page.file.src_uri)
    if program.devices:
        rest += "\n".join(["", "## What it prints", "", *transcript_lines(program)])
    return f"{title}\n\n{BUTTONS.format(name=Path(page.file.src_uri).stem)}\n{rest}"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    if is_lab(page):
        script = Path(page.file.abs_src_path).read_text(encoding="utf-8")
        target = Path(page.file.abs_dest_path).with_name(
            Path(page.file.src_uri).stem + ".ipynb"
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(to_notebook(script), encoding="utf-8")
    return output
