"""Every sharding strategy of FSDP1 has a replacement in FSDP2 with the same collectives.

FullyShardedDataParallel needs an auto_wrap_policy and a ShardingStrategy. fully_shard needs a
mesh and reshard_after_forward, and DDP replaces NO_SHARD. For each pair, the program prints the
number of collectives in one step and their elements, and compares the losses.
"""

import copy
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BATCH, H, LAYERS, STEPS = 24, 48, 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class CountCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.elements = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            self.calls[name] += 1
            whole = args[1] if name == "reduce_scatter" else args[0]
            self.elements[name] += sum(t.numel() for t in tree_leaves(whole))
        return func(*args, **(kwargs or {}))

    def summary(self, psi: int) -> str:
        return ", ".join(
            f"{n} {name} ({self.elements[name] / psi:.2f} Ψ)"
            for name, n in sorted(self.calls.items())
        )


def old(model: nn.Module, strategy: ShardingStrategy, mesh, device) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_mesh=mesh,
        device_id=device,
        use_orig_params=True,
    )


def new(model: nn.Module, mesh, reshard: bool | None) -> nn.Module:
    if reshard is None:
        return DistributedDataParallel(model)
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, inputs: torch.Tensor) -> tuple[float, CountCalls]:
    """Return the last loss, and the collectives of the last forward and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with CountCalls() as count:
            loss = (model(inputs) - 1).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    every = [0.0] * dist.get_world_size()
    dist.all_gather_object(every, losses[0])
    assert len(set(every)) == len(every)  # each rank has other rows
    assert losses[-1] < losses[0]
    return losses[-1], count


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
        sys.exit("fsdp1_strategies.py needs 4 ranks: torchrun --nproc-per-node=4")
    device = init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)[rank::4]
    flat = init_device_mesh(device.type, (4,))
    grid = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    rows = [
        (ShardingStrategy.FULL_SHARD, flat, True),
        (ShardingStrategy.SHARD_GRAD_OP, flat, False),
        (ShardingStrategy.NO_SHARD, flat, None),
        (ShardingStrategy.HYBRID_SHARD, grid, True),
        (ShardingStrategy._HYBRID_SHARD_ZERO2, grid, False),
    ]
    for strategy, mesh, reshard in rows:
        loss1, count1 = train(old(copy.deepcopy(alone), strategy, mesh, device), inputs)
        loss2, count2 = train(new(copy.deepcopy(alone), mesh, reshard), inputs)
        assert abs(loss1 - loss2) < 1e-5
        assert (count1.calls == count2.calls) == (strategy is not ShardingStrategy.NO_SHARD)
        assert count1.elements == count2.elements  # DDP puts all gradients into one bucket
        if rank == 0:
            after = "DDP" if reshard is None else f"mesh {tuple(mesh.shape)}, reshard {reshard}"
            print(f"{strategy.name}: {count1.summary(psi)}")
            print(f"  {after}: {count2.summary(psi)}")
    if rank == 0:
        print(f"in every pair, the losses of step {STEPS} are equal")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
