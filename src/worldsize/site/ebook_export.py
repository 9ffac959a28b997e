"""Export the book and each of its tracks as PDF and EPUB.

    PYTHONPATH=src python -m worldsize.site.ebook_export site

Each volume is made from the Markdown of pages that `llms_txt` has written into the built site,
in the order of the navigation. pandoc converts it to an EPUB and to a Typst file, and Typst
converts this file to a PDF. A link to a page of the same volume, or to a section of such a
page, points to a heading of the volume. The folder of the volumes also gets the zip file of the
site.
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
INPUT_FORMAT = "commonmark_x"  # Markdown with formulas, tables, and ids of headings
FONTS = Path(ziafont.__file__).parent / "fonts"  # with symbols that Typst's own fonts lack
STYLE = """
#show raw.where(block: true): set text(size: 7.6pt)
#show raw.where(block: true): block.with(fill: luma(246), inset: 5pt, radius: 2pt, width: 100%)
#show heading.where(level: 1): it => { pagebreak(weak: true); it }
#show link: set text(fill: rgb("#00558a"))
"""
CSS = "pre { white-space: pre-wrap; font-size: 0.8em } img { max-width: 100% }"
METADATA = {
    "author": "The World Size authors",
    "lang": "en",
    "papersize": "a4",
    "margin": {"x": "1.8cm", "y": "2cm"},
    "fontsize": "10pt",
}


@dataclass
class Site:
    """A built site in a folder."""

    folder: Path

    @cached_property
    def pages(self) -> dict[str, str]:
        """Return the titles of all pages by their addresses, in the order of the navigation."""
        found = LISTED.findall((self.folder / "llms.txt").read_text("utf-8"))
        return {address: title for title, address in found}

    @cached_property
    def address(self) -> str:
        """Return the address of the home page."""
        return min(self.pages, key=len)

    def file(self, page: str, name: str) -> Path:
        """Return the path of a file in the folder of a page."""
        return self.folder / page.removeprefix(self.address) / name

    def markdown(self, page: str) -> str:
        """Return the Markdown of a page."""
        return self.file(page, "index.md").read_text("utf-8")

    def headings(self, page: str) -> dict[str, str]:
        """Return, for each id on a page, the id of the heading above it."""
        _, _, html = self.file(page, "index.html").read_text("utf-8").partition("<article")
        under, last = {}, ""
        for tag, name in ID.findall(html.partition("</article>")[0]):
            if re.fullmatch("h[1-6]", tag):
                last = last if last and tag == "h1" else name
            under[name] = name if re.fullmatch("h[1-6]", tag) else last
        return under

    def track_pages(self, page: str) -> list[str]:
        """Return the page of a track and all pages that it links to, without the home page."""
        targets = {page, *re.findall(r"\]\(([^)\s#?]+)", self.markdown(page))}
        return [each for each in self.pages if each in targets and each != self.address]


def heading_id(site: Site, page: str, name: str) -> str:
    """Return the id of a heading that is unique in a volume. `name` is its id on the page."""
    path = page.removeprefix(site.address).strip("/").replace("/", "-")
    return f"{path or 'book'}--{name}"


def markdown(site: Site, pages: list[str]) -> str:
    """Return the Markdown of a volume: its pages, with links between them."""
    under = {page: site.headings(page) for page in pages}

    def link(found: re.Match[str]) -> str:
        page, _, name = found[1].partition("#")
        if page not in under:
            return found[0]
        heading = under[page].get(name) or next(filter(None, under[page].values()))
        return f"](#{heading_id(site, page, heading)})"

    text = []
    for page in pages:
        here = parse(site.markdown(page))
        names = iter(dict.fromkeys(each for each in under[page].values() if each))
        for number, line in enumerate(here.lines, 1):
            if number not in here.code:
                line = re.sub(r"\]\((https?://[^)\s?]+)\)", link, line)
                line = re.sub(rf"(!\[.*?\]\(){site.address}", rf"\1{site.folder}/", line)
                if re.match(r"\s*#{1,6} ", line):
                    line += f" {{#{heading_id(site, page, next(names))}}}"
                elif line.startswith("The Markdown of <"):
                    line = f"<{page}>"
            text.append(line)
        text.append("")
    return "\n".join(text)


def write_volume(site: Site, pages: list[str], title: str, to: Path) -> None:
    """Write a volume as PDF and EPUB, to the path `to` with the suffixes .pdf and .epub."""
    with tempfile.TemporaryDirectory(prefix="ebook-") as folder:
        parts = {
            "text.md": markdown(site, pages),
            "style.typ": STYLE,
            "book.css": CSS,
            "metadata.json": json.dumps({"title": title, **METADATA}),
        }
        text, style, css, metadata = (Path(folder, name) for name in parts)
        for name, part in parts.items():
            Path(folder, name).write_text(part, "utf-8")
        options = ["--standalone", "--toc", "--toc-depth=2", f"--metadata-file={metadata}"]
        formats = {
            "epub3": (to.with_suffix(".epub"), ["--mathml", "--split-level=1", f"--css={css}"]),
            "typst": (Path(folder, "text.typ"), [f"--include-in-header={style}"]),
        }
        for output_format, (file, more) in formats.items():
            pypandoc.convert_file(
                str(text),
                output_format,
                format=INPUT_FORMAT,
                outputfile=str(file),
                extra_args=[*options, *more],
            )
        typst.compile(
            formats["typst"][0],
            output=to.with_suffix(".pdf"),
            root="/",
            font_paths=[FONTS],
            ignore_system_fonts=True,
        )


def volumes(site: Site) -> dict[str, tuple[str, list[str]]]:
    """Return the title and the pages of each volume, by the name of its file."""
    excluded = f"{site.address}contributing/"
    pages = [page for page in site.pages if not page.startswith(excluded)]
    found = {"world-size": ("World Size", pages)}
    for page, title in site.pages.items():
        if page.startswith(f"{site.address}tracks/"):
            found[page.split("/")[-2]] = (f"World Size: {title}", site.track_pages(page))
    return found


def main(folder: str) -> None:
    site = Site(Path(folder).resolve())
    (site.folder / "book").mkdir(exist_ok=True)
    for name, (title, pages) in volumes(site).items():
        write_volume(site, pages, title, site.folder / "book" / name)
        print(f"{name}.pdf and {name}.epub contain {len(pages)} pages of the site", flush=True)
    offline_zip.pack(site.folder, site.folder / offline_zip.FILE)
    print(f"{Path(offline_zip.FILE).name} contains the whole site")


if __name__ == "__main__":
    main(*sys.argv[1:])
