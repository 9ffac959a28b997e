"""Prefetching changes the order in which the host issues all-gathers and computation.

On a GPU an all-gather runs on its own stream, so it can overlap with computation that the host
issues later. By default, a block's forward begins with the all-gather of the same block, and
backward issues the all-gather of the next block before it computes. You choose a different
order with set_modules_to_forward_prefetch and set_modules_to_backward_prefetch.
In the output, g2 is the all-gather of block 2.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 24, 13, 4  # 2, 3 and 4 ranks divide the batch, not the rows


class WideningBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        width = H * (index + 2)  # every block has a different size, which identifies its gather
        self.up, self.down = nn.Linear(H, width), nn.Linear(width, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Events(TorchDispatchMode):
    """Record the order of the all-gathers ("g") and of the blocks that begin to compute.

    In both directions, the first matrix product of a block returns a tensor [b, width].
    """

    def __init__(self, sizes: dict[int, int], ranks: int) -> None:
        super().__init__()
        self.sizes, self.ranks, self.log = sizes, ranks, []
        self.products = {(BATCH // ranks, H * (index + 2)): index for index in range(LAYERS)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.log.append(f"g{self.sizes[args[1].numel() * self.ranks]}")
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            index = self.products.get(tuple(result.shape))
            if index is not None:  # a linear layer uses addmm in forward, and mm in backward
                direction = "FORWARD" if func is torch.ops.aten.addmm.default else "BACKWARD"
                self.log.append(f"{direction}{index}")
        return result


def look_ahead(blocks: list[FSDPModule], by: int) -> None:
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + by])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - by) : index][::-1])


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
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if BATCH % n:
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    if n == 1:
        sys.exit(f"one rank gathers nothing: torchrun --nproc-per-node=2 {sys.argv[0]}")
    device = init_distributed()
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (n,))
    inputs = torch.randn(BATCH // n, H).to(device)
    for by in (None, 1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(WideningBlock(index) for index in range(LAYERS))).to(device)
        sizes = {
            sum(-(-p.shape[0] // n) * n * p[0].numel() for p in block.parameters()): index
            for index, block in enumerate(model)
        }
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if by is not None:
            look_ahead(list(model), by)
        events = Events(sizes, n)
        with events:
            loss = model(inputs).square().mean()
            split = len(events.log)
            loss.backward()
        last, backward = LAYERS - 1, events.log[split:]
        for index in reversed(range(LAYERS)):  # backward looks ahead by 1 even without a call
            begun = backward.index(f"g{index}")
            assert begun < backward.index(f"BACKWARD{min(last, index + (by or 1))}")
            assert index + (by or 1) >= last or begun > backward.index(
                f"BACKWARD{index + (by or 1) + 1}"
            )
        ahead = by or 0
        for index in range(LAYERS):  # gathered before its forward, `ahead` blocks in advance
            begun = events.log.index(f"g{index}")
            assert begun < events.log.index(f"FORWARD{max(0, index - ahead)}")
            assert index <= ahead or begun > events.log.index(f"FORWARD{index - ahead - 1}")
        if rank == 0:
            print("default:" if by is None else f"look ahead by {by}:")
            print("  " + " ".join(events.log[:split]))
            print("  " + " ".join(events.log[split:]))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
