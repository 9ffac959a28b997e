"""A picture of one layer of experts on four ranks: dispatch, experts, combine.

Each row is a rank, and time goes from left to right. A rank has its own tokens and two of the
eight experts. The router chooses one expert for each token. An all-to-all brings the tokens to
the ranks of their experts (dispatch), the experts compute, and a second all-to-all brings the
results back (combine). A line shows the rows that one rank sends to another, and its width
shows how many these are. All ranks wait for the rank with most rows. Draws expert_exchange.svg.
"""

import torch

RANKS, PER_RANK, TOKENS, HIDDEN = 4, 2, 64, 16  # TOKENS is the number of each rank
EXPERTS = RANKS * PER_RANK
WIDTH, ROW, TOP = 760, 72, 56
INK, MUTED = "#1f2937", "#52525b"
COLOURS = "#0b6e99", "#c2410c", "#15803d", "#7c3aed"


def route() -> torch.Tensor:
    """The expert of each token, [ranks, tokens], from a random router."""
    torch.manual_seed(0)
    tokens, router = torch.randn(RANKS, TOKENS, HIDDEN), torch.randn(HIDDEN, EXPERTS)
    return (tokens @ router).argmax(-1)


def count(experts: torch.Tensor) -> list[list[int]]:
    """rows[i][j]: how many tokens rank i sends to rank j."""
    owner = experts // PER_RANK
    return [row.bincount(minlength=RANKS).tolist() for row in owner]


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def rank_box(x: float, y: float, width: float, words: str, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="44" rx="6" fill="{colour}" '
        f'fill-opacity="0.14" stroke="{colour}" stroke-width="1.5"/>'
        + put_text(x + width / 2, y + 27, words)
    )


def draw(rows: list[list[int]], back: list[list[int]]) -> str:
    height = TOP + RANKS * ROW + 8
    received = [sum(row) for row in back]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    for x, words in (
        (97, "tokens"), (224, "dispatch"), (382, "experts"), (541, "combine"), (662, "results"),
    ):  # fmt: skip
        parts.append(put_text(x, 24, words, MUTED))
    for left, right, table in ((158, 290, rows), (474, 606, back)):
        for i in range(RANKS):
            for j in range(RANKS):
                y, z = TOP + i * ROW + 22, TOP + j * ROW + 22
                colour = COLOURS[j] if left < 300 else COLOURS[i]
                parts.append(
                    f'<path d="M{left} {y} C{left + 60} {y} {right - 60} {z} {right} {z}" '
                    f'fill="none" stroke="{colour}" stroke-width="{table[i][j] / 5:g}" '
                    'stroke-opacity="0.7"/>'
                )
    longest = max(received)
    for rank in range(RANKS):
        y = TOP + rank * ROW
        parts.append(put_text(2, y + 27, f"rank {rank}", INK, "start"))
        parts.append(rank_box(56, y, 100, f"{TOKENS} tokens", MUTED))
        width = 182 * received[rank] / longest
        words = f"{received[rank]} rows"
        parts.append(rank_box(292, y, width, words, COLOURS[rank]))
        if received[rank] < longest:
            parts.append(put_text(482, y + 10, "waits", MUTED, "end"))
        parts.append(rank_box(608, y, 108, f"{TOKENS} results", MUTED))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = count(route())
    back = [list(column) for column in zip(*rows, strict=True)]  # rank i returns to rank j
    received = [sum(row) for row in back]
    assert all(sum(row) == TOKENS for row in rows)  # no token is lost
    assert all(sum(column) == TOKENS for column in zip(*back, strict=True))  # all come back
    assert sum(received) == RANKS * TOKENS
    with open("expert_exchange.svg", "w", encoding="utf-8") as file:
        file.write(draw(rows, back))
    print(f"{RANKS} ranks, {PER_RANK} experts and {TOKENS} tokens each")
    for rank in range(RANKS):
        print(f"  rank {rank} sends {rows[rank]} rows to ranks 0 to {RANKS - 1}", end="")
        print(f", and its experts get {received[rank]} rows")
    print(f"the busiest rank has {max(received) / TOKENS:.2f} times the mean")


if __name__ == "__main__":
    main()
