"""Render the templates `templates/NAME.md.jinja`, whose text becomes part of a page.

Python passes names and numbers to a template, and the template determines how they look. Its
text is Markdown, so MkDocs checks its links. A template is read again when its file changes.
"""

from __future__ import annotations

import traceback
from pathlib import Path

import jinja2

from worldsize.site.yaml_schema import DataError


def _line(text: object) -> str:
    """Return a text on one line, as a list or a table needs it."""
    return " ".join(str(text).split())


def _cell(text: object) -> str:
    """Return a cell of a table. The text may contain `|`, which would separate two cells."""
    return _line(text).replace("|", "&#124;")


def _row(text: str) -> str:
    """Return a row of a table from a text: blank lines separate cells, line breaks stay."""
    cells = ("<br>".join(cell.split("\n")) for cell in text.strip().split("\n\n"))
    return f"| {' | '.join(cells)} |\n"


TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
TEMPLATES.filters |= {"line": _line, "cell": _cell, "row": _row}


def render(name: str, /, **values: object) -> str:
    """Return the text of a template. Raise DataError, with file and line, if it is wrong."""
    try:
        return TEMPLATES.get_template(f"{name}.md.jinja").render(values)
    except jinja2.TemplateError as error:
        trace = traceback.extract_tb(error.__traceback__)
        frames = [each for each in trace if each.filename.endswith(".jinja")][-1:]
        where = "".join(f"{each.filename}:{each.lineno}: " for each in frames)
        raise DataError(f"{where}{error}") from error
