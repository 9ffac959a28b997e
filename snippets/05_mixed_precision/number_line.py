"""A picture of the bf16 numbers around 1: what rounding does to a small update of a weight.

The numbers above 1 are 1/128 apart, and the numbers below 1 are 1/256 apart. A result between
two numbers goes to the nearer number. Half a step above 1 and half a step below 1 there is a
tie, and a tie goes to the number whose last bit is 0. So all results between the two ties
become 1. The program computes every place in the picture from the bits of bf16, with Python's
fractions.

Plain Python writes the SVG, so the program runs without any package.
"""

from fractions import Fraction

WIDTH, HEIGHT, SCALE = 740, 232, 24_000  # pixels for each unit of the number line
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"


def value(pattern: int) -> Fraction:
    """Return the positive normal bf16 number with these 16 bits, by the definition."""
    exponent, mantissa = pattern >> 7, pattern & 127
    return (1 + Fraction(mantissa, 128)) * Fraction(2) ** (exponent - 127)


def nearest(x: Fraction) -> int:
    """Return the bits of the bf16 number nearest to x. In a tie, return the even pattern."""
    around = range(0x3F70, 0x3F90)
    return min(around, key=lambda pattern: (abs(value(pattern) - x), pattern % 2))


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def place(x: Fraction) -> float:
    return round(380 + float(x - 1) * SCALE, 1)


def draw(lost: tuple[Fraction, Fraction], updates: list[Fraction]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        f'<path d="M20 70 H{WIDTH - 20}" stroke="{MUTED}" stroke-width="1.5"/>',
    ]
    left, right = (place(x) for x in lost)
    parts.append(
        f'<rect x="{left}" y="58" width="{round(right - left, 1)}" height="24" rx="4" '
        f'fill="{ORANGE}" fill-opacity="0.18" stroke="{ORANGE}" stroke-dasharray="5 3"/>'
    )
    parts.append(caption((left + right) / 2, 24, "every result in here becomes 1", ORANGE))
    words = {
        0x3F7D: "1 − 3/256", 0x3F7E: "1 − 2/256", 0x3F7F: "1 − 1/256", 0x3F80: "1",
        0x3F81: "1 + 1/128",
    }  # fmt: skip
    for pattern, label in words.items():
        x = place(value(pattern))
        parts.append(f'<path d="M{x} 60 V80" stroke="{BLUE}" stroke-width="3"/>')
        parts.append(caption(x, 102, label, BLUE))
    for row, update in enumerate(updates):
        y, end = 138 + 34 * row, place(1 - update)
        stored = value(nearest(1 - update))
        colour = ORANGE if stored == 1 else GREEN
        parts.append(
            f'<path d="M{place(Fraction(1))} {y} H{end}" stroke="{colour}" stroke-width="3"/>'
            f'<path d="M{end} {y - 6} V{y + 6}" stroke="{colour}" stroke-width="3"/>'
        )
        result = "1: the update is lost" if stored == 1 else "1 − 1/256"
        text = f"1 − {float(update):.4f} becomes {result}"
        parts.append(caption(396, y + 5, text, colour, "start"))
    parts.append(
        caption(WIDTH / 2, HEIGHT - 12, "Blue marks are the numbers that bf16 has.", MUTED)
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    one = 0x3F80
    below, above = value(one) - value(one - 1), value(one + 1) - value(one)
    lost = 1 - below / 2, 1 + above / 2  # both ends are ties, and both become 1
    assert [nearest(x) for x in lost] == [one, one]
    tiny = Fraction(1, 10**6)
    assert [nearest(lost[0] - tiny), nearest(lost[1] + tiny)] == [one - 1, one + 1]
    updates = [Fraction(10, 10_000), Fraction(30, 10_000)]
    with open("number_line.svg", "w", encoding="utf-8") as file:
        file.write(draw(lost, updates))
    print(f"bf16 has {value(one - 1)}, 1 and {value(one + 1)}")
    print(f"results from {lost[0]} to {lost[1]} become 1")


if __name__ == "__main__":
    main()
