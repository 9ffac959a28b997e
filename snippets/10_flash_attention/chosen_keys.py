"""A picture of sparse attention with an indexer: score all keys, keep three, attend to those.

The upper row shows the scores that a small indexer gives to 16 keys. The middle row marks the
three best keys. The lower row shows the full keys and values: the attention reads only the
three marked keys and values. The scores are an example. Plain Python draws chosen_keys.svg.
"""

KEYS, TOP_K = 16, 3
LEFT, CELL, WIDTH = 150, 36, 740
INK, MUTED, COLOUR, CHOSEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
SCORES = [3, 9, 2, 4, 1, 12, 5, 2, 3, 1, 6, 2, 4, 14, 3, 7]  # an example


def best(scores: list[int], top: int) -> list[int]:
    """The positions of the `top` largest scores, in the order of the sequence."""
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:top])


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw(chosen: list[int]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 306" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    parts.append(put_text(4, 70, "index scores", INK, "start"))
    parts.append(put_text(4, 90, "(narrow keys)", MUTED, "start"))
    parts.append(put_text(4, 150, "the k best", INK, "start"))
    parts.append(put_text(4, 208, "keys and values", INK, "start"))
    parts.append(put_text(4, 228, "(wide)", MUTED, "start"))
    for i, score in enumerate(SCORES):
        x, colour = LEFT + i * CELL, CHOSEN if i in chosen else COLOUR
        height = 5 * score
        parts.append(
            f'<rect x="{x}" y="{100 - height}" width="{CELL - 8}" height="{height}" '
            f'fill="{colour}"/>'
        )
        if i in chosen:
            middle = x + (CELL - 8) / 2
            parts.append(put_text(middle, 150, "✓", CHOSEN))
            parts.append(
                f'<path d="M{middle} 104 V134 M{middle} 158 V174 M{middle} 240 L440 268" '
                f'stroke="{CHOSEN}" stroke-width="1.5" fill="none"/>'
            )
        parts.append(
            f'<rect x="{x}" y="176" width="{CELL - 8}" height="62" rx="4" stroke="{colour}" '
            f'fill="{CHOSEN if i in chosen else "none"}" '
            f'stroke-opacity="{1 if i in chosen else 0.6}"/>'
        )
    parts.append(
        '<rect x="330" y="268" width="220" height="34" rx="5" fill="none" stroke="#c2410c"/>'
    )
    parts.append(put_text(440, 290, "softmax over three keys"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    chosen = best(SCORES, TOP_K)
    smallest = min(SCORES[i] for i in chosen)
    assert all(score < smallest for i, score in enumerate(SCORES) if i not in chosen)
    with open("chosen_keys.svg", "w", encoding="utf-8") as file:
        file.write(draw(chosen))
    print(f"{KEYS} scores; the attention reads the keys and values {chosen}")


if __name__ == "__main__":
    main()
