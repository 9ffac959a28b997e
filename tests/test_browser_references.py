"""Tests of the reading list in a browser: its filter, links to entries, and no JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS

pytest.importorskip("yaml")

from worldsize.site import references

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
INPUTS = SITE_WITHOUT_COMMENTS
ENTRIES = references.load((ROOT / references.FILE).read_text("utf-8")).entries
VISIBLE_ENTRIES = "a.reference:visible"


def count_entries(**properties: str) -> int:
    """Return the number of entries with these properties."""
    return sum(
        all(
            value in [entry.topic, *entry.also]
            if name == "topic"
            else getattr(entry, name) == value
            for name, value in properties.items()
        )
        for entry in ENTRIES
    )


@pytest.fixture
def page(browser: Browser, site_url: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{site_url}11_references/", wait_until="load")
    page.wait_for_selector(".reference-filter form")
    yield page
    page.close()
    assert not errors


def test_the_filter_works_by_keyboard(page: Page) -> None:
    assert page.locator(VISIBLE_ENTRIES).count() == len(ENTRIES)
    page.locator("#references-topic").focus()
    page.keyboard.type("ZeRO")  # a native list selects the option with these first letters
    assert page.locator(VISIBLE_ENTRIES).count() == count_entries(topic="zero")
    page.keyboard.press("Tab")
    page.keyboard.type("must")
    matching = count_entries(topic="zero", priority="must")
    assert page.locator(VISIBLE_ENTRIES).count() == matching
    assert (
        f"{matching} of {len(ENTRIES)}" in page.locator(".reference-filter output").inner_text()
    )
    assert page.locator("#quantization").is_hidden()  # the heading of a topic without entries
    page.keyboard.press("Tab")
    page.keyboard.type("paper")
    assert page.locator(VISIBLE_ENTRIES).count() == count_entries(
        topic="zero", priority="must", kind="paper"
    )
    page.keyboard.press("Tab")
    page.keyboard.type("no such word")
    assert page.locator(VISIBLE_ENTRIES).count() == 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Show all"
    page.keyboard.press("Enter")
    page.wait_for_function(
        f"document.querySelector('output').textContent == 'all {len(ENTRIES)} entries'"
    )
    assert page.locator(VISIBLE_ENTRIES).count() == len(ENTRIES)
    assert page.locator("#quantization").is_visible()


def test_the_filter_finds_an_entry_by_a_word(page: Page) -> None:
    page.locator("#references-word").fill("pipedream")
    titles = page.locator(VISIBLE_ENTRIES).all_inner_texts()
    assert any("PipeDream" in title for title in titles) and len(titles) < 8
    page.keyboard.press("Enter")  # this must not send a form
    assert "?" not in page.url


def test_a_link_to_a_hidden_entry_makes_it_visible(page: Page) -> None:
    page.locator("#references-topic").select_option("attention")
    assert page.locator("#zero").is_hidden()
    page.evaluate("location.hash = 'zero'")
    page.locator("#zero").wait_for(state="visible")
    assert page.locator(VISIBLE_ENTRIES).count() == len(ENTRIES)


def test_controls_have_a_name_and_a_sufficient_size(page: Page) -> None:
    controls = page.locator(".reference-filter :is(input, select, button)")
    assert controls.count() == 5
    for control in controls.all():
        assert control.evaluate("e => e.labels?.[0]?.textContent || e.textContent").strip()
        assert control.bounding_box()["height"] >= 24
        # a field without a border would be invisible
        assert control.evaluate("e => getComputedStyle(e).borderTopStyle") == "solid"
    assert page.locator(".reference-filter output").get_attribute("aria-live") == "polite"


def test_the_filter_appears_once_after_going_back(page: Page, site_url: str) -> None:
    page.locator("a.md-tabs__link, .md-nav__link", has_text="Glossary").first.evaluate(
        "e => e.click()"
    )
    page.wait_for_url("**/glossary/")
    assert page.locator(".reference-filter form").count() == 0
    page.go_back()
    page.wait_for_selector(".reference-filter form")
    assert page.locator(".reference-filter form").count() == 1
    page.locator("#references-kind").select_option("video")
    assert page.locator(VISIBLE_ENTRIES).count() == count_entries(kind="video")


@pytest.mark.parametrize("scripts", [True, False])
def test_the_list_is_usable_without_javascript_and_on_a_phone(
    browser: Browser, site_url: str, scripts: bool
) -> None:
    page = browser.new_page(java_script_enabled=scripts, viewport={"width": 390, "height": 844})
    page.goto(f"{site_url}11_references/")
    if scripts:
        page.wait_for_selector(".reference-filter form")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.locator(VISIBLE_ENTRIES).count() == len(ENTRIES)
        if not scripts:
            assert page.locator(".reference-filter").inner_html() == ""
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        table = page.locator("table:has(a.reference)").first
        assert table.evaluate("e => e.getBoundingClientRect().right") <= 390
    page.close()
