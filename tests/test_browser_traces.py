"""Tests of the viewer of traces: it shows what the trace says, and the keyboard works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from conftest import finger

from worldsize.execution.trace_run import load_recorder
from worldsize.model import ROOT
from worldsize.model.traces import trace_settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

INPUTS = ["src", "docs/assets", "labs/rank_trace.py", "mkdocs.yml", "overrides", "snippets"]
PROGRAMS = {Path(name).stem: ROOT / name for name in trace_settings(ROOT)}
FAILURES = ["send_deadlock", "unequal_tensors", "dead_rank", "mismatched_collectives"]


def read(name: str) -> dict:
    """Return the stored trace of a program."""
    return json.loads(PROGRAMS[name].with_suffix(".trace.json").read_text("utf-8"))


def last_steps(trace: dict, tick: int) -> list[list | None]:
    """Return the last step of each rank up to a tick. This is the reference for the viewer."""
    found: list[list | None] = [None] * trace["ranks"]
    for step in trace["steps"]:
        if step[0] <= tick:
            found[step[1]] = step
    return found


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """Yield one tab for all tests, because a new tab costs the time of three page loads."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    errors: list[str] = []
    listeners = {
        "console": lambda message: errors.append(message.text),
        "pageerror": lambda error: errors.append(str(error)),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    set_view(tab)
    yield tab
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    tab.unroute_all()
    assert not errors


@pytest.fixture(scope="module")
def phone(browser: Browser) -> Iterator[Page]:
    """Yield a tab of a phone with a touch screen."""
    size = {"width": 390, "height": 844}
    context = browser.new_context(viewport=size, is_mobile=True, has_touch=True)
    yield context.new_page()
    context.close()


def swipe(page: Page, start: tuple[float, float], dx: float, dy: float) -> None:
    """Move a finger over the screen with real touch events."""
    with finger(page) as send:
        for step in range(8):
            point = {"x": start[0] + dx * step / 7, "y": start[1] + dy * step / 7}
            send("Move" if step else "Start", point)
        page.wait_for_timeout(80)  # a finger that rests does not leave the page in motion
        send("End")


def boxes_of(page: Page, selector: str) -> list[dict]:
    """Return the boxes of all elements in one call: the viewer replaces some of them when it scrolls."""
    return page.evaluate(
        "name => [...document.querySelectorAll(name)].map(e => e.getBoundingClientRect().toJSON())",
        selector,
    )


def set_view(
    page: Page, width: int = 1440, colours: str = "light", media: str = "screen"
) -> None:
    page.set_viewport_size({"width": width, "height": 844 if width < 500 else 900})
    page.emulate_media(color_scheme=colours, media=media, reduced_motion="reduce")


def open_trace(page: Page, site_url: str, name: str, query: str = "") -> Page:
    page.goto(f"{site_url}traces/{name}/{query}")
    page.wait_for_selector("#trace-viewer[data-ready]")
    return page


def tick(page: Page) -> int:
    """Return the tick that the viewer shows."""
    shown = page.locator(".tv-bar output").inner_text()
    assert shown.startswith(f"Tick {page.locator('#trace-viewer').get_attribute('data-tick')}")
    return int(re.match(r"Tick (\d+) of \d+", shown)[1])


# Moves to each tick, and returns for each rank the line at which the source shows its mark, and
# the line in its lane.
MARKS = """last => Array.from({ length: last }, (_, i) => {
  const slider = document.querySelector(".tv-over input")
  slider.value = i + 1
  slider.dispatchEvent(new Event("input", { bubbles: true }))
  const marks = [...document.querySelectorAll(".tv-line")].flatMap(line =>
    [...line.querySelectorAll(".tv-chip")].map(chip => [Number(chip.textContent), Number(line.dataset.line)]))
  const lanes = [...document.querySelectorAll(".tv-lanes .tv-name")].map(each =>
    [Number(each.querySelector(".tv-chip").textContent), Number(each.querySelector("b").textContent.replace("line ", ""))])
  return [marks.sort((a, b) => a[0] - b[0]), lanes]
})"""


@pytest.mark.parametrize("name", ["one_f_one_b", "mismatched_collectives"])
def test_the_marks_of_every_tick_equal_the_trace(page: Page, site_url: str, name: str) -> None:
    trace = read(name)
    open_trace(page, site_url, name)
    last = trace["steps"][-1][0]
    shown = page.evaluate(MARKS, last)
    for number, (marks, lanes) in enumerate(shown, start=1):
        steps = last_steps(trace, number)
        expected = [[rank, step[3]] for rank, step in enumerate(steps) if step]
        assert marks == expected, f"tick {number}"
        assert [each for each in lanes if each[1]] == expected, f"tick {number}"


def test_positions_equal_the_trace(page: Page, site_url: str) -> None:
    page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    page.goto(f"{site_url}assets/instruments/trace_viewer.js")
    for name in PROGRAMS:
        trace = read(name)
        last = trace["steps"][-1][0]
        found = page.evaluate(
            """async ([url, trace, last]) => {
              const { model, stateAt } = await import(url), made = model(trace)
              return Array.from({ length: last }, (_, i) =>
                stateAt(made, i + 1).map(({ line, kind }) => line ? [line, kind] : null))
            }""",
            [page.url, trace, last],
        )
        for number, positions in enumerate(found, start=1):
            expected = [step and [step[3], step[2]] for step in last_steps(trace, number)]
            assert positions == expected, f"{name}, tick {number}"


def test_the_variables_of_each_function_equal_the_trace(page: Page, site_url: str) -> None:
    page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
    page.goto(f"{site_url}assets/instruments/trace_viewer.js")
    deleted = 0
    for name in PROGRAMS:
        trace = read(name)
        if name == "swapped_order":  # no stored trace deletes a variable
            trace["steps"][9][6] = {"-": ["count"]}
        found = page.evaluate(
            """async ([url, trace]) => {
              const { model, stateAt } = await import(url), made = model(trace), states = []
              for (let tick = 1; tick <= made.last; tick += 3) {
                states.push(stateAt(made, tick).map(({ stack }) => stack.at(-1)?.variables ?? null))
              }
              return states
            }""",
            [page.url, trace],
        )
        for number, shown in enumerate(found):
            variables: dict[tuple[int, int], dict] = {}
            top: list[dict | None] = [None] * trace["ranks"]
            for at, rank, kind, _, _, *rest in trace["steps"]:
                if at > 1 + 3 * number or kind not in ("line", "return"):
                    continue
                frame, changes = rest
                here = variables.setdefault((rank, frame), {})
                here.update({key: value for key, value in changes.items() if key != "-"})
                for gone in changes.get("-", ()):
                    del here[gone]
                    deleted += 1
                top[rank] = here
            assert shown == top, f"{name}, tick {1 + 3 * number}"
    assert deleted > 0


def test_the_variables_equal_the_trace(page: Page, site_url: str) -> None:
    trace = read("ring_all_reduce")
    open_trace(page, site_url, "ring_all_reduce", "?tick=97")
    values = page.locator(".tv-variables tr", has_text=re.compile("^sent")).first
    sent = [cell.inner_text() for cell in values.locator("td").all()]
    changes = [step[6] for step in trace["steps"] if step[2] in ("line", "return")]
    most = max(each["sent"] for each in changes if "sent" in each)
    assert sent == [str(most)] * 4
    chunks = page.locator(".tv-strip span")
    assert chunks.count() == 16
    assert all(each.inner_text().startswith("= ✓ ") for each in chunks.all())
    open_trace(page, site_url, "ring_all_reduce", "?tick=9")
    assert not any(re.search("[=✓]", each.inner_text()) for each in chunks.all())
    # after the reduce-scatter, rank r has the final value of chunk r + 1
    open_trace(page, site_url, "ring_all_reduce", "?tick=55")
    final = [i for i, each in enumerate(chunks.all()) if "✓" in each.inner_text()]
    assert final == [4 * rank + (rank + 1) % 4 for rank in range(4)]


def test_a_variable_of_an_enclosing_function_is_shown_once(page: Page, site_url: str) -> None:
    trace = read("ring_all_reduce")
    inner = [name for name, _ in trace["functions"]].index("ring_all_reduce.<locals>.pass_on")
    # line 34 of pass_on is about to run, and line 33 has changed `sent`
    step = next(s for s in trace["steps"] if s[2:5] == ["line", 34, inner] and s[1] == 0)
    open_trace(page, site_url, "ring_all_reduce", f"?tick={step[0]}")
    names = page.locator(".tv-variables tbody th[scope=row]").all_inner_texts()
    assert names.count("sent") == names.count("incoming") == 1
    assert "outgoing" in names
    cells = page.locator(".tv-variables tr", has_text=re.compile("^sent")).locator("td")
    assert cells.all_inner_texts() == [str(step[6]["sent"])] * 4
    assert cells.locator(".changed").count() == 4


def test_the_viewer_works_by_keyboard_alone(page: Page, site_url: str) -> None:
    open_trace(page, site_url, "ring_all_reduce")
    sends = sorted({step[0] for step in read("ring_all_reduce")["steps"] if step[2] == "start"})
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.tv-over input')"):
            break
    assert page.evaluate("document.activeElement.matches('.tv-over input')")
    for key, expected in [
        ("ArrowRight", 2), ("ArrowRight", 3), ("ArrowLeft", 2), ("End", 97), ("ArrowRight", 97),
        ("m", 97), ("Home", 1), ("ArrowLeft", 1), ("m", sends[0]), ("m", sends[1]),
    ]:  # fmt: skip
        page.keyboard.press(key)
        assert tick(page) == expected, key
    page.keyboard.press(" ")
    page.wait_for_selector(f"#trace-viewer[data-tick='{sends[1] + 1}']")
    page.keyboard.press(" ")
    assert page.locator(".tv-play").inner_text() == "Play"
    # in the source, the arrow keys choose a line, and Enter moves to its next execution
    page.keyboard.press("Home")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.tv-line')"):
            break
    assert page.evaluate("document.activeElement.dataset.line") == "26"
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.line") == "29"
    page.keyboard.press("Enter")
    assert tick(page) == 4


def test_keys_work_without_a_click_while_the_viewer_is_in_view(
    page: Page, site_url: str
) -> None:
    open_trace(page, site_url, "ring_all_reduce")
    page.keyboard.press("ArrowRight")
    assert tick(page) == 2
    page.keyboard.press("End")  # this key still moves the page
    page.wait_for_function("scrollY > 0")
    assert tick(page) == 2
    page.evaluate("scrollTo(0, 0)")
    page.locator(".tv-lanes > svg").click(position={"x": 200, "y": 5})
    page.keyboard.press("End")
    assert tick(page) == 97
    assert page.get_by_role("button", name="Next message").is_disabled()
    page.keyboard.press("/")  # the search of the theme gets the focus
    page.wait_for_function("document.activeElement.matches('input')")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#trace-viewer").get_attribute("data-tick") == "97"


def test_a_link_in_the_text_moves_to_a_tick(page: Page, site_url: str) -> None:
    open_trace(page, site_url, "gpipe")
    page.get_by_role("link", name="tick 140").click()
    assert tick(page) == 140


def test_a_click_on_a_line_moves_to_its_next_execution(page: Page, site_url: str) -> None:
    trace = read("gpipe")
    open_trace(page, site_url, "gpipe")
    line = 47
    ticks = sorted({step[0] for step in trace["steps"] if step[2:4] == ["line", line]})
    assert len(ticks) > 10
    for expected in [*ticks[:5], ticks[5]]:
        page.locator(f".tv-line[data-line='{line}'] i").click()
        assert tick(page) == expected
    page.locator(".tv-over input").press("End")
    page.locator(f".tv-line[data-line='{line}'] i").click()
    assert tick(page) == ticks[0]


def test_a_click_on_an_arrow_shows_both_of_its_ends(page: Page, site_url: str) -> None:
    trace = read("gpipe")
    open_trace(page, site_url, "gpipe")
    page.get_by_role("button", name="Next message").click()
    send, receive = (trace["operations"][each] for each in trace["messages"][0])
    arrow = page.locator(".grab[data-message='0']")
    arrow.dispatch_event("click")
    both = page.locator(".tv-both").inner_text()
    assert f"Rank {send['rank']} sends at line {send['line']}." in both
    assert f"Rank {receive['rank']} has the message at line {receive['line']}." in both
    assert arrow.locator("xpath=preceding-sibling::*[contains(@class, 'chosen')]").count() == 1
    marked = page.locator(".tv-line[data-end]")
    assert [each.get_attribute("data-line") for each in marked.all()] == ["41", "47"]
    end = next(
        s[0] for s in trace["steps"] if s[2] == "done" and trace["messages"][0][1] in s[4]
    )
    page.get_by_role("button", name=f"Go to tick {end}").click()
    assert tick(page) == end
    # the same message in the list, which the keyboard reaches
    pressed = page.locator(".tv-now li button[aria-pressed=true]")
    assert pressed.count() == 1
    assert "float32 3×32 · 384\u00a0bytes" in pressed.inner_text()
    pressed.press("Enter")
    assert page.locator(".tv-both").count() == 0
    # the marks disappear when the reader moves to a different tick
    arrow.dispatch_event("click")
    assert page.locator(".tv-both").count() == 1
    page.get_by_role("button", name="Step back").click()
    assert page.locator(".tv-both, .tv-line[data-end]").count() == 0


def test_a_click_on_a_collective_shows_all_of_its_parts(page: Page, site_url: str) -> None:
    open_trace(page, site_url, "naive")
    page.get_by_role("button", name="Next collective").click()
    page.locator(".box[data-collective='0']").first.dispatch_event("click")
    rows = page.locator(".tv-both > div").all_inner_texts()
    assert len(rows) == 4
    contents = {re.search("with (mean .*)\\.", row)[1] for row in rows}
    assert len(contents) == 4  # the gradients differ before the all-reduce


@pytest.mark.parametrize("name", FAILURES)
def test_the_last_picture_of_a_failure_names_the_line_of_each_rank(
    page: Page, site_url: str, name: str
) -> None:
    trace = read(name)
    open_trace(page, site_url, name)
    assert page.locator(".tv-end").inner_text() == ""
    died = any(end["how"] in ("killed", "aborted") for end in trace["ends"])
    page.get_by_role("button", name=f"Show the {'end' if died else 'hang'}").click()
    assert tick(page) == trace["steps"][-1][0]
    headline = page.locator(".tv-end").inner_text()
    assert headline.startswith("From here on, no rank makes progress. ")
    assert "until the call raises RuntimeError" in headline
    for rank, end in enumerate(trace["ends"]):
        sentence = next(
            each for each in headline.split(". ")[1:] if re.match(rf"Ranks? .*\b{rank}\b", each)
        )
        assert f"line {end['line']}" in sentence
        assert all(call in sentence for call in end.get("in", []))
    never = sum("in" in end for end in trace["ends"])
    assert page.locator(".tv-lanes rect.never").count() == never > 0
    set_view(page, 390)
    # the viewer draws the picture again with its new width
    page.wait_for_function(
        "document.querySelector('.tv-lanes > svg').viewBox.baseVal.width <= 390"
    )
    labels = page.locator(".tv-lanes text", has_text=re.compile("does not return|✕"))
    assert labels.filter(has_text="does not return").count() == never
    edges = "all => all.map(each => each.getBoundingClientRect()).map(e => [e.left, e.right])"
    for left, right in labels.evaluate_all(edges):
        assert left >= 0 and right <= 390


def test_a_program_without_a_failure_has_no_red_text(page: Page, site_url: str) -> None:
    last = read("swapped_order")["steps"][-1][0]
    open_trace(page, site_url, "swapped_order", f"?tick={last}")
    assert page.locator(".tv-end").inner_text() == ""
    assert page.locator(".tv .red, .tv .bad, .tv .never").count() == 0
    # the lesson: each all-reduce adds the loss of one rank and the count of the other rank
    row = page.locator(".tv-variables tr", has_text="loss").first.inner_text()
    assert row.count("12") == 2


def test_dragging_in_the_lanes_moves_the_cursor(page: Page, site_url: str) -> None:
    open_trace(page, site_url, "ring_all_reduce")
    box = page.locator(".tv-lanes > svg").bounding_box()
    page.mouse.click(box["x"] + 300, box["y"] + 5)
    first = tick(page)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 5)
    page.mouse.up()
    assert 1 < first < tick(page)
    second = tick(page)
    page.mouse.move(box["x"] + 500, box["y"] + 5)
    assert tick(page) == second  # the button is not pressed any more


def test_a_vertical_swipe_scrolls_and_changes_no_tick(phone: Page, site_url: str) -> None:
    open_trace(phone, site_url, "one_f_one_b", "?tick=50")
    middles = """all => all.map(each => each.getPointAtLength(each.getTotalLength() / 2))
      .filter(each => each.x > 90 && each.x < 350).map(({ x, y }) => [x, y])"""
    arrow = phone.locator(".tv-lanes .grab").evaluate_all(middles)[0]
    for kind in ("bar", "arrow", "overview"):
        phone.evaluate("scrollTo(0, 400)")
        lanes = phone.locator(".tv-lanes > svg").bounding_box()
        x, y = {"bar": (300, 25), "arrow": arrow, "overview": (300, -20)}[kind]
        swipe(phone, (lanes["x"] + x, lanes["y"] + y), 5, -150)
        phone.wait_for_function("scrollY > 460")
        assert tick(phone) == 50, kind
        assert phone.locator(".tv-both").count() == 0, kind
    # a tap on the same arrow selects its message
    phone.evaluate("scrollTo(0, 400)")
    phone.touchscreen.tap(lanes["x"] + arrow[0], lanes["y"] + arrow[1])
    assert phone.locator(".tv-both").count() == 1


def test_a_tap_and_a_sideways_drag_move_the_cursor(phone: Page, site_url: str) -> None:
    open_trace(phone, site_url, "one_f_one_b", "?tick=50")
    phone.evaluate("scrollTo(0, 400)")
    lanes = phone.locator(".tv-lanes > svg").bounding_box()
    x, y = lanes["x"] + 300, lanes["y"] + 25
    swipe(phone, (x, y), -60, 10)
    assert tick(phone) not in (50, 1)
    phone.touchscreen.tap(x, y)
    assert tick(phone) > 50
    before = tick(phone)
    phone.touchscreen.tap(lanes["x"] + 30, y)  # the name of a rank
    assert tick(phone) == before


def test_a_tap_on_play_leaves_a_readable_button(phone: Page, site_url: str) -> None:
    open_trace(phone, site_url, "one_f_one_b")
    play = phone.locator(".tv-play")
    colour = "e => getComputedStyle(e).backgroundColor"
    before = play.evaluate(colour)
    play.tap()
    assert play.inner_text() == "Pause"
    assert play.evaluate(colour) == before
    play.tap()


def test_a_phone_shows_the_lanes_above_the_variables(phone: Page, site_url: str) -> None:
    open_trace(phone, site_url, "one_f_one_b", "?tick=60")
    compact = phone.locator(".tv-compact svg")
    assert not compact.is_visible()
    phone.locator(".tv-variables table").evaluate("e => e.scrollIntoView({ block: 'center' })")
    compact.wait_for()
    places = (".tv-compact", ".tv-variables table tbody tr:last-child")
    boxes = [phone.locator(each).bounding_box() for each in places]
    assert boxes[0]["y"] + boxes[0]["height"] < boxes[1]["y"] < 844
    names = [each.split() for each in compact.locator(".tv-name").all_inner_texts()]
    steps = last_steps(read("one_f_one_b"), 60)
    assert [int(each[2]) for each in names] == [step[3] for step in steps]
    swipe(phone, (300, boxes[0]["y"] + 25), -60, 5)
    assert tick(phone) != 60
    # the buttons that show more lines of the source are large, and they do not cover the source
    phone.locator(".tv-source").evaluate("e => { e.scrollTop = 0 }")
    phone.locator(".tv-away button").first.wait_for()
    source, *buttons = boxes_of(phone, ".tv-source, .tv-away button")
    assert buttons
    for box in buttons:
        assert box["height"] >= 32 and box["y"] >= source["bottom"]


def test_a_rank_in_a_shared_function_names_the_line_of_its_call(
    page: Page, site_url: str
) -> None:
    trace = read("one_f_one_b")
    open_trace(page, site_url, "one_f_one_b", "?tick=60")
    names = page.locator(".tv-lanes .tv-name").all_inner_texts()
    for rank, (name, step) in enumerate(zip(names, last_steps(trace, 60), strict=True)):
        recorded = [s for s in trace["steps"] if s[1] == rank and s[0] <= 60 and s[2] == "line"]
        inside = step[3] in (31, 32)  # `exchange` is called at seven lines
        assert ("from line" in name) == inside
        assert not inside or f"from line {recorded[-1][3]}" in name
    assert "at line 32, called from line 88." in page.locator(".tv-now p").first.inner_text()
    # autograd calls `gradient_ready`, so the last line before it is not the line of the call
    open_trace(page, site_url, "mini_ddp")
    assert "from line" not in page.locator(".tv-legend").text_content()


def test_no_number_of_the_variables_is_broken(phone: Page, site_url: str) -> None:
    open_trace(phone, site_url, "one_f_one_b", "?tick=60")
    lines = "all => all.map(e => [e.getClientRects().length, e.textContent])"
    parts = phone.locator(".tv-variables table td i").evaluate_all(lines)
    assert any(re.fullmatch(r"-?\d(\.\d+)?e-\d+", text) for _, text in parts)
    assert {count for count, _ in parts} == {1}


@pytest.mark.parametrize("name", ["ring_all_reduce", "gpipe", "hooks", "send_deadlock"])
def test_a_page_fits_a_phone_and_shows_the_lanes_above_the_source(
    page: Page, site_url: str, name: str
) -> None:
    set_view(page, 390, "dark")
    open_trace(page, site_url, name)
    last = read(name)["steps"][-1][0]
    for number in (1, last // 2, last):
        page.locator(".tv-over input").evaluate(
            "(slider, to) => { slider.value = to; slider.dispatchEvent(new Event('input', { bubbles: true })) }",
            number,
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        lanes, source = (
            page.locator(f".tv-{each}").bounding_box() for each in ("lanes", "source")
        )
        assert lanes["y"] + lanes["height"] <= source["y"]
        # the mark of each rank is in view, or a button at the edge of the source moves to it
        boxes = boxes_of(page, ".tv-line .tv-chip")
        top, bottom = source["y"], source["y"] + source["height"]
        in_view = [box for box in boxes if top <= box["y"] <= bottom - box["height"]]
        elsewhere = page.locator(".tv-away .tv-chip").count()
        assert in_view
        assert len(in_view) + elsewhere == read(name)["ranks"]


def test_a_phone_shows_the_steps_without_sideways_scrolling(page: Page, site_url: str) -> None:
    set_view(page, 390)
    open_trace(page, site_url, "ring_all_reduce")
    page.locator(".trace-table summary").click()
    table = page.locator("table.trace")
    assert table.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = boxes_of(page, "table.trace tbody tr:first-child td")
    assert boxes[3]["width"] > 150 and boxes[4]["y"] > boxes[3]["y"]
    page.evaluate("scrollBy(0, 3000)")
    page.evaluate("scrollBy(0, -200)")  # the theme then shows its button Back to top
    assert not page.locator(".md-top").is_visible()


def test_nothing_moves_by_itself(page: Page, site_url: str) -> None:
    page.emulate_media(reduced_motion="no-preference")
    open_trace(page, site_url, "ring_all_reduce")
    page.wait_for_timeout(900)  # longer than a step at the normal speed
    assert tick(page) == 1
    assert page.locator(".tv").evaluate("e => e.getAnimations({ subtree: true }).length") == 0


# For each text of the viewer: its contrast with what is behind it, and its words.
CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true })
  const paint = colour => { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1) }
  const luminance = () => {
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].map(byte => {
      const x = byte / 255
      return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
    })
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
  }
  const own = node => [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim())
  const texts = [...document.querySelectorAll(".tv *")].filter(each =>
    own(each) && each.checkVisibility() && !each.matches("style, title, option, :disabled, .hatch"))
  return texts.map(each => {
    const layers = []
    for (let at = each; at; at = at.parentElement) {
      layers.unshift(getComputedStyle(at).backgroundColor)
    }
    const text = each.localName === "text", before = each.previousElementSibling
    for (const layer of layers) paint(layer)
    if (text && before?.localName === "rect" && !getComputedStyle(before).fill.startsWith("url")
      && before.matches(".computes, .back, .pill")) paint(getComputedStyle(before).fill)
    const paper = luminance()
    const style = getComputedStyle(each)
    paint(text ? style.fill : style.color)
    const [low, high] = [paper, luminance()].sort((a, b) => a - b)
    return [(high + 0.05) / (low + 0.05), each.textContent.trim().slice(0, 40), each.outerHTML.slice(0, 80)]
  })
}"""


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("name", ["ring_all_reduce", "dead_rank", "tensor_parallel_block"])
def test_text_has_enough_contrast(page: Page, site_url: str, name: str, colours: str) -> None:
    set_view(page, 1440, colours)
    last = read(name)["steps"][-1][0]
    open_trace(page, site_url, name, f"?tick={last if name == 'dead_rank' else last // 2}")
    if (
        name == "tensor_parallel_block"
    ):  # the other two traces have no collective after this tick
        page.get_by_role("button", name="Next collective").click()
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 60
    assert not [each for each in contrasts if each[0] < 4.5]


def test_paper_shows_the_picture_without_controls(page: Page, site_url: str) -> None:
    open_trace(page, site_url, "gpipe", "?tick=100")
    set_view(page, 794, media="print")
    assert page.locator(".tv-lanes > svg").is_visible()
    assert page.locator(".tv-line.now").first.is_visible()
    for hidden in (".tv-play", ".tv-over", ".tv-fold"):
        assert not page.locator(hidden).first.is_visible(), hidden


def test_without_javascript_a_page_has_a_picture_and_a_table(
    browser: Browser, site_url: str
) -> None:
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{site_url}traces/send_deadlock/")
    picture = page.locator("#trace-viewer img")
    assert picture.is_visible()
    assert picture.evaluate("image => image.naturalWidth") > 0
    assert "At the end, no rank makes progress." in picture.get_attribute("alt")
    page.locator(".trace-table summary").click()
    rows = page.locator(".trace-table tbody tr:not(.hang)")
    assert rows.count() == len(read("send_deadlock")["steps"])
    assert page.locator(".trace-table tr.hang").is_visible()
    page.close()


def test_the_viewer_is_small_and_imports_nothing(built_site: Path) -> None:
    module = (built_site / "assets/instruments/trace_viewer.js").read_bytes()
    assert len(module) < 40_000
    assert not re.search(rb"^import\b|\bimport\(|\bURL\(\"", module, re.MULTILINE)
    style = (built_site / "assets/instruments/trace_viewer.css").read_text("utf-8")
    assert "url(" not in style and "@import" not in style


def test_the_page_of_the_recorder_works_from_a_disk(browser: Browser, tmp_path: Path) -> None:
    recorder = load_recorder(ROOT)
    trace = read("send_deadlock")
    file = tmp_path / "run.html"
    source = PROGRAMS["send_deadlock"].read_text("utf-8")
    file.write_text(recorder.page(trace, [source], *recorder.viewer_files()), "utf-8")
    page = browser.new_page(viewport={"width": 390, "height": 844})
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("#trace-viewer[data-ready]")
    page.locator(".tv-over input").press("End")
    assert tick(page) == 4
    assert (
        "Ranks 0, 1, 2 and 3 wait in send at line 33 until the call raises RuntimeError."
        in page.locator(".tv-end").inner_text()
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("details summary").inner_text() == "All steps as a table"
    assert requests == [file.as_uri()]
    assert not errors
    page.close()
