"""A server under load: requests queue, prefill in chunks, decode from blocks.

Continuous batching, step by step: a step costs c0 + c1 · tokens + c2 · context. Times are whole
nanoseconds and the dice whole numbers, so nothing is rounded before it is printed. At first the
costs are those of Llama 3 8B on an H100 at half of its data sheet. The program prints one load,
with others beside it. Without arguments it also checks itself, and draws serving_load.svg. The
page "Serving simulator" has the same numbers.
"""

import argparse
import itertools
import math
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Context

OPTIONS = {
    "rate": (6, "requests that come, a second: 1 to 14"),
    "requests": (200, "of the run"),
    "prompt": (1000, "tokens, on average"),
    "answer": (200, "tokens, on average"),
    "slots": (32, "requests that run at once"),
    "budget": (512, "tokens of a step; 0: whole prompts"),
    "cache": (32768, "tokens"),
    "block": (16, "tokens of a block"),
    "admit": ("as-needed", "when the prompt fits, or when the longest answer would"),
    "c0": (9000, "µs of a step"),
    "c1": (30, "µs of a token"),
    "c2": (78, "ns of a token of context"),
    "ttft": (500, "ms to the first token that are promised"),
    "gap": (50, "ms between tokens that are promised"),
    "dice": (3, "other lengths and arrivals"),
    "at": (100, "the moment that is shown: 0 to 200, half percents of the run"),
}
FIRST = {name: value for name, (value, _) in OPTIONS.items()}
LOADS = range(1, 15)
ADMIT = ["as-needed", "worst-case"]
Settings = dict


# --8<-- [start:dice]
class Dice:
    """Whole numbers from a linear congruential generator: every language has the same."""

    def __init__(self, seed: int) -> None:
        self.state = 2654435761 * seed % 2**32

    def uniform(self) -> int:
        """Below 2²⁰."""
        self.state = (1664525 * self.state + 1013904223) % 2**32
        return self.state >> 12

    def exponential(self) -> int:
        """With mean 2²⁰, by von Neumann: runs that fall, in place of a logarithm."""
        for whole in itertools.count():
            first = last = self.uniform()
            falling = 1
            while (drawn := self.uniform()) < last:
                last = drawn
                falling += 1
            if falling % 2:
                return (whole << 20) + first
        raise AssertionError


# --8<-- [end:dice]


@dataclass
class Request:
    number: int
    arrival: int
    prompt: int
    answer: int
    done: int = 0  # tokens of the answer
    length: int = 0  # tokens in the cache
    blocks: int = 0
    first: int = 0  # when its first token came, and its latest
    last: int = 0
    worst: int = 0  # longest gap
    events: list[tuple[int, str]] = field(default_factory=list)

    def left(self) -> int:
        """Tokens to run before the next of the answer: a prompt or the rest of it; then one."""
        return self.prompt + self.done - self.length


def arrivals(s: Settings, rate: int) -> list[Request]:
    """The same requests at any rate, closer together; none is longer than four means."""
    dice, clock, requests = Dice(s["dice"]), 0, []
    for number in range(s["requests"]):
        clock += dice.exponential()
        prompt, answer = (
            min(4 * mean, 1 + (dice.exponential() * mean >> 20))
            for mean in (s["prompt"], s["answer"])
        )
        arrival = clock * 10**6 // (rate << 20) * 1000
        requests.append(Request(number, arrival, prompt, answer, events=[(arrival, "queue")]))
    return requests


# --8<-- [start:serve]
@dataclass
class Served:
    requests: list[Request]
    waiting: deque[Request]
    running: list[Request]
    clock: int = 0
    steps: int = 0
    free: int = 0  # blocks
    preempted: int = 0
    again: int = 0  # tokens to be computed again
    for_blocks: int = 0  # ns in which the next request waits for blocks
    for_slot: int = 0  # ns in which the next request waits for a slot


def serve(s: Settings, rate: int, until: float = math.inf) -> Served:
    """All requests, or the server as it is at the end of the step that `until` falls in."""
    requests = arrivals(s, rate)
    run = Served(requests, deque(requests), [], free=s["cache"] // s["block"])
    waiting, running = run.waiting, run.running
    while waiting or running:
        if not running:
            run.clock = max(run.clock, waiting[0].arrival)
        if run.clock > until:
            break
        while waiting and len(running) < s["slots"] and waiting[0].arrival <= run.clock:
            r = waiting[0]
            answer = r.done if s["admit"] == "as-needed" else 4 * s["answer"] - 1
            blocks = -(-(r.prompt + answer) // s["block"])
            if blocks > run.free:
                break
            running.append(waiting.popleft())
            r.blocks = blocks
            run.free -= blocks
            r.events.append((run.clock, "prefill"))
        begin, waits = run.clock, bool(waiting) and waiting[0].arrival <= run.clock
        no_slot = len(running) == s["slots"]
        ready = 0
        while ready < len(running):  # whose last block is full gets one more
            r = running[ready]
            if r.left() == 1 and r.length == r.blocks * s["block"]:
                if not run.free:  # the latest gives way, and will be computed again
                    late = running.pop()
                    run.free += late.blocks
                    run.preempted += 1
                    run.again += late.length
                    late.length = late.blocks = 0
                    late.events.append((run.clock, "queue"))
                    waiting.appendleft(late)
                    continue
                r.blocks += 1
                run.free -= 1
            ready += 1
        room, context = s["budget"] or math.inf, 0
        tokens = 0
        for r in sorted(running, key=lambda r: r.left() > 1):  # decodes first
            piece = min(r.left(), room - tokens)
            r.length += piece
            tokens += piece
            context += r.length if piece else 0
        run.clock += 1000 * (s["c0"] + s["c1"] * tokens) + s["c2"] * context
        run.steps += 1
        run.for_slot += (run.clock - begin) * (waits and no_slot)
        run.for_blocks += (run.clock - begin) * (waits and not no_slot)
        for r in [r for r in running if not r.left()]:
            if r.events[-1][1] == "prefill":
                r.events.append((run.clock, "decode"))
            if r.done:
                r.worst = max(r.worst, run.clock - r.last)
            else:
                r.first = run.clock
            r.last = run.clock
            r.done += 1
            if r.done == r.answer:
                run.free += r.blocks
                r.events.append((run.clock, "done"))
        running[:] = [r for r in running if r.done < r.answer]
    return run


# --8<-- [end:serve]


# --8<-- [start:measure]
def nearest_rank(values: list[int], share: int) -> int:
    """A percentile: the smallest value that `share` percent do not exceed."""
    return sorted(values)[-(-share * len(values) // 100) - 1]


def measure(s: Settings, rate: int) -> dict[str, float]:
    """Waits in ns and rates a second, of all requests at one load."""
    run = serve(s, rate)
    ttft = [r.first - r.arrival for r in run.requests]
    worst = [r.worst for r in run.requests]
    kept = [
        a <= 10**6 * s["ttft"] and b <= 10**6 * s["gap"]
        for a, b in zip(ttft, worst, strict=True)
    ]
    seconds = run.clock / 1e9
    return {
        "tokens": sum(r.answer for r in run.requests) / seconds,
        "requests": len(kept) / seconds,
        "goodput": sum(kept) / seconds,
        "kept": sum(kept),
        "ttft": nearest_rank(ttft, 50),
        "ttft99": nearest_rank(ttft, 99),
        "gap": nearest_rank(worst, 50),
        "gap99": nearest_rank(worst, 99),
        "preempted": run.preempted,
        "again": run.again,
        "clock": run.clock,
        "steps": run.steps,
        "for_blocks": run.for_blocks,
        "for_slot": run.for_slot,
    }


# --8<-- [end:measure]


def changes(s: Settings) -> dict[str, Settings]:
    """Return the single changes of the server that may help, by name."""
    budget, slots = s["budget"], s["slots"]
    made = {"twice the cache": {"cache": 2 * s["cache"]}}
    if not budget or 2 * slots <= budget:
        made["twice the slots"] = {"slots": 2 * slots}
    if budget:
        made["twice the token budget"] = {"budget": 2 * budget}
    if budget // 2 >= slots:
        made["half the token budget"] = {"budget": budget // 2}
    if not budget and slots <= 512:
        made["a token budget of 512"] = {"budget": 512}
    return made


def best_change(s: Settings, kept: int) -> tuple[str, dict[str, float]]:
    """Return the change with the most requests in time, and the results with this change."""
    best = "none", {"kept": kept}
    for name, change in changes(s).items():
        after = measure(s | change, s["rate"])
        if after["kept"] > best[1]["kept"]:
            best = name, after
    return best


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


def facts(s: Settings, loads: Sequence[int]) -> dict:
    """What is said about one load, at one moment of it, and about others."""
    loads_of = {load: measure(s, load) for load in loads}
    mine = loads_of[s["rate"]]
    moment = mine["clock"] * s["at"] // 200
    now = serve(s, s["rate"], moment)
    prefills = sum(r.left() > 1 for r in now.running)
    decodes = len(now.running) - prefills
    waits = sum(r.arrival <= now.clock for r in now.waiting)
    blocks, held = sum(r.blocks for r in now.running), sum(r.length for r in now.running)
    filled = percent(held, blocks * s["block"]) if blocks else "none"
    helps, after = best_change(s, mine["kept"])
    in_time = ""
    if helps != "none":
        in_time = f": {percent(after['kept'], s['requests'])} in time"
        in_time += f", p99 of TTFT {in_seconds(after['ttft99'] / 1e9)}"
    times = {name: in_seconds(mine[name] / 1e9) for name in ("ttft", "ttft99", "gap", "gap99")}
    return {
        "throughput": f"{digits(mine['tokens'])} tokens/s",
        "ttft": f"{times['ttft']} and {times['ttft99']}",
        "gap": f"{times['gap']} and {times['gap99']}",
        "kept": percent(mine["kept"], s["requests"]),
        "again": f"{mine['preempted']} ({mine['again']} tokens computed again)",
        "waits": f"{percent(mine['for_blocks'], mine['clock'])} for blocks, "
        f"{percent(mine['for_slot'], mine['clock'])} for a slot",
        "helps": helps + in_time,
        "moment": f"{in_seconds(moment / 1e9)} of {in_seconds(mine['clock'] / 1e9)}",
        "now": f"{waits} waiting, {prefills} in prefill, {decodes} in decode",
        "blocks": f"{blocks} of {s['cache'] // s['block']}",
        "filled": filled,
        "loads": {
            str(load): [
                digits(m["tokens"]),
                *(in_seconds(m[name] / 1e9) for name in ("ttft", "ttft99", "gap99")),
                digits(m["goodput"]),
            ]
            for load, m in loads_of.items()
        },
        "best": str(max(loads, key=lambda load: loads_of[load]["goodput"])),
    }


def check() -> int:
    """Hold the dice to their law, and the server to formulas; return the runs."""
    dice = Dice(1)
    drawn = [dice.exponential() / 2**20 for _ in range(50_000)]
    mean = sum(drawn) / len(drawn)
    assert abs(mean - 1) < 0.02 and abs(sum(x * x for x in drawn) / len(drawn) - 2) < 0.1

    runs = 0
    small = FIRST | {"requests": 60, "prompt": 100, "answer": 20, "cache": 1024}
    for budget, block, admit in itertools.product((0, 64), (1, 16, 100), ADMIT):
        s = small | {"budget": budget, "block": block, "admit": admit}
        for rate in (3, 14):
            run = serve(s | {"c0": 0, "c1": 30_000, "c2": 0}, rate)  # busy, once it has begun
            tokens = sum(r.prompt + r.answer - 1 for r in run.requests) + run.again
            assert run.clock == run.requests[0].arrival + 30_000_000 * tokens
            assert run.free == 1024 // block and all(r.done == r.answer for r in run.requests)
            assert admit == "as-needed" or not run.again
            if budget and admit == "worst-case":  # the bound of chunked prefill
                most = 1000 * (s["c0"] + s["c1"] * budget) + s["c2"] * s["cache"]
                assert max(r.worst for r in serve(s, rate).requests) <= most
            runs += 2

    alone, free = FIRST | {"slots": 1, "c1": 0, "c2": 0, "budget": 0}, 0
    for r in serve(alone, 3).requests:  # one server: first come, first served
        free = max(free, r.arrival) + r.answer * 9_000_000
        assert r.last == free

    crowded = FIRST | {"rate": 10}
    full, roomy = (measure(crowded | {"cache": cache}, 10) for cache in (32768, 65536))
    assert full["for_blocks"] > full["for_slot"] > 0
    assert roomy["for_blocks"] == 0 < roomy["for_slot"]
    helps, after = best_change(crowded | {"cache": 65536}, roomy["kept"])
    assert helps == "twice the slots" and after["ttft99"] < roomy["ttft99"]
    assert best_change(FIRST | {"budget": 2048}, 0)[0] == "half the token budget"
    assert best_change(FIRST | {"budget": 0}, 0)[0] == "a token budget of 512"

    many = {"requests": 2000, "slots": 8, "prompt": 100, "answer": 50, "budget": 0, "c2": 0}
    batch = FIRST | many
    formula = 8 / (9e-3 + 8 * 30e-6 * (1 + 100 / 50))  # tokens/s of a full batch, by Little
    assert abs(measure(batch, 1000)["tokens"] / formula - 1) < 0.05
    return runs + 2


def draw(curves: dict[str, dict[int, dict[str, float]]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "serving", "font.size": 12}
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.4))
    for (words, points), colour in zip(
        curves.items(), ("#0b6e99", "#c2410c", "#52525b"), strict=True
    ):
        loads, values = list(points), points.values()
        axes[0].plot(
            loads, [m["ttft99"] / 1e9 for m in values], "o-", color=colour, markersize=4
        )
        axes[1].plot(
            loads, [m["goodput"] for m in values], "o-", color=colour, markersize=4, label=words
        )
    axes[0].set(
        yscale="log", xlabel="requests/s that come", ylabel="time to first token, p99, s"
    )
    axes[0].set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    axes[1].set(xlabel="requests/s that come", ylabel="goodput, requests/s", ylim=(0, 10))
    axes[1].legend(frameon=False, fontsize=11)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.patch.set_visible(False)
    figure.tight_layout()
    figure.savefig("serving_load.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, (value, words) in OPTIONS.items():
        kind = {"choices": ADMIT} if name == "admit" else {"type": int}
        parser.add_argument(f"--{name}", default=value, help=words, **kind)
    s = vars(parser.parse_args())
    longest = 4 * (s["prompt"] + s["answer"])
    if s["rate"] not in LOADS or not 0 <= s["at"] <= 200:
        sys.exit("1 to 14 requests/s, and a moment from 0 to 200")
    if min(s[name] for name in s if name not in ("admit", "budget", "c1", "c2", "at")) < 1:
        sys.exit("numbers are whole and at least 1; budget, c1 and c2 may be 0")
    if min(s["budget"], s["c1"], s["c2"]) < 0 or 0 < s["budget"] < s["slots"]:
        sys.exit(
            "a step has a token for every slot at least: --budget is 0, or no less than --slots"
        )
    if s["cache"] // s["block"] * s["block"] < longest:
        sys.exit(
            f"the longest request has {longest} tokens: whole blocks of the cache must hold it"
        )
    said = facts(s, LOADS)
    print(f"{s['rate']} requests/s: {said['throughput']}, {said['kept']} in time")
    print(f"first token, p50 and p99: {said['ttft']}; longest gap of an answer: {said['gap']}")
    print(f"preemptions: {said['again']}")
    print(f"time in which requests wait: {said['waits']}")
    print(f"change with the most requests in time: {said['helps']}")
    print(f"after {said['moment']}: {said['now']}")
    print(f"blocks: {said['blocks']}, {said['filled']} filled")
    print("requests/s  tokens/s  TTFT p50       p99   gap p99   goodput")
    for load, (tokens, *times, goodput) in said["loads"].items():
        mark = "  most" * (load == said["best"])
        print(
            f"{load:>10}  {tokens:>8}",
            *(f"{each:>10}" for each in times),
            f"{goodput:>8}{mark}",
            sep="",
        )
    if len(sys.argv) > 1:
        return
    print(f"{check()} runs by the queue's law, the batch's formula and the bound of a chunk")
    others = {
        "512 tokens a step": {},
        "whole prompts": {"budget": 0},
        "room for the worst case": {"admit": "worst-case"},
    }
    curves = {
        words: {load: measure(s | other, load) for load in LOADS}
        for words, other in others.items()
    }
    goodput = [max(m["goodput"] for m in points.values()) for points in curves.values()]
    assert goodput[1] < goodput[0] / 2 and goodput[2] < 0.9 * goodput[0]
    draw(curves)


if __name__ == "__main__":
    main()
