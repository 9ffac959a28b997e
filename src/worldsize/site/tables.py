"""Tables: make the tables of a page readable on a phone and on a wide screen.

A row of a table has about 47 letters on a phone. A table that needs more is one of two kinds:

- `cards`, where at least two columns are text: on a phone each row becomes a card. In a card
  the cells are below each other, and each begins with the title of its column.
- `wide`, which scrolls sideways on a phone, while its first column stays visible.

Long code in a cell may break after its dots, underscores and slashes. Short code stays whole.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import NamedTuple

PHONE = 47  # letters in a row of a table on a screen of 390 px
PADDING = 1.5  # of a cell, both sides, in letters
COLUMN = 16  # letters: what a column of text needs at least in each line
TEXT = 19  # letters in a line: a column with longer cells is text, not numbers or names
LONG_CODE = 16  # letters: longer code may break
PIECE = 4  # letters: no piece of broken code is shorter

_CELL = re.compile(r"(?s)<(t[hd])\b[^>]*>(.*?)</\1>")
_CODE = re.compile(r"<code>([^<]+)</code>")
_JOINT = re.compile(r"(?<=[._/=,:(\[\-])(?=[^._/=,:)\]\-\s])|(?<=[a-z])(?=[A-Z])")


def laid_out(table: str) -> str:
    """Return a table's HTML with its kind, in the boxes in which the theme lets it scroll.

    The kind of its links and whether a cell has lines become classes too: where a style sheet
    has to look for them (`:has`), a browser styles all again and again while it loads.
    """
    inside = table.removeprefix("<table>")
    inside = re.sub(r"(?s)<td(?=[^>]*>(?:(?!</td>).)*?<br)", '<td class="of-lines"', inside)
    inside = _CELL.sub(lambda cell: _CODE.sub(_code, cell[0]), inside)
    kinds, titles = ["data"], ""
    if of := re.search(r'<a [^>]*\bclass="(reference|watch)"', inside):
        kinds.append(f"of-{of[1]}")  # which the style sheet lays out on its own
    else:
        columns = _columns(inside)
        if kind := _kind(columns):
            kinds.append(kind)
            titles = _titles(columns)
            texts = iter(max(each.cell, len(each.title)) > TEXT for each in columns)
            inside = re.sub(
                r"<th\b", lambda th: th[0] + ' class="text"' * next(texts, False), inside
            )
    begin = '<div class="md-typeset__scrollwrap"><div class="md-typeset__table">'
    return f'{begin}<table class="{" ".join(kinds)}"{titles}>{inside}</div></div>'


class Column(NamedTuple):
    """A column of a table: its title, and the lengths of its longest cell and longest word."""

    title: str
    cell: int
    word: int


def _columns(table: str) -> list[Column]:
    rows = [_CELL.findall(row) for row in re.findall(r"(?s)<tr\b.*?</tr>", table)]
    columns = []
    for place in range(max(map(len, rows), default=0)):
        cells = [row[place] for row in rows if place < len(row)]
        lines = [line for tag, html in cells if tag == "td" for line in _lines(html)]
        words = [word for _, html in cells for word in _words(html)]
        title = " ".join(_text(cells[0][1]).split()) if cells[0][0] == "th" else ""
        columns.append(Column(title, _longest(lines), _longest(words)))
    return columns


def _longest(texts: list[str]) -> int:
    return max(map(len, texts), default=0)


def _kind(columns: list[Column]) -> str:
    needed = [min(max(each.cell, each.word), max(each.word, COLUMN)) for each in columns]
    if sum(needed) + PADDING * len(columns) <= PHONE:
        return ""
    return "cards" if sum(each.cell > TEXT for each in columns) > 1 else "wide"


def _titles(columns: list[Column]) -> str:
    """The titles as properties that the style sheet can print: --title-1: 'you have'."""
    quoted = (each.title.replace("\\", r"\\").replace("'", r"\'") for each in columns)
    found = [f"--title-{i}: '{title}: '" for i, title in enumerate(quoted, start=1) if title]
    return f' style="{escape("; ".join(found))}"'


def _text(html: str) -> str:
    return unescape(re.sub(r"(?s)<svg.*?</svg>|<[^>]+>", "", html))


def _lines(html: str) -> list[str]:
    return [" ".join(_text(line).split()) for line in re.split(r"<br\s*/?>", html)]


def _words(html: str) -> list[str]:
    """The parts of a cell that stay on one line: words, formulas and short code."""
    html = re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(" ", "_"), html)
    return _text(re.sub(r"<wbr>|<br\s*/?>|(?<=\w)-(?=\w)", " ", html)).split()


def _code(code: re.Match[str]) -> str:
    """Code of a cell, with the places where it may break."""
    text = unescape(code[1])
    if len(text) <= LONG_CODE:
        return code[0]
    pieces, begin = [], 0
    for joint in _JOINT.finditer(text):
        at = joint.start()
        word = max(begin, text.rfind(" ", 0, at) + 1)
        if at - word >= PIECE and len(text[at:].partition(" ")[0]) >= PIECE:
            pieces.append(text[begin:at])
            begin = at
    parts = [escape(piece, quote=False) for piece in (*pieces, text[begin:])]
    return f'<code class="long">{"<wbr>".join(parts)}</code>'
