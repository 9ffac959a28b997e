"""Gradients that each rank clips by the norm of its own shard are clipped differently.

With tensor parallelism, the .grad of a rank is a part of the gradient. Its norm is smaller than
the norm of the whole gradient, and it differs between the ranks. Clipping by it changes the
direction of the gradient, and the copies of replicated parameters drift apart. The right norm
is the root of the sum of the squares over the ranks. A replicated parameter counts once.

    (no flag)   each rank clips by the norm of its own shard
    --fix      squares are summed over the tp group; replicated parameters are counted once
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

H, BATCH, MAX_NORM = 16, 32, 0.1


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def norm_of_shard(model: nn.Module) -> torch.Tensor:
    return torch.stack([local(p.grad).square().sum() for p in model.parameters()]).sum().sqrt()


def norm_over_mesh(model: nn.Module, group: dist.ProcessGroup) -> torch.Tensor:
    """The norm of the whole gradient, the same number on every rank of `group`."""
    device = next(model.parameters()).device
    cut, copied = torch.zeros((), device=device), torch.zeros((), device=device)
    for p in model.parameters():
        if p.grad is None:
            continue
        squares = local(p.grad).float().square().sum()
        if isinstance(p, DTensor) and any(x.is_shard() for x in p.placements):
            cut += squares
        else:
            copied += (
                squares  # every rank has it, so a sum over the ranks would count it n times
            )
    dist.all_reduce(cut, group=group)
    return (cut + copied).sqrt()


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if (4 * H) % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {4 * H}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("tp",))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)
    ).to(device)
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    x = torch.randn(BATCH, H).to(device)
    for module in (model, alone):
        (module(x) - 3 * x).square().mean().backward()
    truth = torch.nn.utils.clip_grad_norm_(alone.parameters(), MAX_NORM).item()

    whole, shard = norm_over_mesh(model, mesh.get_group()), norm_of_shard(model)
    torch.testing.assert_close(whole.item(), truth, rtol=1e-5, atol=0.0)
    assert shard < whole or n == 1
    norm = whole if args.fix else shard
    for limit in (10 * truth, MAX_NORM):  # a norm below the limit changes nothing
        for p in model.parameters():
            local(p.grad).mul_(min(1.0, limit / norm.item()))
    if args.fix:  # the limit is now the norm
        left = norm_over_mesh(model, mesh.get_group()).item()
        torch.testing.assert_close(left, MAX_NORM, rtol=1e-4, atol=0.0)

    replicated = local(model[0].weight.grad)
    first = replicated.clone()
    dist.broadcast(first, src=0)
    drift = ((replicated - first).norm() / first.norm()).item()
    down = model[3].weight.grad.full_tensor()  # every rank takes part in the gather
    wanted = alone[3].weight.grad
    error = ((down - wanted).norm() / wanted.norm()).item()
    report: list = [None] * n
    dist.all_gather_object(report, (norm.item(), drift))
    for value, d in report:  # before the clip, the copies were equal
        assert abs(d - abs(report[0][0] / value - 1)) < 1e-5
    cosine = nn.functional.cosine_similarity(down.flatten(), wanted.flatten(), dim=0)
    assert args.fix or n == 1 or cosine < 1 - 1e-5  # the direction has changed
    # the bias has no gradient, and the gradient of the weight is in bf16
    half = nn.Linear(H, H).to(device, torch.bfloat16)
    half.weight.grad = torch.randn_like(half.weight)
    found = norm_over_mesh(half, mesh.get_group())
    torch.testing.assert_close(found, half.weight.grad.float().norm())
    drifted = max(d for _, d in report) > 1e-5
    if rank == 0:
        seen = ", ".join(f"{value:.3f}" for value, _ in report)
        print(f"norm in one process {truth:.3f}, on the ranks {seen}")
        off = "equal to one process" if error < 1e-5 else f"off by {error:.1%}"
        print(f"clipped gradient of the last matrix: {off}")
        same = "differ by up to " + f"{max(d for _, d in report):.1%}" if drifted else "agree"
        print(f"the ranks' copies of the layer norm's gradient {same}", flush=True)
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    return int(drifted or error > 1e-5)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
