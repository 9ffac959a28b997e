"""Draws two meshes on two nodes, and shows which groups stay inside a node.

Eight ranks are numbered node by node. A mesh of 2 replicas (dp) and 4 tensor-parallel ranks
(tp) can have tp or dp as its last dimension. The groups of the last dimension consist of
neighbouring ranks. Plain Python draws both meshes, and counts the links of each group that
connect two nodes.
"""

from itertools import pairwise

NODES, PER_NODE = 2, 4
SIZES = {"dp": 2, "tp": 4}
PANEL, CELL, GAP, HEIGHT = 350, 62, 16, 316
INK, MUTED = "#1f2937", "#52525b"
COLOURS = ["#0b6e99", "#15803d"]  # of the two tensor-parallel groups
NETWORK = "#c2410c"


def groups(order: tuple[str, str], dimension: str) -> list[list[int]]:
    """The groups along one dimension. Ranks of a group are equal in the other coordinate."""
    outer, inner = order
    rows = [[i * SIZES[inner] + j for j in range(SIZES[inner])] for i in range(SIZES[outer])]
    return rows if dimension == inner else [list(column) for column in zip(*rows, strict=True)]


def crossing_links(group: list[int]) -> int:
    """The number of links between neighbours of this group that connect two nodes."""
    return sum(a // PER_NODE != b // PER_NODE for a, b in pairwise(group))


def svg_text(x: float, y: float, words: str, colour: str = INK, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def corner(left: float, rank: int) -> tuple[float, float]:
    """The upper left corner of the box of this rank."""
    node, local_rank = divmod(rank, PER_NODE)
    return left + 16 + local_rank * (CELL + GAP), 66 + node * 122


def link(left: float, a: int, b: int, colour: str, shift: float, drop: float) -> str:
    (xa, ya), (xb, yb) = corner(left, a), corner(left, b)
    half = CELL / 2
    if ya == yb:  # in one node, the link is below the boxes
        path = f"M{xa + half + shift:g} {ya + 44} v{drop} H{xb + half - shift:g} v{-drop}"
    else:
        path = f"M{xa + half + shift:g} {ya + 44} L{xb + half + shift:g} {yb}"
    width, dash = (3, "") if colour != MUTED else (1.5, ' stroke-dasharray="4 3"')
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'


def panel(left: float, order: tuple[str, str], title: str) -> list[str]:
    parts = [svg_text(left, 18, title, INK, 16)]
    for node in range(NODES):
        y = 42 + node * 122
        parts.append(
            f'<rect x="{left}" y="{y}" width="{PANEL - 14}" height="96" rx="6" fill="none" '
            f'stroke="{MUTED}"/>'
        )
        parts.append(svg_text(left + 8, y + 17, f"node {node}", MUTED, 13))
    tensor_groups = groups(order, "tp")
    for drop, colour, group in zip((10, 16), COLOURS, tensor_groups, strict=True):
        parts += [link(left, a, b, colour, 0, drop) for a, b in pairwise(group)]
    for group in groups(order, "dp"):
        parts += [link(left, a, b, MUTED, 9, 22) for a, b in pairwise(group)]
    for colour, group in zip(COLOURS, tensor_groups, strict=True):
        for rank in group:
            x, y = corner(left, rank)
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="44" rx="5" fill="{colour}"/>'
                f'<text x="{x + CELL / 2:g}" y="{y + 27:g}" fill="#ffffff" font-size="14" '
                f'text-anchor="middle">rank {rank}</text>'
            )
    for row, (name, words) in enumerate((("tp", "TP (coloured)"), ("dp", "DP (dashed)"))):
        cross = sum(crossing_links(group) for group in groups(order, name))
        where = "over the network" if cross else "inside a node, NVLink"
        parts.append(
            svg_text(left, 282 + 22 * row, f"{words}: {where}", NETWORK if cross else INK)
        )
    return parts


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * PANEL + 10} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        *panel(1, ("dp", "tp"), "tp last: the right order"),
        *panel(PANEL + 20, ("tp", "dp"), "dp last: the wrong order"),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    for order in (("dp", "tp"), ("tp", "dp")):
        print(f"mesh_dim_names={order}")
        for name in ("tp", "dp"):
            found = groups(order, name)
            ranks = [rank for group in found for rank in group]
            assert sorted(ranks) == list(range(NODES * PER_NODE))  # each rank once
            assert {len(group) for group in found} == {SIZES[name]}
            cross = sum(crossing_links(group) for group in found)
            print(f"  {name}: {found}, links between nodes: {cross}")
    # Each tp group and each dp group share exactly one rank, so the groups form a grid.
    for order in (("dp", "tp"), ("tp", "dp")):
        for rows in groups(order, "tp"):
            assert all(len({*rows} & {*column}) == 1 for column in groups(order, "dp"))
    with open("mesh_links.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
