"""A picture of four ways to switch to new weights while an answer is being written.

In each step, one token is computed and one bucket of new weights arrives. For each token, the
picture shows how much of its weights is new, and how many of the keys and values that it reads
were computed with new weights. Draws switch_weights.svg.
"""

from typing import NamedTuple

TOKENS, BUCKETS = 8, 5
BOLD = 'font-weight="600"'
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
WAYS = {
    "in place": "each bucket overwrites the weights at once",
    "drain": "the answer ends with the old weights",
    "keep cache": "switch when all buckets are there, and keep the cache",
    "new cache": "switch, and compute the cache of the answer again",
}


class Token(NamedTuple):
    weights: float  # the part of its weights that is new
    cache: list[float]  # for each earlier token: the part of new weights in its keys and values


def write(way: str) -> list[Token]:
    """The tokens of one answer. The cache has an entry for each token that was computed."""
    tokens, cache = [], []
    for step in range(TOKENS):
        arrived = min(step, BUCKETS) / BUCKETS
        switched = float(arrived == 1 and way != "drain")
        weights = arrived if way == "in place" else switched
        if way == "new cache" and weights == 1:
            cache = [1.0] * len(cache)
        tokens.append(Token(weights, list(cache)))
        cache.append(weights)
    return tokens


def kind(token: Token) -> str:
    """Which version of the policy has written a token."""
    parts = {token.weights, *token.cache}
    if parts == {0.0}:
        return "old"
    return "new" if parts == {1.0} else "neither"


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw_box(x: float, y: float, new: float, width: float = 60, height: float = 18) -> str:
    """A box that is filled from the left by the part that is new."""
    frame = f'<rect x="{x:g}" y="{y:g}" height="{height:g}"'
    return (
        f'{frame} width="{width:g}" fill="{BLUE}" fill-opacity="0.2" stroke="{BLUE}"/>'
        f'{frame} width="{width * new:g}" fill="{ORANGE}" fill-opacity="0.6"/>'
    )


def draw(answers: dict[str, list[Token]]) -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 430" '
        'font-family="system-ui, sans-serif">'
    ]
    for index, (way, tokens) in enumerate(answers.items()):
        top = 4 + 98 * index
        parts.append(draw_text(2, top + 14, f"{way}: {WAYS[way]}", INK, 14, BOLD))
        for y, name in ((38, "weights"), (60, "cache"), (80, "written by")):
            parts.append(draw_text(2, top + y, name, MUTED))
        for step, token in enumerate(tokens):
            x = 100 + 74 * step
            parts.append(draw_box(x, top + 24, token.weights))
            new = sum(token.cache) / len(token.cache) if token.cache else 0.0
            parts.append(draw_box(x, top + 46, new))
            colour = {"old": BLUE, "new": ORANGE, "neither": INK}[kind(token)]
            extra = BOLD if kind(token) == "neither" else ""
            parts.append(draw_text(x, top + 80, kind(token), colour, 14, extra))
    parts.append(draw_box(100, 402, 0.0))
    parts.append(draw_text(168, 416, "old", INK))
    parts.append(draw_box(248, 402, 1.0))
    parts.append(draw_text(316, 416, "new", INK))
    parts.append(draw_box(396, 402, 0.4))
    parts.append(draw_text(464, 416, "partly new", INK))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    answers = {way: write(way) for way in WAYS}
    with open("switch_weights.svg", "w", encoding="utf-8") as file:
        file.write(draw(answers))
    counts = {}
    for way, tokens in answers.items():
        kinds = [kind(token) for token in tokens]
        counts[way] = [kinds.count(name) for name in ("old", "new", "neither")]
        print(
            "{:11} {} tokens of the old policy, {} of the new, {} of neither".format(
                way, *counts[way]
            )
        )
    assert counts["in place"] == [1, 0, TOKENS - 1]
    assert counts["drain"] == [TOKENS, 0, 0]
    assert counts["keep cache"] == [BUCKETS, 0, TOKENS - BUCKETS]
    assert counts["new cache"] == [BUCKETS, TOKENS - BUCKETS, 0]


if __name__ == "__main__":
    main()
