"""A picture of two nodes: one torchrun on each starts the ranks, and all ranks form one group.

Plain Python writes the SVG. Look at how the number of a rank follows from the number of its
node and its local rank. The program two_nodes.py starts these four ranks.
"""

NODES, PER_NODE = 2, 2
WIDTH, NODE, BOX = 720, 340, 150
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def rank_of(node: int, local_rank: int) -> int:
    return node * PER_NODE + local_rank


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def line(path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{MUTED}" stroke-width="1.5"/>'


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 296" '
        'font-family="system-ui, sans-serif" font-size="14">',
        box(WIDTH / 2 - 150, 2, 300, 32, "address of node 0 (--master-addr)", ORANGE),
    ]
    for node in range(NODES):
        left = 1 + node * (WIDTH - NODE - 2)
        middle = left + NODE / 2
        parts.append(line(f"M{WIDTH / 2 - 100 + 200 * node} 34 L{middle} 84"))
        parts.append(box(left, 56, NODE, 168, "", MUTED))
        parts.append(caption(left + 10, 76, f"node {node}", MUTED, "start"))
        parts.append(box(middle - 105, 84, 210, 40, f"torchrun --node-rank={node}", ORANGE))
        for local_rank in range(PER_NODE):
            x = left + 14 + local_rank * (BOX + 12)
            parts.append(line(f"M{middle} 124 L{x + BOX / 2} 150"))
            parts.append(box(x, 150, BOX, 60, "", BLUE))
            rank = rank_of(node, local_rank)
            parts.append(caption(x + BOX / 2, 174, f"rank {rank}", BLUE))
            parts.append(caption(x + BOX / 2, 196, f"local rank {local_rank}", BLUE))
            parts.append(line(f"M{x + BOX / 2} 210 V252"))
    words = f"one process group, world size {NODES * PER_NODE}"
    parts.append(box(1, 252, WIDTH - 2, 40, words, GREEN))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    places = [(node, local_rank) for node in range(NODES) for local_rank in range(PER_NODE)]
    ranks = [rank_of(*place) for place in places]
    assert ranks == list(range(NODES * PER_NODE))  # node by node, without a gap
    for rank, (node, local_rank) in zip(ranks, places, strict=True):
        assert (rank // PER_NODE, rank % PER_NODE) == (node, local_rank)
        print(f"rank {rank} is local rank {local_rank} of node {node}")
    with open("nodes_and_agents.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
