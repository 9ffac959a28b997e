"""Different tokens on the ranks of one tensor-parallel group raise no error.

The ranks of a tensor-parallel group compute parts of one product, so they must read the same
tokens. A loader that shards by the global rank, as under DDP, gives each rank a different
batch. The all-reduce then adds parts of different sentences. Shapes agree, the loss is finite,
and each rank even reports its own loss.

    (no flag)   the batch is sharded by rank
    --fix      the batch is sharded by the dp coordinate

Both versions then compare checksums of the batch in the tp group. Do this at the start of a
run.
"""

import argparse
import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

H, BATCH = 16, 8


def same(x: torch.Tensor, mesh: DeviceMesh) -> bool:
    """Return whether all ranks of the group have this batch. It sends a few bytes."""
    ours = torch.stack([x.double().sum(), x.double().square().sum()])
    low, high = ours.clone(), ours.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=mesh.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, group=mesh.get_group())
    return torch.equal(low, high)


def check_same(x: torch.Tensor, mesh: DeviceMesh) -> None:
    """Raise ValueError on every rank of the group if its batches differ."""
    if not same(x, mesh):
        ranks = dist.get_process_group_ranks(mesh.get_group())
        raise ValueError(f"tensor-parallel ranks {ranks} have different batches")


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
    if int(os.environ.get("WORLD_SIZE", "0")) != 4:
        sys.exit("a 2 × 2 mesh: torchrun --nproc-per-node=4 tp_group_data.py")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)).to(device)
    alone = copy.deepcopy(model)
    batch = torch.randn(BATCH, H).to(device)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})

    x = batch.chunk(n)[rank]  # by global rank, as DistributedSampler does
    if args.fix:
        x = batch.chunk(2)[mesh["dp"].get_local_rank()]
    out = model(x)
    truth = alone(x)
    error = ((out - truth).norm() / truth.norm()).detach()
    report: list = [None] * n
    dist.all_gather_object(report, (error.item(), (out - x).square().mean().item()))
    if rank == 0:
        for r, (off, loss) in enumerate(report):
            verdict = "equal to one process" if off < 1e-5 else f"output off by {off:.1%}"
            print(f"rank {r}: {len(x)} rows, loss {loss:.4f}, {verdict}", flush=True)
    status = int(any(off > 1e-5 for off, _ in report))
    try:
        check_same(x, mesh["tp"])
    except ValueError as error:
        status = 1
        if rank == 0:
            print(f"check_same: {type(error).__name__}: {error}", flush=True)
    other = batch.clone()  # a single number differs
    other[-1, -1] += mesh["tp"].get_local_rank()
    assert same(batch, mesh["tp"]) and not same(other, mesh["tp"])
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    return status


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
