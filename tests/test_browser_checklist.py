"""Tests of the checklists in a browser: keyboard, stored ticks, and no JavaScript."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from conftest import SITE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

INPUTS = SITE
KEY = "world-size:checklist"
TRACKS = ["gpu_and_distributed", "distributed_core", "pytorch_gpu"]
A, B = "shown-gpu-and-distributed-architecture", "shown-gpu-and-distributed-kernels"


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    yield context
    context.close()


def opened(context: BrowserContext, site_url: str, track: str = TRACKS[0]) -> Page:
    page = context.new_page()
    page.goto(f"{site_url}tracks/{track}/")
    page.wait_for_selector(".checklist[data-ready]")
    return page


def ticked(page: Page) -> list[str]:
    return page.eval_on_selector_all(".checklist input:checked", "all => all.map(x => x.id)")


def read_storage(page: Page) -> object:
    return json.loads(page.evaluate(f"localStorage.getItem('{KEY}')"))


def test_ticks_are_set_by_keyboard_and_stored(context: BrowserContext, site_url: str) -> None:
    page = opened(context, site_url)
    count_text = page.locator(".checklist-count")
    clear = page.get_by_role("button", name="Clear these ticks")
    assert count_text.inner_text() == "0 of 10 shown." and clear.is_disabled()
    assert count_text.get_attribute("role") == "status"  # a screen reader announces it

    page.focus(f"#{A}")
    page.keyboard.press("Space")
    while page.evaluate("document.activeElement.id") != B:  # skip the links of the first item
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert ticked(page) == [A, B] and count_text.inner_text() == "2 of 10 shown."

    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked(page) == [A, B] and count_text.inner_text() == "2 of 10 shown."

    page.focus(f"#{A}")
    page.keyboard.press("Space")
    assert read_storage(page) == {B: True}
    clear.focus()
    page.keyboard.press("Enter")
    assert ticked(page) == [] and read_storage(page) == {} and clear.is_disabled()
    assert (
        page.evaluate("document.activeElement.id") == A
    )  # the focus moves away from the button


def test_the_focus_is_visible(context: BrowserContext, site_url: str) -> None:
    page = opened(context, site_url)
    page.focus(f"#{A}")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
    assert page.evaluate("document.activeElement.id") == A and width >= 1
    box = page.locator(f"#{A}").bounding_box()
    assert box["width"] >= 24 and box["height"] >= 24


def test_invalid_stored_data_breaks_nothing(context: BrowserContext, site_url: str) -> None:
    page = opened(context, site_url)
    for stored in ("{", "null", "[1]", '"text"', json.dumps({A: "yes"})):
        page.evaluate("both => localStorage.setItem(...both)", [KEY, stored])
        page.evaluate("dispatchEvent(new StorageEvent('storage', { key: null }))")  # reload it
        assert ticked(page) == [], stored
        page.check(f"#{B}")
        assert read_storage(page)[B] is True, stored
        page.uncheck(f"#{B}")
    page.evaluate("both => localStorage.setItem(...both)", [KEY, "{"])
    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked(page) == [] and page.locator(".checklist-count").is_visible()


def test_stored_data_of_other_pages_is_not_changed(
    context: BrowserContext, site_url: str
) -> None:
    page = opened(context, site_url)
    page.evaluate(f"""localStorage.setItem('{KEY}', '{{"elsewhere": true, "{A}": true}}')""")
    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked(page) == [A]
    page.check(f"#{B}")
    page.get_by_role("button", name="Clear these ticks").click()
    assert read_storage(page) == {"elsewhere": True}


def test_two_tabs_show_the_same_ticks(context: BrowserContext, site_url: str) -> None:
    first, second = opened(context, site_url), opened(context, site_url)
    first.check(f"#{A}")
    second.wait_for_function(f"document.getElementById('{A}').checked")
    second.check(f"#{B}")
    first.wait_for_function(f"document.getElementById('{B}').checked")
    assert read_storage(first) == {A: True, B: True}


def test_a_window_without_storage_works(context: BrowserContext, site_url: str) -> None:
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage',"
        " { get() { throw new DOMException('denied', 'SecurityError') } })"
    )
    failed = []
    page = context.new_page()
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(f"{site_url}tracks/{TRACKS[0]}/")
    page.wait_for_selector(".checklist[data-ready]")
    page.check(f"#{A}")
    assert page.locator(".checklist-count").inner_text() == "1 of 10 shown."
    assert not [error for error in failed if "checklist" in error]


def test_ticks_survive_going_to_another_page_and_back(
    context: BrowserContext, site_url: str
) -> None:
    page = opened(context, site_url)
    page.check(f"#{A}")
    page.locator(f".md-content a[href*='{TRACKS[2]}']").last.click()
    page.wait_for_selector("#pytorch-gpu-components")
    page.wait_for_selector(".checklist[data-ready] .checklist-count")
    assert page.locator(".checklist-count").inner_text() == "0 of 7 shown."
    page.check("#shown-pytorch-gpu-components")
    page.go_back()
    page.wait_for_selector(f"#{A}")
    page.wait_for_selector(".checklist[data-ready] .checklist-count")
    assert ticked(page) == [A] and page.locator(".checklist-foot").count() == 1


@pytest.mark.parametrize("track", TRACKS)
def test_the_page_is_usable_without_javascript(
    browser: Browser, site_url: str, track: str
) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site_url}tracks/{track}/")
    boxes = page.locator(".checklist input[type=checkbox]")
    assert boxes.count() >= 7 and page.locator(".checklist button").count() == 0
    for number in range(boxes.count()):
        assert not boxes.nth(number).is_checked()
        name = boxes.nth(number).get_attribute("id")
        assert page.locator(f"label[for={name}]").count() == 1  # every box has a label
    assert page.locator(".track-path .track-stop a").count() >= 6
    assert page.locator(".track-overview table tr").count() >= 8
    context.close()


@pytest.mark.parametrize("track", TRACKS)
def test_the_page_fits_a_phone(browser: Browser, site_url: str, track: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = opened(context, site_url, track)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = page.eval_on_selector_all(  # all rows must be readable without horizontal scrolling
        ".track-path p, .track-overview td, .track-rows td, .checklist li",
        "all => all.filter(x => x.getBoundingClientRect().right > 390).map(x => x.textContent)",
    )
    assert not cut
    papers = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        name = {"light": "default", "dark": "slate"}[scheme]
        page.wait_for_selector(f"body[data-md-color-scheme={name}]")
        paper, *inks = page.eval_on_selector(
            ".track-stop",
            """stop => [getComputedStyle(stop).backgroundColor,
                ...[stop.querySelector("a"), stop.querySelector("span")].map(
                    each => getComputedStyle(each).color)]""",
        )
        papers.add(paper)
        assert min(contrast(paper, ink) for ink in inks) >= 4.5, scheme
    assert len(papers) == 2
    context.close()


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of WCAG for two computed colours such as `rgb(1, 2, 3)`."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)
