"""Pages in a browser: nothing fails, nothing is asked of another host, and nothing overflows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from conftest import SITE

if TYPE_CHECKING:
    from playwright.sync_api import Browser

INPUTS = SITE


@pytest.mark.parametrize("width", [390, 1440])
def test_home_page(browser: Browser, address: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    asked, failed = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: failed.append(message.text))
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.goto(address, wait_until="networkidle")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not [url for url in asked if not url.startswith((address, "data:"))]
    assert not failed
    page.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_letter_opens_the_glossary_at_its_terms(
    browser: Browser, address: str, scripts: bool
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, java_script_enabled=scripts
    )
    page = context.new_page()
    page.goto(f"{address}glossary/")
    assert not page.locator("#terms-q").is_visible()
    page.focus('.terms-letters a[href$="#terms-q"]')
    page.keyboard.press("Enter")
    page.locator("#terms-q").wait_for(state="visible")
    link = page.locator('details.terms a[href$="#quantization"]')
    link.click(trial=True)  # scrolls to it, and waits until it is still
    box = link.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    link.click()
    assert page.url.endswith("#quantization")
    context.close()


def test_tabs_are_not_wider_than_a_window_with_a_scrollbar(
    browser: Browser, address: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{address}setup/")
    page.add_style_tag(content="body { width: 378px }")  # what a scrollbar of 12 px leaves
    right = "all => all.map(each => each.getBoundingClientRect().right)"
    assert max(page.locator("article > .tabbed-set > *").evaluate_all(right)) <= 378
    page.close()


def test_a_jump_within_a_page_forgets_nothing(browser: Browser, address: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{address}11_references/", wait_until="networkidle")
    page.fill("#references-word", "attention")
    page.click('.md-content a[href^="#"]:visible, .md-sidebar--secondary a[href^="#"]:visible')
    page.wait_for_url("**/11_references/#*")
    page.wait_for_load_state("networkidle")
    assert page.input_value("#references-word") == "attention"
    page.close()


def test_the_old_address_of_a_section_leads_to_it(browser: Browser, address: str) -> None:
    page = browser.new_page()
    for old, new, section, title in (
        ("03_model_parallelism", "03_tensor_parallelism", "f-and-g", "f and g"),
        ("03_model_parallelism", "03_several_cuts", "fsdp-over-tp", "FSDP over TP"),
        ("03_context_and_experts", "03_several_cuts", "fsdp-over-tp", "FSDP over TP"),
        ("03_context_and_experts", "03_experts", "cut-by-experts", "Cut by experts"),
    ):
        page.goto(f"{address}{old}/#{section}")
        page.wait_for_url(f"**/{new}/#{section}")
        assert page.locator(f"#{section}").inner_text().startswith(title)
    page.goto(f"{address}03_model_parallelism/#gpipe-from-scratch")  # it has not moved
    page.wait_for_load_state("load")
    assert page.url.endswith("/03_model_parallelism/#gpipe-from-scratch")
    page.close()


def test_a_step_of_a_lab_keeps_its_older_addresses(browser: Browser, address: str) -> None:
    """The title of step 7 has changed, and links with the older title lead to the step."""
    page = browser.new_page()
    page.goto(f"{address}labs/lab02_ddp/#step-7-accumulate-and-be-silent-meanwhile")
    page.wait_for_url("**/#step-7-accumulate-gradients-without-communication")
    page.close()


@pytest.mark.parametrize(
    "place",
    ["03_model_parallelism", "11_references", "tracks/distributed_core", "what_ran_where"],
)
def test_a_page_is_not_styled_twice_while_it_loads(
    browser: Browser, address: str, place: str
) -> None:
    """Each time more is a tenth of a second of a phone in which it does not answer."""
    page = browser.new_page(viewport={"width": 390, "height": 844})
    browser.start_tracing(page=page, categories=["devtools.timeline"])
    page.goto(f"{address}{place}/", wait_until="networkidle")
    page.evaluate("document.body.scrollHeight")  # style what no frame has shown yet
    traced = json.loads(browser.stop_tracing())["traceEvents"]
    styled = sum(
        e["args"].get("elementCount", 0) for e in traced if e["name"] == "UpdateLayoutTree"
    )
    assert 1 <= styled / page.locator("*").count() < 2
    page.close()


def test_code_and_page_have_their_buttons_and_the_keyboard(
    browser: Browser, address: str, built_site: Path
) -> None:
    page = browser.new_page(
        viewport={"width": 390, "height": 844},
        permissions=["clipboard-read", "clipboard-write"],
    )
    failed = []
    page.on("console", lambda message: failed.append(message.text))
    page.goto(f"{address}03_model_parallelism/", wait_until="networkidle")
    assert not failed
    button = page.get_by_role("button", name="Copy page")
    said = page.locator(".copy-page [role=status]")
    button.press("Enter")
    said.get_by_text("Copied as Markdown.").wait_for()
    markdown = (built_site / "03_model_parallelism/index.md").read_text("utf-8")
    assert page.evaluate("navigator.clipboard.readText()") == markdown
    section = page.locator("#gpipe-from-scratch .report")
    asked = dict(parse_qsl(urlsplit(section.get_attribute("href")).query))
    assert asked["page"].endswith("/03_model_parallelism/")
    assert asked["section"] == "#gpipe-from-scratch" and "torch 2." in asked["versions"]
    assert asked["transcript"].startswith("snippets/03_model_parallelism/")
    page.goto(f"{address}labs/lab02_ddp/", wait_until="networkidle")
    for link in page.locator(".report").all()[:2]:
        asked = dict(parse_qsl(urlsplit(link.get_attribute("href")).query))
        assert asked["transcript"] == "labs/lab02_ddp.py" and "torch 2." in asked["versions"]
    page.go_back(wait_until="networkidle")
    page.route("**/index.md", lambda route: route.fulfill(status=404))
    button.press("Enter")
    said.get_by_text("Not copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == markdown
    far = page.locator(".md-content__inner > .highlight").last
    assert not far.locator("button").count()  # far below the window
    page.wait_for_function("""() => {
        const code = [...document.querySelectorAll("pre > code")]
        const wide = code.filter(x => x.scrollWidth > x.clientWidth)
        return wide.length && wide.every(x => x.tabIndex === 0)
    }""")
    far.scroll_into_view_if_needed()
    far.locator("button").wait_for(state="attached")
    page.close()


def test_the_scheme_is_that_of_the_system_or_the_chosen(browser: Browser, address: str) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()

    def scheme() -> str:
        return page.get_attribute("body", "data-md-color-scheme")

    page.goto(address)
    assert scheme() == "slate"
    for name, expected in (("light", "default"), ("dark", "slate"), ("of the system", "slate")):
        switch = page.locator("label[for^=__palette]:visible")
        assert name in switch.get_attribute("title")
        page.focus("[name=__palette]:checked")
        page.keyboard.press("Enter")
        assert scheme() == expected
        page.reload()
        assert scheme() == expected
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("body[data-md-color-scheme=default]")
    for expected in ("default", "slate"):
        switch.click()
        assert scheme() == expected
    context.close()
