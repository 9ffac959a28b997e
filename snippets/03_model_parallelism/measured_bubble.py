"""Four pipeline schedules run by four processes: the measured and the predicted bubble.

Each rank runs its own list of operations. It waits for its input, sleeps for as long as the
operation takes, and sends its output. A sleep needs no core, so two cores can simulate four
GPUs. The lists are those of schedules.py. A forward of a rank's layers takes 40 ms, and so do B
and W. Draws measured_bubble.svg.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
import torch.distributed as dist

M, UNIT = 8, 0.040  # micro-batches, seconds
COLOURS = {"F": "#0b6e99", "B": "#c2410c", "W": "#15803d"}


class Op(NamedTuple):
    kind: str  # F, B or W
    micro: int
    stage: int


Schedule = list[list[Op]]  # the operations of each rank, in its order


def warm_up_then_alternate(n: int, warm_up: int, place: Callable) -> list[Op]:
    """`warm_up` forwards, then F and B in turn, until n of each are done."""
    ops = [Op("F", *place("F", i)) for i in range(warm_up)]
    for i in range(n):
        if warm_up + i < n:
            ops.append(Op("F", *place("F", warm_up + i)))
        ops.append(Op("B", *place("B", i)))
    return ops


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


# --8<-- [start:run]
def run(ops: list[Op], stages: int) -> tuple[list[tuple[float, float]], float]:
    """Run `ops` in order, and return begin and end of each on the machine's clock.

    Also returns the end by a clock on which nothing is late; messages carry its time.
    """
    p = dist.get_world_size()
    seconds = UNIT * p / stages  # a chunk is 1/v of a rank's layers
    split = any(op.kind == "W" for op in ops)
    spans, sending, exact = [], [], torch.zeros(1, dtype=torch.float64)
    for op in ops:
        step = {"F": 1, "B": -1, "W": 0}[op.kind]  # activations go up, gradients come down
        source, target = op.stage - step, op.stage + step
        if step and 0 <= source < stages:
            arrived = torch.empty_like(exact)
            dist.recv(arrived, source % p, tag=tag(op, stages))
            exact = torch.maximum(exact, arrived)
        begin, length = time.monotonic(), seconds * (2 if op.kind == "B" and not split else 1)
        time.sleep(length)
        spans.append((begin, time.monotonic()))
        exact = exact + length
        if step and 0 <= target < stages:
            work = dist.isend(exact, target % p, tag=tag(op._replace(stage=target), stages))
            # does not wait for the receiving rank, which may be busy
            sending.append((work, exact))
    for work, _ in sending:
        work.wait()
    return spans, exact.item()


# --8<-- [end:run]


def tag(op: Op, stages: int) -> int:
    """A unique tag for the input of every operation."""
    return (op.micro * stages + op.stage) * 2 + (op.kind == "B")


def peak_live(ops: list[Op], v: int) -> Fraction:
    """Most micro-batches whose activations a rank holds at once: from F to W, or to B."""
    release = "W" if any(op.kind == "W" for op in ops) else "B"
    live = peak = 0
    for op in ops:
        live += (op.kind == "F") - (op.kind == release)
        peak = max(peak, live)
    return Fraction(peak, v)  # a chunk's activations are 1/v of a rank's


def draw(results: list[tuple[str, Schedule, list]], path: str) -> None:
    """One panel per schedule, from (title, schedule, spans of each rank)."""
    import matplotlib  # only one rank draws

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "bubble", "font.size": 11}
    figure, axes = plt.subplots(len(results), 1, figsize=(7, 7.2), sharex=True)
    for axis, (title, schedule, spans) in zip(axes, results, strict=True):
        zero = min(begin for times in spans for begin, _ in times)
        for r, (ops, times) in enumerate(zip(schedule, spans, strict=True)):
            for op, (begin, end) in zip(ops, times, strict=True):
                left, width = 1e3 * (begin - zero), 1e3 * (end - begin)
                tone = 0.55 if op.stage >= len(schedule) else 1.0  # the second chunk of a rank
                colour = COLOURS[op.kind]
                axis.barh(r, width, 0.9, left, color=colour, alpha=tone, linewidth=0)
        axis.set_yticks(range(len(schedule)), [f"rank {r}" for r in range(len(schedule))])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=11)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0, 1450)
    axes[-1].set_xticks(range(0, 1401, 200))
    axes[-1].set_xlabel("measured, ms (blue forward, orange backward, green weights)")
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in {"2", "4"}:
        sys.exit("start with 2 or 4 ranks: torchrun --nproc-per-node=4 measured_bubble.py")
    dist.init_process_group("gloo")  # tags and host tensors: gloo, also where there are GPUs
    rank, p = dist.get_rank(), dist.get_world_size()
    run(one_f_one_b(p, M)[rank], p)  # connects the ranks, not measured

    results = []
    if rank == 0:
        print(f"p = {p}, m = {M}, on {p} processes")
        print("schedule          predicted  measured  most live, rank 0…")
    schedules = [
        ("GPipe", gpipe, 1),
        ("1F1B", one_f_one_b, 1),
        ("interleaved 1F1B", interleaved, 2),
        ("ZB-H1", zb_h1, 1),
    ]
    for name, build, v in schedules:
        schedule = build(p, M)
        dist.barrier()
        runs: list = [None] * p
        dist.all_gather_object(runs, run(schedule[rank], p * v))
        spans, ends = zip(*runs, strict=True)
        idle = p - 1 if build is zb_h1 else Fraction(3 * (p - 1), v)  # units of 40 ms
        predicted = float(idle / (3 * M + idle))
        begin = min(begin for times in spans for begin, _ in times)
        length = max(end for times in spans for _, end in times) - begin
        assert math.isclose(max(ends), UNIT * (3 * M + idle)), (build, ends)
        # a sleep is never too short, so no step ends before the formula says
        assert length > 0.999 * max(ends), (build, length)
        busy = sum(end - begin for times in spans for begin, end in times)
        assert busy >= 0.999 * p * 3 * M * UNIT  # F, B and W of all ranks
        measured = 1 - busy / (p * length)
        assert abs(measured - predicted) < 0.35, (build, measured)  # a machine may be busy
        if rank == 0:
            live = " ".join(f"{float(peak_live(ops, v)):g}" for ops in schedule)
            print(f"{name:16}  {predicted:9.1%}    ≈{measured:.1%}  {live}")
            title = f"{name}: {predicted:.1%} idle by the formula"
            results.append((title, schedule, spans))
    if rank == 0:
        draw(results, "measured_bubble.svg")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
