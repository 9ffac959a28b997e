"""Finds one slow rank of three in the profiles of all ranks: it is the rank that waits least.

All ranks have the same step time, because the all-reduce ends for all of them at once. So step
times do not show which rank is slow. GPU utilisation does not show it either, because a GPU
that waits in a collective counts as busy.
"""

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

SLOW, STEPS = 1, 8


# --8<-- [start:step]
def step(rank: int, gradient: torch.Tensor) -> None:
    with record_function("compute"):
        time.sleep(0.3 if rank == SLOW else 0.06)  # a hot GPU, a bad link, a long sequence
    with record_function("all_reduce"):
        dist.all_reduce(gradient)


def times(trace: str) -> dict[str, float]:
    """Milliseconds in each named range of a rank's trace, the median of the steps."""
    with open(trace) as file:
        events = json.load(file)["traceEvents"]
    names = ("compute", "all_reduce")
    ranges = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in names]
    durations = {name: [e["dur"] / 1e3 for e in ranges if e["name"] == name] for name in names}
    return {name: statistics.median(durations[name]) for name in names}


# --8<-- [end:step]


def draw(ranks: list[dict[str, float]]) -> None:
    """One bar for each rank: compute, then the wait."""
    import matplotlib  # here, because only one rank draws

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "straggler", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 2.3))
    for rank, spent in enumerate(ranks):
        axes.barh(rank, spent["compute"], color="#0b6e99", height=0.7)
        axes.barh(rank, spent["all_reduce"], left=spent["compute"], color="#c2410c", height=0.7)
    middle = ranks[0]["compute"] / 2
    axes.text(middle, 0, "compute", color="white", ha="center", va="center")
    middle = ranks[0]["compute"] + ranks[0]["all_reduce"] / 2
    axes.text(middle, 0, "in all_reduce", color="white", ha="center", va="center")
    axes.set(xlabel="time in a step (ms)", yticks=range(len(ranks)))
    axes.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("straggler.svg", transparent=True, metadata={"Date": None})


# --8<-- [start:main]
def main() -> None:
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    gradient = torch.ones(1000)
    step(rank, gradient)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        dist.barrier()  # the profilers start at different times
        start = time.perf_counter()
        for _ in range(STEPS):
            step(rank, gradient)
        mean = 1e3 * (time.perf_counter() - start) / STEPS
    profiler.export_chrome_trace(f"rank_{rank}.json")
    ranks: list = [None] * n
    dist.all_gather_object(ranks, times(f"rank_{rank}.json"))
    # --8<-- [end:main]
    if rank == 0:
        for number, spent in enumerate(ranks):
            whole = sum(spent.values())
            asked = 300 if number == SLOW else 60
            assert spent["compute"] > 0.99 * asked and whole > 240, spent
            assert whole < 4 * mean  # no median can be more than twice the mean
            print(
                f"rank {number}: step ≈{whole:.0f} ms, compute ≈{spent['compute']:.0f} ms, "
                f"in all_reduce ≈{spent['all_reduce']:.0f} ms"
            )
        least = min(range(n), key=lambda r: ranks[r]["all_reduce"])
        print(f"waits least: rank {least}")
        assert least == SLOW
        wholes = [sum(spent.values()) for spent in ranks]
        print(f"slowest step over fastest: ≈{max(wholes) / min(wholes):.2f}")
        assert max(wholes) < 3 * min(wholes)  # compute alone differs by five
        draw(ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 3:
        sys.exit("straggler.py needs 3 ranks or more, started by torchrun")
    torch.set_num_threads(1)
    main()
