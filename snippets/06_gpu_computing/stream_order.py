"""A picture of two kernels on two CUDA streams, and of the same kernels on one stream.

Each row is a stream, and time goes from left to right. A first kernel writes x on a side
stream of torch, and our kernel reads x. In the upper half our kernel is launched on the default
stream. This stream does not wait for torch's side streams, so our kernel reads x too early. In
the lower half our kernel is launched on torch's current stream. This is the side stream, so the
two kernels run one after the other. The times are examples and are not measured.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, HEIGHT = 720, 236
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"
LANES = 190  # where time begins

# stream, kernel, start, end, colour
WRONG = [
    ("side stream", "writes x", 0, 200, BLUE),
    ("default stream", "reads x", 40, 160, ORANGE),
]
RIGHT = [("side stream", "writes x", 0, 200, BLUE), ("side stream", "reads x", 200, 320, GREEN)]


def anchored_words(
    x: float, y: float, words: str, colour: str = INK, size: int = 13, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def overlap(launches: list[tuple[str, str, int, int, str]]) -> int:
    """Return how long the reading kernel runs before the writing kernel has ended."""
    (*_, written, _), (_, _, start, end, _) = launches
    return max(0, min(written, end) - start)


def half(y: float, title: str, launches: list[tuple[str, str, int, int, str]]) -> list[str]:
    parts = [anchored_words(8, y, title, INK, 15, "start")]
    streams = list(dict.fromkeys(stream for stream, *_ in launches))
    for row, stream in enumerate(streams):
        top = y + 14 + row * 40
        parts.append(anchored_words(8, top + 21, stream, MUTED, 14, "start"))
        parts.append(f'<path d="M{LANES} {top + 34} H{WIDTH - 8}" stroke="{MUTED}"/>')
        for name, kernel, start, end, colour in launches:
            if name != stream:
                continue
            owner = "our kernel" if kernel.startswith("reads") else "a kernel"
            parts.append(
                f'<rect x="{LANES + start}" y="{top}" width="{end - start - 2}" height="31" '
                f'rx="5" fill="{colour}" fill-opacity="0.14" stroke="{colour}"/>'
            )
            middle = LANES + (start + end) / 2
            parts.append(anchored_words(middle, top + 21, f"{owner} {kernel}", colour, 12))
    return parts


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">'
    ]
    parts += half(22, "Wrong: our kernel is launched without a stream", WRONG)
    parts.append(anchored_words(LANES + 300, 97, "it reads x before x is complete", ORANGE, 13))
    parts += half(152, "Right: our kernel is launched on torch's current stream", RIGHT)
    parts.append(anchored_words(LANES + 425, 187, "it reads the new x", GREEN, 13))
    parts.append(anchored_words(WIDTH - 8, HEIGHT - 12, "time →", MUTED, 13, "end"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("stream_order.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    assert overlap(WRONG) > 0 == overlap(RIGHT)
    print("stream_order.svg shows a launch that starts too early, and a launch that waits")


if __name__ == "__main__":
    main()
