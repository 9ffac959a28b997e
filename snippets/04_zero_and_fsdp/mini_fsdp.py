"""FSDP from scratch: parameters, gradients and Adam's state are sharded and gathered by unit.

A unit is a module whose parameters are in one flat tensor. Each rank keeps 1/N of this tensor.
Hooks gather the unit before its forward and again before its backward, free it after each of
them, and reduce-scatter its gradient. While one unit computes, the all-gather of the next unit
is running.

The program trains with MiniFSDP on all ranks, and with the whole batch in one process, and
compares the losses and the shards. Look at the last lines of the output: three transfers of Ψ
elements, and never more than two units in memory.
"""

import copy
import gc
import os
import sys
import time
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
Slot = tuple[nn.Module, str, nn.Parameter]  # the module of a parameter, its name there, itself


class Unit:
    """Parameters of `module` that have one dtype and are all trained, or all frozen."""

    def __init__(self, module: nn.Module, slots: list[Slot], fsdp: "MiniFSDP") -> None:
        self.fsdp, self.index, self.gathering = fsdp, len(fsdp.units), None
        parameters = list(dict.fromkeys(p for _, _, p in slots))  # a tied parameter only once
        place = {p: i for i, p in enumerate(parameters)}
        self.names = [fsdp.names[p] for p in parameters]
        self.shapes = [p.shape for p in parameters]
        self.slots = [(owner, name, place[p]) for owner, name, p in slots]
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.sizes = [shape.numel() for shape in self.shapes]
        self.n, self.rank = dist.get_world_size(), dist.get_rank()
        self.sizes.append(-len(flat) % self.n)  # padding, so that all shards are equally long
        flat = torch.cat([flat, flat.new_zeros(self.sizes[-1])])
        dist.broadcast(flat, src=0)
        trained = parameters[0].requires_grad
        self.shard = nn.Parameter(flat.chunk(self.n)[self.rank].clone(), trained)
        self.whole = flat.requires_grad_(trained)  # its memory exists only while it is needed
        if trained:
            self.whole.register_post_accumulate_grad_hook(self.reduce_gradient)
        for owner, name, _ in slots:
            delattr(owner, name)
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def launch_gather(self) -> None:
        """Allocate the whole parameters and start the all-gather, if it has not started yet."""
        if self.gathering is None:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            chunks = list(self.whole.data.chunk(self.n))
            self.gathering = dist.all_gather(chunks, self.shard.data, async_op=True)
            self.fsdp.record("all-gather", self.whole.nbytes)

    def gather(self, following: int) -> None:
        """Finish the all-gather of this unit. Start the all-gather of the unit `following`."""
        self.fsdp.waits += self.gathering is None  # not prefetched, so nothing hides it
        self.launch_gather()
        if 0 <= following < len(self.fsdp.units):
            self.fsdp.units[following].launch_gather()
        self.gathering.wait()

    def free(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()  # if the unit did not run, its prefetch may not be finished
            self.gathering = None
        self.whole.untyped_storage().resize_(0)

    def pieces(self) -> list[torch.Tensor]:
        """Return the parameters as views of the whole. Autograd joins their gradients."""
        pieces = self.whole.split(self.sizes)
        return [piece.view(s) for piece, s in zip(pieces, self.shapes, strict=False)]

    def before_forward(self, *_: object) -> None:
        self.gather(following=self.index + 1)
        pieces = self.pieces()
        for owner, name, i in self.slots:
            setattr(owner, name, pieces[i])

    def after_forward(self, _module: nn.Module, _inputs: tuple, output: object) -> None:
        if not self.fsdp.in_backward:  # a recomputation must not free the unit
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
        """When all gradients of the unit are ready: free it, and start the reduce-scatter."""
        # the reduce-scatter of the previous unit has overlapped with the backward of this unit
        self.fsdp.finish_reduction()
        self.free()
        gradient, whole.grad = whole.grad, None
        part = torch.empty_like(self.shard)
        work = dist.reduce_scatter(part, list(gradient.chunk(self.n)), async_op=True)
        self.fsdp.reduction = work, self.shard, part
        self.fsdp.record("reduce-scatter", gradient.nbytes)

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Fill the shard from whole parameters."""
        pieces = [state[names[0]].flatten().to(self.shard) for names in self.names]
        flat = torch.cat([*pieces, self.shard.new_zeros(self.sizes[-1])])
        self.shard.data.copy_(flat.chunk(self.n)[self.rank])


class MiniFSDP(nn.Module):
    """Shard `module`: each module in `units` is one unit, and all other parameters are one.

    `parameters()` returns this rank's shards, so build the optimizer after sharding. The
    optimizer must update each element independently. A norm of the shards is only the norm of
    this rank. List the units in the order of their forward, an inner unit before an outer one.
    Both modules of a tied weight must be in one unit. Freeze, cast and move the module before
    it is sharded. Frozen parameters stay whole until backward ends. If backward reaches a unit,
    but not all of its parameters, the other parameters get a gradient of zeros, and not None.
    """

    def __init__(self, module: nn.Module, units: Iterable[nn.Module]) -> None:
        super().__init__()
        self.module, self.units, self.reduction, self.in_backward = module, [], None, False
        self.bytes, self.peak, self.waits = {}, 0, 0
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        self.names = defaultdict(list)  # a tied parameter has several names
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
        self.names.clear()  # its keys are the whole parameters, which would stay in memory
        self.shards = nn.ParameterList(unit.shard for unit in self.units)

    def forward(self, *args: object, **kwargs: object) -> object:
        if any(unit.shard.requires_grad != unit.whole.requires_grad for unit in self.units):
            raise RuntimeError("freeze parameters before MiniFSDP shards them")
        self.in_backward = False  # the backward before may have ended with an error
        output = self.module(*args, **kwargs)
        self.free()
        return output

    def _apply(self, *_: object, **__: object) -> None:
        raise RuntimeError("cast or move the module before MiniFSDP shards it")

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return whole parameters and buffers by their names in `module`, on every rank."""
        state = self.module.state_dict()  # the buffers
        for unit in self.units:
            unit.gather(following=-1)
            for names, piece in zip(unit.names, unit.pieces(), strict=True):
                state |= dict.fromkeys(names, piece.detach().clone())
            unit.free()
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        shapes = {name: tensor.shape for name, tensor in self.module.state_dict().items()}
        for unit in self.units:
            for names, shape in zip(unit.names, unit.shapes, strict=True):
                shapes |= dict.fromkeys(names, shape)
        wrong = {name for name in state.keys() | shapes if name not in state.keys() & shapes}
        wrong |= {name for name in state.keys() - wrong if state[name].shape != shapes[name]}
        if wrong:
            raise RuntimeError(f"missing, unexpected or of a different shape: {sorted(wrong)}")
        self.module.load_state_dict(state, strict=False)  # the buffers
        for unit in self.units:
            unit.load(state)

    def free(self) -> None:
        for unit in self.units:
            unit.free()

    def finish_reduction(self) -> None:
        """Wait for the last reduce-scatter, and add its mean to the gradient of its shard."""
        if self.reduction is not None:
            work, shard, part = self.reduction
            work.wait()
            part /= dist.get_world_size()
            shard.grad = part if shard.grad is None else shard.grad + part
            self.reduction = None

    def finish_backward(self) -> None:
        """At the end of backward: finish the last reduce-scatter, and free all units."""
        self.finish_reduction()
        self.free()
        self.in_backward = False

    def record(self, collective: str, nbytes: int) -> None:
        """Add the bytes of a collective, and update the peak of the memory of all units."""
        self.bytes[collective] = self.bytes.get(collective, 0) + nbytes
        self.peak = max(self.peak, self.allocated())

    def allocated(self) -> int:
        """Return the bytes of whole parameters that are in memory now."""
        return sum(unit.whole.untyped_storage().nbytes() for unit in self.units)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


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


def leaf_bytes() -> int:
    """Return the bytes in memory of all leaf tensors that were made after gc.freeze()."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    leaves = [x for x in tensors if x.is_leaf]
    leaves += [x.grad for x in leaves if x.grad is not None]
    storages = [x.untyped_storage() for x in leaves]  # a view keeps a whole storage in memory
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def assert_leaf_bytes(expected: int) -> None:
    end = time.monotonic() + 20
    while leaf_bytes() != expected:
        assert time.monotonic() < end, (leaf_bytes(), expected)
        time.sleep(0.001)  # gloo's threads free the buffers of a collective a bit late


def check_uneven_unit(device: torch.device) -> None:
    """Compare with one process: units of 25 and 30 elements, and two micro-batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).to(device)
    batches = list(torch.randn(4, 12, 4).to(device))
    shares = [inputs[rank::n] for inputs in batches]
    gc.freeze()  # leaf_bytes does not count the tensors so far
    ours = copy.deepcopy(alone)
    fsdp = MiniFSDP(ours, units=ours)
    optimizer = torch.optim.SGD(fsdp.parameters(), lr=1.0)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=1.0)
    shards = sum(shard.nbytes for shard in fsdp.parameters())
    assert_leaf_bytes(shards)  # the original parameters are freed
    with torch.autograd.profiler.profile() as trace:
        for number, inputs in enumerate(shares):
            output = fsdp(inputs)
            assert ours[0].weight.untyped_storage().nbytes() == 0  # freed, although saved
            output.square().mean().backward()
            assert_leaf_bytes(2 * shards)  # parameters and gradients
            if number % 2:  # two micro-batches in a step
                optimizer.step()
                optimizer.zero_grad()
    calls = [event.name for event in trace.function_events if event.name.startswith("c10d::")]
    assert sorted(calls) == 16 * ["c10d::allgather_"] + 8 * ["c10d::reduce_scatter_"]
    assert fsdp.bytes == {"all-gather": 8 * n * shards, "reduce-scatter": 4 * n * shards}
    for number, inputs in enumerate(batches):
        alone(inputs).square().mean().backward()
        if number % 2:
            optimizer_alone.step()
            optimizer_alone.zero_grad()
    state = fsdp.state_dict()
    for name, truth in alone.state_dict().items():
        torch.testing.assert_close(state[name], truth)
    check_other_states(fsdp, state)
    check_mistakes(fsdp, state)


def check_other_states(fsdp: MiniFSDP, state: dict[str, torch.Tensor]) -> None:
    """After a load, `state_dict` returns what was loaded."""
    other = {name: tensor + 1 for name, tensor in state.items()}
    fsdp.load_state_dict(other)
    loaded = fsdp.state_dict()
    assert loaded.keys() == other.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in other.items())


def check_mistakes(fsdp: MiniFSDP, state: dict[str, torch.Tensor]) -> None:
    """Each of these mistakes must raise an error that names it."""

    def tie() -> None:
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(fsdp.units[0].shard.device)
        tied[1].weight = tied[0].weight
        MiniFSDP(tied, units=tied)

    def freeze() -> None:
        fsdp.requires_grad_(False)
        fsdp(torch.ones(1, 4))

    first, *rest = state
    for mistake, message in (
        (lambda: fsdp.load_state_dict({name: state[name] for name in rest}), repr(first)),
        (lambda: fsdp.load_state_dict(state | {"more": state[first]}), "'more'"),
        (lambda: fsdp.load_state_dict(state | {first: state[first].T}), repr(first)),
        (fsdp.half, "cast or move the module before"),
        (tie, "0.weight and 1.weight are in two units"),
        (freeze, "freeze parameters before"),
    ):
        try:
            mistake()
        except RuntimeError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"this error was not raised: {message}")


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    ours = copy.deepcopy(alone)
    fsdp = MiniFSDP(ours, units=ours)
    optimizer = torch.optim.Adam(fsdp.parameters(), lr=0.01)
    optimizer_alone = torch.optim.Adam(alone.parameters(), lr=0.01)
    assert fsdp.allocated() == 0  # sharding has freed the whole parameters

    for step in range(STEPS):
        inputs = torch.randn(BATCH, H).to(device)
        mine = inputs[rank::n]
        # --8<-- [start:traced]
        fsdp.bytes.clear()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(fsdp(mine), mine.sin())
        assert fsdp.allocated() == 0  # nothing stays whole between forward and backward
        loss.backward()
        assert fsdp.allocated() == 0
        optimizer.step()
        # --8<-- [end:traced]

        optimizer_alone.zero_grad()
        loss_alone = nn.functional.mse_loss(alone(inputs), inputs.sin())
        loss_alone.backward()
        optimizer_alone.step()
        mean_loss = loss.detach() / n
        dist.all_reduce(mean_loss)
        assert len(mine) == BATCH // n  # the mean loss is right only if no row is missing
        torch.testing.assert_close(mean_loss, loss_alone.detach())
        if rank == 0:
            print(f"step {step}: loss {mean_loss:.5f}, one process {loss_alone:.5f}")

    for unit, block in zip(fsdp.units, alone, strict=True):
        truth = torch.cat([p.detach().flatten() for p in block.parameters()])
        truth = torch.cat([truth, truth.new_zeros(unit.sizes[-1])]).chunk(n)[rank]
        torch.testing.assert_close(unit.shard.detach(), truth)
        kept = unit.shard.grad.untyped_storage()  # a view would keep the whole gradient
        assert kept.nbytes() == unit.shard.nbytes
    check_uneven_unit(device)
    assert fsdp.waits == 2 * STEPS  # only the first unit of forward, and of backward
    if rank == 0:
        print(f"N = {n}: all shards equal to one process")
        mine = sum(shard.numel() for shard in fsdp.parameters())
        print(f"Ψ = {psi:,}; a rank keeps {mine:,}, {LAYERS} units of {psi // LAYERS:,}")
        gathered, reduced = fsdp.bytes["all-gather"], fsdp.bytes["reduce-scatter"]
        print("elements that go through collectives in one step, in units of Ψ:")
        print(f"  all-gather {gathered / (ELEMENT * psi):.2f}", end="")
        print(f" + reduce-scatter {reduced / (ELEMENT * psi):.2f}", end="")
        print(f" = {(gathered + reduced) / (ELEMENT * psi):.2f}")
        print(f"whole at one time: at most {fsdp.peak / (ELEMENT * psi / LAYERS):.2f} units")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
