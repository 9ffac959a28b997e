"""Bound: the book and each of its tracks as PDF and EPUB: python -m worldsize.site.ebook_export
site

Both are made from the Markdown that lies beside each page of a built site (`plain.py`), in the
order of its navigation: pandoc makes the EPUB, and the text that Typst sets as PDF. A link to a
page, or to anything on a page, that is in the same volume stays inside it. Beside the volumes
lies the site itself, packed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pypandoc
import typst
import ziafont

from worldsize.model.page import parse
from worldsize.site import offline_zip

LISTED = re.compile(r"^- \[(.+)\]\((\S+?)index\.md\)", re.MULTILINE)
ID = re.compile(r'<(\w+)\b[^>]*?\bid="?([^"\s>]+)')
READ = "commonmark_x"  # Markdown with formulas, tables, and names of headings
FONTS = Path(ziafont.__file__).parent / "fonts"  # with the signs that Typst's own fonts lack
STYLE = """
#show raw.where(block: true): set text(size: 7.6pt)
#show raw.where(block: true): block.with(fill: luma(246), inset: 5pt, radius: 2pt, width: 100%)
#show heading.where(level: 1): it => { pagebreak(weak: true); it }
#show link: set text(fill: rgb("#00558a"))
"""
CSS = "pre { white-space: pre-wrap; font-size: 0.8em } img { max-width: 100% }"
SAID = {
    "author": "The World Size authors",
    "lang": "en",
    "papersize": "a4",
    "margin": {"x": "1.8cm", "y": "2cm"},
    "fontsize": "10pt",
}


@dataclass
class Site:
    """A built site."""

    folder: Path

    @cached_property
    def pages(self) -> dict[str, str]:
        """The titles of the pages of the book by address, in the navigation's order."""
        found = LISTED.findall((self.folder / "llms.txt").read_text("utf-8"))
        return {address: title for title, address in found}

    @cached_property
    def address(self) -> str:
        return min(self.pages, key=len)  # of its home page

    def file(self, page: str, name: str) -> Path:
        return self.folder / page.removeprefix(self.address) / name

    def plain(self, page: str) -> str:
        return self.file(page, "index.md").read_text("utf-8")

    def headings(self, page: str) -> dict[str, str]:
        """By what may be linked to on a page, the name of the heading that it stands under."""
        _, _, html = self.file(page, "index.html").read_text("utf-8").partition("<article")
        under, last = {}, ""
        for tag, name in ID.findall(html.partition("</article>")[0]):
            if re.fullmatch("h[1-6]", tag):
                last = last if last and tag == "h1" else name
            under[name] = name if re.fullmatch("h[1-6]", tag) else last
        return under

    def linked(self, page: str) -> list[str]:
        """A page, and those of the book that it leads to: what a track consists of."""
        led = {page, *re.findall(r"\]\(([^)\s#?]+)", self.plain(page))}
        return [each for each in self.pages if each in led and each != self.address]


def label(site: Site, page: str, name: str) -> str:
    """The name of a heading in a volume, in which pages share one space of names."""
    place = page.removeprefix(site.address).strip("/").replace("/", "-")
    return f"{place or 'book'}--{name}"


def markdown(site: Site, pages: list[str]) -> str:
    """The pages as one text."""
    under = {page: site.headings(page) for page in pages}

    def link(found: re.Match[str]) -> str:
        page, _, name = found[1].partition("#")
        if page not in under:
            return found[0]
        heading = under[page].get(name) or next(filter(None, under[page].values()))
        return f"](#{label(site, page, heading)})"

    text = []
    for page in pages:
        here = parse(site.plain(page))
        names = iter(dict.fromkeys(each for each in under[page].values() if each))
        for number, line in enumerate(here.lines, 1):
            if number not in here.code:
                line = re.sub(r"\]\((https?://[^)\s?]+)\)", link, line)
                line = re.sub(rf"(!\[.*?\]\(){site.address}", rf"\1{site.folder}/", line)
                if re.match(r"\s*#{1,6} ", line):
                    line += f" {{#{label(site, page, next(names))}}}"
                elif line.startswith("The Markdown of <"):
                    line = f"<{page}>"
            text.append(line)
        text.append("")
    return "\n".join(text)


def bind(site: Site, pages: list[str], title: str, to: Path) -> None:
    """Write a volume as `to` with the endings .pdf and .epub."""
    with tempfile.TemporaryDirectory(prefix="bound-") as folder:
        parts = {
            "text.md": markdown(site, pages),
            "style.typ": STYLE,
            "book.css": CSS,
            "said.json": json.dumps({"title": title, **SAID}),
        }
        text, style, css, about = (Path(folder, name) for name in parts)
        for name, part in parts.items():
            Path(folder, name).write_text(part, "utf-8")
        said = ["--standalone", "--toc", "--toc-depth=2", f"--metadata-file={about}"]
        kinds = {
            "epub3": (to.with_suffix(".epub"), ["--mathml", "--split-level=1", f"--css={css}"]),
            "typst": (Path(folder, "text.typ"), [f"--include-in-header={style}"]),
        }
        for kind, (file, more) in kinds.items():
            pypandoc.convert_file(
                str(text), kind, format=READ, outputfile=str(file), extra_args=[*said, *more]
            )
        typst.compile(
            kinds["typst"][0],
            output=to.with_suffix(".pdf"),
            root="/",
            font_paths=[FONTS],
            ignore_system_fonts=True,
        )


def volumes(site: Site) -> dict[str, tuple[str, list[str]]]:
    """The titles and pages of the volumes, by the names of their files."""
    own = f"{site.address}contributing/"  # for those who change the book
    pages = [page for page in site.pages if not page.startswith(own)]
    every = {"world-size": ("World Size", pages)}
    for page, title in site.pages.items():
        if page.startswith(f"{site.address}tracks/"):
            every[page.split("/")[-2]] = (f"World Size: {title}", site.linked(page))
    return every


def main(folder: str) -> None:
    site = Site(Path(folder).resolve())
    (site.folder / "book").mkdir(exist_ok=True)
    for name, (title, pages) in volumes(site).items():
        bind(site, pages, title, site.folder / "book" / name)
        print(f"{name}.pdf and {name}.epub: {len(pages)} pages of the site", flush=True)
    offline_zip.pack(site.folder, site.folder / offline_zip.FILE)
    print(f"{Path(offline_zip.FILE).name}: the site")


if __name__ == "__main__":
    main(*sys.argv[1:])
