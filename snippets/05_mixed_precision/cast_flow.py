"""A picture of the casts that autocast makes in one forward and one backward pass.

The upper half is the forward pass of half a transformer block, from left to right. The lower
half is the backward pass, from right to left. A box is an operator with the type in which it
runs. An arrow that changes the type is a cast. Biases are left out.

Plain Python writes the SVG, so the program runs without any package.
"""

import itertools

WIDTH, HEIGHT = 760, 452
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"fp32": "#0b6e99", "bf16": "#c2410c"}
OPERATORS = [  # text, type, centre
    ("x", "fp32", 40),
    ("norm", "fp32", 132),
    ("linear up", "bf16", 250),
    ("GELU", "bf16", 365),
    ("linear down", "bf16", 485),
    ("add", "fp32", 607),
    ("loss", "fp32", 710),
]
BOX, LINEAR = 68, 96  # widths
FORWARD, WEIGHTS, BACKWARD, GRADIENTS = 92, 168, 290, 366  # upper edges of the rows
TALL = 46


def words_at(x: float, y: float, words: str, colour: str = INK, size: int = 13) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" '
        f'text-anchor="middle">{words}</text>'
    )


def width(words: str) -> int:
    return LINEAR if words.startswith("linear") else BOX


def typed_box(x: float, y: float, wide: float, words: str, kind: str) -> str:
    colour = COLOURS[kind]
    frame = (
        f'<rect x="{x - wide / 2}" y="{y}" width="{wide}" height="{TALL}" rx="6" '
        f'fill="{colour}" fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + words_at(x, y + 19, words) + words_at(x, y + 37, kind, colour)


def arrow(path: str, changes: bool) -> str:
    colour, dash = (INK, "") if changes else (MUTED, ' stroke-dasharray="3 3"')
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash} '
        'marker-end="url(#tip)"/>'
    )


def draw() -> tuple[str, dict[str, int]]:
    """Return the SVG and the number of casts in each direction."""
    casts = {"forward": 0, "backward": 0}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>',
        words_at(
            WIDTH / 2, 20, "forward, inside the region: operators are cast by a list", MUTED, 14
        ),
        words_at(
            WIDTH / 2, 268, "backward, after the region: the casts are reversed", MUTED, 14
        ),
    ]
    for words, kind, x in OPERATORS:
        parts.append(typed_box(x, FORWARD, width(words), words, kind))
        if words != "x":
            parts.append(typed_box(x, BACKWARD, width(words), words, kind))
        if words.startswith("linear"):
            parts.append(typed_box(x, WEIGHTS, LINEAR, "its weight", "fp32"))
            parts.append(arrow(f"M{x} {WEIGHTS} V{FORWARD + TALL + 3}", True))
            parts.append(words_at(x + 52, WEIGHTS - 9, "cast, cached", INK, 12))
            parts.append(typed_box(x, GRADIENTS, LINEAR, "its .grad", "fp32"))
            parts.append(arrow(f"M{x} {BACKWARD + TALL} V{GRADIENTS - 3}", True))
            parts.append(words_at(x + 24, GRADIENTS - 11, "cast", INK, 12))
            casts = {direction: count + 1 for direction, count in casts.items()}
    for (left, before, a), (right, after, b) in itertools.pairwise(OPERATORS):
        changes = before != after
        start, end = a + width(left) / 2, b - width(right) / 2
        if right == "add":  # fp32 plus bf16 gives fp32: promotion, which is not a cast
            changes = False
        y = FORWARD + TALL / 2
        parts.append(arrow(f"M{start} {y} H{end - 3}", changes))
        if changes:
            parts.append(words_at((start + end) / 2, y - 7, "cast", INK, 11))
            casts["forward"] += 1
        if left != "x":
            y, changes = BACKWARD + TALL / 2, before != after
            parts.append(arrow(f"M{end} {y} H{start + 3}", changes))
            if changes:
                parts.append(words_at((start + end) / 2, y - 7, "cast", INK, 11))
                casts["backward"] += 1
    trunk = f"M{OPERATORS[0][2]} {FORWARD} V56 H{OPERATORS[5][2]} V{FORWARD - 3}"
    parts.append(arrow(trunk, False))
    parts.append(
        words_at(324, 50, "the residual stream stays fp32; add promotes bf16 to fp32", MUTED)
    )
    parts.append(
        words_at(
            WIDTH / 2,
            HEIGHT - 12,
            "DDP sends .grad as it is: fp32, 4 bytes per parameter",
            MUTED,
            14,
        )
    )
    return "\n".join([*parts, "</svg>", ""]), casts


def main() -> None:
    svg, casts = draw()
    with open("cast_flow.svg", "w", encoding="utf-8") as file:
        file.write(svg)
    for direction, count in casts.items():
        print(f"{direction}: {count} arrows of cast_flow.svg are casts")


if __name__ == "__main__":
    main()
