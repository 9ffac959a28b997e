"""fully_shard does not broadcast, so different seeds make a patchwork of several models.

Each rank keeps its rows of the model that it built itself. DDP copies the values of rank 0 to
all ranks, and so does FSDP1 with sync_module_states=True. With FSDP2, use the same seed on all
ranks when you build the model, or broadcast. The output shows which rank built each shard.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

H = 48


def as_built(model: nn.Module) -> None:
    """Change nothing: keep what this rank built from its own seed."""


def broadcast(model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def rows(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.cat((weight, bias[:, None]), 1)  # [h, h], [h] -> [h, h + 1]


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
    mesh = init_device_mesh(device.type, (n,))
    built = []  # the models that the ranks build, each from a different seed
    for seed in range(n):
        torch.manual_seed(seed)
        built.append(nn.Linear(H, H).to(device))
    for prepare in (as_built, broadcast):
        model = copy.deepcopy(built[rank])
        prepare(model)
        fully_shard(model, mesh=mesh)
        whole = rows(*(p.full_tensor() for p in model.parameters()))
        owners = []
        for part, *candidates in zip(
            whole.chunk(n), *(rows(*m.parameters()).chunk(n) for m in built), strict=True
        ):
            owners += [str(r) for r, built_by in enumerate(candidates) if part.equal(built_by)]
        expected = range(n) if prepare is as_built else [0] * n
        assert owners == [str(r) for r in expected]
        if rank == 0:
            print(f"{prepare.__name__}: rows are of the models of ranks {', '.join(owners)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
