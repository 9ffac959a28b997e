"""A picture of backward: gradients fill buckets, and full buckets are sent while backward runs.

The picture shows a model of six layers. Time goes from left to right. Backward computes the
gradients of the last layer first. Each gradient is written into a bucket, and a bucket holds
two gradients. A full bucket is all-reduced at once, while backward computes the next layers.
Only the last bucket is sent after backward has ended: this time is exposed.

Plain Python writes the SVG, so this runs where nothing is installed. The times come from a
small simulation of the network. A formula that shares no code with it must give the same end.
"""

LAYERS, PER_BUCKET = 6, 2
BACKWARD_MS, ALL_REDUCE_MS = 10, 15  # of one layer; of one bucket
SLOW_MS = 25  # of one bucket on a network that is slower than backward

LEFT, SCALE = 110, 5.4  # pixels: the start of the time axis, and of one millisecond
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def simulate(all_reduce_ms: int) -> tuple[list[int], list[tuple[int, int]]]:
    """When each bucket is full, and when its all-reduce starts and ends, in milliseconds.

    The clock moves on by one millisecond. The network sends one bucket at a time, in order.
    """
    full, sent, free = [], [], 0
    for now in range(BACKWARD_MS, 1000):
        done, rest = divmod(now, BACKWARD_MS)  # layers whose gradient is ready
        if rest == 0 and done <= LAYERS and done % PER_BUCKET == 0:
            full.append(now)
        if len(sent) < len(full) and free <= now:
            free = now + all_reduce_ms
            sent.append((now, free))
        if len(sent) == LAYERS // PER_BUCKET:
            return full, sent
    raise AssertionError("the network never became free")


def end_of_step(full: list[int], all_reduce_ms: int) -> int:
    """The same end by a formula: no bucket is sent before it is full, nor before the others."""
    after = range(len(full), 0, -1)  # how many buckets are still to be sent at each of them
    return max(at + count * all_reduce_ms for at, count in zip(full, after, strict=True))


def at(ms: float) -> float:
    return LEFT + SCALE * ms


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:.0f}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(start: float, end: float, y: int, height: int, words: str, colour: str) -> str:
    """A box from one time to another, in milliseconds."""
    frame = (
        f'<rect x="{at(start):.0f}" y="{y}" width="{SCALE * (end - start):.0f}" '
        f'height="{height}" rx="5" fill="{colour}" fill-opacity="0.1" stroke="{colour}" '
        'stroke-width="1.5"/>'
    )
    return frame + caption(at((start + end) / 2), y + height // 2 + 5, words, colour)


def arrow(x: float, top: int, bottom: int) -> str:
    return (
        f'<path d="M{x:.0f} {top} V{bottom} m-4 -6 l4 6 l4 -6" fill="none" '
        f'stroke="{MUTED}" stroke-width="1.5"/>'
    )


def draw(full: list[int], sent: list[tuple[int, int]]) -> str:
    ends = LAYERS * BACKWARD_MS
    turns = ends + len(sent) * ALL_REDUCE_MS  # the end if the network starts after backward
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(2, 40, "backward of", INK, "start"),
        caption(2, 128, "buckets", INK, "start"),
        caption(2, 218, "network", INK, "start"),
        caption(2, 272, "no overlap", MUTED, "start"),
    ]
    for number in range(LAYERS):
        start = number * BACKWARD_MS
        parts.append(box(start, start + BACKWARD_MS, 16, 38, f"L{LAYERS - number}", BLUE))
        bucket, place = divmod(number, PER_BUCKET)
        left = bucket * PER_BUCKET * BACKWARD_MS + place * BACKWARD_MS
        parts.append(arrow(at(start + BACKWARD_MS) - 12, 56, 101))
        words = f"{place + 1} of {PER_BUCKET}" if place + 1 < PER_BUCKET else "full"
        parts.append(box(left, left + BACKWARD_MS, 104, 38, words, GREEN))
    for number, (begin, end) in enumerate(sent):
        parts.append(arrow(at(begin) + 12, 144, 191))
        parts.append(box(begin, end, 194, 38, f"bucket {number}", ORANGE))
        waits = ends + number * ALL_REDUCE_MS
        parts.append(box(waits, waits + ALL_REDUCE_MS, 254, 28, f"bucket {number}", MUTED))
    parts += [
        f'<path d="M{at(ends):.0f} 8 V292" stroke="{MUTED}" stroke-dasharray="4 4"/>',
        caption(at(ends) + 8, 40, "backward has ended", MUTED, "start"),
        caption(at(sent[-1][1]) + 8, 218, f"exposed: {sent[-1][1] - ends} ms", ORANGE, "start"),
        caption(LEFT, 318, "0 ms", MUTED),
        caption(at(ends), 318, f"{ends} ms", MUTED),
        caption(at(sent[-1][1]), 318, f"{sent[-1][1]} ms", ORANGE),
        caption(at(turns), 318, f"{turns} ms", MUTED),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    full, sent = simulate(ALL_REDUCE_MS)
    end, backward = sent[-1][1], LAYERS * BACKWARD_MS
    turns = backward + len(sent) * ALL_REDUCE_MS
    assert end == end_of_step(full, ALL_REDUCE_MS)
    assert backward < end < turns  # overlap hides a part of the communication, but not all
    with open("bucket_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw(full, sent))
    print(f"backward takes {backward} ms, {len(sent)} all-reduces take {turns - backward} ms")
    print(f"the buckets are full after {', '.join(map(str, full))} ms")
    print(f"one after the other: {turns} ms")
    print(f"overlapped: {end} ms, of which {end - backward} ms are exposed")
    # a slow network is the limit itself: it starts when the first bucket is full, and never rests
    slow = simulate(SLOW_MS)[1][-1][1]
    assert slow == end_of_step(full, SLOW_MS) == full[0] + len(full) * SLOW_MS
    print(f"overlapped, with {SLOW_MS} ms for each all-reduce: {slow} ms")


if __name__ == "__main__":
    main()
