"""A picture of linear attention in its three forms: recurrent, parallel and chunked.

Each of the three parts shows eight tokens. A filled cell is a score that the form computes for
a query (row) and a key (column). A box with an S below a key is an update of the state. The
recurrent form updates eight times. The parallel form computes all 36 scores on and below the
diagonal. The chunked form computes the scores inside chunks of four tokens and updates twice.
Plain Python draws three_forms.svg.
"""

TOKENS, CHUNK = 8, 4
CELL, PART, TOP = 22, 250, 60
INK, MUTED = "#1f2937", "#52525b"
SCORE, STATE = "#0b6e99", "#c2410c"


# --8<-- [start:work]
def work(chunk: int) -> tuple[list[tuple[int, int]], list[int]]:
    """The (query, key) pairs that get a score, and the tokens after which the state changes."""
    scores = [
        (query, key)
        for query in range(TOKENS)
        for key in range(query + 1)
        if query // chunk == key // chunk  # in the same chunk
    ]
    return scores, list(range(chunk - 1, TOKENS, chunk))


# --8<-- [end:work]


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def part(left: int, title: str, scores: list, updates: list) -> list[str]:
    side = TOKENS * CELL
    parts = [put_text(left + side / 2, 22, title)]
    parts.append(put_text(left + side / 2, 44, "keys →, queries ↓", MUTED))
    for query in range(TOKENS):
        for key in range(TOKENS):
            x, y = left + key * CELL, TOP + query * CELL
            filled = (query, key) in scores
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}" rx="3" '
                f'fill="{SCORE if filled else "none"}" stroke="{SCORE if filled else MUTED}" '
                f'stroke-opacity="{1 if filled else 0.35}"/>'
            )
    y = TOP + side + 14
    for token in updates:
        x = left + token * CELL
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL - 3}" height="{CELL - 3}" rx="3" '
            f'fill="{STATE}"/>' + put_text(x + (CELL - 3) / 2, y + 15, "S", "#ffffff")
        )
        if token + 1 < TOKENS:  # the state goes on to the next update
            later = min(each for each in updates if each > token)
            end = left + later * CELL
            parts.append(
                f'<path d="M{x + CELL - 3} {y + 10} H{end}" stroke="{STATE}" stroke-width="2"/>'
            )
    counts = f"{len(scores)} scores, {len(updates)} updates"
    parts.append(put_text(left + side / 2, y + 44, counts, MUTED))
    return parts


def main() -> None:
    forms = {
        "recurrent": ([], work(1)[1]),
        "parallel": (work(TOKENS)[0], []),
        "chunked, 4 tokens": work(CHUNK),
    }
    assert [(len(a), len(b)) for a, b in forms.values()] == [(0, 8), (36, 0), (20, 2)]
    width, height = 2 * PART + 200, TOP + TOKENS * CELL + 72
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for number, (title, (scores, updates)) in enumerate(forms.items()):
        parts += part(12 + number * PART, title, scores, updates)
        print(f"{title}: {len(scores)} scores, {len(updates)} updates of the state")
    with open("three_forms.svg", "w", encoding="utf-8") as file:
        file.write("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
