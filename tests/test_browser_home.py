"""The home page: short, true in its counts, and usable by keyboard, on a phone, without scripts."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE

from book.core import BookError
from book.site.facts import with_counts

if TYPE_CHECKING:
    from playwright.sync_api import Browser


ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["README.md", *SITE]


def article(site: Path) -> str:
    """The words of the home page, without its frame and its code."""
    html = (site / "index.html").read_text("utf-8")
    html = re.search(r"<article.*?</article>", html, re.DOTALL)[0]
    html = re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_counts_are_those_of_the_repository(built_site: Path) -> None:
    words = article(built_site)
    hidden = [p for p in (ROOT / "snippets").rglob("*.cpu.txt") if not p.name.startswith(".")]
    assert f" {len(hidden):,} programs run on a CPU" in words
    every = [
        path
        for folder in ("snippets", "labs", "assessment")
        for device in ("cpu", "cuda")
        for path in (ROOT / folder).rglob(f"*.{device}.txt")
        if not path.name.startswith(".")
    ]
    assert f" {len(every):,} transcripts" in words
    assert f" {len(list((ROOT / 'labs').glob('lab??_*.py')))} labs run whole" in words
    assert int(re.search(r"(\d+) of them, each made to happen by a program", words)[1]) > 50
    assert "{{" not in words


def test_no_count_is_typed() -> None:
    """A number before the name of what is counted would be wrong after the next program."""
    number = r"\b(\d[\d,]*|[a-z]+ (hundred|thousand|dozen)) "
    what = r"(programs|transcripts|figures|failures|outputs|recorded)\b"
    for name in ("docs/index.md", "README.md"):
        assert not re.findall(number + what, (ROOT / name).read_text("utf-8"), re.I), name


def test_every_chapter_lab_and_track_is_linked() -> None:
    """What is added to the navigation is on the home page too; of other parts one page is."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    home = (ROOT / "docs/index.md").read_text("utf-8")
    sections = re.split(r"^ +- (.+):$", nav, flags=re.M)[1:]
    assert len(sections) > 2 * 14
    for name, entries in zip(sections[::2], sections[1::2], strict=True):
        pages = re.findall(r": (\S+\.(?:md|py))$", entries, re.M)
        linked = [page for page in pages if f"]({page})" in home]
        every = name in ("Tracks", "Labs") or re.match(r"\d\d |Chapters", name)
        assert (linked == pages) if every else (linked or not pages), (
            f"{name}: {set(pages) - set(linked)}"
        )


def test_what_nothing_counts_stops_the_build() -> None:
    assert re.fullmatch(r"\d+ labs", with_counts("{{ labs }} labs", ROOT))
    with pytest.raises(BookError, match=r"docs/index\.md: nothing counts 'stars'"):
        with_counts("{{ stars }} stars", ROOT)


def test_the_page_is_short(browser: Browser, address: str) -> None:
    """One screen and a half at a desk, without the frame around it."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(address, wait_until="networkidle")
    assert page.evaluate("document.querySelector('article').offsetHeight") < 1700
    page.close()


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_the_first_screen_has_the_loop_of_the_book(
    browser: Browser, address: str, width: int, height: int
) -> None:
    """What it is, one picture, and a claim, its program, what that printed and counted."""
    page = browser.new_page(viewport={"width": width, "height": height})
    page.goto(address, wait_until="networkidle")
    for part in (".home-lead", ".home-picture img", ".home-loop pre"):
        box = page.locator(part).last.bounding_box()
        assert box["y"] + box["height"] <= height, part
    program, printed, counted = page.locator(".home-loop pre").all_inner_texts()
    assert program.startswith("# reduce-scatter") and "# all-gather" in program
    assert printed.startswith("$ torchrun") and "equal to dist.all_reduce" in printed
    sent, theory = re.findall(r"\b(\d+) MiB", counted.splitlines()[0])
    assert sent == theory
    page.close()


def test_the_picture_is_as_drawn_and_plays_once_where_motion_is_wanted(
    browser: Browser, address: str
) -> None:
    path = ROOT / "docs/assets/home.py"
    spec = importlib.util.spec_from_file_location("home", path)
    home = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(home)
    assert path.with_suffix(".svg").read_text("utf-8") == home.draw(), (
        "python docs/assets/home.py"
    )
    motion_of = "getComputedStyle(document.querySelector('.s')).animationName"
    for motion, expected in (("no-preference", "show"), ("reduce", "none")):
        page = browser.new_page(viewport={"width": 390, "height": 200}, reduced_motion=motion)
        page.goto(address, wait_until="networkidle")
        picture = page.locator("img.plays")
        assert picture.get_attribute("src").endswith("home.svg")  # it is not yet in view
        picture.scroll_into_view_if_needed()
        if motion == "reduce":  # what is seen is told within two frames
            page.evaluate(
                "new Promise(seen => requestAnimationFrame(() => requestAnimationFrame(seen)))"
            )
            assert picture.get_attribute("src").endswith("home.svg")
        else:
            page.wait_for_selector("img.plays[src$='?#play']")
        page.goto(picture.evaluate("each => each.src").removesuffix("#play") + "#play")
        assert page.evaluate(motion_of) == expected
        page.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_phone_has_all_of_it(browser: Browser, address: str, scripts: bool) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, java_script_enabled=scripts)
    page.goto(address)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for part in (
            ".home-lead",
            ".grid.cards li",
            ".home-loop .transcript",
            ".home-columns",
        ):
            box = page.locator(part).first.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, (part, scheme)
            assert page.locator(part).first.is_visible()
        assert page.locator('.grid.cards li a[href*="tracks/"]').count() == 3
        for button in page.locator("article .md-button").all():
            assert button.bounding_box()["height"] >= 24
    page.close()


def test_keyboard_reaches_the_first_chapter(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(address, wait_until="networkidle")
    for _ in range(80):
        page.keyboard.press("Tab")
        if "Begin with" in page.evaluate("document.activeElement.textContent"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/01_parallelism_strategies/")
    page.close()
