"""Build the book with Zensical, the successor of MkDocs, and compare the two sites.

    PYTHONPATH=src python -m worldsize.tools.compare_zensical site

This program writes the pages into a folder as Markdown, with all embeds replaced. Zensical
converts them to HTML with the same Python-Markdown and with the book's extension. The program
then makes the same changes to the HTML that the plugin makes in a build with MkDocs. The
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


def write_markdown(config: MkDocsConfig) -> Files:
    """Write the files of the book into the folder, with the embeds of pages replaced."""
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
        page, arguments = file.page, {"page": file.page, "config": config, "files": files}
        page.read_source(config)
        page.markdown = config.plugins.on_page_markdown(page.markdown, **arguments)
        lines = expand(page.markdown.split("\n"), ROOT)
        page.plain_markdown = llms_txt.plain_markdown(lines, **arguments)
        meta = yaml.safe_dump(dict(page.meta), allow_unicode=True)
        text = "\n".join(["---", f"{meta}---", "", *relative_links(lines, file.src_uri)])
        if labs.is_lab(file):  # mkdocs-jupyter copies the script next to the page
            incremental_output.write(file.content_bytes, str(path.with_suffix("") / path.name))
            text = text.replace(f'href="{path.stem}.', f'href="{path.stem}/{path.stem}.')
        incremental_output.write(text.encode(), str(path.with_suffix(".md")))
    return files


def relative_links(lines: list[str], uri: str) -> list[str]:
    """Return the lines of a page, with links relative to the file `uri` in the folder."""
    folder = posixpath.dirname(uri)

    def link(found: re.Match[str]) -> str:
        path, rest = re.fullmatch(r"([^#?]*)(.*)", found[0]).groups()
        target = posixpath.normpath(posixpath.join("/", folder, path))[1:]
        lab = labs.LAB.fullmatch(target)
        if ":" in path or not (lab or path.startswith("/")):
            return found[0]
        target = target.removesuffix("py") + "md" if lab else target
        return posixpath.relpath(target, folder or ".") + rest

    page = parse("\n".join(lines))
    for number, line in page.prose():
        page.lines[number - 1] = llms_txt.change_prose(
            line, lambda text: llms_txt.LINK.sub(link, text)
        )
    return page.lines


def settings() -> str:
    """Return the text of mkdocs.yml for the folder, in which labs are Markdown files."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    values = yaml.safe_load(labs.LAB.sub(lambda lab: lab[0].removesuffix("py") + "md", text))
    del values["exclude_docs"]
    values["plugins"] = [each for each in values["plugins"] if "search" in each]
    values["theme"] |= {"custom_dir": str(ROOT / "overrides"), "variant": "classic"}
    values["markdown_extensions"].append("worldsize")
    return yaml.safe_dump(values, sort_keys=False)


def build() -> Path:
    """Build the book with Zensical, and return the folder of the site."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    site, settings_file = FOLDER / "site", FOLDER / "mkdocs.yml"
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site))
    config.plugins["worldsize"].config.cache = False
    config = config.plugins.on_config(config)
    files = write_markdown(config)
    settings_file.write_text(settings(), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "-f", settings_file]
    subprocess.run(command, cwd=ROOT, check=True)
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
    theme_files = [
        File(each.relative_to(site).as_posix(), str(site), str(site), True)
        for each in site.glob("assets/*/**/*.min.*")
    ]
    html_postprocess.adapt_theme_files(theme_files)
    for file in theme_files:
        incremental_output.write(file.content_bytes, file.abs_dest_path)


# ---- the comparison


class Part(NamedTuple):
    """A part of a site, such as an element, a word or a file."""

    kind: str
    page: str
    what: str = ""


class Reader(HTMLParser):
    """A parser that counts the parts of a page.

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
        values = {name: value or "" for name, value in attrs}
        for name in {"href", "src"} & values.keys():
            values[name] = urljoin(self.address, values[name])
            if BUILDER_FILES.search(values[name]):
                return
        if "article" in self.inside and "pre" not in self.inside[:-1]:
            self.add("anchor", values.pop("id", ""))
            if "svg" not in self.inside[:-1]:
                self.add(tag, " ".join(f'{name}="{values[name]}"' for name in sorted(values)))
        elif tag in ("link", "meta") and "generator" not in values.values():
            self.add(tag, " ".join(f'{name}="{values[name]}"' for name in sorted(values)))
        elif tag == "a" and "md-skip" not in values.get("class", ""):
            link = Part(tag, self.page, values.get("href", ""))
            self.found[link] = 1  # repeated links count once

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
        """Count a part of the page, unless it is an anchor without an id."""
        self.found[Part(kind, self.page, what)] += bool(what) or kind != "anchor"


def parts(site: Path) -> Iterator[tuple[str, Counter[Part]]]:
    """Yield the path and the parts of each file of a site."""
    for path in sorted(each for each in site.rglob("*") if each.is_file()):
        name = path.relative_to(site).as_posix()
        if path.suffix == ".html":
            yield name, Reader(name, path.read_text("utf-8")).found
        elif not BUILDER_FILES.search(name):
            yield name, Counter([Part("bytes", name, str(hash(path.read_bytes())))])


def missing(site: Path, expected: Path) -> list[Part]:
    """Return the parts of the site `expected` that are missing in `site`."""
    found, gaps = dict(parts(site)), []
    for name, expected_parts in parts(expected):
        if name not in found:
            gaps.append(Part("file", name))
        else:
            gaps += expected_parts - found[name]
    return gaps


def mkdocs_imports(root: Path) -> Part:
    """Return, as one part, the names of the modules in `worldsize.site` that import MkDocs."""
    modules = sorted((root / "src/worldsize/site").glob("*.py"))
    texts = {path.stem: path.read_text("utf-8") for path in modules}
    pattern = re.compile(r"^(from|import) mkdocs\b", re.MULTILINE)
    return Part(
        "import",
        "src/worldsize/site",
        " ".join(name for name, text in texts.items() if pattern.search(text)),
    )


def listed_differences(text: str) -> dict[tuple[str, str], str]:
    """Return the reason of each difference in a TOML text, by its kind and its pattern."""
    return {(row["kind"], row["what"]): row["why"] for row in tomllib.loads(text)["difference"]}


def unlisted_differences(gaps: list[Part], rows: dict[tuple[str, str], str]) -> list[str]:
    """Return a message for each difference without a row, and each row without a difference."""
    unused, messages = dict(rows), []
    for kind, *rest in gaps:
        what = " ".join(filter(None, rest))
        matching = [row for row in rows if row[0] == kind and fnmatchcase(what, row[1])]
        for row in matching:
            unused.pop(row, None)
        if not matching:
            messages.append(f"missing, but not listed: {kind} {what[:120]}")
    return messages + [f"listed, but not missing: {kind} {what}" for kind, what in unused]


def main(mkdocs_site: str) -> None:
    """Compare Zensical's site with a site by MkDocs; exit with messages if they differ."""
    gaps = [*missing(build(), Path(mkdocs_site)), mkdocs_imports(ROOT)]
    rows = listed_differences(LIST.read_text("utf-8"))
    for (kind, what), why in rows.items():
        print(f"{kind} {what}: {why}")
    messages = unlisted_differences(gaps, rows)
    if messages:
        summary = (
            f"{len(messages)} differences do not agree with {LIST.relative_to(ROOT)}: "
            "correct the site or update this file"
        )
        sys.exit("\n".join([*messages[:50], summary]))


if __name__ == "__main__":
    main(*sys.argv[1:])
