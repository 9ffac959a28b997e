"""Simulate copies that run during kernels, and compare the total time with a formula.

A batch is divided into k chunks. Each chunk is copied in, computed and copied out. A stream
runs its operations in order. An engine (one for copies in, one for kernels, one for copies out)
runs one operation at a time. Times are simulated milliseconds, so no GPU is needed. Look at the
column "one copy engine": there the order of the calls decides. Draws overlap.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

TIMES = IN, COMPUTE, OUT = 8.0, 12.0, 4.0  # ms for the whole batch


# --8<-- [start:simulate]
def simulate(
    issued: list[tuple[int, str, float]], engines: dict[str, str]
) -> list[tuple[int, str, float, float]]:
    """Return (stream, kind, start, end) of each operation, in the order of the calls.

    `issued` is (stream, kind, duration) in this order. An operation starts when two earlier
    operations have ended: the previous one of its stream and the previous one of its engine.
    """
    stream_free: dict[int, float] = {}
    engine_free: dict[str, float] = {}
    timeline = []
    for stream, kind, duration in issued:
        engine = engines[kind]
        start = max(stream_free.get(stream, 0.0), engine_free.get(engine, 0.0))
        stream_free[stream] = engine_free[engine] = start + duration
        timeline.append((stream, kind, start, start + duration))
    return timeline


# --8<-- [end:simulate]

THREE = {"in": "copy in", "compute": "kernels", "out": "copy out"}
ONE_COPY = {"in": "copies", "compute": "kernels", "out": "copies"}


def chunks(
    k: int, streams: int, launch: float = 0.0, by_kind: bool = False, times=TIMES
) -> list:
    """Return the calls for k chunks, chunk after chunk or, `by_kind`, all copies in first.

    `launch` is a fixed time that every operation needs in addition.
    """
    work = {kind: t / k for kind, t in zip(THREE, times, strict=True)}
    calls = [(c % streams, kind, t + launch) for c in range(k) for kind, t in work.items()]
    return sorted(calls, key=lambda call: list(work).index(call[1])) if by_kind else calls


def end(calls: list, engines: dict[str, str] = THREE) -> float:
    return max(stop for *_, stop in simulate(calls, engines))


def formula(k: int, launch: float = 0.0, times=TIMES) -> float:
    """Return the time by the formula: all stages of one chunk, then the longest stage again."""
    stages = [t / k + launch for t in times]
    return sum(stages) + (k - 1) * max(stages)


def best_number(launch: float, times=TIMES) -> float:
    """Return the best number of chunks by the formula."""
    return ((sum(times) - max(times)) / launch) ** 0.5


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "overlap", "font.size": 12}
    figure, panels = plt.subplots(2, 1, figsize=(7, 4.0), sharex=True)
    colours = {"in": "#0b6e99", "compute": "#c2410c", "out": "#15803d"}
    rows = {"in": 2, "compute": 1, "out": 0}
    for axes, calls, title in (
        (panels[0], chunks(4, streams=1), "one stream: 24 ms"),
        (panels[1], chunks(4, streams=4), "four streams: 15 ms"),
    ):
        for i, (_, kind, start, stop) in enumerate(simulate(calls, THREE)):
            axes.barh(
                rows[kind], stop - start, left=start, color=colours[kind], edgecolor="white"
            )
            axes.text(
                (start + stop) / 2, rows[kind], str(i // 3), color="white", ha="center",
                va="center", fontsize=10,
            )  # fmt: skip
        axes.set_yticks([2, 1, 0], ["copy in", "kernels", "copy out"])
        axes.set_title(title, fontsize=12, color="#52525b", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set(xlim=(0, 24.5))
    panels[1].set_xlabel("time (ms); the number is the chunk", loc="left")
    figure.tight_layout()
    figure.savefig("overlap.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print(f"in {IN:.0f} ms, compute {COMPUTE:.0f} ms, out {OUT:.0f} ms")
    print("chunks   1 stream   k streams   formula   2 streams   one copy engine")
    for k in (1, 2, 4, 8, 16):
        one, many, two = (end(chunks(k, s)) for s in (1, k, 2))
        shared = end(chunks(k, k), ONE_COPY)
        assert abs(many - formula(k)) < 1e-9 and abs(one - (IN + COMPUTE + OUT)) < 1e-9
        print(f"{k:6} {one:10.2f} {many:11.2f} {formula(k):9.2f} {two:11.2f} {shared:17.2f}")
    print(
        "k streams on three engines: equal to the formula; the limit is the longest stage, 12"
    )

    order = {by: end(chunks(4, 4, by_kind=by), ONE_COPY) for by in (False, True)}
    print(f"one copy engine, 4 chunks: chunk by chunk {order[False]:.2f} ms, "
          f"all copies in first {order[True]:.2f} ms")  # fmt: skip
    assert order == {False: IN + COMPUTE + OUT, True: formula(4)}
    launch = 0.05
    times = {k: end(chunks(k, k, launch)) for k in range(1, 65)}
    best = min(times, key=times.get)
    derived = best_number(launch)
    assert abs(best - derived) < 1
    print(f"with 0.05 ms on every operation the best k is {best} ({times[best]:.2f} ms), "
          f"sqrt((in + out) / 0.05) = {derived:.1f}")  # fmt: skip
    for other in ((9, 3, 5), (2, 7, 3), (1, 4, 8)):  # each stage is the longest once
        times = {k: end(chunks(k, k, launch, times=other)) for k in range(1, 33)}
        assert all(abs(t - formula(k, launch, other)) < 1e-9 for k, t in times.items())
        assert abs(min(times, key=times.get) - best_number(launch, other)) < 1
    draw()


if __name__ == "__main__":
    main()
