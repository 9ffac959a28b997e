"""A picture of backward: gradients fill buckets, and full buckets are sent at once.

The model has six equal layers, and time goes from left to right. Backward takes 10 ms per layer
and computes the gradient of the last layer first. A bucket has room for two gradients. A full
bucket is all-reduced at once, in 15 ms, while backward computes the next layers. Only the last
bucket is sent after backward has ended. This time is exposed.

The times come from a small simulation. A formula that uses none of its results must give the
same end of the step. Plain Python writes the SVG, so the program runs without any package.
"""

LAYERS, PER_BUCKET = 6, 2
BACKWARD_MS, ALL_REDUCE_MS = 10, 15  # per layer, and per bucket
SLOW_MS = 25  # per bucket, on a network that is slower than backward

LEFT, SCALE = 82, 5.75  # pixels: the start of the time axis, and one millisecond
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def simulate(all_reduce_ms: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Return when each bucket is full, and when its all-reduce starts and ends, in ms.

    The clock advances by one millisecond. The network sends one bucket at a time, in order.
    """
    full, sent, free = [], [], 0
    for now in range(BACKWARD_MS, 1000):
        done, rest = divmod(now, BACKWARD_MS)  # `done` layers have a gradient
        if rest == 0 and done <= LAYERS and done % PER_BUCKET == 0:
            full.append(now)
        if len(sent) < len(full) and free <= now:
            free = now + all_reduce_ms
            sent.append((now, free))
        if len(sent) == LAYERS // PER_BUCKET:
            return full, sent
    raise AssertionError("the network never became free")


def end_of_step(all_reduce_ms: int) -> int:
    """Return the end of the step in ms: max over i of (r_i + c_i + c_(i+1) + …)."""
    count = LAYERS // PER_BUCKET
    full = [(i + 1) * PER_BUCKET * BACKWARD_MS for i in range(count)]  # r_i
    return max(full[i] + (count - i) * all_reduce_ms for i in range(count))


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
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 350" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(2, 40, "backward", INK, "start"),
        caption(2, 130, "buckets", INK, "start"),
        caption(2, 225, "network", INK, "start"),
        caption(2, 293, "network, if the buckets wait for the end of backward", MUTED, "start"),
    ]
    for number in range(LAYERS):
        start = number * BACKWARD_MS
        layer = LAYERS - number
        parts.append(box(start, start + BACKWARD_MS, 16, 38, f"layer {layer}", BLUE))
        parts.append(arrow(at(start + BACKWARD_MS / 2), 56, 106))
        parts.append(caption(at(start + BACKWARD_MS / 2), 130, f"grad {layer}", GREEN))
    for number, (filled, (begin, end)) in enumerate(zip(full, sent, strict=True)):
        parts.append(box(filled - PER_BUCKET * BACKWARD_MS, filled, 109, 38, "", GREEN))
        parts.append(arrow(at(begin) + 10, 148, 198))
        parts.append(caption(at(begin) + 16, 175, "full", MUTED, "start"))
        parts.append(box(begin, end, 201, 38, f"bucket {number}", ORANGE))
        waits = ends + number * ALL_REDUCE_MS
        parts.append(box(waits, waits + ALL_REDUCE_MS, 274, 28, f"bucket {number}", MUTED))
    parts += [
        f'<path d="M{at(ends):.0f} 8 V312" stroke="{MUTED}" stroke-dasharray="4 4"/>',
        caption(at(ends) + 8, 40, "backward has ended", MUTED, "start"),
        caption(at(sent[-1][1]) + 8, 225, f"exposed: {sent[-1][1] - ends} ms", ORANGE, "start"),
        caption(at(0), 338, "0 ms", MUTED),
        caption(at(ends), 338, f"{ends} ms", MUTED),
        caption(at(sent[-1][1]), 338, f"{sent[-1][1]} ms", ORANGE),
        caption(at(turns), 338, f"{turns} ms", MUTED),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    full, sent = simulate(ALL_REDUCE_MS)
    end, backward = sent[-1][1], LAYERS * BACKWARD_MS
    turns = backward + len(sent) * ALL_REDUCE_MS
    assert end == end_of_step(ALL_REDUCE_MS)
    assert end - backward == ALL_REDUCE_MS  # a fast network exposes the last bucket only
    with open("bucket_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw(full, sent))
    print(
        f"backward takes {backward} ms, and {len(sent)} all-reduces take {turns - backward} ms"
    )
    print(f"the buckets are full after {', '.join(map(str, full))} ms")
    print(f"without overlap, the step takes {turns} ms")
    print(f"with overlap, the step takes {end} ms: {end - backward} ms are exposed")
    # A slow network has no pause. It starts when the first bucket is full.
    slow = simulate(SLOW_MS)[1][-1][1]
    assert slow == end_of_step(SLOW_MS) == full[0] + len(full) * SLOW_MS
    print(f"with overlap and {SLOW_MS} ms per all-reduce, the step takes {slow} ms")


if __name__ == "__main__":
    main()
