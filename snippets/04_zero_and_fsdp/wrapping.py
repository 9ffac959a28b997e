"""The size of a unit decides the number of messages and the memory of gathered parameters.

Every call of fully_shard makes one unit, and one all-gather gathers all parameters of a unit.
The program shards the same model in three ways: as one unit, as one unit per block, and as one
unit per linear layer. Look at the columns: the bytes are the same. A larger unit needs fewer
messages, but more parameters are gathered at the same time. The single unit needs
reshard_after_forward=True. By default, FSDP would not free it after forward, and backward would
gather nothing.
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
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 24, 48, 6  # 1, 2, 3 and 4 ranks divide the batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Count(TorchDispatchMode):
    """Count collectives and their bytes. Measure the gathered parameters at every operator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls, self.bytes, self.peak = model, Counter(), Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            self.calls[name] += 1
            whole = args[1] if name == "reduce_scatter" else args[0]
            self.bytes[name] += whole.nbytes
        self.peak = max(self.peak, whole_bytes(self.model))
        return func(*args, **(kwargs or {}))


def whole_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters that are gathered at this moment."""
    # a gathered parameter is a plain tensor, and a sharded parameter is a DTensor
    return sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))


def root_only(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def linears(model: nn.Module, mesh: DeviceMesh) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    whole = alone(inputs).square().mean()
    whole.backward()
    if rank == 0:
        print(f"N = {n}, Ψ = {psi:,} in {LAYERS} blocks of two linears; one step")
        print("fully_shard on  all-gathers  reduce-scatters  Ψ gathered  whole at once")
    for wrap in (root_only, blocks, linears):
        model = copy.deepcopy(alone)
        model.zero_grad()
        wrap(model, mesh)
        with Count(model) as count:
            loss = model(inputs[rank::n]).square().mean()
            loss.backward()
        assert torch.isclose(loss, whole) == (n == 1)  # otherwise of a part of the rows
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        gathers, reductions = count.calls["allgather"], count.calls["reduce_scatter"]
        gathered, peak = count.bytes["allgather"] / 4 / psi, count.peak / 4 / psi
        units, largest = {
            root_only: (1, psi),
            blocks: (LAYERS, psi // LAYERS),
            linears: (2 * LAYERS, 4 * H * (H + 1)),  # `up` with its bias is the larger one
        }[wrap]
        assert (gathers, reductions) == (2 * units, units)
        assert gathered == 2 and count.peak == 4 * largest
        if rank == 0:
            print(
                f"{wrap.__name__:14}  {gathers:11}  {reductions:15}  {gathered:10.2f}"
                f"  {peak:10.3f} Ψ"
            )


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
