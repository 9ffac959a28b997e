"""A picture of which values of a tensor share one scale, for six kinds of scaling.

Each panel shows the same 16 rows of 256 values of a larger tensor. One value is far larger than
the others; a dot marks it. The coloured values share their scale with it, so the cast can make
them less accurate. Thin lines separate the groups. Plain Python writes scale_groups.svg.
"""

from collections import Counter

ROWS, COLUMNS = 16, 256  # the part of the tensor that each panel shows
LOUD = 5, 100  # row and column of the large value
CELL, HIGH, LEFT, TOP, PANEL = 1.36, 5.5, 4, 8, 156
INK, MUTED, COLOUR, LOSS = "#1f2937", "#52525b", "#0b6e99", "#c2410c"

KINDS = [  # title, rows and columns of a group (None: all), bits of a scale, who uses it
    ("one scale per tensor", None, None, 32, "fp8, tensorwise"),
    ("one per 128 × 128", 128, 128, 32, "DeepSeek-V3, weights"),
    ("one per row", 1, None, 32, "fp8, rowwise"),
    ("one per 1 × 128", 1, 128, 32, "DeepSeek-V3, activations"),
    ("one per 1 × 32", 1, 32, 8, "MXFP8, MXFP6, MXFP4"),
    ("one per 1 × 16", 1, 16, 8, "NVFP4"),
]


def group(row: int, column: int, rows: int | None, columns: int | None) -> tuple[int, int]:
    """The number of the group along both dimensions for the value at (row, column)."""
    return row // rows if rows else 0, column // columns if columns else 0


def sharing(rows: int | None, columns: int | None) -> list[tuple[int, int]]:
    """The places of all shown values that share the scale of the large value."""
    wanted = group(*LOUD, rows, columns)
    places = ((r, c) for r in range(ROWS) for c in range(COLUMNS))
    return [place for place in places if group(*place, rows, columns) == wanted]


def put_words(x: float, y: float, words: str, colour: str, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def panel(x: float, y: float, kind: tuple) -> list[str]:
    title, rows, columns, _, user = kind
    values = sharing(rows, columns)
    top, left = min(values)
    bottom, right = max(values)
    assert len(values) == (bottom - top + 1) * (right - left + 1)  # a rectangle
    width, height = COLUMNS * CELL, ROWS * HIGH
    words = f"{len(values):,} of the {ROWS * COLUMNS:,} values share its scale"
    parts = [
        put_words(x, y + 14, title, INK),
        put_words(x, y + 32, user, MUTED, 12),
        f'<rect x="{x + left * CELL:g}" y="{y + 42 + top * HIGH:g}" '
        f'width="{(right - left + 1) * CELL:g}" height="{(bottom - top + 1) * HIGH:g}" '
        f'fill="{COLOUR}" fill-opacity="0.55"/>',
        f'<rect x="{x:g}" y="{y + 42:g}" width="{width:g}" height="{height:g}" fill="none" '
        f'stroke="{MUTED}"/>',
    ]
    lines = [
        f"M{x + c * CELL:g} {y + 42:g} v{height:g}"
        for c in range(1, COLUMNS)
        if group(0, c, rows, columns) != group(0, c - 1, rows, columns)
    ]
    lines += [
        f"M{x:g} {y + 42 + r * HIGH:g} h{width:g}"
        for r in range(1, ROWS)
        if group(r, 0, rows, columns) != group(r - 1, 0, rows, columns)
    ]
    if lines:
        parts.append(f'<path d="{" ".join(lines)}" stroke="{MUTED}" stroke-width="0.5"/>')
    parts.append(
        f'<circle cx="{x + (LOUD[1] + 0.5) * CELL:g}" cy="{y + 42 + (LOUD[0] + 0.5) * HIGH:g}" '
        f'r="4" fill="{LOSS}"/>'
    )
    parts.append(put_words(x, y + 60 + height, words, MUTED, 12))
    return parts


def main() -> None:
    width = 2 * (COLUMNS * CELL + 2 * LEFT) + 24
    height = TOP + 3 * (PANEL + 14)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        'font-family="system-ui, sans-serif">'
    ]
    counts = []
    for number, kind in enumerate(KINDS):
        x = LEFT + number % 2 * (COLUMNS * CELL + 2 * LEFT + 20)
        parts += panel(x, TOP + number // 2 * (PANEL + 14), kind)
        counts.append(len(sharing(kind[1], kind[2])))
        bits = kind[3] / (kind[1] * kind[2]) if kind[1] and kind[2] else None
        cost = "" if bits is None else f", {bits:.3g} bits of scale per value"
        print(f"{kind[0]:22}{counts[-1]:6,} of {ROWS * COLUMNS:,} shown values{cost}")
    assert counts == [
        min(ROWS, rows or ROWS) * min(COLUMNS, columns or COLUMNS)
        for _, rows, columns, *_ in KINDS
    ]
    places = [(r, c) for r in range(ROWS) for c in range(COLUMNS)]
    for (_, rows, columns, *_), count in zip(KINDS, counts, strict=True):
        sizes = Counter(group(*place, rows, columns) for place in places)
        # every group has the same number of values as the coloured group
        assert {*sizes.values()} == {count}
    assert counts == sorted(counts, reverse=True)  # from the largest group to the smallest
    with open("scale_groups.svg", "w", encoding="utf-8") as file:
        file.write("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
