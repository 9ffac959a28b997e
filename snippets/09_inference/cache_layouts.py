"""A picture of three ways to place a latent cache, which has no heads, on four ranks.

Tensor parallelism cuts a cache by heads. A latent cache has one vector per token for all heads,
so every rank stores the whole cache of every request. Context parallelism in decode gives each
rank every fourth token of each request. Data-parallel attention gives each request to one rank.
The output counts the cached tokens of each rank. Plain Python writes the SVG.
"""

from collections import Counter

RANKS = 4
LENGTHS = {"A": 8, "B": 5, "C": 3, "D": 4}  # cached tokens of each request
Token = tuple[str, int]  # request and position
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"A": "#c2410c", "B": "#0b6e99", "C": "#7c3aed", "D": "#15803d"}


# --8<-- [start:place]
def by_heads(request: str, position: int) -> list[int]:
    return list(range(RANKS))  # no head to cut: each rank needs the vector for its queries


def by_position(request: str, position: int) -> list[int]:
    return [position % RANKS]  # so the next tokens are spread over the ranks, too


def by_request(request: str, position: int) -> list[int]:
    return [sorted(LENGTHS).index(request) % RANKS]


# --8<-- [end:place]

LAYOUTS = {
    "tensor parallelism": by_heads,
    "context parallelism": by_position,
    "data-parallel attention": by_request,
}


def stored(layout) -> list[list[Token]]:
    """Return the tokens on each rank."""
    ranks: list[list[Token]] = [[] for _ in range(RANKS)]
    for request, length in LENGTHS.items():
        for position in range(length):
            for rank in layout(request, position):
                ranks[rank].append((request, position))
    return ranks


def text_at(x: float, y: float, words: str, colour: str = INK, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw() -> str:
    cell, left, panel, row, top = 19, 62, 222, 58, 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {top + RANKS * row + 30}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    for rank in range(RANKS):
        parts.append(text_at(2, top + row * rank + 30, f"rank {rank}"))
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        x = left + panel * number
        parts.append(text_at(x, 22, name))
        ranks = stored(layout)
        for rank, tokens in enumerate(ranks):
            y = top + row * rank
            parts.append(f'<rect x="{x}" y="{y}" width="206" height="{row - 8}" rx="4" '
                         f'fill="none" stroke="{MUTED}"/>')  # fmt: skip
            for i, (request, _) in enumerate(tokens):
                a, b = x + 8 + cell * (i % 10), y + 6 + (cell + 1) * (i // 10)
                style = f'fill="{COLOURS[request]}" fill-opacity="0.18"'
                parts.append(f'<rect x="{a}" y="{b}" width="17" height="17" rx="2" {style}/>')
                parts.append(text_at(a + 8.5, b + 13, request, COLOURS[request], "middle"))
        total = sum(len(tokens) for tokens in ranks)
        parts.append(text_at(x, top + RANKS * row + 16, f"{total} tokens stored", MUTED))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    every = {(r, position) for r, length in LENGTHS.items() for position in range(length)}
    print("cached tokens on rank     0   1   2   3   all  ranks that a step of request A reads")
    for name, layout in LAYOUTS.items():
        ranks = stored(layout)
        copies = Counter(token for tokens in ranks for token in tokens)
        assert set(copies) == every  # no token is lost
        assert set(copies.values()) == ({RANKS} if layout is by_heads else {1})
        readers = sum(any(request == "A" for request, _ in tokens) for tokens in ranks)
        counts = [len(tokens) for tokens in ranks]
        print(f"{name:24} {' '.join(f'{c:3}' for c in counts)} {sum(counts):5}  {readers}")
    uneven, even = (
        max(map(len, stored(layout))) - min(map(len, stored(layout)))
        for layout in (by_request, by_position)
    )
    assert uneven > even, "whole requests are placed less evenly than tokens"
    with open("cache_layouts.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
