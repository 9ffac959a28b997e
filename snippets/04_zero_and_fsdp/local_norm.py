"""Code that reads only the local shard computes a wrong norm, or a wrong update of a matrix.

Clipping by the norm of the own shard scales every rank by a different factor. The norm of a
single DTensor is a sum over ranks that has not been computed yet, so .item() returns only the
part of this rank. Muon orthogonalizes a whole matrix. It is right on DTensors and wrong on the
local rows. Compare each line with the line of one process.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

BATCH, H, MAX_NORM = 24, 48, 0.1


def clip_by_own_norm(model: nn.Module) -> None:
    """Clip the local shards as if they were the whole gradient."""
    gradients = [p.grad.to_local() for p in model.parameters()]
    norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    for gradient in gradients:
        gradient.mul_((MAX_NORM / norm).clamp(max=1))


def clip_by_common_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def muon_update(gradient: torch.Tensor) -> torch.Tensor:
    """Return what one step of torch.optim.Muon subtracts from a matrix with this gradient."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon([weight], lr=1.0, adjust_lr_fn="match_rms_adamw").step()
    return -weight.detach()


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
    alone = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 8)).to(device)
    inputs = torch.randn(BATCH, H).to(device)
    targets = torch.arange(8.0, device=device)
    models = {clip: copy.deepcopy(alone) for clip in (clip_by_own_norm, clip_by_common_norm)}
    (alone(inputs) - targets).square().mean().backward()
    clip_by_common_norm(alone)
    truth = torch.cat([p.grad.flatten() for p in alone.parameters()])
    if rank == 0:
        print(f"one process: norm after clipping {truth.norm():.4f}")
    for clip, model in models.items():
        fully_shard(model, mesh=mesh)
        mine = inputs[rank::n]
        assert len(mine) == BATCH // n  # the mean gradient is right only if no row is missing
        (model(mine) - targets).square().mean().backward()
        clip(model)
        ours = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        for p in model.parameters():
            p.grad /= 2  # half the limit: clipping must not change it
        clip(model)
        again = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
        assert torch.equal(ours / 2, again)
        cosine = torch.cosine_similarity(ours, truth, dim=0)
        equal = torch.allclose(ours, truth, rtol=1e-4, atol=1e-6)
        assert equal == (clip is clip_by_common_norm or n == 1)  # one rank has no other shard
        limit = MAX_NORM * (n**0.5 if clip is clip_by_own_norm else 1)  # of the whole gradient
        assert torch.isclose(ours.norm(), torch.tensor(limit, device=device), rtol=1e-4)
        if rank == 0:
            print(
                f"{clip.__name__}: norm {ours.norm():.4f}, cosine with one process {cosine:.4f}"
            )

    # --8<-- [start:item]
    norm = models[clip_by_common_norm][0].weight.detach().norm()  # a DTensor, not yet summed
    own, whole = norm.item(), norm.full_tensor().item()  # full_tensor() is a collective
    # --8<-- [end:item]
    right = alone[0].weight.detach().norm().item()
    assert abs(whole - right) < 1e-4 and (own < whole - 0.1 or n == 1)
    squares = torch.tensor(own**2, device=device)
    dist.all_reduce(squares)
    assert abs(squares.sqrt().item() - right) < 1e-4  # .item() is the norm of this rank's rows
    if rank == 0:
        print(f"norm of a weight: one process {right:.4f}")
        print(f"  .item() on rank 0 {own:.4f}, .full_tensor().item() {whole:.4f}")

    gradient = torch.randn(H, H, device=device)  # the same on all ranks
    sharded = distribute_tensor(gradient, mesh, [Shard(0)])
    truth = muon_update(gradient)
    with CommDebugMode() as count:
        on_dtensor = muon_update(sharded)
    on_rows = DTensor.from_local(muon_update(sharded.to_local()), mesh, [Shard(0)])
    errors = [
        ((update.full_tensor() - truth).norm() / truth.norm()).item()
        for update in (on_dtensor, on_rows)
    ]
    assert errors[0] < 0.02 and (errors[1] > 0.3 or n == 1)  # Muon computes in bf16
    if rank == 0:
        print(f"relative error of an update by Muon: DTensor {errors[0]:.2f}", end="")
        print(
            f" after {count.get_total_counts()} collectives, each rank's rows {errors[1]:.2f}"
        )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
