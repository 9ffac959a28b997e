"""Tests of the home page: size, counts, keyboard, phones, and browsers without JavaScript."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS, open_complete

from worldsize.model import BookError
from worldsize.site.page_stats import with_counts

if TYPE_CHECKING:
    from types import ModuleType

    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["README.md", *SITE_WITHOUT_COMMENTS]


ASSETS = ROOT / "docs/assets"
MAX_BYTES = 300_000  # that the page loads, without the files of the theme


def module(name: str) -> ModuleType:
    """Import a program of docs/assets/ that draws pictures of the page."""
    spec = importlib.util.spec_from_file_location(name, ASSETS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def article(site: Path) -> str:
    """Return the text of the home page, without navigation and code."""
    html = (site / "index.html").read_text("utf-8")
    html = re.search(r"<article.*?</article>", html, re.DOTALL)[0]
    html = re.sub(r"<pre.*?</pre>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_counts_equal_those_of_the_repository(built_site: Path) -> None:
    words = article(built_site)
    programs = [p for p in (ROOT / "snippets").rglob("*.cpu.txt") if not p.name.startswith(".")]
    assert f" {len(programs):,} programs that run on a CPU" in words
    transcripts = [
        path
        for folder in ("snippets", "labs", "assessment")
        for device in ("cpu", "cuda")
        for path in (ROOT / folder).rglob(f"*.{device}.txt")
        if not path.name.startswith(".")
    ]
    assert f" {len(transcripts):,} transcripts" in words
    assert f" {len(list((ROOT / 'labs').glob('lab??_*.py')))} labs as they are" in words
    assert int(re.search(r"(\d+) failures are reproduced, each by a program", words)[1]) > 0
    assert "{{" not in words


def test_no_count_is_written_by_hand() -> None:
    """A number that is written by hand becomes wrong when a program is added."""
    number = r"\b(\d[\d,]*|[a-z]+ (hundred|thousand|dozen)) "
    noun = r"(programs|transcripts|figures|failures|outputs|recorded)\b"
    for name in ("docs/index.md", "README.md"):
        assert not re.findall(number + noun, (ROOT / name).read_text("utf-8"), re.I), name


def test_every_page_of_the_navigation_is_linked() -> None:
    """A page that is added to the navigation must also be linked on the home page."""
    nav = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2].partition("\n\n")[0]
    home = (ROOT / "docs/index.md").read_text("utf-8")
    pages = re.findall(r": (\S+\.(?:md|py))$", nav, re.M)
    assert pages
    missing = {page for page in pages if f"]({page})" not in home} - {"index.md"}
    assert not missing, missing


def test_an_unknown_count_stops_the_build() -> None:
    assert re.fullmatch(r"\d+ labs", with_counts("{{ labs }} labs", ROOT))
    with pytest.raises(BookError, match=r"docs/index\.md: there is no count 'stars'"):
        with_counts("{{ stars }} stars", ROOT)


def test_the_page_is_short_and_small(browser: Browser, site_url: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    loaded: dict[str, int] = {}
    page.on("response", lambda answer: loaded.update({answer.url: len(answer.body())}))
    open_complete(page, site_url)
    assert page.evaluate("document.querySelector('article').offsetHeight") < 3700
    for picture in page.locator(".home-cards img").all():  # they load when they become visible
        picture.scroll_into_view_if_needed()
    page.wait_for_load_state("networkidle")
    thumbnails = list((ASSETS / "thumbnails").iterdir())
    assert sum("/assets/thumbnails/" in url for url in loaded) == len(thumbnails)
    theme = re.compile(r"/assets/(javascripts|stylesheets)/")
    weight = sum(size for url, size in loaded.items() if not theme.search(url))
    assert weight < MAX_BYTES, loaded
    page.close()


FIRST_SCREEN = ["h1", ".home-promise .md-button", ".home-doors li"]
RIGHT_COLUMN = [".home-animation .ring", ".home-pause", ".home-result pre"]


@pytest.mark.parametrize(
    ("width", "height", "parts"),
    [
        (1280, 720, [*FIRST_SCREEN, *RIGHT_COLUMN]),
        (1440, 900, [*FIRST_SCREEN, *RIGHT_COLUMN]),
        (390, 844, FIRST_SCREEN),
    ],
)
def test_the_first_screen_shows_the_main_parts(
    browser: Browser, site_url: str, width: int, height: int, parts: list[str]
) -> None:
    """A phone shows the title, two buttons and four links.

    A large screen also shows the animation and a result.
    """
    page = browser.new_page(
        viewport={"width": width, "height": height}, reduced_motion="no-preference"
    )
    open_complete(page, site_url)
    for part in parts:
        boxes = [each.bounding_box() for each in page.locator(part).all()]
        assert len(boxes) == {".home-promise .md-button": 2, ".home-doors li": 4}.get(part, 1)
        for box in boxes:
            assert box["y"] >= 0 and box["y"] + box["height"] <= height, part
            assert box["x"] >= 0 and box["x"] + box["width"] <= width, part
    assert "on your laptop" in page.locator("h1").inner_text()
    doors = page.locator(".home-doors strong").all_inner_texts()
    for door, word in zip(doors, ("hangs", "fit", "Teach", "interview"), strict=True):
        assert word in door
    if parts != FIRST_SCREEN:
        ring = page.locator(".home-animation .ring").bounding_box()
        assert ring["width"] * ring["height"] > 0.2 * width * height
    printed = page.locator(".home-result pre").inner_text()
    assert printed.startswith("$ torchrun") and "equal to dist.all_reduce" in printed
    sent, theory = re.findall(r"\b(\d+) MiB", printed.splitlines()[2])
    ranks, size = re.search(r"n = (\d+), S = (\d+) MiB", printed).groups()
    assert sent == theory
    assert int(sent) * int(ranks) == 2 * (int(ranks) - 1) * int(size)
    page.close()


def test_the_pictures_are_up_to_date() -> None:
    drawing = module("home").draw()
    assert (ASSETS / "home.svg").read_text("utf-8") == drawing, "python docs/assets/home.py"
    folder = ASSETS / "thumbnails"
    found = {path.name: path.read_text("utf-8") for path in folder.iterdir()}
    assert found == module("thumbnails").drawings(), "python docs/assets/thumbnails.py"
    home = (ROOT / "docs/index.md").read_text("utf-8")
    for name in found:
        assert len(re.findall(rf"!\[[^\]]{{40,}}\]\(assets/thumbnails/{name}\)", home)) == 1


def visible_words(page: Page, seconds: float) -> list[str]:
    """Return the words that the animation shows at a moment."""
    page.evaluate(
        """moment => {
            for (const each of document.getAnimations()) each.pause()
            for (const each of document.getAnimations()) each.currentTime = 1000 * moment
        }""",
        seconds,
    )
    return page.evaluate("""() => [...document.querySelectorAll(".ring > .all text")]
        .filter(each => getComputedStyle(each.closest("g")).opacity > 0.5)
        .map(each => each.textContent)""")


@pytest.mark.parametrize("scripts", [True, False])
def test_the_labels_of_the_animation_are_right(
    browser: Browser, site_url: str, scripts: bool
) -> None:
    """The labels name the ranks, the phase, the step and the bytes. The animation can pause."""
    home = module("home")
    page = browser.new_page(
        viewport={"width": 1280, "height": 720},
        java_script_enabled=scripts,
        reduced_motion="no-preference",
    )
    page.goto(site_url)
    ring = page.locator("svg.ring")
    assert ring.get_attribute("role") == "img"
    assert "reduce-scatter" in ring.get_attribute("aria-label")
    states = "() => document.getAnimations().map(each => each.playState)"
    assert set(page.evaluate(states)) == {"running"}
    pause = page.get_by_role("checkbox", name="Pause the animation")
    pause.focus()
    page.keyboard.press("Space")
    assert set(page.evaluate(states)) == {"paused"}
    page.keyboard.press("Space")
    assert set(page.evaluate(states)) == {"running"}
    assert 10 < home.length() < 30
    for step in range(6):
        words = visible_words(page, home.begins(step) + 1)
        assert [f"rank {rank}" for rank in range(4)] == words[:4]
        assert words[4] == ("reduce-scatter" if step < 3 else "all-gather")
        assert words[5:] == [f"step {step % 3 + 1} of 3", f"each rank sent {3 * step} MiB"]
    assert visible_words(page, home.length() - 1)[4:] == [
        "each rank sent 18 MiB",
        "all-reduce",
        "of 12 MiB is done",
    ]
    sums = page.evaluate("""() => [...document.querySelectorAll(".ring .all > use")]
        .filter(each => getComputedStyle(each).opacity === "1").map(each => each.href.baseVal)""")
    assert sums == ["#ring-0123"] * 16
    page.close()


def test_reduced_motion_shows_the_middle_of_the_animation(
    browser: Browser, site_url: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    open_complete(page, site_url)
    assert page.evaluate("document.getAnimations().length") == 0
    assert not page.locator(".home-pause").is_visible()
    shown = page.evaluate("""() => [...document.querySelectorAll(".ring .all > use")]
        .filter(each => getComputedStyle(each).opacity === "1").map(each => each.href.baseVal)""")
    assert len(shown) == 16 and shown.count("#ring-0123") == 4
    page.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_the_page_is_complete_on_a_phone(
    browser: Browser, site_url: str, scripts: bool
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800}, java_script_enabled=scripts)
    page.goto(site_url)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for part in (
            ".home-lead",
            ".grid.cards li",
            ".ring",
            ".home-result .transcript",
            ".home-cards img",
            ".home-columns",
        ):
            box = page.locator(part).first.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, (part, scheme)
            assert page.locator(part).first.is_visible()
        assert page.locator('.grid.cards li a[href*="tracks/"]').count() == 3
        for button in page.locator("article .md-button").all():
            assert button.bounding_box()["height"] >= 24
    page.close()


def test_the_keyboard_reaches_the_first_chapter(browser: Browser, site_url: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    open_complete(page, site_url)
    for _ in range(80):
        page.keyboard.press("Tab")
        if "Begin with" in page.evaluate("document.activeElement.textContent"):
            break
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_url("**/01_parallelism_strategies/")
    page.close()
