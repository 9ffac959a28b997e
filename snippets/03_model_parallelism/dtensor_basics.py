"""A DTensor stores how it is cut, and collectives change one cut into another.

A placement says what each rank of a mesh has: Shard(d) is a part of dimension d, Replicate() is
a copy, and Partial() is a term of a sum. `redistribute` changes the placement. A product of two
DTensors chooses the placement of its result. CommDebugMode counts the collectives.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

N = 12  # a square matrix of which 1, 2, 3 and 4 ranks get even parts


def make(whole: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return `whole` as a DTensor with this placement."""
    local = whole
    if isinstance(placement, Shard):
        local = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
    elif isinstance(placement, Partial):
        local = whole / mesh.size()  # terms; only their sum has a meaning
    return DTensor.from_local(local, mesh, [placement])


def name(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"Shard({placement.dim})"
    return type(placement).__name__.lstrip("_")


def collectives(mode: CommDebugMode) -> str:
    counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    return ", ".join(sorted(counts)) if counts else "nothing"


def redistributions(whole: torch.Tensor, mesh: DeviceMesh) -> list[str]:
    lines = []
    for before, after in (
        (Shard(0), Replicate()),
        (Partial(), Replicate()),
        (Partial(), Shard(0)),
        (Replicate(), Shard(0)),
    ):
        tensor = make(whole, mesh, before)
        with CommDebugMode() as mode:
            result = tensor.redistribute(placements=[after])
        torch.testing.assert_close(result.full_tensor(), whole)
        lines.append(f"  {name(before):9} -> {name(after):9}  {collectives(mode)}")
    return lines


def products(x: torch.Tensor, w: torch.Tensor, mesh: DeviceMesh) -> list[str]:
    lines = []
    for left, right in (
        (Replicate(), Shard(1)),  # a column-parallel layer
        (Shard(1), Shard(0)),  # a row-parallel layer
        (Shard(0), Replicate()),  # data parallelism
        (Shard(0), Shard(1)),  # a sequence shard meets a column shard
    ):
        with CommDebugMode() as mode:
            product = make(x, mesh, left) @ make(w, mesh, right)
        placement = name(product.placements[0])
        torch.testing.assert_close(product.full_tensor(), x @ w)
        sent = collectives(mode)
        lines.append(f"  {name(left):9} @ {name(right):9} -> {placement:9}  {sent}")
    return lines


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
    if N % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {N}")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, w = torch.randn(2, N, N).to(device)

    lines = [f"{N}×{N} over {mesh.size()} ranks: what rank 0 holds"]
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        tensor = make(x, mesh, placement)
        assert tensor.shape == x.shape  # a DTensor has the shape of the whole tensor
        lines.append(f"  {name(placement):9}  local shape {tuple(tensor.to_local().shape)}")
    lines += ["redistribute", *redistributions(x, mesh)]
    lines += ["products: placement of the result, and what was sent", *products(x, w, mesh)]
    if mesh.get_rank() == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches keep the mesh and its group alive until the end
