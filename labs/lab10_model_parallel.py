# %% [markdown]
# # Lab 10: Tensor and pipeline parallelism
#
# When a model no longer fits on one GPU, or one GPU is too slow for it, there are two ways to
# cut it. **Tensor parallelism** cuts every matrix, so that all ranks work on every layer.
# **Pipeline parallelism** cuts the stack of layers, so that each rank works on its own, and
# hands the result to the next. In this lab you cut a small GPT in the first way, then in the
# second, then in both, and run copies of that by data parallelism. Whatever the cut, the
# outputs, the gradients and the losses must be those of one process.
#
#     torchrun --nproc-per-node=4 labs/lab10_model_parallel.py
#
# runs the finished lab, on the CPU or on one GPU per process, with 1, 2, 4 or 8 ranks. To do it
# yourself:
#
#     python labs/start.py 10
#     torchrun --nproc-per-node=4 my_labs/lab10_model_parallel.py
#     python labs/check.py my_labs/lab10_model_parallel.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, at 1, 2, 4 and 8 ranks; `--step 2` grades one step, `--output` shows what failing ranks
# printed. Work in a clone of the repository, with its Python: `make test WHAT=labs` sets it up
# once, and `source .venv/bin/activate` puts torchrun on the path.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check
# which prints what it proved. Your copy runs as far as the first blank and says in one line
# what belongs there; the long report below that line is torchrun's. If your copy stops
# without a word, press Ctrl-C and run `check.py`: ranks that wait for each other print
# nothing. In `check.py` every step stands on finished versions of the steps before it, so you
# can take them in any order (but for step 7, which needs your step 6). Allow four to five
# hours. Lab 02 comes first: you should know what an all-reduce does to gradients. Chapter 03
# derives what you write here: read it to "The two ends: vocabulary" before step 1, and "What
# goes wrong in a pipeline" before step 6. (The lab writes $d$ for the chapter's $N_d$
# replicas, and stage $i$ for its rank $r$ of a pipeline.)

# %%
import copy
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F


def say(text: str) -> None:
    """Print once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 speaks first, and its launcher then ends the others; every rank meets a blank
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start me with: torchrun --nproc-per-node=4 lab10_model_parallel.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "4", "8"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # one rank says it; torchrun then ends the others
        sys.exit("4 heads and 4 layers are cut into equal parts: start 1, 2, 4 or 8 ranks")
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The truth: one process, the whole model
#
# A GPT with nothing left out that matters for the cuts: an embedding, four blocks of attention
# and MLP, each behind a LayerNorm and with a residual connection around it, a last LayerNorm,
# a head. It is small ($h = 32$, $a = 4$ heads, $L = 4$ layers, a vocabulary of 32), and it
# computes in float64: then a correct cut agrees with the whole model in some twelve digits, and
# an error cannot hide in the rounding.
#
# The five batches hold sequences in which each token follows from the one before by a rule,
# with one token in ten at random. One process trains on them by SGD with momentum, with the
# gradient clipped to a norm of 1. Its five losses are what step 8 must arrive at.

# %%
VOCABULARY, HIDDEN, HEADS, LAYERS, SEQUENCE = 32, 32, 4, 4, 8
BATCH, BATCHES, MICRO_BATCHES = 16, 5, 4
LEARNING_RATE, MOMENTUM, CLIP = 0.3, 0.9, 1.0


class Embedding(nn.Module):
    """Tokens [b, s] to activations [b, s, h]: what the token is plus where it stands."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(torch.randn(SEQUENCE, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class Attention(nn.Module):
    """Causal self-attention; one matrix makes the queries, keys and values of all heads."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (  # each [b, s, h] -> [b, a, s, h/a]
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # [b, a, s, h/a] -> [b, s, h]


class MLP(nn.Module):
    """Up to four times the width, GeLU, and down again."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm and with a residual connection around it."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model: tokens [b, s] to logits [b, s, V]."""

    def __init__(self):
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build_model(device: torch.device | str = "cpu") -> GPT:
    """The whole model, the same wherever it is built."""
    torch.manual_seed(10)
    model = GPT().double()
    with torch.no_grad():
        for block in model.blocks:  # LayerNorms that do something
            for norm in (block.norm1, block.norm2):
                norm.weight.add_(torch.randn(HIDDEN) / 4)
                norm.bias.add_(torch.randn(HIDDEN) / 4)
    return model.to(device)


def make_batches() -> list[torch.Tensor]:
    """Five batches of tokens [16, 9]: the first 8 of a row are inputs, the last 8 targets."""
    generator = torch.Generator().manual_seed(10)
    tokens = torch.randint(VOCABULARY, (BATCHES, BATCH, SEQUENCE + 1), generator=generator)
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    for place in range(1, SEQUENCE + 1):
        follows = (5 * tokens[..., place - 1] + 3) % VOCABULARY
        tokens[..., place] = torch.where(noise[..., place], tokens[..., place], follows)
    return list(tokens)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of logits [b, s, V] for targets [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SGD:
    """SGD with momentum. It looks at each number by itself, so it works on pieces as it is.

    torch.optim.SGD does the same; here it would cost each of the processes a second of imports.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, and forget the gradients."""
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(parameter.grad)
            parameter -= LEARNING_RATE * velocity
            parameter.grad = None


def train_alone() -> tuple[list[float], list[float]]:
    """Train the whole model in one process; return losses and gradient norms, step by step."""
    model = build_model()
    optimizer, losses, norms = SGD(model), [], []
    for tokens in make_batches():
        loss = mean_loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def in_row(numbers: Sequence[float], digits: int = 4) -> str:
    return " ".join(f"{number:.{digits}f}" for number in numbers)


if __name__ == "__main__":
    TRUE_LOSSES, TRUE_NORMS = train_alone()
    say(f"the truth: one process, losses {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## Step 1: three kinds of groups
#
# Let there be $p$ pipeline stages, $t$ tensor-parallel ranks in each, and $d$ copies of the
# whole (data parallelism): $N = p \cdot d \cdot t$ ranks. Think of them as a box with three
# axes. A rank has a place on each: its *stage*, its *replica*, its *shard*. And it talks along
# three lines: to the ranks that differ from it in the shard alone (the **tp group**), in the
# replica alone (dp), in the stage alone (pp).
#
# Which rank stands where is a matter of wires. Ranks are numbered machine by machine, so
# neighbours in number share the fastest links. Tensor parallelism sends the most and waits for
# it four times a layer: its ranks must be neighbours. A pipeline sends one activation per stage
# and micro-batch, which the slowest link can carry. Hence the order $(p, d, t)$, with $t$ the
# fastest to change: `rank = (stage * d + replica) * t + shard`. For $N = 8$, $p = d = t = 2$:
#
# | kind | its groups |
# |---|---|
# | tp | 0 1, 2 3, 4 5, 6 7 |
# | dp | 0 2, 1 3, 4 6, 5 7 |
# | pp | 0 4, 1 5, 2 6, 3 7 |
#
# `dist.new_group` makes a group, and it is itself a collective of *all* ranks: every rank calls
# it for every group, in the same order, also for those to which it does not belong. torch names
# the groups in the order of these calls. If each rank made only its own group, two different
# groups would get the same name. They would then get mixed up, or wait for each other.


# %%
def lines(world: int, pp: int, tp: int) -> dict[str, list[list[int]]]:
    """The groups of each kind, as lists of ranks: {"pp": [...], "dp": [...], "tp": [...]}."""
    # >>> solution 1: lay the ranks out as [pp, dp, tp], then read the lines along each axis
    # hint: the box is a tensor of all rank numbers, and dp follows from the two other sizes
    # hint: Tensor.movedim moves an axis. Which lists are the rows if that axis is the last?
    box = torch.arange(world).view(pp, -1, tp)
    return {
        kind: box.movedim(axis, -1).flatten(0, 1).tolist()
        for axis, kind in enumerate(("pp", "dp", "tp"))
    }
    # <<< solution


def join(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make all these groups, together with all other ranks; return the one I belong to."""
    # >>> solution 1: call dist.new_group(ranks) for each of the groups, and keep mine
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
    # <<< solution


class Grid:
    """Where this rank stands among pp × dp × tp ranks, and the groups it talks in."""

    def __init__(self, pp: int = 1, tp: int = 1):
        groups = lines(dist.get_world_size(), pp, tp)
        self.tp_group, self.dp_group = join(groups["tp"]), join(groups["dp"])
        self.pp_group = join(groups["pp"])
        self.back_group = join(groups["pp"])  # the same ranks again, see step 6
        self.shard, self.tp = dist.get_rank(self.tp_group), tp
        self.stage, self.pp = dist.get_rank(self.pp_group), pp
        self.replica, self.dp = dist.get_rank(self.dp_group), len(groups["dp"][0])

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.pp - 1


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


# %% [markdown]
# The check compares your groups with those of a `DeviceMesh`, torch's own name for the box,
# and adds up the ranks of each group: a group that is mixed up does not have the right sum.
# Four ranks are 2 × 1 × 2 here, so run this step with 8 as well, where every axis has two.

# %%
if __name__ == "__main__":
    device = start()
    world = dist.get_world_size()
    TP = PP = min(world, 4)  # as many as the steps on one kind of cut use

    def check_groups() -> None:
        pp, tp = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 2)}[world]
        mesh = init_device_mesh(
            device.type, (pp, world // (pp * tp), tp), mesh_dim_names=("pp", "dp", "tp")
        )
        grid, groups = Grid(pp, tp), lines(world, pp, tp)
        assert [grid.stage, grid.replica, grid.shard] == list(mesh.get_coordinate()), (
            "my coordinates are not those of the DeviceMesh"
        )
        for kind, group in zip(
            ("pp", "dp", "tp"), (grid.pp_group, grid.dp_group, grid.tp_group), strict=True
        ):
            mine = mesh[kind].mesh.tolist()
            assert mine in groups[kind], f"the {kind} groups are not those of the DeviceMesh"
            total = torch.tensor(float(dist.get_rank()), device=device)
            dist.all_reduce(total, group=group)
            assert total.item() == sum(mine), f"the {kind} group of rank {mine[0]} is mixed up"
        say(
            f"step 1: world size {world} on {device.type}, pp × dp × tp ="
            f" {grid.pp} × {grid.dp} × {grid.tp}; tp groups {groups['tp']}"
        )

    check_groups()

# %% [markdown]
# ## Step 2: two conjugate operators
#
# In tensor parallelism, an activation $x$ goes *whole* into every rank of the group, each rank
# computes a part from it, and the parts are added to a whole again. What does backward ask of
# these two places?
#
# - Where $x$ enters, every rank $i$ computes a part $y_i$ of its own from it, and so
#   $\partial \ell / \partial x$ is a sum with one term from each $y_i$. Rank $i$ can compute
#   that term alone. Nothing happens in forward; in backward the terms are **all-reduced**.
# - Where the parts meet: $z = \sum_i y_i$ is an **all-reduce** in forward. In backward,
#   $\partial \ell / \partial y_i = \partial \ell / \partial z$: every rank has it already.
#   Nothing happens.
#
# The Megatron-LM paper calls them $f$ and $g$: each is the other's reverse. Autograd cannot
# find this out by itself, as it sees one process only. So you tell it, by an
# `autograd.Function` each. If $f$ did not sum, every rank would go on with its own term of the
# gradient: no error, and wrong gradients in all layers before. If $g$ summed in backward too,
# what comes out of it would be $t$ times too large, and $t^2$ times behind a second one.


# %%
def all_reduced(
    x: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> torch.Tensor:
    """The reduction over the group, in a new tensor: dist.all_reduce overwrites its own."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=group)
    return total


class CopyToShards(torch.autograd.Function):
    """f: the same in forward, an all-reduce over the tp group in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # >>> solution 2: remember the group for backward, and return x as it is
        # hint: ctx.group = group; return x.view_as(x): autograd wants a new tensor
        ctx.group = group
        return x.view_as(x)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # >>> solution 2: return the gradient of x, and None for the group
        # hint: all_reduced above does not overwrite its argument
        return all_reduced(gradient, ctx.group), None
        # <<< solution


class SumOverShards(torch.autograd.Function):
    """g: an all-reduce over the tp group in forward, the same in backward."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # >>> solution 2: return the sum of all ranks' parts
        return all_reduced(part, group)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # >>> solution 2: return the gradient of the part, and None for the group
        return gradient, None
        # <<< solution


def copy_to_shards(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    return CopyToShards.apply(x, grid.tp_group)


def sum_over_shards(part: torch.Tensor, grid: Grid) -> torch.Tensor:
    return SumOverShards.apply(part, grid.tp_group)


# %% [markdown]
# The check takes $\ell = \sum_i (w_i x)^2$, where rank $i$ knows $w_i = i + 1$ alone. On paper,
# $\ell = \sum w_i^2 \, x^2$ and $\partial \ell / \partial x = 2 \sum w_i^2 \, x$.


# %%
def assert_same(ours: torch.Tensor, true: torch.Tensor, what: str) -> None:
    """Fail unless the tensors agree in some ten digits."""
    torch.testing.assert_close(
        ours.detach().cpu(),
        true.detach().cpu(),
        rtol=1e-9,
        atol=1e-11,
        msg=f"{what} not that of the whole model: check.py has a hint",
    )


@contextmanager
def all_reduced_numbers() -> Iterator[list[int]]:
    """Collect the number of elements of each call of dist.all_reduce."""
    sizes, real = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = real


if __name__ == "__main__":

    def check_operators() -> None:
        grid = Grid(tp=TP)
        x = torch.tensor([3.0], dtype=torch.float64, device=device, requires_grad=True)
        part = ((grid.shard + 1) * copy_to_shards(x, grid)) ** 2
        with all_reduced_numbers() as forward:
            loss = sum_over_shards(part, grid).sum()
        with all_reduced_numbers() as backward:
            loss.backward()
        squares = sum((i + 1) ** 2 for i in range(TP))
        assert_same(loss, torch.tensor(squares * 9.0).double(), "the loss is")
        assert_same(x.grad, torch.tensor([2 * squares * 3.0]).double(), "the gradient is")
        say(
            f"step 2: f and g: loss {loss.item():.0f}, gradient {x.grad.item():.0f};"
            f" {len(forward)} all-reduce in forward, {len(backward)} in backward"
        )

    check_operators()

# %% [markdown]
# ## Step 3: a column and a row make an MLP
#
# The MLP computes $\mathrm{GeLU}(x A) B$. Cut $A$ by columns, $A = [A_1, A_2]$: then
# $x A = [x A_1, x A_2]$, and as GeLU looks at each number by itself, every rank can apply it to
# its own part, without a word to the others. That leaves each rank with some *columns* of the
# hidden activation, which are just what the corresponding *rows* of $B$ are multiplied by:
#
# $$\mathrm{GeLU}(x A) \, B = \mathrm{GeLU}(x A_1) \, B_1 + \mathrm{GeLU}(x A_2) \, B_2$$
#
# One sum at the end, over activations of the size of $x$: one all-reduce in forward ($g$), one
# in backward (by $f$, where $x$ went in). Cut the other way round, a sum would be due *before*
# GeLU, for the sum of two GeLUs is not the GeLU of the sum.
#
# Mind two things. `nn.Linear` keeps its weight as `[out, in]`, the transpose of $A$: columns of
# $A$ are rows of `weight`. And the biases: that of the first matrix belongs to the columns, and
# is cut with them. That of the second is added once, to the finished sum. Added to the parts,
# it would count $t$ times.
#
# `cut` takes a piece of a tensor and notes that it is one; step 8 will ask for that. A
# parameter which is not cut is kept whole, in equal copies, on all ranks of the tp group.


# %%
def cut(full: torch.Tensor, dim: int, grid: Grid) -> nn.Parameter:
    """This rank's piece of `full`, one of tp equal pieces along `dim`, as a parameter."""
    piece = nn.Parameter(full.detach().chunk(grid.tp, dim)[grid.shard].clone())
    piece.is_cut = True
    return piece


def whole(full: torch.Tensor) -> nn.Parameter:
    """A copy of `full` as a parameter."""
    return nn.Parameter(full.detach().clone())


class ColumnLinear(nn.Module):
    """Whole input [b, s, in] to this rank's columns of the output, [b, s, out/t]."""

    def __init__(self, full: nn.Linear, grid: Grid):
        super().__init__()
        self.grid = grid
        # >>> solution 3: set self.weight and self.bias, pieces of full.weight and full.bias
        # hint: full.weight is [out, in], full.bias is [out]
        self.weight = cut(full.weight, 0, grid)
        self.bias = cut(full.bias, 0, grid)
        # <<< solution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 3: F.linear, with one of the two operators where x enters
        return F.linear(copy_to_shards(x, self.grid), self.weight, self.bias)
        # <<< solution


class RowLinear(nn.Module):
    """This rank's columns of the input, [b, s, in/t], to the whole output [b, s, out]."""

    def __init__(self, full: nn.Linear, grid: Grid):
        super().__init__()
        self.grid = grid
        # >>> solution 3: set self.weight and self.bias; one of them is cut, the other whole
        self.weight = cut(full.weight, 1, grid)
        self.bias = whole(full.bias)
        # <<< solution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 3: F.linear, the sum over the shards, and the bias at the right moment
        return sum_over_shards(F.linear(x, self.weight), self.grid) + self.bias
        # <<< solution


class ParallelMLP(nn.Module):
    """The MLP, cut over the tp group."""

    def __init__(self, full: MLP, grid: Grid):
        super().__init__()
        self.up, self.down = ColumnLinear(full.up, grid), RowLinear(full.down, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


# %% [markdown]
# How does one compare gradients of pieces? Cutting is linear, so the gradient of a piece is the
# piece of the gradient. `expected_gradients` puts the gradients of the whole model in the place
# of its weights and cuts *that* in the same way.


# %%
def expected_gradients(full: nn.Module, split: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """The cut model, with the pieces of the whole model's gradients as its parameters."""
    gradients = copy.deepcopy(full)
    for slot, parameter in zip(gradients.parameters(), full.parameters(), strict=True):
        slot.data = parameter.grad.clone()
    return split(gradients)


def compare_with_whole(
    full: nn.Module, split: Callable[[nn.Module], nn.Module], x: torch.Tensor
) -> tuple[int, int]:
    """Assert equal outputs and gradients; return the all-reduces in forward and backward."""
    ours, mine = split(full), x.clone().requires_grad_()
    theirs = x.clone().requires_grad_()
    with all_reduced_numbers() as forward:
        y = ours(mine)
    true = full(theirs)
    assert_same(y, true, "the output is")
    with all_reduced_numbers() as backward:
        (y * y).sum().backward()
    (true * true).sum().backward()
    assert_same(mine.grad, theirs.grad, "the gradient of the input is")
    expected = expected_gradients(full, split)
    for name, parameter in ours.named_parameters():
        assert_same(parameter.grad, expected.get_parameter(name), f"the gradient of {name} is")
    return len(forward), len(backward)


if __name__ == "__main__":

    def check_mlp() -> None:
        grid, full = Grid(tp=TP), build_model(device).blocks[0].mlp
        x = torch.randn(2, SEQUENCE, HIDDEN, dtype=torch.float64).to(device)
        counts = compare_with_whole(full, lambda mlp: ParallelMLP(mlp, grid), x)
        say(
            f"step 3: MLP, t = {TP}: output and gradients of the whole;"
            f" all-reduces: {counts[0]} forward, {counts[1]} backward"
        )

    check_mlp()

# %% [markdown]
# ## Step 4: heads over ranks, and a whole block
#
# Attention splits by nature: no head looks at another. Rank $r$ of $t$ takes $a/t$ heads. The
# matrix that makes queries, keys and values is cut by columns, the output projection by rows,
# and the attention between them needs no communication: the pattern of the MLP once more.
#
# But the three are fused into one matrix, for one product of matrices is faster than three.
# The rows of `qkv.weight` are first all queries, then all keys, then all values, each head by
# head: $q_1 q_2 q_3 q_4 \, k_1 k_2 k_3 k_4 \, v_1 v_2 v_3 v_4$. Cut in two as it stands, rank 0
# would get all queries and half of the keys, without any error, for the shapes fit. So first
# put the rows in the order $q_1 q_2 k_1 k_2 v_1 v_2 \, q_3 q_4 k_3 k_4 v_3 v_4$: now each half
# is a small attention of its own. (This is why a checkpoint of Megatron-LM has its rows in
# another order than one of Hugging Face, and must be converted.)
#
# A block is then complete: its LayerNorms and residual connections work on whole activations,
# which all ranks of the tp group have. They all do the same work on them, and get the same
# gradients, as $f$ has summed up what comes from the shards. Nothing has to be done for them.


# %%
def rows_by_shard(tp: int) -> torch.Tensor:
    """The order of the 3h rows of a fused QKV in which each of tp equal pieces is complete."""
    # >>> solution 4: from [q, k, v] of all heads to [q, k, v] of the first h/tp rows, then next
    # hint: give the 3h row numbers three axes: kind (q, k, v), shard, row. Which come first?
    return torch.arange(3 * HIDDEN).view(3, tp, -1).transpose(0, 1).flatten()
    # <<< solution


def reordered(linear: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    """The same layer with its outputs in another order."""
    result = copy.deepcopy(linear)
    result.weight.data, result.bias.data = linear.weight.data[rows], linear.bias.data[rows]
    return result


class ParallelAttention(nn.Module):
    """Causal self-attention with its heads over the tp group."""

    def __init__(self, full: Attention, grid: Grid):
        super().__init__()
        self.grid = grid
        self.qkv = ColumnLinear(reordered(full.qkv, rows_by_shard(grid.tp)), grid)
        self.out = RowLinear(full.out, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 4: Attention.forward, with as many heads as this rank has
        # hint: self.qkv(x) is [b, s, 3h/t] here, and self.out expects [b, s, h/t]
        heads = HEADS // self.grid.tp
        q, k, v = (  # each [b, s, h/t] -> [b, a/t, s, h/a]
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]
        # <<< solution


class ParallelBlock(nn.Module):
    """A block, cut over the tp group; its LayerNorms are whole on every rank."""

    def __init__(self, full: Block, grid: Grid):
        super().__init__()
        self.norm1, self.norm2 = copy.deepcopy(full.norm1), copy.deepcopy(full.norm2)
        self.attention = ParallelAttention(full.attention, grid)
        self.mlp = ParallelMLP(full.mlp, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


# %%
if __name__ == "__main__":

    def check_block() -> None:
        grid, full = Grid(tp=TP), build_model(device).blocks[0]
        x = torch.randn(2, SEQUENCE, HIDDEN, dtype=torch.float64).to(device)
        counts = compare_with_whole(full, lambda block: ParallelBlock(block, grid), x)
        held = sum(p.numel() for p in ParallelBlock(full, grid).parameters())
        total = sum(p.numel() for p in full.parameters())
        say(
            f"step 4: block, t = {TP}: output and gradients of the whole;"
            f" all-reduces: {counts[0]} forward, {counts[1]} backward;"
            f" {held:,} of {total:,} parameters on a rank"
        )

    check_block()

# %% [markdown]
# ## Step 5: the loss without the logits
#
# With a vocabulary of 100,000 and more, the head is the largest matrix of a model, and the
# logits are its largest activation. Cut by columns, the head leaves each rank with the logits
# of its own part of the vocabulary, `[b, s, V/t]`. To gather them would cost $b s V$ numbers.
# But the loss of one position needs only three:
#
# $$\ell = \log \sum_j e^{z_j - M} - (z_y - M), \qquad M = \max_j z_j$$
#
# the maximum, the sum, and the logit of the target $y$, each an all-reduce of $b s$ numbers.
#
# - $M$ is there against overflow ($e^{1000}$ is infinite). It must be one number for all ranks:
#   sums of $e^{z_j - M_r}$ with an $M_r$ for each rank cannot be added. The loss does not
#   depend on $M$, so no gradient flows through it.
# - The target's logit is on one rank. That rank looks it up; the others contribute 0.
# - The sums are what $g$ is for: then the gradient of this rank's logits is the softmax minus
#   one at the target, from this rank's numbers alone.


# %%
def vocabulary_parallel_loss(
    logits: torch.Tensor, targets: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """The mean cross-entropy for logits [b, s, V/t], this rank's columns, and targets [b, s].

    Targets count over the whole vocabulary. The result is the same on all ranks of the group.
    """
    width = logits.size(-1)
    # >>> solution 5: highest, the largest logit of the whole vocabulary, [b, s]
    # hint: all_reduced(tensor, grid.tp_group, dist.ReduceOp.MAX) carries no gradient
    highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)
    # <<< solution
    shifted = logits - highest.unsqueeze(-1)
    # >>> solution 5: total, the sum of exp(shifted) over the whole vocabulary, [b, s]
    total = sum_over_shards(shifted.exp().sum(dim=-1), grid)
    # <<< solution
    # >>> solution 5: target, z_y - M of the formula, [b, s], from the rank that has the target
    # hint: this rank has the tokens from grid.shard * width on; a place that it does not have
    # hint: must still be a valid index for gather: clamp it, and multiply what you find by 0
    place = targets - grid.shard * width
    mine = (place >= 0) & (place < width)
    found = shifted.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
    target = sum_over_shards(found * mine, grid)
    # <<< solution
    return (total.log() - target).mean()


# %%
if __name__ == "__main__":

    def check_loss() -> None:
        grid = Grid(tp=TP)
        torch.manual_seed(5)
        z = 300 * torch.randn(2, SEQUENCE, VOCABULARY).double()  # exp alone would overflow
        z, targets = z.to(device).requires_grad_(), make_batches()[0][:2, 1:].to(device)
        true = mean_loss(z, targets)
        true.backward()
        mine = cut(z, -1, grid)
        with all_reduced_numbers() as sizes:
            loss = vocabulary_parallel_loss(mine, targets, grid)
        loss.backward()
        assert_same(loss, true, "the loss is")
        assert_same(mine.grad, cut(z.grad, -1, grid), "the gradient of the logits is")
        say(
            f"step 5: loss, t = {TP}: loss and gradient of the whole;"
            f" {len(sizes)} all-reduces of {sum(sizes)} numbers in all, for {z.numel()} logits"
        )

    check_loss()

# %% [markdown]
# ## Step 6: a pipeline
#
# Now the other cut. Stage $i$ of $p$ holds the layers from $i L / p$ on; the first has the
# embedding too, the last one the LayerNorm, the head and the loss. In forward a stage receives
# an activation `[b, s, h]` from the one before, and sends its own to the next. Backward goes
# the other way: it receives the gradient of what it sent, and sends the gradient of what it
# received. Autograd does the part within the stage, if you tell it two things: that the
# received activation is a *leaf that requires a gradient* (or there will be nothing to send
# back), and *which gradient to start from* (`output.backward(gradient)`).
#
# With one batch only one stage would work at a time. So the batch goes through in $m$
# **micro-batches**, one behind the other. A stage keeps for each micro-batch that is under way
# what its backward will need: the input and the output with its graph. Gradients add up over
# micro-batches, and each loss is a mean over its own: it must be divided by $m$.
#
# The schedule of GPipe: all $m$ forwards, then all $m$ backwards.
#
# **Sends must not wait.** `dist.send` may return only when the other side has received, and a
# stage that waits for its neighbour while this one waits for it will do so for ever. GPipe
# happens to be safe; step 7 is not. So start the send with `dist.isend`, keep the `Work` and
# the tensor (its memory must not be given away), and wait for all of them at the end. There is
# a second trap on a GPU: with NCCL the messages of one group go out one after the other, in the
# order of the calls, and so a send that nobody has received yet holds up the receive behind it.
# Activations and gradients therefore have a group each, `grid.pp_group` and `grid.back_group`:
# in neither of them does a message ever wait for one that travels the other way. (The other way
# out is `dist.batch_isend_irecv`, which starts a send and a receive together; chapter 03 takes
# it.)


# %%
def layers_of(stage: int, pp: int) -> range:
    """Which of the `LAYERS` layers a stage holds."""
    # >>> solution 6: the range of the stage's layers, LAYERS / pp in a row
    share = LAYERS // pp
    return range(stage * share, (stage + 1) * share)
    # <<< solution


class Stage(nn.Module):
    """What a rank holds: the layers of its stage, each cut over its tp group."""

    def __init__(self, full: GPT, grid: Grid):
        super().__init__()
        self.grid = grid
        if grid.first:
            self.embedding = copy.deepcopy(full.embedding)
        self.blocks = nn.ModuleList(
            ParallelBlock(full.blocks[i], grid) for i in layers_of(grid.stage, grid.pp)
        )
        if grid.last:
            self.norm = copy.deepcopy(full.norm)
            self.head = ColumnLinear(full.head, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or activations to activations, or in the last stage to logits [b, s, V/t]."""
        if self.grid.first:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.grid.last else x


class Pipeline:
    """One training step of one stage: `forward(k)`, `backward(k)` for micro-batches k < m."""

    def __init__(
        self, stage: Stage, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ):
        self.stage, self.grid, self.m = stage, stage.grid, len(inputs)
        self.inputs, self.targets = inputs, targets  # each m times [b, s]
        self.live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # k: (input, output)
        self.peak = 0  # the most that were ever live at once
        self.sends: list[tuple[dist.Work, torch.Tensor]] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)

    def group_to(self, stage: int) -> dist.ProcessGroup:
        """The group for what I send to a stage: activations go on, gradients go back."""
        return self.grid.pp_group if stage > self.grid.stage else self.grid.back_group

    def group_from(self, stage: int) -> dist.ProcessGroup:
        """The group for what I receive from a stage."""
        return self.grid.pp_group if stage < self.grid.stage else self.grid.back_group

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send an activation or a gradient to stage `to`; do not wait."""
        # >>> solution 6: isend in the right group, and keep (work, tensor) in self.sends
        # hint: send tensor.detach().contiguous(), and keep exactly what you sent
        # hint: group_dst counts within the group, as stages do; dst counts over all ranks
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self.group_to(to), group_dst=to)
        self.sends.append((work, tensor))
        # <<< solution

    def receive(self, source: int) -> torch.Tensor:
        """Wait for an activation or a gradient, [b, s, h], from stage `source`."""
        shape = (*self.inputs[0].shape, HIDDEN)
        # >>> solution 6: receive into an empty float64 tensor of that shape, return it
        # hint: dist.recv(tensor, group=..., group_src=...)
        tensor = torch.empty(shape, dtype=torch.float64, device=self.loss.device)
        dist.recv(tensor, group=self.group_from(source), group_src=source)
        return tensor
        # <<< solution

    def forward(self, k: int) -> None:
        """Take micro-batch k through this stage, and keep what its backward will need."""
        # >>> solution 6: get the input, run the stage, send the output or add to self.loss
        # hint: self.inputs[k] in the first stage; elsewhere receive(...).requires_grad_()
        # hint: in the last stage the output is the loss, with self.targets[k], over self.m
        # hint: self.live[k] = (input, output)
        grid = self.grid
        taken = self.inputs[k] if grid.first else self.receive(grid.stage - 1).requires_grad_()
        output = self.stage(taken)
        if grid.last:
            output = vocabulary_parallel_loss(output, self.targets[k], grid) / self.m
            self.loss += output.detach()
        else:
            self.send(output, grid.stage + 1)
        self.live[k] = taken, output
        # <<< solution
        self.peak = max(self.peak, len(self.live))

    def backward(self, k: int) -> None:
        """Take micro-batch k back through this stage, and forget it."""
        # >>> solution 6: take k out of self.live, run backward, send the input's gradient back
        # hint: the last stage starts from its loss, the others from the gradient they receive
        taken, output = self.live.pop(k)
        if self.grid.last:
            output.backward()
        else:
            output.backward(self.receive(self.grid.stage + 1))
        if not self.grid.first:
            self.send(taken.grad, self.grid.stage - 1)
        # <<< solution

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()


def gpipe(pipe: Pipeline) -> None:
    """All forwards, then all backwards."""
    # >>> solution 6: call pipe.forward(k) and pipe.backward(k), each once for every k < pipe.m
    for k in range(pipe.m):
        pipe.forward(k)
    for k in range(pipe.m):
        pipe.backward(k)
    # <<< solution


# %% [markdown]
# The check sends one batch of 16 sequences through in 8 micro-batches, and compares the loss
# and all gradients with those of one process and the whole batch.


# %%
def step_of_pipeline(
    grid: Grid, schedule: Callable[[Pipeline], None], m: int, device: torch.device
) -> Pipeline:
    """Take the first batch through; assert the loss and the gradients of the whole model."""
    full, tokens = build_model(device), make_batches()[0].to(device)
    stage = Stage(full, grid)
    pipe = Pipeline(stage, tokens[:, :-1].chunk(m), tokens[:, 1:].chunk(m))
    schedule(pipe)
    pipe.finish()
    loss = mean_loss(full(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    if grid.last:
        assert_same(pipe.loss, loss, "the loss is")
    expected = expected_gradients(full, lambda model: Stage(model, grid))
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None, f"stage {grid.stage}: {name} has no gradient"
        assert_same(parameter.grad, expected.get_parameter(name), f"the gradient of {name} is")
    return pipe


def peaks(pipe: Pipeline) -> list[int]:
    """The peak of live micro-batches of every stage."""
    found = torch.zeros(pipe.grid.pp, dtype=torch.int64, device=pipe.loss.device)
    found[pipe.grid.stage] = pipe.peak
    return all_reduced(found, pipe.grid.pp_group).tolist()


if __name__ == "__main__":

    def check_gpipe() -> None:
        pipe = step_of_pipeline(Grid(pp=PP), gpipe, 8, device)
        say(
            f"step 6: GPipe, p = {PP}, m = 8: loss and gradients of the whole;"
            f" peak live by stage {peaks(pipe)}"
        )

    check_gpipe()

# %% [markdown]
# ## Step 7: one forward, one backward
#
# GPipe keeps all $m$ micro-batches alive before the first backward, and $m$ should be large: a
# stage is idle for $p - 1$ of $m + p - 1$ slots. So memory grows with what makes the pipeline
# efficient. The fix: begin each backward as soon as possible. The last stage can run the
# backward of a micro-batch right after its forward. The stage before it gets the gradient one
# slot later, and so on: stage $i$ needs $p - 1 - i$ forwards of a lead, the **warm-up**, and
# from then on does one forward and one backward in turn (**1F1B**). At the end it runs the
# backwards that are left.
#
# At no time are more than $p - i$ micro-batches alive in stage $i$: at most $p$, whatever $m$
# is. The bubble is as long as before, and the gradients are the same.
#
# For $p = 4$, $m = 8$, stage 1: F0 F1 · F2 B0 · F3 B1 · F4 B2 · … · F7 B5 · B6 B7. Two forwards
# to warm up, six pairs, two backwards. And with fewer micro-batches than the warm-up asks for,
# $m < p - 1 - i$? Then all of them are warm-up.


# %%
def one_f_one_b(pipe: Pipeline) -> None:
    """Warm up, then one forward and one backward in turn, then the backwards that are left."""
    # >>> solution 7: call pipe.forward(k) and pipe.backward(k), each in the order of k
    # hint: the stage is pipe.grid.stage, of pipe.grid.pp; there are pipe.m micro-batches
    warm_up = min(pipe.grid.pp - 1 - pipe.grid.stage, pipe.m)
    for k in range(warm_up):
        pipe.forward(k)
    for k in range(pipe.m - warm_up):
        pipe.forward(warm_up + k)
        pipe.backward(k)
    for k in range(pipe.m - warm_up, pipe.m):
        pipe.backward(k)
    # <<< solution


# %%
if __name__ == "__main__":

    def check_1f1b() -> None:
        grid = Grid(pp=PP)
        for m in (2, 8):
            pipe = step_of_pipeline(grid, one_f_one_b, m, device)
            found, bound = peaks(pipe), [min(PP - i, m) for i in range(PP)]
            assert found == bound, f"{found} micro-batches are live, and {bound} are enough"
        say(
            f"step 7: 1F1B, p = {PP}, m = 8: loss and gradients of the whole;"
            f" peak live by stage {found}"
        )

    check_1f1b()

# %% [markdown]
# ## Step 8: all three
#
# The three cuts do not get in each other's way, as long as each piece of work is done along the
# right axis of the box. Four questions decide that.
#
# **Who reads which samples?** Only replicas differ in their data. All ranks of a tp group work
# on the same activations, and all stages of a pipeline on the same micro-batches: so the batch
# is cut in $d$, not in $N$, and the place of a rank is its replica, not its rank.
#
# **Whose gradients are averaged?** Two ranks hold the same parameter, and have seen different
# data, if they differ in the replica alone: average over the dp group. Another shard or another
# stage has another parameter, and to average with that is nonsense which happens to have the
# right shape. What of the LayerNorms and the biases that all ranks of a tp group have a copy
# of? Their gradients are equal already, and whole.
#
# **What is the gradient's norm?** Clipping needs the norm of the *whole* model's gradient. Its
# square is a sum over parts that lie on different ranks. Add up along tp and pp, and count
# everything once: every piece counts, but of a whole parameter, of which the tp group has $t$
# copies, only one. And the replicas have one and the same gradient now: dp is left out.
#
# **Who scales?** All, by the same factor, and only if the norm is over the limit.


# %%
def my_share(batch: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The rows of the global batch which this rank's replica works on, [b/d, s + 1]."""
    # >>> solution 8: cut the rows into equal parts, one for each replica
    return batch.chunk(grid.dp)[grid.replica]
    # <<< solution


def average_gradients(stage: nn.Module, grid: Grid) -> None:
    """Replace every gradient by its mean over the replicas, in place."""
    # >>> solution 8: all-reduce each parameter.grad in one of the groups, and divide
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=grid.dp_group)
        parameter.grad /= grid.dp
    # <<< solution


def clip_gradients(stage: nn.Module, grid: Grid, limit: float) -> float:
    """Scale all gradients so that their norm over the whole model is at most `limit`.

    Returns the norm before. As torch does, scales by limit / (norm + 1e-6) if that is below 1.
    """
    # >>> solution 8: sum the squares, each number of the model once; square root; scale
    # hint: getattr(parameter, "is_cut", False) is True for a piece that `cut` made
    # hint: let one shard count the whole parameters; add up over tp_group, then pp_group
    square = torch.zeros((), dtype=torch.float64, device=next(stage.parameters()).device)
    for parameter in stage.parameters():
        if getattr(parameter, "is_cut", False) or grid.shard == 0:
            square += parameter.grad.square().sum()
    dist.all_reduce(square, group=grid.tp_group)
    dist.all_reduce(square, group=grid.pp_group)
    norm = square.sqrt().item()
    scale = min(1.0, limit / (norm + 1e-6))
    for parameter in stage.parameters():
        parameter.grad *= scale
    return norm
    # <<< solution


# %% [markdown]
# The rest is a training loop like any other. Note what `train` does not contain: no word on how
# many ranks there are.


# %%
def train(grid: Grid, device: torch.device) -> tuple[list[float], list[float], int]:
    """Train on the five batches; return losses, gradient norms and the parameters held here."""
    stage = Stage(build_model(device), grid)
    optimizer, losses, norms = SGD(stage), [], []
    for batch in make_batches():
        rows = my_share(batch.to(device), grid)
        micro = rows[:, :-1].chunk(MICRO_BATCHES), rows[:, 1:].chunk(MICRO_BATCHES)
        pipe = Pipeline(stage, *micro)
        one_f_one_b(pipe)
        pipe.finish()
        average_gradients(stage, grid)
        norms.append(clip_gradients(stage, grid, CLIP))
        optimizer.step()
        loss = all_reduced(pipe.loss, grid.pp_group)  # the last stage has it, the others 0
        losses.append(all_reduced(loss, grid.dp_group).item() / grid.dp)
    return losses, norms, sum(p.numel() for p in stage.parameters())


if __name__ == "__main__":

    def check_composition() -> None:
        layouts = {  # (pp, tp); the rest is dp
            1: [(1, 1)],
            2: [(1, 1), (1, 2), (2, 1)],
            4: [(1, 2), (2, 1), (2, 2)],
            8: [(2, 2)],
        }
        total = sum(p.numel() for p in build_model().parameters())
        for pp, tp in layouts[world]:
            grid = Grid(pp, tp)
            losses, norms, held = train(grid, device)
            for ours, true, what in (
                (norms, TRUE_NORMS, "gradient norms"),
                (losses, TRUE_LOSSES, "losses"),
            ):
                torch.testing.assert_close(
                    torch.tensor(ours),
                    torch.tensor(true),
                    rtol=1e-6,
                    atol=0.0,
                    msg=f"the {what} are {in_row(ours)}, of one process {in_row(true)}",
                )
            say(
                f"step 8: pp × dp × tp = {pp} × {grid.dp} × {tp}: {held:,} of {total:,}"
                f" parameters on rank 0, losses {in_row(losses)}"
            )

    check_composition()
    say(f"every split is the model of one process, loss {TRUE_LOSSES[-1]:.4f}")
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# This is the skeleton of Megatron-LM: its layers, its schedule, its order of the axes. What it
# has in addition does not change the mathematics: activations cut along the sequence between
# the blocks (sequence parallelism), several chunks of layers per stage (interleaving),
# communication that overlaps with computation, optimizer state cut over dp. Try:
#
# - Run with 8 ranks. Then change the order of the axes in `lines`: which checks still pass, and
#   what would be slower on real machines?
# - Tie the head to the embedding. Then the first and the last stage hold copies of one
#   parameter: which gradients must be added, over which ranks, and who counts for the norm?
# - Cut the embedding by rows of the vocabulary. You have all the operators it takes.
# - Take `is_cut` away from one weight. Which check notices?
