"""Tests of the instruments' pictures: what is drawn agrees with the numbers of the programs.

The tests read the shapes of each drawing, and compare places, lengths, colours and labels with
the numbers of the programs. The scale of an axis comes from its labels, as for a reader.
"""

# ruff: noqa: F811 (the name of the fixture `page` is also that of the parameters)

from __future__ import annotations

import colorsys
import dataclasses
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import pytest
from test_browser_instruments import INPUTS as INPUTS_OF_INSTRUMENTS
from test_browser_instruments import (
    NAMES,
    RESTART,
    ROOT,
    call_javascript,
    open_instrument,
    page,  # noqa: F401 (a fixture)
    program,
    set_view,
    tab,  # noqa: F401 (a fixture)
    wait_for_answer,
    with_carets,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

# the other numbers of a block of the number formats
OTHERS = [0.7, -1.2, 0.05, 2.1, -0.4, 0.9, -0.15, 1.4, 0.3, -0.8, 0.02, -1.7, 0.6, 0.25, -0.35]
# settings of the memory calculator that need little time
EIGHT = "model=llama-3-8b&dp=4&tp=2&pp=4&micro-batches=8"
INPUTS = [*INPUTS_OF_INSTRUMENTS, "tests/test_browser_instruments.py"]
# Returns the attributes and texts of the shapes of each drawing, and those of the visible bits.
SHAPES = """place => {
  const read = each => ({ tag: each.localName, text: each.textContent,
    ...Object.fromEntries([...each.attributes].map(({ name, value }) => [name, value])) })
  const shapes = svg => [...svg.querySelectorAll("rect, circle, path, text")]
    .filter(each => !each.closest("defs")).map(read)
  const bits = place.querySelectorAll("button:is(.sign, .exponent, .mantissa)")
  return JSON.stringify([[...place.querySelectorAll(".instrument-drawing > svg")].map(shapes),
    [...bits].filter(each => !each.hidden).map(read)])
}"""
SHAPES_AT = f"states => {{ const look = {SHAPES}; return ({RESTART})(states) }}"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


class Shape:
    """A shape of a drawing: its attributes, and the box around it."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values, self.tag = values, values["tag"]
        self.text, self.tip = (
            (values.get(name) or "").replace("\xa0", " ") for name in ("text", "data-tip")
        )
        self.kind = values.get("class", "")
        self.look = self.kind, values.get("fill"), float(values.get("opacity", 1))
        self.points = list(points(values["d"])) if self.tag == "path" else []
        if self.tag == "circle":
            x, y, r = (float(values[name]) for name in ("cx", "cy", "r"))
            self.points = [(x - r, y - r), (x + r, y + r)]
        elif not self.points:
            x, y, wide, tall = (
                float(values.get(name, 0)) for name in ("x", "y", "width", "height")
            )
            self.points = [(x, y), (x + wide, y + tall)]
        xs, ys = zip(*self.points, strict=True)
        self.left, self.right, self.top, self.bottom = min(xs), max(xs), min(ys), max(ys)
        self.wide, self.tall = self.right - self.left, self.bottom - self.top
        self.x, self.y = (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def __repr__(self) -> str:
        return f"{self.values}"

    def contains(self, other: Shape) -> bool:
        """Return whether the middle of the other shape is inside this one."""
        return self.left <= other.x <= self.right and self.top <= other.y <= self.bottom


def points(path: str) -> Iterator[tuple[float, float]]:
    """Yield the points of a path; a curve has only its end."""
    x = y = 0.0
    for command, text in re.findall(r"([A-Za-z])([^A-Za-z]*)", path.replace("e-", "E-")):
        numbers = [float(each) for each in NUMBER.findall(text)]
        size = {"H": 1, "V": 1, "h": 1, "v": 1, "C": 6}.get(command, 2)
        for i in range(0, len(numbers), size):
            part = numbers[i : i + size]
            if command in "Hh":
                x = part[0] + x * (command == "h")
            elif command in "Vv":
                y = part[0] + y * (command == "v")
            elif command.islower():
                x, y = x + part[0], y + part[1]
            else:
                x, y = part[-2:]
            yield x, y


class Drawing:
    """The shapes of one drawing, in the order in which they are drawn."""

    def __init__(self, shapes: list[dict]) -> None:
        self.shapes = [Shape(each) for each in shapes]

    def all(self, tag: str, kind: str | None = None) -> list[Shape]:
        return [each for each in self.shapes if each.tag == tag and kind in (None, each.kind)]

    def one(self, tag: str, kind: str | None = None) -> Shape:
        (found,) = self.all(tag, kind)
        return found

    def tips(self, pattern: str) -> list[tuple[Shape, re.Match]]:
        found = [(each, re.fullmatch(pattern, each.tip)) for each in self.shapes]
        return [(each, match) for each, match in found if match]

    def texts(self, pattern: str, kind: str | None = None) -> list[tuple[Shape, re.Match]]:
        found = [(each, re.fullmatch(pattern, each.text)) for each in self.all("text", kind)]
        return [(each, match) for each, match in found if match]

    def after(self, shape: Shape, by: int = 1) -> Shape:
        return self.shapes[self.shapes.index(shape) + by]

    def key(self) -> dict[str, tuple]:
        """Return the look of the shape before each text that explains it."""
        return {
            text.text: shape.look
            for shape, text in itertools.pairwise(self.shapes)
            if text.tag == "text" and "start" in text.kind and shape.tag != "text"
            and 0 < text.left - shape.right < 20 and shape.wide < 30
            and abs(text.top - shape.y) < 12
        }  # fmt: skip


def near(a: float, b: float, within: float = 0.2) -> bool:
    return abs(a - b) <= within


def scale(pairs: list[tuple[float, float]], within: float = 0.2) -> Callable[[float], float]:
    """Return the linear function from values to pixels, and check that it fits all pairs."""
    (a, x), (b, y) = min(pairs), max(pairs)

    def place(value: float) -> float:
        return x + (value - a) / (b - a) * (y - x)

    assert all(near(place(value), pixel, within) for value, pixel in pairs), pairs
    return place


def number(text: str) -> float:
    return float(text.replace(",", "").replace("−", "-"))


PARTS = ("sign", "exponent", "mantissa")
# The values of sliders, by their names.
VALUES = "all => Object.fromEntries(all.map(each => [each.id, each.value]))"


def drawings_and_bits(text: str) -> tuple[list[Drawing], list[dict]]:
    drawings, bits = json.loads(text)
    return [Drawing(each) for each in drawings], bits


def read(page: Page, name: str) -> tuple[list[Drawing], list[dict]]:
    return drawings_and_bits(page.locator(f"#{name}").evaluate(SHAPES))


def drawings_on_a_phone(page: Page, name: str) -> list[Drawing]:
    svg = page.locator(f"#{name} svg").first
    wide = svg.get_attribute("viewBox")
    set_view(page, 390)
    page.wait_for_function(
        "([svg, wide]) => svg.getAttribute('viewBox') !== wide",
        arg=[svg.element_handle(), wide],
    )
    return read(page, name)[0]


# Returns, for each card of the planner, its names and numbers, and the layout.
CARDS = """all => all.map(each =>
  [[...each.querySelectorAll("dt, dd")].map(part => part.textContent),
    each.querySelector("b").textContent])"""


# ---- one function for each instrument: it reads the drawings and compares them


def collective(drawings: dict[str, list[Drawing]], page: Page) -> None:
    steps, heights = program("collective"), []
    for query, (drawing, *_) in drawings.items():
        asked = dict(parse_qsl(query))
        n, g, done = (int(asked[name]) for name in ("ranks", "node", "step"))
        name, size = asked["collective"], 2**26
        plan = steps.plan(name, asked["algorithm"], n, g)
        held = steps.play(name, n, plan)[done]
        messages = plan[done] if done < len(plan) else []
        far = {(a, b): a // g != b // g for a, b, _, _ in messages}

        spots = {int(drawing.after(each).text): each for each in drawing.all("circle")}
        colours = {rank: each.look for rank, each in spots.items()}
        columns = {int(match[1]): each.left for each, match in drawing.texts(r"rank (\d+)")}
        assert len({*colours.values()}) == len(spots) == len(columns) == n

        def rank_at(x: float, columns: dict[int, float] = columns) -> int:
            return min(columns.items(), key=lambda column: abs(column[1] - x))[0]

        if name == "all-to-all":
            pieces = drawing.tips(r"rank (\d+) has a piece from rank (\d+) for rank (\d+)")
            found = sorted((int(m[1]), int(m[2]) * n + int(m[3])) for _, m in pieces)
            assert found == sorted((rank, c) for rank in range(n) for c in held[rank])
            for each, match in pieces:
                assert near(each.x, columns[int(match[1])])
                assert each.look[1] == colours[int(match[2])][1]
                assert drawing.after(each).text == match[3]
        else:
            rows = {int(each.text): each.top - 4 for each in drawing.all("text", "end soft")}
            parts: dict[tuple[int, int], list[Shape]] = {}
            for each, match in drawing.tips(r"rank (\d+), chunk (\d+): data of (.*)"):
                where = int(match[1]), int(match[2])
                parts.setdefault(where, []).append(each)
                sources = sorted(held[where[0]][where[1]])
                assert match[3] == ", ".join(f"rank {i}" for i in sources)
                assert near(each.y, rows[where[1]])
            assert parts.keys() == {(rank, c) for rank in range(n) for c in held[rank]}
            for (rank, c), stripes in parts.items():
                expected = [colours[i] for i in sorted(held[rank][c])]
                assert [each.look for each in stripes] == expected
                assert near((stripes[0].left + stripes[-1].right) / 2, columns[rank])
            frames = [
                (rank_at(each.x), min(rows, key=lambda c: abs(rows[c] - each.y)))
                for each in drawing.all("rect", "frame")
            ]
            assert sorted(frames) == sorted((a, c) for a, _, some, _ in messages for c in some)

        nodes = [set(range(k, k + g)) for k in range(0, n, g)]
        boxes = [each for each in drawing.all("rect", "node") if each.values["rx"] == "4"]
        assert [
            {rank for rank, x in columns.items() if box.left < x < box.right} for box in boxes
        ] == nodes
        rings = [each for each in drawing.all("rect", "node") if each.values["rx"] != "4"]
        assert [
            {rank for rank, spot in spots.items() if ring.contains(spot)} for ring in rings
        ] == (nodes if asked["algorithm"] == "hierarchical" else [])

        arcs, arrows = {}, {}
        for each in drawing.all("path"):
            if not each.kind.startswith("arc"):
                continue
            (a, up), (b, down) = each.points
            if "C" in each.values["d"]:
                arcs[rank_at(a), rank_at(b)] = each.kind == "arc far"
            else:
                ends = [
                    min(spots, key=lambda r: math.dist((spots[r].x, spots[r].y), end))
                    for end in ((a, up), (b, down))
                ]
                arrows[ends[0], ends[1]] = each.kind == "arc far"
            assert ("#far" in each.values["marker-end"]) == (each.kind == "arc far")
        assert arcs == arrows == far
        for rank, spot in spots.items():
            sent = [(to, some) for a, to, some, _ in messages if a == rank]
            words = ", and".join(
                f" sends {steps.in_bytes(len(some) * size / n)} to rank {to}"
                + " in a different node" * far[rank, to]
                for to, some in sent
            )
            words = words or " sends nothing in the next step"
            assert spot.tip == f"rank {rank}{words}"

        sent = steps.bytes_sent(plan[:done], n, size)
        most = max(steps.bytes_sent(plan, n, size))
        bars = drawing.all("rect", "bar")
        assert len(bars) == n
        for rank, bar in enumerate(bars):
            assert near(bar.x, columns[rank])
            assert bar.tip == f"rank {rank} has sent {steps.in_bytes(sent[rank])}"
            assert drawing.after(bar).text == steps.in_bytes(sent[rank])
            heights.append((sent[rank] / most, bar.tall))
    scale(heights)
    check_messages_on_their_way(page, messages)  # of the last picture


def schedules(drawings: dict[str, list[Drawing]], page: Page) -> None:
    times = program("schedules")
    labels = {"1f1b": "1F1B", "zb-v": "ZB-V"}
    kinds = {"F": "forward pass", "B": "backward pass", "W": "weight gradients"}
    ((drawing, *_),) = drawings.values()
    given = 4, 8, 2, 10, 10, 6, 3, [10, 10, 15, 10]
    x = scale([
        (int(match[1]), each.left) for each, match in drawing.texts(r"(\d+)( ms)?")
        if each.kind in ("end soft", "start soft")
    ])  # fmt: skip
    lines = drawing.texts(r"rank (\d)", "start soft")
    assert [int(match[1]) for _, match in lines] == [*range(4)] * 2
    ends, levels, numbered = {}, [], {}
    for name in labels:
        last = max(stop for rank in times.timeline(name, *given) for _, _, stop in rank)
        ends[name] = last / (10 * times.chunks(name, 2))
    now = max(ends.values()) * 20 / times.PARTS
    for panel, (name, label) in enumerate(labels.items()):
        spans, count = times.timeline(name, *given), times.chunks(name, 2)
        unit, end = 10 * count, ends[name]
        title = drawing.all("text", "start title")[panel]
        idle = times.percent(*times.share_idle(spans))
        assert title.text == f"{label}: {times.in_seconds(end / 1e3)}, {idle} idle"
        areas = drawing.all("path", "live")[4 * panel : 4 * panel + 4]
        for r, rank in enumerate(spans):
            line = lines[4 * panel + r][0]
            assert title.top < line.top
            drawn = drawing.tips(rf"{label}, rank {r}, .* of micro-batch (\d+).*")
            assert len(drawn) == len(rank)
            ops = [(*op, begin, stop) for op, begin, stop in rank]
            whole = {(i, s) for kind, i, s, *_ in ops if kind == "B"} - {
                (i, s) for kind, i, s, *_ in ops if kind == "W"
            }
            held, changes = 0, []
            for (each, _), (kind, micro, stage, begin, stop) in zip(drawn, ops, strict=True):
                part = f", chunk {stage}" if count > 1 else ""
                span = [times.digits(tick / unit) for tick in (begin, stop)]
                assert each.tip == (
                    f"{label}, rank {r}, {kinds[kind]} of micro-batch {micro}{part}: "
                    f"{span[0]} to {span[1]} ms"
                )
                assert each.kind in (f"op-{kind}", f"op-{kind} now")
                assert (each.look[2] < 1) == (stage >= 4)
                assert near(each.left, x(begin / unit))
                assert near(each.right, x(stop / unit) - 0.7)
                assert near(each.y, line.top - 5, 1)
                running = begin / unit <= now < stop / unit
                assert running == each.kind.endswith(" now")
                words = drawing.after(each)
                numbered.setdefault((name, kind), set()).add(words.kind == "on")
                if words.kind == "on":
                    assert words.text == str(micro) and near(words.left, each.x, 0.5)
                held += (kind == "F") - (
                    kind == "W" or (kind == "B" and (micro, stage) in whole)
                )
                changes.append((x((begin if kind == "F" else stop) / unit), held / count))
            area, floor = areas[r], areas[r].points[0][1]
            changes.append((x(end), 0))
            for (start, level), (stop, _) in itertools.pairwise(changes):
                if stop - start > 1:
                    _, y = [p for p in area.points if p[0] <= (start + stop) / 2][-1]
                    levels.append((level, floor - y))
    # all operations of a kind show their number, or none of them does
    assert all(len(each) == 1 for each in numbered.values())
    assert numbered["1f1b", "F"] == numbered["1f1b", "B"] == {True}
    scale(levels)
    assert len({level for level, _ in levels}) > 4
    for r, pace in enumerate(drawing.all("rect", "pace")[:4]):
        slow = "1.5" if r == 2 else "1"
        assert pace.tip.startswith(f"rank {r}: all times × {slow}.")
        assert drawing.after(pace).text == f"‹×{slow}›" and pace.contains(drawing.after(pace))
    grips = drawing.all("rect", "grip")
    assert len(grips) == 4
    for r, grip in enumerate(grips):
        assert grip.values["data-drag"] == f"rank-{r}"
        assert grip.top < lines[r][0].top - 5 < grip.bottom
    cursor = drawing.one("path", "cursor")
    shift = float(NUMBER.search(cursor.values["transform"])[0])
    assert near(shift, x(now))
    said = page.locator("#schedules svg").first.get_attribute("aria-label")
    for name, label in labels.items():
        idle = times.percent(*times.share_idle(times.timeline(name, *given)))
        assert (
            f"A step of {label} takes {times.in_seconds(ends[name] / 1e3)}, and the ranks are "
            f"idle for {idle} of this time."
        ) in said
    key = {words: look for words, (look, _, _) in drawing.key().items()}
    assert key == {
        "forward": "op-F", "backward (only the part B where W is separate)": "op-B",
        "weight gradients, W": "op-W", "lighter: a later chunk of the rank": "op-F later",
        "micro-batches that the rank holds": "live",
        "time of a rank: drag ‹×1› sideways": "pace",
    }  # fmt: skip
    (phone, *_) = drawings_on_a_phone(page, "schedules")
    on_phone = {words: look for words, (look, _, _) in phone.key().items()}
    assert on_phone == {
        "forward": "op-F", "backward, B": "op-B", "weight gradients, W": "op-W",
        "lighter: later chunk": "op-F later", "micro-batches held": "live",
        "drag ‹×1›: slower rank": "pace",
    }  # fmt: skip


def memory(drawings: dict[str, list[Drawing]], page: Page) -> None:
    calculator, steps = program("memory"), importlib.import_module("step_memory")
    plan = importlib.import_module("plan")
    shape, gpu = plan.the_models()["llama-3-8b"], plan.the_gpu("h100")
    layout, sequence = plan.Layout(dp=4, tp=2, pp=4, micro_batches=8), 8192
    room = plan.CONSTANTS["memory"]["room"] * gpu.memory
    in_bytes = calculator.in_bytes

    (drawing, *_) = drawings[f"{EIGHT}&view=stages"]
    limit, whole = drawing.one("path", "frame end dashed"), drawing.one("path", "frame ")
    for line, size in (
        (limit, f"limit: {in_bytes(room)} "),
        (whole, f" {in_bytes(gpu.memory)}"),
    ):
        ((words, _),) = drawing.texts(size)
        assert near(words.left, line.x)
    colours = drawing.key()
    bars = drawing.tips(r"stage (\d), (\w+): (.*)")
    x = scale([(0, min(each.left for each, _ in bars)), (gpu.memory, whole.x)])
    assert near(limit.x, x(room))
    for index in range(4):
        parts = calculator.parts_of(shape, layout, sequence, index)
        found = {m[2]: (each, m[3]) for each, m in bars if m[1] == str(index)}
        assert list(found) == [part for part in parts if parts[part]]
        end = 0.0
        for part, (bar, words) in found.items():
            assert near(bar.left, x(end)) and near(bar.right, x(end + parts[part]))
            assert words == in_bytes(parts[part]) and bar.look == colours[part]
            end += parts[part]
        ((label, _),) = drawing.texts(f"stage {index}")
        assert drawing.after(label).text == in_bytes(end)
        assert all(near(label.top - 4, bar.y, 3) for bar, _ in found.values())

    (drawing, *_) = drawings[f"{EIGHT}&view=step&stage=1"]
    every = steps.moments(shape, layout, sequence, 1)
    pieces = [steps.parts_at(each, shape, layout, sequence, 1) for each in every]
    colours = drawing.key()
    ((words, _),) = drawing.texts(re.escape(in_bytes(gpu.memory)), "end soft")
    ((zero, _),) = drawing.texts("0", "end soft")
    assert near(words.top - 4, drawing.one("path", "frame ").y)
    y = scale([(0, zero.top), (gpu.memory, drawing.one("path", "frame ").y)])
    assert near(drawing.one("path", "frame dashed").y, y(room))
    passes = drawing.tips(r"((?:forward|backward) pass of micro-batch \d+|optimizer step).*")
    expected = [
        f"{steps.words(each)}: {calculator.sums(pieces[every.index(each)])}"
        for each in steps.passes(every)
    ]
    assert [each.tip for each, _ in passes] == expected
    areas = {
        name: [a for a in drawing.all("path") if a.look == colours[name]] for name in pieces[0]
    }
    below = [0.0] * len(every)
    for name, (area,) in areas.items():
        above = [a + each[name] for a, each in zip(below, pieces, strict=True)]
        half = len(area.points) // 2
        tops, bottoms = area.points[:half], area.points[half:][::-1]
        assert half == 2 * len(every)
        for i, moment in enumerate(every):
            for (left, top), (right, bottom) in zip(
                tops[2 * i : 2 * i + 2], bottoms[2 * i : 2 * i + 2], strict=True
            ):
                assert left == right and near(top, y(above[i])) and near(bottom, y(below[i]))
            middle = (tops[2 * i][0] + tops[2 * i + 1][0]) / 2
            ((grip, match),) = [
                each for each in passes if each[0].left < middle < each[0].right
            ]
            assert steps.words(moment).startswith(match[1])
            strip = drawing.all(
                "rect", f"op-{match[1][0].translate(str.maketrans('fbo', 'FBW'))}"
            )
            assert any(near(each.left, grip.left) for each in strip)
        below = above
    names = ("forward", "backward", "optimizer step")
    assert [colours[name][0] for name in names] == ["op-F", "op-B", "op-W"]
    peak, best = drawing.one("path", "held"), max(range(len(every)), key=lambda i: every[i][-1])
    assert areas["parameters"][0].points[2 * best][0] < peak.x
    assert peak.x < areas["parameters"][0].points[2 * best + 1][0]
    assert near(peak.bottom, y(sum(pieces[best].values())))
    assert (
        drawing.all("text", "chosen")[0].text == f"peak {in_bytes(sum(pieces[best].values()))}"
    )

    # a click on a pass shows this pass
    grip, _ = passes[2]
    page.locator('#memory [data-pass="2"]').click()
    frames = read(page, "memory")[0][0].all("rect", "frame")
    assert [(each.left, each.wide) for each in frames] == [(grip.left, grip.wide)]
    chosen = json.loads(page.locator("#memory").evaluate(WORDS))[0]["chosen moment"]
    assert plain(chosen) == f"stage 1, {grip.tip.split(':')[0]}"

    open_stage = page.locator('#memory svg [data-tip^="stage 2"]').first
    page.locator("#memory-view").select_option("stages")
    wait_for_answer(page, "memory")
    open_stage.click()
    wait_for_answer(page, "memory")
    assert page.locator("#memory-stage").input_value() == "2"


def planner(drawings: dict[str, list[Drawing]], page: Page) -> None:
    plan, layouts = importlib.import_module("plan"), importlib.import_module("layout_map")
    shape, gpu = plan.the_models()["llama-3-8b"], plan.the_gpu("h100")
    ((drawing, strips),) = drawings.values()
    cells = {
        (cell["tp"], cell["pp"]): cell for cell in layouts.layout_map(shape, 8, 8192, 16, gpu)
    }
    rows = {each.top - 4: int(m[1]) for each, m in drawing.texts(r"TP (\d+)", "start soft")}
    columns = {each.left: int(m[1]) for each, m in drawing.texts(r"(?:PP )?(\d+)", "soft")}
    frame, hatches = None, drawing.all("path", "hatch")
    found, shades = set(), []
    for each, match in drawing.tips(
        r"(\d+-way.*): (.*) per step, (.*) on the fullest GPU, (.*)"
    ):
        tp = min(rows, key=lambda y: abs(y - each.y))
        pp = min(columns, key=lambda x: abs(x - each.x))
        cell = cells[rows[tp], columns[pp]]
        found.add((rows[tp], columns[pp]))
        assert match.groups()[1:] == (
            cell["time"], cell["needs"], "fits" if cell["fits"] else "does not fit",
        )  # fmt: skip
        words = [
            name for name in ("MLPs recomputed", "all layers recomputed") if name in match[1]
        ]
        assert [{"MLPs recomputed": "recompute MLP"}.get(w, "recompute") for w in words] == (
            re.findall("recompute(?: MLP)?", cell["name"])
        )
        for name, words in (
            ("DP", "-way data"), ("TP", "-way tensor"),
            ("PP", " pipeline"), ("CP", "-way context"),
        ):  # fmt: skip
            size = re.search(rf"{name} (\d+)", cell["name"])
            said = re.search(rf"(\d+){words}", match[1])
            assert (said[1] if said else "1") == (size[1] if size else "1")
        assert sum(each.contains(hatch) for hatch in hatches) == (not cell["fits"])
        label = next(s for s in drawing.all("text", "on") if each.contains(s))
        assert label.text == f"{number(cell['time'][:-2]):.2f}"[: len(label.text)]
        shades.append((number(cell["time"][:-2]), float(NUMBER.search(each.look[1])[0])))
        if any(each.contains(shape) for shape in drawing.all("rect", "frame")):
            frame = cell
    assert found == cells.keys()
    fastest = min(
        (c for c in cells.values() if c["fits"]), key=lambda c: number(c["time"][:-2])
    )
    assert frame == fastest
    lights = [light for _, light in sorted(shades, key=lambda each: (each[0], -each[1]))]
    assert lights == sorted(lights, reverse=True)  # darker is slower

    for each, match in drawing.tips(r"TP (\d+), PP (\d+): (.*)"):
        tp = min(rows, key=lambda y: abs(y - each.y))
        pp = min(columns, key=lambda x: abs(x - each.x))
        where = rows[tp], columns[pp]
        assert where == (int(match[1]), int(match[2])) and where not in cells
        assert ("needs" in match[3]) == (where[0] * where[1] > 8)
        if "needs" in match[3]:
            assert match[3] == f"needs {where[0] * where[1]} GPUs, but there are 8"
    assert len(drawing.tips(".+")) == len(rows) * len(columns)
    key = drawing.key()
    slower = next(each for each in drawing.all("text") if each.text == "slower")
    colours = [each for each in drawing.all("rect") if each.wide == 16]
    lights = [float(NUMBER.search(each.look[1])[0]) for each in colours]
    assert len(lights) == 5 and all(each.right < slower.left for each in colours)
    assert lights == sorted(lights, reverse=True)
    assert near(lights[0], max(s for _, s in shades), 0.01)
    assert near(lights[-1], min(s for _, s in shades), 0.01)
    assert key["fastest"][0] == "frame"
    hatched = next(each for each in drawing.all("text") if each.text == "does not fit")
    assert (
        drawing.after(hatched, -1) in hatches
        and drawing.after(hatched, -1).right < hatched.left
    )

    url = page.url.split("instruments/")[0]
    cards = page.locator("#planner .instrument-cards li")
    listed = [
        [dict(zip(each[::2], each[1::2], strict=True)), words]
        for each, words in cards.evaluate_all(CARDS)
    ]
    status = page.locator("#planner [role=status]")
    sentence = plain(status.inner_text())
    terms = json.loads(page.locator("#planner").evaluate(WORDS))[0]
    cards.first.get_by_role("button").click()
    page.wait_for_function(
        "status => status.textContent.endsWith('is copied.')", arg=status.element_handle()
    )
    copied = status.inner_text()
    case = [dataclasses.asdict(shape), 8, 8192, 16, dataclasses.asdict(gpu), 5]
    (answer,) = call_javascript(page, url, "planner", "plan", [case])
    order = sorted(answer["rows"], key=lambda row: number(row["cells"][4].split()[0]))
    assert order != answer["rows"]
    fastest = order[0] == answer["rows"][0]
    which = (
        "fastest layout that fits" if fastest else "first layout in the list, sorted by memory"
    )
    assert sentence == (
        f"The {which}: {plain(listed[0][1])}. A step takes "
        f"{order[0]['cells'][0]}, and a GPU needs {order[0]['cells'][4]}."
    )
    facts = {"found": f"{len(order)} of {answer['count']} layouts", **dict(answer["first"])}
    if answer["nearest"]:
        facts["nearest that does not fit"] = answer["nearest"][0]
    assert {plain(name): plain(words) for name, words in terms.items()} == facts
    assert plain(copied) == f"The launch command of {order[0]['name']} is copied."
    columns = ["a step", "tokens/s/GPU", "MFU", "bubble", "memory"]
    assert [{name: plain(cell) for name, cell in each.items()} for each, _ in listed] == [
        dict(zip(columns, row["cells"], strict=True)) for row in order
    ]
    for (_, words), row in zip(listed, order, strict=True):
        assert words.startswith(f"{row['layout']['dp']}-way data parallel")
    colours, lengths = strips.key(), [(0, 0)]
    for k, row in enumerate(order, 1):
        ((label, _),) = strips.texts(f"layout {k}")
        assert strips.after(label).text == row["cells"][0]
        bars, end = strips.tips(rf"layout {k}, (.*): (.*) s"), None
        assert [m[1] for _, m in bars] == [part for part, size in row["parts"].items() if size]
        for bar, m in bars:
            size = row["parts"][m[1]]
            assert near(float(m[2]), size, 0.0051) and bar.look == colours[m[1]]
            assert near(label.top - 4, bar.y, 3) and (end is None or near(bar.left, end, 0.02))
            end = bar.right
            lengths.append((size, bar.wide))
    scale(lengths, 0.02)


def roofline(drawings: dict[str, list[Drawing]], page: Page) -> None:
    roofs, gpu, llama = program("roofline"), "h100", "llama-3-8b"
    shape, device, (b, c, m, n) = roofs.MODELS[llama], roofs.GPUS[gpu], (8, 1024, 64, 8192)
    ((drawing, *_),) = drawings.values()
    said = roofs.facts(gpu, llama, "decode", b, c, m, n)
    x_of = scale([
        (math.log(number(each.text)), each.left)
        for each, _ in drawing.texts(r"[\d.,]+", "soft")
    ])  # fmt: skip
    y_of = scale([
        (math.log(number(each.text)), each.top - 4)
        for each, _ in drawing.texts(r"[\d.,]+", "end soft")
    ])  # fmt: skip

    def place(intensity: float) -> tuple[float, float]:
        rate = min(device["flops"], intensity * device["bandwidth"]) / 1e12
        return x_of(math.log(intensity)), y_of(math.log(rate))

    def at(some: tuple[float, float], intensity: float) -> bool:
        x, y = place(min(intensity, 1e5))  # the end of the axis
        return near(some[0], x) and near(some[1], y)

    def intensity(name: str, batch: int) -> float:
        flops, moved = roofs.points(shape, batch, c, m, n)[name]
        return flops / moved

    ridge = device["flops"] / device["bandwidth"]
    roof = next(each for each in drawing.all("path", "arc thick") if len(each.points) == 3)
    assert at(roof.points[1], ridge)
    fall = next(each for each in drawing.all("path", "arc dashed") if len(each.points) == 2)
    ((words, match),) = drawing.texts(r"ridge (.*)")
    assert near(fall.left, place(ridge)[0]) and near(words.left, fall.left, 4.1)
    assert match[1] == said["ridge"]
    slope, flat = drawing.one("path", "zone"), drawing.one("path", "zone fast")
    assert near(slope.right, fall.left) and near(flat.left, fall.left)
    ((memory, _),) = drawing.texts(".*limited by memory")
    ((compute, _),) = drawing.texts("limited by arithmetic.*")
    assert memory.left < fall.left < compute.left

    handles = drawing.tips(r"(.*): (.*) FLOPs per byte, at most (.*), at least (.*)")
    assert {match[1] for _, match in handles} == said["others"].keys()
    for each, match in handles:
        name = match[1]
        assert at((each.x, each.y), intensity(name, b))
        assert list(match.groups()[1:]) == said["others"][name]
        moves = name not in ("vector add", "softmax")
        assert each.values.get("data-drag") == (name if moves else None)
        dot = drawing.all("circle", "handle" if moves else "bar")
        assert any(near(d.x, each.x) and near(d.y, each.y) for d in dot)
        ((label, _),) = drawing.texts(rf"{name}(?:|: {re.escape(said['rate'])}|:)")
        assert min(abs(abs(label.left - each.x) - by) for by in (4, 22)) < 0.2
        assert (": " in label.text) == (name == "decode")
    ceiling = drawing.one("path", "arc far dashed")
    ((words, match),) = drawing.texts(r"limit of decode: (.*)")
    assert match[1] == said["ceiling"] and near(words.left, ceiling.x, 4.1)
    top = (2 * roofs.products(shape) + roofs.scores(shape, 1, c)) / (
        c * roofs.cache_bytes(shape)
    )
    assert near(ceiling.x, place(top)[0])
    fits = roofs.sequences_that_fit(shape, c, device)
    steps = drawing.texts(r"(?:b|memory full at b) = (\d+)")
    assert {int(match[1]) for _, match in steps} >= {1, fits}
    dots = drawing.all("circle", "op-B")
    for each, match in steps:
        x, y = place(intensity("decode", int(match[1])))
        assert any(near(d.x, x) and near(d.y, y) for d in dots)
        assert near(each.left, x - 8) and near(each.top, y - 8)
    trails = [
        [t for t in drawing.all("path", k) if (t.wide, t.tall) != (22, 0)]
        for k in ("trail", "trail late")
    ]
    for name, early, late in zip(("decode", "prefill"), *trails, strict=True):
        ends = [intensity(name, each) for each in (1, fits, 1024)]
        assert at(early.points[0], ends[0]) and at(early.points[-1], ends[1])
        assert at(late.points[0], ends[1]) and at(late.points[-1], ends[2])
    expected = {
        "decode and prefill, b = 1 to 1,024": "trail", "more than the memory": "trail late",
    }  # fmt: skip
    assert {words: look[0] for words, look in drawing.key().items()} == expected
    (phone, *_) = drawings_on_a_phone(page, "roofline")
    expected = dict(zip(("b = 1 to 1,024", "memory full"), expected.values(), strict=True))
    assert {words: look[0] for words, look in phone.key().items()} == expected

    sizes = {"prefill": "context", "matmul": "tokens"}  # another test drags decode
    sliders = page.locator("#roofline input[type=range]")
    for name in (*sizes, "plain attention", "fused attention"):
        handle = page.locator(f'#roofline svg [data-drag="{name}"]')
        before = sliders.evaluate_all(VALUES)
        handle.scroll_into_view_if_needed()
        box = handle.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x + (40 if x < 200 else -40), y)
        page.mouse.up()
        after = sliders.evaluate_all(VALUES)
        changed = [each for each in after if after[each] != before[each]]
        assert changed == [f"roofline-{sizes.get(name, 'context')}"], name
        assert page.locator("#roofline-point").input_value() == name


def formats(drawings: dict[str, list[Drawing]], page: Page) -> None:
    numbers = program("formats")
    for query, (drawing, *_) in drawings.items():
        asked = {"number": "0.1", **dict(parse_qsl(query))}
        name, times, x = asked["format"], 1024, float(asked["number"])
        written, said = numbers.written, numbers.facts(asked["number"], name, 0, times, OTHERS)
        value, unit, kept = numbers.stored(x, OTHERS, name, 0)
        f = numbers.FORMATS[name]
        low, high = (numbers.neighbour(value, f, by) * unit for by in (-1, 1))
        marks = {m[2]: (each, m[1]) for each, m in drawing.tips(r"(stored|neighbour): (.*)")}
        # the largest number has no larger neighbour
        there = [v for v in (low, kept, high) if math.isfinite(v)]
        assert list(marks) == [written(v) for v in there]
        kinds = ["neighbour", "stored", "neighbour"][: len(there)]
        assert [kind for _, kind in marks.values()] == kinds
        along = scale([(v, marks[written(v)][0].x) for v in there])
        line = next(each for each in drawing.all("path", "line") if each.left == 0)
        for words, (each, _) in marks.items():
            label = drawing.after(each, 2)
            assert label.text == words and near(label.left, each.x)
        ((band, match),) = drawing.tips(r"all numbers in this band are stored as (.*)")
        assert match[1] == written(kept)
        assert near(band.left, along((low + kept) / 2))
        assert near(band.right, along((kept + high) / 2) if len(there) == 3 else line.right)
        given = drawing.one("path", "op-B")
        inside = max(6, min(line.right - 6, along(x)))
        arrow = "" if near(inside, along(x)) else " →" if along(x) > inside else " ←"
        assert near(given.x, inside) and drawing.after(given).text == f"{written(x)}{arrow}"

        term, g = (kept, numbers.FORMATS["fp32"]) if name in numbers.BLOCKS else (value, f)
        total, stops = numbers.repeated(term, g, times)
        block = next((e.top for e in drawing.all("text") if e.text.startswith("block")), 999)
        y_of = scale([
            (number(each.text), each.top - 4)
            for each, _ in drawing.texts(NUMBER.pattern, "end soft")
            if each.top < block
        ])  # fmt: skip
        x_of = scale([
            (int(m[1]), each.left) for each, m in drawing.texts(r"(\d+)(?: terms)?")
            if (each.kind == "soft" or "terms" in each.text) and 200 < each.top < block
        ])  # fmt: skip
        paths = {
            drawing.after(each).text.split(":")[0]: each.kind
            for each in drawing.all("path") if each.wide == 18 and each.tall == 0
        }  # fmt: skip
        exact, added = (
            next(e for e in drawing.all("path", kind) if e.wide > 100)
            for kind in paths.values()
        )
        assert next(iter(paths)) == "exact sum" and [*paths][1].startswith(
            "one after the other"
        )
        assert near(exact.points[-1][0], x_of(times)) and near(
            exact.points[-1][1], y_of(x * times), 0.6
        )
        assert near(added.points[-1][0], x_of(times)) and near(
            added.points[-1][1], y_of(total), 0.6
        )
        sums = drawing.tips(r"after (\d+) terms: (.*), exact sum (.*)")
        assert [int(match[1]) for _, match in sums] == [k * times // 8 for k in range(9)]
        for each, match in sums:
            count = int(match[1])
            part, _ = numbers.repeated(term, g, count)
            assert match.groups()[1:] == (written(part), written(x * count))
            assert near(each.x, x_of(count)) and near(each.y, y_of(part), 0.6)
            nearest = min(added.points, key=lambda point: abs(point[0] - each.x))
            assert near(nearest[1], each.y, 1)
        if stops < times:
            stop, end = drawing.one("circle", "handle"), drawing.one("rect", "stop")
            assert near(stop.x, x_of(stops)) and near(end.left, x_of(stops))
            assert near(stop.y, y_of(total), 0.6)
            assert drawing.texts(f"stops after {stops} terms?")

        if name in numbers.BLOCKS:
            values = [x, *OTHERS]
            stored, heights = numbers.block_stored(values, name), []
            bars = drawing.tips(r"given (.*), stored (.*)")
            assert [m.groups() for _, m in bars] == [
                (written(a), written(b)) for a, b in zip(values, stored, strict=True)
            ]
            assert [each.left for each, _ in bars] == sorted(each.left for each, _ in bars)
            axis = next(e.top - 4 for e, _ in drawing.texts("0", "end soft") if e.top > block)
            for (each, _), a, b in zip(bars, values, stored, strict=True):
                for bar, v in ((each, a), (drawing.after(each, -1), b)):
                    assert near(bar.bottom if v >= 0 else bar.top, axis)
                    heights.append((abs(v), bar.tall))
                assert near(bar.left, each.left)
                assert each.kind == "frame given" and bar.kind in ("live", "op-B")
            tall = scale(heights)
            for each, _ in drawing.texts(NUMBER.pattern, "end soft"):
                if each.top > block:
                    level = abs(number(each.text))
                    assert near(abs(axis - each.top + 4), tall(level) - tall(0), 0.5)

    # a bit has the colour and the name of its part of the format; a click flips this bit only
    _, bits = read(page, "formats")
    kinds = {kind: "".join(b["text"] for b in bits if b["class"] == kind) for kind in PARTS}
    assert [*kinds.values()] == said["bits"].split()
    weights = [re.search(r"2\^(-?\d+)", with_carets(b["aria-label"])) for b in bits]
    assert [int(each[1]) for each in weights[1:]] == [3, 2, 1, 0, -1, -2, -3]
    assert [b["aria-label"].split(", ")[1].split()[0].split("\xa0")[0] for b in bits] == [
        *("sign",), *("exponent",) * 4, *("mantissa",) * 3,
    ]  # fmt: skip
    for i in (0, 2, 6):
        before = [each["text"] for each in bits]
        page.locator("#formats button:is(.sign, .exponent, .mantissa):visible").nth(i).click()
        _, bits = read(page, "formats")
        after = [each["text"] for each in bits]
        assert [k for k in range(8) if after[k] != before[k]] == [i]


def attention(drawings: dict[str, list[Drawing]], page: Page) -> None:
    tiles = program("attention")
    for query, (drawing, *_) in drawings.items():
        s = dict(tiles.FIRST)
        for each in query.split("&"):
            name, value = each.split("=")
            s[name] = int(value) if value.isdigit() else value
        computed = tiles.tiles(s)
        done, said = computed[: s["step"]], tiles.facts(s)
        i, j = done[-1]
        (first, last), _ = tiles.ends(s, (i, j))
        asked = min(first + s["query"], last)
        held = [
            each for each in drawing.all("rect", "held") if "start" in drawing.after(each).kind
        ]
        memory, chip = (
            next(each for each in held if place in drawing.after(each).text)
            for place in ("memory (HBM)", "chip (SRAM)")
        )
        assert memory.right < chip.left
        parts = {(m[1], int(m[2])): (each, m) for each, m in drawing.tips(
            r"([QKVO]), tokens (\d+)–(\d+)(.*)")}  # fmt: skip
        sizes = dict(zip("QOKV", (s["rows"],) * 2 + (s["columns"],) * 2, strict=True))
        for (name, begin), (each, match) in parts.items():
            k = begin // sizes[name]
            assert memory.contains(each)
            row = [tile for tile in computed if tile[0] == k]
            some = len([tile for tile in done if tile[0] == k])
            state = ""
            if name == "O" and some == len(row):
                state = ": complete and written"
            elif name == "O" and some and s["order"] == "keys-outside":
                state = ": written, but not complete"
            assert match[4] == state
            over = drawing.after(each)
            written = over.kind == "op-B" and near(over.x, each.x) and near(over.y, each.y)
            assert written == bool(state)
            assert not written or (over.look[2] < 1) == ("not complete" in state)
        frames = drawing.all("rect", "frame")
        scores = {}
        for each, m in drawing.tips(r"queries (\d+)–(\d+), keys (\d+)–(\d+): (\w+).*"):
            tile = int(m[1]) // s["rows"], int(m[3]) // s["columns"]
            scores[tile] = each
            what = "skipped" if tile not in computed else "done" if tile in done else "not"
            assert m[5] == what
            assert each.kind == {"skipped": "empty", "done": "live", "not": "node"}[what]
            assert near(each.y, parts["Q", int(m[1])][0].y)
            assert near(each.x, parts["K", int(m[3])][0].x)
        framed = [
            parts[name, k * sizes[name]][0]
            for name, k in (("Q", i), ("O", i), ("K", j), ("V", j))
        ]
        framed.append(scores[i, j])
        assert len(frames) == 5
        assert all(
            any(near(f.x, e.x) and near(f.y, e.y) and near(f.wide, e.wide, 2) for f in frames)
            for e in framed
        )
        dashed, tile = drawing.all("path", "frame dashed given")[0], parts["Q", first][0]
        assert near(dashed.y, tile.top + (asked - first + 0.5) / s["rows"] * tile.tall, 1)

        key = drawing.key()
        looks = {"read": "op-F", "written": "op-B", "output so far": "op-W", "scores": "live"}
        assert {name: key[name][0] for name in looks} == looks
        chips = drawing.tips(
            r"(a tile of \w, in bf16|output so far, in fp32|scores of this tile, in fp32): (.*)"
        )
        for each, m in chips:
            assert chip.contains(each)
            name = m[1].split(",")[0].removeprefix("a tile of ").split()[0]
            assert m[2] == said["parts"][name]
            assert each.kind == {"output": "op-W", "scores": "live"}.get(name, "op-F")
        assert len(chips) == 5
        for words in (
            f"query {asked}:", f"maximum {said['history'][said['now']][1]}",
            f"sum {said['history'][said['now']][3]}",
            f"output {said['history'][said['now']][4]}",
        ):  # fmt: skip
            assert drawing.texts(re.escape(words)), words

        for letter, begin in (("Q", 0), ("K", 0), ("V", 0), ("O", 0)):
            matrix = parts[letter, begin][0]
            nearest = min(
                (each for each in drawing.all("text") if each.text in ("Q", "K", "V", "O")),
                key=lambda each, m=matrix, down=letter in "QO": (
                    abs(each.left - m.x)
                    if down
                    else abs(each.top - m.y) + abs(each.left - m.left)
                ),
            )
            assert nearest.text == letter
        for each, m in chips:
            if m[1].startswith("a tile of"):
                assert drawing.after(each).text == m[1].split(",")[0][-1]
        shades = [e for e in drawing.all("path") if "--paper" in e.values.get("style", "")]
        if s["mask"] == "causal":
            (shade,) = shades
            corners = [scores[0, 0], parts["O", s["sequence"] - s["rows"]][0]]
            assert (
                shade.points[1][0] > shade.points[0][0]
                and shade.points[1][1] == shade.points[0][1]
            )
            assert near(shade.top, corners[0].top, 1) and near(
                shade.bottom, corners[1].bottom, 1
            )
        assert bool(shades) == (s["mask"] == "causal")

        bars = drawing.tips(r"plain attention, (.*): (.*)")
        plain = tiles.plain_bytes(s)
        assert [m.groups() for _, m in bars] == [
            (n, tiles.in_bytes(b)) for n, b in plain.items()
        ]
        lengths = [
            (b, each.wide + 1) for (each, _), b in zip(bars, plain.values(), strict=True)
        ]
        read, written = tiles.crossed(s, done)
        ((came, a),) = drawing.tips(r"read so far: (.*)")
        ((went, b),) = drawing.tips(r"written so far: (.*)")
        assert (a[1], b[1]) == (tiles.in_bytes(read), tiles.in_bytes(written))
        assert (came.kind, went.kind) == ("op-F", "op-B") and near(came.right, went.left)
        outline = next(
            e
            for e in drawing.all("rect", "held")
            if near(e.top, came.top) and near(e.left, came.left)
        )
        in_all = sum(tiles.crossed(s, computed))
        lengths += [(read, came.wide), (written, went.wide), (in_all, outline.wide)]
        scale([*lengths, (0, 0)])

        state, heights = (-math.inf, 0.0, 0.0), [(0, 0)]
        graph = drawing.tips(
            r"keys (\d+)–(\d+): (.*) comes from earlier tiles, (.*) is added, "
            r"and the maximum is (.*)"
        )
        assert len(graph) == len([tile for tile in done if tile[0] == i])
        for each, m in graph:
            before, _, was = state
            _, state = tiles.online(s, state, asked, int(m[1]), int(m[2]))
            kept = was * 2.0 ** (before - state[0])
            assert m.groups()[2:] == (
                tiles.digits(kept),
                tiles.digits(state[2] - kept),
                tiles.whole(state[0]),
            )
            assert drawing.after(each).text == tiles.whole(state[0])
            old, new = drawing.after(each, -2), drawing.after(each, -1)
            assert near(old.left, each.left) and near(new.left, each.left)
            assert near(old.bottom, each.bottom) and near(new.bottom, old.top)
            assert old.look == key["earlier tiles, scaled"] and new.look == key["this tile"]
            heights += [(kept, old.tall), (state[2] - kept, new.tall)]
        scale(heights)
    (i, j), rows, columns = computed[s["step"]], s["rows"], s["columns"]
    check_tiles_on_their_way(page, i, rows, j, columns)  # of the last picture


def serving(drawings: dict[str, list[Drawing]], page: Page) -> None:
    load = program("serving")
    ((drawing, curves),) = drawings.values()
    s = {**load.FIRST, "requests": 200}
    run = load.serve(s, s["rate"])
    moment = run.clock * s["at"] / 200
    now = load.serve(s, s["rate"], moment)
    time = lambda ns: load.in_seconds(ns / 1e9)  # noqa: E731
    kinds = {"waiting": "queue", "prefill": "prefill", "decode": "decode"}
    key = {words: look[0] for words, look in drawing.key().items()}
    assert key == {"waiting": "live", "prefill": "op-B", "decode": "op-F"}
    rows, ends = {}, []
    for each, m in drawing.tips(
        r"request (\d+), with a prompt of (\d+) .* (\d+): (\w+) for (.*)"
    ):
        request = run.requests[int(m[1])]
        assert (request.prompt, request.answer) == (int(m[2]), int(m[3]))
        assert each.kind == key[m[4]]
        spans = [
            (begin, min(moment, end))
            for (begin, kind), (end, _) in itertools.pairwise(request.events)
            if kind == kinds[m[4]] and begin <= moment
        ]  # fmt: skip
        (span,) = [span for span in spans if time(span[1] - span[0]) == m[5]][-1:]
        if each.left > 0 and each.wide > 1:
            ends += [(span[0], each.left), (span[1], each.right)]
        rows.setdefault(int(m[1]), each.top)
    assert list(rows) == sorted(rows) and list(rows.values()) == sorted(rows.values())
    x = scale(ends, 0.1)
    edge = next(each for each in drawing.all("path", "line") if each.left == 0)
    assert drawing.texts(
        re.escape(f"requests in the last {time(run.clock / run.steps * 250)}") + ".*"
    )
    assert near(x(moment), edge.right)
    assert drawing.texts(re.escape(time(moment)), "end soft")

    ((_, m),) = drawing.texts(r"KV cache: (\d+) of (\d+) blocks are taken")
    assert [int(m[1]), int(m[2])] == [
        sum(r.blocks for r in now.running),
        s["cache"] // s["block"],
    ]
    lines = sorted({each.top for each in drawing.all("rect", "empty")})
    wide = drawing.all("rect", "empty")[0].wide
    line = s["cache"] / len(lines)
    filled: dict[int, list[tuple[float, float]]] = {}
    for each, m in drawing.tips(
        r"request (\d+): (\d+) of (\d+) tokens in its blocks are filled"
    ):
        base = lines.index(each.top) * line
        filled.setdefault(int(m[1]), []).append(
            (base + each.left / wide * line, base + each.right / wide * line)
        )
        request = next(r for r in now.running if r.number == int(m[1]))
        assert [int(m[2]), int(m[3])] == [request.length, request.blocks * s["block"]]
        assert each.kind == ("op-B" if request.left() > 1 else "op-F")
    at = 0
    for request in now.running:
        if request.length:
            spans = filled[request.number]
            assert near(spans[0][0], at, 1) and near(
                sum(b - a for a, b in spans), request.length, 2
            )
        at += request.blocks * s["block"]

    mine = load.measure(s, s["rate"])
    boxes = drawing.tips(
        r"(.*): half of the requests need at most (.*), and 99% need at most (.*)\. "
        r"The limit is (\d+) ms\."
    )
    for (box, m), name, waits in zip(
        boxes, ("ttft", "gap"),
        ([r.first - r.arrival for r in run.requests], [r.worst for r in run.requests]),
        strict=True,
    ):  # fmt: skip
        half, most, limit = mine[name], mine[f"{name}99"], 1e6 * s[name]
        assert m[1].endswith({"ttft": "first token", "gap": "between tokens"}[name])
        assert m.groups()[1:] == (time(half), time(most), str(s[name]))
        inside = [
            each
            for each in drawing.shapes
            if box.top - 3 < each.y < box.bottom + 3 and box.left - 3 < each.x < box.right + 3
        ]
        (median,) = [e for e in inside if e.kind == "arc thick thin"]
        (p99,) = [e for e in inside if e.kind == "arc thick"]
        (bound,) = [e for e in inside if e.kind == "frame dashed given"]
        (late,) = [e for e in inside if e.kind == "live"]
        x = scale(
            [(math.log(v), e.x) for v, e in ((half, median), (most, p99), (limit, bound))]
        )
        assert near(late.left, bound.x) and near(late.right, box.right)
        dots = [e for e in inside if e.tag == "circle"]
        assert len(dots) == len(waits)
        for dot, wait, r in zip(dots, waits, run.requests, strict=True):
            spot = max(box.left + 2, min(box.right - 2, x(math.log(max(wait, 1)))))
            assert near(dot.x, spot, 2.1)
            assert ("faint" in dot.kind) == (r.first > moment)
        assert drawing.texts(f"limit {s[name]} ms")
        assert drawing.texts(re.escape(f"median {time(half)}, p99 {time(most)}"))
    assert drawing.texts(f"{load.percent(mine['kept'], 200)} of requests in time")

    url = page.url.split("instruments/")[0]
    loads = [*load.LOADS]
    every = call_javascript(page, url, "serving", "measure", [[s, each] for each in loads])
    named = {"TTFT, median": "ttft", "TTFT, p99": "ttft99", "gap, p99": "gap99",
             "all": "requests", "in time (goodput)": "goodput"}  # fmt: skip
    keys = {
        curves.after(each).text: each
        for each in curves.all("path")
        if each.wide == 14 and not each.tall
    }
    assert keys.keys() == named.keys()
    x_labels = [(each, int(each.text)) for each in curves.all("text", "soft")]
    markers = curves.all("path", "frame")
    grips = curves.tips(r"(\d+) requests per second\. (.*)")
    assert len(markers) == 2 and len(grips) == 28
    lines = [each for each in curves.all("path") if len(each.points) == 14]
    units = {"ms": 1e6, "s": 1e9}
    titles = [e for e in curves.all("text", "start") if not e.text.startswith("limit")]
    assert [e.text for e in titles] == ["Waiting times", "Answered requests per second"]
    assert all(e.left < m.left for e, m in zip(titles, markers, strict=True))
    assert titles[1].left > markers[0].left
    for title, line in zip(named, lines, strict=True):
        log = title in [*named][:3]
        assert line.kind == keys[title].kind
        marker = markers[0 if log else 1]
        x = scale([(v, e.left) for e, v in (x_labels[:5] if log else x_labels[5:])])
        ticks = curves.texts(r"(\d[\d.]*) ?(m?s)?", "end soft")[
            slice(0, 4) if log else slice(4, 7)
        ]
        y = scale([
            (math.log(float(m[1]) * units[m[2]]) if log else float(m[1]), each.top - 4)
            for each, m in ticks
        ])  # fmt: skip
        assert near(marker.x, x(s["rate"]))
        for (left, top), each, measured in zip(line.points, loads, every, strict=True):
            value = measured[named[title]]
            level = y(math.log(value) if log else value)
            assert near(left, x(each))
            assert near(top, max(marker.top, min(marker.bottom, level)))
    for i, (grip, m) in enumerate(grips):
        names, value = [*named][:3] if i < 14 else [*named][3:], int(m[1])
        assert grip.values["data-load"] == m[1]
        assert near(
            grip.x,
            scale(
                [(v, e.left) for e, v in x_labels[:5] if i < 14]
                or [(v, e.left) for e, v in x_labels[5:]]
            )(value),
        )
        said = [
            f"{n}: {(time if i < 14 else load.digits)(every[value - 1][named[n]])}"
            for n in names
        ]
        assert m[2] == ", ".join(said)


# ---- the words next to a picture: each list of facts, each table and each sentence

# Returns the facts, the headings and the rows of the table, the marked cells, and the sentence.
WORDS = """place => {
  const texts = (inside, where) =>
    [...inside.querySelectorAll(where)].map(each => each.textContent)
  const lines = [...place.querySelectorAll(".instrument-facts > div")]
  const rows = [...place.querySelectorAll(".instrument-table tbody tr")]
  return JSON.stringify([
    Object.fromEntries(lines.map(each => ["dt", "dd"].map(name => texts(each, name)[0]))),
    texts(place, ".instrument-table thead th"), rows.map(each => texts(each, "th, td")),
    texts(place, "tr[aria-current] th")[0] ?? "", texts(place, "[role=status]")[0]])
}"""


def marked(rows: dict[str, list[str]], best: str, column: int, word: str) -> list[list[str]]:
    """Return the rows of a table in which the row `best` has a word after a cell."""
    return [
        [name, *(f"{cell} · {word}" if name == best and k == column else cell
                 for k, cell in enumerate(cells))]
        for name, cells in rows.items()
    ]  # fmt: skip


def words_of_collective() -> list:
    links = [5e-6, 1e-9 / 450], [20e-6, 1e-9 / 50]
    said = program("collective").facts("all-reduce", "ring", 8, 4, 2**26, *links, 3)
    best = {"doubling": "recursive doubling", "hierarchical": "hierarchical (two levels)"}
    rows = {
        best.get(n, n): [cell.replace(" steps", "") for cell in cells]
        for n, cells in said["others"].items()
    }
    return [
        {
            "time, T": f"{said['formula']} = {said['sum']} = {said['time']}",
            "bytes that each rank has sent so far": said["so far"],
            "bytes that each rank sends in total": said["sent"],
            "minimum that the busiest rank must send": said["least"],
            "algorithm bandwidth, algbw": said["algbw"], "bus bandwidth, busbw": said["busbw"],
        },
        ["algorithm", "number of steps", "bytes that the busiest rank sends", "time"],
        marked(rows, best.get(said["fastest"], said["fastest"]), 2, "fastest"),
        "ring",
        f"After 3 of 14 steps, {said['passed']} of {said['time']} have passed. The next step "
        "sends 8 messages of 8 MiB, 2 of them between nodes.",
    ]  # fmt: skip


def words_of_schedules() -> list:
    times = program("schedules")
    given = 4, 8, 2, 10, 10, 6, 3, [10, 10, 15, 10]
    said = times.facts("1f1b", *given)
    labels = {
        "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "zb-h1": "ZB-H1",
        "zb-v": "ZB-V", "v-half": "V-Half", "v-min": "V-Min", "dualpipe-v": "DualPipeV",
    }  # fmt: skip
    # a preset promises that V-Half and V-Min need less memory
    others = times.facts("v-half", 4, 12, 2, 10, 10, 10, 0, [10] * 4)["others"]
    held = {name: float(cells[-1]) for name, cells in others.items()}
    assert held["v-min"] < held["v-half"] < min(held["1f1b"], held["zb-v"])
    now = times.moment(["1f1b", "zb-v"], *given, at=20)
    busy = [len([op for op in ops.split() if op != "idle"]) for ops in now["ranks"]]
    return [
        {
            "time of a step": said["time"], "idle time (bubble)": said["bubble"],
            "bubble by the formula": said["formula"],
            "most micro-batches held by ranks 0, 1, 2, 3": said["live"],
            "operations at the cursor, 1F1B, from rank 0 on": now["ranks"][0],
            "operations at the cursor, ZB-V, from rank 0 on": now["ranks"][1],
        },
        [
            "schedule", "time of a step", "idle time (bubble)",
            "most micro-batches that a rank holds",
        ],
        marked({labels[n]: each for n, each in said["others"].items()},
               labels[said["shortest"]], 0, "shortest"),
        "1F1B",
        f"After {now['time']}, {busy[0]} of 4 ranks with 1F1B and {busy[1]} of 4 ranks with "
        "ZB-V are computing.",
    ]  # fmt: skip


def words_of_memory() -> list:
    calculator, plan = program("memory"), importlib.import_module("plan")
    shape, gpu = plan.the_models()["llama-3-8b"], plan.the_gpu("h100")
    layout = plan.Layout(dp=4, tp=2, pp=4, micro_batches=8)
    said, table = (f(shape, layout, 8192, gpu) for f in (calculator.facts, calculator.compared))
    step = calculator.step_facts(shape, layout, 8192, 1)
    best = table["best"]
    return [
        {
            "fullest moment": f"stage 1, {step['moment']}", "contains": step["contains"],
            "GPUs": said["gpus"], "sequences in a step": said["batch"],
            "fullest stage": said["fullest"], "needs": said["needs"], "limit": said["room"],
            "result": said["verdict"],
        },
        ["change", "memory of the fullest stage", "time of a step", "does it fit?"],
        marked(table["others"], best, 2, "fastest"), "as it is",
        f"Stage 1 needs the most memory in the {step['moment']}: "
        f"{step['contains'].split(' = ')[1]}. The fastest single change that fits is “{best}”: "
        f"{table['others'][best][0]}, and {table['others'][best][1]} for a step.",
    ]  # fmt: skip


def words_of_roofline() -> list:
    said = program("roofline").facts("h100", "llama-3-8b", "decode", 8, 1024, 64, 8192)
    rows = {
        name: [cell.removesuffix(" TFLOP/s") for cell in cells]
        for name, cells in said["others"].items()
    }
    return [
        {
            "FLOPs and bytes": f"{said['flops']}, {said['bytes']}",
            "arithmetic intensity": f"{said['intensity']} FLOP/byte",
            "ridge of the GPU": f"{said['ridge']} FLOP/byte", "limited by": said["bound"],
            "shortest possible time": said["least"],
            "highest possible speed": f"{said['rate']}, {said['share']} of the peak",
            "fastest decode": f"{said['tokens']} tokens/s",
            "limit of decode for any batch": f"{said['ceiling']} FLOP/byte",
            "arithmetic limits decode with": said["crossing"],
            "weights and caches": said["held"], "the memory is enough for": said["fits"],
        },
        ["operation", "FLOPs per byte", "highest TFLOP/s", "shortest time"],
        marked(rows, "", 0, ""), "decode",
        "Memory limits decode at any batch size: with 1024 tokens in each sequence, it "
        f"computes at most {said['ceiling']} FLOPs per byte, and the ridge is {said['ridge']}. With 8 "
        f"sequences, it computes {said['intensity']}, and generates at most {said['tokens']} "
        f"tokens/s. Weights and caches need {said['held']}.",
    ]  # fmt: skip


def words_of_formats() -> list:
    numbers = program("formats")
    said = numbers.facts("1000", "e4m3", 0, 1024, OTHERS)
    labels = {"e4m3": "fp8 E4M3", "e5m2": "fp8 E5M2", "mxfp4": "MXFP4", "nvfp4": "NVFP4"}
    rows = {
        labels.get(name, name): [*cells[:3], re.sub("after | terms", "", cells[3])]
        for name, cells in said["others"].items()
    }
    rows = {name: [cell if cell != "no" else "–" for cell in row] for name, row in rows.items()}
    return [
        {
            "largest number": said["largest"], "smallest normal number": said["smallest"],
            "step from 1 to the next larger number": said["above one"],
            "stored number": said["stored"], "relative error": said["lost"],
            "bits": said["bits"], "value of the bits": said["says"], "scale": "2^0 = 1",
            "neighbours": f"below {said['below']}, above {said['above']}",
            "sum of 1024 terms": said["sum"], "exact sum": said["exact"],
            "sum stops": said["still"], "step at the end of the sum": said["spacing"],
        },
        ["format", "stored number", "relative error", "sum", "terms until it stops"],
        marked(rows, "", 0, ""), "fp8 E4M3",
        f"1000 is stored as {said['stored']} in fp8 E4M3, with a relative error of "
        f"{said['lost']}. The sum of 1024 such numbers is {said['sum']}, and the exact sum is "
        f"{said['exact']}. The sum stops after 1 term, at the largest number of this format.",
    ]  # fmt: skip


def words_of_attention() -> list:
    tiles = program("attention")
    s = {
        **tiles.FIRST,
        "order": "keys-outside",
        "rows": 128,
        "columns": 256,
        "step": 11,
        "query": 3,
    }
    said = tiles.facts(s)
    _, m, shrink, total, out = said["history"][said["now"]]
    return [
        {
            "tiles done": said["done"], "last tile": said["tile"],
            "bytes that the last tile moved": said["this tile"], "read so far": said["read"],
            "written so far": said["written"], "flash attention, all tiles": said["bytes"],
            "plain attention": f"{said['plain bytes']}, {said['ratio']} times as much",
            "tiles that must be computed": said["tiles"],
            "output, divided by the sum": said["output"],
            "output of plain attention, over all keys": said["plain output"],
            "FLOPs per byte": said["intensity"], "bytes on the chip": said["chip"],
        },
        ["keys", "largest score", "maximum", "factor", "sum", "output"],
        marked(said["history"], "", 0, ""), said["now"],
        f"{said['done']} tiles are done. The last one has {said['tile']}. It read "
        f"Q and O and wrote O ({said['this tile']}). For query {said['query']}, the earlier "
        f"output is multiplied by {shrink}. The maximum is now {m}, the sum is {total}, and "
        f"the output is {out}.",
    ]  # fmt: skip


def words_of_serving() -> list:
    load = program("serving")
    s = {**load.FIRST, "requests": 200}
    said = load.facts(s, load.LOADS)
    half, most = said["ttft"].split(" and ")
    # the presets promise a light load, the highest goodput and an overload
    goodput = {int(rate): float(cells[-1]) for rate, cells in said["loads"].items()}
    assert goodput[3] > 2.7 and said["best"] == "6" and goodput[10] < goodput[6] / 2
    return [
        {
            "in time": said["kept"], "throughput": said["throughput"],
            "TTFT, median and p99": said["ttft"], "longest gap, median and p99": said["gap"],
            "preemptions": said["again"], "requests wait, part of the run": said["waits"],
            "change with the most requests in time": said["helps"],
            "requests now": said["now"], "blocks taken": said["blocks"],
            "filled part of these blocks": said["filled"],
        },
        ["load", "tokens/s", "TTFT, median", "TTFT, p99", "gap, p99", "goodput"],
        marked({str(n): cells for n, cells in said["loads"].items()}, said["best"], 4, "best"),
        "6",
        f"With 6 requests per second, {said['kept']} of the requests are in time. First token: "
        f"median {half}, p99 {most}. Nothing limits the server. At "
        f"{said['moment'].split(' of ')[0]}: {said['now']}.",
    ]  # fmt: skip


def plain(text: str) -> str:
    return with_carets(text.replace("\xa0", " "))


def check_words(page: Page, name: str, words: list) -> None:
    """Compare the words next to a picture with the numbers of the program."""
    found = json.loads(page.locator(f"#{name}").evaluate(WORDS))
    expected = json.loads(json.dumps(words))
    for place, a, b in zip(
        ("facts", "head", "rows", "row", "status"), found, expected, strict=True
    ):
        texts = [plain(json.dumps(each, ensure_ascii=False)) for each in (a, b)]
        assert texts[0] == texts[1], place


# The colours that the page of an instrument names: for a selector, a property and its colour
COLOURS = {
    "collective": {
        "path.arc.far": ("stroke", "orange"), "path.arc:not(.far)": ("stroke", "blue"),
    },
    "schedules": {"path.live": ("fill", "grey"), "rect.pace": ("fill", "violet")},
    "memory": {
        "rect.op-F": ("fill", "blue"), "rect.op-B": ("fill", "orange"),
        "rect.op-W": ("fill", "green"),
    },
    "planner": {},
    "roofline": {"path.trail": ("stroke", "orange"), "path.arc.far": ("stroke", "orange")},
    "formats": {
        "button.sign": ("backgroundColor", "orange"),
        "button.exponent": ("backgroundColor", "blue"),
        "button.mantissa": ("backgroundColor", "green"),
        "rect.live": ("fill", "grey"), "path.arc.far": ("stroke", "orange"),
        "rect.stop": ("fill", "orange"),
    },
    "attention": {
        "rect.op-F": ("fill", "blue"), "rect.op-B": ("fill", "orange"),
        "rect.op-W": ("fill", "green"), "rect.live": ("fill", "grey"),
    },
    "serving": {
        "rect.live": ("fill", "grey"), "rect.op-B": ("fill", "orange"),
        "rect.op-F": ("fill", "blue"), "path.arc.thick:not(.thin)": ("stroke", "blue"),
    },
}  # fmt: skip
HUES = {"orange": (15, 50), "green": (90, 170), "blue": (190, 250), "violet": (250, 310)}
# Returns the bytes of each colour.
BYTES = """([name, wanted]) => Object.entries(wanted).map(([where, [property]]) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d")
  canvas.fillStyle = getComputedStyle(document.querySelector(`#${name} ${where}`))[property]
  canvas.fillRect(0, 0, 1, 1)
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)
})"""


def check_colours(page: Page, name: str) -> None:
    """Check the colours that the page of an instrument names."""
    found = page.evaluate(BYTES, [name, COLOURS[name]])
    for (where, (_, wanted)), each in zip(COLOURS[name].items(), found, strict=True):
        hue, _, strength = colorsys.rgb_to_hls(*(value / 255 for value in each))
        if wanted == "grey":
            assert strength < 0.2, (where, each)
        else:
            least, most = HUES[wanted]
            assert least <= 360 * hue <= most and strength > 0.25, (where, each)


# Starts a player, and returns the shapes of the frame `later` ms later. The clock of the page
# stands still, so the result does not depend on the speed of the machine.
PLAYED = f"""(place, later) => {{
  const look = {SHAPES}, real = requestAnimationFrame, begin = performance.now()
  const press = words =>
    [...place.querySelectorAll("button")].find(each => each.textContent === words).click()
  let next
  window.requestAnimationFrame = frame => {{ next = frame }}
  performance.now = () => begin
  press("Play")
  next(begin + later)
  const seen = look(place)
  window.requestAnimationFrame = real
  delete performance.now
  press("Stop")
  return seen
}}"""


def drawing_while_it_plays(page: Page, name: str, later: int) -> Drawing:
    page.emulate_media(reduced_motion="no-preference")
    ((drawing, *_), _) = drawings_and_bits(page.locator(f"#{name}").evaluate(PLAYED, later))
    page.emulate_media(reduced_motion="reduce")
    return drawing


def check_tiles_on_their_way(page: Page, i: int, rows: int, j: int, columns: int) -> None:
    """Check where the tiles of Q and O are while they move to the chip; K and V stay there."""
    drawing = drawing_while_it_plays(page, "attention", 150)
    homes = {(m[1], int(m[2])): e for e, m in drawing.tips(r"([QKVO]), tokens (\d+)–.*")}
    moving = {m[1]: e for e, m in drawing.tips(r"a tile of (\w), in bf16: .*")}
    (moving["O"],) = (
        each
        for each in drawing.all("rect", "op-F")
        if not each.tip and each.top < moving["Q"].bottom and each.tall > moving["Q"].tall / 2
    )
    chip = dict(zip("SQKVO", drawing.all("rect", "empty")[-5:], strict=True))
    for name in "QO":
        home, tile, place = homes[name, i * rows], moving[name], chip[name]
        shares = [
            (getattr(tile, side) - getattr(home, side))
            / (getattr(place, side) - getattr(home, side))
            for side in ("x", "bottom")
        ]
        assert all(0.3 < each < 0.5 for each in shares) and near(*shares, 0.02)
    for name in "KV":
        assert (moving[name].x, moving[name].y) == (chip[name].x, chip[name].y)
    (frame,) = drawing.all("rect", "frame")
    assert near(frame.x, homes["K", j * columns].x) and near(frame.y, homes["Q", i * rows].y)


def check_messages_on_their_way(page: Page, messages: list[tuple]) -> None:
    """Check where the messages of the collective are while they move."""
    drawing = drawing_while_it_plays(page, "collective", 300)
    columns = {int(match[1]): each.left for each, match in drawing.texts(r"rank (\d+)")}
    circles = drawing.all("circle")
    spots = {int(drawing.after(e).text): e for e in circles if drawing.after(e).kind == "on"}
    dots = [each for each in circles if each not in spots.values()]
    frames, parts = drawing.all("rect", "frame"), []
    assert len(dots) == len(messages)
    for dot, (source, target, chunks, _) in zip(dots, messages, strict=True):
        a, b, rim = spots[source], spots[target], spots[source].wide / 2
        assert dot.look == a.look
        length, gone = (math.dist((a.x, a.y), (each.x, each.y)) for each in (b, dot))
        parts.append((gone - rim) / (length - 2 * rim))
        assert near(gone + math.dist((b.x, b.y), (dot.x, dot.y)), length)
        for frame in [frames.pop(0) for _ in chunks]:
            parts.append((frame.x - columns[source]) / (columns[target] - columns[source]))
    assert not frames and min(parts) > 0 and max(parts) < 1
    assert max(parts) - min(parts) < 0.02


def check_tip_and_player(page: Page, name: str) -> None:
    """Check that a shape shows its own tooltip, and that the buttons step as they say."""
    svg = page.locator(f"#{name} .instrument-stage svg")
    tips = svg.evaluate(
        "svg => [...svg.querySelectorAll('[data-tip]')].map(e => e.dataset.tip)"
    )
    assert len({*tips[:3]}) == 3
    svg.focus()
    for tip in (tips[0], tips[1], tips[2], tips[1]):
        shown = svg.locator("xpath=following-sibling::p").inner_text()
        assert plain(shown) == plain(tip)
        page.keyboard.press("ArrowLeft" if tip == tips[2] else "ArrowRight")
    svg.blur()
    step = page.get_by_role("button", name="Step", exact=True)
    if step.count():
        slider = page.locator(f"#{name} .instrument-foot input[type=range]").first
        at = int(slider.input_value())
        page.get_by_role("button", name="Step back").click()
        assert int(slider.input_value()) == at - 1
        step.click()
        assert int(slider.input_value()) == at


# For each instrument, the function that checks its pictures, the function that returns its
# words, and the settings of the pictures. The words are those of the last picture.
PICTURES = {
    "collective": (
        collective,
        words_of_collective,
        [
            "collective=all-reduce&algorithm=ring&ranks=8&node=4&step=14",
            "collective=broadcast&algorithm=tree&ranks=6&node=2&step=2",
            "collective=all-to-all&algorithm=hierarchical&ranks=4&node=2&step=1",
            "collective=all-reduce&algorithm=ring&ranks=8&node=4&step=3",
        ],
    ),
    "schedules": (schedules, words_of_schedules, ["link=3&rank-2=15&weights=6&at=20"]),
    "memory": (memory, words_of_memory, [f"{EIGHT}&view=stages", f"{EIGHT}&view=step&stage=1"]),
    "planner": (planner, None, ["model=llama-3-8b&gpus=8&batch=131072&sort=memory"]),
    "roofline": (roofline, words_of_roofline, ["batch=8&context=1024"]),
    "formats": (
        formats,
        words_of_formats,
        ["format=bf16", "format=nvfp4", "number=1000&format=e4m3"],
    ),
    "attention": (
        attention,
        words_of_attention,
        [
            "mask=causal&rows=128&columns=64&step=40&query=50",
            "order=keys-outside&rows=128&columns=256&step=11&query=3",
        ],
    ),
    "serving": (serving, words_of_serving, ["rate=6"]),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_shows_the_numbers_of_the_program(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip("matplotlib")  # a program of the schedules imports it
    for folder in ("planner", "03_model_parallelism"):
        monkeypatch.syspath_prepend(ROOT / "snippets" / folder)
    set_view(page, 1280)
    check, words, (first, *others) = PICTURES[name]
    open_instrument(page, site_url, name, f"?{first}")
    texts = [page.locator(f"#{name}").evaluate(SHAPES)]
    if others:
        texts += page.evaluate(SHAPES_AT, [name, others])
    if words:  # the function planner() compares the words of the planner itself
        check_words(page, name, words())
    check_tip_and_player(page, name)
    check_colours(page, name)
    pictures = zip([first, *others], texts, strict=True)
    check({query: drawings_and_bits(text)[0] for query, text in pictures}, page)


# For each address: the sentence about the result.
SENTENCES = f"""states => {{
  const look = place => place.querySelector("[role=status]").textContent
  return ({RESTART})(states)
}}"""


def test_the_sentence_names_what_limits_the_server(page: Page, site_url: str) -> None:
    load = program("serving")
    limits = {
        "rate=10": "The full cache limits the server: requests wait for free blocks in ",
        "rate=8&cache=65536": "The slots limit the server: requests wait for a free slot in ",
        "budget=2048": "The time of a step limits the server. ",
    }
    open_instrument(page, site_url, "serving")
    sentences = page.evaluate(SENTENCES, ["serving", list(limits)])
    for (query, limit), sentence in zip(limits.items(), sentences, strict=True):
        asked = {name: int(value) for name, value in parse_qsl(query)}
        s = {**load.FIRST, "requests": 200, **asked}
        said = load.facts(s, [s["rate"]])
        assert limit in plain(sentence), query
        change = f"The single change with the most requests in time is {said['helps']}."
        assert change in plain(sentence), query


def test_the_sentence_names_the_batch_from_which_arithmetic_limits_decode(
    page: Page, site_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "snippets" / "planner")
    open_instrument(page, site_url, "roofline")
    query = "batch=448&context=128"
    (sentence,) = page.evaluate(SENTENCES, ["roofline", [query]])
    said = program("roofline").facts("h100", "llama-3-8b", "decode", 448, 128, 64, 8192)
    assert plain(sentence) == (
        "Arithmetic limits decode with 448 sequences and 128 tokens in each sequence: it "
        f"computes {said['intensity']} FLOPs per byte. The ridge is {said['ridge']}. Arithmetic "
        f"limits decode with {said['crossing']}. At this batch size, decode generates at most "
        f"{said['tokens']} tokens/s. Weights and caches need {said['held']}."
    )
