"""A picture of one training step in mixed precision: which numbers have 16 bits, which fp32.

Time goes from left to right. The weights, the loss and the optimizer step use fp32. The matrix
products of forward and backward use 16 bits. With fp16, the loss is also multiplied by a scale
S before backward, and the gradients are divided by S in fp32.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, HEIGHT = 760, 250
INK, MUTED, FP32, SHORT = "#1f2937", "#52525b", "#0b6e99", "#c2410c"

BOXES = [  # words, left edge, top, width, has 16 bits
    (("master", "weights"), 10, 40, 88, False),
    (("16-bit", "copy"), 134, 40, 80, True),
    (("forward", "products"), 250, 40, 92, True),
    (("loss",), 378, 40, 70, False),
    (("times S",), 484, 40, 80, False),
    (("backward", "products"), 600, 40, 100, True),
    (("divided by S",), 484, 150, 110, False),
    (("optimizer", "step"), 250, 150, 100, False),
]
ARROWS = [  # path, words, place of the words
    ("M98 68 H130", "cast", (116, 30)),
    ("M214 68 H246", "", (0, 0)),
    ("M342 68 H374", "", (0, 0)),
    ("M448 68 H480", "", (0, 0)),
    ("M564 68 H596", "", (0, 0)),
    ("M650 96 V178 H598", "gradients", (672, 196)),
    ("M484 178 H354", "fp32 gradients", (418, 168)),
    ("M250 178 H54 V100", "update", (150, 168)),
]


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 Z" fill="{MUTED}"/></marker></defs>',
    ]
    for path, words, (x, y) in ARROWS:
        parts.append(
            f'<path d="{path}" fill="none" stroke="{MUTED}" stroke-width="1.5" '
            'marker-end="url(#tip)"/>'
        )
        if words:
            parts.append(caption(x, y, words, MUTED))
    for words, x, y, width, short in BOXES:
        colour, dashes = (SHORT, ' stroke-dasharray="5 3"') if short else (FP32, "")
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="56" rx="6" fill="{colour}" '
            f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"{dashes}/>'
        )
        for line, word in enumerate(words):
            middle = y + 33 - 9 * (len(words) - 1) + 18 * line
            parts.append(caption(x + width / 2, middle, word, colour))
    parts.append(caption(10, 238, "solid, blue: fp32", FP32, "start"))
    parts.append(caption(150, 238, "dashed, orange: 16 bits", SHORT, "start"))
    parts.append(caption(750, 238, "Only fp16 needs the scale S.", MUTED, "end"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("where_fp32_stays.svg", "w", encoding="utf-8") as file:
        file.write(svg := draw())
    short = [" ".join(words) for words, *_, is_short in BOXES if is_short]
    assert svg.count("stroke-dasharray") == len(short)  # as the legend says
    print(f"with 16 bits: {', '.join(short)}")
    print(f"with fp32: {', '.join(' '.join(b[0]) for b in BOXES if not b[-1])}")


if __name__ == "__main__":
    main()
