"""Tests of the built site: strict build, no requests to other hosts, links, and contrast."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urljoin, urlsplit

import pytest
from conftest import RECORDED, SITE

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("ziamath")

import jinja2
import mkdocs.commands.build
import mkdocs.structure.pages
import msgspec
import pygments
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from mkdocs.utils.meta import get_data
from processes import HANG
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from worldsize.model.page import parse, read, resolve
from worldsize.site import (
    ebook_export,
    glossary,
    html_postprocess,
    labs,
    llms_txt,
    math_svg,
    offline_zip,
    prerender,
    template,
)
from worldsize.site.markdown_extension import BookMarkdown
from worldsize.site.yaml_schema import DataError

ROOT = Path(__file__).resolve().parent.parent
INPUTS = [".github", "CITATION.cff", "pyproject.toml", *SITE]
HOST = "https://world-size.github.io/world-size/"
MAX_HTML, MAX_COMPRESSED_HTML = 350_000, 60_000  # bytes of a page on disk and as it is sent
# Bytes of the packed viewer in rank_trace.py. Its page shows the whole file, so that a reader who
# copies the program from the page has the viewer too.
PACKED_VIEWER = 18_500
MAX_WORDS = 7_500  # of a page, so that it can be read in one sitting

# Tags and attributes whose targets a browser fetches by itself.
FETCHED = {
    ("script", "src"),
    ("img", "src"),
    ("img", "srcset"),
    ("iframe", "src"),
    ("source", "src"),
    ("source", "srcset"),
    ("video", "src"),
    ("audio", "src"),
    ("embed", "src"),
    ("object", "data"),
    ("link", "href"),
}
# Syntax that plain Markdown does not have: embeds, HTML, attributes, tabs, boxes and macros.
NOT_PLAIN = re.compile(
    r"--8<--|</?[a-z](?!ttps?:)|<!|\{:? (?:[.#]|download)|\{[{%]|^\s*(?:===|!!!|\?\?\?)"
    r"|\]\((?!https?:)"
)
NOT_FETCHED_LINKS = {"canonical", "prev", "next", "alternate"}
VOID = {
    "area",
    "base",
    "br",
    "col",
    "embed",
    "hr",
    "img",
    "input",
    "link",
    "meta",
    "source",
    "wbr",
}


class Reader(HTMLParser):
    """Collects the tags, texts and styles of a page that the tests need."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: Counter[str] = Counter()
        self.transcripts: list[str] = []
        self.inline_styles: list[str] = []
        self._open: list[tuple[str, set[str]]] = []
        self.title = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        self.tags.append((tag, known))
        if tag in VOID:
            return
        classes = set(known.get("class", "").split())
        if "transcript" in classes:
            self.transcripts.append("")
        self._open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        for place in range(len(self._open) - 1, -1, -1):
            if self._open[place][0] == tag:
                del self._open[place:]
                return

    def handle_data(self, data: str) -> None:
        around = [tag for tag, _ in self._open]
        if around and around[-1] == "title" and "svg" not in around:
            self.title += data
        if around and around[-1] == "style":
            self.inline_styles.append(data)
        if "code" in around and any("transcript" in classes for _, classes in self._open):
            self.transcripts[-1] += data


@dataclass
class Page:
    """A page of the built site."""

    path: Path
    url: str  # relative to the root of the site; "" for the home page
    read: Reader = field(repr=False)

    @cached_property
    def ids(self) -> Counter[str]:
        return Counter(known["id"] for _, known in self.read.tags if known.get("id"))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [known for name, known in self.read.tags if name == tag]


@dataclass
class Site:
    folder: Path
    pages: dict[str, Page]


@pytest.fixture(scope="module")
def site(built_site) -> Site:
    folder, pages = built_site, {}
    for path in sorted(folder.rglob("*.html")):
        url = path.relative_to(folder).as_posix().removesuffix("index.html")
        pages[url] = Page(path, url, Reader(path.read_text("utf-8")))
    assert pages
    return Site(folder, pages)


def check_all_pages(site: Site, faults_of) -> None:
    """Call a check for each page, and fail with the faults of all pages."""
    faults = [
        f"{url or 'index'}: {fault}" for url, p in site.pages.items() for fault in faults_of(p)
    ]
    assert not faults, "\n".join(faults)


def flat(text: str) -> str:
    """Return the text without indentation and blank lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_pages_load_nothing_from_other_hosts(site: Site) -> None:
    def faults(page: Page):
        for tag, known in page.read.tags:
            if tag == "link" and set(known.get("rel", "").split()) & NOT_FETCHED_LINKS:
                continue
            for name, value in known.items():
                outside = value.startswith(("http:", "https:", "//"))
                if (tag, name) in FETCHED and outside:
                    yield f"<{tag} {name}={value!r}>"
                if name == "style" and re.search(r"url\(\s*['\"]?(https?:)?//", value):
                    yield f"<{tag} style={value!r}>"
            if known.get("data-md-component") == "source":
                yield "the theme's repository link loads data from a different host"
        for style in page.read.inline_styles:
            if re.search(r"@import|url\(\s*['\"]?(https?:)?//", style):
                yield "an inline style loads a file from a different host"

    check_all_pages(site, faults)


def test_style_sheets_load_nothing_from_other_hosts(site: Site) -> None:
    for sheet in site.folder.rglob("*.css"):
        css = sheet.read_text("utf-8")
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", css), sheet
        assert "@import" not in css, sheet


def test_pages_have_titles_alt_texts_and_sizes(site: Site) -> None:
    def faults(page: Page):
        headings = len(page.all("h1"))
        if headings != 1:
            yield f"the page has {headings} h1 elements instead of one"
        if page.all("html")[0].get("lang") != "en":
            yield "the page has no language"
        if not page.read.title.strip():
            yield "the page has no title"
        named = {
            m.get("name") or m.get("property"): m.get("content", "") for m in page.all("meta")
        }
        if not 20 <= len(named.get("description", "")) <= 350:
            yield f"the description has not 20 to 350 characters: {named.get('description')}"
        for name in ("og:title", "og:description", "og:image", "twitter:card"):
            if not named.get(name):
                yield f"the page has no {name}"
        for image in page.all("img"):
            if not image.get("alt", "").strip():
                yield f"this image has no alt text: {image.get('src')}"
            if not (image.get("width") and image.get("height")):
                yield f"this image has no size, so the text moves: {image.get('src')}"
        twice = [name for name, count in page.ids.items() if count > 1]
        if twice:
            yield f"these ids occur twice: {twice}"

    check_all_pages(site, faults)


def test_pages_are_small(site: Site) -> None:
    too_large = []
    for url, page in site.pages.items():
        html = page.path.read_bytes()
        sent = len(gzip.compress(html, 6)) if len(html) > MAX_COMPRESSED_HTML else 0
        packed = PACKED_VIEWER if url == "programs/labs/rank_trace/" else 0
        if len(html) > MAX_HTML or sent > MAX_COMPRESSED_HTML + packed:
            too_large.append((sent, f"{url}: {len(html):,} bytes, {sent:,} compressed"))
    assert not too_large, "\n".join(fault for _, fault in sorted(too_large, reverse=True))


def test_no_page_is_too_long_to_read() -> None:
    """The glossary may be longer, because readers look up single terms."""
    too_long = []
    for path in sorted({*(ROOT / "docs").rglob("*.md")} - {ROOT / "docs/glossary.md"}):
        words = sum(len(line.split()) for _, line in read(path).prose())
        if words > MAX_WORDS:
            too_long.append(
                f"{path.relative_to(ROOT)}: {words:,} words; move a topic to a different page"
            )
    assert not too_long, "\n".join(too_long)


PAGES_WITH_PATTERN = [
    "01_collectives.md",
    "01_layouts.md",
    "01_one_sided.md",
    "01_parallelism_strategies.md",
    "01_communication_costs.md",
    "02_ddp.md",
    "02_ddp_in_practice.md",
    "02_runs_that_last.md",
    "03_model_parallelism.md",
    "03_tensor_parallelism.md",
    "03_several_cuts.md",
    "03_experts.md",
    "03_context_and_experts.md",
    "04_zero_and_fsdp.md",
    "04_fsdp.md",
    "04_checkpoints.md",
    "04_deepspeed.md",
    "05_mixed_precision.md",
    "05_precision_in_practice.md",
    "05_eight_bits.md",
    "10_attention_kernels.md",
    "06_gpu_computing.md",
    "06_matrix_products.md",
    "06_blackwell.md",
    "06_triton.md",
    "06_inside_pytorch.md",
    "06_memory_bound_kernels.md",
    "06_kernels.md",
    "06_five_languages.md",
    "06_host_and_device.md",
    "06_libraries.md",
    "10_linear_attention.md",
    "10_flash_attention.md",
    "09_fleet.md",
    "08_quantized_models.md",
    "10_attention_in_practice.md",
    "10_attention_in_parts.md",
    "08_quantization.md",
    "08_int8_layers.md",
    "08_four_bits.md",
    "09_decode_step.md",
    "09_inference.md",
    "09_next_token.md",
    "07_memory_and_performance.md",
    "07_out_of_memory.md",
    "07_faster_steps.md",
    "07_fewer_kernels.md",
    "07_whole_run.md",
    "09_blocks_and_schedules.md",
    "09_serving.md",
    "11_profiling_tools.md",
    "11_tools.md",
    "clusters/failures.md",
    "clusters/from_one_to_many.md",
    "clusters/hardware_faults.md",
    "clusters/scale.md",
    "setup.md",
    "clusters/post_training.md",
    "clusters/post_training_mismatch.md",
    "clusters/post_training_at_scale.md",
    "clusters/preferences.md",
    "clusters/weight_sync.md",
]


@pytest.mark.parametrize("name", PAGES_WITH_PATTERN)
def test_a_chapter_page_follows_the_pattern(name: str) -> None:
    """The pattern is: a question, a picture, the results, short code blocks, and questions."""
    path = ROOT / "docs" / name
    page, faults = read(path), []
    text = path.read_text("utf-8")
    results = re.search(r'(?m)^!!! summary "In short"\n((?:\n|    .*\n)+)', text)
    opening = text[text.index("\n# ") : results.start()] if results else ""
    items = re.findall(r"(?m)^    - ((?:.+\n(?:      .*\n)*))", results[1]) if results else []
    if "?" not in opening or not re.search(r"!\[[^\]]+\]\(", opening) or "```python" in opening:
        faults.append("put a question and a picture, but no code, before the results")
    if not 3 <= len(items) <= 6:
        faults.append(f"the box `In short` has {len(items)} results; it needs 3 to 6")
    for item in items:
        if not re.search(r"\]\([^)]*#", item) or not re.search(r"\d|one|two", item):
            faults.append(f"add a number and a link to its section to the result: {item[:60]}")
    questions = len(re.findall(r'(?m)^\?\?\? question "', text))
    if questions < 5:
        faults.append(f"`Check yourself` has {questions} questions; it needs at least 5")
    for fence in page.fences:
        shown = sum(len(resolve(embed, ROOT)) for embed in fence.embeds)
        if fence.language == "python" and not fence.indent and shown > 30:
            faults.append(f"line {fence.line}: {shown} lines of code in one block; fold a part")
    counted = r"\b(the (last|first|second|third|fourth) (two |three )?(line|row|column)s?)\b"
    for number, line in page.prose():
        if found := re.search(counted, line, re.I):
            faults.append(f"line {number}: replace `{found[0]}` by a callout")
    assert not faults, "\n".join(f"docs/{name}: {fault}" for fault in faults)


def test_chapter_06_lists_the_programs_that_need_nvcc() -> None:
    """A reader without the CUDA toolkit must learn which Python programs to skip."""
    folder, page = "snippets/06_gpu_computing", ROOT / "docs/06_gpu_computing.md"
    needs = {
        path.name
        for path in (ROOT / folder).glob("*.py")
        if 'which("nvcc")' in path.read_text("utf-8")
    }
    listed = re.search(r"also need `nvcc`(.*?)Without a GPU", page.read_text("utf-8"), re.S)
    assert set(re.findall(r"`(\w+\.py)`", listed[1])) == needs


def test_titles_and_descriptions_are_unique(site: Site) -> None:
    pages = [p for url, p in site.pages.items() if url != "404.html" and "programs/" not in url]
    for what in (
        Counter(p.read.title for p in pages),
        Counter(
            m["content"] for p in pages for m in p.all("meta") if m.get("name") == "description"
        ),
    ):
        assert not [text for text, count in what.items() if count > 1]


def link_fault(site: Site, base: str, link: str) -> str:
    """Return what is wrong with a link within this site; an empty string if it is valid."""
    to = urlsplit(urljoin(base, link))
    whole = to.geturl()
    if to.netloc != urlsplit(HOST).netloc:
        return ""
    if not whole.startswith(HOST):
        return f"{link} points outside of the site"
    path = unquote(whole.removeprefix(HOST).split("#")[0].split("?")[0])
    file = site.folder / path
    if path.startswith("book/"):  # files that `make ebook` adds
        there = file.stem in ebook_export.volumes(ebook_export.Site(site.folder))
        volume = there and file.suffix in (".pdf", ".epub")
        return "" if volume or path == offline_zip.FILE else f"{link} is not a volume"
    if not (file / "index.html" if file.is_dir() else file).exists():
        return f"{link} does not exist"
    if to.fragment and unquote(to.fragment) not in site.pages[path].ids:
        return f"{link}: the page has no element with this id"
    return ""


def test_links_have_targets(site: Site) -> None:
    def faults(page: Page):
        links = (known.get(name) for tag, known in page.read.tags if tag != "base"
                 for name in ("href", "src"))  # fmt: skip
        return filter(None, (link_fault(site, HOST + page.url, each) for each in links if each))

    check_all_pages(site, faults)


def test_the_planner_cites_existing_sections() -> None:
    pages = "\n".join(page.read_text("utf-8") for page in ROOT.glob("docs/**/*.md"))
    headings = re.findall(r"^#+ (.+)", pages, re.M)
    for program in ROOT.glob("snippets/planner/*.py"):
        for node in ast.walk(ast.parse(program.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = " ".join((ast.get_docstring(node) or "").split())
                for section in re.findall(r'"([A-Z][^"]+ [^"]+)"', docstring):
                    assert any(each.startswith(section) for each in headings), section


def test_each_page_exists_as_plain_markdown(site: Site) -> None:
    """A reader of the Markdown file needs no browser, and no syntax of this site."""

    def faults(page: Page):
        if page.url == "404.html":
            return
        html, markdown = page.path.read_text("utf-8"), page.path.with_suffix(".md")
        here, text = parse(markdown.read_text("utf-8")), flat(markdown.read_text("utf-8"))
        markdown_links = [
            each["href"] for each in page.all("link") if each.get("type") == "text/markdown"
        ]
        if markdown_links != ["index.md"]:
            yield "the head has no link to the Markdown file"
        if "index.md" not in (each.get("href") for each in page.all("a")):
            yield "the page has no link to the Markdown file for readers without JavaScript"
        article = html[html.index("<article") :].partition('class="page-end"')[0]
        for code in re.findall(r"<pre\b[^>]*>(.*?)</pre>", article, re.DOTALL):
            if flat(unescape(re.sub("<[^>]*>", "", code))) not in text:
                yield f"the Markdown file lacks the code {code[:60]!r}"
        for number, line in here.prose():
            line = llms_txt.CODE.sub("", line)
            if found := NOT_PLAIN.search(line):
                yield f"index.md:{number}: {found[0]}"
            for link in re.findall(r"\]\(([^)\s]*)", line):
                if fault := link_fault(site, "page:", link):
                    yield f"index.md:{number}: {fault}"

    check_all_pages(site, faults)


def test_each_page_has_a_citation_and_a_link_to_report_errors(site: Site) -> None:
    form = msgspec.yaml.decode((ROOT / ".github/ISSUE_TEMPLATE/erratum.yml").read_bytes())
    fields = {each["id"] for each in form["body"]}
    assert fields >= {"page", "section", "transcript", "versions"}  # book.js fills them in
    whole = msgspec.yaml.decode((ROOT / "CITATION.cff").read_bytes())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert whole["version"] == project["version"] and whole["url"] == HOST
    keys = Counter()

    def faults(page: Page):
        if page.url in ("", "404.html"):
            return
        report = next(a["href"] for a in page.all("a") if a.get("class") == "report")
        query = dict(parse_qsl(urlsplit(report).query))
        if query != {"template": "erratum.yml", "page": HOST + page.url}:
            yield f"the link to report errors has these fields: {query}"
        html = page.path.read_text("utf-8").partition('class="page-end"')[2]
        entry = unescape(re.search(r"<code>(.*?)</code>", html, re.DOTALL)[1])
        key, fields_text = re.fullmatch(
            r"@misc\{([\w-]+),\n(.+,\n.+)\n\}", entry, re.DOTALL
        ).groups()
        known = dict(re.findall(r"^  (\w+) += \{(.+)\},?$", fields_text, re.MULTILINE))
        keys[key] += 1
        if list(known) != ["title", "author", "howpublished", "year", "url"]:
            yield entry
        if known["url"] != HOST + page.url or not known["howpublished"].endswith(
            f" version {project['version']}"
        ):
            yield entry
        if re.search(r"(?<!\\)[_&%$#]", known["title"]):
            yield f"TeX would misread the title {known['title']}"

    check_all_pages(site, faults)
    assert set(keys.values()) == {1}


def test_llms_txt_lists_every_page_of_the_navigation(site: Site) -> None:
    """The format of llmstxt.org is a title, a description and lists of links."""
    text = (site.folder / "llms.txt").read_text("utf-8")
    title, about, rest = re.match(r"# (.+)\n\n> (.+)\n\n((?s:.+))", text).groups()
    assert title == "World Size" and len(about) > 50
    _, *sections = rest.split("\n## ")
    listed = {}
    for name, *lines in (each.strip().split("\n") for each in sections):
        items = [
            re.fullmatch(r"- \[.+?\]\((.+?)\): (.+)", line) for line in filter(None, lines)
        ]
        assert items and all(items), name
        listed[name] = [each[1].removeprefix(HOST) for each in items]
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2].partition("\n\n")[0]
    names = re.findall(r": (\S+)\.(?:md|py)$", nav, re.MULTILINE)
    pages = [re.sub(r"\bindex/index\.md$", "index.md", f"{name}/index.md") for name in names]
    parts = listed.popitem()[1]
    assert [each for section in listed.values() for each in section] == pages
    whole = "".join((site.folder / each).read_text("utf-8") for each in parts)
    # llms.txt links to single files with the text of several pages; these pages are not in them
    missing = [each for each in pages if (site.folder / each).read_text("utf-8") not in whole]
    assert missing == [
        "index.md",
        "setup/index.md",
        "traces/index.md",
        "glossary/index.md",
        "what_ran_where/index.md",
        "changes/index.md",
        "contributing/index.md",
    ]


def test_links_contain_words() -> None:
    """Screen readers list links without their context, so `here` or a formula is not enough."""
    unclear = r"\[(\$[^]$]*\$|here|this|more|read more|start|information)\]\("
    for path in sorted((ROOT / "docs").rglob("*.md")):
        assert not re.findall(unclear, path.read_text("utf-8"), re.I), path


def test_a_link_in_a_table_header_differs_by_more_than_its_colour() -> None:
    """As in other text, a link next to other words must differ by more than its colour."""
    rule = re.search(r":is\(([a-z, ]+)\) a:not\(", (ROOT / "docs/assets/book.css").read_text())
    assert rule and {"p", "li", "dd", "td", "th", "figcaption"} <= set(rule[1].split(", "))


def test_anchors_of_headings_equal_those_of_the_parser(site: Site) -> None:
    """`worldsize.model.page` must compute the same anchors as the site."""
    faults = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        url = path.relative_to(ROOT / "docs").with_suffix("").as_posix()
        if url == "glossary":  # the anchors of its terms come before the headings
            continue
        ids = site.pages[re.sub(r"\bindex/$", "", f"{url}/")].ids
        faults += [f"{url}: {name}" for name in read(path).headings if name not in ids]
    assert not faults, "\n".join(faults)


def test_a_moved_section_exists_on_the_page_of_its_redirect(site: Site) -> None:
    faults = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        for place, sections in get_data(path.read_text("utf-8"))[1].get("moved", {}).items():
            here, there = (site.pages[f"{Path(name).stem}/"].ids for name in (path.name, place))
            faults += [
                f"docs/{path.name}: moved: {place}: {section}"
                for section in sections.split()
                if section in here or section not in there
            ]
    assert not faults, "\n".join(faults)


def test_sitemap_lists_every_page(site: Site) -> None:
    listed = re.findall(r"<loc>(.*?)</loc>", (site.folder / "sitemap.xml").read_text("utf-8"))
    assert {url.removeprefix(HOST) for url in listed} == set(site.pages) - {"404.html"}


def test_code_blocks_have_copy_buttons(site: Site) -> None:
    def faults(page: Page):
        sources = [script.get("src", "") for script in page.all("script")]
        for script in ("assets/javascripts/bundle", "assets/book.js"):
            if not any(script in source for source in sources):
                yield f"the page does not load {script}"
        if '"content.code.copy"' not in page.path.read_text("utf-8"):
            yield "the page has no copy buttons"

    check_all_pages(site, faults)
    assert ".gp, .go" in (site.folder / "assets/book.js").read_text(
        "utf-8"
    )  # prompt and output


def test_transcripts_contain_output(site: Site) -> None:
    check_all_pages(
        site,
        lambda page: [
            f"transcript {number} is empty"
            for number, text in enumerate(page.read.transcripts, start=1)
            if not text.strip()
        ],
    )
    assert any(page.read.transcripts for page in site.pages.values())


def test_every_column_of_a_table_has_a_name(site: Site) -> None:
    nameless = [
        page.url
        for page in site.pages.values()
        if re.search(r"<th[^>]*>\s*</th>", page.path.read_text("utf-8"))
    ]
    assert nameless == []


def test_no_markdown_is_shown_as_text(site: Site) -> None:
    """A table, a formula and a list need an empty line before them."""
    shown = []
    for page in site.pages.values():
        html = page.path.read_text("utf-8")
        html = re.sub(r"(?s)<(pre|code|script|style|svg|template)\b.*?</\1>", "", html)
        text = re.sub(r"<[^>]*>", "", html)
        shown += [
            f"{page.url}: {found[0]!r}"
            for found in re.finditer(r"\|\s*:?-{3,}.{,40}|\$\$.{,40}|\S\s+- \*\*.{,40}", text)
        ]
    assert not shown, "\n".join(shown)


def test_search_finds_words_of_code(site: Site) -> None:
    index = json.loads((site.folder / "search/search_index.json").read_text("utf-8"))
    separator = re.compile(index["config"]["separator"])
    assert "parameters" in separator.split("find_unused_parameters=True")
    assert [w for w in separator.split("DistributedDataParallel") if w] == [
        "Distributed",
        "Data",
        "Parallel",
    ]
    sections = json.loads((site.folder / "search/text.json").read_text("utf-8"))
    assert len({place for place, *_ in sections}) == len(sections)
    pages = {place for place, *_ in sections if "#" not in place}
    assert pages == {
        url
        for url in site.pages
        if not url.startswith(("programs/", "404", "changes/", "contributing/"))
    }
    faults = [
        place
        for place, title, text, *_ in sections
        if "<svg aria-hidden" in text or not title.strip() or urlsplit(place).path not in pages
    ]
    faults += [
        place
        for place, *_ in sections
        if "#" in place and place.split("#")[1] not in site.pages[place.split("#")[0]].ids
    ]
    assert not faults


# ---- labs


def test_lab_pages_are_small_and_their_files_can_be_downloaded(site: Site) -> None:
    labs = [page for url, page in site.pages.items() if url.startswith("labs/")]
    assert labs
    for page in labs:
        name = page.path.parent.name
        assert page.path.stat().st_size < 300_000, name  # the navigation is included
        assert "jp-" not in page.path.read_text("utf-8"), "notebook styles"
        script = page.path.with_name(f"{name}.py")
        assert script.read_text("utf-8") == (ROOT / "labs" / f"{name}.py").read_text("utf-8")
        notebook = json.loads(page.path.with_name(f"{name}.ipynb").read_text("utf-8"))
        assert {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
        offered = [a["href"] for a in page.all("a") if "download" in a]
        assert offered == [f"{name}.py", f"{name}.ipynb"]


LAB = '''\
# %% [markdown]
# # A lab
#
# Each rank sends $S$ bytes.

# %%
def fence() -> str:
    # hint: three of them
    # >>> solution 1: a fence
    return """```"""
    # <<< solution
    // hint: C++ has hints, too
'''


def test_a_lab_is_converted_to_markdown() -> None:
    text = labs.to_markdown(LAB)
    assert text.startswith("# A lab\n\nEach rank")
    assert '````python\ndef fence() -> str:\n    return """```"""\n````' in text


# ---- templates


def test_a_template_error_names_its_line_and_a_changed_template_is_reloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template.TEMPLATES, "loader", jinja2.FileSystemLoader(tmp_path))
    file = tmp_path / "list.md.jinja"
    file.write_text("{% for each in of %}\n- {{ each | cell }}\n{% endfor %}\n")
    assert template.render("list", of=["a\n b", "1 | 2"]) == "- a b\n- 1 &#124; 2\n"
    for text in ("\n{{ unknown }}\n", "\n{% for %}\n"):
        file.write_text(text)
        os.utime(file, ns=(0, len(text)))
        with pytest.raises(DataError, match=r"list\.md\.jinja:2: "):
            template.render("list")


# ---- formulas


def test_a_formula_has_a_drawing_and_a_spoken_text() -> None:
    html = math_svg.draw(r"\frac{2(n-1)}{n} S")
    svg, math = html.split("</svg>")
    assert 'aria-hidden="true"' in svg and "vertical-align:-" in svg and "em" in svg
    assert "id=" not in svg and "color" not in svg
    assert math.startswith("<math><mfrac>") and "xmlns" not in math


def test_a_page_defines_each_glyph_once_before_its_use() -> None:
    markdown = pytest.importorskip("markdown")
    convert = markdown.Markdown(extensions=[BookMarkdown(), "toc"]).convert
    html = convert("# $n$ ranks\n\n$n - n$, $2^{n}$, $(n)$\n\n<div>$n$</div>\n")
    glyphs, shown = html.split("</div>", 1)
    assert glyphs.startswith("<div hidden>") and "<path" in glyphs
    outlines = re.findall(r'<path id="(\w+)" d="(.*?)"/>', glyphs)
    assert len({outline for _, outline in outlines}) == len(outlines) == 6  # n – 2 ⁿ ( )
    used = re.findall(r'<use href="#(\w+)"', shown)
    assert set(used) == {name for name, _ in outlines} and used.count(used[0]) == 4
    # an id with a capital letter cannot equal the anchor of a heading
    assert not any(name == name.lower() for name in used)
    assert convert("No formula.") == "<p>No formula.</p>"


@pytest.mark.parametrize(
    ("tex", "is_high"), [("x_i", False), (r"\overline{x}", False), (r"\frac{a}{b}", True)]
)
def test_only_a_formula_higher_than_a_line_has_a_height(tex: str, is_high: bool) -> None:
    svg = math_svg.draw(tex).split("</svg>")[0]
    assert ("height:" in svg) == ("vertical-align:" in svg) == is_high
    assert "fill=" not in svg
    above, height = math_svg.ABOVE, math_svg.ABOVE + math_svg.BELOW
    assert is_high or re.search(rf'viewBox="\d+ -{above} \d+ {height}"', svg)
    css = (ROOT / "docs/assets/book.css").read_text("utf-8")
    rule = re.search(r"\n\.formula svg \{(.*?)\}", css, re.DOTALL)[1]
    assert f"height: {height / math_svg.UNITS:g}em;" in rule
    assert f"vertical-align: -{math_svg.BELOW / math_svg.UNITS:g}em;" in rule


def test_a_formula_can_have_two_lines() -> None:
    one, two = (math_svg.draw(tex, display=True) for tex in ("a", r"a \\ a"))
    assert one.count("<use ") == 1 and two.count("<use ") == 2
    one, two = (float(re.search(r"height:([\d.]+)em", each)[1]) for each in (one, two))
    assert two > 2 * one


def test_formulas_keep_their_place_in_the_text() -> None:
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(
        "A $x < y$ and `$code$`, $5 and $6.\n\n$$\na = b\n$$\n\n* item\n\n    $$c$$\n",
        extensions=[BookMarkdown()],
    )
    assert html.count('<span class="formula"') == 1
    assert html.count('<div class="formula"') == 2
    assert "<code>$code$</code>, $5 and $6." in html
    assert "<p><div" not in html
    Reader(html)


@pytest.mark.parametrize(
    ("tex", "message"),
    [
        (r"\foo{x}", r"\foo is not known"),
        (r"\frac{a}{", "braces"),
        (r"x^", "MissingSuperScript"),
        (r"漢", "the font has no 漢"),
    ],
)
def test_a_wrong_formula_stops_the_build(tex: str, message: str) -> None:
    with pytest.raises(math_svg.FormulaError) as error:
        math_svg.draw(tex)
    assert message in str(error.value) and tex in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (r"$$\foo$$", r"\foo is not known"),
        (
            '```python\n--8<-- "no.py"\n```',
            "docs/index.md:4: the embedded file no.py does not exist",
        ),
    ],
)
def test_an_error_that_stops_the_build_names_its_page(
    tmp_path: Path, wrong: str, message: str
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n{wrong}\n", "utf-8")
    (tmp_path / "mkdocs.yml").write_text(
        "site_name: x\nplugins: [search, worldsize]\n", "utf-8"
    )
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert build.returncode != 0
    assert "index.md" in build.stderr and message in build.stderr
    assert "Traceback" not in build.stderr


@pytest.fixture
def small_site(tmp_path: Path):
    """Write a book of three pages; return a function that builds it and returns a page."""
    for name, text in {
        "mkdocs.yml": "site_name: x\nplugins: [search, worldsize]\n",
        "docs/glossary.md": '# Terms\n\n<div class="glossary" markdown>\n\nrank\n:   A number.\n\n</div>\n',
        "docs/index.md": '# A page\n\nA rank. $x^2$ [Terms](glossary.md#terms)\n\n```python\n--8<-- "a.py"\n```\n',
        "docs/more.md": "# More\n",
        "a.py": "print(1)\n",
        "requirements/test.txt": "torch==2.13.0\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")

    def build() -> str:
        mkdocs.commands.build.build(load_config(str(tmp_path / "mkdocs.yml")))
        return (tmp_path / "site/index.html").read_text("utf-8").partition("<!--\nMkDocs")[0]

    build.folder = tmp_path
    return build


def cached_files(book: Path) -> dict[str, int]:
    return {each.name: each.stat().st_mtime_ns for each in (book / prerender.FOLDER).iterdir()}


def test_a_cached_page_equals_a_new_one(small_site) -> None:
    first = small_site()
    files = cached_files(small_site.folder)
    assert len(files) == 2 * 4
    assert small_site() == first and cached_files(small_site.folder) == files
    for each in (small_site.folder / prerender.FOLDER).iterdir():
        each.write_bytes(each.read_bytes()[:50])  # as on a full disk
    assert small_site() == first


def test_a_build_without_the_cache_makes_the_same_site(
    small_site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # in the front page and the site map
    book, config = small_site.folder, small_site.folder / "mkdocs.yml"
    cached = published(book)
    assert published(book) == cached
    shutil.rmtree(book / ".cache")
    config.write_text(
        config.read_text("utf-8").replace("worldsize", "worldsize: {cache: false}"), "utf-8"
    )
    assert published(book) == cached and not (book / ".cache").exists()


def test_an_unpublished_file_changes_nothing(small_site) -> None:
    """For example, the first command of a learner writes compiled modules into labs/."""
    with (small_site.folder / "mkdocs.yml").open("a", encoding="utf-8") as config:
        config.write("exclude_docs: '*.pyc'\n")
    small_site()
    files = cached_files(small_site.folder)
    (small_site.folder / "docs/start.pyc").touch()
    small_site()
    assert cached_files(small_site.folder) == files


def test_compiled_python_files_are_not_published() -> None:
    """They contain paths of the machine, and every new file would invalidate the page cache."""
    excluded = load_config(str(ROOT / "mkdocs.yml")).exclude_docs
    for place in ("assets", "labs", "labs/launch"):
        assert excluded.match_file(f"{place}/__pycache__/home.cpython-311.pyc")
    assert not excluded.match_file("assets/home.svg")


def test_make_serve_and_make_site_share_one_cache(small_site) -> None:
    """Therefore both share one cache, and neither removes pages of the other."""
    config = small_site.folder / "mkdocs.yml"
    config.write_text(f"{config.read_text()}site_url: https://a.example/b/\n", "utf-8")
    page, files = small_site(), cached_files(small_site.folder)
    served = load_config(str(config))
    served.site_url = "http://127.0.0.1:8000/b/"  # `mkdocs serve` sets this address
    mkdocs.commands.build.build(served, serve_url=served.site_url)
    assert (small_site.folder / "site/index.html").read_text("utf-8").startswith(page)
    assert "https://a.example/b/" in page and cached_files(small_site.folder) == files


@pytest.mark.parametrize(
    ("name", "old", "new", "shown"),
    [
        ("a.py", "print(1)", "print(2222)", "2222"),
        ("docs/index.md", "A rank.", "Another rank.", "Another"),
        ("docs/index.md", "# A page", "---\ntitle: An end\n---\n# A page", "An end"),
        (
            "docs/more.md",
            "# More",
            "# Less",
            ">Less<",
        ),  # a title in the navigation of all pages
        ("docs/glossary.md", "A number.", "Another number.", 'title="Another number."'),
        (
            "mkdocs.yml",
            "site_name: x",
            "use_directory_urls: false\nsite_name: x",
            "glossary.html#",
        ),
    ],
)
def test_a_changed_file_is_built_again(
    small_site, name: str, old: str, new: str, shown: str
) -> None:
    assert shown not in small_site()
    path = small_site.folder / name
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    assert shown in small_site()
    assert len(cached_files(small_site.folder)) == 2 * 4  # unused entries are removed


EXAMPLES = {  # a book with one example of everything that a page can show
    "mkdocs.yml": "site_name: x\nplugins: [worldsize]\n",
    "snippets/t/p.py": '"""It says one."""\n\n\ndef f():\n    print(1)\n',
    "snippets/t/p.cpu.txt": f"{RECORDED}$ python p.py\n1\n$ python q.py\n2\n",
    "snippets/t/r.py": "print(3)\n",
    "snippets/t/p.svg": '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 5"/>',
    "docs/01_a.md": f"""# A: page

## First

{"word " * 500}

```python
--8<-- "snippets/t/p.py:f"
```

```console
--8<-- "snippets/t/p.cpu.txt"
```

![a](../snippets/t/p.svg)
""",
    "docs/index.md": """# {{ programs }} programs

A rank.

<!-- references: entries -->

<!-- track: t rows g -->
""",
    "docs/references.yml": """
topics: {one: {title: One, about: It.}}
orders: []
syllabus: []
entries:
  - {id: a, title: A, by: B, year: 2020, where: C, url: "https://a.example/", kind: post,
     topic: one, priority: must, minutes: 5, basis: opened, focus: So., insight: So., book: so}
""",
    "docs/tracks/t.yml": """
title: T
path: [[one]]
checklist: []
groups:
  - id: g
    parts:
      - {id: one, name: One, minutes: 10, rows: [
          {topic: a, outcome: do a, read: ["01_a#first"], run: p}]}
""",
}


def published(book: Path) -> dict[str, bytes]:
    """Build a book in this process, and return the files of its site by their paths."""
    mkdocs.commands.build.build(load_config(str(book / "mkdocs.yml")))
    site = book / "site"
    files = (each for each in site.rglob("*") if each.is_file() and each.suffix != ".gz")
    return {each.relative_to(site).as_posix(): each.read_bytes() for each in files}


def test_a_rebuild_equals_a_first_build(
    small_site, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change one file after the other in one process, as with `make serve`."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")  # the date of the front page and the sitemap
    book, templates = small_site.folder, small_site.folder / "src/worldsize/site/templates"
    shutil.copytree(ROOT / "src/worldsize/site/templates", templates)
    monkeypatch.setattr(template.TEMPLATES, "loader", jinja2.FileSystemLoader(templates))
    for name, text in EXAMPLES.items():
        (book / name).parent.mkdir(parents=True, exist_ok=True)
        (book / name).write_text(text, "utf-8")
    before = published(book)
    for name, old, new in [
        ("snippets/t/p.py", "print(1)", "print(3 - 2)"),
        ("snippets/t/p.cpu.txt", "\n1\n", "\none\n"),
        ("snippets/gpu.toml", "", '"snippets/t/p.py" = "$ python p.py"\n'),
        ("snippets/t/p.cuda.txt", "", RECORDED + "$ python p.py\neins\n"),
        ("snippets/t/q.py", "", "print(2)\n"),  # the transcript of p.py names this file
        ("snippets/t/q.py", "print(2)", "import r"),  # from now on, p.py also needs r.py
        ("snippets/t/p.svg", "0 0 9 5", "0 0 9 7"),
        ("docs/01_a.md", "# A:", "# B:"),  # links to this page show its title
        ("docs/01_a.md", "word " * 500, "word " * 900),  # the track shows the reading time
        ("docs/glossary.md", "A number.", "Another number."),
        ("docs/references.yml", "title: A", "title: Another"),
        ("docs/tracks/t.yml", "do a", "do b"),
        (
            "src/worldsize/site/templates/program/page.md.jinja",
            "What it prints",
            "What it says",
        ),
        ("src/worldsize/site/templates/transcript.md.jinja", "Needs", "It needs"),
        ("mkdocs.yml", "plugins", "nav: [more.md, index.md]\nplugins"),
    ]:
        text = (book / name).read_text("utf-8") if old else ""
        assert old in text
        (book / name).write_text(text.replace(old, new) or new, "utf-8")
        after, first = published(book), tmp_path_factory.mktemp("first") / "book"
        shutil.copytree(book, first, ignore=shutil.ignore_patterns(".cache", "site"))
        assert before != after == published(first), (name, new)
        before = after


def test_a_build_writes_only_changes_and_removes_outdated_files(small_site) -> None:
    index, site = small_site.folder / "docs/index.md", small_site.folder / "site"
    small_site()
    for name in (".nojekyll", ".git/HEAD", "before/it/index.html"):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).touch()
    files = [each for each in site.rglob("*") if each.is_file()]
    for each in files:
        os.utime(each, (0, 0))
    index.write_text(index.read_text("utf-8") + "\nOne more line.\n", "utf-8")
    assert "One more line." in small_site()
    existing = [each for each in files if each.exists()]
    unchanged = [each for each in existing if not each.stat().st_mtime]
    names = {each.relative_to(site).as_posix() for each in unchanged}
    assert {
        "more/index.html",
        "more/index.md",
        "css/base.css",
        ".nojekyll",
        ".git/HEAD",
    } < names
    assert not {"index.html", "index.md"} & names and not (site / "before").exists()

    (small_site.folder / "docs/more.md").unlink()
    index.write_text("# A page\n\n$$\\foo$$\n", "utf-8")
    with pytest.raises(Abort):
        small_site()
    assert "One more line." in (site / "index.html").read_text("utf-8")
    assert (site / "more/index.html").exists()
    index.write_text("# A page\n", "utf-8")
    small_site()
    assert not (site / "more").exists()


def test_a_page_is_not_cached_if_its_files_changed_during_the_build(
    small_site, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, render = small_site.folder / "a.py", mkdocs.structure.pages.Page.render

    def late(*arguments: object) -> None:
        program.write_text("print(2222)\n")
        render(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prerender.PageCache, "_prerender", lambda *_: None)
        patch.setattr(mkdocs.structure.pages.Page, "render", late)
        assert "2222" in small_site()
    program.write_text("print(1)\n")
    assert "2222" not in small_site()


def test_a_transcript_recorded_during_a_build_is_shown_by_the_next_build(
    small_site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in EXAMPLES.items():
        (small_site.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (small_site.folder / name).write_text(text, "utf-8")
    recorded = small_site.folder / "snippets/t/p.cuda.txt"

    def late(*_: object) -> None:
        recorded.write_text(RECORDED + "$ python p.py\neins\n")

    with monkeypatch.context() as patch:
        patch.setattr(prerender.PageCache, "_prerender", late)
        small_site()
    small_site()
    assert "eins" in (small_site.folder / "site/programs/t/p/index.html").read_text("utf-8")


def test_warnings_are_repeated_in_each_build(small_site, caplog) -> None:
    (small_site.folder / "docs/index.md").write_text("[nowhere](no.md)\n", "utf-8")
    for _ in range(2):
        caplog.clear()
        small_site()
        assert "no.md" in caplog.text


def test_a_broken_link_on_a_cached_page_is_reported(small_site, caplog) -> None:
    index, more = small_site.folder / "docs/index.md", small_site.folder / "docs/more.md"
    config = small_site.folder / "mkdocs.yml"
    config.write_text(config.read_text() + "validation:\n  anchors: warn\n", "utf-8")
    index.write_text("# A page\n\n[More](more.md#more)\n", "utf-8")
    small_site()
    assert "more" not in caplog.text
    more.write_text("# Less\n", "utf-8")
    small_site()
    assert "does not contain an anchor '#more'" in caplog.text
    more.rename(more.with_name("less.md"))
    small_site()
    assert "target 'more.md' is not found" in caplog.text


def test_the_edit_link_of_a_program_page_points_to_the_program(small_site) -> None:
    config = small_site.folder / "mkdocs.yml"
    config.write_text(
        config.read_text() + "repo_url: https://a.example/b\nedit_uri: edit/main/docs/\n"
        f"theme: {{name: material, custom_dir: {ROOT}/overrides}}\n"
    )
    path = small_site.folder / "snippets/t/p.py"
    path.parent.mkdir(parents=True)
    path.write_text("print(1)\n")
    path.with_suffix(".cpu.txt").write_text("$ python p.py\n1\n")
    small_site()
    page = (small_site.folder / "site/programs/t/p/index.html").read_text("utf-8")
    assert "https://a.example/b/edit/main/snippets/t/p.py" in page


# ---- code


def test_adjacent_code_of_the_same_colour_is_one_span() -> None:
    code = 'if a in True:\n    f"a{b}"\n'
    marked = pygments.highlight(code, PythonLexer(), HtmlFormatter(nowrap=True))
    assert html_postprocess.fix_html(f"<pre>{marked}  <i>\n</i></pre>\n  <p>\n\n") == (
        '<pre><span class="k">if</span> a <span class="ow">in</span> True:\n'
        '    f<span class="s2">"a{</span>b<span class="s2">}"</span>\n'
        "  <i>\n</i></pre>\n<p>\n"
    )
    shown = (
        '<span class="go">one</span>\n<span class="go">two</span>\n<span class="gp">$ </span>'
    )
    assert (
        html_postprocess.fix_html(shown)
        == '<span class="go">one\ntwo</span>\n<span class="gp">$ </span>'
    )


# ---- tables


def test_a_table_scrolls_without_a_script(site: Site) -> None:
    page = (site.folder / "11_references/index.html").read_text("utf-8")
    assert "<table>" not in page
    assert '<div class="md-typeset__table"><table class="data' in page
    sheet = next(site.folder.glob("assets/stylesheets/main.*.css")).read_text("utf-8")
    assert ".md-typeset table.data" in sheet and "table:not([class])" not in sheet


# ---- figures


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ('viewBox="0 0 720 334"', 'width="720" height="334"'),
        ('width="504pt" height="288pt" viewBox="0 0 504 288"', 'width="672" height="384"'),
    ],
)
def test_a_figure_has_its_size_in_html(attributes: str, size: str) -> None:
    assert (
        html_postprocess.size_attributes(
            f'<svg xmlns="http://www.w3.org/2000/svg" {attributes}/>'
        )
        == size
    )


# ---- glossary


def test_a_term_is_explained_once_per_section() -> None:
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(
        "## A rank\n\nEach rank, `rank`, [rank](x) and **ranks**; a rank-0 process; frank; zeros.\n\n"
        "## B\n\nRanks. all-reduces.\n",
        extensions=[BookMarkdown()],
    )
    assert re.findall(r"<abbr[^>]*>([^<]*)</abbr>", html) == ["rank", "Ranks", "all-reduces"]


def test_a_page_can_exclude_a_term_from_the_glossary() -> None:
    markdown = pytest.importorskip("markdown")
    convert = markdown.Markdown(extensions=[BookMarkdown()]).convert
    html = convert("<!-- not of the glossary: node -->\n\nA node, a rank.")
    assert re.findall(r"<abbr[^>]*>([^<]*)</abbr>", html) == ["rank"]
    assert "not of" not in html
    with pytest.raises(ValueError, match="excludes rnak, but the glossary has no such term"):
        convert("<!-- not of the glossary: rnak -->")


def test_every_term_has_one_place_and_one_sentence(site: Site) -> None:
    terms = glossary.terms()
    assert terms and all(meaning.endswith(".") for meaning in terms.values())
    ids = site.pages["glossary/"].ids
    assert all(ids[glossary.slug(name.split(" / ")[0])] == 1 for name in glossary.entries())


# ---- colours


def _colours(scheme: str) -> dict[str, str]:
    css = (ROOT / "docs/assets/book.css").read_text("utf-8")
    block = re.search(rf'\[data-md-color-scheme="{scheme}"\] \{{(.*?)\n *\}}', css, re.DOTALL)
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block[1]))


def _contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_text_has_enough_contrast_on_every_background(scheme: str) -> None:
    colours = _colours(scheme)
    papers = [name for name in colours if name.startswith("paper")]
    inks = [name for name in colours if name not in papers and name != "rule"]
    assert papers and inks
    pale = {
        f"{ink} on {paper}: {ratio:.2f}"
        for ink in inks
        for paper in papers
        if (ratio := _contrast(colours[ink], colours[paper])) < 4.5
    }
    assert not pale


@pytest.mark.parametrize(
    "sheet", sorted((ROOT / "docs/assets").glob("*.css")), ids=lambda p: p.name
)
def test_every_rule_of_a_style_sheet_is_closed(sheet: Path) -> None:
    """If one brace is missing, browsers treat all later rules as a part of that rule."""
    depth = 0
    for number, line in enumerate(sheet.read_text("utf-8").splitlines(), start=1):
        if line.startswith("/* ----"):
            assert depth == 0, f"{sheet.name}:{number}: the rule above is not closed"
        code = re.sub(r"/\*.*?\*/", "", line)
        depth += code.count("{") - code.count("}")
        assert depth >= 0, f"{sheet.name}:{number}: this closing brace has no opening brace"
    assert depth == 0, f"{sheet.name}: the last rule has no closing brace"
