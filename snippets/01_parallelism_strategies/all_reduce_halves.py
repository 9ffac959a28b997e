"""A reduce-scatter and an all-gather give the same sums as an all-reduce.

After the reduce-scatter, each rank owns one finished chunk of the sum. A rank that needs only
this chunk can stop there, which saves half of the traffic. In ZeRO, rank r makes the optimizer
step of chunk r. The ranks then gather parameters, where DDP would have gathered gradients.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist


def all_reduce_in_two(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of `x` over all ranks. Its length is a multiple of the world size."""
    n = dist.get_world_size()
    chunk = torch.empty_like(x.chunk(n)[0])
    dist.reduce_scatter(chunk, list(x.chunk(n)))  # rank r gets the sum of chunk r
    total = torch.empty_like(x)
    dist.all_gather(list(total.chunk(n)), chunk)  # the chunks are views of `total`
    return total


def adam_like(x: torch.Tensor) -> torch.Tensor:
    """An element-wise update. It gives the same values for a chunk as for the whole tensor."""
    return x / (x.square().sqrt() + 1)


def sharded_update(gradient: torch.Tensor) -> torch.Tensor:
    """Reduce-scatter, update the chunk of this rank, all-gather the updates."""
    n = dist.get_world_size()
    chunk = torch.empty_like(gradient.chunk(n)[0])
    dist.reduce_scatter(chunk, list(gradient.chunk(n)))
    update = torch.empty_like(gradient)
    dist.all_gather(list(update.chunk(n)), adam_like(chunk))
    return update


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
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(1000 * n, generator=generator).to(device)
    reference = x.clone()
    dist.all_reduce(reference)

    torch.testing.assert_close(all_reduce_in_two(x), reference)
    with mock.patch.object(dist, "all_reduce", side_effect=AssertionError("all is reduced")):
        update = sharded_update(x)
    torch.testing.assert_close(update, reference / (1 + reference.abs()))
    if rank == 0:
        print(f"{n} ranks: reduce-scatter, then all-gather: equal to all-reduce")
        print("reduce-scatter, update a chunk, all-gather: equal to all-reduce, update all")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
