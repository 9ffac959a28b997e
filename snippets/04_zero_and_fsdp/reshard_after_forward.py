"""reshard_after_forward decides what a rank keeps between forward and backward of a block.

True frees the gathered parameters after forward, and backward gathers them again. False keeps
them whole. A number keeps a shard over that many neighbouring ranks, and backward's all-gather
involves only these ranks. The last lines show a trap: after an evaluation the root's parameters
are still gathered, and the next forward uses the old values unless you call reshard().
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
    """Record the ranks of every all-gather, and the bytes of its result."""

    def __enter__(self) -> "Gathers":
        self.calls: list[tuple[list[int], int]] = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.overloadpacket.__name__ == "_allgather_base_":
            group = next(
                dist.ProcessGroup.unbox(a)
                for a in args
                if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type())
            )
            self.calls.append((dist.get_process_group_ranks(group), args[0].nbytes))
        return func(*args, **(kwargs or {}))

    def summary(self) -> tuple[str, float]:
        """Return how many gathers ran over how many ranks, and the elements a rank sends."""
        if not self.calls:
            return "none", 0.0
        sizes = [(len(ranks), size) for ranks, size in self.calls]
        sent = sum((n - 1) / n * size for n, size in sizes) / 4  # over a ring
        return f"{len(sizes)} over {max(sizes)[0]}", sent


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class BlockAndHead(nn.Module):
    """A model with one block and a head. The head belongs to the unit of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))


def registered(model: nn.Module) -> int:
    """Return the elements that this rank stores of the parameters that are registered now."""
    return sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()
    )


def losses_with_evaluation(
    mesh, inputs: torch.Tensor, evaluate: bool, reshard: bool
) -> tuple[list[float], int]:
    """Train three steps, and evaluate between backward and the step of the optimizer.

    Return the losses, and the number of evaluations.
    """
    torch.manual_seed(0)
    model = BlockAndHead().to(inputs.device)
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses, passes = [], []
    model.register_forward_pre_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        # --8<-- [start:evaluate]
        if evaluate:
            with torch.no_grad():
                model(inputs)
        if reshard:
            model.reshard()
        optimizer.step()
        # --8<-- [end:evaluate]
    return losses, passes.count(False)


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
        sys.exit("reshard_after_forward.py needs 4 ranks: torchrun --nproc-per-node=4")
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
        print(f"N = {n}, {LAYERS} blocks; all-gathers, and what each rank sends over a ring")
        print("reshard  forward            backward           registered between")
    for reshard in (True, False, 2):
        model = copy.deepcopy(alone)
        model.zero_grad()
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        with Gathers() as forward:
            loss = model(inputs[rank::n]).square().mean()
        between = registered(model)
        with Gathers() as backward:
            loss.backward()
        assert not torch.isclose(loss, whole)  # each rank has other rows
        for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), truth.grad)
        expected = {True: ((n - 1) / n, 1 / n), False: (0, 1), 2: (1 / 2, 1 / 2)}[reshard]
        assert forward.summary()[1] == (n - 1) / n * psi
        assert (backward.summary()[1], between) == (expected[0] * psi, expected[1] * psi)
        neighbours = [rank // 2 * 2, rank // 2 * 2 + 1]  # and not ranks 0 and 2
        assert reshard != 2 or all(ranks == neighbours for ranks, _ in backward.calls)
        if rank == 0:
            cells = [
                f"{words:9} {sent / psi:.2f} Ψ   "
                for words, sent in (forward.summary(), backward.summary())
            ]
            print(f"{reshard!s:7}  {cells[0]} {cells[1]} {between / psi:.2f} Ψ")

    rows = inputs[rank::n]
    right, none = losses_with_evaluation(mesh, rows, evaluate=False, reshard=False)
    stale, three = losses_with_evaluation(mesh, rows, evaluate=True, reshard=False)
    fixed, as_many = losses_with_evaluation(mesh, rows, evaluate=True, reshard=True)
    assert (none, three, as_many) == (0, 3, 3)
    assert fixed == right and stale[0] == right[0]
    assert all(abs(a - b) > 0.01 for a, b in zip(stale[1:], right[1:], strict=True))
    if rank == 0:
        print("losses of three steps, with an evaluation before each optimizer step:")
        cases = ("no evaluation", right), ("evaluation", stale), ("+ reshard()", fixed)
        for name, losses in cases:
            print(f"  {name:13}  {' '.join(f'{loss:.4f}' for loss in losses)}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
