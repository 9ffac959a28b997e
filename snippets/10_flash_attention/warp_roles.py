"""This simulation shows warp specialization: warps load, multiply, take exponentials, correct.

A role is a generator. It starts operations on a unit, and it waits until an operation of
another role has ended, as warps do with barriers. The schedules are those of FlashAttention-3
(arXiv 2407.08608, sections 3.1, 3.2) and of FlashAttention-4 (arXiv 2603.05451, section 3.1).
The rates of the tensor cores and exponential units are those of the second paper. The rate of
the L2 cache, 5,120 bytes per clock, is that of an A100 and an assumption for the others. The
simulation has no latencies, so its shares are upper bounds. Look at the columns "products",
which is the share of time in which the tensor cores work, and "limit", which a formula predicts
without the simulation. Draws warp_roles.svg.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product

D, KEYS, TILES, STAGES = 128, 128, 64, 2
Role = Iterator[tuple]


class Machine:
    """Clocks that each unit needs for one group's queries and one tile of keys."""

    def __init__(self, name: str, rows: int, flops: int, exps: int, sms: int) -> None:
        self.name, self.rows, scores = name, rows, rows * KEYS
        self.product = 2 * scores * D / flops  # one of two products, on the tensor cores
        self.exp = scores / exps
        self.max = self.rest = scores / 128  # comparisons; sums and rounding: 128 lanes
        self.rescale = rows * D / 128  # the output, one multiplication per element
        self.copy = 2 * KEYS * D / (5120 / sms)  # keys or values: a share of the L2 cache
        self.emulated = scores * 6 / 128  # about 12 instructions compute 2^x for two scores


H100 = Machine("H100", 64, 4096, 16, 132)
B200 = Machine("B200", 128, 8192, 16, 148)
B300 = Machine("B300", 128, 8192, 32, 148)


# --8<-- [start:run]
def run(roles: dict[str, Role]) -> tuple[float, list[tuple[str, str, float, float]], dict]:
    """Return the end of the last operation, every (role, unit, start, clocks), and all ends.

    A role yields ("start", unit, clocks, what) and continues, or it yields ("wait", what) and
    stops until that operation has ended. A unit serves the operations in the order in which
    they were started.
    """
    free, ended, sleeping, bars = defaultdict(float), {}, defaultdict(list), []
    ready = [(0.0, i, name) for i, name in enumerate(roles)]
    while ready:
        now, i, name = heapq.heappop(ready)
        match next(roles[name], None):
            case ("start", unit, clocks, what):
                start = max(now, free[unit])
                free[unit] = ended[what] = start + clocks
                bars.append((name, unit, start, clocks))
                heapq.heappush(ready, (now, i, name))
                for then, j, other in sleeping.pop(what, []):
                    heapq.heappush(ready, (max(then, ended[what]), j, other))
            case ("wait", what) if what in ended:
                heapq.heappush(ready, (max(now, ended[what]), i, name))
            case ("wait", what):
                sleeping[what].append((now, i, name))
    assert not sleeping, f"a role waits for operations that no role starts: {list(sleeping)}"
    return max(ended.values()), bars, ended


# --8<-- [end:run]


# --8<-- [start:hopper]
def produce(m: Machine, groups: int) -> Role:
    """The producer copies the next keys or values into a buffer that no group still reads."""
    for j in range(TILES):
        for tile, last_use in (("k", "s"), ("v", "out")):
            for g in range(groups if j >= STAGES else 0):
                yield "wait", (last_use, g, j - STAGES)
            yield "start", "copy", m.copy, (tile, j)


def softmax(m: Machine, g: int, j: int) -> Role:
    yield "start", "fp32", m.max, ("max", g, j)
    yield "wait", ("max", g, j)
    yield "start", "exp", m.exp, ("exp", g, j)
    yield "wait", ("exp", g, j)
    yield "start", "fp32", m.rest, ("p", g, j)
    yield "wait", ("p", g, j)


def group(m: Machine, g: int, alone: bool = False, ahead: bool = False) -> Role:
    """A warpgroup of FlashAttention-3 multiplies and computes the softmax.

    With `alone` it also copies. With `ahead` it starts the product of the next tile's scores
    before the softmax of the current tile.
    """
    for j in range(TILES + ahead):
        if alone:
            yield "start", "copy", m.copy, ("k", j)
        if j < TILES:
            yield "wait", ("k", j)
            yield "start", "tensor", m.product, ("s", g, j)
        if ahead and j:  # this product runs during the softmax that follows
            yield "wait", ("v", j - 1)
            yield "start", "tensor", m.product, ("out", g, j - 1)
        if j < TILES:
            yield "wait", ("s", g, j)
            yield from softmax(m, g, j)
            if j:
                yield "wait", ("out", g, j - 1)
            yield "start", "fp32", m.rescale if j else 0, ("scaled", g, j)
            yield "wait", ("scaled", g, j)
            if alone:
                yield "start", "copy", m.copy, ("v", j)
            if not ahead:
                yield "wait", ("v", j)
                yield "start", "tensor", m.product, ("out", g, j)
            if alone:
                yield "wait", ("out", g, j)


# --8<-- [end:hopper]


# --8<-- [start:blackwell]
def multiply(m: Machine) -> Role:
    """One warp starts all products. Their sums are in tensor memory, not in registers."""
    for j in range(TILES + 1):
        for g in (0, 1):
            if j:
                for what in (("p", g, j - 1), ("scaled", g, j - 1), ("v", j - 1)):
                    yield "wait", what
                yield "start", "tensor", m.product, ("out", g, j - 1)
            if j < TILES:
                yield "wait", ("k", j)
                yield "start", "tensor", m.product, ("s", g, j)


def soften(m: Machine, g: int, emulate: float) -> Role:
    """A softmax warpgroup computes a part of its exponentials on the fp32 units."""
    for j in range(TILES):
        yield "wait", ("s", g, j)
        yield "start", "fp32", m.max, ("max", g, j)
        yield "wait", ("max", g, j)
        yield "start", "exp", m.exp * (1 - emulate), ("exp", g, j)
        yield "start", "fp32", m.emulated * emulate, ("polynomial", g, j)
        yield "wait", ("exp", g, j)
        yield "wait", ("polynomial", g, j)
        yield "start", "fp32", m.rest, ("p", g, j)
        yield "wait", ("p", g, j)


def correct(m: Machine, every: int) -> Role:
    """The correction warpgroup rescales the output, in one of `every` tiles."""
    for j in range(TILES):
        for g in (0, 1):
            yield "wait", ("max", g, j)
            if j:
                yield "wait", ("out", g, j - 1)
            yield "start", "fp32", m.rescale if j and j % every == 0 else 0, ("scaled", g, j)


# --8<-- [end:blackwell]


def flash3(m: Machine, groups: int = 2, ahead: bool = False) -> dict[str, Role]:
    roles = {f"warpgroup {g + 1}": group(m, g, ahead=ahead) for g in range(groups)}
    return {"load": produce(m, groups)} | roles


def flash4(m: Machine, emulate: float = 0, every: int = 8) -> dict[str, Role]:
    roles = {f"softmax {g + 1}": soften(m, g, emulate) for g in (0, 1)}
    return (
        {"load": produce(m, 2), "multiply": multiply(m)}
        | roles
        | {"correct": correct(m, every)}
    )


COLOURS = {"tensor": "#0b6e99", "exp": "#c2410c", "fp32": "#a16207", "copy": "#6b7280"}
WIDTHS = {"tensor": 12, "exp": 14, "fp32": 6, "copy": 8}


def draw(plans: dict[str, list[tuple[str, str, float, float]]], until: float = 9000) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "warp_roles", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    y, ticks = 0.0, []
    for title, bars in plans.items():
        axes.text(0, y, title, va="center")
        for name in sorted({name for name, *_ in bars if name != "correct"}):
            y -= 1
            ticks.append((y, name))
            for role, unit, start, clocks in bars:
                if role == name and start < until:
                    axes.barh(y, clocks, left=start, height=0.5, color=COLOURS[unit])
        y -= 1.3
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks])
    words = {
        "copy": "copies",
        "tensor": "products",
        "exp": "exponentials",
        "fp32": "fp32 units",
    }
    for at, (unit, text) in zip((0.27, 0.42, 0.6, 0.83), words.items(), strict=True):
        axes.text(until * at, 0, text, color=COLOURS[unit], va="center")
    axes.set(
        xlabel="clocks on one multiprocessor of a B200", xlim=(0, until), ylim=(y + 0.8, 0.6)
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.tight_layout()
    figure.savefig("warp_roles.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("a group's tile, in clocks    queries  two products  exponentials  copies")
    for m in (H100, B200, B300):
        products = 2 * m.product
        print(f"{m.name:27}{m.rows:9}{products:14.0f}{m.exp:14.0f}{2 * m.copy:8.0f}")
    assert (2 * B200.product, B200.exp) == (1024, 1024)  # as in the paper's table 1

    def chain(m: Machine, products: int, emulate: float = 0) -> float:
        """Clocks of the steps that a group must do one after the other for a tile."""
        return products * m.product + m.max + m.exp * (1 - emulate) + m.rest

    print("\n                                     products  exponentials  fp32  copies   limit")
    plans, shares = {}, {}
    for m, name, groups, roles, step in (
        (H100, "one warpgroup does all", 1, {"all": group(H100, 0, alone=True)},
         chain(H100, 2) + H100.rescale + 2 * H100.copy),
        (H100, "and a warp that loads", 1, flash3(H100, 1), chain(H100, 2) + H100.rescale),
        (H100, "two warpgroups, pingpong", 2, flash3(H100), chain(H100, 2) + H100.rescale),
        (B200, "two warpgroups, pingpong", 2, flash3(B200), chain(B200, 2) + B200.rescale),
        (B200, "and the next scores ahead", 2, flash3(B200, ahead=True),
         chain(B200, 1) + B200.rescale),
        (B200, "a role each, rare rescaling", 2, flash4(B200), chain(B200, 2)),
        (B200, "and 10% of 2^x by polynomial", 2, flash4(B200, 0.1), chain(B200, 2, 0.1)),
        (B200, "and 25%", 2, flash4(B200, 0.25), chain(B200, 2, 0.25)),
        (B300, "a role each, rare rescaling", 2, flash4(B300), chain(B300, 2)),
    ):  # fmt: skip
        end, bars, ended = run(roles)
        busy = dict.fromkeys(COLOURS, 0.0)
        for _, unit, _, clocks in bars:
            busy[unit] += clocks
        assert math.isclose(busy["tensor"], groups * TILES * 2 * m.product)
        for unit in COLOURS:  # a unit serves one operation at a time
            used = sorted(
                (start, start + clocks) for _, which, start, clocks in bars if which == unit
            )
            assert all(a <= b + 1e-6 for (_, a), (b, _) in pairwise(used))
        if "load" in roles:  # a buffer is filled only after its last reader has finished
            for tile, last_use in (("k", "s"), ("v", "out")):
                for j, g in product(range(STAGES, TILES), range(groups)):
                    assert ended[tile, j] - m.copy >= ended[last_use, g, j - STAGES] - 1e-6
        for g, j in product(range(groups), range(TILES)):  # each step follows its inputs
            for what, clocks, *inputs in (
                (("s", g, j), m.product, ("k", j)),
                (("max", g, j), m.max, ("s", g, j)),
                (("p", g, j), m.rest, ("exp", g, j), ("polynomial", g, j)),
                (("out", g, j), m.product, ("p", g, j), ("v", j), ("scaled", g, j)),
                (("scaled", g, j), 0, ("max", g, j), ("out", g, j - 1)),
            ):
                assert ended[what] - clocks >= max(ended.get(i, 0) for i in inputs) - 1e-6
        limit = max(TILES * step - m.rescale, *busy.values())  # no schedule is faster
        assert limit * (1 - 1e-9) < end < 1.08 * limit
        shares[m.name, name] = busy["tensor"] / end
        cells = "".join(f"{busy[unit] / end:{width}.0%}" for unit, width in WIDTHS.items())
        print(f"{m.name}  {name:30}{cells}{busy['tensor'] / limit:8.0%}")
        plans[m.name, name] = bars
    # the lessons of the table
    loads, both = (
        shares["H100", n] for n in ("and a warp that loads", "two warpgroups, pingpong")
    )
    assert loads > 1.9 * shares["H100", "one warpgroup does all"] and both > 1.6 * loads
    assert shares["B200", "two warpgroups, pingpong"] < 0.86 < 0.97 < both
    few, quarter = (shares["B200", f"and {n}"] for n in ("10% of 2^x by polynomial", "25%"))
    assert few < 0.9 < 0.97 < min(quarter, shares["B300", "a role each, rare rescaling"])
    draw(
        {
            "pingpong": plans["B200", "two warpgroups, pingpong"],
            "roles": plans["B200", "and 25%"],
        }
    )


if __name__ == "__main__":
    main()
