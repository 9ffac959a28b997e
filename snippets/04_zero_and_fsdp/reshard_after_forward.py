"""reshard_after_forward: True, False or a number; what is gathered in backward, what is held.

True frees a block after its forward and gathers it again in backward. False keeps it whole in
between. A number keeps a shard of that many ranks, so that backward's all-gather stays among
neighbours, within one node if the number is that of its GPUs.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 24, 48, 6


class Gathers(TorchDispatchMode):
    """For every all-gather: over how many ranks, and the bytes of its result."""

    def __enter__(self) -> "Gathers":
        self.calls: list[tuple[int, int]] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.overloadpacket.__name__ == "_allgather_base_":
            whole, part = args[:2]
            self.calls.append((whole.numel() // part.numel(), whole.nbytes))
        return func(*args, **(kwargs or {}))

    def summary(self) -> tuple[str, float]:
        """How many over how many ranks, and what a ring sends from each."""
        ranks = {n for n, _ in self.calls}
        sent = sum((n - 1) / n * size for n, size in self.calls) / 4  # elements
        return f"{len(self.calls)} over {max(ranks)}", sent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def held(model: nn.Module) -> int:
    """Elements of the parameters that are registered now, as this rank holds them."""
    return sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()
    )


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
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("reshard_after_forward.py needs 4 ranks: torchrun --nproc-per-node=4")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    whole = alone(inputs).square().mean()
    whole.backward()
    if rank == 0:
        print(
            f"N = {n}, {LAYERS} blocks; all-gathers and what a rank sends in them, over a ring"
        )
        print("reshard  forward            backward           registered between")
    for reshard in (True, False, 2):
        model = copy.deepcopy(alone)
        model.zero_grad()
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        with Gathers() as forward:
            loss = model(inputs[rank::n]).square().mean()
        between = held(model)
        with Gathers() as backward:
            loss.backward()
        assert not torch.isclose(loss, whole)  # of a part of the rows
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        if rank == 0:
            cells = []
            for mode in (forward, backward):
                words, sent = mode.summary() if mode.calls else ("none", 0)
                cells.append(f"{words:9} {sent / psi:.2f} Ψ   ")
            print(f"{reshard!s:7}  {cells[0]} {cells[1]} {between / psi:.2f} Ψ")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
