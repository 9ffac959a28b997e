"""Tests of pages in a browser: no errors, no requests to other hosts, and no overflow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from conftest import SITE_WITHOUT_COMMENTS, open_complete

from worldsize.site import tables

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = SITE_WITHOUT_COMMENTS


def test_the_home_page_loads_without_errors(browser: Browser, site_url: str) -> None:
    page = browser.new_page()
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    open_complete(page, site_url)
    for width in (390, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert not [url for url in requests if not url.startswith((site_url, "data:"))]
    assert not errors
    page.close()


@pytest.mark.parametrize("scripts", [True, False])
def test_a_letter_opens_the_glossary_at_its_terms(
    browser: Browser, site_url: str, scripts: bool
) -> None:
    context = browser.new_context(
        viewport={"width": 390, "height": 800}, java_script_enabled=scripts
    )
    page = context.new_page()
    page.goto(f"{site_url}glossary/")
    assert not page.locator("#terms-q").is_visible()
    page.focus('.terms-letters a[href$="#terms-q"]')
    page.keyboard.press("Enter")
    page.locator("#terms-q").wait_for(state="visible")
    link = page.locator('details.terms a[href$="#quantization"]')
    link.click(trial=True)  # scroll to it, and wait until the scrolling ends
    box = link.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    link.click()
    assert page.url.endswith("#quantization")
    context.close()


def test_tabs_are_not_wider_than_a_window_with_a_scrollbar(
    browser: Browser, site_url: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.goto(f"{site_url}setup/")
    page.add_style_tag(content="body { width: 378px }")  # the width next to a 12 px scrollbar
    right = "all => all.map(each => each.getBoundingClientRect().right)"
    assert max(page.locator("article > .tabbed-set > *").evaluate_all(right)) <= 378
    page.close()


def test_a_jump_within_a_page_keeps_the_filter(browser: Browser, site_url: str) -> None:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    open_complete(page, f"{site_url}11_references/")
    page.fill("#references-word", "attention")
    page.click('.md-content a[href^="#"]:visible, .md-sidebar--secondary a[href^="#"]:visible')
    page.wait_for_url("**/11_references/#*")
    page.wait_for_load_state("networkidle")
    assert page.input_value("#references-word") == "attention"
    page.close()


def test_the_old_address_of_a_section_redirects(browser: Browser, site_url: str) -> None:
    page = browser.new_page()
    for old, new, section, title in (
        ("03_model_parallelism", "03_tensor_parallelism", "f-and-g", "f and g"),
        ("03_model_parallelism", "03_several_cuts", "fsdp-over-tp", "FSDP over TP"),
        ("03_context_and_experts", "03_several_cuts", "fsdp-over-tp", "FSDP over TP"),
        ("03_context_and_experts", "03_experts", "cut-by-experts", "Cut by experts"),
    ):
        page.goto(f"{site_url}{old}/#{section}")
        page.wait_for_url(f"**/{new}/#{section}")
        assert page.locator(f"#{section}").inner_text().startswith(title)
    # this section is still on its old page
    page.goto(f"{site_url}03_model_parallelism/#gpipe-from-scratch")
    page.wait_for_load_state("load")
    assert page.url.endswith("/03_model_parallelism/#gpipe-from-scratch")
    page.close()


def test_older_addresses_of_a_lab_step_still_work(browser: Browser, site_url: str) -> None:
    """The title of step 7 has changed. A link with the old title must still reach the step."""
    page = browser.new_page()
    page.goto(f"{site_url}labs/lab02_ddp/#step-7-accumulate-and-be-silent-meanwhile")
    page.wait_for_url("**/#step-7-accumulate-gradients-without-communication")
    page.close()


@pytest.mark.parametrize(
    "place",
    ["03_model_parallelism", "11_references", "tracks/distributed_core", "what_ran_where"],
)
def test_a_page_is_styled_only_once_while_it_loads(
    browser: Browser, site_url: str, place: str
) -> None:
    """Styling a page again blocks a phone for a tenth of a second.

    The test counts the elements that the browser styles until the page has loaded. A slow
    machine styles the page in parts while it arrives, and counts each part, so the sum is the
    same.
    """
    page = browser.new_page(viewport={"width": 390, "height": 844})
    browser.start_tracing(page=page, categories=["devtools.timeline"])
    open_complete(page, f"{site_url}{place}/")
    # run the scripts that wait for an idle browser
    page.evaluate("new Promise(requestIdleCallback)")
    page.evaluate("document.body.scrollHeight")  # style the parts that no frame has shown yet
    traced = json.loads(browser.stop_tracing())["traceEvents"]
    styled = sum(
        e["args"].get("elementCount", 0) for e in traced if e["name"] == "UpdateLayoutTree"
    )
    shown = page.evaluate("""() => {
        const count = element => getComputedStyle(element).display === "none" ? 1
            : 1 + [...element.children].reduce((sum, child) => sum + count(child), 0)
        return count(document.documentElement)
    }""")
    # the browser does not style the content of hidden elements
    assert shown <= styled < 2 * shown
    page.close()


def test_buttons_of_pages_and_code_blocks_work_by_keyboard(
    browser: Browser, site_url: str, built_site: Path
) -> None:
    page = browser.new_page(
        viewport={"width": 390, "height": 844},
        permissions=["clipboard-read", "clipboard-write"],
    )
    errors = []
    page.on("console", lambda message: errors.append(message.text))
    open_complete(page, f"{site_url}03_model_parallelism/")
    assert not errors
    button = page.get_by_role("button", name="Copy page")
    status = page.locator(".copy-page [role=status]")
    button.press("Enter")
    status.get_by_text("Copied as Markdown.").wait_for()
    markdown = (built_site / "03_model_parallelism/index.md").read_text("utf-8")
    assert page.evaluate("navigator.clipboard.readText()") == markdown
    section = page.locator("#gpipe-from-scratch .report")
    query = dict(parse_qsl(urlsplit(section.get_attribute("href")).query))
    assert query["page"].endswith("/03_model_parallelism/")
    assert query["section"] == "#gpipe-from-scratch" and "torch 2." in query["versions"]
    assert query["transcript"].startswith("snippets/03_model_parallelism/")
    open_complete(page, f"{site_url}labs/lab02_ddp/")
    for link in page.locator(".report").all()[:2]:
        query = dict(parse_qsl(urlsplit(link.get_attribute("href")).query))
        assert query["transcript"] == "labs/lab02_ddp.py" and "torch 2." in query["versions"]
    page.go_back(wait_until="networkidle")
    page.route("**/index.md", lambda route: route.fulfill(status=404))
    button.press("Enter")
    status.get_by_text("Not copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == markdown
    last_block = page.locator(".md-content__inner > .highlight").last
    assert not last_block.locator("button").count()  # it is far below the window
    page.wait_for_function("""() => {
        const code = [...document.querySelectorAll("pre > code")]
        const wide = code.filter(x => x.scrollWidth > x.clientWidth)
        return wide.length && wide.every(x => x.tabIndex === 0)
    }""")
    last_block.scroll_into_view_if_needed()
    last_block.locator("button").wait_for(state="attached")
    page.close()


def test_the_colour_scheme_is_that_of_the_system_or_the_selected_one(
    browser: Browser, site_url: str
) -> None:
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()

    def scheme() -> str:
        return page.get_attribute("body", "data-md-color-scheme")

    page.goto(site_url)
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


def show(page: Page, html: str) -> None:
    """Replace the content of a page by this HTML."""
    page.evaluate("html => { document.querySelector('article').innerHTML = html }", html)


def table(*rows: tuple[str, ...]) -> str:
    """Return the HTML of a table as the site builds it; the first row is the header."""
    head, *body = (
        "".join(f"<{tag}>{cell}</{tag}>" for cell in row)
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return tables.with_layout(
        f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    )


ERROR = "<code>Such functions do not allow the output views to be modified inplace</code>"
SETTING = "<code>TORCH_NCCL_ASYNC_ERROR_HANDLING=TORCH_NCCL_BLOCKING_WAIT</code>"


def test_tables_and_prose_fit_a_phone_and_a_wide_screen(
    browser: Browser, site_url: str
) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 844})
    advice = "plan for 70% of the capacity, because uneven lengths wait longer"
    text = table(("you see", "it is", "fix"), (ERROR, "the queue, at 90% of its load", advice))
    numbers = table(
        tuple(f"kernel_{i}" for i in range(9)), tuple(f"{i}.25 TB/s" for i in range(9))
    )
    ran = table(
        ("program", "machine", "torch", "Python", "date", "seconds", "tested on torch"),
        ("a_program.py", "2 CPU cores (AMD EPYC)", "2.13.0", "3.11.7", "2026-11-21", "9.5", ""),
    )
    words = f"<dl><dt>rank</dt><dd>{advice}</dd></dl>"
    page.goto(f"{site_url}programs/02_ddp/naive/")  # a short page
    show(
        page,
        f'{text}{numbers}<div class="ran">{ran}</div><div class="glossary">{words}</div>',
    )

    def boxes(selector: str) -> list[dict[str, float]]:
        return page.locator(selector).evaluate_all(
            "all => all.map(each => each.getBoundingClientRect().toJSON())"
        )

    cells = boxes(".cards td")
    assert len(cells) == 3
    assert all(box["left"] >= 0 and box["right"] <= 390 for box in cells)
    assert [box["top"] for box in cells[:3]] == sorted({box["top"] for box in cells[:3]})
    names = (
        page.locator("table.cards")
        .first.locator("td")
        .evaluate_all("all => all.map(each => getComputedStyle(each, '::before').content)")
    )
    assert names == ['"you see: "', '"it is: "', '"fix: "']

    wide = page.locator(".md-typeset__scrollwrap:has(.wide)").first
    page.wait_for_function("box => box.tabIndex === 0", arg=wide.element_handle())
    assert wide.get_attribute("role") == "group"
    assert "kernel_0, kernel_1" in wide.get_attribute("aria-label")
    assert not page.locator(".md-typeset__scrollwrap:has(.cards)").get_attribute("role")
    assert "radial-gradient" in wide.evaluate("box => getComputedStyle(box).background")
    wide.evaluate("box => { box.scrollLeft = box.scrollWidth }")
    assert boxes(".wide td:first-child")[0]["left"] >= 0

    assert boxes(".ran tbody tr")[0]["height"] < 100
    date = page.locator(".ran td:nth-child(5)")
    count_lines = """cell => {
        const range = document.createRange()
        range.selectNodeContents(cell)
        return range.getClientRects().length
    }"""
    assert date.evaluate(count_lines) == 1
    assert boxes(".glossary dd")[0]["width"] > 350

    page.set_viewport_size({"width": 1440, "height": 900})
    prose = (
        "You have a model that fits on one GPU, and you have eight GPUs. How do you train the "
        "model eight times as fast, and still get the result that one GPU would have given you? "
        "Every GPU holds a copy of the model and computes the gradient of its own part of the "
        "batch. Then the GPUs average their gradients, and every GPU makes the same step. "
    ) * 2
    show(page, f"<p>{prose}</p>" + table(("set", "to"), (SETTING, prose)))
    lines = page.locator(".md-content__inner > p").evaluate(
        "p => p.getBoundingClientRect().height / parseFloat(getComputedStyle(p).lineHeight)"
    )
    assert 62 <= len(prose) / lines <= 76
    code, text = page.locator("td").evaluate_all("all => all.map(cell => cell.clientWidth)")
    assert code < text
    page.close()


def test_a_printed_page_has_no_large_gaps_and_hides_folded_programs(
    browser: Browser, site_url: str
) -> None:
    """A block has 40 lines, so two blocks do not fit on a page.

    Five blocks fit on four pages only if a block can begin on one page and end on the next.
    """
    page = browser.new_page()
    path = '<p><a class="program-path" href="">a.py</a></p>'
    lines = "\n".join(f"line_{i}()" for i in range(40))
    block = f'{path}<div class="highlight"><pre><span></span><code>{lines}</code></pre></div>'
    answer = '<details class="question"><summary>Why?</summary><p>Because.</p></details>'
    page.goto(f"{site_url}programs/02_ddp/naive/")  # a short page
    show(
        page,
        block * 5
        + f'<details class="abstract"><summary>The program</summary>{block * 9}</details>'
        + answer,
    )
    page.evaluate("""() => addEventListener("beforeprint", () => {
        for (const each of document.querySelectorAll("details")) each.open = true
    })""")  # the theme does the same for blocks that exist when a page loads
    assert page.pdf(format="A4").count(b"/Type /Page\n") <= 4
    page.emulate_media(media="print")
    assert page.get_by_text("The program", exact=True).is_visible()
    assert not page.locator(".abstract .highlight").first.is_visible()
    assert page.get_by_text("Because.").is_visible()
    style = page.evaluate("""() => {
        const path = document.querySelector("p:has(> .program-path)"), code = document.querySelector("pre > code")
        const styles = [path, code].map(each => getComputedStyle(each))
        return [styles[0].breakAfter, styles[1].paddingTop, +styles[1].orphans > 2]
    }""")
    assert style == ["avoid", "0px", True]  # the path of a program is next to its first lines
    page.close()
