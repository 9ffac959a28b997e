"""A picture of ranks that run out of batches: the other ranks wait, and `Join` prevents that.

Three ranks have 6, 5 and 4 batches. Every training step ends with an all-reduce, which
completes only if all ranks take part. Without `Join`, rank 0 and rank 1 wait for rank 2 in
their fifth step. With `Join`, a rank that has no batch left takes part with zeros.

The picture comes from a small simulation in which each rank is a generator. Plain Python
writes the SVG, so the program runs without any package.
"""

from collections.abc import Iterator

BATCHES = (6, 5, 4)  # of rank 0, 1 and 2

LEFT, COLUMN = 84, 92  # pixels: the first step, and the width of a step
INK, MUTED = "#1f2937", "#52525b"
BLUE, ORANGE = "#0b6e99", "#c2410c"


def rank(batches: int, join: bool) -> Iterator[int | None]:
    """Yield this rank's part of each all-reduce: the number of its batch, or None for zeros."""
    yield from range(batches)
    while join:
        yield None


def simulate(join: bool) -> list[list[int | None]]:
    """Return the parts of each all-reduce. The last row is incomplete if a rank is missing."""
    ranks = [rank(batches, join) for batches in BATCHES]
    steps: list[list[int | None]] = []
    while True:
        parts = [
            part for part in (next(each, "missing") for each in ranks) if part != "missing"
        ]
        if not any(part is not None for part in parts):
            return steps  # no rank has a batch
        steps.append(parts)
        if len(parts) < len(BATCHES):
            return steps  # this all-reduce never completes


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def card(x: float, y: float, width: int, height: int, words: str, colour: str, dash="") -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dash}"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def panel(join: bool, top: int) -> list[str]:
    steps = simulate(join)
    parts = [caption(2, top, "with Join" if join else "without Join", INK, "start")]
    for number in range(len(BATCHES)):
        parts.append(caption(2, top + 32 + 38 * number, f"rank {number}", MUTED, "start"))
    for step, row in enumerate(steps):
        x, complete = LEFT + COLUMN * step, len(row) == len(BATCHES)
        for number, batch in enumerate(row):
            words, colour = ("zeros", MUTED) if batch is None else (f"batch {batch}", BLUE)
            parts.append(card(x, top + 12 + 38 * number, 66, 30, words, colour))
        height = 38 * len(row) - 8
        words = "" if complete else "waits until the timeout"
        width, dash = (14, "") if complete else (176, "4 3")
        parts.append(card(x + 71, top + 12, width, height, words, ORANGE, dash))
    if join:
        y = top + 38 * len(BATCHES) + 32
        parts.append(caption(2, y, "batches", MUTED, "start"))
        for step, row in enumerate(steps):
            count = sum(batch is not None for batch in row)
            parts.append(caption(LEFT + COLUMN * step + 33, y, str(count), MUTED))
    else:
        x = LEFT + COLUMN * (len(steps) - 1)
        parts.append(caption(x, top + 108, "has no batch left", MUTED, "start"))
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 344" '
        'font-family="system-ui, sans-serif" font-size="14">',
        *panel(False, 18),
        *panel(True, 164),
        card(LEFT, 318, 14, 20, "", ORANGE),
        caption(LEFT + 24, 333, "one all-reduce of the gradients", ORANGE, "start"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    steps = simulate(join=False)
    missing = len(BATCHES) - len(steps[-1])
    assert len(steps) - 1 == min(BATCHES) and missing == 1
    print(f"without Join: {len(steps) - 1} steps complete, then {len(steps[-1])} ranks wait")
    steps = simulate(join=True)
    counts = [sum(batch is not None for batch in row) for row in steps]
    assert sum(counts) == sum(BATCHES) and all(len(row) == len(BATCHES) for row in steps)
    print(f"with Join: {len(steps)} steps complete")
    print(f"batches in each step: {', '.join(map(str, counts))}")
    print(f"zeros in each step: {', '.join(str(len(BATCHES) - n) for n in counts)}")
    with open("join_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
