"""Computes how many GPUs should train and how many should sample, and tries every split.

A training step needs W GPU-seconds, and sampling the answers of one step needs S GPU-seconds.
The table compares the formulas for four ways to share the GPUs with a simulation of every
split. Look at the last column: with half of the GPUs on each side, a step takes longer.
Draws split_gpus.svg.
"""

import bisect
import heapq
import math
import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

GPUS, BATCH = 16, 512  # answers that one training step uses
SLOTS, SPEED = 16, 50.0  # answers that a GPU samples at the same time; tokens/s of each answer
TRAIN = 400.0  # W: GPU-seconds of one training step
MEAN, LONGEST = 1000, 6000  # tokens of an answer
SWITCH = 4.0  # seconds, if the same GPUs train and sample in turn: there and back
BOUND = 3  # an answer may be at most this number of training steps old
CONTINUOUS = f"continuous, age ≤ {BOUND}"


def answer_seconds(rng: random.Random) -> float:
    """Draw the duration of one answer. Most answers are short, and a few are very long."""
    spread = 0.8  # of the logarithm of the length; the mean of the uncut lengths is MEAN
    length = rng.lognormvariate(math.log(MEAN) - spread**2 / 2, spread)
    return min(length, LONGEST) / SPEED


# --8<-- [start:formulas]
def best_trainers(gpus: int, train: float, sample: float, overlap: bool) -> float:
    """Return the number of training GPUs that makes a step shortest.

    With overlap, both sides must need the same time: W / N = S / M. Without overlap, the two
    times add up, and the derivative of W / N + S / M is zero where N / M is the square root of
    W / S.
    """
    if overlap:
        return gpus * train / (train + sample)
    return gpus * math.sqrt(train) / (math.sqrt(train) + math.sqrt(sample))


def step_seconds(gpus: int, x: int, train: float, sample: float, overlap: bool) -> float:
    """Return the seconds of a step with x training GPUs, if no long answer delays it."""
    sides = train / x, sample / (gpus - x)
    return max(sides) if overlap else sum(sides)


# --8<-- [end:formulas]


def nearest_split(sample: float, overlap: bool) -> tuple[int, float]:
    """Return the whole number of training GPUs that the formula chooses, and its seconds."""
    x = best_trainers(GPUS, TRAIN, sample, overlap)
    near = max(1, int(x)), min(GPUS - 1, int(x) + 1)
    splits = {n: step_seconds(GPUS, n, TRAIN, sample, overlap) for n in near}
    nearest = min(splits, key=splits.__getitem__)
    return nearest, splits[nearest]


def last_end(durations: list[float], slots: int) -> float:
    """Return when the last of these answers ends. A free slot takes the next answer."""
    ends = durations[:slots]
    heapq.heapify(ends)
    for duration in durations[slots:]:
        heapq.heapreplace(ends, ends[0] + duration)
    return max(ends)


def in_batches(batches: list[list[float]], slots: int, train: float, overlap: bool) -> float:
    """Return the mean seconds of a step. All answers of a batch must end before it is used."""
    sampled = [last_end(batch, slots) for batch in batches]
    steps = [max(each, train) if overlap else each + train for each in sampled]
    return sum(steps) / len(steps)


# --8<-- [start:continuous]
def continuous(durations: list[float], slots: int, train: float, steps: int):
    """Simulate samplers that never wait for the end of a batch.

    An answer may start if fewer than (steps done + 1 + BOUND) batches were started before it.
    A step trains on the answers that would otherwise become too old, and fills its batch with
    the answers that ended first. Returns the mean seconds of the second half of the steps, and
    the ages of all answers, in steps.
    """
    free, now = [0.0] * slots, 0.0  # when each slot becomes free; the end of the last step
    begins: list[float] = []
    ends: list[float] = []
    done: list[float] = []  # the end of each training step
    untrained: set[int] = set()
    ages = []

    def version(answer: int) -> int:
        return bisect.bisect_right(done, begins[answer])

    for step in range(steps):
        while len(begins) < (step + 1 + BOUND) * BATCH:
            untrained.add(len(begins))
            begins.append(max(heapq.heappop(free), now))
            ends.append(begins[-1] + durations[len(ends)])
            heapq.heappush(free, ends[-1])
        due = {i for i in untrained if version(i) <= step - BOUND}
        first = sorted(untrained - due, key=ends.__getitem__)[: BATCH - len(due)]
        chosen = due.union(first)
        assert len(chosen) == BATCH
        now = max(now, *(ends[i] for i in chosen)) + train
        ages += [step - version(i) for i in chosen]
        untrained -= chosen
        done.append(now)
    half = steps // 2
    return (done[-1] - done[half - 1]) / (steps - half), ages


# --8<-- [end:continuous]


def draw(rows: dict[str, dict[int, float]], sample: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "split", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    colours = ("#c2410c", "#7c3aed", "#0b6e99")
    for (name, found), colour in zip(rows.items(), colours, strict=True):
        axes.plot(list(found), list(found.values()), "o", color=colour, label=name)
    xs = [1 + k / 20 for k in range(20 * (GPUS - 2) + 1)]
    both = [max(TRAIN / x, sample / (GPUS - x)) for x in xs]
    added = [TRAIN / x + sample / (GPUS - x) for x in xs]
    axes.plot(xs, added, "--", color=colours[0], lw=1.5, label="formula without overlap")
    axes.plot(xs, both, color=colours[2], lw=1.5, label="formula with overlap")
    axes.set(xlabel=f"training GPUs of {GPUS} (the others sample)", ylim=(0, 470))
    axes.set_ylabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper center", labelcolor="linecolor")
    figure.tight_layout()
    figure.savefig("split_gpus.svg", transparent=True, metadata={"Date": None})


def expect(correct: bool, lesson: str, found: str) -> None:
    """Raise an error that names the recorded lesson if the settings do not show it."""
    assert correct, f"with the recorded settings, {lesson}; your settings give {found}"


def check(rows: dict[str, dict[int, float]], ages: dict[int, int], sample: float) -> None:
    """Compare the simulation with the formulas. `ages` holds the highest age of each split."""
    tail = LONGEST / SPEED
    for (name, row), overlap in zip(rows.items(), (False, True, True), strict=True):
        for x, seconds in row.items():
            # a part of the run can have short answers; a long answer costs at most `tail`
            least = step_seconds(GPUS, x, TRAIN, sample, overlap)
            found = f"{seconds:.1f} s and {least:.1f} s ({name}, {x} training GPUs)"
            lesson = f"a step needs the time of the formula, and at most {tail:.0f} s more"
            expect(0.93 * least < seconds < least + tail, lesson, found)
        x, least = nearest_split(sample, overlap)
        best = min(row, key=row.__getitem__)
        found = f"{best} GPUs and {row[best]:.1f} s, not {x} and {least:.1f} s ({name})"
        if row is rows[CONTINUOUS]:
            seconds, half = row[GPUS // 2], step_seconds(GPUS, GPUS // 2, TRAIN, sample, True)
            lesson = "the best split is the split of the formula"
            expect(best == x and row[best] < 1.1 * least, lesson, found)
            found = f"{seconds:.1f} s with half of the GPUs, {half:.1f} s by the formula"
            expect(
                abs(seconds / half - 1) < 0.03, "a step needs the time of the formula", found
            )
            expect(half > 1.15 * least, "half of the GPUs is at least 15% slower", found)
        else:
            lesson = "if a step waits for its longest answer, more GPUs should sample"
            expect(best <= x and row[best] > 1.2 * least, lesson, found)
    for x, each in enumerate(zip(*(row.values() for row in rows.values()), strict=True), 1):
        found = " and ".join(f"{seconds:.1f}" for seconds in each) + f" s ({x} training GPUs)"
        expect(each[0] > each[1] > 0.99 * each[2], "less waiting makes a step shorter", found)
        lesson = (
            f"the highest age is {BOUND} if at most half of the GPUs train, and lower otherwise"
        )
        found = f"a highest age of {ages[x]} ({x} training GPUs)"
        expect((ages[x] == BOUND) == (x <= GPUS // 2), lesson, found)


def main() -> None:
    rng, steps = random.Random(0), 24
    durations = [answer_seconds(rng) for _ in range((steps + BOUND + 1) * BATCH)]
    batches = [durations[i * BATCH : (i + 1) * BATCH] for i in range(steps)]
    mean = sum(durations) / len(durations)
    sample = BATCH * mean / SLOTS  # S: GPU-seconds of one batch
    print(f"training {TRAIN:.0f} and sampling {sample:.0f} GPU-seconds per step, {GPUS} GPUs")
    print(f"an answer lasts {mean:.1f} s on average, and at most {LONGEST / SPEED:.0f} s")

    names = ("separate, synchronous", "separate, one step off", CONTINUOUS)
    rows: dict[str, dict[int, float]] = {name: {} for name in names}
    highest: dict[int, int] = {}
    for x in range(1, GPUS):
        slots = (GPUS - x) * SLOTS
        rows[names[0]][x] = in_batches(batches, slots, TRAIN / x, overlap=False)
        rows[names[1]][x] = in_batches(batches, slots, TRAIN / x, overlap=True)
        rows[names[2]][x], ages = continuous(durations, slots, TRAIN / x, steps)
        assert len(ages) == steps * BATCH and ages[:BATCH] == [0] * BATCH and min(ages) == 0
        highest[x] = max(ages)
        assert highest[x] <= BOUND
    in_turn = in_batches(batches, GPUS * SLOTS, TRAIN / GPUS + SWITCH, overlap=False)
    work = (TRAIN + sample) / GPUS
    print()
    print(f"{'':26}{'formula':14}{'simulation':14}with {GPUS // 2} training GPUs")
    print(f"{'':26}GPUs  seconds GPUs  seconds seconds")
    print(f"{'all GPUs in turn':26} all {work + SWITCH:8.1f}  all {in_turn:8.1f}")
    for name, overlap in zip(names, (False, True, True), strict=True):
        x = best_trainers(GPUS, TRAIN, sample, overlap)
        _, least = nearest_split(sample, overlap)
        found = min(rows[name], key=rows[name].__getitem__)
        print(f"{name:26}{x:4.2f} {least:8.1f} {found:4} {rows[name][found]:8.1f}", end="")
        print(f" {rows[name][GPUS // 2]:7.1f}")
    # with equal work, overlap on separate GPUs cannot be faster than taking turns on all
    balanced = best_trainers(GPUS, TRAIN, sample, overlap=True)
    assert math.isclose(TRAIN / balanced, work) and math.isclose(
        sample / (GPUS - balanced), work
    )
    print()
    print(f"the work alone, shared evenly by all GPUs: {work:.1f} s, in turn or with overlap")
    print(f"in turn, waiting for the longest answer adds {in_turn - work - SWITCH:.1f} s")
    draw(rows, sample)
    check(rows, highest, sample)
    best = min(rows[CONTINUOUS].values())
    found = f"{in_turn:.1f} s in turn, {best:.1f} s continuous, {work:.1f} s of work"
    expect(in_turn > best > work, "overlap saves the waiting, but no work", found)


if __name__ == "__main__":
    main()
