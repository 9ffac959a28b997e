"""DeviceMesh creates the groups of a 2×2 layout from a shape and two names.

init_device_mesh creates the groups of all rows and columns, on every rank in the same order.
It gives each rank the groups to which this rank belongs. Slicing the mesh by a name gives the
group along that dimension. Neighbouring ranks differ in the last dimension. Put the dimension
that sends the most bytes there, so that its ranks are in the same node.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def describe(mesh: dist.DeviceMesh) -> str:
    """The coordinates of this rank in the mesh, and the groups to which it belongs."""
    dp, tp = mesh["dp"], mesh["tp"]
    assert dp.get_group().size() == dp.size() and tp.get_group().rank() == tp.get_local_rank()
    return (
        f"rank {mesh.get_rank()} at {tuple(mesh.get_coordinate())}: "
        f"dp group {dist.get_process_group_ranks(dp.get_group())}, "
        f"tp group {dist.get_process_group_ranks(tp.get_group())}"
    )


def sum_then_mean(mesh: dist.DeviceMesh) -> tuple[float, float]:
    """The tensor-parallel sum of the rank numbers, and then its data-parallel mean."""
    value = torch.tensor([float(mesh.get_rank())], device=mesh.device_type)
    dist.all_reduce(value, group=mesh.get_group("tp"))
    row = value.item()
    dist.all_reduce(value, op=dist.ReduceOp.SUM, group=mesh.get_group("dp"))
    return row, value.item() / mesh["dp"].size()


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
        sys.exit("start this program with: torchrun --nproc-per-node=4 device_mesh.py")
    device_type = init_distributed().type
    mesh = init_device_mesh(device_type, (2, 2), mesh_dim_names=("dp", "tp"))

    lines: list = [None] * dist.get_world_size()
    dist.all_gather_object(lines, describe(mesh))
    if mesh.get_rank() == 0:
        print(*lines, sep="\n")

    # The sum over the row, and the mean over the column. A 4×1 mesh has only one column.
    assert sum_then_mean(mesh) == (0 + 1 if mesh.get_rank() < 2 else 2 + 3, 3.0)
    column = init_device_mesh(device_type, (4, 1), mesh_dim_names=("dp", "tp"))
    assert sum_then_mean(column) == (mesh.get_rank(), 1.5)
    if mesh.get_rank() == 0:
        print("sum along tp, then mean along dp: equal to 3.0 on every rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
