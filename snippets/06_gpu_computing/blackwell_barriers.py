"""A model of the barriers of blackwell.cu visits every order of events and finds 14 mistakes.

In each block of the cluster, a producer requests tiles from TMA, a multiplier starts products,
and storing warps take the sums out of tensor memory. TMA, the tensor cores and the signals to
the other block continue by themselves. The program visits every state that a small case can
reach. The model really multiplies small integers, so a wrong order also shows as a wrong
element of C. Look at the second table: each line is one wrong version of the kernel, with the
smallest number of steps that leads to an error.
"""

from collections import deque
from typing import NamedTuple

Instruction = tuple  # its name, then its operands
A = ((2, 3, 4), (5, 7, 8))
B = (
    (1, 4, 6, 9, 15, 22, 34, 51),
    (3, 8, 13, 19, 27, 40, 56, 77),
    (2, 9, 5, 14, 23, 31, 44, 60),
)


class Wrong(Exception):
    """A state that must not occur, such as a tile that is overwritten while it is read."""


class Barrier(NamedTuple):
    """An mbarrier. When no arrival and no data is missing, a phase ends and the next begins."""

    phase: int
    missing: int  # arrivals of this phase that have not come
    announced: int  # parts that expect_tx announced and TMA has not written
    count: int

    def changed(self, arrivals: int, announced: int) -> "Barrier":
        missing, announced = self.missing - arrivals, self.announced + announced
        if (missing, announced) == (0, 0):
            return Barrier(self.phase + 1, self.count, 0, self.count)
        return Barrier(self.phase, missing, announced, self.count)

    def over(self, parity: int) -> bool:
        """What try_wait.parity returns: whether the latest phase of this parity is over."""
        return self.phase % 2 != parity


class Block(NamedTuple):
    at: tuple[int, ...]  # the next step of the producer, the multiplier, each storing warp
    full: tuple[Barrier, ...]
    empty: tuple[Barrier, ...]
    sums_full: tuple[Barrier, ...]
    sums_empty: tuple[Barrier, ...]
    end: tuple[Barrier]  # __syncthreads() at the end
    memory: tuple[tuple[int, int, int], ...]  # of each stage an element of A and two of B
    sums: tuple[tuple[int, int], ...]  # each tile of tensor memory: two elements of C
    queue: tuple[Instruction, ...]  # what the tensor cores still have to do, in this order
    reading: tuple[int, ...]  # for each tile of sums, the warps that are reading it
    freed: bool


class State(NamedTuple):
    blocks: tuple[Block, ...]
    flights: frozenset[tuple]  # TMA will write: in block, in stage, elements by place
    signals: frozenset[tuple]  # the tensor cores will arrive: at block, barrier, index, number


# --8<-- [start:design]
class Design(NamedTuple):
    blocks: int = 2
    stages: int = 2
    steps: int = 2  # of k
    tiles: int = 3
    halves: int = 2  # tiles of sums in tensor memory
    storers: int = 1
    empty_from: int = 2  # arrivals that end a phase of `empty`, one from each block
    both: bool = True  # commit arrives at `empty` of both blocks
    announced: int = 3  # parts of a stage: A, and two halves of B
    producer_parity: int = 1  # in turn 0
    multiplier_flips: bool = True
    multiplier_waits: bool = True  # for sums_empty
    empty_by_commit: bool = True  # else by mbarrier.arrive
    commits_sums: bool = True
    clears: bool = True  # the first product of a tile does not add to old sums
    storer_flips: bool = True
    all_storers: bool = True  # a phase of sums_empty needs every storing warp
    take_then_arrive: bool = True
    tail: bool = True  # the producer waits for the last signals
    frees_last: bool = True


# --8<-- [end:design]


def programs(d: Design) -> list[list[tuple[Instruction, ...]]]:
    """The steps of each thread of a block. Only the first instruction of a step may wait."""
    producer, multiplier, storer = [], [], []
    # --8<-- [start:roles]
    for tile in range(d.tiles):
        half, turn = tile % d.halves, tile // d.halves
        waits = ("wait", "sums_empty", half, (1 + turn) % 2)
        multiplier += [(waits,)] if d.multiplier_waits else []
        for k in range(d.steps):
            i = tile * d.steps + k
            stage, use = i % d.stages, i // d.stages
            free = ("wait", "empty", stage, (d.producer_parity + use) % 2)
            producer += [(free, ("fill", stage, tile, k))]
            here = ("wait", "full", stage, use * d.multiplier_flips % 2)
            product = ("multiply", stage, half, k > 0 or not d.clears)
            release = ("commit", "empty", stage, d.both)
            if not d.empty_by_commit:
                release = ("arrive", "empty", stage)
            multiplier += [(here, product, release)]
        multiplier += [(("commit", "sums_full", half, False),)] if d.commits_sums else []
        ready = ("wait", "sums_full", half, turn * d.storer_flips % 2)
        taken, arrive = ("taken", half, tile), ("arrive", "sums_empty", half)
        last = [(taken, arrive)] if d.take_then_arrive else [(arrive,), (taken,)]
        storer += [(ready, ("take", half)), *last]
    # --8<-- [end:roles]
    for i in range(d.tiles * d.steps, d.tiles * d.steps + d.stages * d.tail):
        stage, use = i % d.stages, i // d.stages
        producer += [(("wait", "empty", stage, (d.producer_parity + use) % 2),)]
    arrive, wait, free = ("arrive", "end", 0), ("wait", "end", 0, 0), ("free",)
    multiplier += [(arrive,), (wait, free)] if d.frees_last else [(free, arrive), (wait,)]
    return [[*producer, (arrive,)], multiplier, *[[*storer, (arrive,)]] * d.storers]


def replaced(things: tuple, at: int, thing) -> tuple:
    return (*things[:at], thing, *things[at + 1 :])


def arrived(s: State, who: int, which: str, index: int, announced: int = 0) -> State:
    """The state after one arrival at a barrier of block `who`."""
    block = s.blocks[who]
    barriers = getattr(block, which)
    changed = replaced(barriers, index, barriers[index].changed(1, announced))
    return s._replace(blocks=replaced(s.blocks, who, block._replace(**{which: changed})))


# --8<-- [start:step]
def step(s: State, who: int, instruction: Instruction, d: Design) -> State | None:
    """The state after an instruction of a thread of block `who`; None if it must wait."""
    block = s.blocks[who]
    match instruction:
        case "wait", which, index, parity:
            return s if getattr(block, which)[index].over(parity) else None
        case "arrive", which, index:
            return arrived(s, who, which, index)
        case "fill", stage, tile, k:
            s = arrived(s, who, "full", stage, d.announced)
            for to in range(d.blocks):  # A and half of B here, the same half of B over there
                if any(op[:2] == ("multiply", stage) for op in s.blocks[to].queue):
                    raise Wrong("a tile is written while a product reads it")
                parts = {1 + who: B[k][2 * tile + who]}
                if to == who:
                    parts[0] = A[who][k]
                if d.blocks == 1:
                    parts[2] = B[k][2 * tile + 1]
                s = s._replace(flights=s.flights | {(to, stage, tuple(parts.items()))})
            return s
        case ("multiply", _, half, _) | ("take", half):
            if block.freed:
                raise Wrong("tensor memory is used after it was freed")
            if instruction[0] == "take":
                reading = replaced(block.reading, half, block.reading[half] + 1)
                block = block._replace(reading=reading)
            else:
                if block.reading[half]:
                    raise Wrong("sums are overwritten while a warp reads them")
                block = block._replace(queue=(*block.queue, instruction))
        case "commit", *_:
            block = block._replace(queue=(*block.queue, instruction))
        case "taken", half, tile:
            if block.freed:
                raise Wrong("tensor memory is freed while a warp reads it")
            for j, found in enumerate(block.sums[half]):
                c = sum(A[who][k] * B[k][2 * tile + j] for k in range(d.steps))
                if found != c:
                    raise Wrong(f"C[{who}][{2 * tile + j}] is {found}, not {c}")
            block = block._replace(
                reading=replaced(block.reading, half, block.reading[half] - 1)
            )
        case ("free",):
            if block.queue or any(block.reading):
                raise Wrong("tensor memory is freed while it is used")
            block = block._replace(freed=True)
    return s._replace(blocks=replaced(s.blocks, who, block))


# --8<-- [end:step]


def land(s: State, flight: tuple) -> State:
    """The state after TMA has written a part of a stage and reported it to the barrier."""
    to, stage, parts = flight
    block = s.blocks[to]
    memory = block.memory[stage]
    for place, element in parts:
        memory = replaced(memory, place, element)
    full = replaced(block.full, stage, block.full[stage].changed(0, -len(parts)))
    block = block._replace(memory=replaced(block.memory, stage, memory), full=full)
    return State(replaced(s.blocks, to, block), s.flights - {flight}, s.signals)


def product(s: State, who: int, d: Design) -> State:
    """The state after the oldest product of a block is complete and its commits arrived."""
    block = s.blocks[who]
    first, *queue = block.queue
    if first[0] == "multiply":
        _, stage, half, add = first
        a, *b = block.memory[stage]
        old = block.sums[half] if add else (0, 0)
        sums = replaced(block.sums, half, tuple(x + a * y for x, y in zip(old, b, strict=True)))
        block = block._replace(sums=sums)
    else:
        queue = [first, *queue]
    commits = []
    while queue and queue[0][0] == "commit":
        commits.append(queue.pop(0))
    s = s._replace(blocks=replaced(s.blocks, who, block._replace(queue=tuple(queue))))
    for _, which, index, both in commits:
        s = arrived(s, who, which, index)
        if both and d.blocks == 2:
            number = sum(signal[:3] == (1 - who, which, index) for signal in s.signals)
            s = s._replace(signals=s.signals | {(1 - who, which, index, number)})
    return s


# --8<-- [start:explore]
def explore(d: Design) -> tuple[int, int]:
    """Visit every state. Return the number of states and the largest overlap.

    The overlap is the number of blocks in which products write one tile of sums while warps
    read the other. Raises Wrong with the smallest number of steps that leads to a mistake.
    """
    threads = programs(d)

    def barriers(number: int, count: int) -> tuple[Barrier, ...]:
        return (Barrier(0, count, 0, count),) * number

    block = Block(
        at=(0,) * len(threads),
        full=barriers(d.stages, 1),
        empty=barriers(d.stages, d.empty_from),
        sums_full=barriers(d.halves, 1),
        sums_empty=barriers(d.halves, d.storers if d.all_storers else 1),
        end=barriers(1, len(threads)),
        memory=((0, 0, 0),) * d.stages,
        sums=((0, 0),) * d.halves,
        queue=(),
        reading=(0,) * d.halves,
        freed=False,
    )
    ends = tuple(map(len, threads))
    start = State((block,) * d.blocks, frozenset(), frozenset())
    steps, queue, overlap = {start: 0}, deque([start]), 0
    while queue:
        s = queue.popleft()
        try:
            after = following(s, threads, ends, d)
        except Wrong as wrong:
            raise Wrong(f"{steps[s]:4}  {wrong}") from None
        overlap = max(overlap, sum(any(b.reading) and bool(b.queue) for b in s.blocks))
        for each in after:
            if each not in steps:
                steps[each] = steps[s] + 1
                queue.append(each)
    return len(steps), overlap


def following(s: State, threads: list, ends: tuple[int, ...], d: Design) -> list[State]:
    """Every state that can come next."""
    for to, *_ in (*s.flights, *s.signals):
        if s.blocks[to].at == ends:
            raise Wrong("a block that has ended still receives")
    after = [land(s, flight) for flight in s.flights]
    for signal in s.signals:
        to, which, index, _ = signal
        after.append(arrived(s._replace(signals=s.signals - {signal}), to, which, index))
    for who, block in enumerate(s.blocks):
        if block.queue:
            after.append(product(s, who, d))
        for thread, (at, todo) in enumerate(zip(block.at, threads, strict=True)):
            if at < len(todo):
                new = s
                for instruction in todo[at]:
                    new = new and step(new, who, instruction, d)
                if new:
                    moved = replaced(new.blocks[who].at, thread, at + 1)
                    block_ = new.blocks[who]._replace(at=moved)
                    after.append(new._replace(blocks=replaced(new.blocks, who, block_)))
    if not after and any(block.at != ends for block in s.blocks):
        raise Wrong("threads wait forever")
    assert after or all(block.freed for block in s.blocks)
    return after


# --8<-- [end:explore]

ONE = {"blocks": 1, "empty_from": 1, "storers": 2, "tiles": 4}  # a block alone, two warps store
TWO = {"stages": 1, "tiles": 1}  # a cluster
FAULTS = {  # what is wrong, how, in which case, what happens
    "the producer begins with parity 0": ({"producer_parity": 0}, ONE, "wait forever"),
    "the multiplier never flips its parity": (
        {"multiplier_flips": False},
        ONE,
        "a tile is written",
    ),
    "the storing warps never flip theirs": ({"storer_flips": False}, ONE, "C["),
    "the first product of a tile adds": ({"clears": False}, ONE, "C["),
    "arrive instead of commit for a stage": (
        {"empty_by_commit": False},
        ONE,
        "a tile is written",
    ),
    "no commit at the end of a tile": ({"commits_sums": False}, ONE, "wait forever"),
    "no wait for the storing warps": ({"multiplier_waits": False}, ONE, "sums are over"),
    "arrival before the sums are taken": ({"take_then_arrive": False}, ONE, "sums are over"),
    "one storing warp releases the sums": ({"all_storers": False}, ONE, "sums are over"),
    "tensor memory is freed early": ({"frees_last": False}, ONE, "freed"),
    "the other block's B is not announced": ({"announced": 2}, TWO, "a tile is written"),
    "commit without multicast": ({"both": False, "empty_from": 1}, TWO, "a tile is written"),
    "empty ends with the first arrival": ({"empty_from": 1}, TWO, "a tile is written"),
    "the producer leaves at once": ({"tail": False}, TWO, "that has ended"),
}


def main() -> None:
    print("blocks  stages  steps of k  tiles  tiles of sums  states  products while warps read")
    for change in (
        ONE | {"halves": 1},
        ONE,
        {"stages": 1, "tiles": 2},
        {"steps": 3, "tiles": 1},
    ):
        d = Design(**change)
        states, overlap = explore(d)
        # products overlap the reads where there is a second tile of sums, and a second tile
        assert overlap == (d.blocks if d.halves == 2 and d.tiles > 1 else 0)
        print(
            f"{d.blocks:6} {d.stages:7} {d.steps:11} {d.tiles:6} {d.halves:14} {states:7}"
            f"  in {overlap} of {d.blocks}"
        )
    print("\none thing wrong                        blocks  step  what happens")
    for name, (change, case, expected) in FAULTS.items():
        design = Design(**case | change)
        try:
            explore(design)
        except Wrong as wrong:
            assert expected in str(wrong), (name, wrong)
            print(f"{name:38} {design.blocks:6}  {wrong}")
        else:
            raise AssertionError(f"{name}: not found")


if __name__ == "__main__":
    main()
