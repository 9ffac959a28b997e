"""MkDocs hooks that mend what is not valid, not accessible or not short in a page's HTML."""

import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

MENDS = [
    # an empty number where the theme means "none"
    (r' tabindex=""', ""),
    # a check box has nothing to complete
    (r'(<input [^>]*type="checkbox"[^>]*) autocomplete="off"', r"\1"),
    # a dialog needs a name
    (r'role="dialog">', 'role="dialog" aria-label="Search">'),
    # a list of links is not what is expanded
    (r'(<nav class="md-nav"[^>]*) aria-expanded="\w+"', r"\1"),
    # HTML defines no such relation
    (r' rel="edit"', ""),
    # most tokens of code have no colour of their own: a third of a page of code
    (r'<span class="[nwp]">([^<]*)</span>', r"\1"),
]


def mend(output: str) -> str:
    for wrong, right in MENDS:
        output = re.sub(wrong, right, output)
    # the templates leave hundreds of blank lines
    parts = re.split(r"(<pre\b.*?</pre>)", output, flags=re.DOTALL)
    parts[::2] = [re.sub(r"\s*\n\s*\n", "\n", part) for part in parts[::2]]
    return "".join(parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    return mend(output)


def on_post_template(output: str, template_name: str, config: MkDocsConfig) -> str:
    return mend(output) if template_name.endswith(".html") else output
