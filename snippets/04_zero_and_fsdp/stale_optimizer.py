"""An optimizer that is built before fully_shard updates nothing and raises no error.

fully_shard replaces every parameter of the module by a new one, which is a DTensor. The
optimizer still has the old parameters. They never get a gradient, and an optimizer skips a
parameter without a gradient. Look at the loss after 20 steps.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, H, STEPS = 24, 48, 20  # 1, 2, 3 and 4 ranks divide the batch


def built_before(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fully_shard(model, mesh=mesh)
    return optimizer


def built_after(model: nn.Module, mesh: DeviceMesh) -> torch.optim.Optimizer:
    fully_shard(model, mesh=mesh)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    for build in (built_before, built_after):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1)).to(device)
        inputs = torch.randn(BATCH, H).to(device)
        old = list(model.parameters())
        optimizer = build(model, mesh)
        new = list(model.parameters())
        assert set(old).isdisjoint(new)  # fully_shard has replaced all of them
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        expected = old if build is built_before else new
        assert all(p is q for p, q in zip(parameters, expected, strict=True))
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = (model(inputs[rank::n]) - 1).square().mean()
            loss.backward()
            optimizer.step()
            own = loss.item()
            dist.all_reduce(loss.detach())
            losses.append(loss.item() / n)
            assert own != losses[-1] or n == 1  # each rank has other rows
        moved = losses[-1] != losses[0]
        assert moved == (build is built_after) == any(p.grad is not None for p in parameters)
        if rank == 0:
            print(
                f"{build.__name__}: loss {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}"
            )
            count = sum(p.grad is not None for p in parameters)
            print(f"  {count} of the optimizer's {len(parameters)} parameters have a gradient")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
