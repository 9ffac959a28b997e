"""Several ranks that each use all CPU cores slow each other down; OMP_NUM_THREADS prevents it.

Each rank has its own pool of threads for matrix products and similar work. If the threads of
all ranks are more than the cores of the machine, threads wait for each other while they occupy
a core. torchrun therefore sets OMP_NUM_THREADS=1 if the variable is not set and a node has more
than one rank, and it prints a message about that. This is safe, but slow if there are more
cores than ranks. Each rank gets its fair share with

    OMP_NUM_THREADS = cores of the node / ranks on the node     (at least 1)

The program times a training step with the threads that it was started with, and then with the
fair share.
"""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def seconds_per_step(ddp: DistributedDataParallel, threads: list[int]) -> list[float]:
    """Seconds of a step for each number of threads: median over steps, mean over ranks."""
    x = torch.randn(128, 256)
    times = [[] for _ in threads]
    for round_ in range(3):
        for number, seen in zip(threads, times, strict=True):
            torch.set_num_threads(number)
            assert torch.get_num_threads() == number
            for step in range(5):
                start = time.perf_counter()
                ddp(x).square().mean().backward()
                if round_ > 0 and step >= 2:  # the steps before are for warming up
                    seen.append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(seen) for seen in times])
    slowest = medians.clone()
    dist.all_reduce(medians)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    means = medians / dist.get_world_size()
    assert (means <= 1.001 * slowest).all()
    return means.tolist()


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=2 cpu_oversubscribed.py")
    dist.init_process_group("gloo")  # the subject is the CPU, even if there is a GPU
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    given, fair = torch.get_num_threads(), max(1, cores // ranks)

    assert fair * ranks <= max(cores, ranks)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU())
    ddp = DistributedDataParallel(model)

    as_given, as_fixed = seconds_per_step(ddp, [given, fair])
    gain = as_given / as_fixed
    assert (gain > 1) == (as_fixed < as_given)
    if dist.get_rank() == 0:
        print(f"{ranks} ranks on ≈{cores} cores")
        print(f"as started, ≈{given} threads per rank: ≈{1e3 * as_given:.1f} ms per step")
        print(
            f"fair share, ≈{fair} threads per rank: ≈{1e3 * as_fixed:.1f} ms per step,",
            end=" ",
        )
        print(f"≈{gain:.2f} × as fast", flush=True)
    dist.barrier()  # no rank exits while another rank still works


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
