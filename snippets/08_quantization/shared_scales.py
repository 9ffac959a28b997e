"""Draws which values share a scale in six quantization schemes of the chapter.

Each panel shows 64 rows and 64 columns of a matrix, and the coloured values share one scale. A
thin line separates groups that are wide enough. The table lists how many values share a scale,
and how many bits the scale adds to each of them. Plain Python writes the SVG.
"""

SIZE, CELL = 64, 3  # rows and columns of a panel, pixels of one value
INK, MUTED, COLOUR = "#1f2937", "#52525b", "#0b6e99"
# scheme: rows, columns, rows and columns of a group (None: all of them), bits of scale and zero
SCHEMES: dict[str, tuple[str, str, int | None, int | None, int]] = {
    "int8 weights": ("outputs", "inputs", 1, None, 32),
    "int8 inputs, dynamic": ("tokens", "inputs", 1, None, 32),
    "int8 inputs, static": ("tokens", "inputs", None, None, 32),
    "int4 weights": ("outputs", "inputs", 1, 32, 16),
    "keys of a KV cache": ("tokens", "channels", 32, 1, 32),
    "values of a KV cache": ("tokens", "channels", 1, 32, 32),
}
ROW, COLUMN = 20, 40  # a value whose group is coloured


def sharing(rows: int | None, columns: int | None) -> list[tuple[int, int]]:
    """The places of all values that share the scale of the value at ROW, COLUMN."""
    height, width = rows or SIZE, columns or SIZE
    return [
        (row, column)
        for row in range(SIZE)
        for column in range(SIZE)
        if (row // height, column // width) == (ROW // height, COLUMN // width)
    ]


def put_words(x: float, y: float, words: str, colour: str, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def panel(x: float, y: float, name: str) -> list[str]:
    """One matrix: its groups as thin lines, and one group in colour."""
    row_words, column_words, rows, columns, _ = SCHEMES[name]
    places, side = sharing(rows, columns), SIZE * CELL
    top, left = min(places)
    bottom, right = max(places)
    parts = [put_words(x, y, name, INK, 15)]
    parts.append(
        f'<rect x="{x}" y="{y + 10}" width="{side}" height="{side}" fill="{MUTED}" '
        'fill-opacity="0.12"/>'
    )
    for step, horizontal in ((rows or SIZE, True), (columns or SIZE, False)):
        for place in range(0, SIZE + 1, step if step > 4 else SIZE):
            at = place * CELL
            x1, y1, x2, y2 = (0, at, side, at) if horizontal else (at, 0, at, side)
            parts.append(
                f'<line x1="{x + x1}" y1="{y + 10 + y1}" x2="{x + x2}" y2="{y + 10 + y2}" '
                f'stroke="{MUTED}" stroke-opacity="0.35"/>'
            )
    parts.append(
        f'<rect x="{x + left * CELL}" y="{y + 10 + top * CELL}" fill="{COLOUR}" '
        f'width="{(right - left + 1) * CELL}" height="{(bottom - top + 1) * CELL}"/>'
    )
    parts.append(put_words(x, y + side + 28, f"rows: {row_words}", MUTED, 13))
    parts.append(put_words(x + 102, y + side + 28, f"columns: {column_words}", MUTED, 13))
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 494" '
        'font-family="system-ui, sans-serif">'
    ]
    for n, name in enumerate(SCHEMES):
        parts += panel(8 + 240 * (n % 3), 20 + 248 * (n // 3), name)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("shared_scales.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    print(f"{SIZE} x {SIZE} values          share a scale   bits that this adds to a value")
    for name, (_, _, rows, columns, bits) in SCHEMES.items():
        count = len(sharing(rows, columns))
        print(f"{name:20} {count:18,} {bits / count:17.3f}")
    keys, values = (
        sharing(*SCHEMES[f"{what} of a KV cache"][2:4]) for what in ("keys", "values")
    )
    assert len({row for row, _ in keys}) == 32 and len({column for _, column in keys}) == 1
    assert len({row for row, _ in values}) == 1 and len(values) == 32


if __name__ == "__main__":
    main()
