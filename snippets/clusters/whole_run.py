"""A 405B run on 1,024 to 131,072 GPUs: bubble, noise, gradients and failures at once.

The prediction adds the parts of a step and divides by the goodput. The simulation takes one
step after the other, with the slowest of N ranks drawn for each, and failures that come when
they come.
Assumed: half of the peak while a GPU computes, 1% noise, 4 chunks per stage, gradients in bf16
half hidden, 5 s to save, 3 min to restart. Draws whole_run.svg.
"""

import math
import random
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PARAMETERS, TOKENS, BATCH, SEQUENCE = 405e9, 15.6e12, 2048, 8192
RATE, SIGMA, SAVE, RESTART, CHUNKS = 0.5 * 989e12, 0.01, 5.0, 180.0, 4
STAGES, GROUP = 16, 128  # GPUs that hold one copy: TP 8, PP 16
PER_GPU = 54 * 24 * 3600 * 16_384 / 419  # seconds between failures of one GPU
BELL = statistics.NormalDist()


# --8<-- [start:losses]
def parts(n: int, batch: int) -> dict[str, float]:
    """Seconds of a step on n GPUs, by what they go to; failures come on top."""
    m = batch * GROUP / n  # micro-batches of one sequence
    work = 6 * PARAMETERS * batch * SEQUENCE / n / RATE
    slots = max(m + (STAGES - 1) / CHUNKS, STAGES + (m - 1) / CHUNKS)  # see the page
    bubble = work * (slots / m - 1)
    points = [0.005 * (k + 0.5) for k in range(-1600, 1600)]
    slowest = SIGMA * 0.005 * sum((x > 0) - BELL.cdf(x) ** n for x in points)
    copies = n / GROUP
    gradients = 0.5 * 2 * (copies - 1) / copies * 2 * PARAMETERS / GROUP / 50e9
    return {
        "work": work,
        "bubble": bubble,
        "stragglers": slowest * (work + bubble),
        "gradients": gradients,
    }


def plan(n: int, step: float) -> tuple[int, float]:
    """Steps between saves (Young's interval, in whole steps), and the goodput."""
    between = PER_GPU / n
    steps = max(round(math.sqrt(2 * SAVE * between) / step), 1)
    work = steps * step
    attempts = math.expm1((work + SAVE) / between)
    return steps, work / between * math.exp(-RESTART / between) / attempts


# --8<-- [end:losses]


# --8<-- [start:simulate]
def simulate(n: int, batch: int, count: int) -> float:
    """Mean seconds per step that is kept, over `count` of them."""
    dice, between, spent = random.Random(n), PER_GPU / n, parts(n, batch)
    base = spent["work"] + spent["bubble"]
    every, _ = plan(n, sum(spent.values()))
    clock, done, saved = 0.0, 0, 0
    failure = dice.expovariate(1 / between)
    while saved < count:
        slowest = BELL.inv_cdf(dice.random() ** (1 / n))  # the largest of n normals
        clock += base * (1 + SIGMA * slowest) + spent["gradients"]
        done += 1
        if done - saved == every:
            clock += SAVE
            if clock <= failure:
                saved = done
        if clock > failure:  # back to the last save; it may fail while it restarts
            clock, done = failure, saved
            while (life := dice.expovariate(1 / between)) < RESTART:
                clock += life
            failure, clock = clock + life, clock + RESTART
    return clock / saved


# --8<-- [end:simulate]


def draw(rows: dict[str, dict[str, float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "whole", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    colours = ("#0b6e99", "#c2410c", "#a16207", "#7c3aed", "#71717a")
    names = [*next(iter(rows.values()))]
    bottom = [0.0] * len(rows)
    for name, colour in zip(names, colours, strict=True):
        heights = [row[name] for row in rows.values()]
        axes.bar(list(rows), heights, bottom=bottom, color=colour, width=0.65, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_ylabel("share of the GPUs' time")
    axes.set_xlabel("GPUs")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        frameon=False, ncols=5, loc="upper center", fontsize=11, labelcolor="linecolor",
        handlelength=1, columnspacing=1,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig("whole_run.svg", transparent=True, metadata={"Date": None})


def largest_loss(n: int, batch: int) -> str:
    spent = parts(n, batch)
    step = sum(spent.values())
    _, useful = plan(n, step)
    losses = {name: spent[name] / step * useful for name in spent if name != "work"}
    losses["failures and saves"] = 1 - useful
    return max(losses, key=losses.__getitem__)


def vary_assumptions() -> None:
    """Halve and double each assumption alone; with the batch kept, the bubble stays first."""
    for name in ("RATE", "SIGMA", "SAVE", "RESTART", "CHUNKS", "PER_GPU"):
        assumed = globals()[name]
        for factor in (0.5, 2):
            globals()[name] = assumed * factor
            assert globals()[name] != assumed
            for n in (16_384, 65_536, 131_072):
                assert largest_loss(n, BATCH) == "bubble", (name, factor, n)
        globals()[name] = assumed
    print("each assumption halved, or doubled: the bubble is the largest loss from 16,384 GPUs")
    print(
        f"on, while the batch stays; with 8 times the batch: {largest_loss(131_072, 8 * BATCH)}"
    )


def main() -> None:
    rows, days = {}, {}
    print("               of a step's time                   of all     days of training")
    print(
        "   GPUs  batch works bubble  slow grads          goodput    predicted simulated  MFU"
    )
    for n, batch in (
        (1_024, BATCH), (4_096, BATCH), (16_384, BATCH), (65_536, BATCH), (131_072, BATCH),
        (131_072, 8 * BATCH),
    ):  # fmt: skip
        spent = parts(n, batch)
        step = sum(spent.values())
        _, useful = plan(n, step)
        steps = TOKENS / (batch * SEQUENCE)
        predicted = steps * step / useful / 86400
        seen = steps * simulate(n, batch, count=16_000 if n < 65_536 else 60_000) / 86400
        assert abs(seen / predicted - 1) < 0.03, (n, predicted, seen)
        days[n, batch] = predicted
        share = {name: seconds / step * useful for name, seconds in spent.items()}
        share["failures and saves"] = 1 - useful
        rows[f"{n:,}" + ("\nbatch × 8" if batch > BATCH else "")] = share
        mfu = share["work"] * RATE / 989e12
        cells = " ".join(f"{spent[k] / step:5.1%}" for k in spent)
        print(
            f"{n:7,} {batch:6} {cells}          {useful:5.1%}   "
            f"{predicted:9.1f} {seen:9.1f}   {mfu:4.0%}"
        )
    assert days[131_072, BATCH] > days[65_536, BATCH], "more GPUs took less time"
    vary_assumptions()
    draw(rows)


if __name__ == "__main__":
    main()
