"""Activation checkpointing of a sharded block needs no additional all-gather.

The recomputation of a block needs its parameters, and so does its backward. One all-gather
serves both, in either order of checkpoint_wrapper and fully_shard. The last row shows what to
avoid: one checkpoint around all blocks. The recomputation of this checkpoint gathers every
block, and each block stays gathered until backward has used it.
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


def without(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(block, mesh=mesh)


def checkpoint_inside(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(checkpoint_wrapper(block), mesh=mesh)


def checkpoint_outside(block: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return checkpoint_wrapper(fully_shard(block, mesh=mesh))


def checkpoint_all(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """One checkpoint around all units."""
    for block in model:
        fully_shard(block, mesh=mesh)
    return nn.Sequential(checkpoint_wrapper(model))


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
    everything = alone(inputs).square().mean()
    everything.backward()
    if rank == 0:
        print(f"N = {n}, {LAYERS} blocks, [b, h] = [{BATCH // n}, {H}]")
        print("                    all-gathers  reduce-scatters  whole at once  saved elements")
    results = {}
    for wrap in (without, checkpoint_inside, checkpoint_outside, checkpoint_all):
        model = copy.deepcopy(alone)
        model.zero_grad()
        if wrap is checkpoint_all:
            model = wrap(model, mesh)
        else:
            model = nn.Sequential(*(wrap(block, mesh) for block in model))
            assert isinstance(model[0], FSDPModule) == (wrap is not checkpoint_outside)
        model = fully_shard(model, mesh=mesh)
        saved: dict[int, int] = {}

        def note(
            tensor: torch.Tensor, saved: dict = saved, model: nn.Module = model
        ) -> torch.Tensor:
            parameters = {
                p.untyped_storage().data_ptr()
                for p in model.parameters()
                if not isinstance(p, DTensor)
            }
            address = tensor.untyped_storage().data_ptr()
            if address not in parameters:
                saved[address] = tensor.numel()
            return tensor

        with Count(model) as count:
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                loss = model(inputs[rank::n]).square().mean()
            elements = sum(saved.values())
            loss.backward()
        assert n == 1 or not torch.isclose(loss, everything)  # of a part of the rows
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        gathers, reductions = count.calls["allgather"], count.calls["reduce_scatter"]
        peak = count.peak / 4 / psi
        assert (gathers, reductions) == (2 * LAYERS, LAYERS)  # recomputation adds no gather
        assert peak == (1 if wrap is checkpoint_all else 1 / LAYERS)
        results[wrap] = elements
        if rank == 0:
            print(
                f"{wrap.__name__:18}  {gathers:11}  {reductions:15}  {peak:11.2f} Ψ"
                f"  {elements:14,}"
            )
    activation = BATCH // n * H
    # with a checkpoint, forward saves the inputs of the blocks and what the loss needs
    assert results[checkpoint_inside] == (LAYERS + 1) * activation
    assert results[checkpoint_outside] == (LAYERS + 1) * activation
    assert results[checkpoint_all] == 2 * activation  # one input, and what the loss needs
    assert results[without] > 7 * results[checkpoint_inside]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
