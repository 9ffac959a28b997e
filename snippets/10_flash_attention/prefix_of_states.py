"""A picture of a prefix scan over eight ranks: three rounds by doubling replace seven steps.

Each box shows which parts of the sequence the update of a rank contains. In round 1, rank r
gets the update of rank r - 1. In round 2, it gets the update of rank r - 2, and in round 3 the
update of rank r - 4. Then the update of each rank contains all earlier parts and its own part.
Plain Python draws prefix_of_states.svg.
"""

RANKS = 8
LEFT, COLUMN, ROW, TOP, WIDTH = 96, 82, 92, 44, 66
INK, MUTED, COLOUR, DONE = "#1f2937", "#52525b", "#0b6e99", "#15803d"


# --8<-- [start:rounds]
def rounds() -> list[list[tuple[int, int]]]:
    """rounds[i][rank]: the first and the last part that the rank's update contains."""
    spans, distance = [[(rank, rank) for rank in range(RANKS)]], 1
    while distance < RANKS:
        now = spans[-1]
        new = list(now)
        for rank in range(distance, RANKS):
            first, end = now[rank - distance]
            assert end + 1 == now[rank][0]  # the two spans are neighbours, in this order
            new[rank] = first, now[rank][1]
        spans.append(new)
        distance *= 2
    return spans


# --8<-- [end:rounds]


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw(spans: list) -> str:
    width, height = LEFT + RANKS * COLUMN, TOP + (len(spans) - 1) * ROW + 52
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for rank in range(RANKS):
        parts.append(put_text(LEFT + rank * COLUMN + WIDTH / 2, 24, f"rank {rank}"))
    for number, row in enumerate(spans):
        y = TOP + number * ROW
        label = "own part" if number == 0 else f"round {number}"
        parts.append(put_text(4, y + 24, label, MUTED, "start"))
        for rank, (first, end) in enumerate(row):
            x = LEFT + rank * COLUMN
            colour = DONE if first == 0 else COLOUR
            dash = "" if first == 0 else ' stroke-dasharray="5 3"'
            words = f"{first}" if first == end else f"{first} to {end}"
            parts.append(
                f'<rect x="{x}" y="{y}" width="{WIDTH}" height="36" rx="5" fill="none" '
                f'stroke="{colour}" stroke-width="2"{dash}/>'
                + put_text(x + WIDTH / 2, y + 23, words, colour)
            )
            target = rank + 2**number
            if number + 1 < len(spans) and target < RANKS:
                to = LEFT + target * COLUMN + WIDTH / 2
                parts.append(
                    f'<path d="M{x + WIDTH / 2} {y + 36} L{to} {y + ROW}" stroke="{MUTED}" '
                    'stroke-width="1.3"/>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    spans = rounds()
    assert spans[-1] == [(0, rank) for rank in range(RANKS)] and len(spans) == 4
    with open("prefix_of_states.svg", "w", encoding="utf-8") as file:
        file.write(draw(spans))
    for number, row in enumerate(spans):
        done = sum(first == 0 for first, _ in row)
        print(f"after round {number}: {done} of {RANKS} ranks have all earlier parts")


if __name__ == "__main__":
    main()
