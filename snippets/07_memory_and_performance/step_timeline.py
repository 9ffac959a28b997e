"""Which part of a training step sets its time? Four lanes, with and without overlap.

A worker reads a batch, the host launches kernels, the GPU computes, and the network reduces the
gradients. The program simulates six steps from assumed times and prints the time per step. In
steady state, this time is at least the work of the busiest lane. Without any overlap, it is the
sum of all lanes. The program draws the first two cases in step_timeline.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PIECES = 6  # of a step: two of forward, three of backward, and the optimizer
STEPS = 6
LANES = ("input", "host", "GPU", "network")
Span = tuple[str, int, float, float]  # lane, step, start and end in ms


# --8<-- [start:simulate]
def simulate(read: float, launch: float, kernel: float, reduce: float, overlap: bool) -> list:
    """The spans of all steps. Times in ms: of a batch, and of each piece of the other lanes."""
    spans: list[Span] = []
    free = dict.fromkeys(LANES, 0.0)  # when a lane has finished its work so far

    def run(lane: str, step: int, ready: float, length: float) -> float:
        if not overlap:  # a lane also waits until all other lanes have finished
            ready = max(free.values())
        start = max(free[lane], ready)
        free[lane] = start + length
        spans.append((lane, step, start, start + length))
        return start + length

    for step in range(STEPS):
        batch = run("input", step, 0.0, read)  # a worker reads ahead
        reduced = 0.0
        for piece in range(PIECES):
            launched = run("host", step, batch, launch)
            last = piece == PIECES - 1  # the optimizer needs all gradients
            done = run("GPU", step, max(launched, reduced) if last else launched, kernel)
            if 2 <= piece < PIECES - 1:  # each piece of backward completes a bucket
                reduced = run("network", step, done, reduce)
    return spans


# --8<-- [end:simulate]


def per_step(spans: list[Span]) -> float:
    """Time in ms from the end of one step to the end of the next, late in the run."""
    ends = [max(end for _, step, _, end in spans if step == i) for i in range(STEPS)]
    return ends[-1] - ends[-2]


def draw(cases: list[tuple[str, list[Span], float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "step_timeline", "font.size": 12}
    figure, rows = plt.subplots(len(cases), 1, figsize=(7, 4.4), sharex=True)
    colours = ("#0b6e99", "#c2410c", "#15803d")
    for axes, (name, spans, time) in zip(rows, cases, strict=True):
        for lane, step, start, end in spans:
            if start < 40:
                row = LANES.index(lane)
                axes.barh(row, end - start, left=start, height=0.8, color=colours[step % 3])
                axes.barh(row, end - start, 0.8, start, color="none", ec="white", lw=0.5)
        axes.set_yticks(range(4), LANES)
        axes.invert_yaxis()
        axes.set(xlim=(0, 40))
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(f"{name}: a step every {time:.0f} ms", fontsize=12, loc="left")
    axes.set_xlabel("time (ms); each colour is one step")
    figure.tight_layout()
    figure.savefig("step_timeline.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    cases = [  # ms: read a batch; launch, compute and reduce one piece
        ("nothing overlaps", 5, 0.5, 1.0, 1.0, False),
        ("everything overlaps", 5, 0.5, 1.0, 1.0, True),
        ("slow input", 12, 0.5, 1.0, 1.0, True),
        ("slow launches", 5, 2.0, 1.0, 1.0, True),
        ("slow network", 5, 0.5, 1.0, 3.0, True),
    ]
    print("work of each lane in a step, and the time per step, in ms")
    print(f"{'':20}  input   host    GPU  network   step")
    drawn, times = [], {}
    for name, read, launch, kernel, reduce, overlap in cases:
        spans = simulate(read, launch, kernel, reduce, overlap)
        work = [sum(e - s for lane, i, s, e in spans if (lane, i) == (n, 4)) for n in LANES]
        time = times[name] = per_step(spans)
        cells = "".join(f"{ms:7.1f}" for ms in work[:3])
        print(f"{name:20}{cells}{work[3]:9.1f}{time:7.1f}")
        assert time == sum(work) if not overlap else max(work) <= time < sum(work)
        drawn.append((name, spans, time))
    # by hand: two pieces of forward, one of backward, three all-reduces, the optimizer
    assert times["slow network"] == 2 + 1 + 3 * 3.0 + 1
    assert times["slow input"] == 12 and times["slow launches"] == PIECES * 2.0
    assert times["everything overlaps"] == PIECES + 1.0  # an all-reduce is exposed
    draw(drawn[:2])


if __name__ == "__main__":
    main()
