"""A picture of ring attention: which block of keys and values each rank has in each step.

Each row is a rank, and each column is a step. The queries of a rank stay where they are. The
blocks of keys and values move: while a rank computes with its block, it sends this block to the
next rank. After as many steps as there are ranks, every query has met every key. Draws
ring_of_keys.svg.
"""

import itertools

RANKS = 4
WIDTH, STEP, ROW, TOP = 740, 160, 76, 52
INK, MUTED = "#1f2937", "#52525b"
COLOURS = "#0b6e99", "#c2410c", "#15803d", "#7c3aed"


def blocks() -> list[list[int]]:
    """blocks[step][rank]: the rank whose keys and values this rank has in this step."""
    held = [list(range(RANKS))]
    for _ in range(RANKS - 1):
        held.append([held[-1][rank - 1] for rank in range(RANKS)])  # rank 0 gets from the last
    return held


def put_text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw(held: list[list[int]]) -> str:
    height = TOP + RANKS * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for step in range(RANKS):
        x = 76 + step * STEP
        parts.append(put_text(x + 62, 28, f"step {step}", MUTED))
        for rank, owner in enumerate(held[step]):
            y = TOP + rank * ROW
            if step == 0:
                parts.append(put_text(2, y + 27, f"rank {rank}", INK, "start"))
            parts.append(
                f'<rect x="{x}" y="{y}" width="54" height="44" rx="5" fill="none" '
                f'stroke="{COLOURS[rank]}" stroke-width="2"/>'
                + put_text(x + 27, y + 27, f"Q{rank}")
                + f'<rect x="{x + 58}" y="{y}" width="66" height="44" rx="5" '
                f'fill="{COLOURS[owner]}"/>'
                + put_text(x + 91, y + 27, f"K{owner}, V{owner}", "#ffffff")
            )
            if step < RANKS - 1:  # to the next rank, and from the last rank to the first
                below = TOP + (rank + 1) % RANKS * ROW + 22
                dash = "" if rank < RANKS - 1 else ' stroke-dasharray="4 3"'
                parts.append(
                    f'<path d="M{x + 124} {y + 22} L{x + STEP} {below}" stroke="{MUTED}"'
                    f' stroke-width="1.5"{dash}/>'
                )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    held = blocks()
    for rank in range(RANKS):
        assert sorted(step[rank] for step in held) == list(range(RANKS))  # every key once
    for step in held:
        assert sorted(step) == list(range(RANKS))  # no block is on two ranks
    for now, then in itertools.pairwise(held):
        assert all(then[(rank + 1) % RANKS] == now[rank] for rank in range(RANKS))
    with open("ring_of_keys.svg", "w", encoding="utf-8") as file:
        file.write(draw(held))
    for number, step in enumerate(held):
        print(f"step {number}: ranks 0 to {RANKS - 1} have the keys and values of {step}")


if __name__ == "__main__":
    main()
