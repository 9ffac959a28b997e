"""A tile in a tile in a tile: what block, warp and lane of rungs 7 and 8 read per FMA.

    python tiles_in_tiles.py sgemm.cu

The sizes, and where each lane's squares lie, are read from `sgemm.cu`: its lines run here as
Python. Every element of the block's tile must belong to one lane and to no other. Draws
tiles_in_tiles.svg.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

BLUE, RED, GREEN, GREY = "#0b6e99", "#c2410c", "#15803d", "#52525b"
WARP, LANE = 3, 13  # the ones that are drawn


def constants(source: str) -> dict[str, int]:
    """BM, BN, BK and THREADS of `namespace tile`."""
    line = re.search(r"namespace tile \{\s*constexpr int (.*?);", source, re.S)[1]
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", line)}


def squares(source: str, warp: int, lane: int) -> list[tuple[int, int]]:
    """Row and column where a lane's four 4 x 4 squares begin, by `Place` and `multiply`."""
    place = re.search(r"struct Place \{.*?\n\};", source, re.S)[0]
    names = {"warp": warp, "lane": lane}
    corner = {
        name: eval(formula.replace("/", "//"), names)
        for name, formula in re.findall(r"^\s+([yx]) = (.*);", place, re.M)
    }
    down, right = (int(re.search(rf"at\.{name} \+ (\d+)\]", source)[1]) for name in "yx")
    return [(corner["y"] + i, corner["x"] + j) for i in (0, down) for j in (0, right)]


def bytes_per_fma(rows: int, columns: int) -> Fraction:
    """One step of k: `rows` numbers of A, `columns` of B, 4 bytes each, for all products."""
    return Fraction(4 * (rows + columns), rows * columns)


def draw(size: dict[str, int], source: str, warp_tile: tuple[int, int]) -> None:
    """The block's tile with its strips, and beside it one warp's, with one lane's squares."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tiles", "font.size": 12}
    figure = plt.figure(figsize=(7, 3.7))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 7), ylim=(0, 3.7))
    axes.axis("off")

    def box(x, y, width, height, color, alpha=0.0, line=1.0):
        axes.add_patch(Rectangle((x, y), width, height, color=color, alpha=alpha, lw=0))
        axes.add_patch(Rectangle((x, y), width, height, fill=False, color=color, lw=line))

    rows, columns = warp_tile
    across, side, left, top = size["BN"] // columns, 2.1, 0.62, 3.2  # inches
    scale = side / size["BM"]
    strip = size["BK"] * scale
    box(left, top - side, side, side, BLUE, 0.08, 1.5)
    box(left - 0.08 - strip, top - side, strip, side, BLUE, 0.35)
    box(left, top + 0.08, side, strip, BLUE, 0.35)
    axes.text(left - 0.2 - strip, top - side / 2, "A", color=BLUE, ha="right", va="center")
    axes.text(left - 0.12, top + 0.1, "B", color=BLUE, ha="right")
    for warp in range(size["THREADS"] // 32):
        x, y = left + warp % across * columns * scale, top - warp // across * rows * scale
        chosen = warp == WARP
        box(
            x,
            y,
            columns * scale,
            -rows * scale,
            GREEN,
            0.3 if chosen else 0,
            1.5 if chosen else 0.5,
        )

    zoom, at = side / rows, 3.45  # the warp again, as high as the block
    width = columns * zoom
    corner = left + (WARP % across + 1) * columns * scale
    for near, far in ((top, top), (top - rows * scale, top - side)):
        axes.plot([corner, at - 0.16], [near, far], color=GREEN, lw=0.8, ls=":")
    box(at, top - side, width, side, GREEN, 0.12, 1.5)
    for k in range(4, rows, 4):
        axes.plot([at, at + width], [top - k * zoom] * 2, color=GREEN, lw=0.3)
    for k in range(4, columns, 4):
        axes.plot([at + k * zoom] * 2, [top, top - side], color=GREEN, lw=0.3)
    box(at - 0.14, top - side, 0.09, side, GREEN, 0.2, 0.8)
    box(at, top + 0.05, width, 0.09, GREEN, 0.2, 0.8)
    for row, column in squares(source, WARP, LANE):
        y, x = row - WARP // across * rows, column - WARP % across * columns
        box(at + x * zoom, top - y * zoom, 4 * zoom, -4 * zoom, RED, 0.8)
        box(at - 0.14, top - y * zoom, 0.09, -4 * zoom, RED, 0.8)
        box(at + x * zoom, top + 0.05, 4 * zoom, 0.09, RED, 0.8)

    block, warp = bytes_per_fma(size["BM"], size["BN"]), bytes_per_fma(rows, columns)
    lane = bytes_per_fma(8, 8)
    axes.text(left, 0.82, f"block {size['BM']} × {size['BN']}", color=BLUE, weight="bold")
    axes.text(left, 0.58, f"{block} byte per FMA", color=BLUE)
    axes.text(at - 0.6, 0.82, f"warp {rows} × {columns}", color=GREEN, weight="bold")
    axes.text(at - 0.6, 0.58, f"{warp} byte per FMA", color=GREEN)
    axes.text(at - 0.6, 0.30, "lane 8 × 8", color=RED, weight="bold")
    axes.text(at - 0.6, 0.06, f"{lane} byte per FMA", color=RED)
    for y, color, words in (
        (2.9, BLUE, "from global memory,\nonce for the block"),
        (2.0, GREEN, "different numbers\nin shared memory"),
        (1.1, RED, "read by each lane,\ninto its registers"),
    ):
        axes.text(4.95, y, words, color=color, va="center", linespacing=1.4)
    figure.savefig("tiles_in_tiles.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        raise SystemExit("tiles_in_tiles.py needs sgemm.cu: python tiles_in_tiles.py sgemm.cu")
    source = Path(sys.argv[1]).read_text()
    size = constants(source)
    owners: dict[tuple[int, int], int] = {}
    for thread in range(size["THREADS"]):
        for row, column in squares(source, thread // 32, thread % 32):
            for element in ((row + i, column + j) for i in range(4) for j in range(4)):
                assert element not in owners, element
                owners[element] = thread
    assert set(owners) == {(i, j) for i in range(size["BM"]) for j in range(size["BN"])}
    print(f"{size['THREADS']} lanes own {len(owners):,} elements, each of them once")

    mine = [element for element, thread in owners.items() if thread // 32 == WARP]
    tiles = {"block": (size["BM"], size["BN"])}
    tiles["warp"] = tuple(len(set(numbers)) for numbers in zip(*mine, strict=True))
    mine = [element for element, thread in owners.items() if thread == 32 * WARP + LANE]
    tiles["lane"] = tuple(len(set(numbers)) for numbers in zip(*mine, strict=True))
    print("         tile       numbers per step of k  FMAs    bytes per FMA")
    for name, (rows, columns) in tiles.items():
        print(
            f"{name:8} {rows:3} x {columns:<3}  {rows:4} + {columns:<14}  {rows * columns:6,}"
            f"  {bytes_per_fma(rows, columns)!s:>8}"
        )
    draw(size, source, tiles["warp"])


if __name__ == "__main__":
    main()
