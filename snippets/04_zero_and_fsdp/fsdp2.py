"""FSDP2 gives the same losses and parameters as DDP and as one process with the whole batch.

The program calls fully_shard on every block and then on the root. Its model, data and seed are
the same as in mini_fsdp.py, so the losses are the same, too. The optimizer gets DTensors, which
have this rank's rows of every parameter. The last lines count the collectives of one step.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS, H, LAYERS = 48, 5, 60, 4  # 1, 2, 3 and 4 ranks divide the batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def shard_blocks(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Make one unit of each block. The root's unit gets all other parameters."""
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    models = {
        "FSDP2": shard_blocks(copy.deepcopy(alone), mesh),
        "DDP": DistributedDataParallel(copy.deepcopy(alone)),
        "one process": alone,
    }
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models.values()]
    lines = []
    for step in range(STEPS):
        inputs = torch.randn(BATCH, H).to(device)
        losses = []
        for (name, model), optimizer in zip(models.items(), optimizers, strict=True):
            mine = inputs if name == "one process" else inputs[rank::n]
            optimizer.zero_grad()
            with CommDebugMode() as count:
                loss = nn.functional.mse_loss(model(mine), mine.sin())
                loss.backward()
            optimizer.step()
            if name == "FSDP2":
                counts = count.get_comm_counts()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            assert len(mine) == (BATCH if model is alone else BATCH // n)
            losses.append((mean / n).item() if name != "one process" else loss.item())
        torch.testing.assert_close(losses, [losses[-1]] * 3)
        words = (f"{name} {loss:.5f}" for name, loss in zip(models, losses, strict=True))
        lines.append(f"step {step}: " + ", ".join(words))

    weight = models["FSDP2"][0].up.weight
    for parameter, in_ddp, truth in zip(
        *(m.parameters() for m in models.values()), strict=True
    ):
        torch.testing.assert_close(in_ddp, truth)
        torch.testing.assert_close(parameter.full_tensor(), truth.detach())
        torch.testing.assert_close(parameter.to_local(), truth.detach().chunk(n)[rank])
        moment = optimizers[0].state[parameter]["exp_avg"]
        for tensor in (parameter.grad, moment):  # both have only the rows of this rank
            assert tensor.to_local().shape == parameter.to_local().shape
    lines.append(f"all parameters equal; block 0's up.weight is a {type(weight).__name__} with")
    lines.append(f"  placements {weight.placements}, shape {tuple(weight.shape)}")
    lines.append(f"  here {tuple(weight.to_local().shape)}, gradient as well")
    lines += [
        f"{number} × {str(op).split('.')[-1]}" for op, number in sorted(counts.items(), key=str)
    ]
    if rank == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
