"""The last wave of a matrix product, with four schedules: which of them keeps all SMs busy?

D [M, N] = A [M, K] B [K, N] is cut into tiles, and each tile into steps of 64 along K. A
schedule says which block computes which steps. The program simulates four schedules: whole
tiles, split-K, a persistent kernel and stream-K (Osama et al., arXiv 2301.03598). The
program compares the time of each schedule with a formula. It draws stream_k.svg.
"""

import math
from collections import Counter, defaultdict
from functools import partial

SMS, TILE_M, TILE_N, STEP = 132, 128, 256, 64
CLOCKS = TILE_M * TILE_N * STEP / 2048  # of a step: 2,048 FMAs in bf16 per clock on an H100
SHARE = 3.35e12 / SMS / 1.83e9  # bytes per clock and SM, if all SMs share 3.35 TB/s
STORE = 2 * TILE_M * TILE_N / SHARE / CLOCKS  # the time to store a tile in bf16, in steps

Part = tuple[int, int, int]  # a tile, its first step, and the step after its last step


# --8<-- [start:schedules]
def whole(tiles: int, steps: int) -> list[list[Part]]:
    """One block for each tile."""
    return [[(tile, 0, steps)] for tile in range(tiles)]


def split_k(tiles: int, steps: int, parts: int) -> list[list[Part]]:
    """Several blocks for each tile, one for each part of K."""
    size = math.ceil(steps / parts)
    cuts = [(k, min(k + size, steps)) for k in range(0, steps, size)]
    return [[(tile, *cut)] for tile in range(tiles) for cut in cuts]


def persistent(tiles: int, steps: int, sms: int = SMS) -> list[list[Part]]:
    """One block for each SM. With 132 SMs, a block computes every 132nd tile."""
    return [[(t, 0, steps) for t in range(sm, tiles, sms)] for sm in range(min(sms, tiles))]


def stream_k(tiles: int, steps: int, sms: int = SMS) -> list[list[Part]]:
    """One block for each SM. All get the same number of steps, which may cross tiles."""
    blocks = []
    for sm in range(sms):
        at, end = tiles * steps * sm // sms, tiles * steps * (sm + 1) // sms
        block = []
        while at < end:
            tile, first = divmod(at, steps)
            length = min(steps - first, end - at)
            block.append((tile, first, first + length))
            at += length
        blocks.append(block)
    return blocks


# --8<-- [end:schedules]


# --8<-- [start:run]
def run(blocks: list[list[Part]], steps: int, store: float = 0, overlap: bool = True) -> float:
    """The number of steps until all tiles are stored. A free SM takes the next block.

    A part of a tile is written in fp32, at twice the cost. The block that has the first step of
    a tile waits for the other parts, reads and adds them, and writes the tile. With `overlap`,
    a block computes its next steps while its store is still running.
    """
    written = defaultdict(list)  # for each tile: when its parts are in memory
    heads = []  # blocks that have the first step of a tile, but not all of its steps
    free = [0.0] * SMS
    for block in blocks:
        sm = free.index(min(free))
        for tile, first, end in block:
            free[sm] += end - first
            if first == 0 and end < steps:
                heads.append((tile, sm))
            else:
                there = free[sm] + store * (1 if end - first == steps else 2)
                written[tile].append(there)
                free[sm] = free[sm] if overlap else there
    for tile, sm in heads:
        others = written[tile]
        free[sm] = max(free[sm], *others) + 2 * store * len(others)
        written[tile] = [free[sm] + store]
    return max(max(times) for times in written.values())


# --8<-- [end:run]


def formulas(tiles: int, steps: int, store: float = 0) -> dict:
    """The time of each schedule. With stores, stream-K must have more than 264 tiles."""
    rounds, even = math.ceil(tiles / SMS), math.ceil(tiles * steps / SMS)
    added = 3 if tiles % SMS else 1  # a part is read in 2 stores, and the tile is written in 1
    return {
        whole: rounds * (steps + store),
        persistent: rounds * steps + store,
        stream_k: even + added * store,
    }


def check() -> None:
    """Each schedule computes each step once, and its time follows a formula."""
    near = partial(math.isclose, rel_tol=1e-9)
    for tiles in (1, 8, 131, 132, 133, 264, 272, 400, 529):
        for steps in (16, 61):
            times = formulas(tiles, steps)
            for parts in (2, 4, 8):
                blocks = math.ceil(tiles * parts / SMS) * math.ceil(steps / parts)
                times[partial(split_k, parts=parts)] = blocks
            for schedule, formula in times.items():
                parts = [part for block in schedule(tiles, steps) for part in block]
                done = sorted(
                    (tile, k) for tile, first, end in parts for k in range(first, end)
                )
                assert done == [(tile, k) for tile in range(tiles) for k in range(steps)]
                time = run(schedule(tiles, steps), steps)
                if isinstance(schedule, partial) and steps % schedule.keywords["parts"]:
                    assert time <= formula  # the last part of a tile has fewer steps
                else:
                    assert time == formula
            for block in persistent(tiles, steps):  # its tiles belong to one wave after another
                assert [tile // SMS for tile, *_ in block] == list(range(len(block)))
            work = [sum(end - k for _, k, end in block) for block in stream_k(tiles, steps)]
            assert max(work) - min(work) <= 1  # all SMs are busy until the end
            begun = [sum(k > 0 for _, k, _ in block) for block in stream_k(tiles, steps)]
            assert max(begun) <= 1  # a block writes at most one part that is read again
            for schedule, formula in formulas(tiles, steps, STORE).items():
                if schedule is not stream_k or tiles > 2 * SMS:
                    overlap = schedule is not whole
                    assert near(run(schedule(tiles, steps), steps, STORE, overlap), formula)
    # of two parts one writes 2 stores, and the other reads 2 and writes 1
    assert near(run(split_k(8, 16, 2), 16, STORE), 8 + 5 * STORE)
    # of five parts four write 2 stores each, and the fifth reads 4 × 2 and writes 1
    owners = Counter(tile for block in stream_k(32, 128) for tile, *_ in block)
    assert {*owners.values()} == {5}
    assert near(run(stream_k(32, 128), 128, STORE), 32 + 11 * STORE)


def bars(blocks: list[list[Part]], sms: int) -> list[tuple[int, int, int, int]]:
    """The SM, the start, the length and the tile of each part, if stores take no time."""
    free, found = [0] * sms, []
    for block in blocks:
        sm = free.index(min(free))
        for tile, first, end in block:
            found.append((sm, free[sm], end - first, tile))
            free[sm] += end - first
    return found


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "stream_k", "font.size": 12}
    figure = plt.figure(figsize=(7, 5.4))
    grid = figure.add_gridspec(2, 3, height_ratios=(2, 3), hspace=0.65, wspace=0.12)
    tiles, steps, sms = 5, 8, 4  # a small example: five tiles for four SMs
    colours = "#0b6e99", "#c2410c", "#15803d", "#7c3aed", "#6b7280"
    for column, (name, blocks, time) in enumerate(
        (
            ("whole tiles", whole(tiles, steps), 16),
            ("split-K, two parts", split_k(tiles, steps, 2), 12),
            ("stream-K", stream_k(tiles, steps, sms), 10),
        )
    ):
        panel = figure.add_subplot(grid[0, column])
        parts = bars(blocks, sms)
        assert max(start + length for _, start, length, _ in parts) == time
        assert sum(length for _, _, length, _ in parts) == tiles * steps
        for sm, start, length, tile in parts:
            panel.broken_barh([(start, length)], (sm - 0.4, 0.8), color=colours[tile])
            middle = start + length / 2
            panel.text(middle, sm, str(tile), ha="center", va="center", color="white")
        panel.set(xlim=(0, 17), xticks=(0, 8, 16), ylim=(3.6, -0.6), title=f"{name}: {time}")
        panel.set_yticks(range(sms), [f"SM {sm}" for sm in range(sms)] if not column else [])
        panel.set_xlabel("steps along K")
        panel.title.set_fontsize(12)
        panel.spines[["top", "right"]].set_visible(False)
    axes = figure.add_subplot(grid[1, :])
    counts, steps = range(6, 661, 6), 64
    for name, schedule, overlap, colour in (
        ("whole tiles", whole, False, "#6b7280"),
        ("persistent", persistent, True, "#0b6e99"),
        ("stream-K", stream_k, True, "#c2410c"),
    ):
        times = [run(schedule(n, steps), steps, STORE, overlap) for n in counts]
        shares = [100 * n * steps / SMS / t for n, t in zip(counts, times, strict=True)]
        axes.plot(counts, shares, color=colour, linewidth=1.6, label=name)
    for line, schedule in zip(axes.lines, (whole, persistent, stream_k), strict=True):
        for n, share in zip(counts, line.get_ydata(), strict=True):
            if schedule is not stream_k or n > 2 * SMS:
                time = 100 * n * steps / SMS / share
                assert abs(time - formulas(n, steps, STORE)[schedule]) <= 1  # one step
            assert schedule is not stream_k or n <= SMS or 78.5 < share < 99.5
    axes.set(
        xlabel="tiles, K = 4,096", ylabel="SM time in use (%)", ylim=(0, 103), xlim=(0, 660)
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(
        "stream_k.svg", transparent=True, metadata={"Date": None}, bbox_inches="tight"
    )


PRODUCTS = (  # M, N, K
    (8192, 8192, 8192),
    (2048, 4352, 4096),  # 272 tiles are two waves and 8 tiles
    (896, 4864, 4096),  # 133 tiles are one wave and one tile
    (1024, 2048, 65536),  # the gradient of a weight: the sum runs over tokens
    (128, 8192, 8192),  # a layer that decodes 128 requests
)


def waves(tiles: int) -> float:
    """The fraction of SM time in which whole tiles are computed."""
    return tiles / (math.ceil(tiles / SMS) * SMS)


def main() -> None:
    check()
    print(
        f"storing a tile of {TILE_M} × {TILE_N} takes the time of {STORE:.1f} steps of {STEP}"
    )
    print("SM time in use, if stores took no time / with stores")
    print(
        "M × N × K            tiles waves       whole  persistent  split-K, parts    stream-K"
    )
    for m, n, k in PRODUCTS:
        tiles, steps = math.ceil(m / TILE_M) * math.ceil(n / TILE_N), math.ceil(k / STEP)
        best = min((2, 4, 8, 16), key=lambda s: run(split_k(tiles, steps, s), steps, STORE))
        cells, shares = {}, {}
        for schedule in (whole, persistent, partial(split_k, parts=best), stream_k):
            blocks, busy = schedule(tiles, steps), tiles * steps / SMS
            stored = run(blocks, steps, STORE, overlap=schedule in (persistent, stream_k))
            cells[schedule] = f"{busy / run(blocks, steps):.0%} / {busy / stored:.0%}"
            assert stored >= run(blocks, steps)
            shares[schedule] = busy / stored
        plain, walking, split, streamed = shares.values()
        assert plain <= walking <= streamed
        # with few tiles, many SMs share a tile, and stream-K loses to split-K
        assert (streamed > split) == (tiles > 32)
        ours, others = cells[whole], list(cells.values())[1:]
        text = f"{ours:>12}{others[0]:>12}{others[1]:>12}, {best}{others[2]:>13}"
        print(f"{f'{m} × {n} × {k}':20}{tiles:6}{tiles / SMS:6.1f}{text}")
    worst = [(n, waves(n)) for n in range(1, 5 * SMS, SMS)]
    assert all(
        share == min(waves(n) for n in range(first, first + SMS)) for first, share in worst
    )
    lowest = ", ".join(f"{n} ({share:.0%})" for n, share in worst)
    print(f"whole tiles use the least SM time with {lowest} tiles")
    draw()


if __name__ == "__main__":
    main()
