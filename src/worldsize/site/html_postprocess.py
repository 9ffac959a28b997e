"""Correct the HTML of pages: make it valid, accessible and short."""

import functools
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urljoin

from jinja2 import ChoiceLoader, DictLoader, Environment, pass_context
from jinja2.runtime import Context
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.token import STANDARD_TYPES, Punctuation

from worldsize.site import tables


def _one_span(spans: re.Match[str]) -> str:
    """Return one span with the text of adjacent spans of the same class."""
    return f'<span class="{spans[1]}">{re.sub("</?span[^>]*>", "", spans[0])}</span>'


# The search worker of the theme, which builds its index in every browser, and the book's
# worker.
THEME_WORKER, WORKER = "assets/javascripts/workers/search.", "assets/search.js"
FIXES = [
    # a tabindex must be a number, so an empty one is removed
    (r' tabindex=""', ""),
    # HTML does not allow `autocomplete="off"` for a check box
    (r'(<input [^>]*type="checkbox"[^>]*) autocomplete="off"', r"\1"),
    # screen readers need the name of a dialog
    (r'role="dialog">', 'role="dialog" aria-label="Search">'),
    # this attribute belongs to a button, and not to the list that it expands
    (r'(<nav class="md-nav"[^>]*) aria-expanded="\w+"', r"\1"),
    # the templates in overrides/ contain a different switch of the colour scheme
    (r' data-md-component="palette"', ""),
    # HTML defines no relation `edit`
    (r' rel="edit"', ""),
    # the theme's script wraps tables without a class, and the browser then restyles the page
    (r"(?s)<table>.*?</table>", lambda table: tables.with_layout(table[0])),
    # adjacent spans of the same colour become one span
    (
        r'<span class="(\w{1,3})">[^<]*</span>(?:\s*<span class="\1">[^<]*</span>)+',
        _one_span,
    ),
]

# Most tokens of code have no colour of their own. Without their spans, a page of code is a
# third shorter. Strings in single quotes, and the braces in f-strings, have the colour of other
# strings.
for token, css_class in STANDARD_TYPES.items():
    if re.fullmatch(r"[nwpo]|kc|sa|[fv]m|n[av]|v[cgi]", css_class):
        STANDARD_TYPES[token] = ""
    elif css_class in ("s1", "si"):
        STANDARD_TYPES[token] = "s2"
STANDARD_TYPES[Punctuation.Indicator] = ""  # a token of YAML that this table does not contain


def adapt_theme_files(files: Iterable[File]) -> None:
    """Change the theme's style sheet and script so that they fit the HTML of the book.

    The style sheet selects tables without a class, but our tables have the class `data`. The
    script treats each alternate link as a version of the site in a different language, but only
    alternate links with `hreflang` are.
    """
    for path, old, new in (
        (r"stylesheets/.*main\..*css", "table:not([class])", "table.data"),
        (r"javascripts/bundle\..*js", "link[rel=alternate]", "link[rel=alternate][hreflang]"),
    ):
        for file in files:
            if re.fullmatch(f"assets/{path}", file.src_uri):
                file.content_string = file.content_string.replace(old, new)


def use_search_worker(env: Environment) -> None:
    """Make the template filter `url` replace the theme's search worker with the book's."""
    address = env.filters["url"]

    @pass_context
    def url(context: Context, value: str) -> str:
        is_theme_worker = str(value).startswith(THEME_WORKER)
        return address(context, WORKER if is_theme_worker else value)

    env.filters["url"] = url


def share_navigation(env: Environment) -> None:
    """Render the navigation once for all pages of one depth that are not listed in it."""
    template = env.get_template("partials/nav.html")
    shared = DictLoader({"partials/nav.html": "{{ navigation() }}"})
    env.loader = ChoiceLoader([shared, env.loader])
    rendered: dict[str, str] = {}  # by the path from a page to the root of the site

    @pass_context
    def navigation(context: Context) -> str:
        page, base_url = context["page"], context["base_url"]
        if page and page in context["nav"].pages:
            return template.render(context.get_all())
        if base_url not in rendered:
            rendered[base_url] = template.render(context.get_all())
        return rendered[base_url]

    env.globals["navigation"] = navigation


def fix_html(html: str) -> str:
    """Return the HTML of a page after all corrections, as it is published."""
    for wrong, right in FIXES:
        html = re.sub(wrong, right, html)
    # the templates produce hundreds of blank lines, and deep indentation
    parts = re.split(r"(<pre\b.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(r"[ \t]*\n[ \t\n]*", "\n", part) for part in parts[::2]]
    return "".join(parts)


@functools.lru_cache(maxsize=256)
def size_attributes(drawing: str) -> str:
    """Return the width and height attributes of an SVG, in whole CSS pixels."""
    svg = ET.fromstring(drawing)
    width, height = svg.get("viewBox", "").split()[2:]
    scale = 4 / 3 if svg.get("width", "").endswith("pt") else 1
    return f'width="{float(width) * scale:.0f}" height="{float(height) * scale:.0f}"'


def with_sizes(html: str, page: Page, files: Files) -> str:
    """Return the HTML, with the size of each figure, so that no text moves while loading."""

    def sized(match: re.Match[str]) -> str:
        uri = urljoin(f"/{page.url}", match[1]).lstrip("/")
        figure = files.src_uris.get(uri)
        if figure is None or "width=" in match[0]:
            return match[0]
        drawing = figure.content_string
        return match[0].replace("<img ", f'<img loading="lazy" {size_attributes(drawing)} ', 1)

    return re.sub(r'<img [^>]*?src="([^"]+\.svg)"[^>]*>', sized, html)


def with_drawings(html: str, page: Page, files: Files) -> str:
    """Return the HTML, with each image of the class `drawing` replaced by its SVG.

    The alt text of the image becomes the label of the SVG. An SVG inside a page uses the
    colours of the page, and the style sheet can pause its animation.
    """

    def drawn(match: re.Match[str]) -> str:
        image = match[0]
        uri = urljoin(f"/{page.url}", re.search(r'src="([^"]+)"', image)[1]).lstrip("/")
        alt = re.search(r'alt="([^"]*)"', image)[1]
        drawing = Path(files.src_uris[uri].abs_src_path).read_text("utf-8").strip()
        return drawing.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)

    return re.sub(r'<img [^>]*?class="drawing"[^>]*>', drawn, html)
