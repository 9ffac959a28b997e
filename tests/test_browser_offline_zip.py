"""Tests of the offline zip: the pages work in a browser without a server."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = SITE_WITHOUT_COMMENTS


@pytest.fixture(scope="module")
def folder(built_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from worldsize.site import offline_zip

    target = tmp_path_factory.mktemp("offline")
    offline_zip.pack(built_site, target / "site.zip")
    with zipfile.ZipFile(target / "site.zip") as archive:
        archive.extractall(target)
    return target / "world-size"


@pytest.fixture
def page(browser: Browser, folder: Path) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"{folder.as_uri()}/index.html")
    yield page
    assert not [url for url in requests if not url.startswith((folder.as_uri(), "data:"))]
    assert not errors
    page.close()


def test_links_point_to_files(page: Page, folder: Path) -> None:
    page.click("article a[href='setup/index.html']")
    page.wait_for_url("**/setup/index.html")
    assert page.locator("[title='This page as Markdown']").count() == 1
    assert not page.locator(".copy-page").count()  # copying needs a request to a server
    links = "links => links.map(({ href }) => href.split(/[?#]/)[0])"
    targets = [url for url in page.locator("a[href]").evaluate_all(links) if "file:" in url]
    assert targets
    assert not [url for url in targets if not Path(url.removeprefix("file://")).is_file()]
    # this section has moved to a different page
    page.goto(f"{folder.as_uri()}/03_model_parallelism/index.html#f-and-g")
    page.wait_for_url("**/03_tensor_parallelism/index.html#f-and-g")


def test_search_finds_a_section(page: Page) -> None:
    page.fill("[data-md-component=search-query]", "Can't detach views in-place")
    page.locator(".md-search-result__item a[href*='#cant-detach-views']").first.click()
    page.wait_for_url("**/02_ddp_in_practice/index.html?h=*#cant-detach-views-in-place")
    page.wait_for_selector("article mark", state="attached")


def test_the_planner_works(page: Page) -> None:
    """This instrument uses everything: imports, later imports, tables, and a worker."""
    page.click("article a[href='instruments/planner/index.html']")
    status, answered = page.locator("#planner [role=status]"), "#planner:not([aria-busy])"
    page.wait_for_selector(f"{answered}[data-ready]")
    status.get_by_text(re.compile("fastest layout that fits: .* 16.94")).wait_for()
    page.click("#planner summary")  # the other settings are folded
    page.select_option("#planner-gpu", "b200")
    page.wait_for_selector(answered)
    status.get_by_text("fastest layout that fits").wait_for()
    assert "16.94" not in status.inner_text()
    page.wait_for_url(re.compile("gpu=b200"))  # the address changes shortly after the controls
    page.get_by_role("button", name="layout 1").click()
    status.get_by_text("launch command").wait_for()


def test_small_instruments_work(page: Page, folder: Path) -> None:
    page.goto(f"{folder.as_uri()}/instruments/index.html")
    for name in ("collective-1", "memory-5"):
        place = page.locator(f"[data-instrument={name.partition('-')[0]}]")
        place.scroll_into_view_if_needed()
        page.wait_for_selector(f"#{name}[data-ready]:not([aria-busy]) svg rect")
    page.click("#collective-1 a")
    page.wait_for_selector("#collective[data-ready]")


def test_a_trace_can_be_stepped_through(page: Page, folder: Path) -> None:
    page.goto(f"{folder.as_uri()}/traces/send_deadlock/index.html")
    page.wait_for_selector("#trace-viewer[data-ready]")
    page.get_by_role("button", name="Show the hang").click()
    assert "Ranks 0, 1, 2 and 3 wait in send" in page.locator(".tv-end").inner_text()
