"""A picture of the tiles that are computed at the same time, in two orders of the programs.

Each program of a matrix product computes one tile of C. It needs one strip of A, which is a row
of tiles, and one strip of B, which is a column of tiles. Programs that run at the same time
share the strips that they have in common. The picture and the table compare programs that are
numbered row by row with programs that are numbered in groups of rows.

Plain Python writes the SVG, so the program runs without any package.
"""

import math

INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
SIDE, TOGETHER, GROUP = 16, 36, 6  # of the picture: tiles per side, programs, rows of a group


# --8<-- [start:tile_of]
def tile_of(program: int, rows: int, columns: int, group: int) -> tuple[int, int]:
    """Row and column of a program's tile: down through a group of rows, then to the right."""
    first = program // (group * columns) * group  # the first row of the group
    height = min(rows - first, group)  # the last group may have fewer rows
    place = program % (group * columns)
    return first + place % height, place // height


def strips(rows: int, columns: int, together: int, group: int) -> tuple[int, int]:
    """How many strips of A and of B the first programs need."""
    tiles = [tile_of(program, rows, columns, group) for program in range(together)]
    return len({row for row, _ in tiles}), len({column for _, column in tiles})


# --8<-- [end:tile_of]


def check() -> None:
    """Compare the order with three nested loops, and the number of strips with g + R/g."""
    for rows, columns, group in ((6, 5, 1), (6, 5, 4), (7, 3, 2), (16, 16, 6)):
        order = [
            (row, column)
            for first in range(0, rows, group)
            for column in range(columns)
            for row in range(first, min(first + group, rows))
        ]
        assert order == [tile_of(p, rows, columns, group) for p in range(rows * columns)]
    for together in (36, 132, 216):
        sums = {}
        for group in range(1, 65):
            if group * 64 >= together:  # all programs are in the first group
                a, b = strips(64, 64, together, group)
                assert (a, b) == (min(group, together), math.ceil(together / group))
                sums[group] = a + b
        assert min(sums.values()) == math.ceil(2 * math.sqrt(together))


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def panel(left: float, heading: str, group: int) -> list[str]:
    """The grid of C; strips of A on its left and strips of B above it that are needed."""
    cell, top = 15, 84
    corner = left + 46
    running = {tile_of(program, SIDE, SIDE, group) for program in range(TOGETHER)}
    rows, columns = {row for row, _ in running}, {column for _, column in running}
    parts = [words(left, 18, heading, INK, "start")]
    for i in range(SIDE):
        at = cell * i
        for needed, x, y, w, h, colour in (
            (i in rows, corner - 40, top + at, 32, cell, BLUE),
            (i in columns, corner + at, top - 40, cell, 32, ORANGE),
        ):
            parts.append(
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{colour}" '
                f'fill-opacity="{0.55 if needed else 0}" stroke="{MUTED}" '
                f'stroke-width="0.8"/>'
            )
        for j in range(SIDE):
            fill = 0.55 if (i, j) in running else 0
            parts.append(
                f'<rect x="{corner + cell * j}" y="{top + at}" width="{cell}" height="{cell}" '
                f'fill="{GREEN}" fill-opacity="{fill}" stroke="{MUTED}" stroke-width="0.8"/>'
            )
    a, b = strips(SIDE, SIDE, TOGETHER, group)
    below = top + cell * SIDE + 26
    parts += [
        words(corner - 24, top - 12, "A", BLUE),
        words(corner - 12, top - 28, "B", ORANGE),
        words(
            left, below, f"{a} strips of A and {b} strips of B: {a + b} strips", INK, "start"
        ),
    ]
    return parts


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 362" '
        'font-family="system-ui, sans-serif" font-size="14">',
        *panel(24, f"{TOGETHER} programs, row by row", 1),
        *panel(392, f"{TOGETHER} programs, in groups of {GROUP} rows", GROUP),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    check()
    with open("tile_order.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    print("132 programs on tiles of 128 × 256, in a grid of 64 × 32 tiles")
    traffic = {}
    for group in (1, 4, 8, 16):
        a, b = strips(64, 32, 132, group)
        traffic[group] = a + 2 * b  # a strip of B is twice as wide
        print(
            f"groups of {group:2}: {a:2} strips of A + 2 × {b:2} strips of B = {traffic[group]}"
        )
    print(f"row by row reads {traffic[1] / traffic[8]:.2f} times as much as groups of 8")
    # a group of 4 rows has 128 tiles, so 132 programs start a second group
    assert traffic[16] < traffic[8] < traffic[1] < traffic[4]


if __name__ == "__main__":
    main()
