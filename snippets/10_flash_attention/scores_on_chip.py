"""This picture shows where the scores of attention are, with three operators and in one kernel.

With PyTorch's operators, the first product writes the scores to memory, the softmax reads them
and writes the weights, and the second product reads the weights. In one kernel, a block of
threads computes a tile of scores in registers and uses it there. Compare the bytes that the
three operators move with the bytes that the kernel moves for one head of 8,192 tokens. Plain
Python writes scores_on_chip.svg.
"""

S, D, TILE, THREADS, STAGES = 8192, 128, 128, 256, 3
KIB, MIB = 2**10, 2**20
SHARED, REGISTERS = 227 * KIB, 255  # of one block, of one thread; NVIDIA H100
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"


def operators() -> dict[str, int]:
    """Bytes that each of the three operators reads and writes, in bf16."""
    matrix, tensor = 2 * S * S, 2 * S * D
    return {
        "product": 2 * tensor + matrix,
        "softmax": 2 * matrix,
        "second product": matrix + 2 * tensor,
    }


def kernel() -> tuple[int, int]:
    """Return the bytes that all blocks load and store, and how many of them are stores."""
    moved = 0
    for _ in range(0, S, TILE):  # one block for each tile of queries
        moved += 2 * TILE * D  # the tile of Q
        for _ in range(0, S, TILE):
            moved += 2 * 2 * TILE * D  # a tile of K and a tile of V
        moved += 2 * TILE * D  # the tile of the output
    return moved, 2 * S * D


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def line(path: str, colour: str = MUTED) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 470" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{MUTED}"/></marker>'
        "</defs>",
        caption(2, 20, "Three operators: the scores travel to memory and back", INK, "start"),
        caption(2, 64, "memory", MUTED, "start"),
        caption(2, 156, "SMs", MUTED, "start"),
    ]
    for x, width, words, colour in (
        (76, 64, "Q, K", BLUE), (224, 110, "scores", ORANGE), (410, 110, "weights", ORANGE),
        (548, 40, "V", BLUE), (662, 50, "O", GREEN),
    ):  # fmt: skip
        parts.append(box(x, 40, width, 38, words, colour))
    for x, width, words in ((116, 96, "product"), (324, 96, "softmax"), (542, 96, "product")):
        parts.append(box(x, 132, width, 38, words, INK))
    for path in (
        "M128 78 V130", "M190 132 L250 81", "M308 78 L340 130", "M404 132 L436 81",
        "M500 78 L560 130", "M574 78 V130", "M626 132 L676 81",
    ):  # fmt: skip
        parts.append(line(path))
    parts += [
        caption(372, 56, f"{2 * S * S // MIB} MiB", ORANGE),
        caption(372, 73, "each", ORANGE),
        caption(2, 222, "One kernel: the scores stay on the SM", INK, "start"),
        caption(2, 264, "memory", MUTED, "start"),
        caption(2, 356, "one SM", MUTED, "start"),
    ]
    for x, width, words, colour in (
        (92, 40, "Q", BLUE), (220, 40, "K", BLUE), (496, 40, "V", BLUE), (662, 50, "O", GREEN),
    ):  # fmt: skip
        parts.append(box(x, 242, width, 38, words, colour))
    parts.append(
        f'<rect x="72" y="316" width="642" height="112" rx="8" fill="none" stroke="{MUTED}" '
        'stroke-width="1.5" stroke-dasharray="5 4"/>'
    )
    for x, width, words, colour in (
        (84, 56, "tile of Q", BLUE), (186, 84, "product", INK), (292, 76, "scores", ORANGE),
        (390, 78, "softmax", INK), (490, 84, "product", INK), (600, 104, "output", GREEN),
    ):  # fmt: skip
        parts.append(box(x, 332, width if x != 84 else 78, 38, words, colour))
    for path in (
        "M112 280 V330", "M240 280 V330", "M516 280 V330", "M687 332 V283",
        "M162 351 H184", "M270 351 H290", "M368 351 H388", "M468 351 H488", "M574 351 H598",
        "M532 370 V396 H228 V373",
    ):  # fmt: skip
        parts.append(line(path))
    parts += [
        caption(380, 416, f"next tile of {TILE} keys: {S // TILE} times", MUTED),
        caption(330, 388, f"{4 * TILE * TILE // KIB} KiB in registers", ORANGE),
        caption(652, 388, f"{4 * TILE * D // KIB} KiB", GREEN),
        caption(
            393,
            452,
            f"one head, {S:,} tokens, width {D}, tiles of {TILE} × {TILE}, bf16",
            MUTED,
        ),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    moved = operators()
    total, output = sum(moved.values()), 2 * S * D
    assert total == 2 * (4 * S * S + 4 * S * D)  # as derived on the page before, unscaled
    print(
        f"one head, {S:,} tokens, width {D}, bf16: Q, K, V and O have {output // MIB} MiB each"
    )
    print(f"three operators move {total // MIB} MiB, because scores and weights have "
          f"{2 * S * S // MIB} MiB each")  # fmt: skip
    both, stored = kernel()
    loaded, again = both - stored, S // TILE
    assert loaded == output + 2 * again * output  # Q once; K and V once per tile of queries
    assert loaded + stored < total / 2 + MIB  # the kernel moves half of the bytes
    print(f"one kernel stores {stored // MIB} MiB. It loads Q once, and K and V {again} times,")
    print(f"once for each tile of queries: {loaded // MIB} MiB")
    scores, accumulator = (TILE * n // THREADS for n in (TILE, D))  # fp32: one register each
    print(f"registers of a thread: {scores} for scores, {accumulator} for the output, "
          f"of {REGISTERS}")  # fmt: skip
    assert scores + accumulator < REGISTERS
    for stages in (STAGES, STAGES + 1):
        shared = 2 * TILE * D * (1 + 2 * stages)  # Q, and K and V of each stage
        verdict = "fits" if shared <= SHARED else "too much"
        print(f"shared memory with {stages} stages: {shared // KIB} of {SHARED // KIB} KiB, "
              f"{verdict}")  # fmt: skip
    with open("scores_on_chip.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
