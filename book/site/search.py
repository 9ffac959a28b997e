"""Search: the text in which a reader's browser looks, `search/text.json`.

It is all that `docs/assets/search.js` reads: for each section of each page the address,
the title and the plain text. Of a lab's program, which is whole on its page, only what it says
is kept: comments and strings. The theme asks for `search/search_index.json` on every page; that
one holds the settings alone, so that only those who search fetch the text.
"""

from __future__ import annotations

import functools
import html
import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from book.site import written

Section = tuple[str, str, str, float]  # address, title as HTML, text, weight

# what points at what the chapters explain, and so is not what a reader looks for first
POINTERS = re.compile(r"tracks/|assessment/quiz|what_ran_where|11_references|glossary|labs/")

NO_TEXT = re.compile(  # a formula of its own line would be shown as a heap of letters
    r'<(svg|script|style)\b.*?</\1>|<div class="formula".*?</div>|<a class="headerlink".*?</a>',
    re.DOTALL,
)
HEADING = re.compile(r'<h[1-6] id="([^"]+)"[^>]*>(.*?)</h[1-6]>', re.DOTALL)
PROGRAM = re.compile(r'<div class="language-(?:python|cuda|cpp).*?</pre>', re.DOTALL)
SAYS = re.compile(r'<span class="(?:s|c|nf|nc)\w*">(.*?)</span>', re.DOTALL)
WORDS = re.compile(r"^(?!\s*Recorded 20\d\d-|\s*assert ).*[^\W\d]{3}")
INLINE = re.compile(r"</?(?:a|abbr|b|code|del|em|i|kbd|m\w+|span|strong|sub|sup)\b[^>]*>")


@functools.lru_cache(maxsize=128)
def sections(content: str, title: str, url: str) -> list[Section]:
    """The sections of a page, from its HTML; the first has the address of the page."""
    if url.startswith("labs/"):
        content = PROGRAM.sub(lambda code: " ".join(SAYS.findall(code[0])), content)
    before, *parts = HEADING.split(NO_TEXT.sub("", content))
    found = list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))
    if not found or _text(before):
        found.insert(0, ("", title, before))
    weight = 0.7 if POINTERS.match(url) else 1 if url else 0.4  # home: named as errors are
    first, *others = found
    return [
        (url + anchor, re.sub(r"<(?!/?code>)[^>]*>", "", name), _text(text), weight)
        for anchor, name, text in [("", *first[1:]), *((f"#{a}", t, x) for a, t, x in others)]
    ]


def _text(part: str) -> str:
    """Plain text: each line that has a word and is no assertion, none twice in a section."""
    lines = html.unescape(re.sub(r"<[^>]+>", "\n", INLINE.sub("", part))).splitlines()
    return "\n".join(
        dict.fromkeys(" ".join(each.split()) for each in lines if WORDS.search(each))
    )


class Index:
    """In the place of the index of the theme's search plugin."""

    def __init__(self, config: MkDocsConfig) -> None:
        self.folder = Path(config.site_dir, "search")
        plugin = config.plugins.get("material/search")
        if plugin:
            plugin.search_index = self
            config.plugins.events["page_context"].remove(plugin.on_page_context)
            self.settings = {each: plugin.config[each] for each in ("lang", "separator")}
        self.sections: list[Section] = []

    def add(self, page: Page, content: str) -> None:
        if not page.meta.get("search", {}).get("exclude"):
            self.sections += sections(content, str(page.title), page.url)

    def generate_search_index(self, _previous: object) -> str:
        text = json.dumps(self.sections, ensure_ascii=False, separators=(",", ":"))
        written.write(text.encode(), str(self.folder / "text.json"))
        return json.dumps({"config": self.settings, "docs": []})
