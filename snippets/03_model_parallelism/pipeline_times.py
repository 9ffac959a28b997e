"""Pipeline schedules with your own times: unequal F, B and W, slow ranks, slow links.

The lists are those of schedules.py, and DualPipeV, whose order is compared with torch's. A
message between two ranks arrives `link` after its operation has ended, and sending it does not
delay the sender. All times are whole numbers of ticks, so nothing is rounded before it is
printed. Without arguments, the program also compares its times with the formulas of the
chapter. The page "Pipeline schedules" has the same numbers.
"""

import argparse
import functools
import itertools
import math
import sys
from collections import Counter
from decimal import ROUND_HALF_UP, Context
from fractions import Fraction

from schedules import (
    Op,
    Schedule,
    bubble,
    gpipe,
    interleaved,
    needs,
    of_v_half,
    of_v_min,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_v,
)

NAMES = ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "v-min", "dualpipe-v"]
FORMULAS = {  # idle time of a rank, if all ranks are equally fast and links take no time
    "gpipe": "(p−1)(F+B+W)",
    "1f1b": "(p−1)(F+B+W)",
    "interleaved": "(p−1)(F+B+W)/v",
    "zb-h1": "(p−1)(F+B−W), if F = B = W,",
    "zb-v": "(p−1)F/2, if F = B = W,",
    "v-half": "3(p−1)F/2 (F/2 less for odd p), if F = B = W and m ≥ p,",
    "v-min": "(2p−5/2)F (F more if 3 divides p), if F = B = W and m ≥ p,",
}
PARTS = 60  # positions of the cursor on the time axis


def dualpipe_v(p: int, m: int) -> Schedule:
    """The V of ZB-V in DualPipe's order: forwards of one chunk next to backwards of the other.

    b is a backward with its weights. Later ones are cut in B and W, and the W wait in a queue.
    """
    schedule = []
    for r in range(p):
        steps = (
            "F0 " * (2 * (p - r - 1))
            + "F0 F1 " * (r + 1)
            + "B1 W F1 " * (p - r - 1)
            + "F0 b1 F1 b0 " * (m - 2 * p + r + 1)
            + "b1 F1 b0 " * (p - r - 1)
        ).split()
        ends = ["b1", "b0"] * (r + 1)  # the first half of them whole, the others cut
        steps += ends[: r + 1] + [end.upper() for end in ends[r + 1 :]]
        steps += ["W", "B0"] * (p - r - 1) + ["W"] * (r + 1)
        done: Counter[str] = Counter()
        ops: list[Op] = []
        waiting: list[Op] = []
        for step in steps:
            if step == "W":
                ops.append(waiting.pop(0)._replace(kind="W"))
                continue
            kind = step[0].upper()
            stage = (r, 2 * p - 1 - r)[int(step[1])]
            ops.append(Op(kind, done[kind + step[1]], stage))
            done[kind + step[1]] += 1
            if step[0] == "B":
                waiting.append(ops[-1])
        schedule.append(ops)
    return schedule


def why_not(name: str, p: int, m: int) -> str:
    """Return why a schedule cannot run, or an empty text."""
    if name == "interleaved" and m % p:
        return "needs a multiple of p micro-batches"
    if name == "zb-v" and m < 2 * p - 1:
        return "needs at least 2p−1 micro-batches"
    if name == "dualpipe-v" and m < 2 * p:
        return "needs at least 2p micro-batches"
    return ""


@functools.cache
def build(name: str, p: int, m: int, v: int) -> Schedule:
    if name == "interleaved":
        return interleaved(p, m, v)
    builders = {
        "gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-v": zb_v,
        "v-half": v_half, "v-min": v_min, "dualpipe-v": dualpipe_v,
    }  # fmt: skip
    return builders[name](p, m)


def chunks(name: str, v: int) -> int:
    """Chunks of layers on each rank."""
    two = dict.fromkeys(["zb-v", "v-half", "v-min", "dualpipe-v"], 2)
    return (two | {"interleaved": v}).get(name, 1)


Span = tuple[Op, int, int]


def timeline(
    name: str, p: int, m: int, v: int, f: int, b: int, w: int, link: int, pace: list[int]
) -> list[list[Span]]:
    """Begin and end of each rank's operations, in ticks: a tenth of a ms over its chunks.

    f, b, w and link are in ms; a rank takes `pace` tenths of these times for its layers.
    """
    schedule, count = build(name, p, m, v), chunks(name, v)
    owner = {op.stage: r for r, ops in enumerate(schedule) for op in ops}
    cut = {op._replace(kind="B") for ops in schedule for op in ops if op.kind == "W"}
    ended: dict[Op, int] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    queue, free = [list(ops) for ops in schedule], [0] * p
    while any(queue):
        for r, ops in enumerate(queue):
            while ops and (needed := needs(ops[0], p * count)) <= ended.keys():
                op = ops.pop(0)
                late = {o: 10 * count * link * (owner[o.stage] != r) for o in needed}
                begin = max([free[r], *(ended[o] + late[o] for o in needed)])
                whole = op.kind == "B" and op not in cut
                cost = {"F": f, "B": b + w * whole, "W": w}[op.kind]
                free[r] = ended[op] = begin + cost * pace[r]
                spans[r].append((op, begin, free[r]))
    return spans


def most_live(spans: list[Span]) -> int:
    """Most chunks whose activations a rank holds at once: from F to W, or to a whole B."""
    cut = {op._replace(kind="B") for op, _, _ in spans if op.kind == "W"}
    live = peak = 0
    for op, _, _ in spans:
        live += (op.kind == "F") - (op.kind == "W" or (op.kind == "B" and op not in cut))
        peak = max(peak, live)
    return peak


def share_idle(spans: list[list[Span]]) -> tuple[int, int]:
    """Idle ticks of all ranks, and all ticks, from the first operation to the last."""
    every = len(spans) * max(end for _, _, end in itertools.chain(*spans))
    return every - sum(end - begin for _, begin, end in itertools.chain(*spans)), every


def formula(name: str, p: int, m: int, v: int, f: int, b: int, w: int) -> tuple[int, int]:
    """The same by the formula, for equally fast ranks and links without delay, times 2v."""
    idle = {
        "interleaved": 2 * (p - 1) * (f + b + w),
        "zb-h1": 2 * v * (p - 1) * max(0, f + b - w),
        "zb-v": v * (p - 1) * f,
        "v-half": int(2 * v * of_v_half(p)) * f,
        "v-min": int(2 * v * of_v_min(p)) * f,
    }.get(name, 2 * v * (p - 1) * (f + b + w))
    return idle, 2 * v * m * (f + b + w) + idle


def percent(part: int, whole: int) -> str:
    return f"{(2000 * part + whole) // (2 * whole) / 10:.1f}%"


def digits(x: float) -> str:
    """Three significant digits, and all of those before the point."""
    if x >= 1000:
        return str(math.floor(x + 0.5))
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)):.12g}"


def in_seconds(x: float) -> str:
    unit, scale = next((u for u in (("s", 1), ("ms", 1e3)) if x * u[1] >= 1), ("µs", 1e6))
    return f"{digits(x * scale)} {unit}"


def facts(
    name: str, p: int, m: int, v: int, f: int, b: int, w: int, link: int, pace: list[int]
) -> dict:
    """The printed lines of one case."""
    times, others, lengths = (f, b, w, link, pace), {}, {}
    for other in NAMES:
        if reason := why_not(other, p, m):
            others[other] = [reason]
            continue
        spans, count = timeline(other, p, m, v, *times), chunks(other, v)
        length = max(end for _, _, end in itertools.chain(*spans)) / (10 * count) / 1e3
        live = [most_live(rank) / count for rank in spans]
        lengths[other] = length
        others[other] = [in_seconds(length), percent(*share_idle(spans)), digits(max(live))]
        if other == name:
            each = " ".join(map(digits, live))
    by_formula = "none in the chapter"
    if name in FORMULAS:
        by_formula = f"{FORMULAS[name]} idle, {percent(*formula(name, p, m, v, f, b, w))}"
    return {
        "time": others[name][0],
        "bubble": others[name][1],
        "formula": by_formula,
        "live": each,
        "others": others,
        "shortest": min(lengths, key=lengths.__getitem__),
    }


def moment(names: list[str], p: int, m: int, v: int, *times: int | list[int], at: int) -> dict:
    """What each rank computes after `at` sixtieths of the longest of these schedules."""
    lines = [timeline(name, p, m, v, *times) for name in names]
    # convert to a common unit, 1/120 ms, so that nothing is rounded
    scales = [12 // chunks(name, v) for name in names]
    length = max(
        end * scale
        for spans, scale in zip(lines, scales, strict=True)
        for _, _, end in itertools.chain(*spans)
    )
    ranks = []
    for spans, scale in zip(lines, scales, strict=True):
        running = [
            [
                f"{op.kind}{op.micro}"
                for op, begin, end in rank
                if begin * scale * PARTS <= length * at < end * scale * PARTS
            ]
            for rank in spans
        ]
        ranks.append(" ".join(ops[0] if ops else "idle" for ops in running))
    return {"time": in_seconds(length * at / PARTS / 120 / 1e3), "ranks": ranks}


def torch_order(p: int, m: int, r: int) -> list[tuple[str, int, int]]:
    """DualPipeV's operations on a rank as torch lists them; a whole backward is a b."""
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV

    schedule = object.__new__(ScheduleDualPipeV)  # its list does not need processes
    schedule.pp_group_size, schedule._n_microbatches = p, m
    actions = schedule._calculate_single_rank_operations(r)
    single = itertools.chain(*(action.sub_actions or [action] for action in actions))
    kinds = {
        "FORWARD": "F",
        "BACKWARD_INPUT": "B",
        "BACKWARD_WEIGHT": "W",
        "FULL_BACKWARD": "b",
    }
    return [(kinds[a.computation_type.name], a.microbatch_index, a.stage_index) for a in single]


def check() -> int:
    """Compare with torch's list, with schedules.py, and with the formulas; return the cases."""
    cases = 0
    for p in range(2, 9):
        for m in (2 * p, 2 * p + 1, 3 * p):
            for r, ops in enumerate(dualpipe_v(p, m)):
                cut = {op._replace(kind="B") for op in ops if op.kind == "W"}
                mine = [
                    ("b" if o.kind == "B" and o not in cut else o.kind, *o[1:]) for o in ops
                ]
                assert mine == torch_order(p, m, r), (p, m, r)
        for name, m, v in itertools.product(NAMES, (2 * p, 3 * p), (2, 3)):
            cases += 1
            even = timeline(name, p, m, v, 1, 1, 1, 0, [10] * p)
            idle, every = share_idle(even)
            if name != "dualpipe-v":
                assert Fraction(idle, every) == bubble(build(name, p, m, v)), (name, p, m, v)
                assert Fraction(idle, every) == Fraction(*formula(name, p, m, v, 1, 1, 1))
            if name in ("gpipe", "1f1b", "interleaved", "zb-h1"):  # also for unequal times
                unequal = share_idle(timeline(name, p, m, v, 2, 3, 1, 0, [10] * p))
                assert Fraction(*unequal) == Fraction(*formula(name, p, m, v, 2, 3, 1))
            slow = share_idle(timeline(name, p, m, v, 1, 1, 1, 1, [10] * p))
            assert slow[1] > every  # a link that takes time makes a step longer
    # after 33 ms, each rank of 1F1B is in its last forward before the first backward, and ZB-V
    # has started the seventh operation of rank 0, the sixth of rank 1, and so on
    now = moment(["1f1b", "zb-v"], 4, 8, 2, 10, 10, 10, 0, [10] * 4, at=6)
    assert now == {"time": "33 ms", "ranks": ["F3 F2 F1 F0", "F6 F0 F3 F1"]}, now
    # one slow rank, the last: GPipe and 1F1B as chapter 03 says, m max t + Σ t - max t
    pace = [10, 10, 10, 15]
    for name in ("gpipe", "1f1b"):
        spans = timeline(name, 4, 8, 1, 1, 1, 1, 0, pace)
        assert share_idle(spans)[1] == 4 * 3 * (8 * 15 + sum(pace) - 15), name
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=NAMES, default="1f1b")
    parser.add_argument("--ranks", type=int, default=4, help="p, 2 to 8")
    parser.add_argument("--micro-batches", type=int, default=8, help="m, 1 to 24")
    parser.add_argument("--chunks", type=int, default=2, help="v of the interleaved, 2 to 4")
    parser.add_argument("--forward", type=int, default=10, help="ms of a rank's F")
    parser.add_argument("--backward", type=int, default=10, help="ms of its B")
    parser.add_argument("--weights", type=int, default=10, help="ms of its W")
    parser.add_argument("--link", type=int, default=0, help="ms of a message")
    parser.add_argument(
        "--pace", help="tenths of these times that each rank takes: 10,10,15,10"
    )
    parser.add_argument("--other", choices=NAMES, help="a second schedule, for --at")
    parser.add_argument(
        "--at", type=int, default=PARTS, help=f"a time, in {PARTS}ths of the axis, 0 to {PARTS}"
    )
    args = parser.parse_args()
    p, m, v = args.ranks, args.micro_batches, args.chunks
    if not (2 <= p <= 8 and 1 <= m <= 24 and 2 <= v <= 4):
        sys.exit("2 to 8 ranks, 1 to 24 micro-batches, 2 to 4 chunks")
    if min(args.forward, args.backward, args.weights) < 1 or args.link < 0:
        sys.exit("a time is 1 ms or more, and a link 0 or more")
    if not 0 <= args.at <= PARTS:
        sys.exit(f"--at must be a number from 0 to {PARTS}")
    pace = (args.pace or ",".join(["10"] * p)).split(",")
    if len(pace) != p or not all(each.isdigit() and int(each) for each in pace):
        sys.exit(
            f"--pace: {p} whole numbers with commas, 10 for a rank that is as fast as said"
        )
    for name in filter(None, (args.schedule, args.other)):
        if reason := why_not(name, p, m):
            sys.exit(f"{name} {reason}")
    times = (args.forward, args.backward, args.weights, args.link, list(map(int, pace)))
    said = facts(args.schedule, p, m, v, *times)
    print(f"{args.schedule}: p = {p}, m = {m}, step {said['time']}, bubble {said['bubble']}")
    print(f"formula for even ranks without links: {said['formula']}")
    print(f"most live, rank 0…: {said['live']}")
    if args.at < PARTS:
        names = [args.schedule, *([args.other] if args.other else [])]
        now = moment(names, p, m, v, *times, at=args.at)
        for name, ranks in zip(names, now["ranks"], strict=True):
            print(f"at {now['time']}, {name}, rank 0…: {ranks}")
    print("              step    bubble  live on the worst rank")
    for name, (first, *rest) in said["others"].items():
        mark = "  shortest" * (name == said["shortest"])
        print(f"{name:11}  {first:>7}", *(f"{each:>8}" for each in rest), mark, sep="")
    if len(sys.argv) == 1:
        print(f"{check()} cases as schedules.py and the formulas have them, DualPipeV as torch")


if __name__ == "__main__":
    main()
