"""Two ways to give the elements of a vector to threads: one each, or a grid-stride loop.

The program runs through all threads of each launch. It checks that every element is computed
exactly once. Look at the column `idle`: it counts the threads of the last block that have no
element. The last lines show how many threads a two-dimensional launch starts for a matrix.
The program draws which_thread.svg.
"""

import math
from collections import Counter
from itertools import product

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


# --8<-- [start:launches]
def one_each(n: int, block: int, grid: int) -> list[int]:
    """if (i < n) y[i] = …  with i = blockIdx.x * blockDim.x + threadIdx.x."""
    owner = [-1] * n
    for block_index in range(grid):
        for thread in range(block):
            i = block_index * block + thread
            if i < n:
                assert owner[i] == -1  # no other thread computes it
                owner[i] = block_index * block + thread
    return owner


def grid_stride(n: int, block: int, grid: int) -> list[int]:
    """for (i = …; i < n; i += gridDim.x * blockDim.x) y[i] = …"""
    owner = [-1] * n
    for block_index in range(grid):
        for thread in range(block):
            for i in range(block_index * block + thread, n, grid * block):
                assert owner[i] == -1
                owner[i] = block_index * block + thread
    return owner


# --8<-- [end:launches]


def tile_2d(rows: int, columns: int, bx: int, by: int) -> tuple[Counter, int]:
    """Return how often each (row, column) is computed, and how many threads are started.

    x is the index of the column, so neighbours in x are neighbours in a warp and in memory.
    """
    grid_x, grid_y = math.ceil(columns / bx), math.ceil(rows / by)
    computed, threads = Counter(), 0
    for block_y, block_x in product(range(grid_y), range(grid_x)):
        for y, x in product(range(by), range(bx)):
            row, column = block_y * by + y, block_x * bx + x
            threads += 1
            if row < rows and column < columns:
                computed[row, column] += 1
    return computed, threads


def strip(axes, owner: list[int], block: int, row: int, launched: int) -> None:
    """One row of boxes, coloured by block, with the thread's number within its block."""
    colours = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
    for i in range(launched):
        idle = i >= len(owner)
        thread = i if idle else int(owner[i])
        colour = colours[thread // block]
        face = "none" if idle else colour
        axes.add_patch(
            plt.Rectangle(
                (i, row),
                0.9,
                0.9,
                facecolor=face,
                edgecolor=colour,
                alpha=0.85,
                linestyle=":" if idle else "-",
            )
        )
        axes.text(
            i + 0.45, row + 0.45, str(thread % block), ha="center", va="center",
            color=colour if idle else "white", fontsize=10,
        )  # fmt: skip


def draw(n: int, block: int) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "which_thread", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.2))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    grid = math.ceil(n / block)
    ink = "#52525b"
    axes.text(0, 7.3, f"4 blocks of {block}: one element for each thread", color=ink)
    strip(axes, one_each(n, block, grid), block, 6, grid * block)
    axes.text(grid * block + 0.4, 6.45, "dotted: no element", color=ink, va="center")
    owner = grid_stride(n, block, 2)
    words = f"{max(owner) // block + 1} blocks of {block}: the grid-stride loop"
    axes.text(0, 3.5, words, color=ink)
    strip(axes, owner, block, 2.2, n)
    for i in range(0, n, block):
        axes.text(i + 0.45, 1.9, str(i), color=ink, ha="center", va="top", fontsize=10)
    axes.text(n - 0.7, 1.45, "element", color=ink, fontsize=10)
    parts = ("first iteration", 0, 2 * block), ("second iteration", 2 * block, n)
    for name, first, end in parts:
        axes.plot([first, first, end - 0.1, end - 0.1], [0.95, 0.75, 0.75, 0.95], color=ink)
        axes.text((first + end) / 2, 0.55, name, color=ink, ha="center", va="top")
    axes.set(xlim=(-0.1, 24.2), ylim=(-0.6, 8.3))  # the boxes fill the left two thirds
    axes.axis("off")
    figure.savefig("which_thread.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("     n  block  blocks  threads  idle")
    for n in (1, 31, 33, 1000, 1024, 4097):
        grid = math.ceil(n / 256)
        owner = one_each(n, 256, grid)
        assert owner == list(range(n))  # thread i has element i
        print(f"{n:6,}    256  {grid:6}  {grid * 256:7,}  {grid * 256 - n:4}")
    for grid in (1, 2, 5):
        assert grid_stride(33, 4, grid) == [i % (4 * grid) for i in range(33)]
    owner = grid_stride(4097, 256, 4)
    per_thread = Counter(owner).values()
    assert len(per_thread) == 1024
    print(
        f"grid-stride, 4 blocks: {len(owner):,} elements, "
        f"{min(per_thread)} or {max(per_thread)} to a thread"
    )
    warp = owner[1024 : 1024 + 32]
    print(f"elements 1,024 to 1,055 belong to threads {warp[0]} to {warp[-1]}: one warp")
    for block in ((32, 32), (32, 8), (256, 1)):
        computed, threads = tile_2d(100, 70, *block)
        assert len(computed) == 7000 and set(computed.values()) == {1}
        first = list(computed)[: min(block[0], 70)]  # the first threads, in their order
        assert first == [(0, x) for x in range(len(first))]  # neighbours in x and in memory
        print(
            f"100 × 70 in blocks of {block[0]:3} × {block[1]:2}: {threads:6,} threads for 7,000"
        )
    print("every element computed exactly once")
    draw(14, 4)


if __name__ == "__main__":
    main()
