"""A picture of the sectors that one warp touches when it transposes, directly or with a tile.

The program also transposes a matrix of 64 x 64 in both ways and checks the result. It counts
the sectors of each access. In the picture, dark squares are the 32 floats that a warp needs.
Light squares are the other floats of the sectors that contain them.

Plain Python writes the SVG, so the program runs without any package.
"""

TILE, ROWS, LANES, SECTOR = 32, 8, 32, 8  # a sector has 8 floats
SIDE = 64  # rows and columns of the matrix
WIDTH, HEIGHT, CELL = 720, 560, 6
INK, MUTED, READ, WRITE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
Places = list[tuple[int, int]]  # row and column of each lane's float


# --8<-- [start:warps]
def direct(block_x: int, block_y: int, y: int, k: int) -> tuple[Places, Places]:
    """Return what the warp with threadIdx.y = `y` reads and writes in step `k`: no tile."""
    row = block_y * TILE + y + k
    columns = [block_x * TILE + lane for lane in range(LANES)]
    return [(row, column) for column in columns], [(column, row) for column in columns]


def load_tile(block_x: int, block_y: int, y: int, k: int) -> tuple[Places, Places]:
    """Return what a warp reads from the input and writes to the tile before the barrier."""
    row, first = block_y * TILE + y + k, block_x * TILE
    lanes = range(LANES)
    return [(row, first + lane) for lane in lanes], [(y + k, lane) for lane in lanes]


def store_tile(block_x: int, block_y: int, y: int, k: int) -> tuple[Places, Places]:
    """Return what a warp reads from the tile and writes to the output after the barrier."""
    row, first = block_x * TILE + y + k, block_y * TILE
    lanes = range(LANES)
    return [(lane, y + k) for lane in lanes], [(row, first + lane) for lane in lanes]


def sectors(places: Places) -> set[tuple[int, int]]:
    """Return the sectors that contain these floats of a row-major matrix."""
    return {(row, column // SECTOR) for row, column in places}


# --8<-- [end:warps]
def transpose_directly(matrix: list[list[int]]) -> list[list[int]]:
    out = [[-1] * SIDE for _ in range(SIDE)]
    for block_x in range(SIDE // TILE):
        for block_y in range(SIDE // TILE):
            for y in range(ROWS):
                for k in range(0, TILE, ROWS):
                    for (i, j), (a, b) in zip(*direct(block_x, block_y, y, k), strict=True):
                        out[a][b] = matrix[i][j]
    return out


def transpose_through_a_tile(matrix: list[list[int]]) -> list[list[int]]:
    out = [[-1] * SIDE for _ in range(SIDE)]
    steps = [(y, k) for y in range(ROWS) for k in range(0, TILE, ROWS)]
    for block_x in range(SIDE // TILE):
        for block_y in range(SIDE // TILE):
            tile = [[-1] * TILE for _ in range(TILE)]
            for y, k in steps:
                for (i, j), (a, b) in zip(*load_tile(block_x, block_y, y, k), strict=True):
                    tile[a][b] = matrix[i][j]
            for y, k in steps:  # after the barrier
                for (i, j), (a, b) in zip(*store_tile(block_x, block_y, y, k), strict=True):
                    out[a][b] = tile[i][j]
    return out


def text(x: float, y: float, words: str, colour: str = INK, size: int = 15, **more: str) -> str:
    options = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{options}>{words}</text>'


def square(x: float, y: float, wide: float, high: float, colour: str, opacity: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" fill="{colour}" '
        f'fill-opacity="{opacity}"/>'
    )


def matrix_at(x: float, y: float, accesses: list[tuple[Places, str, bool]]) -> list[str]:
    """Draw 32 x 32 floats, those that a warp needs, and their sectors in global memory."""
    side = TILE * CELL
    parts = [
        f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="{MUTED}" '
        f'fill-opacity="0.06" stroke="{MUTED}"/>'
    ]
    for places, colour, in_global in accesses:
        if in_global:
            for row, number in sorted(sectors(places)):
                at = x + number * SECTOR * CELL, y + row * CELL
                parts.append(square(*at, SECTOR * CELL - 1, CELL - 1, colour, 0.3))
        for row, column in places:
            at = x + column * CELL, y + row * CELL
            parts.append(square(*at, CELL - 1, CELL - 1, colour, 1))
    return parts


def draw() -> str:
    """The SVG: the direct transpose above, the transpose through shared memory below."""
    side, left, middle, right = TILE * CELL, 16, 264, 512
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        f'<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>',
    ]

    def arrow(start: float, end: float, y: float) -> None:
        parts.append(
            f'<path d="M{start} {y} H{end}" stroke="{INK}" stroke-width="2" '
            'marker-end="url(#tip)"/>'
        )

    def caption(x: float, y: float, words: str, below: str, colour: str) -> None:
        parts.append(text(x, y, words))
        parts.append(text(x, y + side + 30, below, colour, font_weight="bold"))

    reads, writes = direct(0, 0, 4, 0)
    parts.append(text(left, 20, "directly", font_weight="bold", size=16))
    caption(left, 44, "input, global memory", f"read: {len(sectors(reads))} sectors", READ)
    parts += matrix_at(left, 52, [(reads, READ, True)])
    arrow(left + side + 8, right - 10, 52 + side / 2)
    caption(right, 44, "output, global memory", f"write: {len(sectors(writes))} sectors", WRITE)
    parts += matrix_at(right, 52, [(writes, WRITE, True)])

    top = 332
    reads, tile_writes = load_tile(0, 0, 4, 0)
    tile_reads, writes = store_tile(0, 0, 4, 0)
    parts.append(text(left, top - 32, "through a tile", font_weight="bold", size=16))
    caption(left, top - 8, "input, global memory", f"read: {len(sectors(reads))} sectors", READ)
    parts += matrix_at(left, top, [(reads, READ, True)])
    arrow(left + side + 8, middle - 10, top + side / 2)
    caption(middle, top - 8, "tile, shared memory", "write a row, read a column", MUTED)
    parts += matrix_at(middle, top, [(tile_writes, READ, False), (tile_reads, WRITE, False)])
    arrow(middle + side + 8, right - 10, top + side / 2)
    caption(
        right, top - 8, "output, global memory", f"write: {len(sectors(writes))} sectors", WRITE
    )
    parts += matrix_at(right, top, [(writes, WRITE, True)])
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    matrix = [[row * SIDE + column for column in range(SIDE)] for row in range(SIDE)]
    expected = [list(column) for column in zip(*matrix, strict=True)]
    assert transpose_directly(matrix) == transpose_through_a_tile(matrix) == expected
    reads, writes = direct(1, 0, 4, 8)
    print(f"directly:       a warp reads {len(sectors(reads))} sectors", end="")
    print(f" and writes {len(sectors(writes))}")
    reads, writes = load_tile(1, 0, 4, 8)[0], store_tile(1, 0, 4, 8)[1]
    print(f"through a tile: a warp reads {len(sectors(reads))} sectors", end="")
    print(f" and writes {len(sectors(writes))}")
    with open("transpose_sectors.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
