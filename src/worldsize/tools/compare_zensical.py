"""Build the book with Zensical, the successor of MkDocs, and compare the two sites.

    PYTHONPATH=src python -m worldsize.tools.compare_zensical site

The module writes the pages into a folder as plain Markdown, with everything that they embed.
Zensical converts them to HTML with the same Python-Markdown and with the book's extension. The
module then makes the same changes to the HTML that the plugin makes in a build with MkDocs. The
differences between the two sites must be exactly those that `zensical.toml` lists.
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
from worldsize.site import html_postprocess, incremental_output, labs, llms_txt
from worldsize.site.markdown_extension import expand

FOLDER = ROOT / ".cache/zensical"
LIST = ROOT / "src/worldsize/tools/zensical.toml"
CONTENT = re.compile(r'<h1.*?(?=<footer class="page-end"|</article>)', re.DOTALL)
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "wbr"}
BUILDER_FILES = re.compile(  # files and links that only one of the two builders creates
    r"(^|/)assets/(images|javascripts|stylesheets)/|^sitemap\.xml|^search(/search_index)?\.json$"
    r"|^https://(squidfunk|zensical)\b"
)


# ---- the folder of Markdown files


def write_out(config: MkDocsConfig) -> Files:
    """Write the files of the book into the folder, with the embeds of pages resolved."""
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
        page.plain_markdown = llms_txt.plain_markdown(lines, **around)
        meta = yaml.safe_dump(dict(page.meta), allow_unicode=True)
        text = "\n".join(["---", f"{meta}---", "", *relative_links(lines, file.src_uri)])
        if labs.is_lab(file):  # mkdocs-jupyter copies the script next to the page
            incremental_output.write(file.content_bytes, str(path.with_suffix("") / path.name))
            text = text.replace(f'href="{path.stem}.', f'href="{path.stem}/{path.stem}.')
        incremental_output.write(text.encode(), str(path.with_suffix(".md")))
    return files


def relative_links(lines: list[str], at: str) -> list[str]:
    """Return the lines of a page, with links relative to the file `at` in the folder."""
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
        page.lines[number - 1] = llms_txt.change_prose(
            line, lambda text: llms_txt.LINK.sub(link, text)
        )
    return page.lines


def settings() -> str:
    """Return the book's settings for the folder, in which labs are Markdown files."""
    own = (ROOT / "mkdocs.yml").read_text("utf-8")
    values = yaml.safe_load(labs.LAB.sub(lambda lab: lab[0].removesuffix("py") + "md", own))
    del values["exclude_docs"]
    values["plugins"] = [each for each in values["plugins"] if "search" in each]
    values["theme"] |= {"custom_dir": str(ROOT / "overrides"), "variant": "classic"}
    values["markdown_extensions"].append("worldsize")
    return yaml.safe_dump(values, sort_keys=False)


def build() -> Path:
    """Build the book with Zensical, and return the folder of the site."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    site, own = FOLDER / "site", FOLDER / "mkdocs.yml"
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site))
    config.plugins["worldsize"].config.cache = False
    config = config.plugins.on_config(config)
    files = write_out(config)
    own.write_text(settings(), "utf-8")
    subprocess.run([sys.executable, "-m", "zensical", "build", "-f", own], cwd=ROOT, check=True)
    postprocess(site, files, config)
    return site


def postprocess(site: Path, files: Files, config: MkDocsConfig) -> None:
    """Change the HTML of the site in the same way as the plugin changes the site of MkDocs."""
    plugin = config.plugins["worldsize"]
    for file in files.documentation_pages():
        path, page = Path(file.abs_dest_path), file.page
        html = path.read_text("utf-8")
        plugin.index.add(page, CONTENT.search(html)[0])
        html = html_postprocess.with_sizes(
            html_postprocess.with_drawings(html, page, files), page, files
        )
        html = html_postprocess.fix_html(html)
        path.write_text(html, "utf-8")
        llms_txt.write(page)
    llms_txt.write_index(plugin.nav, config)
    plugin.index.generate_search_index()
    of_theme = [
        File(each.relative_to(site).as_posix(), str(site), str(site), True)
        for each in site.glob("assets/*/**/*.min.*")
    ]
    html_postprocess.adapt_theme_files(theme_files)
    for file in of_theme:
        incremental_output.write(file.content_bytes, file.abs_dest_path)


# ---- the comparison


class Part(NamedTuple):
    """An element, a word, a file or another part of a site."""

    kind: str
    page: str
    what: str = ""


class Reader(HTMLParser):
    """Collects the parts of a page.

    These are the tags of its head, the targets of its links, and the elements, code blocks and
    words of its `article`.
    """

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
            if BUILDER_FILES.search(of[name]):
                return
        if "article" in self.inside and "pre" not in self.inside[:-1]:
            self.add("anchor", of.pop("id", ""))
            if "svg" not in self.inside[:-1]:
                self.add(tag, " ".join(f'{name}="{of[name]}"' for name in sorted(of)))
        elif tag in ("link", "meta") and "generator" not in of.values():
            self.add(tag, " ".join(f'{name}="{of[name]}"' for name in sorted(of)))
        elif tag == "a" and "md-skip" not in of.get("class", ""):
            self.found[Part(tag, self.page, of.get("href", ""))] = (
                1  # repeated links count once
            )

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
    """Yield the path and the parts of each file of a site."""
    for path in sorted(each for each in site.rglob("*") if each.is_file()):
        name = path.relative_to(site).as_posix()
        if path.suffix == ".html":
            yield name, Reader(name, path.read_text("utf-8")).found
        elif not BUILDER_FILES.search(name):
            yield name, Counter([Part("bytes", name, str(hash(path.read_bytes())))])


def missing(here: Path, there: Path) -> list[Part]:
    """Return the parts of the second site that are missing in the first one."""
    found, gaps = dict(parts(here)), []
    for name, wanted in parts(there):
        if name not in found:
            gaps.append(Part("file", name))
        else:
            gaps += wanted - found[name]
    return gaps


def mkdocs_imports(root: Path) -> Part:
    """Return, as one part, the names of the modules in `worldsize.site` that import MkDocs."""
    modules = sorted((root / "src/worldsize/site").glob("*.py"))
    texts = {path.stem: path.read_text("utf-8") for path in modules}
    need = re.compile(r"^(from|import) mkdocs\b", re.MULTILINE)
    return Part(
        "import",
        "src/worldsize/site",
        " ".join(filter(lambda of: need.search(texts[of]), texts)),
    )


def listed_differences(text: str) -> dict[tuple[str, str], str]:
    """Return the reason of each difference in a TOML text, by its kind and its pattern."""
    return {(row["kind"], row["what"]): row["why"] for row in tomllib.loads(text)["difference"]}


def unlisted_differences(gaps: list[Part], rows: dict[tuple[str, str], str]) -> list[str]:
    """Return a message for each difference without a row, and for each row without one."""
    left, wrong = dict(rows), []
    for kind, *rest in gaps:
        what = " ".join(filter(None, rest))
        at = [row for row in rows if row[0] == kind and fnmatchcase(what, row[1])]
        for row in at:
            left.pop(row, None)
        if not at:
            wrong.append(f"missing, but not listed: {kind} {what[:120]}")
    return wrong + [f"listed, but not missing: {kind} {what}" for kind, what in left]


def main(other: str) -> None:
    gaps = [*missing(build(), Path(other)), mkdocs_imports(ROOT)]
    rows = listed_differences(LIST.read_text("utf-8"))
    for (kind, what), why in rows.items():
        print(f"{kind} {what}: {why}")
    wrong = unlisted_differences(gaps, rows)
    if wrong:
        sys.exit(
            "\n".join(
                [
                    *wrong[:50],
                    f"{len(wrong)} lines: correct the site or update {LIST.relative_to(ROOT)}",
                ]
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
