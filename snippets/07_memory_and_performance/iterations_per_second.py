"""it/s goes down with more GPUs: it/s counts the steps of one rank, and not the samples of all.

Each rank brings its own batch, so a step of N ranks trains on N times the samples. The step
also waits for an all-reduce, so a progress bar shows fewer steps per second. Here a step sleeps
to imitate its computation, and an all-reduce of several ranks sleeps to imitate its link. Run
it with one rank and with three, and compare it/s, samples/s and the time of an epoch.

    (no flag)      a DistributedSampler gives each rank a part of the samples
    --no-sampler   every rank reads all samples: the epoch does not become shorter
"""

import argparse
import math
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

SAMPLES, BATCH = 240, 8  # BATCH is for each rank
COMPUTE, LINK = 0.010, 0.004  # seconds


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


# --8<-- [start:epoch]
def epoch(loader: DataLoader, device: torch.device) -> tuple[int, list[int], float]:
    """The steps of this rank, the samples that it has seen, and the seconds of the epoch."""
    seen, steps = [], 0
    gradient = torch.ones(1000, device=device)
    dist.barrier()
    begin = time.perf_counter()
    for indices in loader:
        time.sleep(COMPUTE)  # forward and backward of this rank's own batch
        dist.all_reduce(gradient)
        if dist.get_world_size() > 1:
            time.sleep(LINK)
        seen += indices.tolist()
        steps += 1  # what a progress bar counts
    dist.barrier()
    return steps, seen, time.perf_counter() - begin


# --8<-- [end:epoch]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-sampler", action="store_true")
    args = parser.parse_args()
    device = init_distributed()
    n = dist.get_world_size()

    samples = torch.arange(SAMPLES)  # a sample is its own index
    sampler = None if args.no_sampler else DistributedSampler(samples, shuffle=False)
    steps, mine, seconds = epoch(DataLoader(samples, BATCH, sampler=sampler), device)

    parts: list = [None] * n
    dist.all_gather_object(parts, mine)
    seen = [sample for part in parts for sample in part]
    rate = steps / seconds
    if args.no_sampler:
        assert steps == SAMPLES // BATCH and len(seen) == n * SAMPLES
    elif SAMPLES % (n * BATCH) == 0:
        assert steps == SAMPLES // BATCH // n and len(seen) == steps * BATCH * n
    assert set(seen) == set(range(SAMPLES))
    # A sleep is never shorter than its time, so these rates have limits on any machine.
    assert rate < 1 / (COMPUTE + (LINK if n > 1 else 0))
    throughput = len(seen) / seconds
    assert math.isclose(throughput, n * BATCH * rate) or SAMPLES % (n * BATCH)
    if dist.get_rank() == 0:
        ranks = "1 rank" if n == 1 else f"{n} ranks"
        print(f"{ranks}, a batch of {BATCH} on each: {steps} steps in an epoch")
        print(f"  it/s ≈{rate:.0f}, samples/s ≈{throughput:.0f}")
        print(f"  epoch ≈{1e3 * seconds:.0f} ms, {len(seen)} samples,", end=" ")
        print(f"{len(set(seen))} different")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
