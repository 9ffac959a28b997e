"""A picture of the groups of a 2D mesh and of a 3D mesh, and of the links that they use.

Every node has two GPUs. The left mesh has the dimensions dp and tp, and the right mesh has dp,
pp and tp. Ranks of one tensor-parallel group are in the same node. Ranks of a pipeline and of a
data-parallel group are in different nodes. The numbers are what one GPU of Llama 3 405B sends
in a step for each dimension, from the formulas in links.py. Draws mesh_groups.svg.
"""

import itertools

import links

WIDTH, HEIGHT, CELL = 760, 372, 58
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"tp": "#c2410c", "pp": "#15803d", "dp": "#0b6e99"}
Coordinates = dict[str, int]


def ranks(sizes: dict[str, int]) -> list[Coordinates]:
    """The coordinates of each rank. The last dimension changes fastest."""
    return [
        dict(zip(sizes, place, strict=True))
        for place in itertools.product(*map(range, sizes.values()))
    ]


def neighbours(mesh: list[Coordinates], dimension: str) -> list[tuple[int, int]]:
    """All pairs of ranks that follow each other in a group of this dimension."""
    pairs = []
    for (a, one), (b, other) in itertools.permutations(enumerate(mesh), 2):
        if {**one, dimension: one[dimension] + 1} == other:
            pairs.append((a, b))
    return pairs


def place(left: float, coordinates: Coordinates) -> tuple[float, float]:
    """The centre of a rank: dp goes down the page, pp to the right, tp inside the node."""
    x = left + 50 + coordinates.get("pp", 0) * 200 + coordinates["tp"] * 76
    return x, 86 + coordinates["dp"] * 112


def write(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="14" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def move(x: float, y: float, *parts: str) -> str:
    """A box and its name, which move together."""
    return f'<g transform="translate({x:g} {y:g})">{"".join(parts)}</g>'


def panel(left: float, title: str, sizes: dict[str, int]) -> list[str]:
    mesh = ranks(sizes)
    parts = [write(left, 20, title)]
    nodes = sorted({place(left, {**rank, "tp": 0}) for rank in mesh}, key=lambda p: p[::-1])
    for number, (x, y) in enumerate(nodes):
        box = (
            '<rect x="-44" y="-44" width="164" height="76" rx="6" fill="none" '
            f'stroke="{MUTED}"/>'
        )
        parts.append(move(x, y, box, write(38, -27, f"node {number}", MUTED, "middle")))
    for name, dash in (("dp", ' stroke-dasharray="5 4"'), ("pp", ""), ("tp", "")):
        for a, b in neighbours(mesh, name) if name in sizes else ():
            (x0, y0), (x1, y1) = place(left, mesh[a]), place(left, mesh[b])
            bend = 34 if name == "pp" and mesh[a]["tp"] else 24
            path = f"M{x0:g} {y0:g} L{x1:g} {y1:g}"
            if name == "pp":  # below the boxes, so that it does not cross a rank
                path = f"M{x0:g} {y0 + 14:g} v{bend} H{x1:g} v{-bend}"
            parts.append(
                f'<path d="{path}" fill="none" stroke="{COLOURS[name]}" '
                f'stroke-width="{5 if name == "tp" else 2.5}"{dash}/>'
            )
    for number, rank in enumerate(mesh):
        x, y = place(left, rank)
        box = (
            f'<rect x="{-CELL / 2:g}" y="-16" width="{CELL}" height="32" rx="5" '
            f'fill="#e4e4e7" stroke="{INK}"/>'
        )
        parts.append(move(x, y, box, write(0, 5, f"rank {number}", "#111827", "middle")))
    return parts


def draw(sent: dict[str, float]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        *panel(6, "2D mesh: dp 2 × tp 2", {"dp": 2, "tp": 2}),
        *panel(310, "3D mesh: dp 2 × pp 2 × tp 2", {"dp": 2, "pp": 2, "tp": 2}),
    ]
    words = {
        "tp": "TP, inside a node, over NVLink",
        "pp": "PP, between nodes, over the network",
        "dp": "DP, between nodes, over the network",
    }
    for row, (name, text) in enumerate(words.items()):
        y = 300 + 24 * row
        dash = ' stroke-dasharray="5 4"' if name == "dp" else ""
        parts.append(
            f'<path d="M8 {y - 5} h40" stroke="{COLOURS[name]}" '
            f'stroke-width="{5 if name == "tp" else 2.5}"{dash}/>'
        )
        parts.append(write(60, y, text))
        size = f"Llama 3 405B: {sent[name] / 1e9:.3g} GB per GPU and step"
        parts.append(write(400, y, size, MUTED))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    layout = links.Layout(8, 1, 16, 128, sequence=8192, batch=16, flops=400e12)
    sent = {"tp": layout.tensor(), "pp": layout.pipeline(), "dp": layout.data()}
    assert sent["tp"] > 10 * sent["dp"] > 100 * sent["pp"]  # the order of the links
    sizes = {"dp": 2, "pp": 2, "tp": 2}
    mesh = ranks(sizes)
    for name in reversed(sizes):
        pairs = neighbours(mesh, name)
        assert len(pairs) == len(mesh) // 2  # each rank is in one group of two
        crosses = {a // 2 != b // 2 for a, b in pairs}  # two GPUs in a node
        assert crosses == {name != "tp"}
        where = "inside a node" if name == "tp" else "between nodes"
        print(f"{name}: groups {[list(pair) for pair in pairs]}, {where}")
    with open("mesh_groups.svg", "w", encoding="utf-8") as file:
        file.write(draw(sent))


if __name__ == "__main__":
    main()
