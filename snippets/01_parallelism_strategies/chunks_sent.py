"""Shows which chunks each rank sends in each step, which explains the factor of a collective.

The program simulates ring algorithms like those of NCCL with sets instead of numbers. A set
contains the ranks whose contributions are in a chunk. In one step a rank sends at most one
chunk and receives at most one chunk. The program checks that a rank sends only what it has,
that no contribution is added twice, and that every rank ends with what the collective defines.
Compare the all-reduce in a ring with the all-reduce through rank 0.
"""

import re
from fractions import Fraction

N = 4
ALL = frozenset(range(N))
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK, MUTED = "#1f2937", "#52525b"
CELL, PITCH = 19, 21

Chunk = tuple[int, ...]  # the number of a chunk; in an all-to-all its source and its target
Send = tuple[int, int, Chunk]  # from rank, to rank, chunk
State = list[dict[Chunk, frozenset[int]]]  # [rank][chunk]: the contributions that it contains


def around_the_ring(first: int, steps: range) -> list[list[Send]]:
    """In each step, every rank sends a chunk to the right. Its first chunk is rank + first."""
    return [[(r, (r + 1) % N, ((r + first - k) % N,)) for r in range(N)] for k in steps]


def schedules() -> dict[str, list[list[Send]]]:
    """The sends of each step, for each algorithm."""
    half = range(N - 1)
    up = [[(r, 0, (c,))] for r in range(1, N) for c in range(N)]
    down = [[(0, r, (c,))] for r in range(1, N) for c in range(N)]
    pieces = [  # rank r sends piece k - r in step k, and the last rank sends nothing
        [(r, r + 1, (k - r,)) for r in range(N - 1) if 0 <= k - r < N] for k in range(2 * N - 2)
    ]
    return {
        "all-gather": around_the_ring(0, half),
        "reduce-scatter": around_the_ring(-1, half),
        "all-reduce": around_the_ring(-1, half) + around_the_ring(0, half),
        "all-to-all": [[(r, (r + k) % N, (r, (r + k) % N)) for r in ALL] for k in range(1, N)],
        "broadcast": pieces,
        "all-reduce through rank 0": up + down,
    }


def start_of(name: str) -> State:
    """The chunks of each rank before the collective."""
    if name == "all-gather":
        return [{(r,): frozenset({r})} for r in range(N)]
    if name == "all-to-all":
        return [{(r, c): frozenset({r}) for c in range(N)} for r in range(N)]
    if name == "broadcast":
        return [{(c,): frozenset({0}) for c in range(N)}, *({} for _ in range(1, N))]
    return [{(c,): frozenset({r}) for c in range(N)} for r in range(N)]


def end_of(name: str) -> State:
    """The chunks that each rank must have after the collective, from its definition."""
    if name == "all-gather":
        return [{(c,): frozenset({c}) for c in range(N)}] * N
    if name == "reduce-scatter":
        return [{(r,): ALL} for r in range(N)]
    if name == "all-to-all":
        return [{(s, r): frozenset({s}) for s in range(N)} for r in range(N)]
    if name == "broadcast":
        return [{(c,): frozenset({0}) for c in range(N)}] * N
    return [{(c,): ALL for c in range(N)}] * N


def play(name: str, steps: list[list[Send]]) -> list[list[frozenset[int]]]:
    """Make all sends. Return the contributions in each sent chunk. Fails on a wrong result."""
    state, sent = start_of(name), []
    for sends in steps:
        for ends in zip(*(send[:2] for send in sends), strict=True):
            assert len(set(ends)) == len(sends), f"{name}: two chunks of one rank in one step"
        sent.append([state[source][chunk] for source, _, chunk in sends])
        for (_, target, chunk), carried in zip(sends, sent[-1], strict=True):
            own = state[target].get(chunk, frozenset())
            assert carried == ALL or not own & carried, f"{name}: added twice"
            state[target][chunk] = own | carried
    for have, must in zip(state, end_of(name), strict=True):
        assert {chunk: have.get(chunk) for chunk in must} == must, name
    return sent


def chunks_of(steps: list[list[Send]]) -> list[int]:
    """The number of chunks that each rank sends."""
    return [sum(source == r for sends in steps for source, *_ in sends) for r in range(N)]


def text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "middle") -> str:
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def panel(left: float, top: float, name: str, steps: list[list[Send]]) -> str:
    """Draw a row for each rank, a column for each step, and a square for each sent chunk."""
    most = max(chunks_of(steps))
    words = f"{most} chunks: {most / N:g} S"
    if min(chunks_of(steps)) < most:
        words = f"at most {words}"
    parts = [text(left, top + 14, name, INK, 15, "start")]
    parts.append(text(left, top + 31, words, MUTED, 13, "start"))
    for rank in range(N):
        parts.append(text(left, top + 56 + rank * PITCH, f"rank {rank}", MUTED, 12, "start"))
    for step, (sends, sent) in enumerate(zip(steps, play(name, steps), strict=True)):
        for (rank, _, chunk), summands in zip(sends, sent, strict=True):
            x, y = left + 46 + step * PITCH, top + 42 + rank * PITCH
            width = CELL / len(summands)
            for i, source in enumerate(sorted(summands)):
                parts.append(
                    f'<rect x="{x + i * width:g}" y="{y}" width="{width:g}" height="{CELL}" '
                    f'fill="{COLOURS[source]}"/>'
                )
            parts.append(text(x + CELL / 2, y + 14, str(chunk[-1]), "#ffffff", 12))
    return "\n".join(parts)


def draw(played: dict[str, list[list[Send]]]) -> str:
    across, panel_width, panel_height = 3, 196, 146
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 580 {3 * panel_height}" '
        'font-family="system-ui, sans-serif">'
    ]
    *small, wide = played
    for index, name in enumerate(small):
        row, column = divmod(index, across)
        parts.append(panel(1 + column * panel_width, row * panel_height, name, played[name]))
    parts.append(panel(1, 2 * panel_height, wide, played[wide]))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    played = schedules()
    # nccl-tests: bus bandwidth is the size, divided by the time, times this factor
    factors = {
        "all-gather": Fraction(N - 1, N),
        "reduce-scatter": Fraction(N - 1, N),
        "all-reduce": Fraction(2 * (N - 1), N),
        "all-to-all": Fraction(N - 1, N),
        "broadcast": Fraction(1),
    }
    print(f"chunks that each of {N} ranks sends; a chunk is 1/{N} of the tensor")
    for name, steps in played.items():
        play(name, steps)
        chunks = chunks_of(steps)
        busiest = Fraction(max(chunks), N)
        print(f"  {name:26}{chunks!s:16}busiest {float(busiest):.2f} S, {len(steps)} steps")
        assert name not in factors or busiest == factors[name]
        # around the ring, a rank sends only to the next rank
        hops = {(target - source) % N for sends in steps for source, target, _ in sends}
        assert hops == ({1, 2, 3} if name in ("all-to-all", [*played][-1]) else {1}), name
    ring, through = (chunks_of(played[name]) for name in ("all-reduce", [*played][-1]))
    # Both send the same number of chunks. The ring is faster, because all ranks send at once.
    assert sum(ring) == sum(through) == 2 * (N - 1) * N and max(through) == N * (N - 1)
    # the numbers in the squares: step by step, and in each step from rank 0 to rank 3
    numbers = ["0123 3012 2301", "3012 2301 1230", "3012 2301 1230 0123 3012 2301"]
    numbers += ["1230 2301 3012", "0 10 210 321 32 3", "0123 0123 0123 0123 0123 0123"]
    assert re.findall(r">(\d)<", draw(played)) == list("".join(numbers).replace(" ", ""))
    with open("chunks_sent.svg", "w", encoding="utf-8") as file:
        file.write(draw(played))


if __name__ == "__main__":
    main()
