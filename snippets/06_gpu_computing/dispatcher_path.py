"""A picture of one operator call on its path through the dispatcher, from left to right.

Each column is one lookup. The dispatcher runs the kernel of the highest key that is not off.
That kernel does its part, switches its own key off, and calls the operator again. The last
kernel computes the result. dispatcher.py registers an operator that shows the same path.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, HEIGHT = 760, 392
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"
LEFT, STEP, WIDE, TALL = 168, 204, 164, 28  # the first column, and the sizes of a key
KEYS, KERNELS, RETURN = 92, 232, 330  # upper edges of the rows

LOOKUPS = [  # key, highest first; what its kernel does; colour; which calls enter here
    ("AutocastCPU", ("casts x to bf16", "calls op again"), ORANGE, "a call under autocast"),
    (
        "AutogradCPU",
        ("records the backward", "calls op again"),
        BLUE,
        "a call without autocast",
    ),
    ("CPU", ("computes the numbers", "returns y"), GREEN, "a call in inference mode"),
]


def words_at(x: float, y: float, words: str, colour: str = INK, size: int = 13) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" '
        f'text-anchor="middle">{words}</text>'
    )


def panel(x: float, y: float, wide: float, tall: float, colour: str, solid: bool = True) -> str:
    style = 'stroke-width="1.8"' if solid else 'stroke-width="1"'
    opacity = 0.14 if solid else 0
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" rx="6" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}" {style}/>'
    )


def arrow(path: str, colour: str = INK) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def keys_of(column: int, left: float) -> tuple[list[str], str]:
    """Draw the keys of one lookup. Return the parts and the key that the dispatcher chooses."""
    parts, chosen = [], ""
    for row, (key, _, colour, _) in enumerate(LOOKUPS):
        y = KEYS + row * (TALL + 6)
        if row < column:
            parts.append(words_at(left + WIDE / 2, y + 19, f"{key} (off)", MUTED))
            continue
        first = not chosen
        chosen = chosen or key
        parts.append(panel(left, y, WIDE, TALL, colour if first else MUTED, solid=first))
        mark = "▶ " if first else ""
        parts.append(words_at(left + WIDE / 2, y + 19, mark + key, colour if first else INK))
    return parts, chosen


def draw() -> tuple[str, list[str]]:
    """Return the SVG, and the keys in the order in which the dispatcher chooses them."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>',
        panel(8, KEYS + 6, 108, 84, MUTED),
        words_at(62, KEYS + 38, "y = op(x)", INK, 14),
        words_at(62, KEYS + 60, "Python binding", MUTED, 12),
        words_at(62, KEYS + 76, "parses x", MUTED, 12),
        arrow(f"M116 {KEYS + 48} H{LEFT - 6}"),
    ]
    path = []
    for column, (_, kernel, colour, enters) in enumerate(LOOKUPS):
        left = LEFT + column * STEP
        middle = left + WIDE / 2
        parts.append(words_at(middle, 20, enters, MUTED, 12))
        parts.append(words_at(middle, 36, "starts here", MUTED, 12))
        parts.append(arrow(f"M{middle} 42 V58", MUTED))
        parts.append(words_at(middle, KEYS - 14, f"lookup {column + 1}", INK, 14))
        drawn, chosen = keys_of(column, left)
        parts += drawn
        path.append(chosen)
        bottom = KEYS + 3 * TALL + 12
        parts.append(arrow(f"M{middle} {bottom + 4} V{KERNELS - 4}"))
        parts.append(panel(left, KERNELS, WIDE, 66, colour))
        parts.append(words_at(middle, KERNELS + 19, "its kernel", colour, 12))
        parts.append(words_at(middle, KERNELS + 37, kernel[0]))
        parts.append(words_at(middle, KERNELS + 55, f"and {kernel[1]}"))
        if column + 1 < len(LOOKUPS):  # back to the dispatcher
            turn = left + WIDE + (STEP - WIDE) / 2
            parts.append(
                arrow(f"M{left + WIDE} {KERNELS + 29} H{turn} V{KEYS + 48} H{left + STEP - 6}")
            )
    end = LEFT + 2 * STEP + WIDE / 2
    parts.append(arrow(f"M{end} {KERNELS + 66} V{RETURN} H62 V{KEYS + 96}", MUTED))
    parts.append(
        words_at(WIDTH / 2, RETURN - 8, "y returns through the same kernels", MUTED, 12)
    )
    parts.append(
        words_at(
            WIDTH / 2,
            HEIGHT - 24,
            "If the key of the device has no kernel, the call ends with an error:",
            INK,
        )
    )
    parts.append(
        words_at(
            WIDTH / 2,
            HEIGHT - 6,
            "Could not run 'op' with arguments from the '…' backend",
            ORANGE,
        )
    )
    return "\n".join([*parts, "</svg>", ""]), path


def main() -> None:
    svg, path = draw()
    with open("dispatcher_path.svg", "w", encoding="utf-8") as file:
        file.write(svg)
    print("dispatcher_path.svg shows a call that runs the kernels of", " → ".join(path))


if __name__ == "__main__":
    main()
