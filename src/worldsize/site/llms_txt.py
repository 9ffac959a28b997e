"""Plain: beside each page its Markdown, for machines that read; `llms.txt` is the map of them.

It is the text of which the page's HTML is made, with what it embeds and shows. What only this
site understands becomes what every reader of Markdown does: a tab or a box is an item of a
list, HTML and attributes are left out, and a link has its whole address.
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
        (r'^(\s*)(?:===|!!!|\?\?\?)\S*(?: \w+)* "(.*)"$', r"\1- **\2**"),  # below it, indented
        (r'<a\b[^>]*href="([^"]*)"[^>]*>(.*?)</a>', r"[\2](./\1)"),  # beside the page
        (r"<summary>(.*)</summary>", r"**\1**"),
        (r'<p\b[^>]* markdown="span">', "- "),  # a stop of a track
        (r"<input\b[^>]*>", "[ ] "),
        ("<br>", " · "),
        (TAG, ""),
        (r" ?\{:? (?:[.#][^{}]*|download) \}", ""),
    ]
]


def text(lines: list[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    """The plain Markdown of a page, whose lines have in them what it embeds and shows."""
    here, at = parse("\n".join(lines)), page.file.src_uri
    title = next((heading.line for heading in here.headings.values()), 0)
    whole = functools.partial(urljoin, config.site_url or "/")

    def link(found: re.Match[str]) -> str:
        path, rest = re.fullmatch(r"([^#?]*)(.*)", found[0]).groups()
        if path.startswith("./"):
            return urljoin(whole(page.url), path[2:]) + rest
        if ":" in path:
            return found[0]
        place = posixpath.join("/", posixpath.dirname(at), path) if path else f"/{at}"
        file = files.get_file_from_path(posixpath.normpath(place)[1:])
        return whole(file.url) + rest if file else found[0]

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
        said = _plain(line, link)
        if said or (not line.strip() and out and out[-1]):
            out.append(said)
        if number == title:
            out += ["", template.render("plain/head", at=whole(page.url), whole=whole)]
    return "\n".join(out).strip("\n") + "\n"


def _plain(line: str, link) -> str:
    """A line of prose as it is published."""

    def change(text: str) -> str:
        for rule, becomes in RULES:
            text = rule.sub(becomes, text)
        return LINK.sub(link, text)

    return prose(line, change).rstrip()


def prose(line: str, change: Callable[[str], str]) -> str:
    """A line of prose, changed, but for the code in it."""
    spans = []
    line = CODE.sub(lambda span: spans.append(span[0]) or f"\0{len(spans) - 1}\0", line)
    return re.sub("\0(\\d+)\0", lambda span: spans[int(span[1])], change(line))


def place(page: str) -> str:
    """Where the Markdown of a page lies: beside its HTML."""
    return f"{page.removesuffix('.html')}.md"


def write(page: Page) -> None:
    incremental_output.write(page.plain.encode(), place(page.file.abs_dest_path))


def write_map(nav: Navigation, config: MkDocsConfig) -> None:
    """Write `llms.txt`, as llmstxt.org has it, and each part of the book as one file."""
    site, parts = Path(config.site_dir), []
    for part in (each for top in nav for each in top.children or () if each.is_section):
        name = re.match(r"\d\d|\w+", part.title)[0].lower()
        whole = "\n\n".join(page.plain for page in _pages(part)).encode()
        incremental_output.write(whole, str(site / "llms" / f"{name}.txt"))
        parts.append((part.title, f"llms/{name}.txt", len(whole)))
    said = template.render(
        "plain/llms",
        config=config,
        whole=functools.partial(urljoin, config.site_url or "/"),
        sections=[(top.title, list(_pages(top))) for top in nav],
        parts=parts,
        place=place,
    )
    incremental_output.write(said.encode(), str(site / "llms.txt"))


def _pages(item: Section | Page) -> Iterator[Page]:
    if item.is_page:
        yield item
    for each in item.children or ():
        yield from _pages(each)
