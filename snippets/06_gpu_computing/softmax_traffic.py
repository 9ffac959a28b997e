"""A picture of what a softmax reads from memory and writes to it, unfused and fused.

Four softmax functions run on one row, in plain Python. Their arrays count each load and each
store, as global memory would see them; a local variable or list is a register and is not
counted. The counts become the arrows of the picture. Look at the bytes per element: a copy
reads and writes each element once, so 8 bytes over these bytes is the largest fraction of a
copy's speed that the softmax can reach when no cache helps.

Plain Python writes the SVG, so the program runs without any package.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

N, BYTES = 1000, 4  # elements of the row, bytes of an fp32 element
WIDTH, BAND = 720, 142
INK, MUTED, READ, WRITE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


# --8<-- [start:memory]
@dataclass
class Pass:
    """One loop over the row, in one kernel."""

    kernel: str
    words: str
    loads: int = 0
    stores: int = 0


@dataclass
class Memory:
    """Global memory, which counts the accesses of each pass."""

    passes: list[Pass] = field(default_factory=list)

    def start(self, kernel: str, words: str) -> None:
        self.passes.append(Pass(kernel, words))


@dataclass
class Row:
    """A row of floats in global memory."""

    memory: Memory
    values: list[float]

    def __getitem__(self, i: int) -> float:
        self.memory.passes[-1].loads += 1
        return self.values[i]

    def __setitem__(self, i: int, value: float) -> None:
        self.memory.passes[-1].stores += 1
        self.values[i] = value


# --8<-- [end:memory]
# --8<-- [start:softmaxes]
def unfused(memory: Memory, x: Row, y: Row) -> None:
    """Five kernels: x.amax(), x - top, .exp(), .sum(), /."""
    shifted, exponentials = Row(memory, [math.nan] * N), Row(memory, [math.nan] * N)
    memory.start("amax", "maximum")
    top = max(x[i] for i in range(N))
    memory.start("sub", "subtract")
    for i in range(N):
        shifted[i] = x[i] - top
    memory.start("exp", "exp")
    for i in range(N):
        exponentials[i] = math.exp(shifted[i])
    memory.start("sum", "sum")
    total = sum(exponentials[i] for i in range(N))
    memory.start("div", "divide")
    for i in range(N):
        y[i] = exponentials[i] / total


def three_passes(memory: Memory, x: Row, y: Row) -> None:
    memory.start("softmax", "maximum")
    top = max(x[i] for i in range(N))
    memory.start("softmax", "exp, sum")
    total = sum(math.exp(x[i] - top) for i in range(N))
    memory.start("softmax", "exp, divide")
    for i in range(N):
        y[i] = math.exp(x[i] - top) / total


def online(memory: Memory, x: Row, y: Row) -> None:
    memory.start("softmax", "maximum and sum")
    top, total = -math.inf, 0.0
    for i in range(N):
        value = x[i]
        new_top = max(top, value)
        total = total * math.exp(top - new_top) + math.exp(value - new_top)
        top = new_top
    memory.start("softmax", "exp, divide")
    for i in range(N):
        y[i] = math.exp(x[i] - top) / total


def held(memory: Memory, x: Row, y: Row) -> None:
    memory.start("softmax", "maximum, exp, sum, divide in registers")
    registers = [x[i] for i in range(N)]
    top = max(registers)
    registers = [math.exp(value - top) for value in registers]
    total = sum(registers)
    for i, value in enumerate(registers):
        y[i] = value / total


# --8<-- [end:softmaxes]
TITLES = {
    unfused: "unfused: a kernel for each operation",
    three_passes: "fused, three passes over the row",
    online: "fused, two passes: the online softmax",
    held: "fused, one pass: the row stays in registers",
}


# --8<-- [start:count]
def count(softmax: Callable[[Memory, Row, Row], None]) -> list[Pass]:
    """Run one softmax, compare its result with a reference, and return its passes."""
    memory = Memory()
    values = [1000 + 8 * math.sin(0.7 * i) for i in range(N)]
    x, y = Row(memory, list(values)), Row(memory, [math.nan] * N)
    softmax(memory, x, y)
    total = math.fsum(math.exp(value - values[0]) for value in values)
    for value, result in zip(values, y.values, strict=True):
        assert math.isclose(result, math.exp(value - values[0]) / total, rel_tol=1e-12)
    assert x.values == values  # no softmax may use its input as scratch space
    for each in memory.passes:  # one load for each element, and one store or none
        assert each.loads == N and each.stores in (0, N), each
    return memory.passes


# --8<-- [end:count]
def text(x: float, y: float, words: str, colour: str = INK, size: int = 15, **more: str) -> str:
    options = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{options}>{words}</text>'


def frame(x: float, y: float, wide: float, high: float, colour: str, opacity: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="6" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}" stroke-width="1.5"/>'
    )


def arrow(x: float, start: float, end: float, kind: str) -> str:
    colour = READ if kind == "read" else WRITE
    return (
        f'<path d="M{x} {start} V{end}" stroke="{colour}" stroke-width="3" '
        f'marker-end="url(#{kind})"/>'
    )


def band(top: float, title: str, passes: list[Pass]) -> list[str]:
    """One softmax: its kernels as frames, its passes as boxes, its memory as a bar."""
    kernels = list(dict.fromkeys(each.kernel for each in passes))
    gap, left, right = 10, 16, 510
    wide = (right - left - gap * (len(passes) - 1)) / len(passes)
    upper, lower = top + 34, top + 98  # edges of the boxes and of the bar
    parts = [text(left, top + 18, title, font_weight="bold")]
    parts.append(frame(left, lower, right - left, 24, MUTED, 0.12))
    parts.append(text(left + 8, lower + 17, "global memory (HBM)", MUTED, 13))
    if len(kernels) == 1:  # one frame around all passes
        parts.append(frame(left - 6, upper - 6, right - left + 12, 42, MUTED, 0))
    for n, each in enumerate(passes):
        x = left + n * (wide + gap)
        parts.append(frame(x, upper, wide, 30, READ, 0.1))
        middle = x + wide / 2
        parts.append(text(middle, upper + 20, each.words, text_anchor="middle"))
        if each.loads:
            parts.append(arrow(middle - 14, lower, upper + 41, "read"))
        if each.stores:
            parts.append(arrow(middle + 14, upper + 37, lower - 4, "write"))
    reads = sum(each.loads for each in passes) // N
    writes = sum(each.stores for each in passes) // N
    moved = BYTES * (reads + writes)
    parts.append(text(534, upper + 14, f"{reads} read{'s' * (reads > 1)}", READ))
    parts.append(text(604, upper + 14, f"{writes} write{'s' * (writes > 1)}", WRITE))
    parts.append(text(534, upper + 38, f"{moved} bytes per element"))
    parts.append(text(534, upper + 64, f"at most {2 * BYTES / moved:.0%}", font_weight="bold"))
    parts.append(text(534, upper + 82, "of a copy's speed", MUTED, 13))
    return parts


def draw(rows: dict[str, list[Pass]]) -> str:
    """The SVG: a band for each softmax, time from left to right."""
    tips = "".join(
        f'<marker id="{kind}" markerWidth="4" markerHeight="4" refX="1.5" refY="1.5" '
        f'orient="auto"><path d="M0 0L3 1.5L0 3z" fill="{colour}"/></marker>'
        for kind, colour in (("read", READ), ("write", WRITE))
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BAND * len(rows)}" '
        'font-family="system-ui, sans-serif">',
        f"<defs>{tips}</defs>",
    ]
    for n, (title, passes) in enumerate(rows.items()):
        parts += band(n * BAND, title, passes)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = {}
    print("               kernels  reads  writes  bytes per element  of a copy's speed")
    for softmax, title in TITLES.items():
        passes = rows[title] = count(softmax)
        kernels = len({each.kernel for each in passes})
        reads = sum(each.loads for each in passes) // N
        writes = sum(each.stores for each in passes) // N
        moved = BYTES * (reads + writes)
        print(
            f"{softmax.__name__:13} {kernels:8} {reads:6} {writes:7} {moved:18}"
            f"      at most {2 * BYTES / moved:4.0%}"
        )
    with open("softmax_traffic.svg", "w", encoding="utf-8") as file:
        file.write(draw(rows))


if __name__ == "__main__":
    main()
