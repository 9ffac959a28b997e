"""A branch costs a warp the instructions of each side that at least one of its lanes takes.

A small model of a SIMT machine counts the instructions that it issues. A warp issues one
instruction at a time for its 32 lanes. At a branch it runs one side after the other, and the
lanes of the other side are switched off. A loop runs until its last lane has finished. Look
at the column `issued`: a branch between warps costs nothing, and a branch inside a warp
doubles the instructions. The program draws divergence.svg.
"""

import random
from collections.abc import Callable

LANES = 32
INK, MUTED, BLUE = "#1f2937", "#52525b", "#0b6e99"


# --8<-- [start:warp]
class Warp:
    """32 lanes: each instruction is issued once, for the lanes that the mask switches on."""

    def __init__(self, first: int):
        self.threads = range(first, first + LANES)  # their indices in the grid
        self.mask = [True] * LANES
        self.issued = 0  # instructions of this warp
        self.useful = 0  # lanes that were switched on, summed over all instructions
        self.trace: list[list[bool]] = []  # the mask of each instruction

    def work(self, instructions: int = 1) -> None:
        self.issued += instructions
        self.useful += instructions * sum(self.mask)
        self.trace += [self.mask] * instructions

    def branch(self, condition: Callable[[int], bool], then: Callable, other: Callable) -> None:
        outer, side = self.mask, [bool(condition(thread)) for thread in self.threads]
        for wanted, body in ((True, then), (False, other)):
            self.mask = [on and s == wanted for on, s in zip(outer, side, strict=True)]
            if any(self.mask):  # a side that no lane takes is skipped
                body()
        self.mask = outer  # here the lanes meet again

    def loop(self, trips: Callable[[int], int], body: Callable) -> None:
        outer, trip = self.mask, 0
        lanes = list(zip(outer, map(trips, self.threads), strict=True))
        while any(mask := [on and trip < length for on, length in lanes]):
            self.mask = mask
            body()
            trip += 1
        self.mask = outer


# --8<-- [end:warp]


def run(kernel: Callable[[Warp], None], threads: int = 1024) -> tuple[int, float]:
    """Run `kernel` for all warps; return the instructions and the fraction of lanes at work."""
    warps = [Warp(first) for first in range(0, threads, LANES)]
    for warp in warps:
        kernel(warp)
    issued = sum(warp.issued for warp in warps)
    return issued, sum(warp.useful for warp in warps) / (LANES * issued)


def two_sides(condition: Callable[[int], bool]) -> Callable[[Warp], None]:
    """`if` with ten instructions on each side."""
    return lambda warp: warp.branch(condition, lambda: warp.work(10), lambda: warp.work(10))


def switch(cases: int) -> Callable[[Warp], None]:
    """`switch (thread % cases)` with ten instructions in each case."""

    def kernel(warp: Warp) -> None:
        def case(c: int) -> None:
            if c < cases:
                this, ten = lambda thread: thread % cases == c, lambda: warp.work(10)
                warp.branch(this, ten, lambda: case(c + 1))

        case(0)

    return kernel


def strip(top: float, words: str, trace: list[list[bool]]) -> list[str]:
    """One warp: a row for each instruction, a square for each lane."""
    parts = [f'<text x="8" y="{top}" fill="{INK}">{words}</text>']
    for row, mask in enumerate(trace):
        for lane, on in enumerate(mask):
            x, y = 8 + 22 * lane, top + 12 + 20 * row
            look = f'fill="{BLUE}"' if on else f'fill="none" stroke="{MUTED}"'
            parts.append(f'<rect x="{x}" y="{y}" width="16" height="14" {look}/>')
    return parts


def draw() -> str:
    """The SVG: the lanes that work in two branches, with two instructions on each side."""
    parts, top = [], 20
    for words, side in (
        ("if (thread / 32 % 2): all lanes of warp 1 take the same side", lambda t: t // 32 % 2),
        ("if (thread % 2): the lanes of warp 1 take both sides", lambda t: t % 2),
    ):
        warp = Warp(LANES)
        warp.branch(side, lambda w=warp: w.work(2), lambda w=warp: w.work(2))
        parts += strip(top, f"{words}, {warp.issued} instructions", warp.trace)
        top += 32 + 20 * warp.issued + 14
    parts.append(
        f'<text x="8" y="{top - 4}" fill="{MUTED}">one row: an instruction; one box: a lane; '
        "filled: the lane works; empty: it is switched off</text>"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {top + 6}" '
    return "\n".join(
        [head + 'font-family="system-ui, sans-serif" font-size="15">', *parts, "</svg>", ""]
    )


def main() -> None:
    random.seed(0)
    lengths = [random.randint(1, 64) for _ in range(1024)]  # work of each thread
    ordered = sorted(lengths)

    sides = {  # which side each thread takes
        "no branch, 10 instructions": lambda thread: True,
        "if (thread < 512)": lambda thread: thread < 512,
        "if (thread / 32 % 2)": lambda thread: thread // 32 % 2,
        "if (thread % 2)": lambda thread: thread % 2,
        "if (thread % 32 == 0)": lambda thread: thread % 32 == 0,
        "switch (thread % 8)": lambda thread: thread % 8,
        "switch (thread % 32)": lambda thread: thread % 32,
    }
    kernels = {
        "no branch, 10 instructions": lambda warp: warp.work(10),
        **{name: two_sides(side) for name, side in sides.items() if name.startswith("if")},
        "switch (thread % 8)": switch(8),
        "switch (thread % 32)": switch(32),
        "for 1 to 64 trips, any order": lambda w: w.loop(lengths.__getitem__, w.work),
        "for 1 to 64 trips, sorted": lambda w: w.loop(ordered.__getitem__, w.work),
    }
    print("1,024 threads in 32 warps        issued   lanes at work")
    results = {}
    for name, kernel in kernels.items():
        results[name] = run(kernel)
        print(f"{name:30} {results[name][0]:8,} {results[name][1]:14.1%}")

    # a branch costs a warp each side that at least one of its lanes takes
    for name, side in sides.items():
        taken = [len(set(map(side, range(i, i + LANES)))) for i in range(0, 1024, LANES)]
        assert 10 * sum(taken) == results[name][0]
    # a branch or a loop inside a branch keeps the outer mask; after it, all lanes work again
    odd, quarter = (lambda thread: thread % 2), (lambda thread: thread % 4 == 1)

    def nested(w: Warp) -> None:
        w.branch(odd, lambda: two_sides(quarter)(w), lambda: w.loop(lambda thread: 2, w.work))
        w.work()

    issued, at_work = run(nested)
    assert issued == 32 * (10 + 10 + 2 + 1)
    assert at_work == (8 * 10 + 8 * 10 + 16 * 2 + 32) / (32 * 23)
    print("each branch issues the sum over warps of the sides taken: equal")
    # a loop costs a warp the trips of its longest lane
    for trips, words in ((lengths, "any order"), (ordered, "sorted")):
        longest = [max(trips[i : i + LANES]) for i in range(0, 1024, LANES)]
        assert sum(longest) == results[f"for 1 to 64 trips, {words}"][0]
    print(f"sum of trips {sum(lengths):,} / 32 lanes = {sum(lengths) / 32:.0f} at best")
    print("each loop issues the sum over warps of the longest lane: equal")
    with open("divergence.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
