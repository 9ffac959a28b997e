"""Shows which of eight ranks form the groups of each dimension of a 2 × 2 × 2 layout.

init_device_mesh arranges the ranks in row-major order. The last dimension is innermost, so each
of its groups consists of neighbouring ranks. With four GPUs per node, ranks 0 to 3 are in the
same node. The dimension that sends the most bytes (TP) should therefore be the last. Then only
the groups of the dimension that sends least often (DP) cross nodes.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

GPUS_PER_NODE = 4


def groups_of(mesh, dimension: str) -> list[list[int]]:
    """All groups of this dimension, from an all-gather of the group of each rank."""
    mine = dist.get_process_group_ranks(mesh.get_group(dimension))
    everybody: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return sorted({tuple(group) for group in everybody})


def crosses_nodes(group: tuple[int, ...]) -> bool:
    return len({rank // GPUS_PER_NODE for rank in group}) > 1


def report(order: tuple[str, ...], device: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh(device, (2, 2, 2), mesh_dim_names=order)
    here = dict(zip(order, mesh.get_coordinate(), strict=True))
    if rank == 0:
        print(f"mesh_dim_names={order}")
    for dimension in order:
        groups = groups_of(mesh, dimension)
        outside = sum(crosses_nodes(group) for group in groups)
        if rank == 0:
            listed = " ".join(str(list(group)) for group in groups)
            print(f"  {dimension}: {listed}   {outside} of {len(groups)} groups cross nodes")
        # in both orders, a sum over the group depends only on the coordinates
        value = torch.tensor(list(here.values()), device=device)
        dist.all_reduce(value, group=mesh.get_group(dimension))
        assert value.tolist() == [1 if d == dimension else 2 * here[d] for d in order]

    coordinates: list = [None] * dist.get_world_size()
    dist.all_gather_object(coordinates, here)
    if rank == 0:
        print(f"  rank 6 is at {coordinates[6]}")


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
    if os.environ.get("WORLD_SIZE") != "8":
        sys.exit("start this program with: torchrun --nproc-per-node=8 mesh.py")
    device = init_distributed().type
    report(("dp", "pp", "tp"), device)
    report(("tp", "pp", "dp"), device)  # the wrong order
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
