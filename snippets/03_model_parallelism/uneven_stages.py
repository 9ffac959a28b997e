"""The slowest stage determines the time of a pipeline: predicted and measured.

Four stages have 16 layers and a head that costs as much as 4 layers. If the layers are split by
count, the last stage has twice the work of the others. If they are split by cost, all stages
have the same work. If the slow stage is the first one, 1F1B ends before the formula says. Each
rank runs 1F1B and sleeps for the time of its stage, 5 ms for a layer. A backward takes twice as
long as a forward.
"""

import itertools
import os
import sys
import time

import torch
import torch.distributed as dist

# seconds of a layer's forward, cost of the head in layers, micro-batches
LAYER, HEAD, M = 0.005, 4, 8
SPLITS = {  # layers on each rank; the last rank also has the head
    "by count": [4, 4, 4, 4],
    "slow first": [8, 4, 4, 0],
    "by cost": [5, 5, 5, 1],
}


def balance(costs: list[float], p: int) -> list[int]:
    """Cut a list of layer costs into p groups, so that the most expensive group is cheapest."""
    best = min(
        itertools.combinations(range(1, len(costs)), p - 1),
        key=lambda cuts: max(
            sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))
        ),
    )
    return [b - a for a, b in itertools.pairwise((0, *best, len(costs)))]


def predict(costs: list[float]) -> float:
    """Time of GPipe in forwards of a layer: the slowest stage m times, all others once.

    1F1B takes as long where the slowest stage is the last, and less where it is not.
    """
    return 3 * (M * max(costs) + sum(costs) - max(costs))


def run(seconds: float) -> tuple[float, float, float, float]:
    """1F1B with this rank's forward taking `seconds`: begin and end by the machine's clock.

    The third number is the end by a clock on which nothing is late; messages carry its time.
    The fourth number is the time in which this rank computes.
    """
    rank, p = dist.get_rank(), dist.get_world_size()
    warm_up = min(p - 1 - rank, M)
    order = [("F", i) for i in range(warm_up)]
    for i in range(M):
        order += [("F", warm_up + i)] if warm_up + i < M else []
        order.append(("B", i))
    exact, sending, computing = torch.zeros(1, dtype=torch.float64), [], 0.0
    begin = time.monotonic()
    for kind, i in order:
        step = 1 if kind == "F" else -1
        if 0 <= rank - step < p:
            arrived = torch.empty_like(exact)
            dist.recv(arrived, rank - step, tag=2 * i + (kind == "B"))
            exact = torch.maximum(exact, arrived)
        length = seconds if kind == "F" else 2 * seconds
        time.sleep(length)
        exact, computing = exact + length, computing + length
        if 0 <= rank + step < p:
            sending.append((dist.isend(exact, rank + step, tag=2 * i + (kind == "B")), exact))
    for work, _ in sending:
        work.wait()
    return begin, time.monotonic(), exact.item(), computing


def main() -> None:
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start with 4 ranks: torchrun --nproc-per-node=4 uneven_stages.py")
    dist.init_process_group("gloo")  # tags and host tensors: gloo, also where there are GPUs
    rank = dist.get_rank()
    # the head cannot be cut and costs more than a layer; balance() finds this split
    assert balance([1.0] * 16 + [float(HEAD)], 4) == [5, 5, 5, 2]  # 1 layer and the head
    run(0.001)  # connects the ranks, not measured

    lengths = {}
    for name, layers in SPLITS.items():
        costs = [float(n) for n in layers[:-1]] + [float(layers[-1] + HEAD)]
        dist.barrier()
        spans: list = [None] * 4
        dist.all_gather_object(spans, run(LAYER * costs[rank]))
        begins, ends, exact_ends, computing = zip(*spans, strict=True)
        length, exact = max(ends) - min(begins), max(exact_ends) / LAYER
        early = predict(costs) - exact
        assert early > 1 if name == "slow first" else abs(early) < 1e-6
        assert length > 0.999 * LAYER * exact  # a sleep is never too short
        lengths[name] = length
        if rank == 0:
            predicted, busy = LAYER * predict(costs), sum(computing) / (4 * length)
            # F and B of all layers and micro-batches; no rank computes for the whole time
            assert abs(sum(computing) - 3 * M * sum(costs) * LAYER) < 1e-6 and busy <= 1
            shown = " ".join(f"{cost:g}" for cost in costs)
            print(f"{name:10}  cost of the stages {shown}: ", end="")
            print(f"formula {1e3 * predicted:.0f} ms, ", end="")
            print(f"measured ≈{1e3 * length:.0f} ms, busy ≈{100 * busy:.0f}%")
    if rank == 0:
        print(f"by count / by cost: ≈{lengths['by count'] / lengths['by cost']:.2f}", end="")
        print(f", predicted {predict([4, 4, 4, 8]) / predict([5, 5, 5, 5]):.2f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
