"""A picture of the three products of a linear layer in NVFP4, with the casts of their factors.

Each row is a product. Its two factors come from the left, are cast to four bits, and meet in a
tensor core. Compare the weight w in forward and in backward: its blocks are the same, so its
values are the same. Plain Python writes nvfp4_products.svg.
"""

WIDTH, ROW, TOP, BOX = 760, 128, 48, 44
INK, MUTED = "#1f2937", "#52525b"
BLUE, ORANGE, VIOLET, GREEN = "#0b6e99", "#c2410c", "#7c3aed", "#15803d"

TRANSFORM = ("Hadamard", "along the tokens", VIOLET)
NEAREST = ("1 × 16 per scale", "round to nearest", BLUE)
SQUARE = ("16 × 16 per scale", "round to nearest", BLUE)
STOCHASTIC = ("1 × 16 per scale", "stochastic rounding", ORANGE)

PRODUCTS = [  # title, what the product sums over, its factors and their casts, result
    ("forward", "inputs", [("x", [NEAREST]), ("w", [SQUARE])], "y"),
    ("backward", "outputs", [("g", [STOCHASTIC]), ("w", [SQUARE])], "dx"),
    ("backward", "tokens", [("g", [TRANSFORM, STOCHASTIC]), ("x", [TRANSFORM, NEAREST])], "dw"),
]


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def put_box(x: float, y: float, width: float, lines: list[str], colour: str) -> str:
    """A rounded box of the height BOX with one or two lines of text."""
    first = y + BOX / 2 + 5 - 8 * (len(lines) - 1)
    frame = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BOX}" rx="6" fill="{colour}" '
        f'fill-opacity="0.12" stroke="{colour}" stroke-width="1.5"/>'
    )
    texts = (put_text(x + width / 2, first + 16 * i, words) for i, words in enumerate(lines))
    return frame + "".join(texts)


def put_line(x: float, y: float, right: float) -> str:
    return f'<path d="M{x:g} {y:g} H{right:g}" stroke="{MUTED}" stroke-width="1.5"/>'


def draw() -> str:
    height = TOP + len(PRODUCTS) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    for x, words in ((120, "in bf16"), (226, "transform"), (381, "cast to four bits"),
                     (566, "multiply"), (704, "result")):  # fmt: skip
        parts.append(put_text(x, 22, words, MUTED))
    for row, (title, over, factors, result) in enumerate(PRODUCTS):
        y = TOP + row * ROW
        parts.append(put_text(2, y + 46, title, INK, "start"))
        parts.append(put_text(2, y + 64, "sum over", MUTED, "start"))
        parts.append(put_text(2, y + 80, over, MUTED, "start"))
        for place, (name, casts) in enumerate(factors):
            top = y + place * (BOX + 10)
            parts.append(put_box(100, top, 40, [name], GREEN))
            end = 140
            for words, detail, colour in casts:
                left, width = (166, 120) if colour == VIOLET else (312, 138)
                parts.append(put_line(end, top + BOX / 2, left))
                parts.append(put_box(left, top, width, [words, detail], colour))
                end = left + width
            parts.append(put_line(end, top + BOX / 2, 506))
        middle = y + BOX + 5
        parts.append(
            f'<rect x="506" y="{y}" width="120" height="{2 * BOX + 10}" rx="6" fill="{MUTED}" '
            f'fill-opacity="0.1" stroke="{MUTED}" stroke-width="1.5"/>'
        )
        parts.append(put_text(566, middle, "tensor core,"))
        parts.append(put_text(566, middle + 17, "sums in fp32"))
        parts.append(put_line(626, middle, 674))
        parts.append(put_box(674, middle - BOX / 2, 60, [result], GREEN))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    casts = [dict(factors) for _, _, factors, _ in PRODUCTS]
    assert casts[0]["w"] == casts[1]["w"] == [SQUARE]  # forward and backward use the same w
    assert all((STOCHASTIC in c) == (name == "g") for d in casts for name, c in d.items())
    assert all((TRANSFORM in c) == (d is casts[2]) for d in casts for c in d.values())
    with open("nvfp4_products.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    for title, over, factors, result in PRODUCTS:
        words = [
            f"{name}: {', '.join(', '.join(c[:2]) for c in cast)}" for name, cast in factors
        ]
        print(f"{title}, {result}, sum over {over}:")
        print("\n".join(f"  {line}" for line in words))


if __name__ == "__main__":
    main()
