"""Draws the sums of each rank after every step of a ring, and the chunk that it sends next.

The program simulates ring_all_reduce with tuples instead of numbers. A tuple contains the ranks
whose contributions are in a chunk. The program checks that no contribution is added twice, that
each rank has one finished chunk after n-1 steps, and all chunks after 2(n-1) steps.
In the picture, a column is a rank, a row is a chunk, and a stripe is a summand. The square with
a frame is sent to the right neighbour in the next step.
"""

import re
from itertools import pairwise

N = 4
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK, MUTED = "#1f2937", "#52525b"
CELL, PITCH = 23, 25

State = list[list[tuple[int, ...]]]  # [rank][chunk]: the ranks whose contributions it contains


def play() -> list[tuple[State, list[int | None]]]:
    """The state before each step and at the end, and the chunk that each rank sends next."""
    state = [[(rank,) for _ in range(N)] for rank in range(N)]
    history = []
    for step in range(2 * (N - 1)):
        gathering, k = step >= N - 1, step % (N - 1)
        outgoing = [(rank - k + gathering) % N for rank in range(N)]
        history.append(([list(chunks) for chunks in state], outgoing))
        sent = [state[rank][chunk] for rank, chunk in enumerate(outgoing)]
        for rank in range(N):
            left = (rank - 1) % N
            chunk = outgoing[left]
            if gathering:
                state[rank][chunk] = sent[left]
            else:
                state[rank][chunk] += sent[left]
    history.append((state, [None] * N))
    return history


def text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "middle") -> str:
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def grid(left: float, top: float, state: State, outgoing: list[int | None]) -> str:
    parts = []
    for rank, chunks in enumerate(state):
        x = left + rank * PITCH
        parts.append(text(x + CELL / 2, top - 5, str(rank), MUTED, 12))
        for chunk, summands in enumerate(chunks):
            y = top + chunk * PITCH
            for i, source in enumerate(sorted(summands)):
                width = CELL / len(summands)
                parts.append(
                    f'<rect x="{x + i * width:g}" y="{y}" width="{width:g}" height="{CELL}" '
                    f'fill="{COLOURS[source]}" fill-opacity="0.75"/>'
                )
            if chunk == outgoing[rank]:
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="none" '
                    f'stroke="{INK}" stroke-width="3"/>'
                )
    return "\n".join(parts)


def draw(history: list[tuple[State, list[int | None]]]) -> str:
    across, panel_width, panel_height = 4, 121, 148
    titles = ["start", *(f"after {i}" for i in range(1, len(history)))]
    titles[N - 1] += ": half-way"
    titles[-1] += ": end"
    height = -(-len(history) // across) * panel_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 {height}" '
        'font-family="system-ui, sans-serif">'
    ]
    for i, ((state, outgoing), title) in enumerate(zip(history, titles, strict=True)):
        left, top = 2 + i % across * panel_width, i // across * panel_height
        parts.append(text(left, top + 16, title, INK, 15, "start"))
        parts.append(grid(left, top + 40, state, outgoing))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    history = play()
    everyone = list(range(N))
    halfway, end = history[N - 1][0], history[-1][0]
    finished = [[c for c in everyone if sorted(halfway[r][c]) == everyone] for r in everyone]
    assert finished == [[(r + 1) % N] for r in range(N)]
    assert all(sorted(chunk) == everyone for chunks in end for chunk in chunks)  # none twice
    for (_, outgoing), (_, following) in pairwise(history[:-1]):
        assert following == [outgoing[r - 1] for r in range(N)]  # the chunk just received
    assert re.findall(r">(\d)</text>", grid(0, 0, *history[0])) == list("0123")  # the ranks
    with open("ring_steps.svg", "w", encoding="utf-8") as file:
        file.write(draw(history))
    print(f"{N} ranks, {len(history) - 1} steps, one chunk sent by each rank in each")
    owners = ", ".join(f"chunk {chunks[0]} on rank {r}" for r, chunks in enumerate(finished))
    print(f"finished after step {N - 1}: {owners}")
    print(f"finished after step {len(history) - 1}: all chunks on all ranks")


if __name__ == "__main__":
    main()
