"""Measures the bandwidth of each collective for many sizes, on any cluster, with NCCL or gloo.

For each collective and size, the program prints the time t, the algorithm bandwidth S/t and the
bus bandwidth. Both bandwidths are defined as in nccl-tests (its doc/PERFORMANCE.md). S is the
size of the whole array, which is the output of an all-gather and the input of a reduce-scatter.
The bus bandwidth is S/t times a factor: the bytes that the busiest rank has to send, over S.
Compare the bus bandwidth of the largest size with the datasheet of the slowest link.

    torchrun --nproc-per-node=8 bandwidth_sweep.py --max 4G --only all_reduce all_to_all
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
}


def prepare(name: str, whole: torch.Tensor) -> tuple[Callable[[], object], torch.Tensor]:
    """Return the call to time, and the tensor that receives its result.

    `whole` is the array of S bytes. Its length is a multiple of the number of ranks n.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    mine = whole.chunk(n)[rank].clone()
    received = torch.empty_like(whole) if name == "all_to_all" else whole
    # These functions work on one flat tensor. With NCCL, lists of chunks need an additional
    # copy. The functions got new names in torch 2.13.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "all_reduce": (lambda: dist.all_reduce(whole), whole),
        "reduce_scatter": (lambda: scatter(mine, whole), mine),
        "all_gather": (lambda: gather(whole, mine), whole),
        "all_to_all": (lambda: dist.all_to_all_single(received, whole), received),
        "broadcast": (lambda: dist.broadcast(whole, src=0), whole),
        "reduce": (lambda: dist.reduce(whole, dst=0), whole),
    }[name]


def checked(name: str, whole: torch.Tensor) -> Callable[[], object]:
    """Run the call once, compare its result with the definition, and return the call.

    Every rank starts with different numbers of both signs, so a sum differs from a maximum. If
    the output is a separate tensor, it starts with NaN. A call that does nothing then fails.
    """
    n, rank = dist.get_world_size(), dist.get_rank()
    place = torch.arange(n, device=whole.device) + 1.0
    # for each rank, the number in each of its chunks
    inputs = [(-1.0) ** r * (r + 1) ** 2 * place for r in range(n)]
    whole.view(n, -1).copy_(inputs[rank][:, None])
    call, result = prepare(name, whole)
    if name in ("reduce_scatter", "all_gather", "all_to_all"):
        result.fill_(math.nan)
    call()
    total = torch.stack(inputs).sum(dim=0)
    expected = {
        "all_reduce": total,
        "reduce_scatter": total[[rank]],
        "all_gather": torch.stack([inputs[r][r] for r in range(n)]),
        "all_to_all": torch.stack([inputs[r][rank] for r in range(n)]),
        "broadcast": inputs[0],
        "reduce": total,
    }[name]
    if name != "reduce" or rank == 0:  # other ranks have no defined result
        equal = result.view(len(expected), -1) == expected[:, None]
        assert equal.all(), f"{name} on rank {rank}: {result} does not consist of {expected}"
    whole.zero_()  # unlike other sums, sums of zeros never overflow
    return call


def seconds_per_call(call: Callable, device: torch.device, budget: float) -> float:
    """Mean time of one call on the slowest rank, measured for about `budget` seconds."""

    def run(times: int) -> float:
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            call()
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the host only queued the work
        slowest = torch.tensor((time.perf_counter() - begin) / times, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()

    run(2)  # the first use opens connections and allocates buffers
    once = run(2)  # a maximum, so all ranks repeat the same number of times
    return run(max(2, min(100, int(budget / once))))


def check_clock(device: torch.device) -> None:
    """Time a call that sleeps on one rank. The mean must be the time of one call there."""
    calls: list[None] = []
    dist.barrier()  # the first call opens connections
    begin = time.perf_counter()
    nap = 0.01 * (dist.get_rank() == dist.get_world_size() - 1)
    mean = seconds_per_call(lambda: calls.append(time.sleep(nap)), device, budget=0.2)
    # the first four calls are not part of the mean
    assert 0.0099 < mean <= (time.perf_counter() - begin) / (len(calls) - 4)


def bandwidths(name: str, n: int, size: int, seconds: float) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s."""
    return size / seconds / 1e9, FACTORS[name](n) * size / seconds / 1e9


def parse_size(text: str) -> int:
    if text[-1:].upper() in UNITS:
        return int(float(text[:-1]) * UNITS[text[-1].upper()])
    return int(text)


def with_unit(size: int) -> str:
    for unit, value in reversed(UNITS.items()):
        if size >= value:
            return f"{size / value:.4g} {unit}iB"
    return f"{size} B"


def row(name: str, n: int, size: int, seconds: float) -> str:
    """A row of the table: the factor, the size, the time, and both bandwidths."""
    columns = [f"≈{1e6 * seconds:.0f} µs"]
    columns += [f"≈{rate:.2g} GB/s" for rate in bandwidths(name, n, size, seconds)]
    cells = [f"{each:>{width}}" for each, width in zip(columns, (11, 16, 16), strict=True)]
    return " ".join([f"{name:14}  {FACTORS[name](n):6.3f}  {with_unit(size):8}", *cells])


# An all-reduce of 8 GiB takes 1 s on eight ranks: each rank sends 2 · 7/8 · 8 GiB, 15 GB.
assert row("all_reduce", 8, 2**33, 1.0) == (
    "all_reduce       1.750  8 GiB    ≈1000000 µs        ≈8.6 GB/s         ≈15 GB/s"
)


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--min", type=parse_size, default="4K", help="smallest size S")
    parser.add_argument("--max", type=parse_size, default="16M", help="largest size S")
    parser.add_argument("--step", type=int, default=16, help="factor between two sizes")
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for each line")
    parser.add_argument("--only", nargs="+", choices=FACTORS, default=list(FACTORS))
    args = parser.parse_args()
    device = init_distributed()
    n = dist.get_world_size()
    check_clock(device)

    if dist.get_rank() == 0:
        print(f"{n} ranks, {dist.get_backend()}, {device.type}, float32")
        print("collective      factor  size            time            algbw            busbw")
    for name in args.only:
        size = args.min
        while size <= args.max:
            whole = torch.zeros(max(1, size // 4 // n) * n, device=device)
            t = seconds_per_call(checked(name, whole), device, args.budget)
            if dist.get_rank() == 0:
                print(row(name, n, whole.nbytes, t), flush=True)
            size *= args.step
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
