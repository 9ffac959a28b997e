"""Pages in a browser: nothing fails, nothing is asked of another host, and nothing overflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

INPUTS = [
    "assessment", "book", "docs", "labs", "mkdocs.yml", "overrides", "snippets",
    "tests/conftest.py",
]  # fmt: skip


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
