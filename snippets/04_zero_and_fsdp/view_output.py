"""An in-place addition to a view that a sharded block returned makes backward fail.

FSDP2 registers a hook on the output tensor of a block. This hook gathers the parameters before
backward. If the output is a view, an in-place addition makes autograd replace the history of
the view, and the hook is lost. torch 2.13 and newer warn if a block returns a view.

    (no flag)   y = block(x); y += x
    --fix       y = block(x) + x
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

H = 48


class ViewingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1, H)


class Model(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.blocks = nn.ModuleList(ViewingBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.in_place:
                y = block(x)
                y += x
                x = y
            else:
                x = block(x) + x
        return x.sum(dim=-1)


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


def main() -> int:
    device = init_distributed()
    torch.manual_seed(0)
    model = Model(in_place=True).to(device)
    inputs = torch.ones(4, H, device=device)
    model(inputs).square().mean().backward()  # without sharding it works
    truths = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.in_place = "--fix" not in sys.argv
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    try:
        model(inputs).square().mean().backward()
    except RuntimeError as error:
        if dist.get_rank() == 0:
            print(f"RuntimeError: {error}", flush=True)
        dist.barrier()
        return 1
    for parameter, truth in zip(model.parameters(), truths, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), truth)
    if dist.get_rank() == 0:
        print("gradients equal the unsharded model")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # DTensor's caches hold the mesh, which holds the group, to the very end
