"""A picture of the libraries behind PyTorch on an NVIDIA GPU: which call reaches which library.

Each row is a call. From left to right: the call, the part of PyTorch that receives it, the
library that computes it, and the way in which the library's kernel is chosen. CUTLASS, with its
C++ templates and CuTe DSL, is below: authors of kernels use it, and a model does not call it.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, TOP, STEP, TALL, GAP = 760, 44, 42, 34, 18
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"
COLUMNS = {"your call": (4, 172), "PyTorch": (206, 92), "library": (332, 190)}
CHOICE = 534  # left edge of the text in the fourth column

# --8<-- [start:rows]
ROWS = [  # the call, the part of PyTorch, the library, how the kernel is chosen
    ("a @ b", "ATen", "cuBLAS", "by a heuristic of cuBLAS"),
    ("F.linear(x, w, bias)", "ATen", "cuBLASLt", "torch takes the first suggestion"),
    ("F.conv2d", "ATen", "cuDNN", "by a heuristic, or by trials"),
    ("F.scaled_dot_…_attention", "ATen", "cuDNN, FlashAttention, …", "by a list of priorities"),
    ("torch.fft.fft", "ATen", "cuFFT", "by a plan for each shape"),
    ("csr @ x", "ATen", "cuSPARSE", "by layout and dtype"),
    ("x + y, softmax, rand", "ATen", "kernels of PyTorch", "by rules in PyTorch"),
    ("torch.compile(f)", "Inductor", "generated Triton", "when f is compiled"),
    ("dist.all_reduce", "c10d", "NCCL", "by size and topology"),
]
# --8<-- [end:rows]
COLOURS = {"ATen": BLUE, "Inductor": VIOLET, "c10d": ORANGE}


def phrase_at(x: float, y: float, words: str, colour: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def boxed_at(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    assert 6.8 * len(words) < width, words  # the words fit
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + phrase_at(x + width / 2, y + height / 2 + 5, words, colour)


def arrow_between(x1: float, x2: float, y: float, colour: str = MUTED) -> str:
    return (
        f'<path d="M{x1} {y} H{x2}" stroke="{colour}" stroke-width="1.4" fill="none" '
        'marker-end="url(#point)"/>'
    )


def upper_edge(row: int) -> int:
    """Return the y of a row. A gap before another part of PyTorch has room for an arrow."""
    return TOP + STEP * row + GAP * len({part for _, part, *_ in ROWS[: row + 1]} - {"ATen"})


def draw() -> str:
    bottom = upper_edge(len(ROWS) - 1) + TALL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 66}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<defs><marker id="point" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{MUTED}"/></marker></defs>',
    ]
    for name, (x, width) in COLUMNS.items():
        parts.append(phrase_at(x + width / 2, 26, name, MUTED))
    parts.append(phrase_at(CHOICE, 26, "the kernel is chosen", MUTED, "start"))
    (call, wide), (door, door_wide), (library, library_wide) = COLUMNS.values()
    for part, colour in COLOURS.items():  # one box over all rows of this part
        rows = [i for i, row in enumerate(ROWS) if row[1] == part]
        y = upper_edge(rows[0])
        parts.append(
            boxed_at(door, y, door_wide, upper_edge(rows[-1]) + TALL - y, part, colour)
        )
    for i, (what, _, where, how) in enumerate(ROWS):
        y = upper_edge(i)
        parts.append(boxed_at(call, y, wide, TALL, what, INK))
        parts.append(arrow_between(call + wide + 2, door - 4, y + TALL / 2))
        parts.append(arrow_between(door + door_wide + 2, library - 4, y + TALL / 2))
        own = "PyTorch" in where or "Triton" in where
        parts.append(boxed_at(library, y, library_wide, TALL, where, VIOLET if own else GREEN))
        parts.append(phrase_at(CHOICE, y + 22, how, INK, "start"))
    inductor = next(i for i, row in enumerate(ROWS) if row[1] == "Inductor")
    y, x = upper_edge(inductor), door + door_wide / 2
    parts.append(
        f'<path d="M{x} {y} V{y - GAP - STEP + TALL + 4}" stroke="{MUTED}" stroke-width="1.4" '
        'marker-end="url(#point)"/>'
    )
    by_default = "matrix products, convolutions, attention"
    parts.append(phrase_at(x + 12, y - 6, by_default, MUTED, "start"))
    parts.append(
        boxed_at(library, bottom + 26, library_wide, TALL, "CUTLASS, CuTe DSL", ORANGE)
    )
    parts.append(
        phrase_at(CHOICE, bottom + 40, "building blocks for authors of", MUTED, "start")
    )
    parts.append(
        phrase_at(CHOICE, bottom + 57, "kernels, not called by a model", MUTED, "start")
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("library_map.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    for part in COLOURS:
        calls = [row for row in ROWS if row[1] == part]
        libraries = dict.fromkeys(row[2] for row in calls)
        print(f"{part}: {len(calls)} of the calls → {'; '.join(libraries)}")
    assert {row[1] for row in ROWS} == set(COLOURS)
    first = [ROWS.index(next(row for row in ROWS if row[1] == part)) for part in COLOURS]
    assert first == sorted(first)  # each part of PyTorch has neighbouring rows, and one box


if __name__ == "__main__":
    main()
