"""Write `search/text.json`, the text that the search of the website searches.

`docs/assets/search.js` reads this file. It contains a row for each section of each page: the
address, the title, the plain text, the weight, and the code of the programs. The code is a
separate field, because a word in a program says less about its section than a word in a
sentence or in an error message. The page of a lab contains the whole program, so only its
comments, its strings and the names that it defines are stored.

The theme loads `search/search_index.json` on every page. That file contains only the settings,
so that only readers who search load the text.
"""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from worldsize.site import incremental_output

# address, title as HTML, text, weight, the code of the programs
Section = tuple[str, str, str, float, str]

# pages and sections that point to explanations in chapters, so readers rarely look for them
POINTERS = re.compile(
    r"(tracks/|traces/|assessment/|what_ran_where|11_references|11_releases|glossary|labs/)"
    r"|.*#(check-yourself|go-deeper|links)$"
)
# the anchors of headings whose subsections are about one error each
FAILURES = re.compile(r"go(es)?-wrong|error")

# parts that the search ignores, among them formulas (their letters make no sense as text) and
# the table of all steps of a trace
NO_TEXT = re.compile(
    r'<(svg|script|style)\b.*?</\1>|<div class="formula".*?</div>|<a class="headerlink".*?</a>'
    r'|<details class="trace-table".*?</details>',
    re.DOTALL,
)
HEADING = re.compile(r'<h([1-6]) id="([^"]+)"[^>]*>(.*?)</h[1-6]>', re.DOTALL)
PROGRAM = re.compile(r'<div class="language-(?:python|cuda|cpp).*?</pre>', re.DOTALL)
# comments, strings, and the names of functions and classes
LAB_WORDS = re.compile(r'<span class="(?:s|c|nf|nc)\w*">(.*?)</span>', re.DOTALL)
# lines with at least three letters in a row, except assertions and lines about a recording
INDEXED_LINE = re.compile(r"^(?!\s*Recorded 20\d\d-|\s*assert ).*[^\W\d]{3}")
INLINE_TAG = re.compile(r"</?(?:a|abbr|b|code|del|em|i|kbd|m\w+|span|strong|sub|sup)\b[^>]*>")


@functools.lru_cache(maxsize=128)
def sections(content: str, title: str, url: str) -> list[Section]:
    """Return the sections of a page, from its HTML. The first has the address of the page."""
    if url.startswith("labs/"):
        content = PROGRAM.sub(lambda code: " ".join(LAB_WORDS.findall(code[0])), content)
    before, *parts = HEADING.split(NO_TEXT.sub("", content))
    found = list(zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True))
    if not found or _text(before):
        found.insert(0, ("1", "", title, before))
    rows: list[Section] = []
    in_failures = False  # whether the section is below a heading of FAILURES
    for level, anchor, name, text in found:
        if level <= "2":
            in_failures = bool(FAILURES.search(anchor))
        address = f"{url}#{anchor}" if rows else url
        rows.append(
            (
                address,
                re.sub(r"<(?!/?code>)[^>]*>", "", name),
                _text(PROGRAM.sub("\n", text)),
                _weight(address, in_failures and level > "2"),
                _text("\n".join(PROGRAM.findall(text))),
            )
        )
    return rows


def _weight(address: str, is_failure: bool) -> float:
    """Return the weight: more than 1 for an error, less than 1 for a section of POINTERS."""
    if not address or address.startswith("#"):
        return 0.4  # the home page: error messages also contain the words of the book's name
    return 0.55 if POINTERS.match(address) else 1.2 if is_failure else 1


def _text(part: str) -> str:
    """Return the plain text of HTML: the lines of INDEXED_LINE, without repeated lines."""
    lines = html.unescape(re.sub(r"<[^>]+>", "\n", INLINE_TAG.sub("", part))).splitlines()
    return "\n".join(
        dict.fromkeys(" ".join(each.split()) for each in lines if INDEXED_LINE.search(each))
    )


class Index:
    """The search index of the site, which replaces the index of the theme's search plugin."""

    def __init__(self, config: MkDocsConfig) -> None:
        self.folder = Path(config.site_dir, "search")
        plugin = config.plugins.get("material/search")
        self.replaces_theme = bool(plugin)
        if plugin:
            plugin.search_index = self
            self.settings = {each: plugin.config[each] for each in ("lang", "separator")}
        self.sections: list[Section] = []

    def add(self, page: Page, content: str) -> None:
        """Add the sections of a page, unless its front matter excludes it."""
        if not page.meta.get("search", {}).get("exclude"):
            self.sections += sections(content, str(page.title), page.url)

    def add_entry_from_context(self, page: Page) -> None:
        """Do nothing. The theme's plugin calls this, but `add` has already added the page."""

    def generate_search_index(self, _previous: object = None) -> str:
        """Write the text of all sections. Return the settings, which the theme then writes."""
        text = json.dumps(self.sections, ensure_ascii=False, separators=(",", ":"))
        incremental_output.write(text.encode(), str(self.folder / "text.json"))
        return json.dumps({"config": self.settings, "docs": []})
