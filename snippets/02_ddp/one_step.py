"""A picture of one step of data parallelism: what the ranks compute and what they exchange.

Each row is a rank, and time goes from left to right. A rank has its own shard of the batch and
runs forward and backward on its own copy of the model. The ranks communicate only once: an
all-reduce averages the gradients. Then each rank runs the same optimizer step.

Plain Python writes the SVG, so the program runs without any package.
"""

RANKS = 4
WIDTH, ROW, TOP = 720, 62, 46
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"

BOXES = [  # text, left edge, width, colour
    ("batch shard {r}", 62, 140, MUTED),
    ("forward", 226, 84, BLUE),
    ("backward", 320, 110, BLUE),
    ("optimizer", 596, 96, GREEN),
]


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def draw() -> str:
    height = TOP + RANKS * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(132, 24, "different data", MUTED),
        caption(328, 24, "same parameters", MUTED),
        caption(513, 24, "gradients", MUTED),
        caption(644, 24, "same update", MUTED),
    ]
    for rank in range(RANKS):
        y = TOP + rank * ROW
        parts.append(caption(2, y + 25, f"rank {rank}", INK, "start"))
        for words, left, width, colour in BOXES:
            parts.append(box(left, y, width, 40, words.format(r=rank), colour))
        for left, right in ((202, 226), (310, 320), (430, 454), (572, 596)):
            parts.append(
                f'<path d="M{left} {y + 20} H{right}" stroke="{MUTED}" stroke-width="1.5"/>'
            )
    span = (RANKS - 1) * ROW + 40
    parts.append(box(454, TOP, 118, span, "", ORANGE))
    middle = TOP + span / 2
    for line, words in enumerate(("all-reduce", "averages the", "gradients")):
        parts.append(caption(513, middle - 16 + 21 * line, words, ORANGE))
    parts.append(
        caption(WIDTH / 2, height - 12, "The ranks exchange gradients, not parameters.", MUTED)
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("one_step.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    print(f"one_step.svg shows {RANKS} ranks, which communicate in one all-reduce")


if __name__ == "__main__":
    main()
