"""Tests of the checklists in a browser: keyboard, stored ticks, and no JavaScript."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

INPUTS = SITE_WITHOUT_COMMENTS
KEY = "world-size:checklist"
TRACKS = ["gpu_and_distributed", "distributed_core", "pytorch_gpu"]
A, B = "shown-gpu-and-distributed-architecture", "shown-gpu-and-distributed-kernels"


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    yield context
    context.close()


def open_track(context: BrowserContext, site_url: str, track: str = TRACKS[0]) -> Page:
    page = context.new_page()
    page.goto(f"{site_url}tracks/{track}/")
    page.wait_for_selector(".checklist[data-ready]")
    return page


def ticked_ids(page: Page) -> list[str]:
    return page.eval_on_selector_all(".checklist input:checked", "all => all.map(x => x.id)")


def read_storage(page: Page) -> object:
    return json.loads(page.evaluate(f"localStorage.getItem('{KEY}')"))


def test_ticks_are_set_by_keyboard_and_stored(context: BrowserContext, site_url: str) -> None:
    page = open_track(context, site_url)
    count_text = page.locator(".checklist-count")
    clear = page.get_by_role("button", name="Clear these ticks")
    total = page.locator(".checklist input[type=checkbox]").count()
    assert count_text.inner_text() == f"0 of {total} shown." and clear.is_disabled()
    assert count_text.get_attribute("role") == "status"  # a screen reader announces it

    page.focus(f"#{A}")
    page.keyboard.press("Space")
    while page.evaluate("document.activeElement.id") != B:  # skip the links of the first item
        page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert ticked_ids(page) == [A, B] and count_text.inner_text() == f"2 of {total} shown."

    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked_ids(page) == [A, B] and count_text.inner_text() == f"2 of {total} shown."

    page.focus(f"#{A}")
    page.keyboard.press("Space")
    assert read_storage(page) == {B: True}
    clear.focus()
    page.keyboard.press("Enter")
    assert ticked_ids(page) == [] and read_storage(page) == {} and clear.is_disabled()
    # the button is disabled now, so the focus moves to the first box
    assert page.evaluate("document.activeElement.id") == A


def test_the_focus_is_visible(context: BrowserContext, site_url: str) -> None:
    page = open_track(context, site_url)
    page.focus(f"#{A}")
    page.keyboard.press("Tab")
    page.keyboard.press("Shift+Tab")
    width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
    assert page.evaluate("document.activeElement.id") == A and width >= 1
    box = page.locator(f"#{A}").bounding_box()
    assert box["width"] >= 24 and box["height"] >= 24


def test_invalid_stored_data_breaks_nothing(context: BrowserContext, site_url: str) -> None:
    page = open_track(context, site_url)
    for stored in ("{", "null", "[1]", '"text"', json.dumps({A: "yes"})):
        page.evaluate("both => localStorage.setItem(...both)", [KEY, stored])
        page.evaluate("dispatchEvent(new StorageEvent('storage', { key: null }))")  # reload it
        assert ticked_ids(page) == [], stored
        page.check(f"#{B}")
        assert read_storage(page)[B] is True, stored
        page.uncheck(f"#{B}")
    page.evaluate("both => localStorage.setItem(...both)", [KEY, "{"])
    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked_ids(page) == [] and page.locator(".checklist-count").is_visible()


def test_stored_data_of_other_pages_is_not_changed(
    context: BrowserContext, site_url: str
) -> None:
    page = open_track(context, site_url)
    page.evaluate(f"""localStorage.setItem('{KEY}', '{{"elsewhere": true, "{A}": true}}')""")
    page.reload()
    page.wait_for_selector(".checklist[data-ready]")
    assert ticked_ids(page) == [A]
    page.check(f"#{B}")
    page.get_by_role("button", name="Clear these ticks").click()
    assert read_storage(page) == {"elsewhere": True}


def test_two_tabs_show_the_same_ticks(context: BrowserContext, site_url: str) -> None:
    first, second = open_track(context, site_url), open_track(context, site_url)
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
    errors = []
    page = context.new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{site_url}tracks/{TRACKS[0]}/")
    page.wait_for_selector(".checklist[data-ready]")
    page.check(f"#{A}")
    assert page.locator(".checklist-count").inner_text().startswith("1 of ")
    assert not [error for error in errors if "checklist" in error]


def test_ticks_survive_going_to_another_page_and_back(
    context: BrowserContext, site_url: str
) -> None:
    page = open_track(context, site_url)
    page.check(f"#{A}")
    page.locator(f".md-content a[href*='{TRACKS[2]}']").last.click()
    page.wait_for_selector("#pytorch-gpu-components")
    page.wait_for_selector(".checklist[data-ready] .checklist-count")
    assert page.locator(".checklist-count").inner_text().startswith("0 of ")
    page.check("#shown-pytorch-gpu-components")
    page.go_back()
    page.wait_for_selector(f"#{A}")
    page.wait_for_selector(".checklist[data-ready] .checklist-count")
    assert ticked_ids(page) == [A] and page.locator(".checklist-foot").count() == 1


@pytest.mark.parametrize("track", TRACKS)
def test_a_track_page_is_usable_without_javascript(
    browser: Browser, site_url: str, track: str
) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site_url}tracks/{track}/")
    boxes = page.locator(".checklist input[type=checkbox]")
    assert boxes.count() and page.locator(".checklist button").count() == 0
    for number in range(boxes.count()):
        assert not boxes.nth(number).is_checked()
        name = boxes.nth(number).get_attribute("id")
        assert page.locator(f"label[for={name}]").count() == 1  # every box has a label
    assert page.locator(".track-path .track-stop a").count()
    assert page.locator(".track-overview table tr").count()
    context.close()


@pytest.mark.parametrize("track", TRACKS)
def test_a_track_page_fits_a_phone(browser: Browser, site_url: str, track: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = open_track(context, site_url, track)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    # all rows must be readable without horizontal scrolling
    too_wide = page.eval_on_selector_all(
        ".track-path p, .track-overview td, .track-rows td, .checklist li",
        "all => all.filter(x => x.getBoundingClientRect().right > 390).map(x => x.textContent)",
    )
    assert not too_wide
    backgrounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        name = {"light": "default", "dark": "slate"}[scheme]
        page.wait_for_selector(f"body[data-md-color-scheme={name}]")
        background, *colours = page.eval_on_selector(
            ".track-stop",
            """stop => [getComputedStyle(stop).backgroundColor,
                ...[stop.querySelector("a"), stop.querySelector("span")].map(
                    each => getComputedStyle(each).color)]""",
        )
        backgrounds.add(background)
        assert min(contrast(background, each) for each in colours) >= 4.5, scheme
    assert len(backgrounds) == 2
    context.close()


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of WCAG for two computed colours such as `rgb(1, 2, 3)`."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
            for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
