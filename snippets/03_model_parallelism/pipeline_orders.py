"""A picture of three orders of work in a pipeline: the naive split, GPipe and 1F1B.

Four ranks have one quarter of the layers each. Time goes from left to right, and all three
timelines use the same scale. The naive split sends the whole batch through the ranks, so only
one rank works at a time. GPipe and 1F1B cut the batch into eight micro-batches. Both finish at
the same moment, but in 1F1B a rank holds the activations of at most four micro-batches.

The timelines are those of the simulator in schedules.py. Draws pipeline_orders.svg.
"""

import itertools
import math

import matplotlib
import schedules

matplotlib.use("svg")
import matplotlib.pyplot as plt

P, M = 4, 8  # ranks, micro-batches
Timeline = list[tuple[int, str, float, float]]  # rank, F or B, begin and end


def timeline(schedule: schedules.Schedule, scale: int = 1) -> Timeline:
    """All operations of a schedule; one unit is the forward of one micro-batch on one rank.

    `scale` is the size of the schedule's micro-batches in units of batch / M.
    """
    times = schedules.simulate(schedule)
    return [
        (rank, op.kind, scale * float(times[op][0]), scale * float(times[op][1]))
        for rank, ops in enumerate(schedule)
        for op in ops
    ]


def idle(spans: Timeline) -> float:
    """The fraction of the time of all ranks in which they do nothing."""
    busy = sum(end - begin for _, _, begin, end in spans)
    return 1 - busy / (P * max(end for *_, end in spans))


def live(spans: Timeline) -> int:
    """The largest number of forwards on any rank whose backward has not ended yet."""
    most = 0
    for rank in range(P):
        own = [(kind, begin, end) for r, kind, begin, end in spans if r == rank]
        for moment in (begin for kind, begin, _ in own if kind == "F"):
            begun = sum(kind == "F" and begin <= moment for kind, begin, _ in own)
            ended = sum(kind == "B" and end <= moment for kind, _, end in own)
            most = max(most, begun - ended)
    return most


def draw(orders: dict[str, Timeline]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "orders", "font.size": 12}
    figure, axes = plt.subplots(len(orders), 1, figsize=(7.5, 5.4), sharex=True)
    for axis, (title, spans) in zip(axes, orders.items(), strict=True):
        for rank, kind, begin, end in spans:
            axis.barh(
                rank, end - begin, left=begin, height=0.86, color=schedules.COLOURS[kind],
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
        axis.set_yticks(range(P), [f"rank {rank}" for rank in range(P)])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].text(10, 0, "forward of the whole batch", color="#0b6e99", va="center")
    axes[0].text(49.5, 3, "backward of the whole batch", color="#c2410c", va="center")
    axes[1].text(36, 1, "forwards and backwards", va="center")
    axes[1].text(36, 2, "of eight micro-batches", va="center")
    axes[-1].set_xlabel("time, in units of one micro-batch's forward on one rank")
    figure.tight_layout()
    figure.savefig("pipeline_orders.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    naive = timeline(schedules.gpipe(P, 1), scale=M)  # one micro-batch: the whole batch
    gpipe = timeline(schedules.gpipe(P, M))
    one_f_one_b = timeline(schedules.one_f_one_b(P, M))

    in_order = sorted((begin, end) for *_, begin, end in naive)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(in_order))
    for spans, unit, steps, kinds in (
        (naive, M, P * M, P * ["FB"]),  # a unit: the forward of one piece of work
        (gpipe, 1, M + P - 1, P * [M * "F" + M * "B"]),
        (
            one_f_one_b,
            1,
            M + P - 1,
            [w * "F" + (M - w) * "FB" + w * "B" for w in reversed(range(P))],
        ),
    ):
        assert math.isclose(idle(spans), 1 - M / steps)
        for rank in range(P):
            own = sorted((begin, end, kind) for r, kind, begin, end in spans if r == rank)
            assert "".join(kind for *_, kind in own) == kinds[rank]
            for begin, end, kind in own:  # a backward lasts two units
                assert end - begin == unit * (1 if kind == "F" else 2)
            assert all(old[1] <= new[0] for old, new in itertools.pairwise(own))
            # forwards go down the ranks, and backwards go up
            assert own[0][0] == unit * rank and own[-1][1] == 3 * steps - 2 * unit * rank

    orders = {}
    for name, spans, unit in (
        ("naive split", naive, "batch"),
        ("GPipe", gpipe, "micro-batches"),
        ("1F1B", one_f_one_b, "micro-batches"),
    ):
        end, most = max(end for *_, end in spans), live(spans)
        orders[f"{name}: {idle(spans):.0%} idle, at most {most} {unit} live"] = spans
        print(f"{name:11}  {end:.0f} units, {idle(spans):.1%} idle, at most {most} {unit} live")
    assert [live(spans) for spans in (naive, gpipe, one_f_one_b)] == [1, M, P]
    draw(orders)


if __name__ == "__main__":
    main()
