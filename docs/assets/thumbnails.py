"""Draw docs/assets/thumbnails/NAME.svg, the pictures of the cards on the home page.

    python docs/assets/thumbnails.py

A card is about 290 pixels wide, so each picture shows one idea and few words. Every number, bar
and curve comes from a program of the book. The other pictures are schematic: they explain an
idea and measure nothing.
"""

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_name("thumbnails")
for chapter in (
    "planner",
    "01_parallelism_strategies",
    "03_model_parallelism",
    "04_zero_and_fsdp",
    "05_mixed_precision",
    "08_quantization",
    "09_inference",
    "10_flash_attention",
):
    sys.path.insert(0, str(ROOT / "snippets" / chapter))

import attention_in_tiles  # noqa: E402
import collective_steps  # noqa: E402
import nf4  # noqa: E402
import number_formats  # noqa: E402
import pipeline_times  # noqa: E402
import plan  # noqa: E402
import rank_memory  # noqa: E402
import roofs  # noqa: E402
import serving_load  # noqa: E402
import zero_memory  # noqa: E402
from memory import Layout  # noqa: E402

WIDTH, HEIGHT = 320, 160
BLUE, ORANGE, GREEN, VIOLET = RANKS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK, SOFT, GREY, PALE, BROWN = "#1c242c", "#46525e", "#6b7783", "#d3dae1", "#a16207"


class Drawing:
    """An SVG of the size of a card's picture, built shape by shape."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, **more: object
    ) -> None:
        size = f'x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}"'
        self.parts.append(f'<rect {size} fill="{fill}"{_attributes(more)}/>')

    def text(
        self, x: float, y: float, words: str, fill: str = SOFT, anchor: str = "start", **more
    ) -> None:
        where = f'x="{x:.4g}" y="{y:.4g}" fill="{fill}"'
        where += f' text-anchor="{anchor}"' * (anchor != "start")
        self.parts.append(f"<text {where}{_attributes(more)}>{words}</text>")

    def line(
        self, points: Iterable[tuple[float, float]], stroke: str, width: float = 2, **more
    ) -> None:
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.path(f"M{drawn}", stroke, width, **more)

    def path(self, d: str, stroke: str, width: float = 2, fill: str = "none", **more) -> None:
        self.parts.append(
            f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{width:g}"'
            f"{_attributes(more)}/>"
        )

    def arrow(self, x: float, y: float, to: float, stroke: str = SOFT) -> None:
        """An arrow to the right."""
        self.path(f"M{x:g} {y:g}H{to:g}m-5 -4l5 4l-5 4", stroke, 1.6)

    def dot(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def svg(self) -> str:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        head += 'font-family="system-ui, -apple-system, Segoe UI, Roboto, sans-serif" '
        return "\n".join([head + 'font-size="13">', *self.parts, "</svg>", ""])


def _attributes(more: dict[str, object]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())


# ---- the instruments


def collective(d: Drawing) -> None:
    """Eight ranks in two nodes after four steps of a ring: a stripe for each rank in a sum."""
    n = 8
    steps = collective_steps.plan("all-reduce", "ring", n, 4)
    state = collective_steps.play("all-reduce", n, steps)[4]
    left, pitch, top, high = 18, 36, 44, 12
    for rank, held in enumerate(state):
        x = left + rank * pitch
        for c in range(n):
            mask = sorted(held[c])
            wide = (pitch - 8) / len(mask)
            for i, source in enumerate(mask):
                d.box(x + i * wide, top + c * high, wide, high - 2, RANKS[source % 4])
        d.text(x + (pitch - 8) / 2, 154, str(rank), anchor="middle")
    for rank in range(n - 1):
        a, b = (left + each * pitch + (pitch - 8) / 2 for each in (rank, rank + 1))
        colour = ORANGE if rank == 3 else BLUE
        d.path(
            f"M{a + 3:g} 38C{a + 5:g} 22 {b - 5:g} 22 {b - 3:g} 38m-4 -4l4 4l2 -5", colour, 1.6
        )
    d.text(left, 16, "node 0")
    d.text(left + 8 * pitch - 8, 16, "node 1", anchor="end")
    d.text(160, 16, "slow link", ORANGE, "middle")


def schedules(d: Drawing) -> None:
    """The timeline of ZB-H1: four ranks, eight micro-batches."""
    spans = pipeline_times.timeline("zb-h1", 4, 8, 1, 1, 1, 1, 0, [10] * 4)
    last = max(end for row in spans for _, _, end in row)
    colours = {"F": BLUE, "B": ORANGE, "W": GREEN}
    scale = 288 / last
    for rank, row in enumerate(spans):
        for op, begin, end in row:
            d.box(
                16 + begin * scale, 34 + rank * 26, (end - begin) * scale - 1, 21,
                colours[op.kind],
            )  # fmt: skip
    for x, words, kind in ((16, "forward", "F"), (104, "backward", "B"), (202, "weights", "W")):
        d.box(x, 12, 11, 11, colours[kind])
        d.text(x + 16, 22, words)
    d.arrow(16, 149, 304)


def memory(d: Drawing) -> None:
    """The parts of the memory of four pipeline stages, and the 80 GiB of an H100."""
    shape, gpu = plan.the_model("llama-3-70b"), plan.the_gpu("h100")
    layout = Layout(16, 4, 4, 1, 1, 1, 32, zero=1)
    every = [rank_memory.parts_of(shape, layout, 8192, index) for index in range(4)]
    scale = 212 / max(sum(parts.values()) for parts in every)
    for index, parts in enumerate(every):
        y, x = 32 + index * 26, 72.0
        d.text(14, y + 15, f"stage {index}")
        for colour, size in zip(rank_memory.COLOURS, parts.values(), strict=True):
            d.box(x, y, size * scale, 20, colour)
            x += size * scale
    x = 72 + gpu.memory * scale
    d.line([(x, 25), (x, 138)], INK, 1.8)
    d.text(x + 8, 19, rank_memory.in_bytes(gpu.memory), INK, anchor="end")
    d.text(72, 153, "parameters", rank_memory.COLOURS[0], font_size=12)
    d.text(148, 153, "gradients", SOFT, font_size=12)
    d.text(218, 153, "activations", rank_memory.COLOURS[3], font_size=12)


def planner(d: Drawing) -> None:
    """Layouts of Llama 3 8B on eight H100s: the memory of each, and whether it fits."""
    gpu = plan.the_gpu("h100")
    shape = plan.the_model("llama-3-8b")
    fit, near, _ = plan.search(shape, 8, 8192, 64, gpu, 3)
    room = plan.CONSTANTS["memory"]["room"] * gpu.memory
    rows = sorted([*fit[:3], *near[:2]], key=lambda each: each.step.seconds)
    scale = 126 / gpu.memory
    for place, each in enumerate(rows):
        y = 30 + place * 25
        cut = each.layout
        zero = ("", " ZeRO-1", " ZeRO-2", " FSDP")[cut.zero]
        ways = [("DP", cut.dp), ("TP", cut.tp), ("CP", cut.cp)]
        d.text(14, y + 14, " ".join(f"{k} {v}" for k, v in ways if v > 1) + zero)
        fits = each.memory.needed <= room
        d.box(156, y + 2, each.memory.needed * scale, 15, BLUE if fits else ORANGE)
        x = 298
        mark = f"M{x} {y + 10}l4 4l8 -9" if fits else f"M{x + 1} {y + 5}l9 9m0 -9l-9 9"
        d.path(mark, GREEN if fits else ORANGE, 2.2)
    x = 156 + room * scale
    d.line([(x, 24), (x, 154)], INK, 1.5, stroke_dasharray="4 3")
    d.text(14, 18, "layout", INK)
    d.text(156, 18, "memory", INK)
    d.text(310, 18, "fits", INK, anchor="end")


def formats(d: Drawing) -> None:
    """The bits of 0.1 in bf16, and the stored number between its neighbours."""
    form, number = number_formats.FORMATS["bf16"], 0.1
    stored = number_formats.rounded(number, form)
    bits = f"{number_formats.encode(stored, form):016b}"
    for place, bit in enumerate(bits):
        colour = ORANGE if place == 0 else BLUE if place <= form.e else GREEN
        x = 16 + place * 18
        d.box(x, 32, 16, 24, colour, rx=2)
        d.text(x + 8, 49, bit, "#ffffff", "middle", font_weight=600)
    d.text(16, 22, "sign", ORANGE)
    d.text(52, 22, "exponent", BLUE)
    d.text(178, 22, "mantissa", GREEN)
    below, above = (number_formats.neighbour(stored, form, by) for by in (-1, 1))
    scale = 110 / (above - stored)
    d.line([(20, 112), (300, 112)], SOFT, 1.5)
    for value in (below, stored, above):
        x = 160 + (value - stored) * scale
        d.line([(x, 105), (x, 119)], INK, 2)
        d.text(x, 137, f"{value:.5f}", anchor="middle", font_size=12)
    x = 160 + (number - stored) * scale
    d.path(f"M{x:.1f} 104l-6 -11h12z", ORANGE, 1, ORANGE)
    d.text(x, 86, "0.1", ORANGE, "middle", font_weight=600)


def roofline(d: Drawing) -> None:
    """The roof of an H100 and the book's operations on it."""
    gpu = roofs.GPUS["h100"]
    left, right, low, top = 0.1, 20000.0, 1e11, 2e15

    def at(intensity: float, rate: float) -> tuple[float, float]:
        x = 20 + 284 * math.log(intensity / left) / math.log(right / left)
        return x, 140 - 118 * math.log(rate / low) / math.log(top / low)

    def reached(intensity: float) -> float:
        return min(gpu["flops"], gpu["bandwidth"] * intensity)

    ridge = gpu["flops"] / gpu["bandwidth"]
    d.line([(20, 14), (20, 140), (306, 140)], GREY, 1.2)
    d.line(
        [at(left, reached(left)), at(ridge, gpu["flops"]), at(right, gpu["flops"])], BLUE, 2.6
    )
    points = roofs.points(roofs.MODELS["llama-3-8b"], 32, 2048, 4096, 4096)
    names = ("vector add", "softmax", "decode", "fused attention", "matmul")
    for name in names:
        flops, moved = points[name]
        x, y = at(flops / moved, reached(flops / moved))
        d.dot(x, y, 4.5, ORANGE)
        if name == "fused attention":
            d.text(308, y + 22, name, anchor="end")
        elif name != "matmul":
            d.text(x + 8, y + 12, name)
    x, y = at(*(points["matmul"][0] / points["matmul"][1], gpu["flops"]))
    d.text(x, y - 9, "matmul", anchor="middle")
    d.text(306, 154, "FLOPs per byte", anchor="end", font_size=12)
    d.text(28, 24, "FLOP/s", font_size=12)


def serving(d: Drawing) -> None:
    """Goodput and the load: what a server delivers in time as more requests arrive."""
    loads = range(1, 15)
    measured = {rate: serving_load.measure(serving_load.FIRST, rate) for rate in loads}

    def at(rate: float, value: float) -> tuple[float, float]:
        return 34 + 262 * (rate - 1) / 13, 132 - 108 * value / 10

    d.line([(34, 14), (34, 132), (304, 132)], GREY, 1.2)
    d.line([at(1, 1), at(10.6, 10.6)], GREY, 1.5, stroke_dasharray="4 3")
    d.line([at(rate, m["requests"]) for rate, m in measured.items()], BLUE, 2.4)
    d.line([at(rate, m["goodput"]) for rate, m in measured.items()], ORANGE, 2.4)
    for rate, m in measured.items():
        d.dot(*at(rate, m["goodput"]), 2.6, ORANGE)
    d.text(300, at(14, measured[14]["requests"])[1] - 8, "answered", BLUE, "end")
    d.text(300, 106, "answered in time", ORANGE, "end")
    d.text(42, 24, "requests/s", font_size=12)
    d.text(304, 150, "requests that arrive per second", anchor="end", font_size=12)


def attention(d: Drawing) -> None:
    """A causal mask over tiles: whole, cut, skipped; the running state of one query."""
    s = attention_in_tiles.FIRST | {"mask": "causal"}
    done = attention_in_tiles.tiles(s)[:26]
    side = 17
    for i in range(8):
        for j in range(8):
            kind, x, y = attention_in_tiles.kind(s, (i, j)), 36 + j * side, 14 + i * side
            if kind == "skipped":
                d.box(
                    x + 1,
                    y + 1,
                    side - 3,
                    side - 3,
                    "none",
                    stroke=GREY,
                    stroke_dasharray="2 2",
                )
            else:
                colour = ORANGE if kind == "cut" else BLUE
                later = {} if (i, j) in done else {"opacity": 0.3}
                d.box(x, y, side - 1, side - 1, colour, rx=1, **later)
    i, j = done[-1]
    d.box(36 + j * side - 1.5, 14 + i * side - 1.5, side + 2, side + 2, "none", stroke=INK,
          stroke_width=2)  # fmt: skip
    d.text(0, 0, "queries", anchor="middle", transform="translate(26 82) rotate(-90)")
    long = attention_in_tiles.FIRST | {"sequence": 4096}
    counts = {
        "plain attention": sum(attention_in_tiles.plain_bytes(long).values()),
        "in tiles": sum(attention_in_tiles.crossed(long, attention_in_tiles.tiles(long))),
    }
    d.text(196, 30, "bytes moved", INK)
    for place, (name, count) in enumerate(counts.items()):
        y, colour = 56 + place * 46, (ORANGE, BLUE)[place]
        d.text(196, y, name, colour)
        d.box(196, y + 6, 110 * count / max(counts.values()), 14, colour, rx=1)


# ---- the chapters


def strategies(d: Drawing) -> None:
    """Three ways to cut: the batch, each matrix, the layers."""
    side = 19
    for place, (name, fill) in enumerate(
        (
            ("the batch", lambda row, column: RANKS[row]),
            ("each matrix", lambda row, column: RANKS[column]),
            ("the layers", lambda row, column: RANKS[row]),
        )
    ):
        x0 = 14 + place * 102
        for row in range(4):
            gap = 6 * row if place == 2 else 0
            if place == 2:
                d.box(x0, 20 + row * side + gap, 4 * side + 10, side - 2, fill(row, 0), rx=3)
                continue
            for column in range(4):
                wide = 3 * column if place == 1 else 0
                high = 3 * row if place == 0 else 0
                d.box(
                    x0 + column * side + wide, 24 + row * side + high, side - 2, side - 2,
                    fill(row, column), rx=2,
                )  # fmt: skip
        d.text(x0 + 42, 134, name, INK, "middle")
    d.text(160, 153, "colours: ranks 0 to 3", anchor="middle", font_size=12)


def ddp(d: Drawing) -> None:
    """Gradients fill buckets during backward, and full buckets are reduced meanwhile."""
    unit, left, sending = 25, 90, 48
    d.text(14, 60, "backward", BLUE)
    d.text(14, 116, "all-reduce", ORANGE)
    free = 0.0
    for k in range(6):
        d.box(left + k * unit, 40, unit - 2, 30, BLUE, rx=2)
        d.text(left + k * unit + unit / 2 - 1, 60, str(5 - k), "#ffffff", "middle")
    for bucket in range(3):
        ready = left + 2 * (bucket + 1) * unit
        begin = max(ready, free)
        free = begin + sending
        d.line([(ready - 1, 70), (ready - 1, 96)], GREY, 1.3, stroke_dasharray="3 3")
        d.box(begin, 96, sending - 2, 30, ORANGE, rx=2)
        label = f"{5 - 2 * bucket}, {4 - 2 * bucket}"
        d.text(begin + sending / 2 - 1, 116, label, "#ffffff", "middle")
    d.text(left, 26, "gradients of layers 5 to 0")
    d.arrow(left, 148, 304)


def model_parallelism(d: Drawing) -> None:
    """A layer under tensor parallelism: columns, then rows, then a sum."""
    d.box(16, 50, 34, 60, PALE, rx=2)
    d.text(33, 85, "x", INK, "middle", font_size=15)
    for rank, colour in enumerate(RANKS):
        d.box(78 + rank * 20, 38, 18, 84, colour, rx=2)
        d.box(186, 38 + rank * 21, 64, 19, colour, rx=2)
    d.arrow(54, 80, 72)
    d.arrow(162, 80, 180)
    d.arrow(254, 80, 272)
    d.box(276, 50, 34, 60, PALE, rx=2)
    d.text(293, 85, "+", INK, "middle", font_size=20)
    d.text(117, 28, "columns of A", anchor="middle")
    d.text(218, 28, "rows of B", anchor="middle")
    d.text(308, 132, "all-reduce", ORANGE, "end")
    d.text(16, 146, "one layer, four ranks")


def zero(d: Drawing) -> None:
    """Bytes per parameter on each of four ranks, for each stage of ZeRO."""
    scale = 196 / 16
    for stage, name in enumerate(("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        y, x = 28 + stage * 27, 76.0
        d.text(14, y + 15, name)
        shared = [4 if stage >= level else 1 for level in (3, 2, 1)]
        for size, by, colour in zip(
            (2, 2, zero_memory.K), shared, (BLUE, ORANGE, VIOLET), strict=True
        ):
            d.box(x, y, size / by * scale, 21, colour)
            x += size / by * scale
        d.text(x + 6, y + 15, f"{zero_memory.per_rank(1, 4, stage):g}", INK, font_weight=600)
    d.text(14, 17, "bytes per parameter, 4 ranks", INK)
    d.text(76, 152, "parameters", BLUE, font_size=12)
    d.text(152, 152, "gradients", ORANGE, font_size=12)
    d.text(222, 152, "optimizer", VIOLET, font_size=12)


def precision(d: Drawing) -> None:
    """The bits of four formats: sign, exponent and mantissa."""
    rows = (("fp32", "fp32"), ("bf16", "bf16"), ("fp16", "fp16"), ("fp8", "e4m3"))
    for place, (name, key) in enumerate(rows):
        form, y = number_formats.FORMATS[key], 30 + place * 27
        d.text(14, y + 15, name, INK)
        for bit in range(1 + form.e + form.m):
            colour = ORANGE if bit == 0 else BLUE if bit <= form.e else GREEN
            d.box(54 + bit * 7.9, y, 6.9, 20, colour, rx=1)
    for x, words, colour in (
        (54, "sign", ORANGE),
        (92, "exponent", BLUE),
        (164, "mantissa", GREEN),
    ):
        d.text(x, 20, words, colour)
    d.text(306, 152, "1 bit per box", anchor="end", font_size=12)


def gpu_computing(d: Drawing) -> None:
    """A matrix product in tiles: block, warp and thread."""
    x, y, side = 62, 44, 100
    d.box(22, y, 30, side, PALE, stroke=BLUE)
    d.box(x, 12, side, 24, PALE, stroke=BLUE)
    d.box(22, y + 25, 30, 25, BLUE)
    d.box(x + 50, 12, 25, 24, BLUE)
    d.text(12, y + 54, "A", INK, "middle")
    d.text(x + side + 12, 28, "B", INK, "middle")
    for row in range(4):
        for column in range(4):
            here = (row, column) == (1, 2)
            d.box(
                x + column * 25, y + row * 25, 24, 24, GREEN if here else PALE, rx=1,
            )  # fmt: skip
    d.path(
        f"M{x + 75} {y + 25}L206 26M{x + 75} {y + 50}L206 122", GREY, 1, stroke_dasharray="3 3"
    )
    for row in range(8):
        for column in range(8):
            here = row % 4 == 1 and column % 4 == 2
            d.box(207 + column * 12, 26 + row * 12, 11, 11, ORANGE if here else GREEN, rx=1)
    d.text(206, 140, "warp", GREEN)
    d.text(302, 140, "thread", ORANGE, "end")
    d.text(x + side / 2, 159, "block", anchor="middle", font_size=12)


def memory_of_a_step(d: Drawing) -> None:
    """Live memory over one training step: what stays, what grows and what is freed."""
    layers, base = 8, 148
    parameters, optimizer, activation, gradient = 14.0, 28.0, 9.0, 1.75
    xs, live, grads = [], [], []
    for k in range(layers + 1):  # forward: each layer keeps its activations
        xs.append(20 + 96 * k / layers)
        live.append(activation * k)
        grads.append(0.0)
    for k in range(1, layers + 1):  # backward: activations are freed, gradients appear
        xs.append(116 + 128 * k / layers)
        live.append(activation * (layers - k))
        grads.append(gradient * k)
    xs.append(304)
    live.append(0.0)
    grads.append(grads[-1])

    def area(low: list[float], high: list[float], colour: str) -> None:
        upper = [(x, base - h) for x, h in zip(xs, high, strict=True)]
        lower = [(x, base - h) for x, h in zip(xs, low, strict=True)]
        points = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*upper, *reversed(lower)])
        d.path(f"M{points}z", "none", 0, colour)

    zeros = [0.0] * len(xs)
    state = [parameters] * len(xs)
    fixed = [parameters + optimizer] * len(xs)
    with_gradients = [f + g for f, g in zip(fixed, grads, strict=True)]
    everything = [w + a for w, a in zip(with_gradients, live, strict=True)]
    area(zeros, state, GREY)
    area(state, fixed, VIOLET)
    area(fixed, with_gradients, GREEN)
    area(with_gradients, everything, BLUE)
    d.text(26, base - 24, "optimizer state", "#ffffff")
    d.text(26, base - 3, "parameters", "#ffffff", font_size=12)
    d.text(92, 92, "activations", "#ffffff")
    d.text(300, base - 48 - 14, "gradients", GREEN, "end")
    d.text(68, 20, "forward", anchor="middle")
    d.text(190, 20, "backward", anchor="middle")
    d.text(276, 20, "step", anchor="middle")


def quantization(d: Drawing) -> None:
    """The sixteen levels of NF4 and sixteen even ones, under the distribution of weights."""
    normal = statistics.NormalDist(0, 1)
    widest = 2.6

    def at(level: float) -> float:
        return 160 + 140 * level

    curve = [(at(k / 50), 118 - 230 * normal.pdf(widest * k / 50)) for k in range(-50, 51)]
    points = "L".join(f"{x:.1f} {y:.1f}" for x, y in [(at(-1), 118), *curve, (at(1), 118)])
    d.path(f"M{points}z", "none", 0, PALE)
    for level in nf4.nf4_levels().tolist():
        d.line([(at(level), 66), (at(level), 92)], BLUE, 2.6)
    for k in range(16):
        level = -1 + 2 * k / 15
        d.line([(at(level), 104), (at(level), 130)], ORANGE, 2.6)
    d.text(20, 58, "NF4", BLUE, font_weight=600)
    d.text(20, 150, "evenly spaced", ORANGE, font_weight=600)
    d.text(300, 20, "16 levels", INK, "end")


def inference(d: Drawing) -> None:
    """Continuous batching: a slot that becomes free gets the next request at once."""
    slots, lengths = 5, [9, 5, 12, 7, 3, 6, 10, 4, 8, 5, 9, 7, 6, 4, 11, 5]
    free, last = [0] * slots, 24
    for number, length in enumerate(lengths):
        slot = free.index(min(free))
        begin, end = free[slot], min(last, free[slot] + length)
        if begin >= last:
            break
        x, y, wide = 60 + begin * 10.2, 28 + slot * 22, (end - begin) * 10.2
        d.box(x, y, wide - 1.5, 18, BLUE, rx=2)
        d.box(x, y, min(wide - 1.5, 9), 18, ORANGE, rx=2)
        if wide > 30:
            d.text(x + wide / 2 + 5, y + 13.5, str(number), "#ffffff", "middle", font_size=12)
        free[slot] = end
    for slot in range(slots):
        d.text(14, 42 + slot * 22, f"slot {slot}")
    d.text(60, 18, "prompt", ORANGE)
    d.text(112, 18, "answer, token by token", BLUE)
    d.arrow(60, 150, 304)


def masks(d: Drawing) -> None:
    """Three masks over tiles: causal, a sliding window, and documents."""
    side, n = 11, 8
    documents = [0, 0, 0, 1, 1, 2, 2, 2]
    kinds: list[tuple[str, Callable[[int, int], bool]]] = [
        ("causal", lambda i, j: j <= i),
        ("window", lambda i, j: i - 2 <= j <= i),
        ("documents", lambda i, j: j <= i and documents[i] == documents[j]),
    ]
    for place, (name, seen) in enumerate(kinds):
        x0 = 14 + place * 102
        for i in range(n):
            for j in range(n):
                fill = PALE if not seen(i, j) else ORANGE if i == j else BLUE
                d.box(x0 + j * side, 22 + i * side, side - 1, side - 1, fill)
        d.text(x0 + n * side / 2, 130, name, INK, "middle")
    d.text(160, 150, "grey tiles are never computed", anchor="middle", font_size=12)


def tools(d: Drawing) -> None:
    """A run that hangs: three ranks wait in a collective that the fourth never called."""
    for rank in range(4):
        y = 26 + rank * 28
        d.text(14, y + 15, f"rank {rank}")
        for call in range(3):
            x = 66 + call * 33
            d.box(x, y, 30, 21, BLUE, rx=2)
            d.text(x + 15, y + 15, str(call + 1), "#ffffff", "middle")
        if rank == 2:
            d.text(170, y + 15, "did not call it", INK, font_weight=600)
            continue
        d.box(
            166,
            y,
            140,
            21,
            "none",
            stroke=ORANGE,
            stroke_width=1.6,
            rx=2,
            stroke_dasharray="4 3",
        )
        d.text(236, y + 15, "waits in all_reduce", ORANGE, "middle", font_size=12)
    d.arrow(66, 148, 304)


def clusters(d: Drawing) -> None:
    """Two nodes: fast links between the GPUs of a node, a slow link between the nodes."""
    for node, x0 in enumerate((14, 184)):
        d.box(x0, 28, 122, 104, "none", stroke=GREY, stroke_width=1.5, rx=6)
        d.text(x0 + 61, 20, f"node {node}", INK, "middle")
        places = [(x0 + 14, 42), (x0 + 72, 42), (x0 + 72, 84), (x0 + 14, 84)]
        corners = [(x + 18, y + 16) for x, y in places]
        d.line([*corners, corners[0]], BLUE, 6)
        d.line([corners[0], corners[2]], BLUE, 6)
        d.line([corners[1], corners[3]], BLUE, 6)
        for gpu, (x, y) in enumerate(places):
            d.box(x, y, 36, 32, RANKS[gpu], rx=3)
            d.text(x + 18, y + 21, str(4 * node + gpu), "#ffffff", "middle", font_weight=600)
    d.line([(136, 80), (184, 80)], ORANGE, 2.5)
    d.text(160, 70, "slow", ORANGE, "middle")
    d.text(75, 150, "fast links inside", BLUE, "middle", font_size=12)
    d.text(245, 150, "8 ranks in all", anchor="middle", font_size=12)


def post_training(d: Drawing) -> None:
    """The loop of post-training: answers, rewards and new weights."""
    boxes = [
        ("sampler", 16, 58, BLUE),
        ("checker", 122, 14, GREY),
        ("trainer", 228, 58, ORANGE),
    ]
    for name, x, y, colour in boxes:
        d.box(x, y, 76, 34, colour, rx=4)
        d.text(x + 38, y + 22, name, "#ffffff", "middle", font_weight=600)
    d.line([(54, 58), (54, 31), (122, 31)], BLUE, 2)
    d.text(86, 24, "answers", BLUE, "middle", font_size=12)
    d.line([(198, 31), (266, 31), (266, 58)], INK, 2)
    d.text(234, 24, "rewards", INK, "middle", font_size=12)
    d.line([(266, 92), (266, 126), (54, 126), (54, 92)], ORANGE, 6)
    d.line([(115, 26), (122, 31), (115, 36)], BLUE, 2)
    d.line([(261, 51), (266, 58), (271, 51)], INK, 2)
    d.line([(46, 102), (54, 93), (62, 102)], ORANGE, 4)
    d.text(160, 118, "new weights", ORANGE, "middle", font_size=12)
    d.text(160, 150, "small samples, large weights", anchor="middle", font_size=12)


INSTRUMENTS = [collective, schedules, memory, planner, formats, roofline, serving, attention]
CHAPTERS = [
    strategies,
    ddp,
    model_parallelism,
    zero,
    precision,
    gpu_computing,
    memory_of_a_step,
    quantization,
    inference,
    masks,
    tools,
    clusters,
    post_training,
]


def drawings() -> dict[str, str]:
    """The text of each picture, by its file name."""
    drawn = {}
    for draw in [*INSTRUMENTS, *CHAPTERS]:
        picture = Drawing()
        draw(picture)
        drawn[f"{draw.__name__}.svg"] = picture.svg()
    return drawn


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in drawings().items():
        (FOLDER / name).write_text(text, "utf-8")
