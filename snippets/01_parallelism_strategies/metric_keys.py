"""If ranks log different metrics, a loop over the names adds values of different metrics.

Each rank reduces its own metrics in the order of their names. Rank 1 has `code_loss` where the
other ranks have `math_loss`. All ranks call the same number of all-reduces with equal shapes,
so nothing is raised, and even `loss`, which every rank has, is wrong. In the output, compare
each logged number with the right number above it.

    (no flag)    reduce the names of this rank, sorted: silent and wrong
    --fix        reduce the union of the names of all ranks, with a count for each name
    --same       the control: all ranks have the same names, and both ways are right
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist

Metrics = dict[str, tuple[float, float]]  # for each name the sum and the count of its tokens


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def metrics_of(rank: int, same: bool) -> Metrics:
    """The metrics that one rank logs in this step: two means, each over some tokens."""
    tokens, answers = 10.0 * (1 + rank), 5.0 * (1 + rank)
    subject = "math_loss" if same or rank != 1 else "code_loss"
    return {"loss": (tokens * (2 + rank), tokens), subject: (answers * (6 + rank), answers)}


def reduce_my_names(metrics: Metrics, device: torch.device) -> dict[str, float]:
    """Call one all-reduce for each name of this rank, in sorted order."""
    means = {}
    for name in sorted(metrics):
        pair = torch.tensor(metrics[name], device=device)
        dist.all_reduce(pair)  # the call does not contain the name of the metric
        means[name] = (pair[0] / pair[1]).item()
    return means


def reduce_union(metrics: Metrics, device: torch.device) -> dict[str, float]:
    """Call one all-reduce for all names. A rank that lacks a name adds 0 and counts 0."""
    names_by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(names_by_rank, sorted(metrics))
    names = sorted(set().union(*names_by_rank))
    pairs = [metrics.get(name, (0.0, 0.0)) for name in names]
    total = torch.tensor(pairs, device=device)  # [names, 2]
    dist.all_reduce(total)
    return dict(zip(names, (total[:, 0] / total[:, 1]).tolist(), strict=True))


def reference(n: int, same: bool) -> dict[str, float]:
    """The mean of each metric over the ranks that have it, without any collective."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for rank in range(n):
        for name, (value, count) in metrics_of(rank, same).items():
            sums[name] = sums.get(name, 0.0) + value
            counts[name] = counts.get(name, 0.0) + count
    return {name: sums[name] / counts[name] for name in sorted(sums)}


def shown(means: dict[str, float]) -> str:
    return ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--same", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("metric_keys.py needs 2 ranks or more, started by torchrun")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    reduce = reduce_union if args.fix else reduce_my_names
    means = reduce(metrics_of(rank, args.same), device)
    everyone: list = [None] * n
    dist.all_gather_object(everyone, means)

    right = reference(n, args.same)
    if rank == 0:
        print(f"right:       {shown(right)}")
        for number, logged in enumerate(everyone):
            print(f"rank {number} logs: {shown(logged)}")
    for logged in everyone:
        wrong = [name for name in logged if abs(logged[name] - right[name]) > 0.01]
        if args.fix or args.same:
            assert not wrong and set(logged) == set(right)
        else:
            assert set(wrong) == set(logged)  # every number of every rank is wrong


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
