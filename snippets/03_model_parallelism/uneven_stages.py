"""One slow stage sets the pace of all: predicted m·max + the rest once, and measured.

Four stages share 16 layers and a head that costs as much as 4 layers. Split by count, the last
stage does twice the work of the others; split by cost, all do the same. Each rank sleeps for
its stage's time (5 ms for a layer) through 1F1B; a rank's backward takes twice its forward.
"""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist

LAYER, HEAD, M = 0.005, 4, 8  # seconds of a layer's forward; the head in layers; micro-batches
SPLITS = {"by count": [4, 4, 4, 4], "by cost": [5, 5, 5, 1]}  # layers on each rank


def balance(costs: list[float], p: int) -> list[int]:
    """Cut a list of layer costs into p runs so that the dearest run is as cheap as possible."""
    best = min(
        itertools.combinations(range(1, len(costs)), p - 1),
        key=lambda cuts: max(
            sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))
        ),
    )
    return [b - a for a, b in itertools.pairwise((0, *best, len(costs)))]


def predict(costs: list[float]) -> float:
    """Time of 1F1B in forwards of a layer: the slowest stage m times, the others once."""
    return 3 * (M * max(costs) + sum(costs) - max(costs))


def run(seconds: float) -> tuple[float, float]:
    """1F1B with this rank's forward taking `seconds`; begin and end by the machine's clock."""
    rank, p = dist.get_rank(), dist.get_world_size()
    warm_up = min(p - 1 - rank, M)
    order = [("F", i) for i in range(warm_up)]
    for i in range(M):
        order += [("F", warm_up + i)] if warm_up + i < M else []
        order.append(("B", i))
    note, sending = torch.zeros(1), []
    begin = time.monotonic()
    for kind, i in order:
        step = 1 if kind == "F" else -1
        if 0 <= rank - step < p:
            dist.recv(torch.empty(1), rank - step, tag=2 * i + (kind == "B"))
        time.sleep(seconds if kind == "F" else 2 * seconds)
        if 0 <= rank + step < p:
            sending.append(dist.isend(note, rank + step, tag=2 * i + (kind == "B")))
    for work in sending:
        work.wait()
    return begin, time.monotonic()


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start with 4 ranks: torchrun --nproc-per-node=4 uneven_stages.py")
    dist.init_process_group("gloo")  # tags and host tensors: gloo, also where there are GPUs
    rank = dist.get_rank()
    # the head is one piece that is dearer than a layer; balance() finds the second split
    assert balance([1.0] * 16 + [float(HEAD)], 4) == [5, 5, 5, 2]  # 1 layer and the head
    run(0.001)  # connects the ranks, not counted

    lengths = []
    for name, layers in SPLITS.items():
        costs = [float(n) for n in layers[:-1]] + [float(layers[-1] + HEAD)]
        dist.barrier()
        spans: list = [None] * 4
        dist.all_gather_object(spans, run(LAYER * costs[rank]))
        lengths.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
        if rank == 0:
            predicted = LAYER * predict(costs)
            busy = 3 * M * sum(costs) / (4 * predict(costs))
            shown = " ".join(f"{cost:g}" for cost in costs)
            print(
                f"{name:8}  cost of the stages {shown}: predicted {1e3 * predicted:.0f} ms, ",
                end="",
            )
            print(f"measured ≈{1e3 * lengths[-1]:.0f} ms, busy {busy:.0%}")
    if rank == 0:
        print(f"by count / by cost: ≈{lengths[0] / lengths[1]:.2f}", end="")
        print(f", predicted {predict([4, 4, 4, 8]) / predict([5, 5, 5, 5]):.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
