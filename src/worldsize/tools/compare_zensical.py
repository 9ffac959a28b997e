"""Zensical: the book, built by what comes after MkDocs: python -m
worldsize.tools.compare_zensical site

The pages are written out as a folder of plain Markdown, with all that they embed and show, and
Zensical makes HTML of them by the same Python-Markdown, with the book's extension of it. The
HTML is then changed as the plugin changes it. What this site lacks, compared with the site that
MkDocs has built, must be exactly what `zensical.toml` lists.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urljoin

import yaml
from mkdocs.config import load_config
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, get_files, set_exclusions
from mkdocs.structure.nav import get_navigation

from worldsize.model import ROOT
from worldsize.model.page import parse
from worldsize.site import html_postprocess, incremental_output, labs, llms_markdown
from worldsize.site.markdown_extension import expand

FOLDER = ROOT / ".cache/zensical"
LIST = ROOT / "src/worldsize/tools/zensical.toml"
CONTENT = re.compile(r'<h1.*?(?=<footer class="page-end"|</article>)', re.DOTALL)
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"}
OF_BUILDER = re.compile(  # of one builder alone, by its nature
    r"(^|/)assets/(images|javascripts|stylesheets)/|^sitemap\.xml|^search(/search_index)?\.json$"
    r"|^https://(squidfunk|zensical)\b"
)


# ---- the folder


def write_out(config: MkDocsConfig) -> Files:
    """Write the book's files into the folder, with the pages' Markdown as readers see it."""
    plugin = config.plugins["worldsize"]
    files = config.plugins.on_files(get_files(config), config=config)
    set_exclusions(files, config)
    plugin.nav = get_navigation(files, config)
    for file in files:
        if file.inclusion.is_excluded():
            continue
        path = FOLDER / "docs" / file.src_uri
        if not file.page:
            incremental_output.write(file.content_bytes, str(path))
            continue
        page, around = file.page, {"page": file.page, "config": config, "files": files}
        page.read_source(config)
        page.markdown = config.plugins.on_page_markdown(page.markdown, **around)
        lines = expand(page.markdown.split("\n"), ROOT)
        page.plain = llms_markdown.text(lines, **around)
        said = yaml.safe_dump(dict(page.meta), allow_unicode=True)
        text = "\n".join(["---", f"{said}---", "", *related(lines, file.src_uri)])
        if labs.is_lab(file):  # mkdocs-jupyter puts the script beside the page
            incremental_output.write(file.content_bytes, str(path.with_suffix("") / path.name))
            text = text.replace(f'href="{path.stem}.', f'href="{path.stem}/{path.stem}.')
        incremental_output.write(text.encode(), str(path.with_suffix(".md")))
    return files


def related(lines: list[str], at: str) -> list[str]:
    """The lines of a page, whose links lead from its place in the folder."""
    folder = posixpath.dirname(at)

    def link(found: re.Match[str]) -> str:
        path, rest = re.fullmatch(r"([^#?]*)(.*)", found[0]).groups()
        place = posixpath.normpath(posixpath.join("/", folder, path))[1:]
        lab = labs.LAB.fullmatch(place)
        if ":" in path or not (lab or path.startswith("/")):
            return found[0]
        place = place.removesuffix("py") + "md" if lab else place
        return posixpath.relpath(place, folder or ".") + rest

    page = parse("\n".join(lines))
    for number, line in page.prose():
        page.lines[number - 1] = llms_markdown.prose(
            line, lambda text: llms_markdown.LINK.sub(link, text)
        )
    return page.lines


def settings() -> str:
    """The book's settings, for the folder, in which a lab is Markdown."""
    own = (ROOT / "mkdocs.yml").read_text("utf-8")
    said = yaml.safe_load(labs.LAB.sub(lambda lab: lab[0].removesuffix("py") + "md", own))
    del said["exclude_docs"]
    said["plugins"] = [each for each in said["plugins"] if "search" in each]
    said["theme"] |= {"custom_dir": str(ROOT / "overrides"), "variant": "classic"}
    said["markdown_extensions"].append("worldsize")
    return yaml.safe_dump(said, sort_keys=False)


def build() -> Path:
    """Build the book with Zensical; the folder of the site."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    site, own = FOLDER / "site", FOLDER / "mkdocs.yml"
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site))
    config.plugins["worldsize"].config.cache = False
    config = config.plugins.on_config(config)
    files = write_out(config)
    own.write_text(settings(), "utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "-f", own], cwd=ROOT, check=True)
    finish(site, files, config)
    return site


def finish(site: Path, files: Files, config: MkDocsConfig) -> None:
    """Change the HTML of the site as the plugin changes the HTML of MkDocs."""
    plugin = config.plugins["worldsize"]
    for file in files.documentation_pages():
        path, page = Path(file.abs_dest_path), file.page
        html = path.read_text("utf-8")
        plugin.index.add(page, CONTENT.search(html)[0])
        html = html_postprocess.with_sizes(
            html_postprocess.with_drawings(html, page, files), page, files
        )
        html = html_postprocess.fixed(html)
        path.write_text(html, "utf-8")
        llms_markdown.write(page)
    llms_markdown.write_map(plugin.nav, config)
    plugin.index.generate_search_index()
    of_theme = [
        File(each.relative_to(site).as_posix(), str(site), str(site), True)
        for each in site.glob("assets/*/**/*.min.*")
    ]
    html_postprocess.fit(of_theme)
    for file in of_theme:
        incremental_output.write(file.content_bytes, file.abs_dest_path)


# ---- the comparison


class Part(NamedTuple):
    """Something that a site has."""

    kind: str
    page: str
    what: str = ""


class Reader(HTMLParser):
    """Of a page: what its head says, where it leads, and each element, block of code and word
    of what stands in `article`."""

    def __init__(self, page: str, html: str) -> None:
        super().__init__()
        self.page, self.inside, self.code = page, [], ""
        self.address = f"/{page.removesuffix('index.html')}"
        self.found = Counter[Part]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.inside.append(tag)
        of = {name: value or "" for name, value in attrs}
        for name in {"href", "src"} & of.keys():
            of[name] = urljoin(self.address, of[name])
            if OF_BUILDER.search(of[name]):
                return
        if "article" in self.inside and "pre" not in self.inside[:-1]:
            self.add("anchor", of.pop("id", ""))
            if "svg" not in self.inside[:-1]:
                self.add(tag, " ".join(f'{name}="{of[name]}"' for name in sorted(of)))
        elif tag in ("link", "meta") and "generator" not in of.values():
            self.add(tag, " ".join(f'{name}="{of[name]}"' for name in sorted(of)))
        elif tag == "a" and "md-skip" not in of.get("class", ""):
            self.found[Part(tag, self.page, of.get("href", ""))] = 1  # however often

    def handle_endtag(self, tag: str) -> None:
        if tag == "pre":
            self.add("code", self.code)
            self.code = ""
        while tag in self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, text: str) -> None:
        if self.inside[-1:] == ["script"]:
            for worker in re.findall(r'"search": ?"([^"]+)"', text):
                self.add("search", urljoin(self.address, worker))
        elif "pre" in self.inside:
            self.code += text
        elif "article" in self.inside or "title" in self.inside:
            for word in text.split():
                self.add("word", word)

    def add(self, kind: str, what: str) -> None:
        self.found[Part(kind, self.page, what)] += bool(what) or kind != "anchor"


def parts(site: Path) -> Iterator[tuple[str, Counter[Part]]]:
    """What each file of a site has, by its path."""
    for path in sorted(each for each in site.rglob("*") if each.is_file()):
        name = path.relative_to(site).as_posix()
        if path.suffix == ".html":
            yield name, Reader(name, path.read_text("utf-8")).found
        elif not OF_BUILDER.search(name):
            yield name, Counter([Part("bytes", name, str(hash(path.read_bytes())))])


def missing(here: Path, there: Path) -> list[Part]:
    """What the second site has, and the first one lacks."""
    found, gaps = dict(parts(here)), []
    for name, wanted in parts(there):
        if name not in found:
            gaps.append(Part("file", name))
        else:
            gaps += wanted - found[name]
    return gaps


def imports(root: Path) -> Part:
    """What of the book needs MkDocs, whatever builds the site."""
    modules = sorted((root / "src/worldsize/site").glob("*.py"))
    texts = {path.stem: path.read_text("utf-8") for path in modules}
    need = re.compile(r"^(from|import) mkdocs\b", re.MULTILINE)
    return Part(
        "import",
        "src/worldsize/site",
        " ".join(filter(lambda of: need.search(texts[of]), texts)),
    )


def known(text: str) -> dict[tuple[str, str], str]:
    """The listed differences: the reason of each, by its kind and by where and what it is."""
    return {(row["kind"], row["what"]): row["why"] for row in tomllib.loads(text)["difference"]}


def judged(gaps: list[Part], rows: dict[tuple[str, str], str]) -> list[str]:
    """What is missing and in no row, and the rows of which nothing is missing."""
    left, wrong = dict(rows), []
    for kind, *rest in gaps:
        what = " ".join(filter(None, rest))
        at = [row for row in rows if row[0] == kind and fnmatchcase(what, row[1])]
        for row in at:
            left.pop(row, None)
        if not at:
            wrong.append(f"lost: {kind} {what[:120]}")
    return wrong + [f"no longer missing: {kind} {what}" for kind, what in left]


def main(other: str) -> None:
    gaps = [*missing(build(), Path(other)), imports(ROOT)]
    rows = known(LIST.read_text("utf-8"))
    for (kind, what), why in rows.items():
        print(f"{kind} {what}: {why}")
    wrong = judged(gaps, rows)
    if wrong:
        sys.exit("\n".join([*wrong[:50], f"{len(wrong)} differences do not match {LIST.name}"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
