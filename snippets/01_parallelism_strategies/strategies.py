"""Draws how each strategy cuts one transformer and one batch over four ranks.

Two functions return the owner of a cell. A cell of the batch is a part of the tokens of one
sequence, and a cell of the model is a quarter of one layer. The picture and the table both use
these functions, so the two cannot differ. Plain Python writes the SVG.
"""

RANKS, LAYERS = 4, 4
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK, MUTED = "#1f2937", "#52525b"
ALL = None  # every rank has it

CAPTIONS = {  # name: (what is cut, what is sent)
    "DP": ("batch by sequence", "gradients, once a step"),
    "FSDP": ("batch; what is stored", "parameters, gradients"),
    "TP": ("every matrix", "activations, 4 × a layer"),
    "TP + SP": ("matrices and tokens", "activations, in halves"),
    "PP": ("model by layers", "activations at borders"),
    "CP": ("every sequence", "keys and values"),
    "EP": ("batch; experts by rank", "tokens to their experts"),
}


def owner_of_tokens(strategy: str, sequence: int, stretch: int) -> int | None:
    """Return the rank that computes these tokens, or ALL if every rank computes them."""
    if strategy in ("DP", "FSDP", "EP"):
        return sequence
    if strategy in ("TP + SP", "CP"):
        return stretch
    return ALL  # with TP and with PP, every rank processes all tokens


def owner_of_weights(strategy: str, layer: int, quarter: int) -> int | None:
    """Return the rank that stores this quarter of the layer, or ALL if every rank stores it."""
    if strategy in ("FSDP", "TP", "TP + SP"):
        return quarter
    if strategy == "PP":
        return layer
    if strategy == "EP" and layer % 2:  # every second layer has experts
        return quarter
    return ALL


def share(owner, strategy: str, rows: int, columns: int) -> float:
    """The fraction of all cells that rank 0 has."""
    cells = [owner(strategy, row, column) for row in range(rows) for column in range(columns)]
    return sum(cell in (0, ALL) for cell in cells) / len(cells)


def label(x: float, y: float, words: str, colour: str, size: int, weight: str = "400") -> str:
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" font-weight="{weight}">'
        f"{words}</text>"
    )


def grid(x: float, y: float, cell: tuple[float, float], owner, strategy: str) -> list[str]:
    """Draw 4 × 4 cells in the colours of their owners. Grey: every rank has a copy."""
    parts = []
    for row in range(4):
        for column in range(4):
            rank = owner(strategy, row, column)
            colour, opacity = (MUTED, 0.16) if rank is ALL else (COLOURS[rank], 0.85)
            outline = ""
            if strategy == "FSDP" and owner is owner_of_weights:
                opacity, outline = 0.12, f' stroke="{colour}" stroke-width="1.5"'
            parts.append(
                f'<rect x="{x + column * cell[0]:.1f}" y="{y + row * (cell[1] + 5):.1f}" '
                f'width="{cell[0] - 2}" height="{cell[1]}" fill="{colour}" '
                f'fill-opacity="{opacity}"{outline}/>'
            )
    return parts


def draw() -> str:
    width, panel, height = 720, 180, 204
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {2 * height + 6}" '
        'font-family="system-ui, sans-serif">'
    ]
    for index, (strategy, (cut, sent)) in enumerate(CAPTIONS.items()):
        x, y = index % 4 * panel + 6, index // 4 * height + 4
        parts.append(label(x, y + 18, strategy, INK, 17, "600"))
        parts.append(label(x, y + 38, "batch", MUTED, 13))
        parts.append(label(x + 76, y + 38, "model", MUTED, 13))
        parts += grid(x, y + 46, (15, 17), owner_of_tokens, strategy)
        parts += grid(x + 76, y + 46, (22, 17), owner_of_weights, strategy)
        parts.append(label(x, y + 154, cut, INK, 14))
        parts.append(label(x, y + 174, sent, "#c2410c", 14))
    x, y = 3 * panel + 6, height + 4  # the last panel is the key
    parts.append(label(x, y + 18, "key", INK, 17, "600"))
    for row, words in enumerate([f"rank {r}" for r in range(RANKS)] + ["all ranks"]):
        colour, opacity = (COLOURS[row], 0.85) if row < RANKS else (MUTED, 0.16)
        parts.append(
            f'<rect x="{x}" y="{y + 30 + row * 22}" width="15" height="15" fill="{colour}" '
            f'fill-opacity="{opacity}"/>'
        )
        parts.append(label(x + 24, y + 43 + row * 22, words, MUTED, 14))
    parts.append(label(x, y + 154, "hollow: gathered first", MUTED, 14))
    parts.append(label(x, y + 174, "orange: what is sent", "#c2410c", 14))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("strategies.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    # the strategies that cut inside a sequence, that cut inside a layer, and layers of experts
    assert [s for s in CAPTIONS if owner_of_tokens(s, 0, 1) == 1] == ["TP + SP", "CP"]
    assert [s for s in CAPTIONS if owner_of_weights(s, 0, 1) == 1] == ["FSDP", "TP", "TP + SP"]
    assert [owner_of_weights("EP", layer, 1) for layer in range(LAYERS)] == [ALL, 1, ALL, 1]
    print("share of one rank in four   tokens  weights")
    for strategy in CAPTIONS:
        tokens = share(owner_of_tokens, strategy, RANKS, 4)
        weights = share(owner_of_weights, strategy, LAYERS, 4)
        print(f"{strategy:25} {tokens:8.3f} {weights:8.3f}")


if __name__ == "__main__":
    main()
