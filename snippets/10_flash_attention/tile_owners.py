"""This picture shows which tiles of the score matrix one program of each kernel visits.

Rows are tiles of queries, and columns are tiles of keys. A kernel runs as many programs at the
same time. A program of the forward kernel or of the kernel for dQ owns one row of tiles. A
program of the kernel for dK and dV owns one column. Under a causal mask, a program skips the
tiles in which no query sees a key. Tiles in which every query sees every key need no mask. A
second loop with a mask visits the remaining tiles. This script computes the bounds of the loops
and compares them with a check of every single score. Plain Python writes tile_owners.svg.
"""

from itertools import product

INK, MUTED = "#1f2937", "#52525b"
BLUE, ORANGE = "#0b6e99", "#c2410c"
CELL, TOP = 24, 62


def row_of_tiles(first: int, bm: int, bn: int, queries: int, keys: int) -> dict[int, str]:
    """Return start -> loop for the tiles of keys that one row visits, in forward and for dQ."""
    shift = keys - queries
    end = min(keys, max(0, first + bm + shift))
    whole = min(keys, max(0, first + shift + 1)) // bn * bn
    visited = dict.fromkeys(range(0, whole, bn), "whole")
    return visited | dict.fromkeys(range(whole, end, bn), "cut")


def column_of_tiles(first: int, bm: int, bn: int, queries: int, keys: int) -> dict[int, str]:
    """Return start -> loop for the tiles of queries that one column visits, for dK and dV."""
    shift = keys - queries
    begin = max(0, first - shift) // bm * bm
    last = max(begin, queries // bm * bm)
    whole = min(last, -(-max(0, first + bn - 1 - shift) // bm) * bm)
    cut = [*range(begin, whole, bm), *([last] if last < queries else [])]
    return dict.fromkeys(range(whole, last, bm), "whole") | dict.fromkeys(cut, "cut")


def seen(i: int, j: int, queries: int, keys: int) -> bool:
    """Whether query i sees key j: the last query sees the last key."""
    return i < queries and j < keys and j <= i + keys - queries


def kind(i0: int, j0: int, bm: int, bn: int, queries: int, keys: int) -> str:
    """Look at every score of a tile: all, some or none are seen."""
    tile = product(range(i0, i0 + bm), range(j0, j0 + bn))
    scores = [seen(i, j, queries, keys) for i, j in tile]
    return "whole" if all(scores) else "cut" if any(scores) else "none"


def check(bm: int, bn: int, queries: int, keys: int) -> int:
    """Compare both functions with every score, and return the number of tiles they visit."""
    by_row, by_column = {}, {}
    for i0 in range(0, queries, bm):
        visited = row_of_tiles(i0, bm, bn, queries, keys)
        by_row |= {(i0, j0): loop for j0, loop in visited.items()}
    for j0 in range(0, keys, bn):
        visited = column_of_tiles(j0, bm, bn, queries, keys)
        by_column |= {(i0, j0): loop for i0, loop in visited.items()}
    for i0, j0 in product(range(0, queries, bm), range(0, keys, bn)):
        truth = kind(i0, j0, bm, bn, queries, keys)
        in_row, in_column = (x.get((i0, j0), "none") for x in (by_row, by_column))
        if truth == "whole" or i0 + bm <= queries:  # a last row of tiles always has a mask
            assert in_column == truth, (i0, j0, in_column, truth)
        # queries behind the end are never stored, so a row of tiles may compute them
        rows = min(bm, queries - i0)
        assert in_row in (truth, kind(i0, j0, rows, bn, queries, keys)), (i0, j0, in_row)
        assert "none" not in {in_row, in_column} or truth == "none"
    return len(by_row)


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def grid(x: float, owned: dict[tuple[int, int], str], tiles: int) -> list[str]:
    """One matrix of tiles: W marks a tile without a mask, M marks a tile with a mask."""
    parts = []
    for i, j in product(range(tiles), repeat=2):
        loop = owned.get((i, j))
        colour = {"whole": BLUE, "cut": ORANGE}.get(loop, MUTED)
        opacity = 0.3 if loop else 0.1 if j <= i else 0
        at = f'x="{x + CELL * j}" y="{TOP + CELL * i}" width="{CELL - 2}" height="{CELL - 2}"'
        parts.append(
            f'<rect {at} fill="{colour}" fill-opacity="{opacity}" stroke="{MUTED}" '
            'stroke-width="0.75"/>'
        )
        if loop:
            middle = x + CELL * j + CELL / 2 - 1, TOP + CELL * i + 16
            parts.append(caption(*middle, "W" if loop == "whole" else "M", INK))
    return parts


def draw(tiles: int = 8, row: int = 5, column: int = 2) -> str:
    rows = row_of_tiles(row, 1, 1, tiles, tiles)
    in_row = {(row, j): loop for j, loop in rows.items()}
    columns = column_of_tiles(column, 1, 1, tiles, tiles)
    in_column = {(i, column): loop for i, loop in columns.items()}
    # a tile on the diagonal is cut as soon as it has more than one query
    in_row[row, row] = in_column[column, column] = "cut"
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for x, title, sums, owned in (
        (30, "forward", "sums O over keys →", in_row),
        (274, "dK and dV", "sums over queries ↓", in_column),
        (518, "dQ", "sums over keys →", in_row),
    ):
        middle = x + CELL * tiles / 2
        parts.append(caption(middle, 20, title, INK))
        parts.append(caption(middle, 42, sums, MUTED))
        parts += grid(x, owned, tiles)
    parts += [
        f'<text x="18" y="{TOP + 96}" fill="{MUTED}" text-anchor="middle" '
        f'transform="rotate(-90 18 {TOP + 96})">tiles of queries</text>',
        caption(126, TOP + 214, "tiles of keys", MUTED),
        caption(360, TOP + 240, "W: a tile that needs no mask", BLUE, "end"),
        caption(380, TOP + 240, "M: a tile with a mask", ORANGE, "start"),
        caption(
            360,
            TOP + 262,
            "grey: tiles of other programs; empty: tiles that no program visits",
            MUTED,
        ),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    cases = [(4, 4, 16, 16), (4, 8, 21, 21), (8, 4, 13, 22), (4, 4, 20, 7), (3, 5, 17, 19)]
    visited = [check(*case) for case in cases]
    print(
        f"{len(cases)} cases: the loops visit every tile that a query sees, with a mask where"
    )
    print("some of its scores are hidden and without one where all are seen")
    tiles = 16384 // 128
    both = row_of_tiles(16384 - 128, 128, 128, 16384, 16384)
    masks = sum(loop == "cut" for loop in both.values())
    assert (len(both), masks) == (tiles, 1) and visited[0] == 10
    print(f"16,384 tokens, tiles of 128 × 128: the last row has {tiles} tiles, and {masks} of")
    print("them needs a mask")
    with open("tile_owners.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
