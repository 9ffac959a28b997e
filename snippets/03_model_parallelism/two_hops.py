"""A picture of two ways to send a token to experts on another node: direct, and in two hops.

A token on GPU 1 of node 0 needs experts on GPUs 0, 2 and 3 of node 1. Sent directly, it crosses
the network once for each of these GPUs. In two hops it crosses once, to the GPU with
the same local rank on node 1. This GPU forwards it over NVLink. Draws two_hops.svg.
"""

from collections import Counter

GPUS, LOCAL, WANTED = 4, 1, (0, 2, 3)  # GPUs of a node, where the token is, where it must go
WIDTH, PANEL, CELL, HEIGHT = 740, 380, 70, 314
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"network": "#c2410c", "NVLink": "#0b6e99"}
Gpu = tuple[int, int]  # node, local rank
Message = tuple[Gpu, Gpu, str]  # from, to, link


def direct() -> list[Message]:
    """One message for each GPU that has an expert for the token."""
    return [((0, LOCAL), (1, gpu), "network") for gpu in WANTED]


def two_hops() -> list[Message]:
    """One message to the node, and then one to each GPU of the node that needs the token."""
    arrival = (1, LOCAL)
    inside = [(arrival, (1, gpu), "NVLink") for gpu in WANTED if gpu != LOCAL]
    return [((0, LOCAL), arrival, "network"), *inside]


def place(left: float, gpu: Gpu) -> tuple[float, float]:
    node, local_rank = gpu
    return left + 14 + local_rank * (CELL + 12), 70 + node * 130


def write(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="14" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def panel(left: float, title: str, messages: list[Message]) -> list[str]:
    parts = [write(left, 20, title)]
    for node in range(2):
        y = 44 + node * 130
        parts.append(
            f'<rect x="{left}" y="{y}" width="{GPUS * (CELL + 12) + 16}" height="106" rx="6" '
            f'fill="none" stroke="{MUTED}"/>'
        )
        parts.append(write(left + 8, y + 18, f"node {node}", MUTED))
    for begin, end, link in messages:
        (x0, y0), (x1, y1) = place(left, begin), place(left, end)
        x0, x1 = x0 + CELL / 2, x1 + CELL / 2
        path = f"M{x0:g} {y0 + 44:g} L{x1:g} {y1:g}"
        if link == "NVLink":  # inside a node, below the boxes
            drop = 8 + 6 * end[1]
            path = f"M{x0:g} {y0 + 44:g} v{drop} H{x1:g} v{-drop}"
        parts.append(
            f'<path d="{path}" fill="none" stroke="{COLOURS[link]}" stroke-width="3"/>'
        )
    for node in range(2):
        for gpu in range(GPUS):
            x, y = place(left, (node, gpu))
            fill = "#fde68a" if (node, gpu) == (0, LOCAL) else "#e4e4e7"
            fill = "#bbf7d0" if node and gpu in WANTED else fill
            parts.append(
                f'<rect x="{x:g}" y="{y:g}" width="{CELL}" height="44" rx="5" fill="{fill}" '
                f'stroke="{INK}"/>'
            )
            parts.append(write(x + CELL / 2, y + 27, f"GPU {gpu}", "#111827", "middle"))
    links = Counter(link for *_, link in messages)
    words = ", ".join(f"{links[link]} over {name}" for link, name in
                      (("network", "the network"), ("NVLink", "NVLink")))  # fmt: skip
    parts.append(write(left, HEIGHT - 10, words))
    return parts


def main() -> None:
    ways = {"direct": direct(), "two hops": two_hops()}
    for name, messages in ways.items():
        reached = {end for _, end, _ in messages}
        assert reached >= {(1, gpu) for gpu in WANTED}  # every expert gets the token
        have = {(0, LOCAL)}
        for begin, end, link in messages:
            assert begin in have  # a GPU forwards only a token that it has
            assert (link == "network") == (begin[0] != end[0])
            have.add(end)
        links = Counter(link for *_, link in messages)
        print(f"{name:8}  network {links['network']}, NVLink {links['NVLink']}")
    titles = "Direct: one message per GPU", "Two hops: one message per node"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        *panel(2, titles[0], ways["direct"]),
        *panel(PANEL + 6, titles[1], ways["two hops"]),
        "</svg>",
        "",
    ]
    with open("two_hops.svg", "w", encoding="utf-8") as file:
        file.write("\n".join(parts))


if __name__ == "__main__":
    main()
