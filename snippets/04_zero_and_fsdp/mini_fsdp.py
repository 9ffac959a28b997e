"""FSDP from scratch: parameters, gradients and Adam's state sharded, gathered unit by unit.

A unit is a module whose parameters are laid out in one flat tensor; a rank keeps 1/N of it.
Hooks gather the unit before its forward and again before its backward, free it after each, and
reduce-scatter its gradient. While a unit computes, the next one's all-gather is under way.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.autograd import Variable

BATCH, STEPS, H, LAYERS = 48, 5, 60, 4  # 1, 2, 3 and 4 ranks divide the batch
ELEMENT = 8  # bytes: float64, so that the order in which partial sums are added does not show


class Unit:
    def __init__(self, module: nn.Module, fsdp: "MiniFSDP") -> None:
        self.fsdp, self.index, self.gathering = fsdp, len(fsdp.units), None
        self.slots = [
            (owner, name, parameter.shape)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        self.sizes = [shape.numel() for _, _, shape in self.slots]
        n, rank = dist.get_world_size(), dist.get_rank()
        self.sizes.append(-len(flat) % n)  # padding, so that N shards are equal
        flat = torch.cat([flat, flat.new_zeros(self.sizes[-1])])
        self.shard = nn.Parameter(flat.chunk(n)[rank].clone())  # what this rank keeps
        self.whole = flat.requires_grad_()  # its storage will come and go
        self.whole.register_post_accumulate_grad_hook(self.reduce_gradient)
        for owner, name, _ in self.slots:
            delattr(owner, name)
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def launch_gather(self) -> None:
        """Allocate the whole parameters and start to fill them; twice is as good as once."""
        if self.gathering is None:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            chunks = list(self.whole.data.chunk(dist.get_world_size()))
            self.gathering = dist.all_gather(chunks, self.shard.data, async_op=True)
            self.fsdp.account("all-gather", self.whole.nbytes, held=+1)

    def gather(self, following: int) -> None:
        """Finish this unit's all-gather, and start the one that is needed next."""
        self.fsdp.waits += self.gathering is None  # nobody has started it: nothing hides it
        self.launch_gather()
        if 0 <= following < len(self.fsdp.units):
            self.fsdp.units[following].launch_gather()
        self.gathering.wait()

    def free(self) -> None:
        if self.gathering is not None:
            self.gathering = None
            self.fsdp.account("freed", self.whole.nbytes, held=-1)
        self.whole.untyped_storage().resize_(0)

    def before_forward(self, *_: object) -> None:
        self.gather(following=self.index + 1)
        pieces = self.whole.split(self.sizes)  # views; autograd will join their gradients
        for (owner, name, shape), piece in zip(self.slots, pieces, strict=False):
            setattr(owner, name, piece.view(shape))

    def after_forward(self, _module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        self.free()
        output.register_hook(lambda _: self.gather(following=self.index - 1))

    def reduce_gradient(self, whole: torch.Tensor) -> None:
        """All gradients of the unit are there: keep the mean of this rank's shard of them."""
        self.fsdp.finish_reduction()  # of the unit above, which overlapped with this backward
        self.free()
        gradient, whole.grad = whole.grad, None
        self.shard.grad = torch.empty_like(self.shard)
        chunks = list(gradient.chunk(dist.get_world_size()))
        self.fsdp.reduction = (
            dist.reduce_scatter(self.shard.grad, chunks, async_op=True),
            self,
        )
        self.fsdp.account("reduce-scatter", gradient.nbytes)
        if self.index == 0:  # backward must not return before the last reduction
            Variable._execution_engine.queue_callback(self.fsdp.finish_reduction)


class MiniFSDP(nn.Module):
    """Shard `module`, an nn.Sequential, with each child a unit. Forward runs them in order."""

    def __init__(self, module: nn.Sequential) -> None:
        super().__init__()
        self.module, self.units, self.reduction = module, [], None
        self.bytes, self.held, self.peak, self.waits = {}, 0, 0, 0
        for child in module:
            self.units.append(Unit(child, self))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def shards(self) -> list[nn.Parameter]:
        """What the optimizer gets."""
        return [unit.shard for unit in self.units]

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            work, unit = self.reduction
            work.wait()
            unit.shard.grad /= dist.get_world_size()
            self.reduction = None

    def account(self, what: str, nbytes: int, held: int = 0) -> None:
        self.bytes[what] = self.bytes.get(what, 0) + nbytes
        self.held += held * nbytes
        self.peak = max(self.peak, self.held)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


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
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    fsdp = MiniFSDP(copy.deepcopy(alone))
    optimizer = torch.optim.Adam(fsdp.shards(), lr=0.01)
    optimizer_alone = torch.optim.Adam(alone.parameters(), lr=0.01)

    for step in range(STEPS):
        inputs = torch.randn(BATCH, H).to(device)
        mine = inputs[rank::n]
        fsdp.bytes.clear()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(fsdp(mine), mine.sin())
        loss.backward()
        optimizer.step()

        optimizer_alone.zero_grad()
        loss_alone = nn.functional.mse_loss(alone(inputs), inputs.sin())
        loss_alone.backward()
        optimizer_alone.step()
        mean_loss = loss.detach() / n
        dist.all_reduce(mean_loss)
        assert n == 1 or not torch.isclose(loss, mean_loss)  # of a part of the rows
        if rank == 0:
            print(f"step {step}: loss {mean_loss:.5f}, one process {loss_alone:.5f}")

    for unit, block in zip(fsdp.units, alone, strict=True):
        truth = torch.cat([p.detach().flatten() for p in block.parameters()])
        truth = torch.cat([truth, truth.new_zeros(unit.sizes[-1])]).chunk(n)[rank]
        torch.testing.assert_close(unit.shard.detach(), truth)
    assert fsdp.waits == 2 * STEPS  # the first of forward, the first of backward
    if rank == 0:
        print(f"N = {n}: all shards equal to one process")
        kept = sum(shard.numel() for shard in fsdp.shards())
        print(f"Ψ = {psi:,}; a rank keeps {kept:,}, {LAYERS} units of {psi // LAYERS:,}")
        gathered, reduced = fsdp.bytes["all-gather"], fsdp.bytes["reduce-scatter"]
        print("elements that go through collectives in one step, in units of Ψ:")
        print(f"  all-gather {gathered / (ELEMENT * psi):.2f}", end="")
        print(f" + reduce-scatter {reduced / (ELEMENT * psi):.2f}", end="")
        print(f" = {(gathered + reduced) / (ELEMENT * psi):.2f}")
        print(f"whole at one time: at most {fsdp.peak / (ELEMENT * psi / LAYERS):.2f} units")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
