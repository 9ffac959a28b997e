"""A picture of a weight sync that hangs: two sampler ranks start it at different tokens.

A simulation lets each rank enter its collectives in order. A rank leaves an all-gather or an
all-reduce when all ranks of the group have entered it. A broadcast has three variants:

    direct    the root waits for all receivers, and a receiver waits for the root (gloo)
    ring      rank 0 sends to rank 3, and rank 3 passes the data on to rank 2
    buffered  like direct, but the root does not wait, because its data fit into a buffer

If nothing can happen any more, the program follows who waits for whom. Draws
sync_order_picture.svg.
"""

from typing import NamedTuple

TOKENS = 5
GROUPS = {"gather": (0, 1), "send": (0, 2, 3), "token": (2, 3)}
NEEDED_TO_SEND = {  # for each rank: the ranks that must also be in the broadcast
    "direct": {0: (2, 3), 2: (0,), 3: (0,)},
    "ring": {0: (3,), 2: (3, 0), 3: (0, 2)},
    "buffered": {0: (), 2: (0,), 3: (0,)},
}
INK, MUTED, RED = "#1f2937", "#52525b", "#b91c1c"
COLOURS = {"gather": "#15803d", "send": "#c2410c", "token": "#0b6e99"}  # of the three groups


class Call(NamedTuple):
    group: str  # a key of GROUPS
    number: int  # of the bucket or the token


def calls_of(rank: int, start: int, buckets: int) -> list[Call]:
    """The collectives of a rank. A sampler rank receives the weights before token `start`."""
    sends = [Call("send", bucket) for bucket in range(buckets)]
    gathers = [Call("gather", bucket) for bucket in range(buckets)]
    if rank == 0:
        return [call for pair in zip(gathers, sends, strict=True) for call in pair]
    if rank == 1:
        return gathers
    tokens = [Call("token", token) for token in range(TOKENS)]
    return tokens[:start] + sends + tokens[start:]


def missing(call: Call, rank: int, entered: list[list[Call]], variant: str) -> list[int]:
    """The ranks that must enter a call before `rank` can leave it."""
    needed = GROUPS[call.group]
    if call.group == "send":
        needed = NEEDED_TO_SEND[variant][rank]
    return [peer for peer in needed if call not in entered[peer]]


def simulate(programs: list[list[Call]], variant: str) -> tuple[list[int], list[list[int]]]:
    """Return how many calls each rank has completed, and for which ranks each rank waits."""
    completed, ranks = [0] * len(programs), range(len(programs))
    while True:
        entered = [programs[rank][: completed[rank] + 1] for rank in ranks]
        waits = [
            missing(programs[rank][completed[rank]], rank, entered, variant)
            if completed[rank] < len(programs[rank])
            else []
            for rank in ranks
        ]
        moves = [r for r in ranks if completed[r] < len(programs[r]) and not waits[r]]
        if not moves:
            return completed, waits
        for rank in moves:
            completed[rank] += 1


def cycle(waits: list[list[int]], rank: int) -> list[int]:
    """Follow who waits for whom from a rank, until a rank appears again."""
    path = [rank]
    while waits[path[-1]] and path.count(path[-1]) == 1:
        path.append(waits[path[-1]][0])
    return path


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw(cases: dict[str, tuple[list[list[Call]], list[int], list[list[int]]]]) -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 744 344" '
        'font-family="system-ui, sans-serif">'
    ]
    names = ["trainer 0", "trainer 1", "sampler 2", "sampler 3"]
    for panel, (title, (programs, completed, waits)) in enumerate(cases.items()):
        top = 8 + 160 * panel
        parts.append(draw_text(2, top + 12, title, INK, 15))
        for rank, program in enumerate(programs):
            y = top + 24 + 30 * rank
            parts.append(draw_text(2, y + 17, names[rank], MUTED))
            for index, call in enumerate(program[: completed[rank] + 1]):
                x, stuck = 78 + 74 * index, index == completed[rank]
                colour = RED if stuck else COLOURS[call.group]
                dashes = ' stroke-dasharray="4 3"' if stuck else ""
                parts.append(
                    f'<rect x="{x}" y="{y}" width="70" height="24" rx="3" fill="{colour}" '
                    f'fill-opacity="0.14" stroke="{colour}"{dashes}/>'
                )
                parts.append(draw_text(x + 6, y + 17, f"{call.group} {call.number}"))
            if waits[rank]:
                x = 78 + 74 * (completed[rank] + 1) + 4
                parts.append(draw_text(x, y + 17, f"waits for rank {waits[rank][0]}", RED))
    return "\n".join([*parts, "</svg>", ""])


def check_variants() -> None:
    """Test each variant of the broadcast in three situations whose results are known."""
    for variant in NEEDED_TO_SEND:
        together = [calls_of(rank, 2, 1) for rank in range(4)]
        completed, _ = simulate(together, variant)
        assert completed == [len(calls) for calls in together], "no rank is late: all finish"
        completed, _ = simulate([[], *together[1:]], variant)
        assert completed == [0, 0, 2, 2], "no rank receives anything if rank 0 never sends"
        zero, one, _, three = (calls_of(rank, 0, 1) for rank in range(4))
        completed, _ = simulate([zero, one, [], three], variant)
        assert (  # rank 2 never receives
            completed
            == {"direct": [1, 1, 0, 1], "ring": [2, 1, 0, 0], "buffered": [2, 1, 0, 1]}[variant]
        )


def main() -> None:
    check_variants()
    cases, reports = {}, {}
    for title, starts, buckets, variant in (
        ("Both sampler ranks start the sync before token 2: all finish", (2, 2), 2, "direct"),
        ("Rank 3 would start one token later: no rank can continue", (2, 3), 2, "direct"),
        ("The same with one bucket: all finish", (2, 3), 1, "direct"),
        ("The same with one bucket in a ring: three ranks wait", (2, 3), 1, "ring"),
        ("The same with two buckets that fit into a buffer: all finish", (2, 3), 2, "buffered"),
    ):
        programs = [calls_of(rank, (0, 0, *starts)[rank], buckets) for rank in range(4)]
        completed, waits = simulate(programs, variant)
        if len(cases) < 2:  # the picture shows the first two cases
            cases[title] = programs, completed, waits
        reports[title] = [
            programs[rank][completed[rank]] if waits[rank] else None for rank in range(4)
        ]
        print(title)
        for rank in range(4):
            call = reports[title][rank]
            where = (
                f"waits in {call.group} {call.number} for {waits[rank]}" if call else "finished"
            )
            print(f"  rank {rank} {where}")
        print("  cycle:", " -> ".join(map(str, cycle(waits, 0))) if waits[0] else "none")
    with open("sync_order_picture.svg", "w", encoding="utf-8") as file:
        file.write(draw(cases))
    fine, hang, small, ring, buffered = reports.values()
    assert fine == small == buffered == [None] * 4
    assert ring == [Call("send", 0), None, Call("send", 0), Call("token", 2)]
    # the same places as in the real run of sync_order_hang.py
    assert hang == [Call("send", 0), Call("gather", 1), Call("send", 1), Call("token", 2)]
    waits = list(cases.values())[1][2]
    assert cycle(waits, 0) == [0, 3, 2, 0] and cycle(waits, 1) == [1, 0, 3, 2, 0]


if __name__ == "__main__":
    main()
