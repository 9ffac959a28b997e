"""Show a small instrument in a chapter, and all instruments on one page.

    <!-- instrument: collective ranks=16 node=8 size=4MiB "Which algorithm is the fastest?" -->
    <!-- instruments: all -->

The first comment becomes a small instrument with these settings, the question, and a link to
the page of the instrument with the same settings. Without a question, the comment shows the
question from `instruments.toml`. The second comment becomes a small moving picture of each
instrument. Until `docs/assets/embed.js` has started an instrument, and also on paper, a reader
sees the instrument's picture from the home page.
"""

from __future__ import annotations

import re
import tomllib
from html import escape
from pathlib import Path
from urllib.parse import quote, urlencode

from mkdocs.utils.meta import get_data

from worldsize.site import template
from worldsize.site.yaml_schema import SchemaError, check_comments

INSTRUMENTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
DIRECTIVE = re.compile(r"^ *<!-- instrument: (.*) -->\s*$")
WORD = re.compile(r'"[^"]*"|\S+')


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces `<!-- instrument: NAME setting=value "Question?" -->`.

    Raise SchemaError if there is no such instrument, setting or value.
    """
    name, settings, question = parse(words)
    return _markdown(name, settings, question, root, gallery=False)


def show_all(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces `<!-- instruments: all -->`."""
    if words != ["all"]:
        raise SchemaError("the comment must be <!-- instruments: all -->")
    parts = [_markdown(name, {}, "", root, gallery=True) for name in INSTRUMENTS]
    inside = "\n\n".join(parts)
    return f'<div class="instrument-gallery" markdown>\n\n{inside}\n\n</div>'


def parse(words: list[str]) -> tuple[str, dict[str, str], str]:
    """Return the name, the settings and the question in the words of a comment."""
    name, *rest = words
    if name not in INSTRUMENTS:
        raise SchemaError(f"there is no instrument {name}: use one of {', '.join(INSTRUMENTS)}")
    settings, question = {}, INSTRUMENTS[name]["question"]
    for word in rest:
        if word.startswith('"'):
            question = word.strip('"')
            continue
        parameter, equals, value = word.partition("=")
        if not equals:
            raise SchemaError(f"{word} must have the form setting=value")
        settings[parameter] = address_value(name, parameter, value)
    return name, settings, question


def address_value(name: str, parameter: str, value: str) -> str:
    """Return the value of a parameter for the address of a page, for example 4194304 for 4MiB.

    Raise SchemaError if the instrument has no such parameter or does not allow the value.
    """
    known = INSTRUMENTS[name]["parameters"]
    if parameter not in known:
        raise SchemaError(f"{name} has no setting {parameter}: use one of {', '.join(known)}")
    allowed = known[parameter]
    if not allowed:
        return value
    if isinstance(allowed[0], str):
        if value not in allowed:
            raise SchemaError(f"{parameter} must be {' or '.join(allowed)}, not {value}")
        return value
    number = re.fullmatch(rf"(-?\d+)({'|'.join(UNITS)})?", value)
    size = int(number[1]) * UNITS.get(number[2], 1) if number else None
    low, high = allowed
    if size is None or not low <= size <= high:
        raise SchemaError(
            f"{parameter} must be a whole number from {low} to {high}, not {value}"
        )
    return str(size)


def check_page(path: Path, root: Path) -> None:
    """Raise DataError, with file and line, if a comment of the page is wrong."""
    check_comments(path, root, DIRECTIVE, lambda words: parse(WORD.findall(words)))


def _markdown(
    name: str, settings: dict[str, str], question: str, root: Path, *, gallery: bool
) -> str:
    """Return the Markdown of one small instrument."""
    state = urlencode(settings, quote_via=quote)
    return template.render(
        "instrument",
        name=name,
        title=_title(root, name),
        alt=_alt(root, name),
        question=question or INSTRUMENTS[name]["question"],
        state=escape(state),
        query=f"?{state}" if state else "",
        gallery=gallery,
    ).rstrip("\n")


def _title(root: Path, name: str) -> str:
    """Return the title of the page of an instrument."""
    return get_data((root / f"docs/instruments/{name}.md").read_text("utf-8"))[1]["title"]


def _alt(root: Path, name: str) -> str:
    """Return the alt text of the picture that the home page shows for an instrument."""
    home = (root / "docs/index.md").read_text("utf-8")
    found = re.search(rf"!\[([^\]]*)\]\(assets/thumbnails/{name}\.svg\)", home)
    if found is None:
        raise SchemaError(f"docs/index.md shows no picture assets/thumbnails/{name}.svg")
    return found[1]
