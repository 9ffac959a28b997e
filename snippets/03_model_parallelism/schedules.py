"""Seven pipeline schedules as lists of operations, and a simulator that finds their bubbles.

A schedule lists the operations of every rank in order. F is a forward. B computes the gradient
of the input, and W computes the gradient of the weights. In schedules without W, B computes
both. The simulator uses one rule: an operation starts when its rank is free and its input has
arrived. Messages between ranks take no time. Interleaved 1F1B follows Narayanan et al. (2021),
ZB-H1 and ZB-V follow Qi et al. (2023), V-Half and V-Min follow Qi et al. (2024).

The printed bubble is the idle fraction of the time of all ranks. It is compared with a formula
for every schedule. Draws schedules.svg.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"F": "#0b6e99", "B": "#c2410c", "W": "#15803d"}
PALE = {"F": "#7dd3fc", "B": "#fdba74", "W": "#86efac"}  # of a rank's second chunk


class Op(NamedTuple):
    kind: str  # F, B or W
    micro: int  # micro-batch
    stage: int  # 0 … p-1, or 0 … pv-1 where each rank holds v chunks


Schedule = list[list[Op]]  # the operations of each rank, in its order


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards."""
    return [[Op(kind, i, r) for kind in "FB" for i in range(m)] for r in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """p-1-r forwards as a warm-up, then one forward and one backward in turn."""

    def rank_ops(r: int) -> list[Op]:
        return warm_up_then_alternate(m, min(p - 1 - r, m), lambda kind, i: (i, r))

    return [rank_ops(r) for r in range(p)]


def interleaved(p: int, m: int, v: int = 2) -> Schedule:
    """1F1B with v chunks per rank. Rank r has stages r, r+p, …, and m is a multiple of p."""

    def rank_ops(r: int) -> list[Op]:
        def place(kind: str, i: int) -> tuple[int, int]:
            """The i-th forward or backward: p micro-batches on a chunk, then the next chunk."""
            chunk = i // p % v if kind == "F" else v - 1 - i // p % v
            return i // (p * v) * p + i % p, chunk * p + r

        return warm_up_then_alternate(m * v, min(2 * (p - 1 - r) + (v - 1) * p, m * v), place)

    return [rank_ops(r) for r in range(p)]


def warm_up_then_alternate(n: int, warm_up: int, place: Callable) -> list[Op]:
    """`warm_up` forwards, then F and B in turn, until n of each are done."""
    ops = [Op("F", *place("F", i)) for i in range(warm_up)]
    for i in range(n):
        if warm_up + i < n:
            ops.append(Op("F", *place("F", warm_up + i)))
        ops.append(Op("B", *place("B", i)))
    return ops


def zb_h1(p: int, m: int) -> Schedule:
    """1F1B with B and W. Rank r runs each W r micro-batches later, to fill gaps."""
    schedule = []
    for r, ops in enumerate(one_f_one_b(p, m)):
        split = []
        for op in ops:
            split.append(op)
            if op.kind == "B" and op.micro >= r:
                split.append(Op("W", op.micro - r, r))
        schedule.append(split + [Op("W", i, r) for i in range(max(m - r, 0), m)])
    return schedule


def zb_v(p: int, m: int) -> Schedule:
    """Rank r has stages r and 2p-1-r, so the path through all stages is a V. m ≥ 2p-1."""
    schedule = []
    for r in range(p):
        steps = (  # the operation and its chunk: 0 on the way down the ranks, 1 on the way up
            "F0 " * (2 * (p - r) - 1)
            + "F1 F0 " * r
            + "F1 B1 W1 " * (p - r)
            + "F0 B0 W0 F1 B1 W1 " * (m - 2 * p + 1 + r)
            + "B0 W0 F1 B1 W1 " * (p - 1 - r)
            + "B0 B1 " * r
            + "B0 W0 " * (p - r)
            + "W1 " * r
            + "W0 " * r
        )
        done: Counter[str] = Counter()
        ops = []
        for kind, chunk in steps.split():
            ops.append(Op(kind, done[kind + chunk], (r, 2 * p - 1 - r)[int(chunk)]))
            done[kind + chunk] += 1
        schedule.append(ops)
    return schedule


def v_half(p: int, m: int) -> Schedule:
    """A V with half of ZB-V's memory. On each way down, a micro-batch waits on each rank."""
    return from_block(p, m, p // 2 + 1, v_half_starts)


def v_half_starts(p: int, r: int) -> tuple[int, ...]:
    """Return when rank r starts F0, F1, B1 and B0 of micro-batch 0, in units of a chunk's F."""
    gap = 0 if p % 2 else 3  # so that a rank's four operations use different units of six
    return 2 * r, 3 * p - 2 - r, 3 * p - 1 + gap + 2 * r, 6 * p - 2 + gap - r


def v_min(p: int, m: int) -> Schedule:
    """The shortest V: down, up, down and up again without waiting."""
    return from_block(p, m, (p + 4) // 3, v_min_starts)


def v_min_starts(p: int, r: int) -> tuple[int, ...]:
    """Return when rank r starts F0, F1, B1 and B0 of micro-batch 0, in units of a chunk's F."""
    gap = 0 if p % 3 else 2
    return r, 2 * p - 1 - r, 2 * p + gap + r, 4 * p - 1 + gap - r


def from_block(p: int, m: int, most: int, starts: Callable) -> Schedule:
    """Repeat the path of one micro-batch every six units of time, then remove the gaps.

    starts(p, r) returns when rank r starts F0, F1, B1 and B0 of micro-batch 0. A rank runs its
    forwards in the order of the repeated path, and its B too. Each runs as early as its input
    and the limit of `most` live micro-batches allow. Where neither can run, a W runs.
    """
    queues = []  # for each rank: its F, its B and its W, with their begin
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        block = list(zip("FFBB", (down, up, up, down), starts(p, r), strict=True))
        steps = sorted((t + 6 * i, Op(kind, i, s)) for i in range(m) for kind, s, t in block)
        forwards, backwards = ([step for step in steps if step[1].kind == k] for k in "FB")
        weights = [(math.inf, op._replace(kind="W")) for _, op in backwards]
        queues.append([forwards, backwards, weights])
    schedule: Schedule = [[] for _ in range(p)]
    while any(itertools.chain(*queues)):
        ended = {op for ops in schedule for op in ops}
        for ops, rank in zip(schedule, queues, strict=True):
            live = sum((op.kind == "F") - (op.kind == "W") for op in ops)
            ready = [
                (begin, op)
                for begin, op in (queue[0] for queue in rank if queue)
                if needs(op, 2 * p) <= ended and (op.kind != "F" or live < 2 * most)
            ]
            if ready:
                ops.append(min(ready)[1])
                rank["FBW".index(ops[-1].kind)].pop(0)
    return schedule


def simulate(schedule: Schedule) -> dict[Op, tuple[Fraction, Fraction]]:
    """Return begin and end of every operation, in units of one stage's forward.

    F, B and W last one unit each; a B that includes W lasts two. With v chunks per rank, each
    lasts 1/v of this. Raises RuntimeError if no rank can continue: the schedule deadlocks.
    """
    all_ops = [op for ops in schedule for op in ops]
    stages = 1 + max(op.stage for op in all_ops)
    unit = Fraction(len(schedule), stages)  # a chunk is 1/v of a rank's layers
    split = any(op.kind == "W" for op in all_ops)
    times: dict[Op, tuple[Fraction, Fraction]] = {}
    free, queue = [Fraction(0)] * len(schedule), [list(ops) for ops in schedule]
    while any(queue):
        moved = False
        for r, ops in enumerate(queue):
            while ops and (needed := needs(ops[0], stages)) <= times.keys():
                begin = max([free[r], *(times[op][1] for op in needed)])
                free[r] = begin + unit * (2 if ops[0].kind == "B" and not split else 1)
                times[ops.pop(0)] = begin, free[r]
                moved = True
        if not moved:
            raise RuntimeError(f"deadlock: the ranks wait for {[ops[:1] for ops in queue]}")
    return times


def needs(op: Op, stages: int) -> set[Op]:
    """Return the operations that must end before `op` can begin."""
    if op.kind == "F":
        return {op._replace(stage=op.stage - 1)} if op.stage else set()
    if op.kind == "W":
        return {op._replace(kind="B")}
    last = op.stage == stages - 1
    return {op._replace(kind="F") if last else op._replace(stage=op.stage + 1)}


def peak_live(ops: list[Op], v: int) -> Fraction:
    """Return the largest number of micro-batches whose activations a rank holds.

    A rank holds them from F to W, or to B in schedules without W.
    """
    release = "W" if any(op.kind == "W" for op in ops) else "B"
    live = peak = 0
    for op in ops:
        live += (op.kind == "F") - (op.kind == release)
        peak = max(peak, live)
    return Fraction(peak, v)  # a chunk's activations are 1/v of a rank's


def bubble(schedule: Schedule) -> Fraction:
    """Return the idle fraction of all ranks' time, from the first operation to the last."""
    times = simulate(schedule)
    length = max(end for _, end in times.values())
    busy = sum(end - begin for begin, end in times.values())
    return 1 - busy / (len(schedule) * length)


def draw(schedules: dict[str, Schedule], path: str) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "schedules", "font.size": 11}
    figure, axes = plt.subplots(len(schedules), 1, figsize=(7, 13), sharex=True)
    for axis, (name, schedule) in zip(axes, schedules.items(), strict=True):
        p = len(schedule)
        times = simulate(schedule)
        for r, ops in enumerate(schedule):
            for op in ops:
                begin, end = (float(t) for t in times[op])
                second = op.stage >= p
                axis.barh(
                    r, end - begin, left=begin, height=0.92,
                    color=(PALE if second else COLOURS)[op.kind], edgecolor="white",
                    linewidth=0.6,
                )  # fmt: skip
                if end - begin >= 1:
                    axis.text(
                        (begin + end) / 2, r, op.micro, fontsize=8, ha="center", va="center",
                        color="#111827" if second else "white",
                    )  # fmt: skip
        axis.set_yticks(range(p), [f"rank {r}" for r in range(p)])
        axis.invert_yaxis()
        live = max(peak_live(ops, v_of(schedule)) for ops in schedule)
        title = f"{name}: bubble {float(bubble(schedule)):.1%}, at most {float(live):g} live"
        axis.set_title(title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("time, in units of one stage's forward")
    kinds = "F, forward", "B, backward", "W, gradient of the weights"
    labels = [*kinds, *("the same, second chunk" for _ in kinds)]
    patches = [
        plt.Rectangle((0, 0), 1, 1, color=c) for c in (*COLOURS.values(), *PALE.values())
    ]
    figure.tight_layout(rect=(0, 0, 1, 0.945))
    figure.legend(patches, labels, ncols=2, loc="upper left", frameon=False, fontsize=10)
    figure.savefig(path, transparent=True, metadata={"Date": None})


def of_v_half(p: int) -> Fraction:
    """Return the idle time of a rank in V-Half: half of 1F1B's, and 1/2 less for odd p."""
    return Fraction(3 * (p - 1) - p % 2, 2)


def of_v_min(p: int) -> Fraction:
    """Return the idle time of a rank in V-Min, in units of one stage's forward."""
    return 2 * p - Fraction(5, 2) + (p % 3 == 0)


def v_of(schedule: Schedule) -> int:
    """Return the number of chunks per rank."""
    return (1 + max(op.stage for ops in schedule for op in ops)) // len(schedule)


def main() -> None:
    print(" p   m  schedule     bubble  formula         of work  most live, rank 0…")
    for p, m in [(4, 8), (8, 8), (8, 64)]:
        for build in (gpipe, one_f_one_b, interleaved, zb_h1, zb_v, v_half, v_min):
            if build is zb_v and m < 2 * p - 1:
                continue
            schedule = build(p, m)
            v, work = v_of(schedule), 3 * m
            late = Fraction(p - 1, v)  # the last rank's start, in forwards of a stage
            idle = {
                interleaved: 3 * late,
                zb_h1: p - 1,
                zb_v: late,
                v_half: of_v_half(p),
                v_min: of_v_min(p),
            }.get(build, 3 * (p - 1))
            whole = build in (gpipe, one_f_one_b, interleaved)
            every = itertools.product("FB" if whole else "FBW", range(m), range(v * p))
            assert sorted(op for ops in schedule for op in ops) == sorted(every)  # each once
            share = bubble(schedule)
            assert share == Fraction(idle) / (work + idle), (build, p, m, share)
            live = [peak_live(ops, v) for ops in schedule]
            expected = {
                gpipe: [m] * p,
                one_f_one_b: [min(m, p - r) for r in range(p)],
                interleaved: [min(m, p + Fraction(p - 1 - 2 * r, v)) for r in range(p)],
                zb_h1: [min(m, p)] * p,
                zb_v: [p] * p,
            }.get(build)
            assert expected in (live, None), (build, live, expected)
            fraction, relative = f"{Fraction(share)}", f"{float(Fraction(idle) / work):.1%}"
            counts = " ".join(f"{float(n):g}" for n in live)
            name = build.__name__
            print(f"{p:2}  {m:2}  {name:11}  {float(share):6.1%}  ", end="")
            print(f"{fraction:>12}  {relative:>8}  {counts}")
    for p, m in itertools.product(range(2, 10), (9, 20)):
        formulas = (v_half, of_v_half, p // 2 + 1), (v_min, of_v_min, (p + 4) // 3)
        for build, idle, most in formulas:
            schedule = build(p, m)
            assert bubble(schedule) == idle(p) / (3 * m + idle(p)), (build, p, m)
            assert max(peak_live(ops, 2) for ops in schedule) == most, (build, p, m)
    times = simulate(zb_v(8, 64))
    for ops in zb_v(8, 64):  # its ranks start one after the other, and then never wait
        assert times[ops[-1]][1] - times[ops[0]][0] == 3 * 64
    with contextlib.suppress(RuntimeError):  # a deadlock: W before its B
        raise AssertionError(simulate([[Op(kind, 0, 0) for kind in "FWB"]]))
    seven = {
        "GPipe": gpipe(4, 8),
        "1F1B": one_f_one_b(4, 8),
        "interleaved 1F1B, v = 2": interleaved(4, 8),
        "zero bubble ZB-H1": zb_h1(4, 8),
        "zero bubble ZB-V": zb_v(4, 8),
        "V-Half": v_half(4, 8),
        "V-Min": v_min(4, 8),
    }
    draw(seven, "schedules.svg")


if __name__ == "__main__":
    main()
