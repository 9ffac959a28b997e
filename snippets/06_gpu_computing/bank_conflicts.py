"""Lanes that need different words of the same bank of shared memory need several passes.

Shared memory has 32 banks, and each bank is 4 bytes wide. In one pass, a bank delivers one word
to all lanes that need this word. The number of passes is therefore the largest number of
different words in one bank. Look at the column of a 32 × 32 tile: it takes 32 passes, unless
the rows are padded or swizzled. The program draws bank_conflicts.svg.
"""

import math
import random
from collections import Counter
from collections.abc import Callable

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

LANES, BANKS = 32, 32


# --8<-- [start:passes]
def passes(words: list[int]) -> int:
    """Return the passes of one access; `words` has the 4-byte word that each lane needs."""
    distinct = set(words)  # lanes that need the same word share it
    return max(Counter(word % BANKS for word in distinct).values())


# --8<-- [end:passes]


def simulated_passes(words: list[int]) -> int:
    """Count passes in which every bank delivers one word to all lanes that need it."""
    count = 0
    while words:
        delivered = {word % BANKS: word for word in words}  # bank: word
        words = [word for word in words if delivered[word % BANKS] != word]
        count += 1
    return count


def swizzle(row: int, column: int) -> int:
    """Return the word of an element. Row r stores its column c at place c XOR r."""
    return row * 32 + (column ^ row)


def draw(tiles: dict[str, Callable[[int, int], int]]) -> None:
    """The banks of the upper left corner, 8 rows of 6 words, of each tile."""
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bank_conflicts", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 2.9))
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    ink = "#52525b"
    style = {"ha": "center", "va": "center", "fontsize": 10, "color": "white"}
    for tile, (name, index) in enumerate(tiles.items()):
        x = 6.6 * tile
        banks = [[index(r, c) % BANKS for c in range(6)] for r in range(8)]
        edges = [x + c for c in range(7)]
        axes.pcolormesh(edges, range(9), banks, cmap="viridis", vmin=0, vmax=20, linewidth=0)
        frame = {"facecolor": "none", "edgecolor": "#c2410c", "linewidth": 3}
        axes.add_patch(plt.Rectangle((x, 0), 1, 8, **frame))
        for row in range(8):
            for column in range(6):
                axes.text(x + column + 0.5, row + 0.5, str(banks[row][column]), **style)
        axes.text(x, -0.4, name, color=ink)
        count = passes([index(lane, 0) for lane in range(LANES)])
        axes.text(x, 8.4, f"{count} pass{'es' * (count > 1)}", color="#c2410c", va="top")
    axes.text(20, 4, "number and colour:\nthe bank\n\nframed: one column,\nread by one warp",
              color=ink, fontsize=11, va="center")  # fmt: skip
    axes.set(xlim=(-0.2, 28.9), ylim=(10, -1.6), aspect="equal")
    axes.axis("off")
    figure.savefig("bank_conflicts.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    lanes = range(LANES)
    strides = (1, 2, 3, 4, 5, 8, 16, 17, 31, 32, 33, 64)
    counts = [passes([lane * s for lane in lanes]) for s in strides]
    print("stride in words    " + "".join(f"{s:4}" for s in strides))
    print("passes             " + "".join(f"{count:4}" for count in counts))
    for stride in range(1, 129):
        assert passes([lane * stride for lane in lanes]) == math.gcd(stride, BANKS)
    print("strides 1 to 128: equal to gcd(stride, 32)")
    print(f"all lanes the same word: {passes([0] * LANES)}, a broadcast")
    halves = [lane % 16 + lane // 16 * 32 for lane in lanes]
    print(f"half a warp in each of two rows, 32 words apart: {passes(halves)}")
    assert (passes([0] * LANES), passes(halves)) == (1, 2)
    assert {word % BANKS for word in halves} == set(range(16))  # the same banks twice

    generator = random.Random(0)
    for _ in range(200):  # some words are the same, and the banks differ in their words
        words = generator.choices(range(generator.randrange(1, 200)), k=LANES)
        assert passes(words) == simulated_passes(words)

    tiles = {
        "pitch 32": lambda row, column: row * 32 + column,
        "pitch 33 (padded)": lambda row, column: row * 33 + column,
        "pitch 32, swizzled": swizzle,
    }
    print("tile 32 × 32 of floats     a row   a column   bytes")
    for name, index in tiles.items():
        by_row = {passes([index(r, lane) for lane in lanes]) for r in lanes}
        by_column = {passes([index(lane, c) for lane in lanes]) for c in lanes}
        assert by_row == {1} and by_column == {LANES if name == "pitch 32" else 1}
        bytes_used = 4 * (32 * 33 if "33" in name else 32 * 32)
        print(f"{name:24} {by_row.pop():7} {by_column.pop():10} {bytes_used:7,}")
        # each element has its own word, or `passes` would count a broadcast
        words = {index(r, c) for r in lanes for c in lanes}
        assert len(words) == 32 * 32
        pitch = bytes_used // (4 * 32)  # each element stays in its own row
        assert all(index(r, c) // pitch == r for r in lanes for c in lanes)

    indices = {"pitch 32": tiles["pitch 32"], "pitch 33": tiles["pitch 33 (padded)"]}
    draw(indices | {"swizzled": swizzle})


if __name__ == "__main__":
    main()
