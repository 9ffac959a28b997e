"""What branches cost a warp: a SIMT machine in forty lines that counts what it issues.

A warp has one instruction stream for its 32 lanes. At a branch it runs each side that any lane
wants, with the other lanes switched off; a loop runs until its last lane is done.
"""

from collections.abc import Callable

import torch

LANES = 32


# --8<-- [start:warp]
class Warp:
    """32 lanes in lockstep: every instruction is issued once, for the lanes of the mask."""

    def __init__(self, threads: torch.Tensor):
        self.threads = threads  # [32] number of each thread in the grid
        self.mask = torch.ones(LANES, dtype=torch.bool)
        self.issued = 0  # instructions of this warp
        self.useful = 0  # lanes that took part, summed over instructions

    def work(self, instructions: int = 1) -> None:
        self.issued += instructions
        self.useful += instructions * int(self.mask.sum())

    def branch(self, condition: torch.Tensor, then: Callable, otherwise: Callable) -> None:
        outer = self.mask
        for side, body in ((condition, then), (~condition, otherwise)):
            self.mask = outer & side
            if self.mask.any():  # a side that no lane takes is skipped
                body()
        self.mask = outer  # here the lanes meet again

    def loop(self, trips: torch.Tensor, body: Callable) -> None:
        outer, trip = self.mask, 0
        while (self.mask & (trips > trip)).any():
            self.mask = self.mask & (trips > trip)
            body()
            trip += 1
        self.mask = outer


# --8<-- [end:warp]


def run(kernel: Callable[[Warp], None], threads: int = 1024) -> tuple[int, float]:
    """Issue `kernel` for all warps; return instructions, and the share of lanes at work."""
    warps = [Warp(torch.arange(i, i + LANES)) for i in range(0, threads, LANES)]
    for warp in warps:
        kernel(warp)
    issued = sum(warp.issued for warp in warps)
    return issued, sum(warp.useful for warp in warps) / (LANES * issued)


def two_sides(condition: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Warp], None]:
    """`if` with ten instructions on each side."""
    return lambda warp: warp.branch(
        condition(warp.threads), lambda: warp.work(10), lambda: warp.work(10)
    )


def switch(cases: int) -> Callable[[Warp], None]:
    """`switch (thread % cases)` with ten instructions in each case."""

    def kernel(warp: Warp) -> None:
        def case(c: int) -> None:
            if c < cases:
                warp.branch(
                    warp.threads % cases == c, lambda: warp.work(10), lambda: case(c + 1)
                )

        case(0)

    return kernel


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (1024,), generator=generator)  # work of each thread
    sorted_lengths = lengths.sort().values

    kernels = {
        "no branch, 10 instructions": lambda warp: warp.work(10),
        "if (thread < 512)": two_sides(lambda thread: thread < 512),
        "if (thread / 32 % 2)": two_sides(lambda thread: thread // 32 % 2 == 1),
        "if (thread % 2)": two_sides(lambda thread: thread % 2 == 1),
        "if (thread % 32 == 0)": two_sides(lambda thread: thread % 32 == 0),
        "switch (thread % 8)": switch(8),
        "switch (thread % 32)": switch(32),
        "for 1 to 64 trips, any order": lambda warp: warp.loop(
            lengths[warp.threads], warp.work
        ),
        "for 1 to 64 trips, sorted": lambda warp: warp.loop(
            sorted_lengths[warp.threads], warp.work
        ),
    }
    print("1,024 threads in 32 warps        issued   lanes at work")
    results = {}
    for name, kernel in kernels.items():
        results[name] = run(kernel)
        print(f"{name:30} {results[name][0]:8,} {results[name][1]:14.1%}")

    # a loop costs a warp its longest lane
    for order, words in ((lengths, "any order"), (sorted_lengths, "sorted")):
        longest = order.view(-1, LANES).amax(1)  # [32 warps]
        assert int(longest.sum()) == results[f"for 1 to 64 trips, {words}"][0]
    print(f"sum of trips {int(lengths.sum()):,} / 32 lanes = {lengths.sum() / 32:.0f} at best")
    print("each loop issues the sum over warps of the longest lane: equal")


if __name__ == "__main__":
    main()
