"""FSDP from scratch: parameters, gradients and Adam's state sharded, gathered unit by unit.

A unit is a module whose parameters are laid out in one flat tensor; a rank keeps 1/N of it.
Hooks gather the unit before its forward and again before its backward, free it after each, and
reduce-scatter its gradient. While a unit computes, the next one's all-gather is under way.
"""

import copy
import os
import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

BATCH, STEPS, H, LAYERS = 48, 5, 60, 4  # 1, 2, 3 and 4 ranks divide the batch
ELEMENT = 8  # bytes: float64, so that the order in which partial sums are added does not show
Slot = tuple[nn.Module, str, nn.Parameter]  # a parameter, and where it stands


class Unit:
    """Parameters of `module` that have one dtype, and are all trained or all frozen."""

    def __init__(self, module: nn.Module, slots: list[Slot], fsdp: "MiniFSDP") -> None:
        self.fsdp, self.index, self.gathering = fsdp, len(fsdp.units), None
        parameters = list(dict.fromkeys(p for _, _, p in slots))  # a tied one is kept once
        place = {p: i for i, p in enumerate(parameters)}
        self.names = [fsdp.names[p] for p in parameters]
        self.shapes = [p.shape for p in parameters]
        self.slots = [(owner, name, place[p]) for owner, name, p in slots]
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.sizes = [shape.numel() for shape in self.shapes]
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.sizes.append(-len(flat) % self.n)  # padding, so that N shards are equal
        flat = torch.cat([flat, flat.new_zeros(self.sizes[-1])])
        dist.broadcast(flat, src=0)
        trained = parameters[0].requires_grad
        self.shard = nn.Parameter(flat.chunk(self.n)[self.rank].clone(), trained)  # what stays
        self.whole = flat.requires_grad_(trained)  # its storage will come and go
        if trained:
            self.whole.register_post_accumulate_grad_hook(self.reduce_gradient)
        for owner, name, _ in slots:
            delattr(owner, name)
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def launch_gather(self) -> None:
        """Allocate the whole parameters and start to fill them; twice is as good as once."""
        if self.gathering is None:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            chunks = list(self.whole.data.chunk(self.n))
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
            self.gathering.wait()  # one that was started for a unit which did not run
            self.gathering = None
            self.fsdp.account("freed", self.whole.nbytes, held=-1)
        self.whole.untyped_storage().resize_(0)

    def pieces(self) -> list[torch.Tensor]:
        """The parameters, as views of the whole; autograd will join their gradients."""
        pieces = self.whole.split(self.sizes)
        return [piece.view(s) for piece, s in zip(pieces, self.shapes, strict=False)]

    def before_forward(self, *_: object) -> None:
        self.gather(following=self.index + 1)
        pieces = self.pieces()
        for owner, name, i in self.slots:
            setattr(owner, name, pieces[i])

    def after_forward(self, _module: nn.Module, _inputs: tuple, output: object) -> None:
        if not self.fsdp.in_backward:  # else a checkpoint recomputes, and backward comes next
            self.free()
        tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        tensors = [t for t in tensors if t.requires_grad]
        if self.whole.requires_grad and torch.is_grad_enabled() and not tensors:
            raise RuntimeError("a unit returns tensors, or tuples, lists and dicts of them")
        for tensor in tensors:
            tensor.register_hook(self.before_backward)

    def before_backward(self, _gradient: torch.Tensor) -> None:
        if not self.fsdp.in_backward:
            self.fsdp.in_backward = True
            Variable._execution_engine.queue_callback(self.fsdp.finish_backward)
        self.gather(following=self.index - 1)

    def reduce_gradient(self, whole: torch.Tensor) -> None:
        """All gradients of the unit are there: keep the mean of this rank's shard of them."""
        self.fsdp.finish_reduction()  # of the unit above, which overlapped with this backward
        self.free()
        gradient, whole.grad = whole.grad, None
        part = torch.empty_like(self.shard)
        work = dist.reduce_scatter(part, list(gradient.chunk(self.n)), async_op=True)
        self.fsdp.reduction = work, self.shard, part
        self.fsdp.account("reduce-scatter", gradient.nbytes)


class MiniFSDP(nn.Module):
    """Shard `module`: each of `units`, which are modules in it, and the rest of it as one.

    The optimizer gets `shards()`, and treats every element alone. Gradients are dense. Name the
    units in the order of their forward, an inner one before the outer; one has both ends of a
    tied weight. Frozen parameters stay whole until backward ends. One that a backward does not
    reach has a gradient of zeros, not None, if another of its unit and dtype is reached.
    """

    def __init__(self, module: nn.Module, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.module, self.units, self.reduction, self.in_backward = module, [], None, False
        self.bytes, self.held, self.peak, self.waits = {}, 0, 0, 0
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        self.names = defaultdict(list)  # several, if it is tied
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names[parameter].append(name)
        placed: set[nn.Parameter] = set()
        for unit in [*units, module]:
            groups: dict[tuple, list[Slot]] = defaultdict(list)
            for owner in unit.modules():
                for name, p in owner.named_parameters(recurse=False, remove_duplicate=False):
                    if p in placed:
                        raise RuntimeError(f"{' and '.join(self.names[p])} are in two units")
                    groups[p.dtype, p.requires_grad].append((owner, name, p))
            for slots in groups.values():
                placed.update(p for _, _, p in slots)
                self.units.append(Unit(unit, slots, self))
        self.names.clear()  # which would keep the whole parameters

    def forward(self, *args: object, **kwargs: object) -> object:
        self.in_backward = False  # a backward before may have ended with an error
        output = self.module(*args, **kwargs)
        self.free()
        return output

    def shards(self) -> list[nn.Parameter]:
        """What the optimizer gets: of the parameters that are trained."""
        return [unit.shard for unit in self.units if unit.shard.requires_grad]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters and buffers by the names of `module`, the same on every rank."""
        state = self.module.state_dict()  # the buffers
        for unit in self.units:
            unit.gather(following=-1)
            for names, piece in zip(unit.names, unit.pieces(), strict=True):
                state |= dict.fromkeys(names, piece.detach().clone())
            unit.free()
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.module.load_state_dict(state, strict=False)  # the buffers
        for unit in self.units:
            pieces = [state[names[0]].flatten().to(unit.shard) for names in unit.names]
            flat = torch.cat([*pieces, unit.shard.new_zeros(unit.sizes[-1])])
            unit.shard.data.copy_(flat.chunk(unit.n)[unit.rank])

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    def finish_reduction(self) -> None:
        if self.reduction is not None:
            work, shard, part = self.reduction
            work.wait()
            part /= dist.get_world_size()
            shard.grad = part if shard.grad is None else shard.grad + part
            self.reduction = None

    def finish_backward(self) -> None:
        """Backward must not return before the last reduction, nor leave anything whole."""
        self.finish_reduction()
        self.free()
        self.in_backward = False

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
    ours = copy.deepcopy(alone)
    fsdp = MiniFSDP(ours, units=ours)
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
