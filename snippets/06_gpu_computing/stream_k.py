"""The last wave of a matrix product: whole tiles, split-K, a persistent kernel, stream-K.

D [M, N] = A [M, K] B [K, N] is cut into tiles, and each tile into turns of 64 along K. A
schedule says which block does which turns. It is simulated, and held to a formula where
stores are free. Stream-K: Osama et al., arXiv 2301.03598. Draws stream_k.svg.
"""

import math
from collections import defaultdict
from functools import partial

SMS, TILE_M, TILE_N, TURN = 132, 128, 256, 64
CLOCKS = TILE_M * TILE_N * TURN / 2048  # of a turn: an H100's SM does 2,048 FMAs in bf16
SHARE = 3.35e12 / SMS / 1.83e9  # bytes of memory's 3.35 TB/s for an SM and a clock
STORE = 2 * TILE_M * TILE_N / SHARE / CLOCKS  # a tile in bf16, counted in turns

Part = tuple[int, int, int]  # a tile, its first turn, and the one after its last


# --8<-- [start:schedules]
def whole(tiles: int, turns: int) -> list[list[Part]]:
    """A block for each tile."""
    return [[(tile, 0, turns)] for tile in range(tiles)]


def split_k(tiles: int, turns: int, parts: int) -> list[list[Part]]:
    """As many blocks for each tile as there are parts of K."""
    size = math.ceil(turns / parts)
    cuts = [(k, min(k + size, turns)) for k in range(0, turns, size)]
    return [[(tile, *cut)] for tile in range(tiles) for cut in cuts]


def persistent(tiles: int, turns: int) -> list[list[Part]]:
    """A block for each SM, which takes every 132nd tile."""
    return [[(t, 0, turns) for t in range(sm, tiles, SMS)] for sm in range(min(SMS, tiles))]


def stream_k(tiles: int, turns: int) -> list[list[Part]]:
    """A block for each SM, and for each the same number of turns, wherever they begin."""
    blocks = []
    for sm in range(SMS):
        at, end = tiles * turns * sm // SMS, tiles * turns * (sm + 1) // SMS
        block = []
        while at < end:
            tile, first = divmod(at, turns)
            length = min(turns - first, end - at)
            block.append((tile, first, first + length))
            at += length
        blocks.append(block)
    return blocks


# --8<-- [end:schedules]


# --8<-- [start:run]
def run(blocks: list[list[Part]], turns: int, store: float = 0, overlap: bool = True) -> float:
    """Turns until all tiles are stored; whichever SM is free takes the next block.

    A part of a tile is written in fp32, at twice the cost. The block with the tile's first turn
    waits for the other parts, reads and adds them, and writes the tile. With `overlap` a block
    goes on while what it has written is on its way.
    """
    written = defaultdict(list)  # when each part of a tile is there
    heads = []
    free = [0.0] * SMS
    for block in blocks:
        sm = free.index(min(free))
        for tile, first, end in block:
            free[sm] += end - first
            if first == 0 and end < turns:
                heads.append((tile, sm))
            else:
                there = free[sm] + store * (1 if end - first == turns else 2)
                written[tile].append(there)
                free[sm] = free[sm] if overlap else there
    for tile, sm in heads:
        others = written[tile]
        free[sm] = max(free[sm], *others) + 2 * store * len(others)
        written[tile] = [free[sm] + store]
    return max(max(times) for times in written.values())


# --8<-- [end:run]


def check() -> None:
    """Each schedule does each turn once; where stores are free, its time is the formula's."""
    for tiles in (1, 8, 131, 132, 133, 264, 272, 400, 529):
        for turns in (16, 61):
            rounds, even = math.ceil(tiles / SMS), math.ceil(tiles * turns / SMS)
            formulas = {whole: rounds * turns, persistent: rounds * turns, stream_k: even}
            for parts in (2, 4, 8):
                blocks = math.ceil(tiles * parts / SMS) * math.ceil(turns / parts)
                formulas[partial(split_k, parts=parts)] = blocks
            for schedule, formula in formulas.items():
                parts = [part for block in schedule(tiles, turns) for part in block]
                done = sorted(
                    (tile, k) for tile, first, end in parts for k in range(first, end)
                )
                assert done == [(tile, k) for tile in range(tiles) for k in range(turns)]
                time = run(schedule(tiles, turns), turns)
                if isinstance(schedule, partial) and turns % schedule.keywords["parts"]:
                    assert time <= formula  # the last part of a tile is shorter
                else:
                    assert time == formula
            near = partial(math.isclose, rel_tol=1e-9)
            stored = run(whole(tiles, turns), turns, STORE, overlap=False)
            assert near(stored, rounds * (turns + STORE))
            assert near(run(persistent(tiles, turns), turns, STORE), rounds * turns + STORE)
    # of two parts one writes 2 stores, and the other reads 2 and writes 1
    assert near(run(split_k(8, 16, 2), 16, STORE), 8 + 5 * STORE)


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "stream_k", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.4))
    counts, turns = range(6, 661, 6), 64
    for name, schedule, overlap, colour in (
        ("whole tiles", whole, False, "#6b7280"),
        ("persistent", persistent, True, "#0b6e99"),
        ("stream-K", stream_k, True, "#c2410c"),
    ):
        times = [run(schedule(n, turns), turns, STORE, overlap) for n in counts]
        shares = [100 * n * turns / SMS / t for n, t in zip(counts, times, strict=True)]
        axes.plot(counts, shares, color=colour, linewidth=1.6, label=name)
    axes.set(
        xlabel="tiles, K = 4,096", ylabel="SM time in use (%)", ylim=(0, 103), xlim=(0, 660)
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("stream_k.svg", transparent=True, metadata={"Date": None})


PRODUCTS = (  # M, N, K
    (8192, 8192, 8192),
    (2048, 4352, 4096),  # 16 columns of tiles are two waves, this is the 17th
    (896, 4864, 4096),  # one tile more than one
    (1024, 2048, 65536),  # a weight's gradient: the sum runs over tokens
    (128, 8192, 8192),  # 128 requests, decoded
)


def waves(tiles: int) -> float:
    """The share of SM time in which whole tiles are computed."""
    return tiles / (math.ceil(tiles / SMS) * SMS)


def main() -> None:
    check()
    print(f"tiles of {TILE_M} × {TILE_N}, to store one takes {STORE:.1f} turns of {TURN}")
    print("SM time in use, if stores were free / with them")
    print(
        "M × N × K            tiles waves       whole  persistent  split-K, parts    stream-K"
    )
    for m, n, k in PRODUCTS:
        tiles, turns = math.ceil(m / TILE_M) * math.ceil(n / TILE_N), math.ceil(k / TURN)
        best = min((2, 4, 8, 16), key=lambda s: run(split_k(tiles, turns, s), turns, STORE))
        cells = {}
        for schedule in (whole, persistent, partial(split_k, parts=best), stream_k):
            blocks, busy = schedule(tiles, turns), tiles * turns / SMS
            stored = run(blocks, turns, STORE, overlap=schedule is not whole)
            cells[schedule] = f"{busy / run(blocks, turns):.0%} / {busy / stored:.0%}"
            assert stored >= run(blocks, turns)
        ours, others = cells[whole], list(cells.values())[1:]
        text = f"{ours:>12}{others[0]:>12}{others[1]:>12}, {best}{others[2]:>13}"
        print(f"{f'{m} × {n} × {k}':20}{tiles:6}{tiles / SMS:6.1f}{text}")
    worst = [(n, waves(n)) for n in range(1, 5 * SMS, SMS)]
    assert all(
        share == min(waves(n) for n in range(first, first + SMS)) for first, share in worst
    )
    print("whole tiles lose most at", ", ".join(f"{n}: {share:.0%}" for n, share in worst))
    draw()


if __name__ == "__main__":
    main()
