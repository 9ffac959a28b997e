"""Tests of the quiz in a browser: keyboard, stored answers, and no JavaScript."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import SITE_WITHOUT_COMMENTS

from worldsize.site import quiz

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Locator, Page

INPUTS = SITE_WITHOUT_COMMENTS
KEY = "world-size:quiz"
ROOT = Path(__file__).resolve().parent.parent
LESSONS = quiz.load(ROOT)
QUESTIONS = {each.id: each for lesson in LESSONS for each in lesson.questions}
ALL = str(len(QUESTIONS))


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    yield context
    context.close()


def open_quiz(context: BrowserContext, site_url: str) -> Page:
    page = context.new_page()
    page.failed = []
    page.on("pageerror", lambda error: page.failed.append(str(error)))
    page.on("console", lambda message: page.failed.append(message.text))
    page.goto(f"{site_url}assessment/quiz/")
    ready(page)
    return page


def ready(page: Page) -> None:
    page.wait_for_function(
        f"document.querySelectorAll('.quiz-question[data-ready]').length === {ALL}"
    )


def box(page: Page, name: str) -> Locator:
    return page.locator(f".quiz-question[data-quiz='{name}']")


def check(page: Page, name: str) -> str:
    """Press Check, and return the verdict."""
    box(page, name).get_by_role("button", name="Check").click()
    return verdict(page, name)


def verdict(page: Page, name: str) -> str:
    return box(page, name).locator(".quiz-verdict").inner_text()


def answer(page: Page, name: str, text: str) -> str:
    page.fill(f"#{name}-number", text)
    return check(page, name)


def read_storage(page: Page) -> dict:
    return json.loads(page.evaluate(f"localStorage.getItem('{KEY}')") or "{}")


def row(page: Page, start: str) -> list[str]:
    rows = [each.inner_text() for each in page.locator(".quiz-result tbody tr").all()]
    (cells,) = [each.split("\t") for each in rows if each.startswith(start)]
    return cells[1:]


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until the focus is on the element of this selector."""
    for _ in range(400):
        if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"pressing Tab does not reach {selector}")


def test_the_quiz_works_by_keyboard(context: BrowserContext, site_url: str) -> None:
    page = open_quiz(context, site_url)
    press = page.keyboard.press
    press("Tab")
    assert page.evaluate("document.activeElement.textContent").strip() == "Skip to content"
    press("Enter")
    for name, question in QUESTIONS.items():
        here = f".quiz-question[data-quiz='{name}'] "
        if question.kind == "number":
            tab_to(page, f"#{name}-number")
            page.keyboard.type(f"{question.answer:g} {question.unit}")
            press("Enter")
        elif question.kind == "several":
            for place in question.right:
                tab_to(page, f"#{name}-option-{place + 1}")
                press("Space")
        elif question.kind == "order":
            for place in range(len(question.options)):
                up = f"{here}[data-step='{place}'] button:first-child"
                tab_to(page, up)
                there = page.locator(f"{here}.quiz-steps > li").nth(place)
                while there.get_attribute("data-step") != str(place):
                    press("Enter")
                    assert page.evaluate(f'document.activeElement.matches("{up}")')
        else:
            tab_to(page, f"#{name}-option-1")
            press("Space")
            for _ in range(question.right[0]):
                press("ArrowDown")
        if question.kind != "number":
            tab_to(page, f"{here}button[type=submit]")
            width = "parseFloat(getComputedStyle(document.activeElement).outlineWidth)"
            assert page.evaluate(width) >= 1  # the focus is visible
            press("Enter")
        assert verdict(page, name).startswith("✓ Right."), name
        assert box(page, name).locator("details").get_attribute("open") is not None
    assert row(page, "all") == [ALL, ALL, ALL]
    summary = page.inner_text(".quiz-result")
    assert f"{ALL} of {ALL} answered, {ALL} right, {ALL} at the first try." in summary
    assert page.locator(".quiz-again a").count() == 0
    page.reload()
    ready(page)
    assert row(page, "all") == [ALL, ALL, ALL]

    page.once("dialog", lambda dialog: dialog.dismiss())
    clear = page.get_by_role("button", name="Clear all answers")
    clear.focus()
    press("Enter")
    assert row(page, "all") == [ALL, ALL, ALL]
    page.once("dialog", lambda dialog: dialog.accept())
    press("Enter")
    assert read_storage(page) == {} and row(page, "all") == [ALL, "–", "–"]
    assert page.get_by_text("All answers are cleared.").get_attribute("role") == "status"
    assert page.evaluate("document.activeElement.textContent") == "Clear all answers"
    assert not page.failed


def test_wrong_answers_get_an_explanation(context: BrowserContext, site_url: str) -> None:
    page = open_quiz(context, site_url)
    assert check(page, "ring") == "Give a number first."
    assert check(page, "wider") == "Choose an answer first."
    assert read_storage(page) == {}
    for number, question in QUESTIONS.items():
        if question.kind == "number":  # each wrong value has an explanation
            for wrong in question.wrong_values:
                feedback = answer(page, number, f"{wrong.value:g}")
                assert feedback.startswith("✗ Not right."), feedback
                assert wrong.feedback[:30] in feedback, feedback
    assert answer(page, "ring", "55 MiB").startswith("✗ Not right. The answer below")

    for place, option in enumerate(QUESTIONS["utilisation"].options):
        page.check(f"#utilisation-option-{place + 1}")
        feedback = check(page, "utilisation")
        assert feedback.startswith("✓" if option.right else "✗")
        assert option.feedback[:30] in feedback
        chosen = box(page, "utilisation").locator(".quiz-why li:has(.quiz-mark)")
        assert chosen.count() == 1 and option.feedback[:20] in chosen.inner_text()

    page.check("#divergence-option-1")
    page.check("#divergence-option-2")
    feedback = check(page, "divergence")
    assert "1 of your choices is wrong, 1 is missing." in feedback
    signs = box(page, "divergence").locator(".quiz-sign").all_inner_texts()
    assert signs == ["✗ wrong", "✓ right", "✓ right, not chosen"]  # not only by colour
    page.uncheck("#divergence-option-1")  # a changed answer loses its verdict
    assert verdict(page, "divergence") == ""
    assert box(page, "divergence").locator(".quiz-sign").count() == 0
    assert not box(page, "divergence").locator("details").is_visible()

    feedback = check(page, "graph")
    assert (
        feedback.startswith("✗ Not right. 0 of 6 are in the right place.")
        and ".”" not in feedback
    )
    last = box(page, "graph").locator(".quiz-steps > li").last
    last.get_by_role("button", name="Down").press("Enter")
    assert verdict(page, "graph").endswith("is last already.")
    last.get_by_role("button", name="Up").click()
    assert verdict(page, "graph").endswith("is now 5 of 6.")
    assert box(page, "graph").locator(".quiz-verdict").get_attribute("role") == "status"
    # each section to read again is listed once; a second try does not change the first result
    links = page.locator(".quiz-again a").all_inner_texts()
    assert "01 · All-reduce from send and recv" in links and len(links) == len(set(links))
    assert answer(page, "ring", "21").startswith("✓")
    assert row(page, "4 ·") == [str(len(LESSONS[3].questions)), "1", "0"]
    assert "01 · All-reduce from send and recv" not in page.inner_text(".quiz-again")
    assert not page.failed


NUMBERS = {  # the text of an answer, and whether it is right; None is not an answer
    "state": {
        "140": True, "140 GB": True, "140GB": True, "0.14 TB": True, "130.4 GiB": True,
        "140,000 MB": True, "140 000 MB": True, "≈ 139": True, "1120/8": True, "1.4e2 gb": True,
        "130 GB": False, "140 GiB": False, "140 Gb": None, "-140": False, "14,0": False,
        "many": None, "140 14": None, "1/0": None, "": None,
    },
    "sectors": {"1024": True, "1,024 bytes": True, "1 KiB": True, "1 kB": False, "1023": False},
    "ridge": {"295": True, "295,2": True, "300": True, "295 FLOP/B": True, "310": False,
              "295 GB": None},
    "counter": {"256": True, "256.": True, "256 B": None},
}  # fmt: skip


def test_numbers_are_accepted_with_different_units(
    context: BrowserContext, site_url: str
) -> None:
    page = open_quiz(context, site_url)
    for name, cases in NUMBERS.items():
        for text, right in cases.items():
            feedback = answer(page, name, text)
            sign = {True: "✓ Right.", False: "✗ Not right."}
            if right is None:
                assert feedback and not feedback.startswith(("✓", "✗")), (name, text, feedback)
            else:
                assert feedback.startswith(sign[right]), (name, text, feedback)


def test_checked_answers_are_stored(context: BrowserContext, site_url: str) -> None:
    page = open_quiz(context, site_url)
    answer(page, "ring", "24 MiB")
    page.check("#syncs-option-2")
    check(page, "syncs")
    shown = [box(page, "graph").locator("li").nth(n).inner_text() for n in range(3)]
    box(page, "graph").locator(".quiz-steps > li").nth(2).get_by_role(
        "button", name="Up"
    ).click()
    check(page, "graph")
    page.check("#mesh-option-4")  # selected but not checked, so it is not stored
    assert read_storage(page).keys() == {"ring", "syncs", "graph"}
    page.reload()
    ready(page)
    assert page.input_value("#ring-number") == "24 MiB"
    assert verdict(page, "ring").startswith("✗ Not right. 24 MiB: This is twice the tensor.")
    assert page.is_checked("#syncs-option-2") and not page.is_checked("#mesh-option-4")
    assert shown[2].split("\n")[-1] in box(page, "graph").locator("li").nth(1).inner_text()
    assert row(page, "all") == [ALL, "0", "0"]

    other = open_quiz(context, site_url)
    answer(other, "ring", "21 MiB")  # an answer in a second tab appears in the first one
    page.wait_for_function("document.querySelector('#ring-number').value === '21 MiB'")
    assert verdict(page, "ring").startswith("✓") and row(page, "all") == [ALL, "1", "0"]
    assert not page.failed and not other.failed


def follow(page: Page, end: str) -> None:
    link = page.locator(f".md-nav--primary a[href$='{end}']").first
    with page.expect_navigation():
        link.evaluate("link => link.click()")  # the link may be in a closed drawer


def test_answers_survive_going_to_another_page_and_back(
    context: BrowserContext, site_url: str
) -> None:
    page = context.new_page()
    page.goto(f"{site_url}assessment/capstone/")
    for expected in ([ALL, "–", "–"], [ALL, "1", "1"]):
        follow(page, "/quiz/")
        ready(page)
        assert row(page, "all") == expected
        assert page.locator(".quiz-form").count() == len(QUESTIONS)
        assert page.locator(".quiz-result button").count() == 1
        assert answer(page, "ring", "21 MiB").startswith("✓")
        assert row(page, "all") == [ALL, "1", "1"]
        follow(page, "/capstone/")
        page.wait_for_function("document.title.startsWith('Capstone')")
        assert page.locator(".quiz-question").count() == 0


def entry(name: str, **changes: object) -> dict:
    return {"v": QUESTIONS[name].version, "answer": "21", "first": True} | changes


UNREADABLE = {
    "mesh": 3, "counter": None, "unknown": {"v": 1},
    "segments": entry("segments", v="older", answer="11"),
    "sectors": entry("sectors", answer="many"),
    "state": entry("state", answer=[1]),
    "wider": entry("wider", answer=[2, 2]),
    "padding": entry("padding", answer=[9]),
    "silent": entry("silent", answer=[]),
    "scaler": entry("scaler", answer=[0, 1]),
    "graph": entry("graph", answer="0"),
}  # fmt: skip


def test_invalid_stored_data_breaks_nothing(context: BrowserContext, site_url: str) -> None:
    page = open_quiz(context, site_url)
    for stored in ["{", "[1]", json.dumps(UNREADABLE)]:
        page.evaluate("value => localStorage.setItem(...value)", [KEY, stored])
        page.reload()
        ready(page)
        assert row(page, "all") == [ALL, "–", "–"], stored
        assert answer(page, "ring", "21").startswith("✓")
        assert row(page, "all") == [ALL, "1", "1"], stored
        assert read_storage(page)["ring"]["answer"] == "21"
    assert read_storage(page)["unknown"] == {"v": 1}  # other data is not lost
    assert not page.failed


def test_a_window_without_storage_works(context: BrowserContext, site_url: str) -> None:
    context.add_init_script(
        "Object.defineProperty(window, 'localStorage',"
        " { get() { throw new DOMException('denied', 'SecurityError') } })"
    )
    page = open_quiz(context, site_url)
    answer(page, "ring", "21")
    assert answer(page, "state", "35").startswith("✗")
    assert row(page, "all") == [ALL, "1", "1"]
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Clear all answers").click()
    assert row(page, "all") == [ALL, "–", "–"] and page.input_value("#ring-number") == ""
    assert not [each for each in page.failed if "quiz.js" in each]


def test_the_quiz_is_readable_without_javascript(browser: Browser, site_url: str) -> None:
    context = browser.new_context(java_script_enabled=False, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site_url}assessment/quiz/")
    assert page.locator(".quiz-question").count() == len(QUESTIONS)
    assert page.locator(".quiz-question :is(input, button)").count() == 0
    for name, question in QUESTIONS.items():
        here = box(page, name)
        assert here.locator(".quiz-text").is_visible()
        items = here.locator(":is(.quiz-options, .quiz-steps) > li")
        assert items.count() == len(question.options)
        details = here.locator("details")
        assert not details.locator(".quiz-key").is_visible()
        details.locator("summary").focus()
        page.keyboard.press("Enter")
        assert details.locator(".quiz-key").is_visible()
        whys = details.locator(".quiz-why > li")
        assert whys.count() == len(question.options) + len(question.wrong_values)
        assert details.locator(".quiz-read a").count() == len(question.read)
        assert details.locator("pre").count() == len(question.evidence)
    assert page.locator(".quiz-result tbody tr").count() == len(LESSONS) + 1
    context.close()


def test_the_quiz_fits_a_phone_and_has_enough_contrast(browser: Browser, site_url: str) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page = open_quiz(context, site_url)
    for name, question in QUESTIONS.items():
        if question.kind == "number":
            page.fill(f"#{name}-number", "3")
        elif question.kind != "order":
            page.check(f"#{name}-option-1")
        check(page, name)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    cut = page.eval_on_selector_all(
        ".quiz-form :is(li, label, input, button, p), .quiz-answer li, .quiz-result td",
        "all => all.filter(x => x.getBoundingClientRect().right > 390).map(x => x.textContent)",
    )
    assert not cut
    small = page.eval_on_selector_all(
        ".quiz-form :is(input, button), .quiz-result button, .quiz-answer summary",
        """all => all.map(x => [x, x.getBoundingClientRect()])
            .filter(([x, r]) => r.width < 24 || r.height < 24).map(([x, r]) => x.outerHTML)""",
    )
    assert not small
    unnamed = page.eval_on_selector_all(
        ".quiz-form input",
        "all => all.filter(x => x.labels.length !== 1 || !x.labels[0].innerText.trim())"
        ".map(x => x.id)",
    )
    assert not unnamed
    groups = page.eval_on_selector_all(
        ".quiz-form fieldset",
        """all => all.map(x => x.getAttribute("aria-labelledby").split(" ")
            .map(id => document.getElementById(id).innerText.trim().length > 0))""",
    )
    assert groups == [[True, True]] * len(QUESTIONS)
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(x => x.id)")
    assert len(set(ids)) == len(ids)
    backgrounds = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        name = {"light": "default", "dark": "slate"}[scheme]
        page.wait_for_selector(f"body[data-md-color-scheme={name}]")
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        faint = page.evaluate(CONTRAST)
        assert not faint, scheme
    assert len(backgrounds) == 2
    context.close()


CONTRAST = """() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number)
  const light = colour => {
    const [r, g, b] = colour.map(x => x / 255)
      .map(x => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
  }
  const paper = node => { // the colour below it, with transparent layers combined
    const layers = []
    for (let each = node; each; each = each.parentElement) {
      const text = getComputedStyle(each).backgroundColor
      if (!text.startsWith("rgb")) throw new Error(text)
      const [r, g, b, a = 1] = rgb(text)
      layers.push([r, g, b, a])
      if (a === 1) break
    }
    return layers.reverse().reduce(
      (under, [r, g, b, a]) => [r, g, b].map((x, i) => a * x + (1 - a) * under[i]), [255, 255, 255])
  }
  const faint = []
  const selector = ".quiz-sign, .quiz-verdict, .quiz-hint, .quiz-form label, .quiz-form input, " +
    ".quiz-step, .quiz-mark, .quiz-moves button:not([aria-disabled=true]), .quiz-form .md-button"
  for (const node of document.querySelectorAll(selector)) {
    if (!node.textContent.trim()) continue
    const ink = light(rgb(getComputedStyle(node).color).slice(0, 3)), under = light(paper(node))
    const ratio = (Math.max(ink, under) + 0.05) / (Math.min(ink, under) + 0.05)
    if (ratio < 4.5) faint.push(`${node.className} ${ratio.toFixed(2)}: ${node.textContent}`)
  }
  return faint
}"""
