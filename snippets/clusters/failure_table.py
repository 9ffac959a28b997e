"""Computes the time between failures of any cluster from one published table of failures.

The Llama 3 paper counts 419 unexpected interruptions in 54 days on 16,384 GPUs. Dividing this
number by the GPU-hours gives a failure rate per GPU, and a job on N GPUs has N times this rate.
The simulation draws the lifetime of every GPU separately. Draws failure_table.svg.
"""

import heapq
import math
import random
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# Llama 3 (arXiv 2407.21783), Section 3.3.4 and its table of interruptions
CAUSES = {
    "faulty GPU": 148,
    "HBM3 memory": 72,
    "software": 54,
    "network switch or cable": 35,
    "host maintenance": 32,
    "GPU SRAM": 19,
    "GPU system processor": 17,
    "NIC": 7,
    "NCCL watchdog timeout": 7,
    "silent data corruption": 6,
    "GPU thermal interface, sensor": 6,
    "the rest": 16,
}
GPUS, HOURS = 16_384, 54 * 24
SIZES = (10, 1_000, 16_384, 100_000)


# --8<-- [start:gaps]
def gaps_between_failures(parts: int, mean: float, shape: float, count: int) -> list[float]:
    """Hours between the failures of a cluster of `parts` parts that fail independently.

    The lifetime of a part is Weibull(shape) with the mean `mean`; then the part is replaced.
    Shape 1: age does not matter. Below 1: parts die young. Above 1: parts wear out.
    """
    rng = random.Random(parts)
    scale = mean / math.gamma(1 + 1 / shape)
    queue = []  # the next failure of each part, earliest first
    for part in range(parts):
        fails = 0.0 if shape == 1 else -10 * mean * rng.random() - 5 * mean  # mix the ages
        while fails <= 0:
            fails += rng.weibullvariate(scale, shape)
        queue.append((fails, part))
    heapq.heapify(queue)
    before, gaps = 0.0, []
    while len(gaps) < count:
        now, part = queue[0]
        heapq.heapreplace(queue, (now + rng.weibullvariate(scale, shape), part))
        gaps.append(now - before)
        before = now
    return gaps


# --8<-- [end:gaps]


def human(hours: float) -> str:
    for unit, size in (("days", 24), ("h", 1)):
        if hours >= 2 * size:
            return f"{hours / size:.1f} {unit}"
    return f"{hours * 60:.1f} min"


def draw(per_gpu: float, simulated: dict[int, float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "failures", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    ends = [1, 1e6]
    axes.plot(ends, [per_gpu / n for n in ends], color="#0b6e99", linewidth=2)
    axes.plot(list(simulated), list(simulated.values()), "o", color="#c2410c", markersize=7)
    for n, hours in simulated.items():
        left = n > 5_000
        place = {"ha": "right", "va": "top"} if left else {"ha": "left", "va": "center"}
        x, y = (n / 1.3, hours / 1.3) if left else (n * 1.5, hours)
        axes.text(x, y, f"{n:,} GPUs: {human(hours)}", color="#c2410c", **place)
    for hours, name in ((24 * 365, "a year"), (24, "a day"), (1, "an hour")):
        axes.axhline(hours, color="#71717a", linewidth=0.8, linestyle=":")
        axes.text(1e6, hours * 1.15, name, color="#71717a", ha="right")
    axes.set(xscale="log", yscale="log", xlim=(1, 1e6), xlabel="GPUs in one job")
    axes.set_ylabel("hours between failures")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("failure_table.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    failures = sum(CAUSES.values())
    *named, _ = CAUSES.values()
    assert named == sorted(named, reverse=True)  # as in the paper's table
    per_gpu = GPUS * HOURS / failures
    print(f"{failures} failures, {GPUS * HOURS:,} GPU-hours: one in {per_gpu:,.0f} GPU-hours,")
    print(
        f"so a GPU, with its part of the node and network, stops a job once in "
        f"{per_gpu / 24 / 365:.1f} years"
    )
    hardware = failures - CAUSES["software"] - CAUSES["host maintenance"] - CAUSES["the rest"]
    print(f"per 1,000 node-days: {1000 * failures / (54 * GPUS / 8):.2f} failures")
    print(f"faulty GPUs and HBM3: {(148 + 72) / failures:.0%}; all causes except")
    print(f"software, host maintenance and the small ones: {hardware / failures:.0%}")

    print("\n          time between failures   chance of no failure in a day")
    print("   GPUs   predicted   simulated   predicted, simulated")
    simulated = {}
    for n in SIZES:
        between = per_gpu / n
        gaps = gaps_between_failures(n, per_gpu, shape=1, count=4000)
        simulated[n] = statistics.fmean(gaps)
        quiet = math.exp(-24 / between)
        seen = sum(gap > 24 for gap in gaps) / len(gaps)
        # the mean of k gaps has a relative error of 1/sqrt(k): allow four of them
        assert abs(simulated[n] / between - 1) < 4 / math.sqrt(len(gaps)), n
        assert abs(seen - quiet) < 0.03, n
        row = f"{human(between):>11} {human(simulated[n]):>11}"
        print(f"{n:7,} {row}   {quiet:9.1%} {seen:10.1%}")

    node = per_gpu / 8
    print("\n2,048 nodes; three laws for the life of a node; gaps between failures of the job:")
    for shape, word in ((0.7, "die young"), (1.0, "no aging"), (3.0, "wear out")):
        gaps = gaps_between_failures(2048, node, shape, count=4000)
        mean, spread = statistics.fmean(gaps), statistics.stdev(gaps)
        share = sum(gap > mean for gap in gaps) / len(gaps)
        assert abs(mean * 2048 / node - 1) < 0.12 and abs(spread / mean - 1) < 0.12, shape
        assert abs(share - 1 / math.e) < 0.03, shape
        alone = gaps_between_failures(1, node, shape, count=4000)  # one node: no such effect
        one = statistics.stdev(alone) / statistics.fmean(alone)
        law = math.sqrt(math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2 - 1)
        assert abs(one / law - 1) < 0.1, shape
        print(
            f"  {word:9}: mean {mean:.2f} h, spread/mean {spread / mean:.2f} "
            f"(of one node {one:.2f}), longer than the mean {share:.0%}"
        )
    draw(per_gpu, simulated)


if __name__ == "__main__":
    main()
