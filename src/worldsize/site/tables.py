"""Make the tables of a page readable on a phone and on a wide screen.

On a phone, a row of a table has room for about 47 letters. A table that needs more room becomes
one of two kinds:

- `cards`, if at least two columns are text. On a phone, each row becomes a card. In a card, the
  cells are below each other, and each cell begins with the title of its column.
- `wide`, if it has less text. It scrolls sideways on a phone, while its first column stays
  visible.

Long code in a cell may break after its dots, underscores and slashes. Short code stays whole.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import NamedTuple

PHONE = 47  # letters in a row of a table on a screen of 390 px
PADDING = 1.5  # letters: the padding of a cell, both sides together
COLUMN = 16  # letters: the minimum width of a column of text
TEXT = 19  # letters in a line: a column with longer cells is text, not numbers or names
LONG_CODE = 16  # letters: longer code may break
PIECE = 4  # letters: the minimum length of a piece of broken code

_CELL = re.compile(r"(?s)<(t[hd])\b[^>]*>(.*?)</\1>")
_CODE = re.compile(r"<code>([^<]+)</code>")
_JOINT = re.compile(r"(?<=[._/=,:(\[\-])(?=[^._/=,:)\]\-\s])|(?<=[a-z])(?=[A-Z])")


def with_layout(table: str) -> str:
    """Return the HTML of a table with its kind as a class, in boxes that let it scroll.

    Two other properties also become classes: the kind of links that the table contains, and
    whether a cell has several lines. A style sheet could find them with `:has`, but then a
    browser computes all styles again and again while it loads the page.
    """
    inside = table.removeprefix("<table>")
    inside = re.sub(r"(?s)<td(?=[^>]*>(?:(?!</td>).)*?<br)", '<td class="of-lines"', inside)
    inside = _CELL.sub(lambda cell: _CODE.sub(_code, cell[0]), inside)
    kinds, titles = ["data"], ""
    if link := re.search(r'<a [^>]*\bclass="(reference|watch)"', inside):
        kinds.append(f"of-{link[1]}")  # the style sheet has its own layout for these
    else:
        columns = _columns(inside)
        if kind := _kind(columns):
            kinds.append(kind)
            titles = _titles(columns)
            is_text = iter(max(each.cell, len(each.title)) > TEXT for each in columns)
            inside = re.sub(
                r"<th\b", lambda th: th[0] + ' class="text"' * next(is_text, False), inside
            )
    begin = '<div class="md-typeset__scrollwrap"><div class="md-typeset__table">'
    return f'{begin}<table class="{" ".join(kinds)}"{titles}>{inside}</div></div>'


class Column(NamedTuple):
    """A column of a table: its title, and the lengths of its longest cell and longest word."""

    title: str
    cell: int
    word: int


def _columns(table: str) -> list[Column]:
    """Return the columns of a table, from its HTML."""
    rows = [_CELL.findall(row) for row in re.findall(r"(?s)<tr\b.*?</tr>", table)]
    columns = []
    for number in range(max(map(len, rows), default=0)):
        cells = [row[number] for row in rows if number < len(row)]
        lines = [line for tag, html in cells if tag == "td" for line in _lines(html)]
        words = [word for _, html in cells for word in _words(html)]
        title = " ".join(_text(cells[0][1]).split()) if cells[0][0] == "th" else ""
        columns.append(Column(title, _longest(lines), _longest(words)))
    return columns


def _longest(texts: list[str]) -> int:
    return max(map(len, texts), default=0)


def _kind(columns: list[Column]) -> str:
    """Return `cards` or `wide`; an empty string if the table fits on a phone."""
    needed = [min(max(each.cell, each.word), max(each.word, COLUMN)) for each in columns]
    if sum(needed) + PADDING * len(columns) <= PHONE:
        return ""
    return "cards" if sum(each.cell > TEXT for each in columns) > 1 else "wide"


def _titles(columns: list[Column]) -> str:
    """Return a style attribute with the titles, which the style sheet can print.

    For example, the property of the first column is `--title-1: 'you have: '`.
    """
    quoted = (each.title.replace("\\", r"\\").replace("'", r"\'") for each in columns)
    found = [f"--title-{i}: '{title}: '" for i, title in enumerate(quoted, start=1) if title]
    return f' style="{escape("; ".join(found))}"'


def _text(html: str) -> str:
    return unescape(re.sub(r"(?s)<svg.*?</svg>|<[^>]+>", "", html))


def _lines(html: str) -> list[str]:
    return [" ".join(_text(line).split()) for line in re.split(r"<br\s*/?>", html)]


def _words(html: str) -> list[str]:
    """Return the parts of a cell that cannot break: words, formulas and short code."""
    html = re.sub(r"<code>[^<]*</code>", lambda code: code[0].replace(" ", "_"), html)
    return _text(re.sub(r"<wbr>|<br\s*/?>|(?<=\w)-(?=\w)", " ", html)).split()


def _code(code: re.Match[str]) -> str:
    """Return the code of a cell, with `<wbr>` where it may break."""
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
