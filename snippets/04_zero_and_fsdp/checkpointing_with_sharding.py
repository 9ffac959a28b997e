"""Activation checkpointing with fully_shard: both orders of wrapping, all-gathers and memory.

Recomputation needs the block's parameters, and so does its backward. Wrapped inside the sharded
block, both find them whole after one all-gather. What is kept of a block is its input.
"""

import copy
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 24, 48, 4  # 1, 2, 3 and 4 ranks divide the batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Count(TorchDispatchMode):
    """Count collectives, their bytes, and at every operator the parameters that are whole."""

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
    """Bytes of the parameters that are gathered now: fully_shard swaps DTensors for tensors."""
    return sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))


def whole(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, DTensor)


def plain(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(block, mesh=mesh)


def checkpoint_inside(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(checkpoint_wrapper(block), mesh=mesh)


def checkpoint_outside(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return checkpoint_wrapper(fully_shard(block, mesh=mesh))


def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    everything = alone(inputs).square().mean()
    everything.backward()
    if rank == 0:
        print(f"N = {n}, {LAYERS} blocks, [b, h] = [{BATCH // n}, {H}]")
        print("                    all-gathers  reduce-scatters  whole at once  saved elements")
    for wrap in (plain, checkpoint_inside, checkpoint_outside):
        model = copy.deepcopy(alone)
        model.zero_grad()
        model = fully_shard(nn.Sequential(*(wrap(block, mesh) for block in model)), mesh=mesh)
        assert isinstance(model[0], FSDPModule) == (wrap is not checkpoint_outside)
        saved: dict[int, int] = {}

        def note(
            tensor: torch.Tensor, saved: dict = saved, model: nn.Module = model
        ) -> torch.Tensor:
            parameters = {
                p.untyped_storage().data_ptr() for p in model.parameters() if whole(p)
            }
            address = tensor.untyped_storage().data_ptr()
            if address not in parameters:
                saved[address] = tensor.numel()
            return tensor

        with Count(model) as count:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = model(inputs[rank::n]).square().mean()
            kept = sum(saved.values())
            loss.backward()
        assert n == 1 or not torch.isclose(loss, everything)  # of a part of the rows
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        if rank == 0:
            gathers, reductions = count.calls["allgather"], count.calls["reduce_scatter"]
            peak = f"{count.peak / 4 / psi:.2f} Ψ"
            print(f"{wrap.__name__:18}  {gathers:11}  {reductions:15}  {peak:>13}  {kept:14,}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
