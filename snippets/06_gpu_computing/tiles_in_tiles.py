"""A matrix product divides its result into tiles of a block, of a warp and of a lane.

    python tiles_in_tiles.py sgemm.cu

The program reads the sizes of rungs 7 and 8 from `sgemm.cu`, and the place of each lane's
squares: the lines of C++ run here as Python. It checks that every element of the block's tile
belongs to exactly one lane. For each tile it prints how many numbers one step of k reads, how
many multiply-adds use them, and the bytes per multiply-add. Look at the last column: a larger
tile reads fewer bytes per multiply-add. The program draws tiles_in_tiles.svg.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

BLUE, RED, GREEN = "#0b6e99", "#c2410c", "#15803d"
WARP, LANE = 2, 13  # the ones that are drawn


def constants(source: str) -> dict[str, int]:
    """BM, BN, BK and THREADS of `namespace tile`."""
    line = re.search(r"namespace tile \{\s*constexpr int (.*?);", source, re.S)[1]
    return {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", line)}


def squares(source: str, warp: int, lane: int) -> list[tuple[int, int]]:
    """Row and column where each of a lane's four squares begins, read from the C++ source."""
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
    """Three panels: the block's tile, one warp's tile in it, one lane's tile in that."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tiles", "font.size": 12}
    figure = plt.figure(figsize=(9.6, 4.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9.6), ylim=(0, 4.9))
    axes.axis("off")

    def box(x, y, width, height, color, alpha=0.0, line=1.0):
        axes.add_patch(Rectangle((x, y), width, height, color=color, alpha=alpha, lw=0))
        axes.add_patch(Rectangle((x, y), width, height, fill=False, color=color, lw=line))

    def strips(x, width, height, deep, color, rows, columns):
        """The factors: a strip of A to the left of a tile, a strip of B above it."""
        box(x - 0.07 - deep, top - height, deep, height, color, 0.3)
        box(x, top + 0.07, width, deep, color, 0.3)
        axes.text(
            x - 0.14 - deep,
            top - height / 2,
            f"{rows} of A",
            color=color,
            ha="right",
            va="center",
            rotation=90,
        )
        axes.text(x + width / 2, top + 0.13 + deep, f"{columns} of B", color=color, ha="center")

    def line(x, y, color, width=0.3, style="-"):
        axes.plot(x, y, color=color, lw=width, ls=style)

    def words(x, color, title, *lines):
        axes.text(x, 4.62, title, color=color, weight="bold", va="center")
        for n, text in enumerate(lines):
            axes.text(x, 1.1 - 0.25 * n, text, color=color, va="center")

    rows, columns = warp_tile
    across, side, top = size["BN"] // columns, 2.3, 3.75  # inches
    scale, left = side / size["BM"], 0.75
    strips(left, side, side, size["BK"] * scale, BLUE, size["BM"], size["BN"])
    box(left, top - side, side, side, BLUE, 0.08, 1.5)
    warp_y, warp_x = WARP // across * rows, WARP % across * columns
    for warp in range(size["THREADS"] // 32):
        x, y = left + warp % across * columns * scale, top - warp // across * rows * scale
        chosen = warp == WARP
        box(x, y - rows * scale, columns * scale, rows * scale, GREEN, 0.35 if chosen else 0)

    # the chosen warp, as high as the block
    zoom, at = side / rows, 4.3
    width = columns * zoom
    for near, far in ((top - warp_y * scale, top), (top - (warp_y + rows) * scale, top - side)):
        axes.plot(
            [left + (warp_x + columns) * scale, at - 0.62],
            [near, far],
            color=GREEN,
            lw=1,
            ls=":",
        )
    strips(at, width, side, 0.09, GREEN, rows, columns)
    box(at, top - side, width, side, GREEN, 0.1, 1.5)
    for k in range(4, rows, 4):
        line([at, at + width], [top - k * zoom] * 2, GREEN)
    for k in range(4, columns, 4):
        line([at + k * zoom] * 2, [top, top - side], GREEN)

    # the chosen lane: its four squares of 4 x 4, moved together
    cell, beside = 1.84 / 8, 7.35
    strips(beside, 8 * cell, 8 * cell, 0.09, RED, 8, 8)
    corners = squares(source, WARP, LANE)
    for n, (row, column) in enumerate(corners):
        y, x = top - (row - warp_y) * zoom, at + (column - warp_x) * zoom
        box(x, y - 4 * zoom, 4 * zoom, 4 * zoom, RED, 0.8)
        corner_x, corner_y = beside + n % 2 * 4 * cell, top - n // 2 * 4 * cell
        box(corner_x, corner_y - 4 * cell, 4 * cell, 4 * cell, RED, 0.12, 1.5)
        for k in range(1, 4):
            axes.plot(
                [corner_x, corner_x + 4 * cell], [corner_y - k * cell] * 2, color=RED, lw=0.3
            )
            axes.plot(
                [corner_x + k * cell] * 2, [corner_y - 4 * cell, corner_y], color=RED, lw=0.3
            )
    right = at + (corners[1][1] - warp_x + 4) * zoom
    for row, far in ((corners[0][0] - warp_y, 0), (corners[2][0] - warp_y + 4, 8)):
        axes.plot(
            [right, beside - 0.62],
            [top - row * zoom, top - far * cell],
            color=RED,
            lw=1,
            ls=":",
        )

    block, warp = bytes_per_fma(size["BM"], size["BN"]), bytes_per_fma(rows, columns)
    lane = bytes_per_fma(8, 8)
    words(
        0.3,
        BLUE,
        f"A block owns {size['BM']} × {size['BN']} of C",
        f"Each step of k reads {size['BM']} + {size['BN']}",
        "numbers from global memory",
        f"for {size['BM'] * size['BN']:,} multiply-adds:",
        f"{block} byte each",
    )
    words(
        3.55,
        GREEN,
        f"One of its {size['THREADS'] // 32} warps owns {rows} × {columns}",
        f"Each step of k reads {rows} + {columns}",
        "numbers from shared memory",
        f"for {rows * columns:,} multiply-adds:",
        f"{warp} byte each",
    )
    words(
        6.95,
        RED,
        "One of 32 lanes owns 8 × 8",
        "Each step of k reads 8 + 8",
        "numbers into registers",
        "for 64 multiply-adds:",
        f"{lane} byte each",
    )
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
    # per FMA: 1/16, 3/16 and 1 byte, or 2 FLOPs for as many bytes
    flops_per_byte = [2 / bytes_per_fma(*tiles[name]) for name in ("block", "warp", "lane")]
    assert flops_per_byte == [32, Fraction(32, 3), 2]
    draw(size, source, tiles["warp"])


if __name__ == "__main__":
    main()
