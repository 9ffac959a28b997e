"""A picture of two ranks that check the same gradients for an inf, in two orders.

Each rank has the gradient of a replicated norm and its shard of a weight's gradient. The shard
of rank 0 contains an inf. DTensor compares the flags of the ranks only over the dimensions of
the mesh in which the first gradient is sharded. If the gradient of the norm is the first one,
the flags are not compared. So the order decides what rank 1 does.

Plain Python writes the SVG, so the program runs without any package.
"""

WIDTH, HEIGHT, TOP, ROW = 760, 356, 44, 58
INK, MUTED = "#1f2937", "#52525b"
BLUE, RED, GREEN = "#0b6e99", "#b91c1c", "#15803d"
Placements = dict[str, str]
ORDERS: list[Placements] = [  # the gradients in the order of the optimizer
    {"norm": "Replicate", "weight": "Shard"},
    {"weight": "Shard", "norm": "Replicate"},
]


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def flags_after(order: Placements, flags: list[int]) -> list[int]:
    """Return the flags of all ranks after the check, by the rule of torch 2.11 to 2.15."""
    first = next(iter(order.values()))
    return [max(flags)] * len(flags) if first == "Shard" else flags


def draw() -> tuple[str, list[list[str]]]:
    """The SVG, and what the two ranks do for each order."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13">',
    ]
    for x, words in ((140, "first gradient"), (280, "second gradient")):
        parts.append(caption(x, 20, words, MUTED))
    for x, words in ((408, "own flag"), (545, "maximum over"), (686, "scaler.step")):
        parts.append(caption(x, 20, words, MUTED))
    actions = []
    for panel, order in enumerate(ORDERS):
        top = TOP + panel * 160
        own = [1, 0]  # rank 0 has found the inf
        after = flags_after(order, own)
        compares = after != own
        actions.append(["skips the step" if flag else "takes the step" for flag in after])
        for rank in range(2):
            y = top + rank * ROW
            parts.append(caption(34, y + 25, f"rank {rank}"))
            for column, (name, placement) in enumerate(order.items()):
                inf = placement == "Shard" and rank == 0
                words = f"{name}, {'inf' if inf else 'finite'}"
                parts.append(box(76 + 140 * column, y, 128, 40, words, RED if inf else BLUE))
            parts.append(caption(408, y + 25, str(own[rank]), RED if own[rank] else INK))
            colour = GREEN if after[rank] else RED  # a step with an inf somewhere is wrong
            parts.append(box(618, y, 136, 40, actions[-1][rank], colour))
            parts.append(f'<path d="M426 {y + 20} H462" stroke="{MUTED}" fill="none"/>')
        if compares:
            parts.append(box(466, top, 148, 98, "both ranks", GREEN))
        else:
            for rank in range(2):
                parts.append(box(466, top + rank * ROW, 148, 40, "this rank alone", MUTED))
        words = " and ".join(f"{name} [{placement}]" for name, placement in order.items())
        parts.append(caption(WIDTH / 2, top + 122, f"order of the parameters: {words}", MUTED))
    return "\n".join([*parts, "</svg>", ""]), actions


def main() -> None:
    svg, actions = draw()
    with open("first_gradient.svg", "w", encoding="utf-8") as file:
        file.write(svg)
    for order, both in zip(ORDERS, actions, strict=True):
        print(f"{', '.join(order.values())}: rank 0 {both[0]}, rank 1 {both[1]}")


if __name__ == "__main__":
    main()
