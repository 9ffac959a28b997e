# %% [markdown]
# # Lab 10: Tensor and pipeline parallelism
#
# If a model does not fit on one GPU, or if one GPU is too slow for it, you can cut the model.
# There are two ways to do this. **Tensor parallelism** cuts every matrix, so that all ranks
# work on every layer. **Pipeline parallelism** cuts the stack of layers. Each rank then
# computes its own layers and sends the result to the next rank. In this lab you cut a small GPT
# in the first way, then in the second way, and then in both ways at once. Finally you train
# several copies of the cut model with data parallelism. With every cut, the outputs, the
# gradients and the losses must equal those of a single process.
#
# You can run the finished lab on the CPU, or with one GPU per process. The number of ranks must
# be 1, 2, 4 or 8:
#
#     torchrun --nproc-per-node=4 labs/lab10_model_parallel.py
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 10                               # creates my_labs/lab10_...
#     torchrun --nproc-per-node=4 my_labs/lab10_model_parallel.py
#     python labs/check.py my_labs/lab10_model_parallel.py  # grades it with 1, 2, 4 and 8 ranks
#
# With `--step 2`, `check.py` grades only step 2 and the steps that step 2 needs. With
# `--output`, it also shows what the failing ranks printed. You need a clone of the repository
# and its Python environment. The command `make test WHAT=labs` creates the environment, and you
# need it only once. The command `source .venv/bin/activate` makes `torchrun` available in your
# shell.
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has proved. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. The long report below that line comes from `torchrun`, and you can
# ignore it. Ranks that wait for each other print nothing. If your copy hangs and prints
# nothing, press Ctrl-C and run `check.py`. `check.py` grades each step with finished versions
# of the other steps, so you can solve the steps in any order. Step 7 is the only exception,
# because it needs your step 6.
#
# Plan four to five hours for the lab. Solve lab 02 first, because you should know how an
# all-reduce averages gradients. Chapter 03 derives the methods of this lab. Read it up to the
# section "The two ends: vocabulary" before step 1, and the section "What goes wrong in a
# pipeline" before step 6. Two symbols differ. The number of replicas is $d$ in the lab and
# $N_d$ in the chapter. The number of a stage is $i$ in the lab, and in the chapter it is the
# rank $r$ of a pipeline.
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

# import it before init_process_group, because a later import would keep a reference to the
# process group, and the group would not be freed at the end
import torch.distributed.nn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F


def say(text: str) -> None:
    """Print a line on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print one sentence from one rank for a blank or a failed check, in place of a traceback.

    Every other error is reported as usual.
    """
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this lab with: torchrun --nproc-per-node=4 lab10_model_parallel.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "4", "8"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # only rank 0 prints the sentence, and then torchrun ends all
        sys.exit(
            "the number of ranks must be 1, 2, 4 or 8, because 4 heads and 4 layers are cut "
            "into equal parts"
        )
    sys.excepthook = stop_kindly

# %% [markdown]
# Cells that begin with `if __name__ == "__main__":` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.
#
# ## The reference: one process with the whole model
#
# The model is a small GPT. It has an embedding, four blocks, a last LayerNorm and a head. Each
# block consists of attention and an MLP. Each of the two has a LayerNorm before it and a
# residual connection around it. The sizes are $h = 32$, $a = 4$ heads, $L = 4$ layers and a
# vocabulary of 32. The model computes in float64. A correct cut then agrees with the whole
# model in about twelve digits, and rounding cannot hide an error.
#
# The five batches contain sequences in which a rule computes each token from the token before
# it. One token in ten is random. One process trains on these batches with SGD and momentum, and
# it clips the gradient to a norm of 1. In step 8, your cut model must reach the same five
# losses.

# %%
VOCABULARY, HIDDEN, HEADS, LAYERS, SEQUENCE = 32, 32, 4, 4, 8
BATCH, BATCHES, MICRO_BATCHES = 16, 5, 4
LEARNING_RATE, MOMENTUM, CLIP = 0.3, 0.9, 1.0


class Embedding(nn.Module):
    """Map tokens [b, s] to activations [b, s, h], by adding a token and a position vector."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Parameter(torch.randn(SEQUENCE, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class Attention(nn.Module):
    """Compute causal self-attention. One matrix computes the queries, keys and values."""

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
    """Apply a linear layer, GeLU, and a second linear layer.

    The first layer makes the width four times larger, and the second layer restores the width.
    """

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Apply attention and an MLP.

    Each of the two has a LayerNorm before it and a residual connection around it.
    """

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(HIDDEN), Attention()
        self.norm2, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The whole model. It maps tokens [b, s] to logits [b, s, V]."""

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
    """Return the whole model. Every process gets the same parameters."""
    torch.manual_seed(10)
    model = GPT().double()
    with torch.no_grad():
        for block in model.blocks:  # so that no LayerNorm is trivial
            for norm in (block.norm1, block.norm2):
                norm.weight.add_(torch.randn(HIDDEN) / 4)
                norm.bias.add_(torch.randn(HIDDEN) / 4)
    return model.to(device)


def make_batches() -> list[torch.Tensor]:
    """Return five batches of tokens [16, 9].

    The first 8 tokens of a row are the inputs, and the last 8 tokens are the targets.
    """
    generator = torch.Generator().manual_seed(10)
    tokens = torch.randint(VOCABULARY, (BATCHES, BATCH, SEQUENCE + 1), generator=generator)
    noise = torch.rand(tokens.shape, generator=generator) < 0.1
    for place in range(1, SEQUENCE + 1):
        follows = (5 * tokens[..., place - 1] + 3) % VOCABULARY
        tokens[..., place] = torch.where(noise[..., place], tokens[..., place], follows)
    return list(tokens)


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of logits [b, s, V] for targets [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class SGD:
    """This optimizer is SGD with momentum.

    It updates each number independently of all other numbers, so it also works on the pieces of
    a cut model. torch.optim.SGD does the same, but each process would need a second to import
    torch.optim.
    """

    def __init__(self, model: nn.Module):
        self.parameters = list(model.parameters())
        self.velocities = [torch.zeros_like(parameter) for parameter in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters, and set the gradients to None."""
        for parameter, velocity in zip(self.parameters, self.velocities, strict=True):
            velocity.mul_(MOMENTUM).add_(parameter.grad)
            parameter -= LEARNING_RATE * velocity
            parameter.grad = None


def train_alone() -> tuple[list[float], list[float]]:
    """Train the whole model in one process. Return the loss and gradient norm of each step."""
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
    """Return the numbers in one line, with `digits` decimals."""
    return " ".join(f"{number:.{digits}f}" for number in numbers)


if __name__ == "__main__":
    TRUE_LOSSES, TRUE_NORMS = train_alone()
    say(f"reference: the losses of one process are {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## Step 1: three kinds of groups
#
# **Why.** Let there be $p$ pipeline stages, $t$ tensor-parallel ranks in each stage, and $d$
# copies of the whole model (data parallelism). The number of ranks is $N = p \cdot d \cdot t$.
# Think of the ranks as a box with three axes. Each rank has a place on each axis: its *stage*,
# its *replica* and its *shard*. A rank communicates along three lines. Ranks that differ only
# in the shard form a **tp group**. Ranks that differ only in the replica form a dp group, and
# ranks that differ only in the stage form a pp group.
#
# The network decides which rank should have which place. Ranks are numbered machine by machine,
# so ranks with neighbouring numbers share the fastest links. Tensor parallelism sends the most
# data, and each layer waits for it four times. The ranks of a tp group must therefore be
# neighbours. A pipeline sends one activation per stage and micro-batch, which even the slowest
# link can carry. The order of the axes is therefore $(p, d, t)$, and the index of $t$ changes
# fastest: `rank = (stage * d + replica) * t + shard`. For $N = 8$ and $p = d = t = 2$, the
# groups are:
#
# | kind | its groups |
# |---|---|
# | tp | 0 1, 2 3, 4 5, 6 7 |
# | dp | 0 2, 1 3, 4 6, 5 7 |
# | pp | 0 4, 1 5, 2 6, 3 7 |
#
# **What to do.** Write `lines` and `join`. The function `dist.new_group` makes a group, and it
# is itself a collective of *all* ranks. Every rank must call it for every group, even for
# groups to which the rank does not belong. All ranks must make these calls in the same order,
# because PyTorch names the groups in the order of the calls. If each rank made only its own
# group, two different groups would get the same name. The groups would then get mixed up, or
# their ranks would wait for each other.
#
# **Check.** The lab compares your groups with those of a `DeviceMesh`, which is PyTorch's name
# for the box. It also adds up the rank numbers of each group, because a group that is mixed up
# has a wrong sum. Here, four ranks form a box of 2 × 1 × 2. Run this step with 8 ranks as well,
# because every axis then has two places.


# %%
def lines(world: int, pp: int, tp: int) -> dict[str, list[list[int]]]:
    """Return the groups of each kind as lists of ranks.

    The result is {"pp": [...], "dp": [...], "tp": [...]}.
    """
    # >>> solution 1: arrange the ranks as [pp, dp, tp], and return the lines along each axis
    # hint: The box can be a tensor of all rank numbers. dp follows from the two other sizes.
    # hint: Tensor.movedim moves an axis. What are the rows if this axis is the last one?
    box = torch.arange(world).view(pp, -1, tp)
    return {
        kind: box.movedim(axis, -1).flatten(0, 1).tolist()
        for axis, kind in enumerate(("pp", "dp", "tp"))
    }
    # <<< solution


def join(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
    """Make all these groups, and return the group of this rank.

    All ranks must call this function together.
    """
    # >>> solution 1: call dist.new_group(ranks) for every group; return the group of this rank
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
    # <<< solution


class Grid:
    """The grid stores the place of this rank among pp × dp × tp ranks, and its groups."""

    def __init__(self, pp: int = 1, tp: int = 1):
        groups = lines(dist.get_world_size(), pp, tp)
        self.tp_group, self.dp_group = join(groups["tp"]), join(groups["dp"])
        self.pp_group = join(groups["pp"])
        self.back_group = join(groups["pp"])  # a second group, for gradients (step 6)
        self.shard, self.tp = dist.get_rank(self.tp_group), tp
        self.stage, self.pp = dist.get_rank(self.pp_group), pp
        self.replica, self.dp = dist.get_rank(self.dp_group), len(groups["dp"][0])

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.pp - 1


def init_distributed() -> torch.device:
    """Join the process group. Return the accelerator of this rank, or the CPU.

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


# %%
if __name__ == "__main__":
    device = init_distributed()
    world = dist.get_world_size()
    # the number of shards or of stages in the steps that use only one kind of cut
    TP = PP = min(world, 4)

    def check_groups() -> None:
        pp, tp = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 2)}[world]
        mesh = init_device_mesh(
            device.type, (pp, world // (pp * tp), tp), mesh_dim_names=("pp", "dp", "tp")
        )
        grid, groups = Grid(pp, tp), lines(world, pp, tp)
        assert [grid.stage, grid.replica, grid.shard] == list(mesh.get_coordinate()), (
            "the place of this rank differs from its place in the DeviceMesh"
        )
        for kind, group in zip(
            ("pp", "dp", "tp"), (grid.pp_group, grid.dp_group, grid.tp_group), strict=True
        ):
            mine = mesh[kind].mesh.tolist()
            assert mine in groups[kind], f"the {kind} groups are different in the DeviceMesh"
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
# **Why.** In tensor parallelism, every rank of the group gets the *whole* activation $x$ and
# computes one part from it. Then the parts are added. The backward pass is different at these
# two places, where $x$ enters and where the parts are added:
#
# - Each rank $i$ computes its own part $y_i$ from $x$. The gradient
#   $\partial \ell / \partial x$ is therefore a sum with one term for each $y_i$, and rank $i$
#   can compute only its own term. So where $x$ enters, the forward pass does nothing, and the
#   backward pass needs an **all-reduce** of the terms.
# - The sum $z = \sum_i y_i$ needs an **all-reduce** in the forward pass. In the backward pass,
#   $\partial \ell / \partial y_i = \partial \ell / \partial z$, and every rank already has
#   this gradient. So the backward pass does nothing.
#
# The Megatron-LM paper calls these two operators $f$ and $g$. Each is the reverse of the other.
# Autograd cannot derive their backward passes, because it sees only one process. You define
# each of them with an `autograd.Function`. If $f$ did not sum, every rank would continue with
# its own term of the gradient. You would get no error, but wrong gradients in all earlier
# layers. If $g$ also summed in the backward pass, its gradient would be $t$ times too large.
# After the backward pass of a second $g$, the gradient would be $t^2$ times too large.
#
# **What to do.** Write the forward and backward functions of $f$ and $g$.
#
# **Check.** The lab computes $\ell = \sum_i (w_i x)^2$, where only rank $i$ knows
# $w_i = i + 1$. The exact results are $\ell = \sum w_i^2 \, x^2$ and
# $\partial \ell / \partial x = 2 \sum w_i^2 \, x$.


# %%
def all_reduced(
    x: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return the reduction over the group in a new tensor. `x` keeps its values."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=group)
    return total


class CopyToShards(torch.autograd.Function):
    """The operator f returns x in forward, and sums over the tp group in backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # >>> solution 2: store the group for backward, and return x unchanged
        # hint: Autograd needs a new tensor, such as x.view_as(x). Store things in ctx.
        ctx.group = group
        return x.view_as(x)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # >>> solution 2: return the gradient of x, and None for the group
        # hint: all_reduced, which is defined above, does not overwrite its argument.
        return all_reduced(gradient, ctx.group), None
        # <<< solution


class SumOverShards(torch.autograd.Function):
    """The operator g sums over the tp group in forward, and changes nothing in backward."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        # >>> solution 2: return the sum of the parts of all ranks
        return all_reduced(part, group)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # >>> solution 2: return the gradient of the part, and None for the group
        return gradient, None
        # <<< solution


def copy_to_shards(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Apply f in the tp group."""
    return CopyToShards.apply(x, grid.tp_group)


def sum_over_shards(part: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Apply g in the tp group."""
    return SumOverShards.apply(part, grid.tp_group)


# %%
def assert_same(ours: torch.Tensor, true: torch.Tensor, what: str) -> None:
    """Raise an error unless the tensors agree in about nine digits."""
    torch.testing.assert_close(
        ours.detach().cpu(),
        true.detach().cpu(),
        rtol=1e-9,
        atol=1e-11,
        msg=f"{what} not the same as in the whole model; check.py gives a hint",
    )


@contextmanager
def all_reduced_numbers() -> Iterator[list[int]]:
    """Yield a list that receives the number of elements of each call of dist.all_reduce."""
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
# **Why.** The MLP computes $\mathrm{GeLU}(x A) B$. Cut $A$ by columns, $A = [A_1, A_2]$. Then
# $x A = [x A_1, x A_2]$. GeLU computes each number independently, so every rank can apply it to
# its own part without communication. Each rank then has some *columns* of the hidden
# activation. These columns are multiplied by the corresponding *rows* of $B$:
#
# $$\mathrm{GeLU}(x A) \, B = \mathrm{GeLU}(x A_1) \, B_1 + \mathrm{GeLU}(x A_2) \, B_2$$
#
# One sum at the end is enough, over activations that have the size of $x$. So you need one
# all-reduce in the forward pass ($g$) and one all-reduce in the backward pass ($f$, where $x$
# enters). If you cut the matrices in the opposite way, you need a sum *before* GeLU, because
# the sum of two GeLUs is not the GeLU of the sum.
#
# **What to do.** Write `ColumnLinear` and `RowLinear`, and be careful with two things. The
# first thing is the weight. `nn.Linear` stores its weight as `[out, in]`, the transpose of $A$.
# The columns of $A$ are therefore rows of `weight`. The second thing is the bias. The bias of
# the first matrix belongs to the columns, and it is cut with them. The bias of the second
# matrix must be added once, to the finished sum. If it were added to every part, the sum would
# contain it $t$ times.
#
# The function `cut` returns a piece of a tensor and marks it as a piece, because step 8 needs
# the mark. A parameter that is not cut is called *whole*. All ranks of the tp group have equal
# copies of a whole parameter.
#
# **Check.** The lab compares the output and all gradients with those of the whole MLP, and it
# counts the all-reduces.


# %%
def cut(full: torch.Tensor, dim: int, grid: Grid) -> nn.Parameter:
    """Return the piece of this rank as a parameter.

    There are tp equal pieces of `full` along `dim`.
    """
    piece = nn.Parameter(full.detach().chunk(grid.tp, dim)[grid.shard].clone())
    piece.is_cut = True
    return piece


def whole(full: torch.Tensor) -> nn.Parameter:
    """Return a copy of `full` as a parameter."""
    return nn.Parameter(full.detach().clone())


class ColumnLinear(nn.Module):
    """Map the whole input [b, s, in] to the columns of this rank, [b, s, out/t]."""

    def __init__(self, full: nn.Linear, grid: Grid):
        super().__init__()
        self.grid = grid
        # >>> solution 3: set self.weight and self.bias to pieces of full.weight and full.bias
        # hint: full.weight has the shape [out, in], and full.bias has the shape [out].
        self.weight = cut(full.weight, 0, grid)
        self.bias = cut(full.bias, 0, grid)
        # <<< solution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 3: call F.linear, and one of the two operators of step 2 where x enters
        return F.linear(copy_to_shards(x, self.grid), self.weight, self.bias)
        # <<< solution


class RowLinear(nn.Module):
    """Map the columns of this rank, [b, s, in/t], to the whole output [b, s, out]."""

    def __init__(self, full: nn.Linear, grid: Grid):
        super().__init__()
        self.grid = grid
        # >>> solution 3: set self.weight and self.bias, one as a piece and one as a whole copy
        self.weight = cut(full.weight, 1, grid)
        self.bias = whole(full.bias)
        # <<< solution

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 3: call F.linear, sum over the shards, and add the bias at the right time
        return sum_over_shards(F.linear(x, self.weight), self.grid) + self.bias
        # <<< solution


class ParallelMLP(nn.Module):
    """Compute the MLP with two matrices that are cut over the tp group."""

    def __init__(self, full: MLP, grid: Grid):
        super().__init__()
        self.up, self.down = ColumnLinear(full.up, grid), RowLinear(full.down, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


# %% [markdown]
# The check must compare the gradients of pieces. Cutting is linear, so the gradient of a piece
# is the piece of the gradient. `expected_gradients` puts the gradients of the whole model in
# the place of its parameters, and then it cuts the result in the same way.


# %%
def expected_gradients(full: nn.Module, split: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Cut the gradients of `full` in the way in which `split` cuts a model.

    The result is a cut model that has the pieces of the gradients in place of its parameters.
    """
    gradients = copy.deepcopy(full)
    for slot, parameter in zip(gradients.parameters(), full.parameters(), strict=True):
        slot.data = parameter.grad.clone()
    return split(gradients)


def compare_with_whole(
    full: nn.Module, split: Callable[[nn.Module], nn.Module], x: torch.Tensor
) -> tuple[int, int]:
    """Compare the outputs and the gradients of the cut model with those of `full`.

    Return the number of all-reduces in the forward pass and the number in the backward pass.
    """
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
            f"step 3: MLP, t = {TP}: output and gradients equal those of the whole MLP;"
            f" all-reduces: {counts[0]} in forward, {counts[1]} in backward"
        )

    check_mlp()

# %% [markdown]
# ## Step 4: heads over ranks, and a whole block
#
# **Why.** Attention is easy to cut, because no head depends on another head. Each of the $t$
# ranks computes $a/t$ heads. The matrix that computes queries, keys and values is cut by
# columns, and the output projection is cut by rows. The attention between them needs no
# communication. This is the same pattern as in the MLP.
#
# However, queries, keys and values come from one fused matrix, because one product of matrices
# is faster than three. The rows of `qkv.weight` are first all queries, then all keys, then all
# values, and each kind is ordered by heads:
# $q_1 q_2 q_3 q_4 \, k_1 k_2 k_3 k_4 \, v_1 v_2 v_3 v_4$. If you cut this matrix in two as it
# is, rank 0 gets all queries and half of the keys. You get no error, because the shapes fit. So
# first put the rows in the order
# $q_1 q_2 k_1 k_2 v_1 v_2 \, q_3 q_4 k_3 k_4 v_3 v_4$. Now each half is a complete small
# attention. (For the same reason, a checkpoint of Megatron-LM has its rows in a different order
# from a checkpoint of Hugging Face, and it must be converted.)
#
# With attention and the MLP, a block is complete. Its LayerNorms and residual connections work
# on whole activations, which all ranks of the tp group have. All these ranks do the same work
# and get the same gradients, because $f$ has summed the gradients of the shards. So you do not
# need to change the LayerNorms and the residual connections.
#
# **What to do.** Write `rows_by_shard` and the forward function of `ParallelAttention`.
#
# **Check.** The lab compares the output and all gradients of a block with those of the whole
# block.


# %%
def rows_by_shard(tp: int) -> torch.Tensor:
    """Return an order of the 3h rows of a fused QKV matrix.

    If the rows in this order are cut into tp equal pieces, each piece has q, k and v of its own
    heads.
    """
    # >>> solution 4: return the row numbers, first those of q, k and v of the first shard
    # hint: Give the 3h row numbers three axes, for the kind (q, k, v), the shard and the row.
    return torch.arange(3 * HIDDEN).view(3, tp, -1).transpose(0, 1).flatten()
    # <<< solution


def reordered(linear: nn.Linear, rows: torch.Tensor) -> nn.Linear:
    """Return the same layer with its outputs in a different order."""
    result = copy.deepcopy(linear)
    result.weight.data, result.bias.data = linear.weight.data[rows], linear.bias.data[rows]
    return result


class ParallelAttention(nn.Module):
    """Compute causal self-attention with heads that are distributed over the tp group."""

    def __init__(self, full: Attention, grid: Grid):
        super().__init__()
        self.grid = grid
        self.qkv = ColumnLinear(reordered(full.qkv, rows_by_shard(grid.tp)), grid)
        self.out = RowLinear(full.out, grid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 4: do the same as Attention.forward, with the heads that this rank has
        # hint: Here, self.qkv(x) has the shape [b, s, 3h/t], and self.out expects [b, s, h/t].
        heads = HEADS // self.grid.tp
        q, k, v = (  # each [b, s, h/t] -> [b, a/t, s, h/a]
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # -> [b, s, h/t] -> [b, s, h]
        # <<< solution


class ParallelBlock(nn.Module):
    """A block that is cut over the tp group. Its LayerNorms are whole on every rank."""

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
            f"step 4: block, t = {TP}: output and gradients equal those of the whole block;"
            f" all-reduces: {counts[0]} in forward, {counts[1]} in backward;"
            f" each rank has {held:,} of {total:,} parameters"
        )

    check_block()

# %% [markdown]
# ## Step 5: the loss without gathering the logits
#
# **Why.** With a vocabulary of 100,000 or more tokens, the head is the largest matrix of a
# model, and the logits are its largest activation. If the head is cut by columns, each rank has
# the logits of its own part of the vocabulary, `[b, s, V/t]`. An all-gather of the logits would
# send $b s V$ numbers. But the loss of one position depends on only three numbers:
#
# $$\ell = \log \sum_j e^{z_j - M} - (z_y - M), \qquad M = \max_j z_j$$
#
# These numbers are the maximum, the sum, and the logit of the target $y$. Each of them needs an
# all-reduce of $b s$ numbers.
#
# - $M$ prevents overflow, because $e^{1000}$ is infinite in floating point. All ranks must use
#   the same $M$. If each rank used its own maximum $M_r$, the sums of $e^{z_j - M_r}$ could not
#   be added. The loss does not depend on $M$, so no gradient flows through it.
# - Only one rank has the logit of the target. This rank looks it up, and the other ranks
#   contribute 0.
# - Use $g$ twice, once to add up the exponentials of all ranks, and once to add up the logit of
#   the target and the zeros of the other ranks. The gradient of the logits of this rank is then
#   the softmax, minus 1 at the target. A rank can compute it from numbers that it already has.
#
# **What to do.** Fill the three blanks of `vocabulary_parallel_loss`.
#
# **Check.** The lab compares the loss and the gradient of the logits with those of the whole
# vocabulary. It also counts the numbers that the all-reduces process.


# %%
def vocabulary_parallel_loss(
    logits: torch.Tensor, targets: torch.Tensor, grid: Grid
) -> torch.Tensor:
    """Return the mean cross-entropy of targets [b, s] for logits [b, s, V/t] of this rank.

    A target is the number of a token in the whole vocabulary, from 0 to V - 1. All ranks of the
    tp group get the same loss.
    """
    width = logits.size(-1)
    # >>> solution 5: set highest to the largest logit of the whole vocabulary, [b, s]
    # hint: all_reduced(tensor, grid.tp_group, dist.ReduceOp.MAX) has no gradient.
    highest = all_reduced(logits.amax(dim=-1), grid.tp_group, dist.ReduceOp.MAX)
    # <<< solution
    shifted = logits - highest.unsqueeze(-1)
    # >>> solution 5: set total to the sum of exp(shifted) over the whole vocabulary, [b, s]
    total = sum_over_shards(shifted.exp().sum(dim=-1), grid)
    # <<< solution
    # >>> solution 5: set target to z_y - M, [b, s], which one rank has and all ranks need
    # hint: The first token of this rank is grid.shard * width.
    # hint: If a target is on another rank, torch.gather still needs a valid index.
    # hint: Replace the result of torch.gather by 0 in this case.
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
            f"step 5: loss, t = {TP}: loss and gradient equal those of the whole vocabulary;"
            f" {len(sizes)} all-reduces of {sum(sizes)} numbers in total for {z.numel()} logits"
        )

    check_loss()

# %% [markdown]
# ## Step 6: a pipeline
#
# **Why.** Now you cut the stack of layers. Stage $i$ of $p$ has $L / p$ layers, beginning with
# layer $i L / p$. The first stage also has the embedding. The last stage also has the last
# LayerNorm, the head and the loss. In the forward pass, a stage receives an activation
# `[b, s, h]` from the stage before it, and it sends its own activation to the next stage. In
# the backward pass, it receives the gradient of the activation that it sent. Then it sends the
# gradient of the activation that it received.
#
# Autograd computes the gradients within a stage, but it needs two pieces of information. The
# received activation must be a *leaf that requires a gradient*, because otherwise there is no
# gradient to send back. And autograd must know *with which gradient it starts*:
# `output.backward(gradient)`.
#
# If the batch were processed as one piece, only one stage would work at a time. So the batch is
# cut into $m$ **micro-batches**, which go through the stages one after the other. A micro-batch
# is **live** in a stage from its forward pass to its backward pass. During this time, the stage
# stores the input, and the output with its graph, because the backward pass needs them. The
# gradients of the micro-batches are added. Each loss is a mean over its own micro-batch, so it
# must be divided by $m$.
#
# The GPipe schedule runs all $m$ forward passes, and then all $m$ backward passes.
#
# **A send must not wait.** `dist.send` can block until the other side has received the message.
# If two stages wait in a send to each other, they wait forever. GPipe avoids this by its order,
# but the schedule of step 7 does not. So start each send with `dist.isend`, and store the
# `Work` and the tensor. The memory of the tensor must not be reused before the message is sent.
# Wait for all sends at the end.
#
# With NCCL on GPUs there is a second problem. The messages of one group are sent one after the
# other, in the order of the calls. If a message waits for its receiver, a receive that is
# called later in the same group must also wait. Therefore activations and gradients use two
# different groups, `grid.pp_group` and `grid.back_group`. In each group, all messages then
# travel in one direction, and no message waits for a message in the opposite direction. (A
# different solution is `dist.batch_isend_irecv`, which starts a send and a receive together.
# Chapter 03 uses it.)
#
# **What to do.** Write `layers_of`, four methods of `Pipeline`, and `gpipe`.
#
# **Check.** The lab sends one batch of 16 sequences through the pipeline in 8 micro-batches. It
# compares the loss and all gradients with those of one process and the whole batch.


# %%
def layers_of(stage: int, pp: int) -> range:
    """Return the numbers of the layers of a stage."""
    # >>> solution 6: return the range of the LAYERS / pp consecutive layers of the stage
    share = LAYERS // pp
    return range(stage * share, (stage + 1) * share)
    # <<< solution


class Stage(nn.Module):
    """Compute the layers of one stage. Its blocks and its head are cut over the tp group."""

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
        """Map the input of this stage to its output.

        The first stage gets tokens [b, s], and all other stages get activations [b, s, h]. The
        last stage returns logits [b, s, V/t], and all other stages return activations.
        """
        if self.grid.first:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.grid.last else x


class Pipeline:
    """Run one training step of one stage.

    The methods `forward(k)` and `backward(k)` process micro-batch k.
    """

    def __init__(
        self, stage: Stage, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ):
        self.stage, self.grid, self.m = stage, stage.grid, len(inputs)
        self.inputs, self.targets = inputs, targets  # each has m tensors [b, s]
        self.live: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # k: (input, output)
        self.peak = 0  # the largest number of micro-batches that were live at once
        self.sends: list[tuple[dist.Work, torch.Tensor]] = []
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)

    def group_to(self, stage: int) -> dist.ProcessGroup:
        """Return the group for messages to a stage.

        Activations go to a later stage in pp_group. Gradients go to an earlier stage in
        back_group.
        """
        return self.grid.pp_group if stage > self.grid.stage else self.grid.back_group

    def group_from(self, stage: int) -> dist.ProcessGroup:
        """Return the group for messages from a stage."""
        return self.grid.pp_group if stage < self.grid.stage else self.grid.back_group

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Start to send an activation or a gradient to stage `to`, without waiting."""
        # >>> solution 6: call isend in the right group, and append (work, tensor) to self.sends
        # hint: Send tensor.detach().contiguous(), and store exactly the tensor that you sent.
        # hint: group_dst is the rank within the group, so it is equal to the stage `to`.
        # hint: dst would be the rank among all ranks.
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, group=self.group_to(to), group_dst=to)
        self.sends.append((work, tensor))
        # <<< solution

    def receive(self, source: int) -> torch.Tensor:
        """Wait for an activation or a gradient [b, s, h] from stage `source`, and return it."""
        shape = (*self.inputs[0].shape, HIDDEN)
        # >>> solution 6: receive into an empty float64 tensor of this shape, and return it
        # hint: Call dist.recv(tensor, group=..., group_src=...).
        tensor = torch.empty(shape, dtype=torch.float64, device=self.loss.device)
        dist.recv(tensor, group=self.group_from(source), group_src=source)
        return tensor
        # <<< solution

    def forward(self, k: int) -> None:
        """Run the forward pass of micro-batch k, and store what its backward pass needs."""
        # >>> solution 6: get the input, run the stage, then send the output or add to self.loss
        # hint: The input is self.inputs[k] in the first stage. Other stages receive it.
        # hint: In the last stage, the output is the loss of self.targets[k], divided by self.m.
        # hint: Store the pair (input, output) in self.live[k].
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
        """Run the backward pass of micro-batch k, and remove k from `live`."""
        # >>> solution 6: take k out of self.live, run backward, send back the input's gradient
        # hint: The last stage starts with its loss. The others start with a received gradient.
        taken, output = self.live.pop(k)
        if self.grid.last:
            output.backward()
        else:
            output.backward(self.receive(self.grid.stage + 1))
        if not self.grid.first:
            self.send(taken.grad, self.grid.stage - 1)
        # <<< solution

    def finish(self) -> None:
        """Wait until all messages of this stage are sent."""
        for work, _ in self.sends:
            work.wait()
        self.sends.clear()


def gpipe(pipe: Pipeline) -> None:
    """Run all forward passes, and then all backward passes."""
    # >>> solution 6: call pipe.forward(k) and pipe.backward(k), each once for every k < pipe.m
    for k in range(pipe.m):
        pipe.forward(k)
    for k in range(pipe.m):
        pipe.backward(k)
    # <<< solution


# %%
def step_of_pipeline(
    grid: Grid, schedule: Callable[[Pipeline], None], m: int, device: torch.device
) -> Pipeline:
    """Run one step with the first batch.

    Compare the loss and the gradients with those of the whole model.
    """
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
    """Return the largest number of live micro-batches of each stage."""
    found = torch.zeros(pipe.grid.pp, dtype=torch.int64, device=pipe.loss.device)
    found[pipe.grid.stage] = pipe.peak
    return all_reduced(found, pipe.grid.pp_group).tolist()


if __name__ == "__main__":

    def check_gpipe() -> None:
        pipe = step_of_pipeline(Grid(pp=PP), gpipe, 8, device)
        say(
            f"step 6: GPipe, p = {PP}, m = 8: loss and gradients equal those of one process;"
            f" largest number of live micro-batches of each stage: {peaks(pipe)}"
        )

    check_gpipe()

# %% [markdown]
# ## Step 7: one forward, one backward
#
# **Why.** GPipe keeps all $m$ micro-batches in memory before the first backward pass. But $m$
# should be large, because a stage is idle for $p - 1$ of $m + p - 1$ slots. So the memory grows
# with the number that makes the pipeline efficient. The solution is to start each backward pass
# as soon as possible. The last stage can run the backward pass of a micro-batch directly after
# its forward pass. The stage before it receives the gradient one slot later, and so on. Stage
# $i$ therefore runs $p - 1 - i$ forward passes first, which are its **warm-up**. After that it
# alternates one forward and one backward pass (**1F1B**). At the end it runs the remaining
# backward passes.
#
# Stage $i$ never has more than $p - i$ live micro-batches. This is at most $p$, and it does not
# depend on $m$. The idle time is the same as before, and so are the gradients.
#
# For $p = 4$ and $m = 8$, stage 1 runs F0 F1 · F2 B0 · F3 B1 · F4 B2 · … · F7 B5 · B6 B7. These
# are two forward passes as the warm-up, six pairs, and two backward passes. If there are fewer
# micro-batches than the warm-up needs, $m < p - 1 - i$, then all of them belong to the warm-up.
#
# **What to do.** Write `one_f_one_b`.
#
# **Check.** The lab makes the same comparison as in step 6, with 2 and with 8 micro-batches. It
# also compares the number of live micro-batches with $\min(p - i, m)$.


# %%
def one_f_one_b(pipe: Pipeline) -> None:
    """Run the warm-up, then pairs of passes, then the remaining backward passes.

    Each pair is one forward pass and one backward pass.
    """
    # >>> solution 7: call pipe.forward(k) and pipe.backward(k), each in the order of k
    # hint: The stage is pipe.grid.stage of pipe.grid.pp. There are pipe.m micro-batches.
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
            assert found == bound, (
                f"the stages had {found} live micro-batches, but they must have {bound}"
            )
        say(
            f"step 7: 1F1B, p = {PP}, m = 8: loss and gradients equal those of one process;"
            f" largest number of live micro-batches of each stage: {found}"
        )

    check_1f1b()

# %% [markdown]
# ## Step 8: all three
#
# **Why.** You can combine all three kinds of parallelism if you do each piece of work along the
# right axis of the box. The answers to four questions tell you which axis is right.
#
# **Which rank reads which samples?** Only replicas read different data. All ranks of a tp group
# work on the same activations, and all stages of a pipeline work on the same micro-batches. So
# the batch is cut into $d$ parts and not into $N$ parts, and each rank takes the part with the
# number of its replica.
#
# **Which gradients are averaged?** Two ranks have the same parameters and different data if
# they differ only in the replica. So average over the dp group. A different shard or stage has
# different parameters. It makes no sense to average the gradients of different parameters,
# although the shapes can be equal. Every rank of a tp group has a copy of the LayerNorms and of
# the biases that are not cut. The gradients of these copies are already equal and complete.
#
# **What is the norm of the gradient?** Clipping needs the norm of the gradient of the *whole*
# model. The square of this norm is a sum over parts that are on different ranks. Add the parts
# over tp and pp, and add each number of the gradient exactly once. Every rank adds its own
# pieces. A whole parameter has $t$ copies in the tp group, so only one of its ranks adds
# it. After the average, all replicas have the same gradient, so you must not add over dp.
#
# **Which ranks scale their gradients?** All ranks scale by the same factor, and only if the
# norm is above the limit.
#
# **What to do.** Write `my_share`, `average_gradients` and `clip_gradients`.
#
# **Check.** The lab trains with several layouts of the ranks, and compares the losses and the
# gradient norms with those of one process.


# %%
def my_share(batch: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return the rows of the global batch for the replica of this rank, [b/d, s + 1]."""
    # >>> solution 8: cut the rows into equal parts, and return the part of this replica
    return batch.chunk(grid.dp)[grid.replica]
    # <<< solution


def average_gradients(stage: nn.Module, grid: Grid) -> None:
    """Replace every gradient by its mean over the replicas, in place."""
    # >>> solution 8: all-reduce each parameter.grad in the right group, and divide it
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=grid.dp_group)
        parameter.grad /= grid.dp
    # <<< solution


def clip_gradients(stage: nn.Module, grid: Grid, limit: float) -> float:
    """Scale all gradients so that their norm over the whole model is at most `limit`.

    Return the norm before scaling. The factor is limit / (norm + 1e-6) if this is below 1.
    """
    # >>> solution 8: add the squares of all gradients of the model, take the root, and scale
    # hint: getattr(parameter, "is_cut", False) is True for a piece that `cut` made.
    # hint: Add the parameters that are not cut on one shard only.
    # hint: Then add the results of the ranks over two of the groups.
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
# The rest is an ordinary training loop. Note that the number of ranks does not appear anywhere
# in `train`.


# %%
def train(grid: Grid, device: torch.device) -> tuple[list[float], list[float], int]:
    """Train on the five batches.

    Return the losses, the gradient norms, and the number of parameters that this rank has.
    """
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
        loss = all_reduced(pipe.loss, grid.pp_group)  # it is 0 on the other stages
        losses.append(all_reduced(loss, grid.dp_group).item() / grid.dp)
    return losses, norms, sum(p.numel() for p in stage.parameters())


if __name__ == "__main__":

    def check_composition() -> None:
        layouts = {  # (pp, tp), and dp follows
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
                    msg=f"the {what} are {in_row(ours)}, but one process has {in_row(true)}",
                )
            say(
                f"step 8: pp × dp × tp = {pp} × {grid.dp} × {tp}: rank 0 has {held:,} of"
                f" {total:,} parameters, and the losses are {in_row(losses)}"
            )

    check_composition()
    say(f"with every cut, the last loss is {TRUE_LOSSES[-1]:.4f}, as in one process")
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# You have written the core of Megatron-LM: its layers, its schedule and the order of its axes.
# Megatron-LM adds several methods that do not change the mathematics. It cuts the activations
# between the blocks along the sequence (sequence parallelism). It gives each stage several
# groups of layers (interleaving). It overlaps communication with computation, and it cuts the
# optimizer state over dp. Try this:
#
# - Run the lab with 8 ranks. Then change the order of the axes in `lines`. Which checks still
#   pass, and what would be slower on real machines?
# - Let the head use the weights of the embedding. The first and the last stage then have copies
#   of one parameter. Which gradients must be added, over which ranks, and which rank adds them
#   to the norm?
# - Cut the embedding by rows of the vocabulary. You have already written all operators that
#   this needs.
# - Remove `is_cut` from one weight. Which check fails?
