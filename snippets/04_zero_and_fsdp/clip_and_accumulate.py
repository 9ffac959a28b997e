"""Gradient accumulation and clipping with FSDP2, with the collectives and gradients counted.

set_requires_gradient_sync(False) skips the reduce-scatter of a micro-batch. The gradients are
then added up whole, so every rank stores Ψ elements instead of Ψ/N. The last line is about
clipping: clip_grad_norm_ receives DTensors and returns the norm of the whole gradient. The
norms of the single shards are different.
"""

import copy
import gc
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS, MICRO = 48, 48, 4, 4  # 1, 2, 3 and 4 ranks divide a micro-batch of 12
LIMIT = 0.5  # of the gradient's norm


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


def reduce_every(model, micro: int) -> None:
    """Change nothing: backward of every micro-batch ends with a reduce-scatter."""


def reduce_last(model, micro: int) -> None:
    """Skip the reduce-scatter in all micro-batches except the last one."""
    model.set_requires_gradient_sync(micro == MICRO - 1)


def stay_whole(model, micro: int) -> None:
    """Like `reduce_last`, but gather the parameters only once per step, as ZeRO-1 does."""
    reduce_last(model, micro)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(micro == MICRO - 1)


def gradient_elements(model: nn.Module) -> int:
    """Count the elements of all gradients on this rank: of shards and of gathered copies."""
    gathered = [t for t in gc.get_objects() if type(t) is nn.Parameter]
    gradients = [p.grad for p in (*model.parameters(), *gathered) if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    storages = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in local}
    return sum(storages.values()) // 4


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
    if BATCH % (MICRO * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"the number of ranks must divide the micro-batches of {BATCH // MICRO}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    fresh = copy.deepcopy(alone)
    alone(inputs).square().mean().backward()
    truths = [p.grad.clone() for p in alone.parameters()]
    expected = nn.utils.clip_grad_norm_(alone.parameters(), LIMIT).item()
    assert expected > 1.2 * LIMIT  # or there would be nothing to clip
    clipped = [p.grad.clone() for p in alone.parameters()]
    alone.zero_grad()

    if rank == 0:
        print(f"N = {n}, {MICRO} micro-batches; the gradients equal those of one batch")
        print("               all-gathers  reduce-scatters  gradients before the last backward")
    for mode in (reduce_every, reduce_last, stay_whole):
        model = copy.deepcopy(fresh)
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with Count(model) as count:
            for micro, part in enumerate(inputs.chunk(MICRO)):
                mode(model, micro)
                if micro == MICRO - 1:
                    stored = gradient_elements(model)
                loss = model(part[rank::n]).square().mean()
                (loss / MICRO).backward()
        every = [0.0] * n
        dist.all_gather_object(every, loss.item())
        assert len(set(every)) == n  # each rank has other rows
        for ours, truth in zip(model.parameters(), truths, strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth)
        calls = count.calls
        expected_calls = {
            reduce_every: (2 * LAYERS * MICRO, LAYERS * MICRO, psi // n),
            reduce_last: (2 * LAYERS * MICRO, LAYERS, psi),
            stay_whole: (LAYERS, LAYERS, psi),
        }[mode]
        counted = (calls["allgather"], calls["reduce_scatter"], stored)
        assert counted == expected_calls or n == 1  # one rank sends nothing
        block = 4 * psi // LAYERS  # bytes
        assert count.bytes == {name: number * block for name, number in calls.items() if number}
        assert count.peak == block * (LAYERS if mode is stay_whole else 1)
        if rank == 0:
            print(
                f"{mode.__name__:13}  {calls['allgather']:11}  {calls['reduce_scatter']:15}"
                f"  {stored / psi:.2f} Ψ"
            )

    local = [p.grad.to_local().clone() for p in model.parameters()]
    own = torch.linalg.vector_norm(torch.stack([g.norm() for g in local]))
    norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)  # a DTensor
    torch.testing.assert_close(norm.full_tensor().item(), expected)
    for ours, truth in zip(model.parameters(), clipped, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), truth)
    norms = [torch.zeros_like(own) for _ in range(n)]
    dist.all_gather(norms, own)
    torch.testing.assert_close(sum(x.square() for x in norms).sqrt().item(), expected)
    if rank == 0:
        print(f"norm of the gradient: one process {expected:.4f}", end="")
        print(f", clip_grad_norm_ {norm.full_tensor().item():.4f}", end="")
        print(f", of the shards {', '.join(f'{x.item():.4f}' for x in norms)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
