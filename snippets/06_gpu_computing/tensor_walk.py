"""A picture of the order in which an elementwise operator walks through its operands.

Each row of cells is the memory of one operand with 3 × 4 elements. The number in a cell is the
step of the loop that uses the element. The colours show the inner loops. On the left the two
dimensions of each operand merge into one, so a single loop visits neighbouring cells. On the
right y is transposed, so in every order of the loops either x or y has a step of several cells.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, HEIGHT = 760, 252
INK, MUTED = "#1f2937", "#52525b"
COLOURS = ["#0b6e99", "#15803d", "#c2410c"]
ROWS, COLUMNS, CELL = 3, 4, 27


def anchored_words(
    x: float, y: float, words: str, colour: str = INK, size: int = 13, anchor: str = "middle"
) -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def steps(strides: tuple[int, int]) -> list[int]:
    """For each place in memory, return the step at which the row-by-row loop reads it."""
    memory = [0] * (ROWS * COLUMNS)
    for row in range(ROWS):
        for column in range(COLUMNS):
            memory[row * strides[0] + column * strides[1]] = row * COLUMNS + column
    return memory


def operand(
    x: float, y: float, name: str, strides: tuple[int, int], loops: int
) -> tuple[list[str], int]:
    """Draw the memory of one operand; return the parts and its largest jump within a loop."""
    memory = steps(strides)
    parts = [anchored_words(x - 8, y + 18, name, INK, 14, "end")]
    for place, step in enumerate(memory):
        colour = COLOURS[step // COLUMNS if loops > 1 else 0]
        parts.append(
            f'<rect x="{x + place * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" '
            f'rx="4" fill="{colour}" fill-opacity="0.14" stroke="{colour}"/>'
        )
        parts.append(anchored_words(x + place * CELL + CELL / 2 - 1, y + 18, str(step), colour))
    places = [memory.index(step) for step in range(ROWS * COLUMNS)]
    length = ROWS * COLUMNS // loops
    jumps = [
        abs(places[step + 1] - places[step])
        for step in range(ROWS * COLUMNS - 1)
        if (step + 1) % length
    ]
    return parts, max(jumps)


def draw() -> tuple[str, list[list[int]]]:
    """Return the SVG, and for each half the largest jump of out, x and y."""
    straight, transposed = (COLUMNS, 1), (1, ROWS)
    # whichever dimension the inner loop has, x or y moves by more than one cell
    assert all(max(straight[inner], transposed[inner]) > 1 for inner in (0, 1))
    halves = [
        ("x and y are contiguous", "1 inner loop of 12 steps", 1, straight),
        ("y is transposed", "3 inner loops of 4 steps", ROWS, transposed),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">'
    ]
    jumps = []
    for half, (title, loops_title, loops, strides_of_y) in enumerate(halves):
        left = 48 + half * 378
        middle = left + ROWS * COLUMNS * CELL / 2
        parts.append(anchored_words(middle, 20, title, INK, 15))
        parts.append(anchored_words(middle, 40, loops_title, MUTED))
        row = []
        operands = [("out", straight), ("x", straight), ("y", strides_of_y)]
        for line, (name, strides) in enumerate(operands):
            drawn, jump = operand(left, 58 + line * 44, name, strides, loops)
            parts += drawn
            row.append(jump)
        jumps.append(row)
        words = (
            "each step moves to the next cell of every operand"
            if half == 0
            else f"a step moves 1 cell in out and x, but {row[2]} cells in y"
        )
        parts.append(anchored_words(middle, 204, words, INK, 13))
    parts.append(
        anchored_words(
            WIDTH / 2,
            HEIGHT - 10,
            "A row of cells is memory. The number in a cell is the step that uses the cell.",
            MUTED,
        )
    )
    return "\n".join([*parts, "</svg>", ""]), jumps


def main() -> None:
    svg, jumps = draw()
    with open("tensor_walk.svg", "w", encoding="utf-8") as file:
        file.write(svg)
    for title, row in zip(("contiguous", "y transposed"), jumps, strict=True):
        distances = ", ".join(map(str, row))
        print(f"{title}: within an inner loop, out, x and y move by {distances} elements")


if __name__ == "__main__":
    main()
