"""Draws numbers, the grid to which they are rounded, and what one large number does to it.

Both grids have 3 bits, so a symmetric grid has seven points. In the lower half, one number is
six times as large as the others. With one scale, the grid must reach this number. The distance
between two points grows, and all other numbers become zero. Plain Python writes the SVG.
"""

NUMBERS = [-0.9, -0.55, -0.25, -0.1, 0.15, 0.35, 0.6, 0.8, 1.0]
OUTLIER, POINTS = 6.0, 3  # a symmetric grid of 3 bits has 3 points on each side of 0
INK, MUTED, COLOUR, LOSS = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
LEFT, WIDTH, LOW, HIGH = 40, 640, -1.3, 6.5  # pixels and range of an axis


def rounded(numbers: list[float], step: float) -> list[float]:
    """Each number at the nearest point of the grid."""
    return [max(-POINTS, min(POINTS, round(x / step))) * step for x in numbers]


def put_words(x: float, y: float, words: str, colour: str, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def place(x: float) -> float:
    return LEFT + (x - LOW) / (HIGH - LOW) * WIDTH


def rows(y: float, numbers: list[float], step: float, title: str) -> list[str]:
    """The numbers on a line, the grid on a line below, and what becomes of each number."""
    parts = [put_words(4, y, title, INK, 15)]
    above, below = y + 26, y + 78
    for line in (above, below):
        parts.append(
            f'<line x1="{LEFT}" y1="{line}" x2="{LEFT + WIDTH}" y2="{line}" stroke="{MUTED}" '
            'stroke-opacity="0.4"/>'
        )
    for n in range(-POINTS, POINTS + 1):
        if LOW <= n * step <= HIGH:
            x = place(n * step)
            parts.append(
                f'<line x1="{x:g}" y1="{below - 8}" x2="{x:g}" y2="{below + 8}" '
                f'stroke="{INK}" stroke-width="2"/>'
            )
            if n % POINTS == 0 or step > 1:  # labels of a fine grid would overlap
                parts.append(put_words(x - 5, below + 24, f"{n * step:g}", MUTED, 13))
    for number, back in zip(numbers, rounded(numbers, step), strict=True):
        colour = LOSS if back == 0 else COLOUR
        x, to = place(number), place(back)
        parts.append(f'<circle cx="{x:g}" cy="{above}" r="5" fill="{colour}"/>')
        parts.append(
            f'<line x1="{x:g}" y1="{above + 6}" x2="{to:g}" y2="{below - 9}" '
            f'stroke="{colour}" stroke-width="1.3"/>'
        )
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 268" '
        'font-family="system-ui, sans-serif">'
    ]
    parts += rows(18, NUMBERS, max(map(abs, NUMBERS)) / POINTS, "the step fits the numbers")
    large = [*NUMBERS, OUTLIER]
    parts += rows(150, large, OUTLIER / POINTS, "one number is six times as large")
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("rounding_grid.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    print("largest number   step   numbers that become 0   mean square error of the others")
    zeros = {}
    for largest in (max(map(abs, NUMBERS)), OUTLIER):
        back = rounded(NUMBERS, largest / POINTS)
        zeros[largest] = sum(x == 0 for x in back)
        error = sum((a - b) ** 2 for a, b in zip(NUMBERS, back, strict=True)) / len(back)
        print(f"{largest:14.1f} {largest / POINTS:6.2f} {zeros[largest]:23} {error:33.4f}")
        assert all(
            abs(a - b) <= largest / POINTS / 2 for a, b in zip(NUMBERS, back, strict=True)
        )
    assert rounded([-9.0, 9.0], 0.5) == [-1.5, 1.5]  # the ends of the grid
    assert zeros[OUTLIER] == len(NUMBERS) > 3 * zeros[1.0]


if __name__ == "__main__":
    main()
