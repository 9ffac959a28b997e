"""An inf in one shard only: one rank skips the step, the other takes it, and nothing complains.

With DDP an all-reduce carries the inf to all ranks. Sharded gradients are reduce-scattered:
only the owner of the element sees it. Three ways: GradScaler on plain shards;
ShardedGradScaler, which combines the verdicts; GradScaler on
FSDP2's DTensors, which combine them themselves.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

H, SCALE = 8, 1024.0


def report(
    title: str, agree: bool, scaler: GradScaler, before: torch.Tensor, now: torch.Tensor
) -> None:
    """Gather what each rank did, print it from rank 0, and check whether the ranks agree."""
    told: list[object] = [None] * dist.get_world_size()
    moved = "skipped the step" if torch.equal(before, now) else "took the step"
    dist.all_gather_object(told, f"{moved}, scale {scaler.get_scale():.0f}")
    assert (len(set(told)) == 1) == agree
    if dist.get_rank() == 0:
        print(title)
        for rank, line in enumerate(told):
            print(f"  rank {rank} {line}")


def plain_shards(scaler: GradScaler) -> tuple[torch.Tensor, torch.Tensor]:
    """One step on this rank's shard [h], whose gradient is infinite on rank 0 alone."""
    shard = nn.Parameter(torch.ones(H))
    optimizer = torch.optim.SGD([shard], lr=0.1)
    scaler.scale(shard.sum()).backward()
    if dist.get_rank() == 0:
        shard.grad[3] = torch.inf  # what a reduce-scatter in fp16 leaves when it overflows
    before = shard.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return before, shard.detach()


def dtensors(scaler: GradScaler, value: float = torch.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on a layer that fully_shard has cut: the inf is in row 0, which rank 0 owns."""
    torch.manual_seed(0)
    layer = nn.Linear(H, H, bias=False)
    fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler.scale(layer(torch.ones(4, H)).sum()).backward()
    if dist.get_rank() == 0:
        layer.weight.grad.to_local()[0, 3] = value
    found = not layer.weight.grad.to_local().isfinite().all()
    assert found == (dist.get_rank() == 0 and value == torch.inf)
    before = layer.weight.to_local().detach().clone()
    scaler.step(optimizer)
    scaler.update()
    return before, layer.weight.to_local().detach()


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in ("2", "3", "4"):
        sys.exit("start with: torchrun --nproc-per-node=2 inf_on_one_rank.py (2 to 4 ranks)")
    dist.init_process_group("gloo")
    scaler = GradScaler("cpu", init_scale=SCALE)
    report("plain shards, GradScaler:", False, scaler, *plain_shards(scaler))
    scaler = ShardedGradScaler("cpu", init_scale=SCALE)
    report("plain shards, ShardedGradScaler:", True, scaler, *plain_shards(scaler))
    scaler = GradScaler("cpu", init_scale=SCALE)
    report("FSDP2's DTensors, GradScaler:", True, scaler, *dtensors(scaler))
    before, now = dtensors(GradScaler("cpu", init_scale=SCALE), 4 * SCALE)  # as it is without
    torch.testing.assert_close(now, before - 0.1 * 4)  # every rank takes the step, of 4 rows


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
