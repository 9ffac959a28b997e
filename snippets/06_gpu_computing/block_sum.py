"""A picture of the sum of a block: each step needs half as many threads as the step before.

Eight threads add eight values in shared memory. In each step, the second half of the remaining
values is added to the first half. A barrier makes every thread wait until all threads have
written their values. The program also runs the threads in 1,000 random orders. With barriers,
the sum is always right. Without barriers, in some orders a thread reads a value that another
thread has not written yet, and the sum is wrong.

Plain Python writes the SVG, so the program runs without any package.
"""

import random
from collections.abc import Iterator

VALUES = [1, 2, 3, 4, 5, 6, 7, 8]
WIDTH, STEP = 720, 86
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


# --8<-- [start:thread]
def thread(t: int, shared: list[int | None]) -> Iterator[None]:
    """One thread of the block; it yields wherever the kernel has a barrier."""
    shared[t] = VALUES[t]
    yield
    half = len(VALUES) // 2
    while half > 0:
        if t < half:
            shared[t] = (shared[t] or 0) + (shared[t + half] or 0)
        yield
        half //= 2


def run(order: random.Random, barriers: bool) -> tuple[int, list[list[int]], tuple[int, ...]]:
    """The sum in thread 0, the memory after each barrier, and the order of the threads."""
    shared: list[int | None] = [None] * len(VALUES)
    threads = {t: thread(t, shared) for t in range(len(VALUES))}
    waiting, trace, steps = list(threads), [], []
    while waiting:
        order.shuffle(waiting)
        # with barriers, every thread runs to the barrier before any thread goes on
        for t in list(waiting) if barriers else waiting[:1]:
            steps.append(t)
            if next(threads[t], "ended") is not None:
                waiting.remove(t)
        if barriers and waiting:
            trace.append(list(shared))
    return shared[0], trace, tuple(steps)


# --8<-- [end:thread]


def draw(trace: list[list[int]]) -> str:
    left, width = 150, 66
    height = STEP * len(trace) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for level, row in enumerate(trace):
        live = len(VALUES) >> level
        y = 6 + level * STEP
        parts.append(
            caption(2, y + 25, "filled" if level == 0 else f"step {level}", INK, "start")
        )
        for t, value in enumerate(row):
            colour = BLUE if t < live else MUTED
            words = str(value) if t < live else ""
            parts.append(box(left + t * (width + 4), y, width, 38, words, colour))
        parts.append(
            f'<path d="M{left - 60} {y + 48} H{WIDTH - 8}" stroke="{ORANGE}" '
            'stroke-width="2.5"/>'
        )
        parts.append(caption(2, y + 53, f"barrier {level + 1}", ORANGE, "start"))
        for t in range(live // 2 if level + 1 < len(trace) else 0):
            x, to = left + (t + live // 2) * (width + 4) + 33, left + t * (width + 4) + 33
            parts.append(
                f'<path d="M{x} {y + 38} L{to + 8} {y + STEP - 2}" stroke="{MUTED}" '
                f'stroke-width="1.2"/><path d="M{to} {y + 38} V{y + STEP - 2}" '
                f'stroke="{MUTED}" stroke-width="1.2"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    order = random.Random(0)
    wrong = {}
    for barriers in (True, False):
        runs = [run(order, barriers) for _ in range(1000)]
        wrong[barriers] = sum(total != sum(VALUES) for total, *_ in runs)
        assert len({steps for *_, steps in runs}) == 1000  # each run has a different order
    total, trace, _ = run(order, True)
    assert total == sum(VALUES) and wrong[True] == 0 and 0 < wrong[False] < 1000
    for level, row in enumerate(trace):  # each level: sums of every (live)-th value
        live = len(VALUES) >> level
        assert row[:live] == [sum(VALUES[t::live]) for t in range(live)]
    assert len(trace) == len(VALUES).bit_length()  # one barrier more than steps
    with open("block_sum.svg", "w", encoding="utf-8") as file:
        file.write(draw(trace))
    print(f"{len(VALUES)} threads, {len(trace)} barriers, 1,000 random orders of the threads")
    print(f"with barriers:    {wrong[True]} sums are wrong")
    print(f"without barriers: {wrong[False]} sums are wrong")


if __name__ == "__main__":
    main()
