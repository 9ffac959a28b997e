"""The hooks of a sharded module run only for forward, so other methods find sharded parameters.

(no flag)      calls a method of the model that is not its forward
--case block   calls a block first and the model afterwards
--case root    shards the root before its blocks
--fix          registers the method, and calls the model first
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

H = 48


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(H, H)
        self.blocks = nn.ModuleList(nn.Linear(H, H) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x)


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
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model, inputs = Model().to(device), torch.ones(4, H, device=device)
    expected, part = model.encode(inputs), model.blocks[0](inputs)
    modules = [*model.blocks, model]
    try:
        for module in reversed(modules) if "root" in sys.argv else modules:
            fully_shard(module, mesh=mesh)
        if "--fix" in sys.argv:
            register_fsdp_forward_method(model, "encode")
            model(inputs)  # the root must run before a part of it
            torch.testing.assert_close(model.blocks[0](inputs), part)
            model.reshard()  # backward would do this
        elif "block" in sys.argv:
            model.blocks[0](inputs)
            model(inputs)
        encoded = model.encode(inputs)
    except (RuntimeError, TypeError) as error:
        if rank == 0:
            print(f"{type(error).__name__}: {error}", flush=True)
        dist.barrier()
        return 1
    torch.testing.assert_close(encoded, expected)
    if rank == 0:
        print("encode equals the unsharded model")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # DTensor's caches hold the mesh, which holds the group, to the very end
