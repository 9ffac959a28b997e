"""Tests of the PDF and EPUB export: the content of a chapter, and the targets of its links."""

import re
import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pypdf
import pytest
from conftest import ROOT, SITE_WITHOUT_COMMENTS

from worldsize.model.page import parse
from worldsize.site import ebook_export

INPUTS = SITE_WITHOUT_COMMENTS


@pytest.fixture(scope="module")
def site(built_site: Path) -> ebook_export.Site:
    return ebook_export.Site(built_site)


@pytest.fixture(scope="module")
def chapter(site: ebook_export.Site) -> list[str]:
    return [page for page in site.pages if "/02_" in page]


@pytest.fixture(scope="module")
def volume(site: ebook_export.Site, chapter: list[str], tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("volume") / "two"
    ebook_export.write_volume(site, chapter, "Chapter 02", path)
    return path


def count(site: ebook_export.Site, chapter: list[str], pattern: str) -> int:
    """Return how often a pattern occurs in the prose of a chapter."""
    pages = map(parse, map(site.markdown, chapter))
    prose = "\n".join(line for page in pages for _, line in page.prose())
    return len(re.findall(pattern, prose))


def test_a_pdf_is_complete_and_its_links_stay_inside(site, chapter, volume: Path) -> None:
    pdf = pypdf.PdfReader(volume.with_suffix(".pdf"))
    assert len(pdf.pages) > len(chapter)
    text = "\n".join(page.extract_text() for page in pdf.pages)
    assert "\ufffd" not in text and "$ torchrun --nproc-per-node=4 naive.py" in text
    inside = count(site, chapter, rf"\]\((?:{'|'.join(chapter)})[#)]")
    links = [each.get_object() for page in pdf.pages for each in page.get("/Annots", ())]
    assert inside and sum("/Dest" in each for each in links) > inside
    outside = [each["/A"]["/URI"] for each in links if "/Dest" not in each]
    assert [each for each in outside if each in chapter] == chapter  # the address of each page
    assert not [
        each
        for each in outside
        if "?" not in each and each.partition("#")[0] in chapter and "#" in each
    ]


def test_a_pdf_contains_its_fonts_and_every_glyph(volume: Path) -> None:
    pdf = pypdf.PdfReader(volume.with_suffix(".pdf"))
    for page in pdf.pages:
        for font in page["/Resources"].get("/Font", {}).values():
            descriptor = font["/DescendantFonts"][0]["/FontDescriptor"]
            assert {"/FontFile2", "/FontFile3"} & descriptor.keys()
        for words, kind in page.get_contents().operations:
            parts = words[0] if kind == b"TJ" else words if kind == b"Tj" else []
            for part in parts:
                if isinstance(part, str | bytes):
                    raw = getattr(part, "original_bytes", part)
                    assert b"\0\0" not in {raw[n : n + 2] for n in range(0, len(raw), 2)}


def test_an_epub_is_complete_and_its_links_stay_inside(site, chapter, volume: Path) -> None:
    with zipfile.ZipFile(volume.with_suffix(".epub")) as epub:
        trees = {
            name: ElementTree.fromstring(epub.read(name))
            for name in epub.namelist()
            if name.endswith(".xhtml")
        }
    every = {name: list(tree.iter()) for name, tree in trees.items()}
    ids = {
        f"{Path(name).name}#{each.get('id')}"
        for name, parts in every.items()
        for each in parts
        if each.get("id")
    }
    targets = [
        href if not href.startswith("#") else Path(name).name + href
        for name, parts in every.items()
        if "/text/" in name
        for each in parts
        if "#" in (href := each.get("href", "")) and ":" not in href
    ]
    assert targets and not set(targets) - ids
    images = [each for parts in every.values() for each in parts if each.tag.endswith("}img")]
    assert len(images) == count(site, chapter, r"!\[") > 0
    assert [each for parts in every.values() for each in parts if each.tag.endswith("}math")]


def test_there_is_a_volume_for_the_book_and_for_each_track(site) -> None:
    volumes = ebook_export.volumes(site)
    whole = [page for page in site.pages if "/contributing/" not in page]
    tracks = {path.stem for path in (ROOT / "docs/tracks").glob("*.yml")}
    assert whole and volumes["world-size"][1] == whole
    assert len(volumes) == 1 + len(tracks)
    assert all(1 < len(pages) <= len(site.pages) for _, pages in volumes.values())
