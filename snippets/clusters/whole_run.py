"""Computes a 405B run on 1,024 to 131,072 GPUs with bubbles, noise, gradients and failures.

The prediction adds the parts of a step and divides by the goodput. The simulation executes one
step after the other, draws the slowest of N ranks for each, and interrupts it at random times.
Each size uses Llama 3's layout, and the one of 12 layouts that needs the fewest days.
Assumed: a computing GPU reaches half of its peak, including TP in its node; 1% noise, 4 chunks
per stage, half of the gradients' communication hidden, nothing of the keys and values of
context parallelism hidden, bf16 for both, 5 s per save, 3 min per restart. Draws whole_run.svg.
"""

import functools
import itertools
import math
import random
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PARAMETERS, TOKENS, BATCH, SEQUENCE = 405e9, 15.6e12, 2048, 8192
RATE, SIGMA, SAVE, RESTART, CHUNKS = 0.5 * 989e12, 0.01, 5.0, 180.0, 4
LAYERS, KEYS, CARD = 126, 1024, 50e9  # width of a token's keys; bytes/s to other nodes
PUBLISHED = (8, 1, 16)  # tensor-, context- and pipeline-parallel ranks
# a stage must fit with 2 + 4 bytes per parameter, and a GPU gets at least 1,024 tokens
LAYOUTS = [(t, c, p) for t in (4, 8) for c in (1, 2, 4, 8) for p in (8, 16) if t * p >= 64]
PER_GPU = 54 * 24 * 3600 * 16_384 / 419  # seconds between failures of one GPU
BELL = statistics.NormalDist()


# --8<-- [start:losses]
@functools.cache
def largest_normal(n: int) -> float:
    """Mean of the largest of n normal numbers."""
    points = [0.005 * (k + 0.5) for k in range(-1600, 1600)]
    return 0.005 * sum((x > 0) - BELL.cdf(x) ** n for x in points)


def parts(n: int, batch: int, layout: tuple[int, int, int]) -> dict[str, float]:
    """Seconds of a step on n GPUs by cause, without failures and saves."""
    t, c, p = layout
    m = batch * t * c * p / n  # micro-batches of one sequence
    work = 6 * PARAMETERS * batch * SEQUENCE / n / RATE
    keys = 2 * 2 * SEQUENCE * KEYS / t * LAYERS / p  # bytes of keys and values, one micro-batch
    context = m * 3 * (c - 1) / c * keys / CARD  # two all-gathers and a reduce-scatter
    slots = max(m + (p - 1) / CHUNKS, p + (m - 1) / CHUNKS)  # see the page
    bubble = (work + context) * (slots / m - 1)
    copies = n / (t * p)  # ranks with the same parameters: data and context parallelism
    gradients = 0.5 * 2 * (copies - 1) / copies * 2 * PARAMETERS / (t * p) / CARD
    return {
        "work": work,
        "bubble": bubble,
        "keys": context,
        "stragglers": SIGMA * largest_normal(n) * (work + bubble + context),
        "gradients": gradients,
    }


def plan(n: int, step: float) -> tuple[int, float]:
    """Steps between saves (Young's interval, rounded to steps), and the goodput."""
    between = PER_GPU / n
    steps = max(round(math.sqrt(2 * SAVE * between) / step), 1)
    work = steps * step
    attempts = math.expm1((work + SAVE) / between)
    return steps, work / between * math.exp(-RESTART / between) / attempts


# --8<-- [end:losses]


# --8<-- [start:simulate]
def simulate(n: int, batch: int, layout: tuple[int, int, int], count: int) -> float:
    """Mean seconds per step that is saved, over `count` saved steps."""
    rng, between, spent = random.Random(n), PER_GPU / n, parts(n, batch, layout)
    base = spent["work"] + spent["bubble"] + spent["keys"]
    every, _ = plan(n, sum(spent.values()))
    clock, done, saved = 0.0, 0, 0
    failure = rng.expovariate(1 / between)
    while saved < count:
        slowest = BELL.inv_cdf(rng.random() ** (1 / n))  # the largest of n normals
        clock += base * (1 + SIGMA * slowest) + spent["gradients"]
        done += 1
        if done - saved == every:
            clock += SAVE
            if clock <= failure:
                saved = done
        if clock > failure:  # back to the last save; a failure may interrupt a restart
            clock, done = failure, saved
            while (life := rng.expovariate(1 / between)) < RESTART:
                clock += life
            failure, clock = clock + life, clock + RESTART
    return clock / saved


# --8<-- [end:simulate]


def days(n: int, batch: int, layout: tuple[int, int, int]) -> float:
    step = sum(parts(n, batch, layout).values())
    return TOKENS / (batch * SEQUENCE) * step / plan(n, step)[1] / 86400


def best(n: int, batch: int) -> tuple[int, int, int]:
    return min(LAYOUTS, key=lambda layout: days(n, batch, layout))


def shares(n: int, batch: int, layout: tuple[int, int, int]) -> dict[str, float]:
    spent = parts(n, batch, layout)
    step = sum(spent.values())
    _, useful = plan(n, step)
    share = {name: seconds / step * useful for name, seconds in spent.items()}
    return share | {"failures and saves": 1 - useful}


def largest_loss(n: int, batch: int, layout: tuple[int, int, int]) -> str:
    losses = shares(n, batch, layout)
    return max((name for name in losses if name != "work"), key=losses.__getitem__)


def vary() -> None:
    """Vary the layout, halve and double each assumption, and check what stays true."""
    alone = [layout for layout in LAYOUTS if layout[1] == 1]
    seen = set()
    for name in ("RATE", "SIGMA", "SAVE", "RESTART", "CHUNKS", "PER_GPU", "CARD"):
        assumed = globals()[name]
        for factor in (0.5, 2):
            globals()[name] = assumed * factor
            assert globals()[name] != assumed
            for n, layout in itertools.product((65_536, 131_072), alone):
                assert largest_loss(n, BATCH, layout) == "bubble", (name, factor, n, layout)
                assert best(n, BATCH)[1] == 8, (name, factor, n)
            half, whole = (days(n, BATCH, best(n, BATCH)) for n in (65_536, 131_072))
            assert whole < 0.8 * half, (name, factor)
            seen.add(largest_loss(131_072, BATCH, best(131_072, BATCH)))
        globals()[name] = assumed
    print("with each assumption halved and doubled, on 65,536 and on 131,072 GPUs:")
    print("  without context parallelism, the bubble is the largest loss in every layout")
    print("  CP 8 needs the fewest days; 131,072 GPUs need less than 0.8 of the days of 65,536")
    print(f"  the largest loss with CP 8 on 131,072 GPUs: {' or '.join(sorted(seen))}")


def draw(rows: dict[str, dict[str, float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "whole", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    colours = ("#0b6e99", "#c2410c", "#15803d", "#a16207", "#7c3aed", "#71717a")
    names = [*next(iter(rows.values()))]
    bottom = [0.0] * len(rows)
    for name, colour in zip(names, colours, strict=True):
        heights = [row[name] for row in rows.values()]
        axes.bar(list(rows), heights, bottom=bottom, color=colour, width=0.65, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("fraction of the GPUs' time")
    axes.set_xlabel("GPUs")
    axes.set_ylim(0, 1)
    axes.tick_params("x", labelsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        frameon=False, ncols=6, loc="upper center", fontsize=11, labelcolor="linecolor",
        handlelength=1, columnspacing=1,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig("whole_run.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    large, bars = 131_072, {}
    print("                      fractions of a step                          days of training")
    print(
        "   GPUs  batch  t·c·p  works bubble   keys   slow  grads  goodput  predicted simulated"
        "  MFU"
    )
    for n, batch, layout in (
        *((n, BATCH, PUBLISHED) for n in (1_024, 4_096, 16_384, 65_536, large)),
        *((n, BATCH, best(n, BATCH)) for n in (16_384, 65_536, large)),
        (large, 8 * BATCH, PUBLISHED),
    ):
        spent = parts(n, batch, layout)
        step = sum(spent.values())
        _, useful = plan(n, step)
        predicted = days(n, batch, layout)
        count = 16_000 if n < 65_536 else 60_000
        seen = TOKENS / (batch * SEQUENCE) * simulate(n, batch, layout, count) / 86400
        assert abs(seen / predicted - 1) < 0.03, (n, predicted, seen)
        share = shares(n, batch, layout)
        cells = " ".join(f"{seconds / step:6.1%}" for seconds in spent.values())
        print(
            f"{n:7,} {batch:6} {'·'.join(map(str, layout)):>6} {cells}  {useful:7.1%}"
            f" {predicted:10.1f} {seen:9.1f} {share['work'] * RATE / 989e12:4.0%}"
        )
        if layout == PUBLISHED or n > 16_384:
            more = "\nbatch × 8" if batch > BATCH else f"\nCP {layout[1]}" * (layout[1] > 1)
            bars[f"{n:,}{more}"] = share
    vary()
    draw(bars)


if __name__ == "__main__":
    main()
