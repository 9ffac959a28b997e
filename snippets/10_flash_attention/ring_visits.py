"""This program shows which chunks of queries need which chunks of keys on a ring of ranks.

A sequence is cut into 2n chunks, and each of n ranks stores two of them. Under a causal mask, a
chunk of queries needs all chunks before it and one half of its own chunk. In zigzag order,
every visit with the keys of another rank is a rectangle of the same size. If rank r stores the
chunks r and r + n, this is not true. The program compares the chunks with a loop over all pairs
of tokens. Plain Python writes ring_visits.svg, so the program runs without any package.
"""

RANKS, CHUNK = 4, 5  # ranks, and tokens in a chunk
SHOWN = 1  # the rank in the picture
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


# --8<-- [start:visits]
def zigzag(rank: int) -> tuple[int, int]:
    """Return the two chunks of a rank in zigzag order."""
    return rank, 2 * RANKS - 1 - rank


def stride(rank: int) -> tuple[int, int]:
    """Return the two chunks of a rank if rank r stores the chunks r and r + n."""
    return rank, rank + RANKS


def needed(order, rank: int, source: int) -> list[list[str]]:
    """Return what each of our two query chunks needs of the two key chunks of a rank."""
    kinds = {True: "all", False: "none"}
    return [["half" if q == k else kinds[k < q] for k in order(source)] for q in order(rank)]


# --8<-- [end:visits]


def token_pairs(order, rank: int, source: int) -> set[tuple[int, int]]:
    """Return all pairs of query token and key token that count, by a loop over all tokens."""
    ours, theirs = (
        [chunk * CHUNK + i for chunk in order(r) for i in range(CHUNK)] for r in (rank, source)
    )
    return {(query, key) for query in ours for key in theirs if key <= query}


def is_rectangle(points: set[tuple[int, int]]) -> bool:
    rows, columns = {q for q, _ in points}, {k for _, k in points}
    return len(points) == len(rows) * len(columns)


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def draw() -> str:
    cell, parts = 40, [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 376" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]  # fmt: skip
    for row, (order, title) in enumerate(
        ((zigzag, "zigzag: chunks r and 7 − r"), (stride, "chunks r and r + 4"))
    ):
        top = 190 * row
        ours = order(SHOWN)
        parts.append(words(2, top + 18, f"{title}; rank {SHOWN} has the queries of chunks "
                           f"{ours[0]} and {ours[1]}", INK, "start"))  # fmt: skip
        for step in range(RANKS):
            source = (SHOWN - step) % RANKS
            left, y0 = 60 + 172 * step, top + 64
            parts.append(words(left + cell, top + 40, f"keys of rank {source}", MUTED))
            for j, k in enumerate(order(source)):
                parts.append(words(left + cell * (j + 0.5), top + 58, f"{k}", MUTED))
            for i, q in enumerate(ours):
                parts.append(words(left - 12, y0 + cell * (i + 0.5) + 5, f"{q}", MUTED))
                for j, kind in enumerate(needed(order, SHOWN, source)[i]):
                    x, y = left + cell * j, y0 + cell * i
                    parts.append(
                        f'<rect x="{x}" y="{y}" width="{cell}" height="{cell}" fill="none" '
                        f'stroke="{MUTED}"/>'
                    )
                    end = f"h{cell}" if kind == "all" else ""
                    if kind != "none":
                        parts.append(
                            f'<path d="M{x} {y} {end} L{x + cell} {y + cell} H{x} Z" '
                            f'fill="{BLUE if kind == "all" else ORANGE}" fill-opacity="0.6"/>'
                        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    size = 2 * CHUNK * CHUNK  # pairs of one chunk by two chunks
    for order in (zigzag, stride):
        shapes, work = [], []
        for rank in range(RANKS):
            counts = []
            for source in range(RANKS):
                points = token_pairs(order, rank, source)
                kinds = [kind for row in needed(order, rank, source) for kind in row]
                half = CHUNK * (CHUNK + 1) // 2
                tokens = {"all": CHUNK**2, "half": half, "none": 0}
                assert len(points) == sum(tokens[kind] for kind in kinds)
                counts.append(len(points))
                if source != rank:
                    shapes.append((is_rectangle(points), len(points) / size))
            work.append(sum(counts))
        assert sum(work) == sum(range(2 * RANKS * CHUNK + 1))  # each pair on one rank
        good = sum(rectangle and share == 1 for rectangle, share in shapes)
        assert good == (len(shapes) if order is zigzag else 0)
        assert (len(set(work)) == 1) == (order is zigzag)
        print(f"{order.__name__}: {good} of {len(shapes)} visits are one chunk by two chunks")
        print(f"    pairs on each rank: {work}")
    quarter, three = needed(stride, 1, 2), needed(stride, 2, 1)
    assert sum(row.count("all") for row in quarter) == 1
    assert sum(row.count("all") for row in three) == 3
    print("stride: the queries of rank 1 need a quarter of the square with the keys of rank 2")
    print("stride: the queries of rank 2 need three quarters with the keys of rank 1")
    with open("ring_visits.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
