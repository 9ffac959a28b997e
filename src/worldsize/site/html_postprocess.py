"""Theme: what is not valid, not accessible or not short in a page's HTML is put right."""

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
    return f'<span class="{spans[1]}">{re.sub("</?span[^>]*>", "", spans[0])}</span>'


# The theme's worker for the search, which builds its index in every browser, and ours.
THEME_WORKER, WORKER = "assets/javascripts/workers/search.", "assets/search.js"
FIXES = [
    # an empty number where the theme means "none"
    (r' tabindex=""', ""),
    # a check box has nothing to complete
    (r'(<input [^>]*type="checkbox"[^>]*) autocomplete="off"', r"\1"),
    # a dialog needs a name
    (r'role="dialog">', 'role="dialog" aria-label="Search">'),
    # a list of links is not what is expanded
    (r'(<nav class="md-nav"[^>]*) aria-expanded="\w+"', r"\1"),
    # overrides/ has another switch of the scheme
    (r' data-md-component="palette"', ""),
    # HTML defines no such relation
    (r' rel="edit"', ""),
    # a table without a class is wrapped by the theme's script, and its page styled again
    (r"(?s)<table>.*?</table>", lambda table: tables.laid_out(table[0])),
    # neighbours of one colour
    (
        r'<span class="(\w{1,3})">[^<]*</span>(?:\s*<span class="\1">[^<]*</span>)+',
        _one_span,
    ),
]

# most tokens of code have no colour of their own, a third of a page of code; others have the
# colour of what they stand in or beside
for token, kind in STANDARD_TYPES.items():
    if re.fullmatch(r"[nwpo]|kc|sa|[fv]m|n[av]|v[cgi]", kind):
        STANDARD_TYPES[token] = ""
    elif kind in ("s1", "si"):
        STANDARD_TYPES[token] = "s2"
STANDARD_TYPES[Punctuation.Indicator] = ""  # YAML's, and in no table


def fit(files: Iterable[File]) -> None:
    """Let the theme's style sheet name the class that a table has where it names none, and its
    script take only an alternate in another language for a site beside this one."""
    for place, was, becomes in (
        (r"stylesheets/.*main\..*css", "table:not([class])", "table.data"),
        (r"javascripts/bundle\..*js", "link[rel=alternate]", "link[rel=alternate][hreflang]"),
    ):
        for file in files:
            if re.fullmatch(f"assets/{place}", file.src_uri):
                file.content_string = file.content_string.replace(was, becomes)


def use_search_worker(env: Environment) -> None:
    """Make the filter `url` of templates replace the theme's search worker with ours."""
    address = env.filters["url"]

    @pass_context
    def url(context: Context, value: str) -> str:
        replaced = str(value).startswith(THEME_WORKER)
        return address(context, WORKER if replaced else value)

    env.filters["url"] = url


def share_navigation(env: Environment) -> None:
    """Draw the navigation once for all pages of one depth that have no entry in it."""
    template = env.get_template("partials/nav.html")
    shared = DictLoader({"partials/nav.html": "{{ navigation() }}"})
    env.loader = ChoiceLoader([shared, env.loader])
    drawn: dict[str, str] = {}

    @pass_context
    def navigation(context: Context) -> str:
        page, place = context["page"], context["base_url"]
        if page and page in context["nav"].pages:
            return template.render(context.get_all())
        if place not in drawn:
            drawn[place] = template.render(context.get_all())
        return drawn[place]

    env.globals["navigation"] = navigation


def fixed(html: str) -> str:
    """Return the HTML of a page as it is published."""
    for wrong, right in FIXES:
        html = re.sub(wrong, right, html)
    # the templates leave hundreds of blank lines, and deep indents
    parts = re.split(r"(<pre\b.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = [re.sub(r"[ \t]*\n[ \t\n]*", "\n", part) for part in parts[::2]]
    return "".join(parts)


@functools.lru_cache(maxsize=256)
def size(drawing: str) -> str:
    """Return the width and height attributes of an SVG, in whole CSS pixels."""
    svg = ET.fromstring(drawing)
    width, height = svg.get("viewBox", "").split()[2:]
    scale = 4 / 3 if svg.get("width", "").endswith("pt") else 1
    return f'width="{float(width) * scale:.0f}" height="{float(height) * scale:.0f}"'


def with_sizes(html: str, page: Page, files: Files) -> str:
    """Tell the browser how large each figure will be, so that no text moves when it comes."""

    def sized(match: re.Match[str]) -> str:
        place = urljoin(f"/{page.url}", match[1]).lstrip("/")
        figure = files.src_uris.get(place)
        if figure is None or "width=" in match[0]:
            return match[0]
        drawing = Path(figure.abs_src_path).read_text("utf-8")
        return match[0].replace("<img ", f'<img loading="lazy" {size(drawing)} ', 1)

    return re.sub(r'<img [^>]*?src="([^"]+\.svg)"[^>]*>', sized, html)


def with_drawings(html: str, page: Page, files: Files) -> str:
    """Put each image of the class `drawing` into the page as SVG, under the image's alt text.

    An SVG that is part of the page uses the page's colours, and a style sheet can pause it.
    """

    def drawn(match: re.Match[str]) -> str:
        image = match[0]
        place = urljoin(f"/{page.url}", re.search(r'src="([^"]+)"', image)[1]).lstrip("/")
        alt = re.search(r'alt="([^"]*)"', image)[1]
        drawing = Path(files.src_uris[place].abs_src_path).read_text("utf-8").strip()
        return drawing.replace("<svg ", f'<svg role="img" aria-label="{alt}" ', 1)

    return re.sub(r'<img [^>]*?class="drawing"[^>]*>', drawn, html)
