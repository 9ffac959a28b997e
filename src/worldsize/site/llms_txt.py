"""Write the Markdown of each page next to its HTML, and `llms.txt`, which lists these files.

Other programs can read this Markdown. It is the text from which the HTML of the page is made,
with its embeds and directives replaced. Syntax that only this site supports is converted to
standard Markdown: a tab or a box becomes an item of a list, links become absolute, and HTML and
attributes are removed.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urljoin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page

from worldsize.model.page import parse
from worldsize.site import incremental_output, template

CODE = re.compile(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)")
LINK = re.compile(r"(?<=\]\()[^)\s]+")
TAG = r"</?(?:a|details|div|input|label|li|ol|p|span|summary|ul)\b[^>]*>"
RULES = [
    (re.compile(rule), becomes)
    for rule, becomes in [
        (rf"^\s*(?:{TAG}\s*)+$|<!--.*?-->", ""),
        (r'^<details class="trace-table">.*', ""),  # all steps of a trace, which are too long
        (
            r'^(\s*)(?:===|!!!|\?\?\?)\S*(?: \w+)* "(.*)"$',
            r"\1- **\2**",
        ),  # its content stays indented
        (r'<a\b[^>]*href="([^"]*)"[^>]*>(.*?)</a>', r"[\2](./\1)"),  # relative to the page
        (r"<summary>(.*)</summary>", r"**\1**"),
        (r'<p\b[^>]* markdown="span">', "- "),  # a part in the path of a track
        (r"<input\b[^>]*>", "[ ] "),
        ("<br>", " · "),
        (TAG, ""),
        (r" ?\{:? (?:[.#][^{}]*|download) \}", ""),
    ]
]


def plain_markdown(lines: list[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the standard Markdown of a page, from its lines without embeds and directives."""
    here, uri = parse("\n".join(lines)), page.file.src_uri
    title = next((heading.line for heading in here.headings.values()), 0)
    absolute = functools.partial(urljoin, config.site_url or "/")

    def link(found: re.Match[str]) -> str:
        path, rest = re.fullmatch(r"([^#?]*)(.*)", found[0]).groups()
        if path.startswith("./"):
            return urljoin(absolute(page.url), path[2:]) + rest
        if ":" in path:
            return found[0]
        target = posixpath.join("/", posixpath.dirname(uri), path) if path else f"/{uri}"
        file = files.get_file_from_path(posixpath.normpath(target)[1:])
        return absolute(file.url) + rest if file else found[0]

    out, marks = [], iter("")
    for number, line in enumerate(here.lines, start=1):
        if number in here.code:
            out.append(line)
            continue
        if line.startswith(("<ol", "<ul")):  # the options of a question have letters
            marks = map("{}.".format, itertools.count(1))
            if re.match(r'<ol class="quiz-(?:options|why)"', line):
                marks = map("- {}.".format, "ABCDEFGH")
            elif line.startswith("<ul"):
                marks = itertools.repeat("-")
        if re.match("<li.*</li>", line):
            line = f"{next(marks)} {line}"
        converted = _convert(line, link)
        if converted or (not line.strip() and out and out[-1]):
            out.append(converted)
        if number == title:
            out += [
                "",
                template.render("llms_txt/head", url=absolute(page.url), absolute=absolute),
            ]
    return "\n".join(out).strip("\n") + "\n"


def _convert(line: str, link: Callable[[re.Match[str]], str]) -> str:
    """Return a line of prose as standard Markdown. `link` returns the new target of a link."""

    def change(text: str) -> str:
        for rule, becomes in RULES:
            text = rule.sub(becomes, text)
        return LINK.sub(link, text)

    return change_prose(line, change).rstrip()


def change_prose(line: str, change: Callable[[str], str]) -> str:
    """Return a line of prose after `change`, which does not change the code in the line."""
    spans = []
    line = CODE.sub(lambda span: spans.append(span[0]) or f"\0{len(spans) - 1}\0", line)
    return re.sub("\0(\\d+)\0", lambda span: spans[int(span[1])], change(line))


def markdown_path(page: str) -> str:
    """Return the path of the Markdown of a page, from the path of its HTML."""
    return f"{page.removesuffix('.html')}.md"


def write(page: Page) -> None:
    """Write the Markdown of a page next to its HTML."""
    path = markdown_path(page.file.abs_dest_path)
    incremental_output.write(page.plain_markdown.encode(), path)


def write_index(nav: Navigation, config: MkDocsConfig) -> None:
    """Write `llms.txt` in the format of llmstxt.org, and each part of the book as one file."""
    site, parts = Path(config.site_dir), []
    for part in (each for top in nav for each in top.children or () if each.is_section):
        name = re.match(r"\d\d|\w+", part.title)[0].lower()
        text = "\n\n".join(page.plain_markdown for page in _pages(part)).encode()
        incremental_output.write(text, str(site / "llms" / f"{name}.txt"))
        parts.append((part.title, f"llms/{name}.txt", len(text)))
    index = template.render(
        "llms_txt/index",
        config=config,
        absolute=functools.partial(urljoin, config.site_url or "/"),
        sections=[(top.title, list(_pages(top))) for top in nav],
        parts=parts,
        markdown_path=markdown_path,
    )
    incremental_output.write(index.encode(), str(site / "llms.txt"))


def _pages(item: Section | Page) -> Iterator[Page]:
    """Yield the pages of an item of the navigation, in their order."""
    if item.is_page:
        yield item
    for each in item.children or ():
        yield from _pages(each)
