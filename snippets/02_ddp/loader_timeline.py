"""A picture of a data loader: with too few workers, every training step waits for its batch.

A worker needs 40 ms to read a batch, and a training step needs 30 ms. With one worker, every
step waits 10 ms. With two workers, only the first step waits, because the workers read the next
batches while the rank trains.

The times come from a small simulation, which is compared with a formula. Plain Python writes
the SVG, so the program runs without any package.
"""

READ_MS, STEP_MS, BATCHES = 40, 30, 6
PREFETCH = 2  # batches per worker that may be ready or in progress: the default of DataLoader

LEFT, SCALE = 90, 2.05  # pixels: the start of the time axis, and one millisecond
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def simulate(workers: int, batches: int = BATCHES) -> tuple[list[int], list[int]]:
    """Return when each batch is ready and when each training step starts, in ms.

    Worker w reads the batches w, w + workers, w + 2 * workers, and so on.
    """
    free = [0] * workers  # when each worker has finished its last batch
    ready: list[int] = []
    starts: list[int] = []
    for batch in range(batches):
        worker, ahead = batch % workers, PREFETCH * workers
        # a worker pauses if too many batches are waiting to be used
        allowed = starts[batch - ahead] if batch >= ahead else 0
        free[worker] = max(free[worker], allowed) + READ_MS
        ready.append(free[worker])
        finished = starts[-1] + STEP_MS if starts else 0
        starts.append(max(finished, ready[-1]))
    return ready, starts


def waiting(starts: list[int]) -> list[int]:
    """Return how long each step waits for its batch, in ms."""
    finished = [0, *(start + STEP_MS for start in starts)]
    return [start - end for start, end in zip(starts, finished, strict=False)]


def at(ms: float) -> float:
    return round(LEFT + SCALE * ms)


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def bar(start: float, end: float, y: int, words: str, colour: str, dash: str = "") -> str:
    """A box from one time to another, in milliseconds. A dashed box is time spent waiting."""
    frame = (
        f'<rect x="{at(start)}" y="{y}" width="{at(end) - at(start)}" height="30" rx="5" '
        f'fill="{colour}" fill-opacity="0.1" stroke="{colour}" stroke-width="1.5" '
        f'stroke-dasharray="{dash}"/>'
    )
    return frame + caption(at((start + end) / 2), y + 20, words, colour)


def panel(workers: int, top: int) -> list[str]:
    """One row for each worker, and one row for the training loop of the rank."""
    ready, starts = simulate(workers)
    train = top + 10 + 38 * workers
    title = f"{workers} worker" + "s" * (workers > 1)
    parts = [caption(2, top, title, INK, "start")]
    for worker in range(workers):
        parts.append(caption(2, top + 30 + 38 * worker, f"worker {worker}", MUTED, "start"))
    parts.append(caption(2, train + 20, "training", MUTED, "start"))
    for batch, (end, start) in enumerate(zip(ready, starts, strict=True)):
        y = top + 10 + 38 * (batch % workers)
        parts.append(bar(end - READ_MS, end, y, f"read {batch}", BLUE))
        parts.append(bar(start, start + STEP_MS, train, f"step {batch}", GREEN))
        wait = waiting(starts)[batch]
        if wait:
            label = f"wait {wait}" if wait > 20 else ""
            parts.append(bar(start - wait, start, train, label, ORANGE, "4 3"))
    end = starts[-1] + STEP_MS
    parts.append(caption(at(end) + 6, train + 20, f"{end} ms", INK, "start"))
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 280" '
        'font-family="system-ui, sans-serif" font-size="14">',
        *panel(1, 20),
        *panel(2, 132),
        caption(2, 272, "dashed: the rank waits for its next batch", ORANGE, "start"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    print(f"a batch takes {READ_MS} ms to read, a step {STEP_MS} ms")
    for workers in (1, 2):
        first, *later = waiting(simulate(workers)[1])
        predicted = max(0, READ_MS / workers - STEP_MS)
        assert first == READ_MS and set(later) == {predicted}
        each = f"the first step waits {first} ms, every later step {predicted:.0f} ms"
        print(f"{workers} worker{'s' * (workers > 1)}: {each}")
    # many workers do not read more than PREFETCH batches ahead for each worker
    ready, starts = simulate(4, 100)
    begun = [end - READ_MS for end in ready]
    ahead = [sum(begin < start for begin in begun) - step for step, start in enumerate(starts)]
    assert max(ahead) == PREFETCH * 4 and set(waiting(starts)[1:]) == {0}
    print(f"4 workers: at most {max(ahead)} batches are read ahead")
    with open("loader_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
