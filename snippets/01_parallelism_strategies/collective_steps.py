"""Shows the messages of a collective step by step, with their bytes and their time.

The program has five collectives. A ring, a tree, recursive doubling and a hierarchy of nodes
implement each of them as a list of messages. A step is over when its slowest message has
arrived. A message takes α + β·bytes of its link, and a link is inside a node or between nodes.
The program prints one case and compares it with the other algorithms. Without arguments it also
simulates every plan with sets instead of numbers. It checks the result with the definition of
the collective, and the time with the formula. It also draws collective_steps.svg. The page
"Collective algorithms, step by step" has the same numbers.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Context

COLLECTIVES = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]
ALGORITHMS = ["ring", "tree", "doubling", "hierarchical"]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

Message = tuple[int, int, list[int], bool]  # from, to, chunks, whether the target adds them
Plan = list[list[Message]]  # the messages of each step


def pass_round(members: Sequence[int], blocks: list, first: int, add: bool) -> Plan:
    """Each member sends a block to the next member, and then each block that it received."""
    n = len(members)
    return [
        [
            (member, members[(i + 1) % n], blocks[(i + first - k) % n], add)
            for i, member in enumerate(members)
        ]
        for k in range(n - 1)
    ]


def spread(members: Sequence[int], chunks: list[int]) -> Plan:
    """A binomial tree: in every step, each rank with the chunks sends them to one without."""
    n = len(members)
    return [
        [(members[i], members[i + d], chunks, False) for i in range(min(d, n - d))]
        for d in powers(n)
    ]


def powers(n: int) -> list[int]:
    """The powers of two below n: 1, 2, 4, …"""
    return [1 << k for k in range((n - 1).bit_length())]


def together(plans: list[Plan]) -> Plan:
    """Merge plans of disjoint ranks, so that they run at the same time."""
    return [list(itertools.chain(*steps)) for steps in zip(*plans, strict=True)]


def ring(collective: str, n: int) -> Plan:
    ranks, own = range(n), [[c] for c in range(n)]
    if collective == "all-reduce":
        return pass_round(ranks, own, 0, True) + pass_round(ranks, own, 1, False)
    if collective == "reduce-scatter":
        return pass_round(ranks, own, -1, True)
    if collective == "all-gather":
        return pass_round(ranks, own, 0, False)
    if collective == "broadcast":  # the root sends all chunks along a chain of ranks
        return [
            [(r, r + 1, [k - r], False) for r in range(n - 1) if 0 <= k - r < n]
            for k in range(2 * n - 2)
        ]
    # all-to-all: in step k, rank r sends to rank r + k
    return [
        [(r, (r + k) % n, [r * n + (r + k) % n], False) for r in ranks] for k in range(1, n)
    ]


def tree(collective: str, n: int) -> Plan:
    everything = list(range(n))
    down = spread(everything, everything)
    up = [[(to, r, chunks, True) for r, to, chunks, _ in step] for step in reversed(down)]
    scatter = [
        [(r, r + d, list(range(r + d, n, 2 * d)), False) for r in range(min(d, n - d))]
        for d in powers(n)
    ]
    gather = [[(to, r, c, False) for r, to, c, _ in step] for step in reversed(scatter)]
    return {
        "all-reduce": up + down,
        "reduce-scatter": up + scatter,
        "all-gather": gather + down,
        "broadcast": down,
    }[collective]


def doubling(collective: str, n: int) -> Plan:
    ranks = range(n)
    if collective == "all-reduce":
        return [[(r, r ^ d, list(ranks), True) for r in ranks] for d in powers(n)]
    if collective == "all-to-all":  # send the pieces whose target differs in bit d
        return [
            [
                (
                    r,
                    r ^ d,
                    [s * n + t for s in ranks for t in ranks if there(r, s, t, d)],
                    False,
                )
                for r in ranks
            ]
            for d in powers(n)
        ]
    gather = [
        [(r, r ^ d, [c for c in ranks if c // d == r // d], False) for r in ranks]
        for d in powers(n)
    ]
    if collective == "all-gather":
        return gather
    if collective == "reduce-scatter":  # halving: the all-gather in reverse
        return [[(to, r, chunks, True) for r, to, chunks, _ in step] for step in gather[::-1]]
    scatter = [
        [(r, r + d, list(range(r + d, r + 2 * d)), False) for r in range(0, n, 2 * d)]
        for d in reversed(powers(n))
    ]
    return scatter + gather  # broadcast


def there(rank: int, source: int, target: int, d: int) -> bool:
    """Whether `rank` has this piece before the step of distance d, and has to send it."""
    held = source // d == rank // d and target % d == rank % d
    return held and (target ^ rank) & d > 0


def hierarchical(collective: str, n: int, g: int) -> Plan:
    nodes = [range(first, first + g) for first in range(0, n, g)]
    rails = [range(place, n, g) for place in range(g)]  # ranks with the same local rank
    if collective == "broadcast":
        everything = list(range(n))
        return spread(rails[0], everything) + together([spread(x, everything) for x in nodes])
    if collective == "all-to-all":
        inside = [
            [
                (r, to := r - r % g + (r + k) % g, [r * n + t for t in rails[to % g]], False)
                for r in range(n)
            ]
            for k in range(1, g)
        ]
        between = [
            [
                (r, to := (r + k * g) % n, [s * n + to for s in nodes[r // g]], False)
                for r in range(n)
            ]
            for k in range(1, n // g)
        ]
        return inside + between

    def halves(first: int, add: bool) -> tuple[Plan, Plan]:
        shares = [list(rail) for rail in rails]
        inside = [pass_round(node, shares, first, add) for node in nodes]
        between = [pass_round(rail, [[c] for c in rail], first, add) for rail in rails]
        return together(inside), together(between)

    inside, between = halves(-1, True)
    scatter = inside + between
    inside, between = halves(0, False)
    gather = between + inside
    chosen = {"reduce-scatter": scatter, "all-gather": gather}
    return chosen.get(collective, scatter + gather)


def plan(collective: str, algorithm: str, n: int, g: int) -> Plan:
    """The messages of every step. Raises ValueError if there is no such algorithm."""
    if algorithm == "tree" and collective == "all-to-all":
        raise ValueError("no tree: all pieces would pass through its root")
    if algorithm == "doubling" and n & (n - 1):
        raise ValueError("needs 2, 4, 8 or 16 ranks")
    if algorithm == "hierarchical" and not 1 < g < n:
        raise ValueError("needs several nodes of several ranks")
    if algorithm == "hierarchical":
        return hierarchical(collective, n, g)
    return {"ring": ring, "tree": tree, "doubling": doubling}[algorithm](collective, n)


def play(collective: str, n: int, steps: Plan) -> list[list[dict[int, frozenset[int]]]]:
    """The summands of each chunk on each rank, before each step and at the end."""
    everyone = range(n)
    begin: dict[str, list] = {
        "all-gather": [{r: frozenset({r})} for r in everyone],
        "all-to-all": [{r * n + t: frozenset({r}) for t in everyone} for r in everyone],
        "broadcast": [{c: frozenset({0}) for c in everyone if r == 0} for r in everyone],
    }
    every = [dict.fromkeys(everyone, frozenset({r})) for r in everyone]
    states = [begin.get(collective, every)]
    for step in steps:
        before, after = states[-1], [dict(held) for held in states[-1]]
        for source, target, chunks, add in step:
            for c in chunks:
                piece = before[source][c]
                if add:
                    assert not after[target][c] & piece, "added twice"
                    piece |= after[target][c]
                elif collective == "all-to-all":
                    del after[source][c]
                after[target][c] = piece
        states.append(after)
    return states


def expected(collective: str, n: int, rank: int) -> dict[int, frozenset[int]]:
    """The chunks of a rank and their summands, by the definition of the collective."""
    total, everyone = frozenset(range(n)), range(n)
    return {
        "all-reduce": dict.fromkeys(everyone, total),
        "reduce-scatter": {rank: total},
        "all-gather": {c: frozenset({c}) for c in everyone},
        "all-to-all": {s * n + rank: frozenset({s}) for s in everyone},
        "broadcast": dict.fromkeys(everyone, frozenset({0})),
    }[collective]


# In the formulas, t(x) = α + βx is the time of x bytes inside a node, and t′(x) is their time
# between nodes. τ(x) is their time on the slower of the links that a step uses.
FORMULAS = {
    ("ring", "all-reduce"): "2(n−1) · τ(S/n)",
    ("ring", "reduce-scatter"): "(n−1) · τ(S/n)",
    ("ring", "all-gather"): "(n−1) · τ(S/n)",
    ("ring", "all-to-all"): "(n−1) · τ(S/n)",
    ("ring", "broadcast"): "2(n−1) · τ(S/n)",
    ("tree", "all-reduce"): "2⌈log₂ n⌉ steps of τ(S)",
    (
        "tree",
        "reduce-scatter",
    ): "⌈log₂ n⌉ steps of τ(S), and Σ τ(⌈(n−d)/2d⌉ S/n) for d = 1, 2, 4…",
    ("tree", "all-gather"): "Σ τ(⌈(n−d)/2d⌉ S/n) for d = 1, 2, 4…, and ⌈log₂ n⌉ steps of τ(S)",
    ("tree", "broadcast"): "⌈log₂ n⌉ steps of τ(S)",
    ("doubling", "all-reduce"): "log₂ n steps of τ(S)",
    ("doubling", "reduce-scatter"): "Σ τ(dS/n) for d = 1, 2, 4, … n/2",
    ("doubling", "all-gather"): "Σ τ(dS/n) for d = 1, 2, 4, … n/2",
    ("doubling", "all-to-all"): "log₂ n steps of τ(S/2)",
    ("doubling", "broadcast"): "2 · Σ τ(dS/n) for d = 1, 2, 4, … n/2",
    ("hierarchical", "all-reduce"): "2(g−1) · t(S/g) + 2(n/g−1) · t′(S/n)",
    ("hierarchical", "reduce-scatter"): "(g−1) · t(S/g) + (n/g−1) · t′(S/n)",
    ("hierarchical", "all-gather"): "(n/g−1) · t′(S/n) + (g−1) · t(S/g)",
    ("hierarchical", "all-to-all"): "(g−1) · t(S/g) + (n/g−1) · t′(Sg/n)",
    ("hierarchical", "broadcast"): "⌈log₂ n/g⌉ · t′(S) + log₂ g · t(S)",
}
Link = tuple[float, float]  # α in seconds, β in seconds per byte


def closed_form(
    collective: str, algorithm: str, n: int, g: int, size: float, inner: Link, outer: Link
) -> float:
    """Seconds according to the formula, which does not use the list of messages."""

    def t(x: float) -> float:
        return inner[0] + inner[1] * x

    def between(x: float) -> float:
        return outer[0] + outer[1] * x

    def either(x: float) -> float:
        return t(x) if g == n else max(t(x), between(x)) if g > 1 else between(x)

    def at(d: int, x: float) -> float:
        """The time of a step of distance d, which is inside the nodes if d is less than g."""
        return t(x) if d < g else between(x)

    half = collective in ("reduce-scatter", "all-gather")
    # in the first and last g-1 steps, all messages are inside a node
    if algorithm == "ring" and collective == "broadcast":
        return 2 * (g - 1) * t(size / n) + 2 * (n - g) * either(size / n)
    # in the first and last g-1 steps, only some messages are between nodes
    if algorithm == "ring" and collective == "all-to-all" and g < n:
        near = 2 * (g - 1)
        return near * either(size / n) + (n - 1 - near) * between(size / n)
    if algorithm == "ring":
        return (1 + (collective == "all-reduce")) * (n - 1) * either(size / n)
    if algorithm == "tree":
        whole = sum(at(d, size) for d in powers(n))
        parts = sum(at(d, -(-(n - d) // (2 * d)) * size / n) for d in powers(n))
        return whole + {"all-reduce": whole, "broadcast": 0}.get(collective, parts)
    if algorithm == "doubling":
        parts = sum(at(d, d * size / n) for d in powers(n))
        whole = sum(at(d, size / (1 + (collective == "all-to-all"))) for d in powers(n))
        return parts if half else 2 * parts if collective == "broadcast" else whole
    nodes = n // g
    if collective == "broadcast":
        return len(powers(nodes)) * between(size) + len(powers(g)) * t(size)
    if collective == "all-to-all":
        return (g - 1) * t(size / g) + (nodes - 1) * between(size * g / n)
    return (1 if half else 2) * ((g - 1) * t(size / g) + (nodes - 1) * between(size / n))


def step_times(steps: Plan, n: int, g: int, size: float, inner: Link, outer: Link) -> list:
    """For each step, its slowest message: (seconds, chunks, whether it is between nodes)."""
    times = []
    for step in steps:
        slowest = (0.0, 0, False)
        for source, target, chunks, _ in step:
            alpha, beta = outer if source // g != target // g else inner
            seconds = alpha + beta * (len(chunks) * size / n)
            slowest = max(slowest, (seconds, len(chunks), source // g != target // g))
        times.append(slowest)
    return times


def bytes_sent(steps: Plan, n: int, size: float) -> list[float]:
    chunks = [0] * n
    for step in steps:
        for source, _, some, _ in step:
            chunks[source] += len(some)
    return [count * size / n for count in chunks]


def least(collective: str, n: int) -> float:
    """The factor of busbw: bytes that the busiest rank must send or receive, divided by S."""
    return {"all-reduce": 2 * (n - 1) / n, "broadcast": 1}.get(collective, (n - 1) / n)


def digits(x: float) -> str:
    """Format x with three significant digits, and with all digits before the point."""
    if x >= 1000:
        return str(math.floor(x + 0.5))
    return f"{float(Context(prec=3, rounding=ROUND_HALF_UP).create_decimal(x)):.12g}"


def in_bytes(x: float) -> str:
    unit = next((u for u in ("GiB", "MiB", "KiB") if x >= UNITS[u]), None)
    return f"{digits(x / UNITS[unit])} {unit}" if unit else f"{digits(x)} B"


def in_seconds(x: float) -> str:
    unit, scale = next((u for u in (("s", 1), ("ms", 1e3)) if x * u[1] >= 1), ("µs", 1e6))
    return f"{digits(x * scale)} {unit}"


def in_all(values: list[float]) -> str:
    if min(values) == max(values):
        return f"{in_bytes(values[0])} each"
    return ", ".join(map(in_bytes, values))


def facts(
    collective: str, algorithm: str, n: int, g: int, size: float, inner: Link, outer: Link,
    step: int,
) -> dict:  # fmt: skip
    """The printed values of one case after `step` of its steps."""
    steps = plan(collective, algorithm, n, g)
    times = step_times(steps, n, g, size, inner, outer)
    terms: list[list] = []
    for _, chunks, far in times:  # consecutive equal steps are one term of the sum
        if terms and terms[-1][1:] == [chunks, far]:
            terms[-1][0] += 1
        else:
            terms.append([1, chunks, far])
    total = sum(seconds for seconds, _, _ in times)
    share = least(collective, n)
    others, seconds_of = {}, {}
    for other in ALGORITHMS:
        try:
            there = plan(collective, other, n, g)
        except ValueError as error:
            others[other] = [str(error)]
            continue
        time = sum(each for each, _, _ in step_times(there, n, g, size, inner, outer))
        seconds_of[other] = time
        busiest = in_bytes(max(bytes_sent(there, n, size)))
        others[other] = [f"{len(there)} steps", busiest, in_seconds(time)]
    return {
        "formula": FORMULAS[algorithm, collective],
        "sum": " + ".join(
            f"{count} t{'′' * far}({in_bytes(chunks * size / n)})"
            for count, chunks, far in terms
        ),
        "time": in_seconds(total),
        "passed": in_seconds(sum(seconds for seconds, _, _ in times[:step])),
        "so far": in_all(bytes_sent(steps[:step], n, size)),
        "sent": in_all(bytes_sent(steps, n, size)),
        "least": in_bytes(share * size),
        "algbw": f"{digits(size / total / 1e9)} GB/s",
        "busbw": f"{digits(share * size / total / 1e9)} GB/s",
        "others": others,
        "fastest": min(seconds_of, key=seconds_of.__getitem__),
    }


def draw() -> str:
    """Draw a timeline of four all-reduces, for a small tensor and for a large tensor."""
    colours, ink, muted = ["#0b6e99", "#c2410c"], "#1f2937", "#52525b"
    inner, outer = (5e-6, 1 / 450e9), (20e-6, 1 / 50e9)
    parts = []

    def text(x: float, y: float, words: str, colour: str, size: int = 12) -> None:
        parts.append(
            f'<text x="{x:g}" y="{y}" fill="{colour}" font-size="{size}">{words}</text>'
        )

    y = 0
    for size in (2**16, 2**28):
        steps = {name: plan("all-reduce", name, 16, 8) for name in ALGORITHMS}
        times = {x: step_times(steps[x], 16, 8, size, inner, outer) for x in steps}
        totals = {name: sum(each for each, _, _ in times[name]) for name in times}
        text(0, y + 16, f"all-reduce of {in_bytes(size)}, two nodes of eight", ink, 14)
        for name in ALGORITHMS:
            y, x = y + 25, 84.0
            text(0, y + 13, name, muted)
            for seconds, _, far in times[name]:
                width = 340 * seconds / max(totals.values())
                parts.append(
                    f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="18" '
                    f'fill="{colours[far]}" opacity="0.8" stroke="#fff" stroke-width="0.7"/>'
                )
                x += width
            text(x + 5, y + 13, in_seconds(totals[name]), ink)
        y += 34
    text(84, y + 6, "a step that waits for a link inside a node", colours[0])
    text(84, y + 24, "a step that waits for one between nodes", colours[1])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 500 {y + 32}" '
    return "\n".join([head + 'font-family="system-ui, sans-serif">', *parts, "</svg>", ""])


def check(inner: Link, outer: Link, size: float) -> int:
    """Check every plan with the definition and the formula. Return the number of plans."""
    count = 0
    for n in range(2, 17):
        for g in [g for g in powers(n) if n % g == 0] + [n]:
            for collective in COLLECTIVES:
                for algorithm in ALGORITHMS:
                    try:
                        steps = plan(collective, algorithm, n, g)
                    except ValueError:
                        continue
                    end = play(collective, n, steps)[-1]
                    for rank, held in enumerate(end):
                        wanted = expected(collective, n, rank)
                        assert held | wanted == held, (collective, algorithm, n, g, rank)
                    for step in steps:  # a rank sends and receives at most one message
                        for side in (0, 1):
                            busy = [message[side] for message in step]
                            assert len(set(busy)) == len(busy), (collective, algorithm, n, g)
                    times = step_times(steps, n, g, size, inner, outer)
                    case = (collective, algorithm, n, g, size, inner, outer)
                    formula = closed_form(*case)
                    total = sum(seconds for seconds, _, _ in times)
                    assert abs(total - formula) < 1e-9 * formula, (case, total, formula)
                    bound = least(collective, n) * size
                    sent = bytes_sent(steps, n, size)
                    into = [0.0] * n
                    for _, target, chunks, _ in itertools.chain(*steps):
                        into[target] += len(chunks) * size / n
                    assert max(sent + into) > 0.999999 * bound, case
                    count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--collective", choices=COLLECTIVES, default="all-reduce")
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ring")
    parser.add_argument("--ranks", type=int, default=8, help="2 to 16")
    parser.add_argument("--node", type=int, help="ranks per node: all, or a power of two")
    parser.add_argument("--size", default="64MiB", help="KiB, MiB or GiB")
    parser.add_argument("--alpha", type=float, default=5, help="µs, inside a node")
    parser.add_argument("--rate", type=float, default=450, help="GB/s, inside a node")
    parser.add_argument("--far-alpha", type=float, default=20, help="µs, between nodes")
    parser.add_argument("--far-rate", type=float, default=50, help="GB/s, between nodes")
    parser.add_argument("--step", type=int, help="how many steps are over: all")
    args = parser.parse_args()
    n, g = args.ranks, args.node or args.ranks
    if not 2 <= n <= 16:
        sys.exit("--ranks: 2 to 16")
    if g != n and g not in [d for d in powers(n) if n % d == 0]:
        sys.exit(f"--node: {n}, or a power of two that divides it")
    number, unit = args.size[:-3], args.size[-3:]
    if unit not in UNITS or not number.isdigit() or not int(number):
        sys.exit("--size: a whole number and KiB, MiB or GiB, as in 64MiB")
    if min(args.alpha, args.far_alpha) < 0 or min(args.rate, args.far_rate) <= 0:
        sys.exit("a latency must be at least 0, and a rate must be more than 0")
    size = int(number) * UNITS[unit]
    inner, outer = (
        (args.alpha / 1e6, 1e-9 / args.rate),
        (args.far_alpha / 1e6, 1e-9 / args.far_rate),
    )
    try:
        count = len(plan(args.collective, args.algorithm, n, g))
    except ValueError as error:
        sys.exit(f"{args.algorithm}: {error}")
    step = count if args.step is None else args.step
    if not 0 <= step <= count:
        sys.exit(f"--step: 0 to {count}")
    said = facts(args.collective, args.algorithm, n, g, size, inner, outer, step)
    where = "one node" if g == n else f"nodes of {g}"
    print(f"{args.collective} of {in_bytes(size)} by {args.algorithm}: {n} ranks, {where}")
    print(f"T = {said['formula']}\n  = {said['sum']} = {said['time']}")
    print(f"after step {step} of {count}: {said['passed']}; sent by rank 0…: {said['so far']}")
    print(f"sent in total: {said['sent']}; lower bound for the busiest rank: {said['least']}")
    print(f"algbw {said['algbw']}, busbw {said['busbw']}")
    for name, (first, *rest) in said["others"].items():
        mark = "  fastest" * (name == said["fastest"])
        print(f"{name:12}  {first:>8}", *(f"{each:>10}" for each in rest), mark, sep="")
    if len(sys.argv) == 1:
        plans = check(inner, outer, size) + check(outer, inner, 2**10)
        print(f"{plans // 2} plans: results equal the definition, times equal the formula")
        with open("collective_steps.svg", "w", encoding="utf-8") as file:
            file.write(draw())


if __name__ == "__main__":
    main()
