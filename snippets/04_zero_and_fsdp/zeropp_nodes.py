"""A picture of what crosses the border between two nodes, in ZeRO stage 3 and in ZeRO++.

The upper half shows stage 3: three times in a step, all Ψ elements of the model cross the
border. The lower half shows ZeRO++. Forward gathers int8, backward gathers inside the node,
and the gradients are int4. The numbers on the arrows are in units of Ψ elements of fp16.

The program computes the numbers from the bits per element, and checks the totals of the paper:
3Ψ and 0.75Ψ. Draws zeropp_nodes.svg.
"""

FP16 = 16  # bits; one Ψ is the size of the model in fp16
ARROWS = (  # name, bits per element that cross the border in stage 3 and in ZeRO++, and a label
    ("gather for forward", 16, 8, "int8 (qwZ)"),
    ("gather for backward", 16, 0, "inside the node (hpZ)"),
    ("reduce gradients", 16, 4, "int4 (qgZ)"),
)
WIDTH, ROW, LEFT, RIGHT, BOX = 860, 232, 20, 660, 180
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


def centred(x: float, y: float, words: str, colour: str = INK, size: int = 14) -> str:
    middle = f'text-anchor="middle" font-size="{size}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {middle}>{words}</text>'


def node_box(x: float, y: float, number: int, second_shard: bool) -> str:
    """A node with two ranks. With `second_shard`, each rank also has half of the model."""
    parts = [
        f'<rect x="{x}" y="{y}" width="{BOX}" height="176" rx="6" fill="none" '
        f'stroke="{MUTED}"/>',
        centred(x + BOX / 2, y + 20, f"node {number}"),
    ]
    for rank in range(2):
        left, top = x + 10 + 82 * rank, y + 32
        parts.append(
            f'<rect x="{left}" y="{top}" width="76" height="132" rx="4" fill="{BLUE}" '
            f'fill-opacity="0.08" stroke="{BLUE}"/>'
        )
        parts.append(centred(left + 38, top + 18, f"rank {2 * number + rank}"))
        parts.append(
            f'<rect x="{left + 18}" y="{top + 28}" width="40" height="16" fill="{BLUE}"/>'
        )
        parts.append(centred(left + 38, top + 60, "1/4 of Ψ", MUTED, 12))
        if second_shard:
            parts.append(
                f'<rect x="{left + 8}" y="{top + 74}" width="60" height="16" fill="{BLUE}" '
                f'fill-opacity="0.45" stroke="{BLUE}"/>'
            )
            parts.append(centred(left + 38, top + 106, "second", MUTED, 12))
            parts.append(centred(left + 38, top + 120, "shard: 1/2", MUTED, 12))
    return "".join(parts)


def draw(stage3: list[float], zeropp: list[float]) -> str:
    height = 2 * ROW + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif">'
    ]
    for half, amounts in enumerate((stage3, zeropp)):
        y = 40 + ROW * half
        title = f"{'ZeRO++' if half else 'stage 3'}: {sum(amounts):g}Ψ between the nodes"
        parts.append(centred(WIDTH / 2, y - 16, title, INK, 15))
        for x, number in ((LEFT, 0), (RIGHT, 1)):
            parts.append(node_box(x, y, number, second_shard=half == 1))
        for line, ((name, *_, label), amount) in enumerate(zip(ARROWS, amounts, strict=True)):
            middle = y + 44 + 56 * line
            size = "Ψ" if amount == 1 else f"{amount:g}Ψ"
            words = f"{name}: {size}, {label if half else 'fp16'}"
            if not amount:
                words = f"{name}: {label}"
            parts.append(centred(WIDTH / 2, middle - 10, words, INK, 13))
            if amount:
                begin, end, wide = LEFT + BOX + 12, RIGHT - 12, 1.5 + 6 * amount
                parts.append(
                    f'<path d="M{begin + 10} {middle} H{end - 10}" stroke="{ORANGE}" '
                    f'stroke-width="{wide:g}"/><path d="M{begin} {middle} l12 -7 v14 z '
                    f'M{end} {middle} l-12 -7 v14 z" fill="{ORANGE}"/>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    stage3 = [bits / FP16 for _, bits, _, _ in ARROWS]
    zeropp = [bits / FP16 for _, _, bits, _ in ARROWS]
    assert (sum(stage3), sum(zeropp)) == (3.0, 0.75)  # ZeRO++, section 1
    print(f"between nodes: {sum(stage3):g}Ψ in stage 3, {sum(zeropp):g}Ψ in ZeRO++")
    with open("zeropp_nodes.svg", "w", encoding="utf-8") as file:
        file.write(draw(stage3, zeropp))


if __name__ == "__main__":
    main()
