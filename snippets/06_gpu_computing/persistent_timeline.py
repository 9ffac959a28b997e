"""A picture of one SM over time: one program for each tile, and one program for all its tiles.

A program that computes one tile starts with empty buffers, so the tensor cores wait for its
first loads. They also wait while it stores its tile. A persistent program loads for the next
tile while it stores the previous one, so the tensor cores wait for the first loads only once.
They still pause while a finished tile moves from registers to shared memory.

The model is simple: every load and every step of the product takes the same time. The
times are compared with formulas. Plain Python writes the SVG, so no package is needed.
"""

from itertools import pairwise

TILES, STEPS, BUFFERS = 3, 4, 3  # tiles of this SM, steps along K, pairs of tiles in memory
LATENCY, MOVE, STORE = 2.0, 0.6, 1.6  # of a load, and of a tile: in units of a step
INK, MUTED = "#1f2937", "#52525b"
COLOURS = ("#0b6e99", "#c2410c", "#15803d")
Bar = tuple[str, int, float, float]  # the lane, the tile, start and end


# --8<-- [start:simulate]
def simulate(persistent: bool, tiles: int = TILES, steps: int = STEPS) -> list[Bar]:
    """When the SM loads, multiplies, moves a tile to shared memory, and stores it."""
    bars: list[Bar] = []
    loads, products = [-1.0], [0.0]  # starts of loads, ends of steps of the product
    ready = 0.0  # when the tensor cores may start the next step
    stored = 0.0
    for step in range(tiles * steps):
        tile = step // steps
        load = loads[-1] + 1
        if step >= BUFFERS:
            load = max(load, products[step - BUFFERS + 1])  # the buffer has been read
        if not persistent and step % steps == 0:
            load = max(load, stored)  # a new program starts when the old one has ended
        loads.append(load)
        start = max(load + LATENCY, ready)
        ready = start + 1
        products.append(ready)
        bars += [("load", tile, load, load + 1), ("multiply", tile, start, ready)]
        if step % steps == steps - 1:
            bars += [("move", tile, ready, ready + MOVE)]
            ready += MOVE
            stored = ready + STORE
            bars += [("store", tile, ready, stored)]
    return bars


# --8<-- [end:simulate]


def end_of(bars: list[Bar]) -> float:
    return max(end for _, _, _, end in bars)


def check() -> None:
    for tiles in (1, 2, 5):
        for steps in (4, 9):
            alone = tiles * (LATENCY + steps + MOVE + STORE)
            walking = LATENCY + tiles * (steps + MOVE) + STORE
            assert abs(end_of(simulate(False, tiles, steps)) - alone) < 1e-9
            assert abs(end_of(simulate(True, tiles, steps)) - walking) < 1e-9
    for persistent in (False, True):
        bars = simulate(persistent)
        loads = [start for name, _, start, _ in bars if name == "load"]
        read = [end for name, _, _, end in bars if name == "multiply"]
        waits = [load - end for load, end in zip(loads[BUFFERS:], read, strict=False)]
        assert min(waits) == 0  # a load waits until its buffer has been read, and no longer
        for tile in range(TILES):  # after the last step, the tile is moved and then stored
            times = {name: (start, end) for name, which, start, end in bars if which == tile}
            assert times["multiply"][1] == times["move"][0]
            assert times["move"][1] == times["store"][0]
        for lane in ("load", "multiply", "store"):
            times = sorted((start, end) for name, _, start, end in bars if name == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(times))


def both_at_once(bars: list[Bar]) -> bool:
    """Whether a load for a later tile runs while a tile is stored."""
    loads = [(tile, start, end) for name, tile, start, end in bars if name == "load"]
    return any(
        name == "store" and later > tile and start < b and a < end
        for name, tile, start, end in bars
        for later, a, b in loads
    )


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def timeline(top: float, heading: str, bars: list[Bar]) -> list[str]:
    left, scale = 118, 23.5
    parts = [words(4, top, heading, INK, "start")]
    lanes = {"load": 0, "multiply": 1, "move": 1, "store": 2}
    for name, lane in (("TMA loads", 0), ("tensor cores", 1), ("TMA stores", 2)):
        y = top + 12 + 30 * lane
        parts.append(words(4, y + 17, name, MUTED, "start"))
        parts.append(
            f'<path d="M{left} {y + 26} H{left + 25.2 * scale:g}" stroke="{MUTED}" '
            'stroke-width="0.5"/>'
        )
    for name, tile, start, end in bars:
        y = top + 12 + 30 * lanes[name]
        fill = {"load": 0.2, "multiply": 0.6, "move": 0, "store": 0.2}[name]
        parts.append(
            f'<rect x="{left + scale * start:.1f}" y="{y}" width="{scale * (end - start):.1f}" '
            f'height="24" fill="{COLOURS[tile]}" fill-opacity="{fill}" '
            f'stroke="{COLOURS[tile]}"/>'
        )
        if name != "move":
            middle = left + scale * (start + end) / 2
            parts.append(words(middle, y + 17, str(tile)))
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 272" '
        'font-family="system-ui, sans-serif" font-size="14">',
        *timeline(18, "One program for each tile", simulate(False)),
        *timeline(140, "One persistent program, flattened loop", simulate(True)),
        f'<path d="M118 256 H712 m-7 -4 l7 4 l-7 4" fill="none" stroke="{MUTED}"/>',
        words(4, 260, "time", MUTED, "start"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    check()
    with open("persistent_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    for persistent, name in ((False, "one program per tile"), (True, "one persistent program")):
        bars = simulate(persistent)
        assert both_at_once(bars) == persistent
        busy = TILES * STEPS / end_of(bars)
        print(f"{name:23} {end_of(bars):5.1f} steps, tensor cores busy {busy:.0%} of the time")


if __name__ == "__main__":
    main()
