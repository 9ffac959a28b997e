"""HSDP shards parameters along one dimension of a 2D mesh and replicates them along the other.

The four ranks play two nodes with two GPUs each. For every kind of collective, the program
prints the mesh dimension, the elements that each rank sends over a ring, and the elements that
leave a node. Only the all-reduce of the gradient shards leaves a node, so the dimension `shard`
belongs on the fast links within a node.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 24, 48, 4
PER_NODE = 2  # ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Traffic(TorchDispatchMode):
    """Count calls and elements of every collective, for each mesh dimension.

    A row of the table has the number of calls, the elements that each rank of a ring sends, and
    the elements that leave each node.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.names = {mesh.get_group(d).group_name: d for d in mesh.mesh_dim_names}
        self.table: dict[tuple[str, str], list[float]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            group = next(
                dist.ProcessGroup.unbox(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            tensor = {"allgather": args[0], "reduce_scatter": args[1]}.get(name, args[0])
            count = (
                sum(t.numel() for t in tensor) if isinstance(tensor, list) else tensor.numel()
            )
            n = group.size()
            row = self.table.setdefault((name, self.names[group.group_name]), [0, 0.0, 0.0])
            sent = (2 if name == "allreduce" else 1) * (n - 1) / n * count
            ring = dist.get_process_group_ranks(group)
            nodes = [r // PER_NODE for r in ring]
            borders = sum(a != b for a, b in zip(nodes, nodes[1:] + nodes[:1], strict=True))
            # All ranks of a ring send the same number of elements. A ring leaves each of its
            # nodes borders / len(set(nodes)) times. If a ring has k ranks in a node, the node
            # is part of PER_NODE / k such rings.
            leaves = borders / len(set(nodes)) * PER_NODE / nodes.count(nodes[0])
            row[0] += 1
            row[1] += sent
            row[2] += sent * leaves
        return func(*args, **(kwargs or {}))


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
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("hsdp.py needs 4 ranks: torchrun --nproc-per-node=4 hsdp.py")
    device = init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    alone(inputs).square().mean().backward()

    # --8<-- [start:meshes]
    meshes = {
        "FSDP over 4": init_device_mesh(device.type, (4,), mesh_dim_names=("shard",)),
        "HSDP 2×2": init_device_mesh(
            device.type, (2, 2), mesh_dim_names=("replicate", "shard")
        ),
    }
    # --8<-- [end:meshes]
    expected = {  # Ψ that leave a node of g ranks: 3(1 - 1/N) once, 2(1 - 1/n) · Ψ/g · g
        "FSDP over 4": 3 * (1 - 1 / 4),
        "HSDP 2×2": 2 * (1 - 1 / 2),
    }
    for words, mesh in meshes.items():
        model = copy.deepcopy(alone)
        model.zero_grad()
        # --8<-- [start:shard]
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        # --8<-- [end:shard]
        with Traffic(mesh) as traffic:
            mine = inputs[rank::4]
            model(mine).square().mean().backward()
        assert len(mine) == BATCH // 4  # the mean gradient is right only if no row is missing
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        weight = model[0].up.weight
        if rank == 0:
            stored = sum(p.to_local().numel() for p in model.parameters())
            assert stored == psi // mesh["shard"].size()
            print(f"{words}: gradients equal one process; {weight.placements}")
            print(f"  a rank stores {stored / psi:.2f} Ψ")
            for (name, dimension), (number, sent, leaves) in sorted(traffic.table.items()):
                print(
                    f"  {number} × {name:14} along {dimension:9} sends {sent / psi:.2f} Ψ, "
                    f"{leaves / psi:.2f} Ψ leave a node"
                )
            total = sum(leaves for _, _, leaves in traffic.table.values()) / psi
            assert abs(total - expected[words]) < 1e-6, total


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
