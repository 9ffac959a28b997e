"""When loading data is slower than training, each step waits; enough workers remove the wait.

Reading a sample is a sleep, like waiting for a disk or an object store. The step is a sleep
too, like a host that waits for its accelerator. Two CPU cores are therefore enough to see how
reading and training overlap. (Decoding images would need cores as well.) Compare the fraction
of time spent waiting with the prediction. Look at the cost of the first batch of an epoch, and
at the setting that hides one slow sample.
"""

import math
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, READ_S, STEP_S, STALL_S = 8, 0.005, 0.03, 0.25


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


class SlowStorage(Dataset):
    """Reading a sample takes READ_S, and STALL_S for the samples in `stalls`."""

    def __init__(self, length: int, stalls: range) -> None:
        self.length, self.stalls = length, stalls

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, bool]:
        time.sleep(STALL_S if index in self.stalls else READ_S)
        return torch.full((32,), float(index)), os.getpid(), index in self.stalls


def measure(device: torch.device, epochs: int, steps: int, stall: bool, **options) -> str:
    """Train, and return a text that says how long the loop waited for data.

    `options` are options of the DataLoader.
    """
    n = dist.get_world_size()
    # the slow sample, if any: one on each rank, after two thirds of the epoch
    first_stalled = (2 * steps // 3) * BATCH * n
    stalls = range(first_stalled, first_stalled + (n if stall else 0))
    data = SlowStorage(steps * BATCH * n, stalls)
    sampler = DistributedSampler(data, shuffle=False)  # a rank reads its own samples only
    accelerated = device.type != "cpu"
    if accelerated and options["num_workers"]:
        # workers forked from a process that uses NCCL may hang
        options["multiprocessing_context"] = "forkserver"
    loader = DataLoader(data, BATCH, sampler=sampler, pin_memory=accelerated, **options)
    model = DDP(nn.Linear(32, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # the processes that have read a sample, and the number of slow samples
    readers, stalled = set(), 0
    # --8<-- [start:loop]
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        waits = []
        begin = asked = time.perf_counter()
        for batch, pids, slow in loader:
            waits.append(time.perf_counter() - asked)
            readers.update(pids.tolist())
            stalled += slow.sum().item()
            # from pinned memory, the copy runs while the host continues
            x = batch.to(device, non_blocking=accelerated)
            optimizer.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            optimizer.step()
            time.sleep(STEP_S)
            asked = time.perf_counter()
    # --8<-- [end:loop]
    workers, load = options["num_workers"], BATCH * READ_S
    started = 1 if options.get("persistent_workers") else epochs  # times that workers started
    assert len(readers) == max(1, workers * started)
    assert (os.getpid() in readers) == (workers == 0)
    assert stalled == stall
    assert loader.prefetch_factor == options.get("prefetch_factor", 2 if workers else None)
    # sleeps are never shorter than asked for: the loop cannot be faster than its parts
    assert sum(waits) + steps * STEP_S <= asked - begin
    assert asked - begin >= steps / max(1, workers) * load
    assert workers or min(waits) >= load
    # of the last epoch; the first batch is reported separately
    share = sum(waits[1:]) / (asked - begin - waits[0])
    first, longest = (1000 * wait for wait in (waits[0], max(waits[1:])))
    return (
        f"waiting ≈{100 * share:.0f} %, first batch ≈{first:.0f} ms, longest ≈{longest:.0f} ms"
    )


def main() -> None:
    device = init_distributed()
    report = print if dist.get_rank() == 0 else lambda *_: None

    load = BATCH * READ_S
    report(f"a batch takes {1000 * load:.0f} ms to read, a step {1000 * STEP_S:.0f} ms")
    for workers in (0, 1, 2):
        # without workers, reading and computing alternate; with workers, they overlap
        wait = load if workers == 0 else max(0, load / workers - STEP_S)
        report(f"predicted, {workers} workers: waiting {100 * wait / (wait + STEP_S):.0f} %")
    report(f"needed per rank: {math.ceil(load / STEP_S)} workers")
    here = os.environ["LOCAL_WORLD_SIZE"]
    report(f"cores for the workers of {here} ranks, here: ≈{len(os.sched_getaffinity(0))}")

    report("two epochs of 12 steps, the second measured")
    for workers, persistent in ((0, False), (1, False), (2, False), (2, True)):
        options = {"num_workers": workers, "persistent_workers": persistent}
        report(f"  {workers} workers, persistent={options['persistent_workers']}:")
        report(f"    {measure(device, 2, 12, stall=False, **options)}")

    begin = time.perf_counter()
    assert SlowStorage(2, stalls=range(1, 2))[1][0][0] == 1.0
    assert time.perf_counter() - begin >= STALL_S
    report(f"30 steps, 2 workers, one sample stalls for {1000 * STALL_S:.0f} ms")
    for prefetch in (2, 8):  # batches per worker; 2 is the default
        options = {"num_workers": 2, "prefetch_factor": prefetch}
        report(f"  prefetch_factor={options['prefetch_factor']}:")
        report(f"    {measure(device, 1, 30, stall=True, **options)}")


if __name__ == "__main__":
    main()
    dist.barrier()  # the ranks have not communicated: wait until all of them have joined
    dist.destroy_process_group()
