"""A model of the barriers of hopper.cu visits every order of events and finds seven mistakes.

A producer requests the two halves of a tile (A's and B's) from TMA. TMA writes a half at any
later time. Two consumers read the tile. The program visits every state that a small case can
reach, so it finds every race of this case. Then it changes one thing at a time and prints the
smallest number of steps that leads to an error.
"""

from collections import deque
from typing import NamedTuple

Instruction = tuple  # what, then its operands


class Wrong(Exception):
    """A state that must not occur, such as a tile that is overwritten while it is read."""


class Barrier(NamedTuple):
    """An mbarrier. When no arrival and no data is missing, a phase ends and the next begins."""

    phase: int
    missing: int  # arrivals of this phase that have not come
    announced: int  # halves that expect_tx announced and TMA has not written
    count: int

    def changed(self, arrivals: int, announced: int) -> "Barrier":
        missing, announced = self.missing - arrivals, self.announced + announced
        if (missing, announced) == (0, 0):
            return Barrier(self.phase + 1, self.count, 0, self.count)
        return Barrier(self.phase, missing, announced, self.count)

    def over(self, parity: int) -> bool:
        """What try_wait.parity returns: whether the latest phase of this parity is over."""
        return self.phase % 2 != parity


class State(NamedTuple):
    at: tuple[int, ...]  # the next instruction of the producer and of each consumer
    full: tuple[Barrier, ...]
    empty: tuple[Barrier, ...]
    memory: tuple[tuple[int, int], ...]  # of each stage the tile that each half belongs to
    flying: frozenset[tuple[int, int, int]]  # stage, half, tile
    reading: frozenset[tuple[int, int]]  # consumer, stage


# --8<-- [start:programs]
class Design(NamedTuple):
    stages: int = 2
    tiles: int = 5
    arrivals: int = 2  # they end a phase of `empty`, one of each consumer
    announced: int = 2  # halves that the producer announces to `full`
    first: int = 1  # the producer's parity in turn 0
    producer_flips: bool = True
    consumer_flips: bool = True
    read_then_arrive: bool = True


def programs(d: Design) -> list[list[Instruction]]:
    """The instructions of the producer and of each of the two consumers."""
    producer, consumer = [], []
    for tile in range(d.tiles):
        stage, turn = tile % d.stages, tile // d.stages
        producer += [
            ("wait", "empty", stage, (d.first + turn * d.producer_flips) % 2),
            ("arrive", "full", stage, d.announced),
            ("load", stage, 0, tile),
            ("load", stage, 1, tile),
        ]
        finish = [("finish", stage), ("arrive", "empty", stage, 0)]
        consumer += [
            ("wait", "full", stage, turn * d.consumer_flips % 2),
            ("read", stage, tile),  # wgmma is issued
            *(finish if d.read_then_arrive else reversed(finish)),  # wait_group, then arrive
        ]
    return [producer, consumer, consumer]


# --8<-- [end:programs]


def replaced(things: tuple, at: int, thing) -> tuple:
    return (*things[:at], thing, *things[at + 1 :])


def step(s: State, who: int, instruction: Instruction) -> State | None:
    """The state after this thread's next instruction; None if it must wait."""
    match instruction:
        case "wait", which, stage, parity:
            if not getattr(s, which)[stage].over(parity):
                return None
        case "arrive", which, stage, announced:
            barriers = getattr(s, which)
            changed = barriers[stage].changed(1, announced)
            s = s._replace(**{which: replaced(barriers, stage, changed)})
        case "load", stage, half, tile:
            if any(place == stage for _, place in s.reading):
                raise Wrong("overwritten while it is read")
            s = s._replace(flying=s.flying | {(stage, half, tile)})
        case "read", stage, tile:
            if max(s.memory[stage]) > tile or any(
                f[0] == stage and f[2] > tile for f in s.flying
            ):
                raise Wrong("overwritten before it is read")
            if s.memory[stage] != (tile, tile):
                raise Wrong("read before it has landed")
            s = s._replace(reading=s.reading | {(who, stage)})
        case "finish", stage:
            s = s._replace(reading=s.reading - {(who, stage)})
    return s._replace(at=replaced(s.at, who, s.at[who] + 1))


def land(s: State, flight: tuple[int, int, int]) -> State:
    """The state after TMA has written a half and reported it to the barrier."""
    stage, half, tile = flight
    memory = replaced(s.memory, stage, replaced(s.memory[stage], half, tile))
    full = replaced(s.full, stage, s.full[stage].changed(0, -1))
    return s._replace(memory=memory, full=full, flying=s.flying - {flight})


# --8<-- [start:explore]
def explore(d: Design) -> tuple[int, int]:
    """Visit every state. Return the number of states and the largest overlap.

    The overlap is the number of halves that are on their way while a consumer reads. Raises
    Wrong with the smallest number of steps that leads to a state that must not occur.
    """
    threads = programs(d)
    start = State(
        at=(0,) * len(threads),
        full=(Barrier(0, 1, 0, 1),) * d.stages,
        empty=(Barrier(0, d.arrivals, 0, d.arrivals),) * d.stages,
        memory=((-1, -1),) * d.stages,
        flying=frozenset(),
        reading=frozenset(),
    )
    steps, queue, overlap = {start: 0}, deque([start]), 0
    while queue:
        s = queue.popleft()
        overlap = max(overlap, len(s.flying) if s.reading else 0)
        after = [land(s, flight) for flight in s.flying]
        waiting = 0
        for who, thread in enumerate(threads):
            if s.at[who] < len(thread):
                try:
                    following = step(s, who, thread[s.at[who]])
                except Wrong as wrong:
                    raise Wrong(f"{steps[s]:5}  {wrong}") from None
                waiting += following is None
                after += [following] if following else []
        if waiting and not after:
            raise Wrong(f"{steps[s]:5}  all {waiting} threads wait for ever")
        for following in after:
            if following not in steps:
                steps[following] = steps[s] + 1
                queue.append(following)
    return len(steps), overlap


# --8<-- [end:explore]

FAULTS = {
    "the producer begins with parity 0": ({"first": 0}, "wait for ever"),
    "the producer never flips its parity": ({"producer_flips": False}, "before it is read"),
    "the consumers never flip theirs": ({"consumer_flips": False}, "before it has landed"),
    "empty ends with the first arrival": ({"arrivals": 1}, "before it is read"),
    "empty ends with a third arrival": ({"arrivals": 3}, "wait for ever"),
    "only A's bytes are announced": ({"announced": 1}, "before it has landed"),
    "consumers arrive before wgmma ends": ({"read_then_arrive": False}, "while it is read"),
}


def main() -> None:
    print("stages  tiles  states  halves on their way while a tile is read")
    for stages, tiles in ((1, 4), (2, 5), (3, 7)):
        states, overlap = explore(Design(stages, tiles))
        assert overlap == 2 * (stages - 1)  # with one stage nothing overlaps
        print(f"{stages:6} {tiles:6} {states:7} {overlap:3}")
    print("\n2 stages, 5 tiles, one thing wrong   step  what happens")
    for name, (change, expected) in FAULTS.items():
        try:
            explore(Design(**change))
        except Wrong as wrong:
            assert expected in str(wrong), wrong
            print(f"{name:35} {wrong}")
        else:
            raise AssertionError(f"{name}: not found")


if __name__ == "__main__":
    main()
