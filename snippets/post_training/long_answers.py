"""Simulates three ways to handle answers that are much longer than the others.

A step needs 256 answers. Every running answer grows by one token in a tick. A batch can wait
for its longest answer. With over-sampling, more answers are started. When 256 of them have
ended, the others are aborted. With partial rollouts, the others continue in the next step. Look
at the mean length of the answers that are used: over-sampling prefers short answers.
Draws long_answers.svg.
"""

import bisect
import math
import random
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

BATCH, MEAN, LONGEST = 256, 1000, 8000  # answers of a step; tokens of an answer
# seconds of a tick on an engine: for all weights, and for the cache of each running answer.
# The planner of this book estimates them for Llama 3 8B on an H100 and 2,048 tokens an answer.
WEIGHTS, CACHE = 6.4e-3, 0.1145e-3
BINS = [0, 500, 1000, 2000, 4000, LONGEST + 1]


def long_tail(rng: random.Random) -> int:
    """Draw the length of an answer. The median is 638, and 3% exceed 4,000 tokens."""
    length = rng.lognormvariate(math.log(MEAN) - 0.45, math.sqrt(0.9))
    return max(1, min(round(length), LONGEST))


def exponential(rng: random.Random) -> int:
    return max(1, round(rng.expovariate(1 / MEAN)))


class Record:
    """Counts of a simulation: ticks of each step, lengths, ages in steps, wasted tokens."""

    def __init__(self) -> None:
        self.ticks: list[int] = []
        self.started: list[int] = []
        self.used: list[int] = []
        self.ages: list[int] = []
        self.wasted = 0
        self.running: list[list[int]] = []  # at the end: [tokens left, length, first step]


# --8<-- [start:simulate]
def simulate(draw: Callable, running: int, steps: int, partial: bool) -> Record:
    """Keep `running` answers; a step ends when BATCH of them have ended.

    With `running` equal to BATCH, a step waits for its longest answer. With more, the answers
    that have not ended are aborted, or continue in the next step if `partial` is true.
    """
    rng, record = random.Random(1), Record()
    answers: list[list[int]] = []
    for step in range(steps):
        while len(answers) < running:
            length = draw(rng)
            record.started.append(length)
            answers.append([length, length, step])
        answers.sort()
        ticks = answers[BATCH - 1][0]  # when the last answer of the batch ends
        record.ticks.append(ticks)
        for left, length, first in answers[:BATCH]:
            record.used.append(length)
            record.ages.append(step - first)
            assert left <= ticks
        answers = [[left - ticks, length, first] for left, length, first in answers[BATCH:]]
        if not partial:
            record.wasted += ticks * len(answers)
            answers = []
    record.running = answers
    return record


# --8<-- [end:simulate]


# --8<-- [start:seconds]
def step_seconds(record: Record, engines: int) -> float:
    """Mean seconds of a step, if the engines share the running answers evenly."""
    tokens = sum(record.used) + record.wasted
    tokens += sum(length - left for left, length, _ in record.running)
    return (WEIGHTS * sum(record.ticks) + CACHE * tokens / engines) / len(record.ticks)


# --8<-- [end:seconds]


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def check(record: Record, running: int, partial: bool) -> None:
    """Compare the counts with each other: no token and no answer is lost."""
    sampled = sum(record.used) + record.wasted
    sampled += sum(length - left for left, length, _ in record.running)
    assert all(left >= 0 for left, *_ in record.running)
    if partial:
        assert record.wasted == 0
        assert sorted(record.used + [each[1] for each in record.running]) == sorted(
            record.started
        )
    else:
        assert len(record.started) == running * len(record.ticks) and max(record.ages) == 0
    assert sampled <= running * sum(record.ticks)  # a slot samples at most a token in a tick


def picture(record: Record, shares: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "long", "font.size": 12}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.6), width_ratios=(1.2, 1))
    rng = random.Random(6)
    lengths = sorted(long_tail(rng) for _ in range(20))
    limit = lengths[15]
    ended = sum(length <= limit for length in lengths)
    for at, length in enumerate(lengths):
        left.barh(at, min(length, limit), color="#0b6e99")
        left.barh(at, max(0, length - limit), left=limit, color="#7dd3fc")
    left.axvline(limit, color="#c2410c", ls="--")
    left.text(
        limit + 90, 3, f"{ended} of 20 answers have\nended: the step begins", color="#c2410c"
    )
    left.set(
        xlabel="ticks (tokens of an answer)", ylabel="answers, sorted by length", yticks=[]
    )
    left.set_title("one batch", fontsize=12, loc="left")
    names = [f"{low:,}–{high:,}" for low, high in pairwise(BINS[:-1])] + [f"> {BINS[-2]:,}"]
    for k, (name, share) in enumerate(shares.items()):
        colour = ("#71717a", "#c2410c", "#0b6e99")[k]
        right.bar([i + 0.27 * (k - 1) for i in range(len(share))], share, 0.25, color=colour,
                  label=name)  # fmt: skip
    right.set_xticks(range(len(names)), names, rotation=30, ha="right")
    right.set(xlabel="tokens of an answer", ylabel="share of the answers", ylim=(0, 0.72))
    right.legend(frameon=False, labelcolor="linecolor")
    right.set_title("which answers are used", fontsize=12, loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("long_answers.svg", transparent=True, metadata={"Date": None})


def histogram(lengths: list[int]) -> list[float]:
    return [
        sum(low <= n < high for n in lengths) / len(lengths) for low, high in pairwise(BINS)
    ]


def main() -> None:
    steps = 300
    print(f"{BATCH} answers a step; {steps} steps; mean length {MEAN}, longest {LONGEST}")
    print(f"{'answers':9}{'over-sampling:':32}partial rollouts:")
    print(
        f"{'running':9}{'ticks':7}{'tokens':9}{'mean length':16}{'ticks':7}{'mean length':14}",
        end="",
    )
    print("age of answers")
    print(
        f"{'':9}{'a step':7}{'wasted':9}{'of used':16}{'a step':7}{'of used':14}mean  highest"
    )
    rows = {}
    for running in (256, 288, 320, 384, 512):
        over, part = (simulate(long_tail, running, steps, partial) for partial in (False, True))
        check(over, running, partial=False)
        check(part, running, partial=True)
        rows[running] = over, part
        share = over.wasted / (over.wasted + sum(over.used))
        text = f"{running:7}  {fmean(over.ticks):6.0f} {share:7.1%}  {fmean(over.used):11.0f}"
        text += f"     {fmean(part.ticks):6.0f} {fmean(part.used):12.0f}"
        print(f"{text} {fmean(part.ages):5.2f} {max(part.ages):8}")
        # Little's law: for every distribution of lengths, an answer takes part in
        # running / BATCH steps on average
        assert abs(fmean(part.ages) - (running / BATCH - 1)) < 0.02
        # over-sampling uses the shortest answers; partial rollouts use all of them in the end
        everything = fmean(over.started)
        assert abs(fmean(part.used) / fmean(part.started) - 1) < 0.02
        assert (fmean(over.used) < 0.95 * everything) == (running > BATCH)

    over, part = rows[320]
    waiting = rows[256][0]
    assert waiting.ticks == rows[256][1].ticks  # nothing is left over, so both are the same
    assert fmean(waiting.ticks) > 5 * fmean(waiting.used)
    assert (
        fmean(over.ticks) < fmean(waiting.ticks) / 3
        and fmean(part.ticks) < fmean(over.ticks) * 2
    )
    print()
    heads = [f"< {high:,}" for high in BINS[1:-1]] + [f"≤ {LONGEST:,}"]
    print(f"{'tokens of an answer':25}" + "".join(f"{head:>10}" for head in heads))
    shares = {"started": histogram(over.started), "used by over-sampling": histogram(over.used)}
    shares["used by partial rollouts"] = histogram(part.used)
    for name, share in shares.items():
        print(f"{name:25}" + "".join(f"{each:10.1%}" for each in share))
    begun, used, kept = shares.values()
    assert used[-1] < begun[-1] / 100 and used[0] > begun[0] * 1.2
    assert all(abs(a - b) < 0.01 for a, b in zip(begun, kept, strict=True))

    print()
    print("seconds of a step     wait for all   over-sampling   partial rollouts")
    ratios = {}
    for engines in (1, 16):
        found = [step_seconds(record, engines) for record in (waiting, over, part)]
        ratios[engines] = found[0] / found[1]
        name = f"{engines} engine" + ("s" if engines > 1 else "")
        print(f"{name:22}{found[0]:12.1f}{found[1]:16.1f}{found[2]:19.1f}")
    # add up one batch tick by tick: an answer runs until it has all its tokens
    lengths = waiting.used[:BATCH]
    ticks = range(max(lengths))
    by_hand = sum(WEIGHTS + CACHE * (BATCH - bisect.bisect(lengths, t)) / 16 for t in ticks)
    one = Record()
    one.ticks, one.used = waiting.ticks[:1], lengths
    assert math.isclose(by_hand, step_seconds(one, 16))
    in_ticks = fmean(waiting.ticks) / fmean(over.ticks)
    assert 5 < in_ticks < 6 and 4.5 < ratios[16] < in_ticks and ratios[1] < 2.5
    # exponential lengths have exact means: of the longest of n, and of the BATCH-th of n
    for running in (BATCH, 320):
        found = fmean(simulate(exponential, running, 600, partial=False).ticks)
        exact = MEAN * (harmonic(running) - harmonic(running - BATCH))
        print(f"exponential lengths, {running} running: {found:.0f} ticks, exactly {exact:.0f}")
        assert abs(found / exact - 1) < 0.02
    picture(over, shares)


if __name__ == "__main__":
    main()
