"""FSDP2 over TP on a 2 × 2 mesh: parameters sharded twice, equal to the unsharded model.

parallelize_module cuts the matrices over the inner dimension, `tp`. Then fully_shard cuts the
remaining parts over the outer dimension, `dp`. The order is fixed, because TP decides what a
rank computes, and FSDP only decides where it is stored. The ranks of one tp group read the same
tokens, so the batch is cut by the dp coordinate and not by the rank. CommDebugMode counts the
collectives of one step.
"""

import copy
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

LAYERS, H, BATCH, STEPS = 2, 32, 8, 4


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class NormedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(LAYERS))
        self.head = nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cut(model: NormedModel, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(
            block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        fully_shard(block, mesh=mesh["dp"])  # one all-gather for each block
    fully_shard(model, mesh=mesh["dp"])  # and one for the rest of the model, which is the head


def train(model: nn.Module, batches: list[torch.Tensor], shard: slice) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x in batches:
        loss = (model(x[shard]) - x[shard].flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


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
    if int(os.environ.get("WORLD_SIZE", "0")) != 4:
        sys.exit("a 2 × 2 mesh: torchrun --nproc-per-node=4 two_dimensions.py")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = NormedModel().to(device)
    alone = copy.deepcopy(model)
    batches = [torch.randn(BATCH, H).to(device) for _ in range(STEPS)]
    cut(model, mesh)

    dp, rows = mesh["dp"].get_local_rank(), BATCH // 2
    shard = slice(dp * rows, (dp + 1) * rows)
    with CommDebugMode() as counted:
        model(batches[0][shard]).square().mean().backward()
    model.zero_grad()

    losses = train(model, batches, shard)
    losses_alone = train(alone, batches, slice(None))
    for loss in losses:
        dist.all_reduce(loss, group=mesh["dp"].get_group())
    means = [loss / 2 for loss in losses]
    torch.testing.assert_close(means, losses_alone, rtol=1e-4, atol=1e-6)
    for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), truth, rtol=1e-3, atol=1e-5)
        # AdamW cancels a factor in the gradients, so they are compared, too
        torch.testing.assert_close(ours.grad.full_tensor(), truth.grad, rtol=1e-3, atol=1e-5)

    if dist.get_rank() == 0:
        for name in ("blocks.0.up.weight", "blocks.0.down.weight", "blocks.0.norm.weight"):
            p = model.get_parameter(name)
            where = ", ".join(str(placement) for placement in p.placements)
            print(f"{name:20} {list(p.shape)} as {list(p.to_local().shape)}", end=" ")
            print(f"on {p.device_mesh.mesh_dim_names}: {where}")
        total = sum(p.numel() for p in alone.parameters())
        held = sum(p.to_local().numel() for p in model.parameters())
        print(f"rank 0 holds {held:,} of {total:,} parameters")
        kinds: Counter[str] = Counter()
        for operation, count in counted.get_comm_counts().items():
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                if kind in str(operation).replace("allgather", "all_gather"):
                    kinds[kind] += count
        print("collectives of one step:", dict(sorted(kinds.items())))
        for step, (loss, truth) in enumerate(zip(means, losses_alone, strict=True)):
            print(f"step {step}: loss {loss:.4f}, alone {truth:.4f}")
        print("losses and parameters equal the unsharded model")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
