"""Tests of the instruments: numbers equal those of the programs, and the keyboard works."""

from __future__ import annotations

import argparse
import dataclasses
import html
import importlib.util
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from conftest import SITE_WITHOUT_COMMENTS, finger

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = [page.read_text("utf-8") for page in (ROOT / "docs/instruments").glob("*.md")]
EMBEDDED = {name for page in PAGES for name in re.findall(r'--8<-- "(snippets/[^":]+)', page)}
# the files on which the pages and the numbers of the instruments depend
INPUTS = [
    "src", "docs/assets", "docs/instruments", "docs/index.md", "docs/contributing/site.md", "mkdocs.yml", "overrides", "snippets/planner",
    "snippets/03_model_parallelism/schedules.py", "snippets/06_gpu_computing/roofline.py",
    "snippets/09_inference/decode_bound.py", *sorted(EMBEDDED),
]  # fmt: skip
PROGRAMS = {
    "formats": "05_mixed_precision/number_formats.py",
    "roofline": "planner/roofs.py",
    "collective": "01_parallelism_strategies/collective_steps.py",
    "schedules": "03_model_parallelism/pipeline_times.py",
    "serving": "09_inference/serving_load.py",
    "attention": "10_flash_attention/attention_in_tiles.py",
    "memory": "planner/rank_memory.py",
    "planner": "planner/plan.py",
}
NAMES = list(PROGRAMS)


def program(name: str) -> ModuleType:
    """Import the program of an instrument, or a program at a given path."""
    path = ROOT / "snippets" / PROGRAMS.get(name, name)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tab(browser: Browser) -> Iterator[Page]:
    """Yield one tab for all tests, because a new tab costs the time of three page loads."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
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


def set_view(
    page: Page, width: int = 600, colours: str = "light", media: str = "screen"
) -> None:
    """Set the window and the media; a smaller window needs less painting after each key."""
    page.set_viewport_size({"width": width, "height": 900})
    # with reduced motion, no instrument begins to play by itself
    page.emulate_media(color_scheme=colours, media=media, reduced_motion="reduce")


def open_instrument(page: Page, site_url: str, name: str, query: str = "") -> Page:
    page.goto(f"{site_url}instruments/{name}/{query}")
    page.wait_for_selector(f"#{name}[data-ready]")
    return wait_for_answer(page, name)


def unfold(page: Page, name: str) -> None:
    """Show the settings that are folded."""
    page.locator(f"#{name} details").evaluate_all("all => all.forEach(e => { e.open = true })")


def with_carets(text: str) -> str:
    """Return the text with raised exponents written as programs print them: 2⁻⁴ as 2^-4."""
    raised = "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
    text = re.sub(f"[{raised}]+", r"^\g<0>", text)
    return text.translate(str.maketrans(raised, "-0123456789"))


def wait_for_answer(page: Page, name: str) -> Page:
    """Wait until the worker of the page, if it has one, has answered."""
    page.wait_for_selector(f"#{name}:not([aria-busy])")
    return page


def address(page: Page) -> str:
    """Return the settings in the address. A page writes them 150 ms after a change."""
    later = "new Promise(done => setTimeout(() => done(location.search.slice(1)), 250))"
    return page.evaluate(later)  # the page counts the time, so a slow machine changes nothing


# The answers are returned as text, because Playwright needs more time to convert values than
# the module needs to compute them.
ANSWERS = """async ([url, name, cases]) => {
  const module = await import(url)
  return JSON.stringify(JSON.parse(cases).map(each => module[name](...each)), (_, value) => {
    if (typeof value == "number" && !Number.isFinite(value)) throw new Error(`${value} in JSON`)
    return value
  })
}"""


def open_module(page: Page, site_url: str, name: str) -> str:
    """Open the file of an instrument's module as text, and return its URL. No page is drawn."""
    url = f"{site_url}assets/instruments/{name}.js"
    if page.url != url:
        page.route("**/favicon.ico", lambda route: route.fulfill(status=204))
        page.goto(url)  # a page of the same origin that draws nothing
    return url


def call_javascript(page: Page, site_url: str, name: str, function: str, cases: list) -> list:
    """Return the results of a function of an instrument's module for all cases."""
    url = open_module(page, site_url, name)
    answers = page.evaluate(ANSWERS, [url, function, json.dumps(cases, allow_nan=False)])
    return json.loads(answers)


def test_number_formats_equal_those_of_the_program(page: Page, site_url: str) -> None:
    formats, random = program("formats"), Random(0)
    ends = [
        "0",
        "-0",
        "inf",
        "-inf",
        "nan",
        "448",
        "464",
        "65519.999",
        "65520",
        "1e99",
        "1e-99",
    ]
    cases = [[x, name, 0, 3, []] for x in ends for name in formats.FORMATS]
    while len(cases) < 500:
        kind = random.random()
        if kind < 0.2:
            number = hex(random.getrandbits(32))
        elif kind < 0.4:  # numbers in the middle between two numbers of a format
            number = str(random.randrange(4096) / 2 ** random.randrange(-8, 24))
        else:
            number = (
                f"{random.gauss(0, 1) * 10 ** random.uniform(-12, 8):.{random.randint(1, 17)}g}"
            )
        name, scale = random.choice(list(formats.FORMATS)), random.randint(-24, 24)
        rest = [
            random.gauss(0, 1) * 2 ** random.randint(-8, 8)
            for _ in range(random.randint(0, 31))
        ]
        scale *= name not in formats.BLOCKS
        cases.append([number, name, scale, 2 ** random.choice([0, 1, 4, 7, 8, 12]), rest])
    for case, answer in zip(
        cases, call_javascript(page, site_url, "formats", "facts", cases), strict=True
    ):
        assert answer == formats.facts(*case), case


def test_rooflines_equal_those_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "snippets" / "planner")
    roofs, random = program("roofline"), Random(0)
    names = list(roofs.points(roofs.MODELS["llama-3-8b"], 1, 1, 1, 1))
    cases = [
        [
            *(random.choice(list(some)) for some in (roofs.GPUS, roofs.MODELS, names)),
            random.randint(1, 1024),
            *(int(2 ** random.uniform(*ends)) for ends in ((5, 17), (0, 14), (8, 14))),
        ]
        for _ in range(500)
    ]
    for case, answer in zip(
        cases, call_javascript(page, site_url, "roofline", "facts", cases), strict=True
    ):
        assert answer == roofs.facts(*case), case


def test_roofline_points_equal_those_of_the_chapters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "snippets" / "planner")
    roofs, kernels = program("roofline"), program("06_gpu_computing/roofline.py").operations()
    decode = program("09_inference/decode_bound.py")
    llama = roofs.MODELS["llama-3-8b"]
    for name, b, n in (("vector add", 1, 2**24), ("softmax", 1, 2**24)):
        assert roofs.points(llama, b, 2048, 1, n)[name] == kernels[name]
    for b in (1, 64):
        at = roofs.points(llama, b, 2048, b, 8192)
        assert at["matmul"] == kernels[f"decode, batch {b}"]
        assert at["decode"] == decode.step(decode.MODELS["Llama 3 8B"], b, 2048)


@pytest.mark.parametrize(
    "name, element, control",
    [("roofline", "decode", "batch"), ("schedules", "rank-2", "rank-2")],
)
def test_dragging_an_element_changes_its_control(
    page: Page, site_url: str, name: str, element: str, control: str
) -> None:
    open_instrument(page, site_url, name)
    slider = page.locator(f"#{name}-{control}")
    for by in ("mouse", "finger"):
        box = page.locator(f'#{name} svg [data-drag="{element}"]').bounding_box()
        before = int(slider.input_value())
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        if by == "mouse":
            page.mouse.move(x, y)
            page.mouse.down()
            page.mouse.move(x + 60, y, steps=5)
            page.mouse.up()
        else:
            with finger(page) as send:
                send("Start", {"x": x, "y": y})
                for step in range(1, 7):
                    send("Move", {"x": x - 20 * step, "y": y})
                send("End")
        after = int(slider.input_value())
        assert after > before if by == "mouse" else after <= before - 2, (by, before, after)
        page.mouse.move(x, y)  # after the release, the element no longer follows
        assert int(slider.input_value()) == after


@pytest.mark.parametrize(
    "name, element, control",
    [("formats", "#formats-times", "times"), ("roofline", "[data-drag='decode']", "batch")],
)
def test_a_swipe_that_scrolls_the_page_changes_no_value(
    page: Page, site_url: str, name: str, element: str, control: str
) -> None:
    open_instrument(page, site_url, name)
    place = page.locator(f"#{name} {element}")
    slider = page.locator(f"#{name}-{control}")
    place.evaluate("each => each.scrollIntoView({ block: 'center' })")
    box = place.bounding_box()
    x, y = box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2
    before, begin = slider.input_value(), page.evaluate("scrollY")
    values = []
    with finger(page) as send:
        for step in range(9):
            send("Move" if step else "Start", {"x": x + 4 * step, "y": y - 20 * step})
            values.append(slider.input_value())
        send("End")
    page.wait_for_function("begin => scrollY > begin + 40", arg=begin)
    assert values[0] != before  # the touch moves the slider or the point at once
    assert slider.input_value() == before
    assert page.locator(f"#{name} .instrument-tip").first.inner_text() == ""


def test_collectives_equal_those_of_the_program(page: Page, site_url: str) -> None:
    steps = program("collective")
    every, cases, random = [], [], Random(0)
    for n, collective, algorithm in itertools.product(
        range(2, 17), steps.COLLECTIVES, steps.ALGORITHMS
    ):
        for g in {n, *(d for d in steps.powers(n) if n % d == 0)}:
            try:
                every.append((collective, algorithm, n, g))
                plan = steps.plan(*every[-1])
            except ValueError:
                every.pop()
                continue
            for _ in range(5):
                links = [
                    [random.randrange(500) / 1e6, 1e-9 / random.randint(1, 900)] for _ in "io"
                ]
                size = 2 ** random.randrange(10, 33)
                cases.append([*every[-1], size, *links, random.randint(0, len(plan))])
    assert {each[0] for each in every} == {*steps.COLLECTIVES}
    assert {each[1] for each in every} == {*steps.ALGORITHMS}
    plans = call_javascript(page, site_url, "collective", "plan", every)
    for case, plan in zip(every, plans, strict=True):
        assert [[tuple(m) for m in step] for step in plan] == steps.plan(*case), case
    for case, answer in zip(
        cases, call_javascript(page, site_url, "collective", "facts", cases), strict=True
    ):
        assert answer == json.loads(json.dumps(steps.facts(*case))), case


def test_controls_of_unused_links_are_hidden(page: Page, site_url: str) -> None:
    for node, links, message in (
        (8, "inside", "inside a node"),
        (1, "between", "8 MiB, between"),
    ):
        open_instrument(page, site_url, "collective", f"?node={node}")
        unfold(page, "collective")
        for where, prefix in (("inside", ""), ("between", "far-")):
            for each in ("alpha", "rate"):
                control = page.locator(f"#collective-{prefix}{each}")
                assert control.is_visible() == (where == links), (node, where, each)
        assert message in page.inner_text("#collective [role=status]")
    open_instrument(page, site_url, "collective", "?node=4")
    unfold(page, "collective")
    assert page.locator("#collective-alpha").is_visible()
    assert page.locator("#collective-far-alpha").is_visible()
    message = page.inner_text("#collective [role=status]")
    assert "8 messages of 8 MiB, 2 of them between nodes." in message


def test_schedules_equal_those_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "snippets" / "03_model_parallelism")
    times, random, cases = program("schedules"), Random(0), []
    while len(cases) < 400:
        name, p = random.choice(times.NAMES), random.randint(2, 8)
        m, v = random.randint(1, 24), random.randint(2, 4)
        if times.why_not(name, p, m):
            continue
        costs = [random.randint(1, 30) for _ in "FBW"]
        pace = [random.choice([10, random.randint(5, 20)]) for _ in range(p)]
        cases.append([name, p, m, v, *costs, random.randint(0, 20), pace])
    some = cases[::6]
    answers = call_javascript(page, site_url, "schedules", "timeline", some)
    for case, spans in zip(some, answers, strict=True):
        assert spans == json.loads(json.dumps(times.timeline(*case))), case
    for case, answer in zip(
        cases, call_javascript(page, site_url, "schedules", "facts", cases), strict=True
    ):
        assert answer == times.facts(*case), case
    moments = [
        [random.sample(times.NAMES, 2), random.randrange(times.PARTS + 1), *case[1:]]
        for case in cases
    ]
    moments = [
        each for each in moments if not any(times.why_not(name, *each[2:4]) for name in each[0])
    ]
    assert len(moments) > 50
    answers = call_javascript(page, site_url, "schedules", "moment", moments)
    for (names, at, *case), answer in zip(moments, answers, strict=True):
        assert answer == times.moment(names, *case, at=at), (names, at, case)


def test_serving_results_equal_those_of_the_program(page: Page, site_url: str) -> None:
    load, random, cases = program("serving"), Random(0), []
    while len(cases) < 400:
        prompt, answer = random.choice([20, 50, 100, 300]), random.choice([5, 10, 20, 40])
        block, slots = 2 ** random.randrange(10), 2 ** random.randrange(7)
        cache = -(-4 * (prompt + answer) // block) * block + block * random.randrange(200)
        settings = {
            "rate": random.choice(load.LOADS), "requests": random.randint(1, 60),
            "prompt": prompt, "answer": answer, "slots": slots, "cache": cache, "block": block,
            "budget": random.choice([0, slots, slots + random.randrange(600)]),
            "admit": random.choice(load.ADMIT), "c0": random.randint(1, 30_000),
            "c1": random.randrange(3000), "c2": random.randrange(500),
            "ttft": random.randint(10, 2000), "gap": random.randint(10, 200),
            "dice": random.randint(1, 1000), "at": random.randint(0, 200),
        }  # fmt: skip
        others = {settings["rate"], *([] if len(cases) % 10 else load.LOADS)}
        cases.append([settings, sorted(others)])
    answers = call_javascript(page, site_url, "serving", "facts", cases)
    for case, answer in zip(cases, answers, strict=True):
        assert answer == load.facts(*case), case


def test_a_click_on_the_curves_chooses_the_load(page: Page, site_url: str) -> None:
    open_instrument(page, site_url, "serving")
    assert "99.5% of the requests are in time" in page.inner_text("#serving [role=status]")
    page.locator('#serving [data-load="8"]').first.click()
    assert page.locator("#serving-rate").get_attribute("aria-valuetext") == "8"
    assert "47.5% of the requests are in time" in page.inner_text("#serving [role=status]")
    assert "47.5% of requests in time" in page.locator("#serving svg").first.text_content()


def test_the_number_of_tiles_grows_when_a_tile_is_done(page: Page, site_url: str) -> None:
    page.emulate_media(reduced_motion="no-preference")
    open_instrument(page, site_url, "attention", "?sequence=512&rows=512&columns=512&step=1")
    assert page.locator("#attention .op-B").count()  # the output is written
    open_instrument(page, site_url, "attention", "?step=7")
    picture, status = page.locator("#attention svg").first, "#attention [role=status]"
    first = page.inner_text(status)
    assert first.startswith("7 of 64 tiles are done.") and "read K and V (" in first
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(  # the next tiles are on their way
        "svg => svg.querySelectorAll('.frame:not(path)').length === 1",
        arg=picture.element_handle(),
    )
    page.wait_for_function(
        f"document.querySelector('{status}').textContent.startsWith('8 of 64')"
    )
    assert "read K and V and wrote O (" in page.inner_text(status)
    page.get_by_role("button", name="Stop").click()


def test_tiles_equal_those_of_the_program(page: Page, site_url: str) -> None:
    tiles, random, cases = program("attention"), Random(0), []
    while len(cases) < 400:
        length = random.choice([random.randint(1, 300), 512, 1024])
        rows, columns = (min(length, 2 ** random.randint(5, 9)) for _ in "qk")
        settings = {
            "sequence": length, "width": random.randint(1, 256), "rows": rows,
            "columns": columns, "order": random.choice(tiles.ORDERS),
            "mask": random.choice(tiles.MASKS), "scores": random.choice(tiles.SCORES),
            "query": random.randrange(rows),
        }  # fmt: skip
        settings["step"] = random.randint(1, len(tiles.tiles(settings)))
        cases.append([settings])
    answers = call_javascript(page, site_url, "attention", "facts", cases)
    for case, answer in zip(cases, answers, strict=True):
        assert answer == tiles.facts(*case), case


def random_layout(random: Random, shape: dict) -> dict:
    """Return a random layout for this shape; the planner rejects many of these layouts."""
    layout = {name: 2 ** random.randrange(4) for name in ("dp", "pp", "tp", "cp", "virtual")}
    layout["ep"] = random.choice([1, math.gcd(layout["dp"], shape["experts"])])
    layout |= {"micro_batch": 2 ** random.randrange(3), "micro_batches": random.randint(1, 12)}
    layout |= {
        "zero": random.randrange(4),
        "recompute": random.choice(["", "", "mlp", "layer"]),
    }
    return layout | {name: random.choice([2, 4]) for name in ("gradient_bytes", "moment_bytes")}


def random_shape(random: Random) -> dict:
    kv_heads = 2 ** random.randrange(4)
    return {
        "layers": random.randint(1, 6), "hidden": 128 * kv_heads * random.randint(1, 5),
        "heads": kv_heads * 2 ** random.randrange(3), "kv_heads": kv_heads,
        "ffn": 256 * random.randint(1, 40), "vocabulary": 128 * random.randint(1, 999),
        "tied": random.random() < 0.3, "gated": random.random() < 0.7,
        "experts": random.choice([1, 1, 4]), "active": 1, "head_dim": random.choice([0, 64]),
    }  # fmt: skip


def test_memory_results_equal_those_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "snippets/planner")
    memory, plan, random, cases = (
        program("memory"),
        importlib.import_module("plan"),
        Random(0),
        [],
    )
    models = [dataclasses.asdict(shape) for shape in plan.the_models().values()]
    while len(cases) < 400:
        real = len(cases) % 120 == 0
        shape = random.choice(models) if real else random_shape(random)
        layout = random_layout(random, shape)
        if plan.why_not(plan.Shape(**shape), plan.Layout(**layout), 1024):
            continue
        gpu = dataclasses.asdict(plan.the_gpu(random.choice(["h100", "rtx4090", "gb200"])))
        if not real:  # a memory as small as the shape, so that some layouts fit and some do not
            gpu["memory"] = 2.0 ** random.uniform(28, 34)
        cases.append([shape, layout, 2 ** random.randint(10, 13), gpu])
    for function, some in (("facts", cases), ("compared", cases[:1] + cases[1::20])):
        answers = call_javascript(page, site_url, "memory", function, some)
        for case, answer in zip(some, answers, strict=True):
            shape, layout, sequence, gpu = case
            command_line = plan.Shape(**shape), plan.Layout(**layout), sequence, plan.Gpu(**gpu)
            assert answer == getattr(memory, function)(*command_line), case
    steps, moments = importlib.import_module("step_memory"), []
    for shape, layout, sequence, _ in cases[:1] + cases[1::8]:
        index = random.randrange(layout["pp"])
        moments.append([shape, layout, sequence, index])
    for function, compute in (("moments", steps.moments), ("step", memory.step_facts)):
        answers = call_javascript(page, site_url, "step_memory", function, moments)
        for case, answer in zip(moments, answers, strict=True):
            shape, layout, *given = case
            expected = compute(plan.Shape(**shape), plan.Layout(**layout), *given)
            if function == "step":
                del answer["groups"]  # the same numbers, for the picture
            assert answer == expected, case


def printed_lines(answer: dict) -> list[str]:
    """Return the lines that plan.py would print, from the answer of the page's search."""
    rows, count = answer["rows"], answer["count"]
    lines = [f"none of {count} layouts fits"]
    if rows:
        lines[0] = f"{len(rows)} of {count} layouts, fastest first; GiB of the fullest stage"
    for rank, row in enumerate(rows, 1):
        time, speed, mfu, bubble, gib = row["cells"]
        lines.append(
            f"{rank:2} {row['name']:44} {time:>9} {speed:>7} tokens/s/GPU  MFU {mfu:>3}"
        )
        lines[-1] += f"  bubble {bubble:>3} {gib:>10}"
    lines += ["the first:"] * bool(rows)
    lines += [f"{x}{' ' if ' over ' in x else ': '}{y}" for x, y in answer["first"]]
    if answer["nearest"]:
        lines.append("faster, but they do not fit; the nearest:" if rows else "the nearest:")
    return lines + [f"  {line}" for line in answer["nearest"]]


def test_plans_equal_those_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.syspath_prepend(ROOT / "snippets/planner")
    plan, random, cases, printed = importlib.import_module("plan"), Random(0), [], []
    models = [*plan.the_models().items()]
    machines = [plan.the_gpu(name) for name in ("h100", "h200", "gb200")]
    while len(cases) < 200:
        real = len(cases) % 25 == 0
        name, shape = random.choice(models) if real else ("", random_shape(random))
        shape = shape if real else plan.Shape(**shape)
        gpu = random.choice(machines)
        if not real:
            gpu = dataclasses.replace(gpu, memory=2.0 ** random.uniform(27, 32))
        gpus = 2 ** random.randrange(11) if real else random.choice([1, 2, 4, 6, 8, 12])
        sequence, batch = 2 ** random.randint(10, 14), 2 ** random.randint(0, 9 if real else 5)
        args = argparse.Namespace(
            model=name, gpus=gpus, sequence=sequence, batch=batch * sequence, top=3,
            tokens=None, emit=None,
        )  # fmt: skip
        try:
            plan.report(shape, args, gpu)
        except SystemExit:  # no layout can split so many sequences
            continue
        finally:
            text = capsys.readouterr().out
        printed.append(text.splitlines()[1:])
        given = dataclasses.asdict(shape), gpus, sequence, batch, dataclasses.asdict(gpu), 3
        cases.append(given)
    answers = call_javascript(page, site_url, "planner", "plan", cases)
    launches, expected = [], []
    for case, answer, text in zip(cases, answers, printed, strict=True):
        assert printed_lines(answer) == text, case
        shape, _, sequence, _, gpu, _ = case
        for row in answer["rows"]:
            target = random.choice(["megatron", "torchtitan", "deepspeed", "fsdp"])
            model = random.choice(["llama-3-8b", "llama-3-70b", "llama-3-405b", "80B"])
            launches.append([target, model, shape, row["layout"], sequence, gpu, row["name"]])
            args = argparse.Namespace(model=model, sequence=sequence)
            command_line = plan.Shape(**shape), plan.Layout(**row["layout"]), plan.Gpu(**gpu)
            expected.append(plan.emit(target, args, *command_line))
    assert call_javascript(page, site_url, "launch", "launch", launches) == expected


def test_the_map_of_layouts_equals_that_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "snippets/planner")
    plan, program_map = importlib.import_module("plan"), importlib.import_module("layout_map")
    random, cases, expected, models = Random(1), [], [], plan.the_models()
    for at in range(60):
        real = at % 20 == 0
        shape = models["llama-3-8b"] if real else plan.Shape(**random_shape(random))
        gpu = plan.the_gpu(random.choice(["h100", "gb200"]))
        if not real:  # a small memory, so that some cells contain no layout that fits
            gpu = dataclasses.replace(gpu, memory=2.0 ** random.uniform(27, 32))
        gpus, batch = random.choice([1, 2, 6, 8, 16]), 2 ** random.randint(0, 5)
        given = gpus, 2 ** random.randint(10, 14), batch
        cases.append([dataclasses.asdict(shape), *given, dataclasses.asdict(gpu)])
        expected.append(program_map.layout_map(shape, *given, gpu))
    assert {cell["fits"] for cells in expected for cell in cells} == {True, False}
    answers = call_javascript(page, site_url, "layout_map", "layoutMap", cases)
    for case, cells, answer in zip(cases, expected, answers, strict=True):
        assert [
            {name: cell[name] for name in ("tp", "pp", "fits", "name", "time", "needs")}
            for cell in answer
        ] == cells, case


# For the focused control: whether it is visible, its kind, and the text that a screen reader
# speaks. For the page: its address and its status message.
CONTROL_STATE = """each => [
  each === document.activeElement, each.checkVisibility(), each.type ?? each.localName,
  each.getAttribute("aria-valuetext"), location.href,
  each.closest(".instrument").querySelector("[role=status]").innerText,
]"""


@pytest.mark.parametrize("name", NAMES)
def test_every_control_works_by_keyboard(page: Page, site_url: str, name: str) -> None:
    open_instrument(page, site_url, name)
    press, status = page.keyboard.press, page.locator(f"#{name} [role=status]")
    controls = page.locator(f"#{name} :is(input, select, button, summary, svg[tabindex])")
    controls.first.focus()
    for at in itertools.count():
        if at >= controls.count():  # a pressed button can add or remove controls
            break
        control = controls.nth(at)
        focused, shown, kind, spoken, before, message = control.evaluate(CONTROL_STATE)
        if not focused:  # a control without a choice cannot get the focus
            assert control.is_disabled() and not shown, control
            continue
        if kind == "range":
            press("ArrowRight")
            if control.get_attribute("aria-valuetext") == spoken:
                press("ArrowLeft")
            assert control.get_attribute("aria-valuetext") != spoken
        elif kind == "select-one":
            chosen = control.input_value()
            press("ArrowDown")
            if control.input_value() == chosen:  # it was the last option
                press("ArrowUp")
        elif kind == "text":
            page.keyboard.type("5")
        elif kind == "svg":  # the arrow keys read its values
            tip = control.locator("xpath=following-sibling::p")
            first = tip.inner_text()
            press("ArrowRight")
            assert first and tip.inner_text() and tip.is_visible()
            press("Escape")
            assert tip.inner_text() == ""
        else:
            press("Enter")
        wait_for_answer(page, name)
        if kind == "summary":  # the other settings are folded
            page.wait_for_selector(f"#{name} details[open]")
        elif kind not in ("button", "svg"):  # the address contains the settings
            page.wait_for_function("old => location.href !== old", arg=before)
        elif kind == "button" and control.count() and control.inner_text() == "Stop":
            # an animation is running
            page.wait_for_function(
                "([s, old]) => s.textContent !== old", arg=[status.element_handle(), message]
            )
            press("Enter")
            assert control.inner_text() == "Play"
        press("Tab")
    page.wait_for_function("location.search === ''")  # the last button resets everything
    for each in page.locator(f"#{name} svg").all():
        assert each.get_attribute("aria-label")


# For each address: what `look` returns about the instrument. The instrument restarts in the same
# page, which needs a tenth of the time of a page load.
RESTART = """async ([name, queries]) => {
  const text = await (await fetch(location.pathname)).text()
  const first = new DOMParser().parseFromString(text, "text/html").getElementById(name)
  const { src } = document.querySelector(`script[src*="/${name}.js"]`)
  const go = History.prototype.replaceState.bind(history)
  history.replaceState = () => {} // the previous instrument may still change the address
  const shown = []
  for (const query of queries) {
    const place = first.cloneNode(true)
    document.getElementById(name).replaceWith(place)
    go(null, "", `?${query}`)
    globalThis.restarts = (globalThis.restarts ?? 0) + 1 // a new URL, so that the module runs again
    await import(`${src}?${restarts}`)
    while (!place.matches("[data-ready]:not([aria-busy])")) await new Promise(requestAnimationFrame)
    shown.push(await look(place))
  }
  return shown
}"""
# For each address: the link that the instrument offers, and its facts.
STATES = f"""states => {{
  const look = async place => {{
    const link = new Promise(copied => {{
      navigator.clipboard.writeText = async url => copied(url)
    }})
    ;[...place.querySelectorAll("button")].find(each => each.textContent === "Copy link").click()
    return [await link, place.querySelector(".instrument-facts").innerText]
  }}
  return ({RESTART})(states)
}}"""


@pytest.mark.parametrize("name", NAMES)
def test_a_link_and_a_command_give_the_same_numbers(
    page: Page, site_url: str, tmp_path: Path, name: str
) -> None:
    open_instrument(page, site_url, name)
    unfold(page, name)
    for each in page.locator(f"#{name} :is(input, select)").all():
        if each.is_enabled():
            each.press("ArrowRight")
    wait_for_answer(page, name)
    copied = {}
    for button in ("Copy link", "Copy command"):
        page.get_by_role("button", name=button).click()
        page.wait_for_function(
            f"document.querySelector('#{name} [role=status]').textContent.endsWith('is copied.')"
        )
        copied[button] = page.evaluate("navigator.clipboard.readText()")
        page.locator(f"#{name} [role=status]").evaluate("each => { each.textContent = '' }")
    shown = page.inner_text(f"#{name} .instrument-facts")
    query = copied["Copy link"].partition("?")[2]
    assert page.evaluate(STATES, [name, [query]])[0][1] == shown
    _, _, *arguments = shlex.split(copied["Copy command"])
    ran = subprocess.run(
        [sys.executable, ROOT / "snippets" / PROGRAMS[name], *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    values = page.locator(f"#{name} .instrument-facts dd").all_inner_texts()
    for value in itertools.chain(*(each.replace("\xa0", " ").split(" = ") for each in values)):
        assert value in ran.stdout or with_carets(value) in ran.stdout, (value, ran.stdout)


@pytest.mark.inputs(*SITE_WITHOUT_COMMENTS)
def test_a_link_shows_the_settings_in_its_address(
    page: Page, site_url: str, built_site: Path
) -> None:
    links: dict[str, set[str]] = {}
    for file in built_site.rglob("index.html"):
        for link in re.finditer(
            r'href="(?:\./|[./]*instruments/(\w+)/)\?([^"#]+)"', file.read_text("utf-8")
        ):
            links.setdefault(link[1] or file.parent.name, set()).add(html.unescape(link[2]))
    assert links
    for name, queries in sorted(links.items()):
        shown = open_instrument(page, site_url, name).evaluate(STATES, [name, sorted(queries)])
        for query, (link, _) in zip(sorted(queries), shown, strict=True):
            assert set(parse_qsl(query)) <= set(parse_qsl(urlsplit(link).query)), (name, query)


# Returns how far the visible content has moved while the page loaded.
LAYOUT_SHIFT = """() => new Promise(resolve => {
  let moved = 0
  const observer = new PerformanceObserver(list => {
    moved += list.getEntriesByType("layout-shift").reduce((sum, each) => sum + each.value, 0)
    if (list.getEntriesByType("navigation").length) resolve(moved)
  })
  for (const type of ["layout-shift", "navigation"]) observer.observe({type, buffered: true})
})"""

# Returns the pairs of words in a drawing that overlap.
OVERLAPPING = """drawings => drawings.flatMap(svg => {
  const words = [...svg.querySelectorAll("text")].filter(each => each.textContent.trim())
  const boxes = words.map(each => each.getBoundingClientRect())
  const common = (a, b, from, to) => Math.min(a[to], b[to]) - Math.max(a[from], b[from])
  return boxes.flatMap((a, i) => boxes.slice(0, i).flatMap((b, k) =>
    common(a, b, "left", "right") > 2 && common(a, b, "top", "bottom") > 4
      ? [[words[k].textContent, words[i].textContent]] : []))
})"""


# Sets one control after the other to its maximum, and returns the width of the page each time.
WIDTH_AT_MAXIMUM = """controls => controls.map(each => {
  if (!each.disabled) {
    if (each.type === "range") each.value = each.max
    else each.selectedIndex = 0
    each.dispatchEvent(new Event("input", { bubbles: true }))
  }
  return document.documentElement.scrollWidth
})"""


# Focuses all visible controls, and returns those that are covered. Returns also where the header
# and the picture end.
COVERED = """name => {
  const [header, stage, status] = [".md-header", `#${name} .instrument-stage`,
    `#${name} .instrument-status`].map(each => document.querySelector(each))
  const bounds = each => each.getBoundingClientRect(), covered = []
  const narrow = getComputedStyle(status).position === "sticky"
  const controls = ":is(input, select, button, summary)"
  const all = document.querySelectorAll(`#${name} .instrument-work ${controls}`)
  for (const each of all) {
    if (stage.contains(each) || each.disabled || !each.checkVisibility()) continue
    each.focus()
    const { top, bottom } = bounds(each)
    const end = narrow ? bounds(status).top : innerHeight
    const free = bounds(stage).bottom <= top + 1 && bottom <= end + 1
    if (!free) covered.push(each.id || each.textContent)
  }
  return [covered, bounds(header).bottom, bounds(stage).bottom]
}"""


def assert_picture_stays_in_view(page: Page, name: str, width: int, height: int) -> None:
    """Assert that the picture stays in a window of this size, and covers no control."""
    page.set_viewport_size({"width": width, "height": height})
    unfold(page, name)
    covered, top, bottom = page.evaluate(COVERED, name)
    assert top < bottom - 100  # the picture is still in view
    assert bottom - top <= (0.46 if width == 390 else 0.62) * height
    assert not covered
    if width == 390:
        position, start, end = page.locator(f"#{name} [role=status]").evaluate(
            "each => [getComputedStyle(each).position, each.getBoundingClientRect().top, "
            "each.getBoundingClientRect().bottom]"
        )
        free = height - bottom - (end - start)  # between the picture and a sentence that stays
        if abs(free - height / 2) > 2:
            assert position == ("sticky" if free > height / 2 else "static")
        assert position == "sticky" or name not in ("memory", "planner")
        if position == "sticky":
            assert end <= height + 1 and start - bottom >= height / 2 - 1
        assert not page.locator(".md-top").is_visible()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [390, 1440])
def test_a_page_fits_its_window_does_not_shift_and_can_be_printed(
    page: Page, site_url: str, name: str, width: int
) -> None:
    set_view(page, width, "dark" if width == 390 else "light")  # the scheme changes no box
    open_instrument(page, site_url, name)
    page.wait_for_load_state("networkidle")
    assert page.evaluate(LAYOUT_SHIFT) < 0.02
    drawing = page.locator(f"#{name} svg")
    assert drawing.evaluate_all(OVERLAPPING) == []
    assert_picture_stays_in_view(page, name, *((390, 844) if width == 390 else (1280, 720)))
    page.set_viewport_size({"width": width, "height": 900})
    controls = page.locator(f"#{name} :is(select, input[type=range])")
    assert max(controls.evaluate_all(WIDTH_AT_MAXIMUM)) <= width
    wait_for_answer(page, name)
    assert drawing.evaluate_all(OVERLAPPING) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width

    on_paper = f"#{name} :is(img, .transcript)"
    assert not page.locator(on_paper).is_visible()
    set_view(page, width, media="print")
    assert drawing.first.is_visible() and not page.locator(f"#{name} input").first.is_visible()


def test_instruments_are_usable_without_javascript(browser: Browser, site_url: str) -> None:
    page = browser.new_page(java_script_enabled=False)
    for name in NAMES:
        page.goto(f"{site_url}instruments/{name}/")
        static = page.locator(f"#{name} :is(img, .transcript)")
        assert static.is_visible(), name
        assert len(static.get_attribute("alt") or static.inner_text()) > 100, name
        assert page.locator(f"#{name} :is(input, button)").count() == 0, name
    page.close()


@pytest.mark.inputs(*SITE_WITHOUT_COMMENTS)
def test_other_pages_load_no_instrument(built_site: Path) -> None:
    with_script = {
        page.parent.name
        for page in built_site.rglob("index.html")
        if re.search(r'="[^"]*assets/instruments/', page.read_text("utf-8"))
    }
    traces = {each.stem for each in (built_site / "traces").glob("*.json")}
    assert with_script == {*NAMES, *traces}
    files = {each.stem: each for each in (built_site / "assets/instruments").glob("*.js")}
    for name in NAMES:
        loaded = [name]
        for each in loaded:
            text = files[each].read_text("utf-8")  # later imports are not counted
            named = re.findall(r'(?:from ?|URL\()"(?:./)?(\w+)\.js"', text)
            loaded += [other for other in named if other not in loaded]
        assert sum(files[each].stat().st_size for each in loaded) < 40_000, loaded


# For each text in a bar and each bit: its contrast with the shape below it, and its words. The
# canvas converts every colour to bytes, and paints a pale shape over the paper.
CONTRASTS = """name => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true })
  const luminance = (...colours) => {
    for (const [colour, alpha] of colours) {
      canvas.globalAlpha = alpha
      canvas.fillStyle = colour
      canvas.fillRect(0, 0, 1, 1)
    }
    const linear = [...canvas.getImageData(0, 0, 1, 1).data].map(byte => {
      const x = byte / 255
      return x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4
    })
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
  }
  const paper = getComputedStyle(document.body).getPropertyValue("--paper")
  const texts = [...document.querySelectorAll(`#${name} :is(.on, .instrument-bits button)`)]
  return texts.filter(each => each.checkVisibility()).map(each => {
    const html = each.localName === "button", style = getComputedStyle(each)
    const shape = getComputedStyle(html ? each : each.previousElementSibling)
    const below = luminance([paper, 1], [html ? shape.backgroundColor : shape.fill, shape.opacity])
    const ink = luminance([html ? style.color : style.fill, 1])
    return [(Math.max(ink, below) + 0.05) / (Math.min(ink, below) + 0.05), each.textContent]
  })
}"""

# pictures with text in bars, or with bits
WITH_TEXT = {
    "collective": "?collective=all-to-all",
    "schedules": "?schedule=zb-v&ranks=3",
    "attention": "",
    "formats": "",
    "planner": "?gpus=64&batch=1048576",
}


@pytest.mark.parametrize("name", WITH_TEXT)
def test_text_in_bars_has_enough_contrast(page: Page, site_url: str, name: str) -> None:
    set_view(page, 1280, "light")
    open_instrument(page, site_url, name, WITH_TEXT[name])
    for colours in ("light", "dark"):
        set_view(page, 1280, colours)
        scheme = "slate" if colours == "dark" else "default"
        page.wait_for_selector(f"body[data-md-color-scheme={scheme}]")
        page.evaluate("new Promise(requestAnimationFrame)")
        found = page.evaluate(CONTRASTS, name)
        assert len(found) >= 3
        assert not [each for each in found if each[0] < 4.5], colours


# Returns the initial settings of a module.
FIRST_SETTINGS = """async url => {
  const { controls } = await import(url), state = {}
  for (const { name, first } of controls) {
    state[name] = typeof first === "function" ? first(state) : first
  }
  return Object.fromEntries(Object.entries(state).map(([name, value]) => [name, String(value)]))
}"""
# The settings that the name of a preset promises, in the words of the address
PRESETS = {
    "collective": {
        "8 ranks in one node": "ranks=8 node=8",
        "2 nodes of 8, small tensor": "ranks=16 node=8 size=65536",
        "2 nodes of 8, large tensor": "ranks=16 node=8 size=268435456",
    },
    "schedules": {
        "4 ranks, 8 micro-batches": "ranks=4 micro-batches=8",
        "one slow rank": "rank-0=10 rank-1=10 rank-2=15 rank-3=10 ranks=4",
        "a link that is too slow": "link=8",
        "8 ranks, 16 micro-batches": "ranks=8 micro-batches=16",
        "less memory: V-Half and V-Min": "schedule=v-half other=v-min",
    },
    "memory": {
        "Llama 3 70B, 256 H100, ZeRO-1":
            "model=llama-3-70b gpu=h100 dp=16 tp=4 pp=4 cp=1 zero=1 view=stages",
        "Llama 3 8B, 8 H100, FSDP": "model=llama-3-8b gpu=h100 dp=8 tp=1 pp=1 cp=1 zero=3",
        "Llama 3 70B over time, ZeRO-1": "model=llama-3-70b view=step zero=1",
        "Llama 3 405B, 1,024 H100, ZeRO-1":
            "model=llama-3-405b gpu=h100 dp=8 tp=8 pp=16 cp=1 zero=1",
    },
    "planner": {
        "Llama 3 70B on 256 H100": "model=llama-3-70b gpu=h100 gpus=256",
        "Llama 3 70B on 64 H100, 1M tokens in a step":
            "model=llama-3-70b gpu=h100 gpus=64 batch=1048576",
        "Llama 3 8B on 8 H100, 512K tokens in a step":
            "model=llama-3-8b gpu=h100 gpus=8 batch=524288",
    },
    "roofline": {
        "one user of Llama 3 8B": "model=llama-3-8b point=decode batch=1",
        "256 users at once": "point=decode batch=256",
        "448 users, 128 tokens each": "point=decode batch=448 context=128",
        "a large matrix product": "point=matmul tokens=8192 width=8192",
    },
    "formats": {
        "0.1 in bf16": "number=0.1 format=bf16 scale=0",
        "4,096 ones added in bf16": "number=1 format=bf16 times=4096 scale=0",
        "a small gradient in fp16": "number=2e-8 format=fp16 scale=0",
        "a block in NVFP4": "format=nvfp4",
    },
    "attention": {
        "1,024 tokens": "sequence=1024",
        "causal mask": "mask=causal",
        "small tiles": "rows=32 columns=32",
        "outer loop over keys": "order=keys-outside",
    },
    "serving": {
        "light load: 3 per second": "rate=3",
        "highest goodput: 6 per second": "rate=6",
        "overload: 10 per second": "rate=10",
    },
}  # fmt: skip


# For each address: the name of the preset whose button is pressed.
PRESSED = f"""states => {{
  const look = place => place.querySelector(".instrument-presets [aria-pressed=true]")?.innerText
  return ({RESTART})(states)
}}"""


@pytest.mark.parametrize("name", NAMES)
def test_presets_and_invalid_addresses_set_all_values(
    page: Page, site_url: str, name: str
) -> None:
    """A preset sets all values and the address. Initial values replace the invalid values.

    One test checks both, because loading the page lasts longer than the checks.
    """
    open_instrument(page, site_url, name)
    shown = page.inner_text(f"#{name} .instrument-facts")
    names = page.locator(f"#{name} :is(input, select)").evaluate_all(
        f"all => all.map(each => each.id.slice({len(name) + 1}))"
    )
    presets = page.locator(f"#{name} .instrument-presets button")
    assert presets.all_inner_texts() == list(PRESETS[name])
    addresses = {}
    for preset in presets.all():
        preset.click()
        wait_for_answer(page, name)
        assert preset.get_attribute("aria-pressed") == "true"
        addresses[preset.inner_text()] = address(page)
    assert len({*addresses.values()}) == presets.count()
    assert page.evaluate(PRESSED, [name, [*addresses.values()]]) == list(addresses)
    first = page.evaluate(FIRST_SETTINGS, f"{site_url}assets/instruments/{name}.js")
    for words, query in addresses.items():
        settings = first | dict(parse_qsl(query))
        promised = dict(each.split("=") for each in PRESETS[name][words].split())
        assert {each: settings[each] for each in promised} == promised, words
    query = "&".join(f"{each}=no" for each in names)
    assert page.evaluate(STATES, [name, [query]])[0][1] == shown


# Returns the name of each control of a module, and its values with the initial settings.
CONTROLS = """async url => {
  const { controls } = await import(url), state = {}
  for (const { name, first } of controls) {
    state[name] = typeof first === "function" ? first(state) : first
  }
  return controls.map(({ name, valid, options }) =>
    [name, valid ? [] : options(state).map(String)])
}"""


@pytest.mark.parametrize("name", NAMES)
def test_the_build_knows_the_settings_of_an_instrument(
    page: Page, site_url: str, name: str
) -> None:
    from worldsize.site import instruments

    url = open_module(page, site_url, name)  # the values do not depend on the page
    found = page.evaluate(CONTROLS, url)
    assert {each for each, _ in found} == set(instruments.INSTRUMENTS[name]["parameters"])
    for parameter, values in found:
        for value in values:
            assert instruments.address_value(name, parameter, value) == value


def test_a_collective_plays_by_itself_once_it_is_in_view(page: Page, site_url: str) -> None:
    status, play = "#collective [role=status]", "#collective button >> nth=0"
    for motion, query in (("reduce", ""), ("no-preference", "?step=3"), ("no-preference", "")):
        page.goto("about:blank")
        page.emulate_media(reduced_motion=motion)
        open_instrument(page, site_url, "collective", query)
        page.locator("#collective .instrument-stage").scroll_into_view_if_needed()
        if motion == "no-preference" and not query:
            page.locator(play, has_text="Stop").wait_for()
        else:
            page.wait_for_timeout(300)
            assert page.locator(play).inner_text() == "Play"
    page.wait_for_function(
        "s => document.querySelector(s).textContent.startsWith('After 1 of')", arg=status
    )
    assert page.locator(status).get_attribute("aria-live") == "off"
    assert address(page) == ""  # the reader has not changed anything
    page.locator(play).click()
    assert page.locator(play).inner_text() == "Play"
    assert page.locator(status).get_attribute("aria-live") == "polite"


def test_a_cursor_moves_through_two_schedules(page: Page, site_url: str) -> None:
    open_instrument(page, site_url, "schedules", "?at=6")  # 33 of 330 ms
    running = page.locator("#schedules svg .now")
    tips = running.evaluate_all("all => all.map(each => each.dataset.tip)")
    assert [tip.split(":")[0].partition(", chunk")[0] for tip in tips] == [
        *(f"1F1B, rank {r}, forward pass of micro-batch {3 - r}" for r in range(4)),
        *(
            f"ZB-V, rank {r}, forward pass of micro-batch {i}"
            for r, i in enumerate((6, 0, 3, 1))
        ),
    ]
    page.locator("#schedules-at").press("End")
    assert running.count() == 0 and not page.locator("#schedules svg .cursor").is_visible()
    page.locator("#schedules-ranks").press("End")
    # with 8 ranks, ZB-V cannot run 8 micro-batches
    words = page.locator("#schedules svg .title").all_text_contents()
    assert words[-1] == "ZB-V needs at least 2p−1 = 15 micro-batches"


def test_two_instruments_in_one_chapter_work(page: Page, site_url: str) -> None:
    set_view(page, 1280)
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.goto(f"{site_url}contributing/site/")
    page.wait_for_load_state("networkidle")
    assert not [url for url in requested if "collective.js" in url]  # not yet in view
    first, second = page.locator(".embedded").all()
    assert first.locator("img").count() == 1  # until the instrument is there
    first.scroll_into_view_if_needed()
    page.wait_for_selector("#collective-1[data-ready]")
    second.scroll_into_view_if_needed()
    page.wait_for_selector("#collective-2[data-ready]")
    link = second.locator("a[href*='instruments/collective/']")
    query = urlsplit(link.get_attribute("href")).query
    settings = {"ranks": "4", "algorithm": "tree", "step": "1"}
    assert settings.items() <= dict(parse_qsl(query)).items()
    status = ".instrument-status"
    before = first.locator(status).inner_text(), second.locator(status).inner_text()
    second.locator("select").last.select_option("doubling")
    page.wait_for_function(
        "link => link.search.includes('algorithm=doubling')", arg=link.element_handle()
    )
    assert first.locator(status).inner_text() == before[0]
    assert second.locator(status).inner_text() != before[1]
    assert second.locator("svg").get_attribute("aria-label").startswith("4 columns")
    assert urlsplit(page.url).query == ""
    assert not first.locator("img").is_visible()
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    link.click()
    page.wait_for_selector("#collective[data-ready]")
    assert page.locator("#collective-algorithm").input_value() == "doubling"


def test_small_instruments_show_a_picture_without_javascript_and_on_paper(
    browser: Browser, page: Page, site_url: str
) -> None:
    plain = browser.new_page(java_script_enabled=False)
    plain.goto(f"{site_url}contributing/site/")
    for each in plain.locator(".embedded").all():
        assert each.locator("img").is_visible() and each.locator("a").is_visible()
    plain.close()
    page.goto(f"{site_url}contributing/site/")
    page.locator(".embedded").first.scroll_into_view_if_needed()
    page.wait_for_selector("#collective-1[data-ready]")
    page.emulate_media(media="print")
    assert page.locator("#collective-1 img").is_visible()
    assert not page.locator("#collective-1 svg").is_visible()


def test_all_instruments_move_while_they_are_in_view(page: Page, site_url: str) -> None:
    set_view(page, 1280)
    page.emulate_media(reduced_motion="no-preference")
    page.goto(f"{site_url}instruments/")
    places = page.locator(".embedded")
    assert places.count() == len(NAMES)
    for each in places.all():
        each.scroll_into_view_if_needed()
        page.wait_for_function(
            "each => each.hasAttribute('data-ready')", arg=each.element_handle()
        )
        svg, button = each.locator("svg").first, each.locator("> button")
        page.wait_for_function(
            "([svg, old]) => svg.getAttribute('aria-label') !== old",
            arg=[svg.element_handle(), svg.get_attribute("aria-label")],
        )
        button.click()
        assert button.inner_text() == "Play"
    page.emulate_media(reduced_motion="reduce")
    page.goto(f"{site_url}instruments/")
    page.wait_for_selector("#collective-1[data-ready]")
    assert page.locator("#collective-1 button").inner_text() == "Play"
    page.emulate_media(reduced_motion="no-preference")
