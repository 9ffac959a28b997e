"""Test the classes and functions that readers copy from chapters, on different models.

`torchrun --nproc-per-node=N copied.py` runs all cases, and prints an error for each case that
fails. The results must equal the results of one process that does not use the tested class.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # if torch imports it later, it keeps the process group alive
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

SNIPPETS = Path(__file__).resolve().parent.parent / "snippets"
ROWS, TOKENS, H, V = 12, 4, 6, 11


@cache
def program(path: str) -> ModuleType:
    """Import a program of the book."""
    spec = importlib.util.spec_from_file_location(path, SNIPPETS / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path] = module
    spec.loader.exec_module(module)
    return module


class Model(nn.Module):
    """A model with nested modules, a scalar parameter, buffers, and a dictionary as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        layers = {
            "up": nn.Linear(H, 3 * H),
            "rest": nn.Sequential(nn.GELU(), nn.Linear(3 * H, H)),
        }
        self.body = nn.ModuleDict(layers)
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V, bias=False)
        self.gain = nn.Parameter(torch.rand(()))
        self.inner_dtype = None  # None: the same dtype everywhere
        self.register_buffer("shift", torch.rand(H))
        self.register_buffer("mask", torch.rand(H) < 0.5)

    def forward(self, ids: torch.Tensor, *, scale: float) -> dict[str, torch.Tensor | tuple]:
        # x: [rows, tokens, h]
        x = self.norm(self.embedding(ids)).masked_fill(self.mask, 0.5) + self.shift
        y = x if self.inner_dtype is None else x.to(self.inner_dtype)
        y = self.body["rest"](self.body["up"](y))
        x = self.norm(x + self.gain * scale * y.to(x.dtype))
        return {"logits": self.head(x), "hidden": (x, y)}


def freeze(model: Model) -> None:
    """Freeze a whole module, a parameter, and a part of a module."""
    for p in (model.embedding.weight, model.gain, model.body["up"].bias):
        p.requires_grad_(False)


def tie(model: Model) -> None:
    model.head.weight = model.embedding.weight


def tie_and_freeze(model: Model) -> None:
    tie(model)
    freeze(model)


def use_two_dtypes(model: Model) -> None:
    model.body.float()
    model.inner_dtype = torch.float32


def add_unused_layer(model: Model) -> None:
    model.spare = nn.Linear(H, H)


def sparse(model: Model) -> None:
    model.embedding.sparse = True


def use_float32(model: Model) -> None:
    model.float()


class Case(NamedTuple):
    """A model, an optimizer and a way of training, with which each wrapper is tested."""

    change: Callable[[Model], None] = lambda model: None
    kind: type[Optimizer] = SGD
    options: dict = {"lr": 0.1}  # noqa: RUF012
    micro_batches: int = 1  # number of backward passes in a step
    autocast: bool = False
    tolerance: float | None = None


CASES = {
    "nested": Case(kind=SGD, options={"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "frozen": Case(freeze, AdamW, {"lr": 0.02, "weight_decay": 0.3, "amsgrad": True}),
    "tied": Case(tie, Adam, {"lr": 0.02, "weight_decay": 0.1}),
    "tied and frozen": Case(tie_and_freeze, NAdam, {"lr": 0.02, "weight_decay": 0.1}),
    "two dtypes": Case(use_two_dtypes, RMSprop, {"lr": 0.01, "centered": True, "eps": 1e-3}),
    "no gradient": Case(add_unused_layer, SGD, {"lr": 0.1, "weight_decay": 0.3}),
    "sparse": Case(sparse, SGD, {"lr": 0.1}),
    "micro-batches": Case(freeze, Adam, {"lr": 0.02}, micro_batches=2),
    "autocast": Case(
        use_float32, SGD, {"lr": 0.1, "momentum": 0.9}, autocast=True, tolerance=0.02
    ),
}


class Training(NamedTuple):
    """How a wrapper or optimizer is used: the wrapped model, and the functions of a step."""

    model: nn.Module
    zero_grad: Callable
    after_backward: Callable
    step: Callable
    optimizer: Optimizer
    state: nn.Module  # the module with state_dict() and load_state_dict()


def ddp_training(ddp: nn.Module, case: Case, after: str = "") -> Training:
    """Return a training that calls the method ``after`` of the wrapper after each backward."""
    optimizer = case.kind(ddp.parameters(), **case.options)
    after_backward = getattr(ddp, after) if after else lambda: None
    return Training(
        ddp, optimizer.zero_grad, after_backward, optimizer.step, optimizer, ddp.module
    )


def one_process(model: Model, case: Case) -> Training:
    optimizer = case.kind(model.parameters(), **case.options)
    return Training(model, optimizer.zero_grad, lambda: None, optimizer.step, optimizer, model)


def naive_ddp(model: Model, case: Case) -> Training:
    training = ddp_training(program("02_ddp/naive").NaiveDDP(model), case)

    def step() -> None:
        training.model.average_gradients()
        training.optimizer.step()

    return training._replace(step=step)


def hooked_ddp(model: Model, case: Case) -> Training:
    return ddp_training(program("02_ddp/hooks").HookedDDP(model), case, "wait")


def bucketed_ddp(model: Model, case: Case) -> Training:
    """Return a training that alternates between the zero_grad of optimizer and wrapper."""
    training = ddp_training(program("02_ddp/buckets").BucketedDDP(model, 200), case, "wait")
    zero_grads = itertools.cycle([training.optimizer.zero_grad, training.model.zero_grad])
    return training._replace(zero_grad=lambda: next(zero_grads)())


def mini_ddp(model: Model, case: Case) -> Training:
    return ddp_training(program("02_ddp/mini_ddp").MiniDDP(model, 0.001, 0.0001), case)


def zero1(model: Model, case: Case) -> Training:
    zero = program("04_zero_and_fsdp/zero1").ZeRO1(
        model.parameters(), case.kind, **case.options
    )
    return Training(model, zero.zero_grad, lambda: None, zero.step, zero.optimizer, model)


def zero2(model: Model, case: Case) -> Training:
    kind = program("04_zero_and_fsdp/zero2").ZeRO2
    zero = kind(model.parameters(), 1000, case.kind, **case.options)
    return Training(model, lambda: None, lambda: None, zero.step, zero.optimizer, model)


def mini_fsdp(model: Model, case: Case) -> Training:
    units = [model.body["up"], model.body["rest"], model.norm]
    fsdp = program("04_zero_and_fsdp/mini_fsdp").MiniFSDP(model, units)
    optimizer = case.kind(fsdp.parameters(), **case.options)
    return Training(fsdp, optimizer.zero_grad, lambda: None, optimizer.step, optimizer, fsdp)


WRAPPERS = {
    "NaiveDDP": naive_ddp,
    "HookedDDP": hooked_ddp,
    "BucketedDDP": bucketed_ddp,
    "MiniDDP": mini_ddp,
    "ZeRO1": zero1,
    "ZeRO2": zero2,
    "MiniFSDP": mini_fsdp,
}
NO_GRADIENT = "no gradient in this backward( pass)? for"
EXPECTED_ERRORS = {
    (name, "no gradient"): NO_GRADIENT for name in WRAPPERS if name != "MiniFSDP"
}
# torch raises these errors
EXPECTED_ERRORS |= {(name, "sparse"): ".*(sparse|storage)" for name in [*WRAPPERS][3:]}


def train(training: Training, case: Case, steps: range, local: slice) -> None:
    """Train on the rows `local` of each micro-batch; one process trains on all rows."""
    for number in steps:
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(V, (case.micro_batches, ROWS, TOKENS + 1), generator=generator)
        training.zero_grad()
        for batch in ids:
            rows = batch[local]
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                out = training.model(rows[:, :-1], scale=0.5)
            assert (out["logits"].dtype == torch.bfloat16) == case.autocast
            loss = F.cross_entropy(out["logits"].flatten(0, 1), rows[:, 1:].flatten())
            loss = loss + 0.1 * out["hidden"][1].square().mean()
            (loss / case.micro_batches).backward()
            training.after_backward()
        with torch.no_grad():  # an evaluation during training
            training.model(rows[:, :-1], scale=0.5)
        training.step()


def build(make: Callable, case: Case, seed: int) -> Training:
    torch.manual_seed(seed)
    model = Model()
    case.change(model)
    return make(model, case)


def with_zero_gradients(training: Training) -> Training:
    """Return a training that replaces missing gradients by zeros, as MiniFSDP does."""

    def step() -> None:
        for p in training.model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        training.optimizer.step()

    return training._replace(step=step)


def compare(make: Callable, case: Case) -> None:
    """Train, load the states into a model with a different seed, and train again.

    After both trainings, the parameters must equal those of one process.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    truth = build(one_process, case, seed=0)
    truth = with_zero_gradients(truth) if make is mini_fsdp else truth
    # all wrappers except these two copy the parameters and buffers of rank 0
    copies_rank_0 = make not in (zero1, zero2)
    tested = build(make, case, seed=rank * copies_rank_0)
    local = slice(rank * ROWS // n, (rank + 1) * ROWS // n)
    for steps in (range(2), range(2, 4)):
        train(truth, case, steps, slice(None))
        train(tested, case, steps, local)
        state = {name: tensor.clone() for name, tensor in tested.state.state_dict().items()}
        torch.testing.assert_close(
            state, dict(truth.state.state_dict()), rtol=case.tolerance, atol=case.tolerance
        )
        moments = tested.optimizer.state_dict()
        tested = build(make, case, seed=7 + rank * copies_rank_0)
        tested.state.load_state_dict(state)
        tested.optimizer.load_state_dict(moments)


# --- cases with models ------------------------------------------------------------------------


def backward_twice(make: Callable, case: Case = CASES["nested"]) -> Callable[[], None]:
    """Return a function that calls backward twice without the method that must follow it."""

    def function() -> None:
        training = build(make, case, seed=0)
        training.zero_grad()
        for _ in range(2):
            out = training.model(torch.arange(V)[None], scale=1.0)
            (out["logits"].square().mean() + out["hidden"][1].mean()).backward()

    return function


def fsdp_of(model: nn.Module, *units: nn.Module) -> nn.Module:
    return program("04_zero_and_fsdp/mini_fsdp").MiniFSDP(model, units)


class CheckpointedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedSequential(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


def checkpoints_and_units() -> None:
    """Checkpoint within a unit, around a unit, and around several units."""
    n, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    inner = [
        CheckpointedLinear(H, H),
        CheckpointedSequential(nn.Linear(H, H), nn.Tanh()),
        nn.Linear(H, H),
        nn.Linear(H, H),
    ]
    model = nn.Sequential(
        inner[0], inner[1], CheckpointedSequential(inner[2], nn.Tanh(), inner[3])
    )
    x, truth = torch.randn(n, H), copy.deepcopy(model)
    truth(x).square().mean().backward()
    fsdp = fsdp_of(model, inner[0], inner[1][0], inner[2], inner[3])
    fsdp(x[rank : rank + 1]).square().mean().backward()
    whole = [p.grad.flatten() for p in truth.parameters()]
    for pair, shard in zip(
        zip(whole[::2], whole[1::2], strict=True), fsdp.parameters(), strict=True
    ):
        flat = torch.cat(pair)
        flat = F.pad(flat, (0, -len(flat) % n))
        torch.testing.assert_close(shard.grad, flat.chunk(n)[rank])


def tied_over_two_units() -> None:
    model = Model()
    tie(model)
    fsdp_of(model, model.embedding, model.head)


def parameters_of_shards() -> None:
    """`parameters()`, `named_parameters()` and `zero_grad()` must use the shards."""
    n = dist.get_world_size()
    torch.manual_seed(0)
    model = Model()
    freeze(model)
    psi = sum(p.numel() for p in model.parameters())
    fsdp = fsdp_of(model, model.body["up"])
    named = dict(fsdp.named_parameters())
    assert [*named.values()] == [*fsdp.parameters()] == [unit.shard for unit in fsdp.units]
    assert psi / n <= sum(p.numel() for p in fsdp.parameters()) < psi / n + len(fsdp.units)
    assert {p.requires_grad for p in fsdp.parameters()} == {True, False}
    SGD(fsdp.parameters(), lr=0.1)
    for set_to_none in (False, True):
        fsdp(torch.arange(V)[None], scale=1.0)["logits"].square().mean().backward()
        gradients = [p.grad for p in fsdp.parameters() if p.requires_grad]
        assert any(gradient.count_nonzero() for gradient in gradients)
        fsdp.zero_grad(set_to_none)
        for p in fsdp.parameters():
            assert p.grad is None or not (set_to_none or p.grad.any())


def frozen_after_sharding() -> None:
    fsdp_of(Model()).requires_grad_(False)(torch.arange(V)[None], scale=1.0)


def state_of_different_model() -> None:
    fsdp = fsdp_of(Model())
    state = fsdp.state_dict()
    state["head.weights"] = state.pop("head.weight")
    fsdp.load_state_dict(state)


def state_of_different_shape() -> None:
    fsdp = fsdp_of(Model())
    fsdp.load_state_dict(fsdp.state_dict() | {"head.weight": torch.zeros(H, V)})


def unit_without_tensors() -> None:
    class Box(nn.Linear):
        def forward(self, x: torch.Tensor) -> object:
            return iter([super().forward(x)])

    fsdp_of(model := Box(H, H), model)(torch.randn(2, H))


def with_penalty(loss: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Add a penalty on the gradients to a loss, so that its backward differentiates twice."""
    gradients = torch.autograd.grad(loss, inputs, create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def linears_in_parallel() -> None:
    """Test with and without bias, frozen, with an indivisible width, and with a penalty."""
    module, rank = program("03_model_parallelism/tensor_parallel_block"), dist.get_rank()
    for bias in (True, False):
        for freeze in (True, False):
            up, down = nn.Linear(H, 7, bias=bias), nn.Linear(7, H, bias=bias)
            for p in [*up.parameters(), *down.parameters()]:
                dist.broadcast(p.data, src=0)
            up.weight.requires_grad_(not freeze)
            column, row = module.ColumnParallel(up), module.RowParallel(down)
            x = torch.linspace(-1, 1, 2 * H).view(2, H).requires_grad_()
            y = x.detach().clone().requires_grad_()
            with_penalty(down(up(x).tanh()).square().sum(), x).backward()
            out = row(column(module.CopyToRanks.apply(y)).tanh())
            with_penalty(out.square().sum(), y).backward()
            torch.testing.assert_close(y.grad, x.grad)
            cut = [(column.weight, up.weight, 0), (row.weight, down.weight, 1)]
            if bias:
                cut += [(column.bias, up.bias, 0)]
                torch.testing.assert_close(row.bias.grad, down.bias.grad)
            assert column.weight.requires_grad != freeze
            for part, whole, dim in cut[freeze:]:
                truth = whole.grad.tensor_split(dist.get_world_size(), dim)[rank]
                torch.testing.assert_close(part.grad, truth)


def tokens_in_parallel() -> None:
    """Test sums over the terms of all ranks for all tokens, with a penalty."""
    module, rank = program("03_model_parallelism/sequence_parallel"), dist.get_rank()
    torch.manual_seed(0)
    n = dist.get_world_size()
    whole, factors = torch.randn(2, 2 * n, H).requires_grad_(), torch.randn(n)
    shard = whole.detach().chunk(n, 1)[rank].clone().requires_grad_()
    total = sum((whole * factor).tanh() for factor in factors)
    with_penalty(total.square().sum(), whole).backward()
    term = (module.GatherTokens.apply(shard) * factors[rank]).tanh()
    with_penalty(module.ScatterSum.apply(term).square().sum(), shard).backward()
    torch.testing.assert_close(shard.grad, whole.grad.chunk(n, 1)[rank])


def exchanges() -> None:
    """Functions that only move elements must also move the gradients of a penalty."""
    n = dist.get_world_size()
    rows = program("03_model_parallelism/expert_parallel").AllToAll.apply
    tokens = program("03_model_parallelism/ulysses").AllToAll.apply
    moves = [program("03_model_parallelism/sharded_embeddings").Exchange.apply]
    moves += [lambda x: rows(x, [2] * n, [2] * n), lambda x: tokens(x, 0, 1)]
    for move in moves:
        x = torch.linspace(-1, 1, 4 * n * n).view(2 * n, 2 * n).requires_grad_()
        with_penalty(move(x).sin().sum(), x).backward()
        torch.testing.assert_close(x.grad, x.cos() - (2 * x).sin())


def tables(dtype: torch.dtype = torch.float64) -> None:
    """Test tables and bags of different sizes, empty bags, frozen shards, and a saved state."""
    module = program("03_model_parallelism/sharded_embeddings")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    for kind, width in ((module.ByRows, 5), (module.ByColumns, 2 * n)):
        table = torch.randn(V, width).to(dtype).requires_grad_()
        part = kind(torch.zeros(V, width).to(dtype))
        part.load_state_dict(kind(table).state_dict())
        for b in (0, 1, 3):
            ids = torch.randint(V, (n, b, 4))
            table.grad = part.shard.grad = None
            whole = F.embedding_bag(ids.flatten(0, 1), table, mode="sum").view(n, b, width)
            whole.square().sum((1, 2)).mean().backward()
            local = part.pool(*part.send_ids(ids[rank]))
            local.square().sum().backward()
            tolerances = {"rtol": 0.05, "atol": 0.2} if dtype == torch.bfloat16 else {}
            torch.testing.assert_close(local, whole[rank], **tolerances)
            torch.testing.assert_close(part.shard.grad, part.part(table.grad), **tolerances)
        part.requires_grad_(False)
        assert not part.pool(*part.send_ids(ids[rank])).requires_grad


def table_of_different_width() -> None:
    kind = program("03_model_parallelism/sharded_embeddings").ByColumns
    with mock.patch.multiple(dist, get_rank=lambda: 0, get_world_size=lambda: 2):
        kind(torch.ones(3, 5))


def loss_over_shards() -> None:
    """Test ignored targets, and logits in bf16, which torch would sum in fp32."""
    loss = program("03_model_parallelism/vocabulary_parallel").VocabularyParallelLoss
    torch.manual_seed(0)
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float64, torch.bfloat16):
        logits = torch.randn(2, 3, 6 * n, dtype=dtype, requires_grad=True)
        targets = torch.randint(6 * n, (2, 3))
        targets[0, 0] = targets[1] = -100
        wide = logits if dtype == torch.float64 else logits.float()
        truth = F.cross_entropy(wide.flatten(0, 1), targets.flatten())
        truth.backward()
        shard = logits.detach().chunk(n, -1)[rank].clone().requires_grad_()
        tested = loss.apply(shard, targets)
        tested.backward()
        torch.testing.assert_close(tested, truth)
        torch.testing.assert_close(shard.grad, logits.grad.chunk(n, -1)[rank])


def attention_of_all_ranks() -> None:
    """Test views of one projection, also in bf16, and values that need no gradient.

    The ring must sum in fp32, also under autocast.
    """
    ring = program("03_model_parallelism/ring_attention").RingAttention.apply
    ulysses = program("03_model_parallelism/ulysses").ulysses_attention
    torch.manual_seed(0)
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype, causal in [
        (d, c) for d in (torch.float32, torch.bfloat16) for c in (True, False)
    ]:
        qkv = torch.randn(2, 12, 3, 6, 8, dtype=torch.float32).to(dtype)  # [b, s, 3, heads, d]
        whole = qkv.clone().requires_grad_()
        local = qkv.tensor_split(n, 1)[rank].clone().requires_grad_()
        outs = []
        for x, is_whole in ((whole, True), (local, False)):
            q, k, v = x.transpose(1, 3).unbind(2)
            if is_whole:
                out = F.scaled_dot_product_attention(q, k, v.detach(), is_causal=causal)
            elif causal:
                out = ulysses(q, k, v.detach())
            else:
                with torch.autocast("cpu", torch.bfloat16):
                    out = ring(q, k, v.detach(), None)
            out.float().square().sum().backward()
            outs.append(out)
        tolerances = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(outs[1], outs[0].tensor_split(n, 2)[rank], **tolerances)
        torch.testing.assert_close(
            local.grad, whole.grad.tensor_split(n, 1)[rank], **tolerances
        )


def stages_after_step(
    stage: nn.Module, batch: torch.Tensor, target: torch.Tensor, m: int
) -> Iterator:
    """Yield a copy of the stage after one step with each schedule."""
    gpipe = program("03_model_parallelism/gpipe").gpipe_step
    one_f_one_b = program("03_model_parallelism/one_f_one_b").OneFOneB
    for step in (gpipe, lambda *arguments: one_f_one_b(*arguments).step()):
        tested = copy.deepcopy(stage)
        step(tested, batch, target, m)
        yield tested


def stages(m: int = 3) -> None:
    """Compare the gradients of the stages with one process; the first stage is frozen."""
    rank, p = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(H, H) for _ in range(p)))
    whole[0].requires_grad_(p == 1)
    batch, target = torch.randn(2, ROWS, H)
    F.mse_loss(whole(batch), target).backward()
    stage = copy.deepcopy(whole[rank])
    stage.zero_grad()
    for tested in stages_after_step(stage, batch, target, m):
        for parameter, truth in zip(tested.parameters(), whole[rank].parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, truth.grad)


def stage_of_different_width() -> None:
    with mock.patch.multiple(dist, get_rank=lambda: 0, get_world_size=lambda: 2):
        next(stages_after_step(nn.Linear(H, V), *torch.randn(2, ROWS, H), 1))


def one_f_one_b(width: int, m: int = 1) -> None:
    kind = program("03_model_parallelism/one_f_one_b").OneFOneB
    with mock.patch.multiple(dist, get_rank=lambda: 0, get_world_size=lambda: 2):
        kind(nn.Linear(H, width), *torch.randn(2, ROWS, H), m).step()


def norms() -> None:
    """Test parameters without gradients, frozen ones, and ones of a different dtype."""
    norm = program("03_model_parallelism/clip_over_mesh").norm_over_mesh
    add = program("03_model_parallelism/norm_gradients").sum_over_ranks
    model, n = Model(), dist.get_world_size()
    for change in (freeze, add_unused_layer, use_two_dtypes):
        change(model)
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, i) if p.requires_grad and i % 3 else None
    expected = torch.nn.utils.get_total_norm(
        [p.grad for p in model.parameters() if p.grad is not None]
    )
    torch.testing.assert_close(norm(model, None), expected, check_dtype=False)
    layer = nn.Linear(H, 2)
    layer.bias.requires_grad_(False)
    layer.weight.grad = torch.ones_like(layer.weight)
    add(layer)
    assert layer.bias.grad is None and layer.weight.grad.eq(n).all()


def check_of_equal_models() -> None:
    """Test the check that models are equal: frozen, tied, with two dtypes, and different."""
    drifted = program("02_ddp/bypassed_wrapper").drifted
    check = program("02_ddp/different_models").check_same_model
    torch.manual_seed(0)
    model = Model()
    for change in (tie_and_freeze, use_two_dtypes):
        change(model)
    check(model)
    assert drifted(model) == []
    model.gain.data += dist.get_rank()
    assert drifted(model) == ["gain"] * (dist.get_world_size() > 1)


def synchronized_norm(*shape: int, **options: object) -> None:
    """Compare with torch's layer over all rows: frozen weights, autocast, and a penalty."""
    kind = program("02_ddp/batchnorm").SynchronizedBatchNorm
    tested, truth = (
        kind(H, momentum=0.3, **options).float(),
        nn.BatchNorm1d(H, momentum=0.3).float(),
    )
    tested.weight.requires_grad_(False)
    torch.manual_seed(0)
    rank, n = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(*shape).to(dtype).requires_grad_()
        local = x.detach().tensor_split(n)[rank].clone().requires_grad_()
        y, expected = tested(local), truth(x.float()).to(dtype)
        torch.testing.assert_close(y, expected.tensor_split(n)[rank])
        torch.testing.assert_close(tested.running_var, truth.running_var)
        with_penalty(y.float().sin().sum(), local).backward()
        with_penalty(expected.float().sin().sum(), x).backward()
        tolerances = {"rtol": 0.02, "atol": 1e-3 if dtype == torch.float32 else 0.1}
        torch.testing.assert_close(local.grad, x.grad.tensor_split(n)[rank], **tolerances)
        assert tested.weight.grad is None


def scaler_of_two_optimizers(**resume: float) -> None:
    """Test two optimizers, a frozen and an unused parameter, and a reloaded state."""
    made = []
    for kind in (program("05_mixed_precision/mini_scaler").MiniScaler, torch.amp.GradScaler):
        is_mini = kind.__name__ == "MiniScaler"
        options = {"growth_interval": 2} | ({} if is_mini else {"device": "cpu"})
        scaler = kind(**options)
        torch.manual_seed(0)
        layers = [nn.Linear(H, H).float() for _ in range(3)]
        layers[0].bias.requires_grad_(False)
        optimizers = [SGD(layer.parameters(), lr=0.1, weight_decay=0.1) for layer in layers]
        for step in range(5):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = layers[1](layers[0](torch.ones(2, H, dtype=torch.float32))).square().mean()
            scaler.scale(loss * (1e38 if step == 2 else 1)).backward()
            for optimizer in optimizers[:2]:
                scaler.step(optimizer)
            scaler.update()
            state = scaler.state_dict()
            scaler = kind(**options)
            scaler.load_state_dict(state)
        scale = state["scale"]
        made.append((scale, [p for layer in layers for p in layer.parameters()]))
    assert made[0][0] == made[1][0] != 2.0**16
    torch.testing.assert_close(made[0][1], made[1][1])


def stochastic_adam(dtype: torch.dtype = torch.bfloat16, **options: object) -> None:
    """Test groups, a frozen and an unused parameter, betas, and a reloaded state."""
    kind = program("05_mixed_precision/precisions").StochasticAdam
    models, groups = [nn.Linear(300, 300).to(dtype) for _ in range(2)], []
    models[1].load_state_dict(models[0].state_dict())
    before, truth = models[0].weight.float(), models[1].float()
    for model in models:
        parts = [{"params": [model.weight], "lr": 0.02}, {"params": [model.bias]}]
        groups.append(parts)
    options = {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6} | options
    tested, adam = kind(groups[0], **options), Adam(groups[1], **options)
    for step in range(3):
        gradient = torch.full((300, 300), step - 1.5, dtype=torch.float32)
        models[0].weight.grad, truth.weight.grad = gradient.to(dtype), gradient
        tested.step()
        adam.step()
        state = tested.state_dict()
        tested = kind(groups[0], **options)
        tested.load_state_dict(state)
    moved, expected = models[0].weight.float() - before, truth.weight - before
    torch.testing.assert_close(moved.mean(), expected.mean(), rtol=0.02, atol=1e-4)


def adapters(
    dtype: torch.dtype = torch.float64, autocast: bool = False, width: int = 128
) -> None:
    """Test layers with and without bias, from the meta device, with a loaded state."""
    lora = program("04_zero_and_fsdp/lora")
    with mock.patch.dict(sys.modules, {"lora": lora, "peft": mock.MagicMock()}):
        nf4 = program("04_zero_and_fsdp/peft_lora").NF4Linear
    for kind, bias in [
        (k, b) for k in (nf4, lora.QLoRALinear, lora.LoRALinear) for b in (True, False)
    ]:
        torch.manual_seed(0)
        linear = nn.Linear(width, 7, bias, dtype=dtype)
        options, added = ({}, 0) if kind is nf4 else ({"r": 3, "alpha": 6}, 2)
        tested = kind(linear, **options)
        a, b = (torch.randn(*size, dtype=dtype) / 8 for size in ((3, width), (7, 3)))
        if added:
            tested.load_state_dict({"a": a, "b": b}, strict=False)
        again = kind(nn.Linear(width, 7, bias, "meta", dtype), **options).to_empty(device="cpu")
        again.load_state_dict(tested.state_dict())
        weight = linear.weight.detach()
        if kind is not lora.LoRALinear:
            weight = lora.decode(*lora.encode(weight)).to(dtype)
        x = torch.randn(3, 2, width, dtype=torch.float32 if autocast else dtype)
        local, whole = (x.clone().requires_grad_() for _ in range(2))
        leaves = [a.requires_grad_(), b.requires_grad_()][:added]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = again(local)
            truth = F.linear(whole, weight + added * b @ a, linear.bias)
        for y in (out, truth):
            y.square().mean().backward()
        tolerances = {"rtol": 0.05, "atol": 0.02} if truth.dtype == torch.bfloat16 else {}
        torch.testing.assert_close(out, truth, **tolerances)
        torch.testing.assert_close(local.grad, whole.grad, **tolerances)
        trained = [p.grad for p in again.parameters() if p.requires_grad]
        torch.testing.assert_close(trained, [leaf.grad for leaf in leaves], **tolerances)


def static_step() -> None:
    """Test a frozen and a tied parameter, different batches and rates, and a reloaded state."""
    kind = program("07_memory_and_performance/cuda_graph_step").StaticStep
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    truth, batches = copy.deepcopy(model), torch.randn(4, 2, 3, H)
    tested, adam = kind(model, *batches[0]), Adam(truth.parameters())
    for i, (x, y) in enumerate(batches):
        tested.x.copy_(x)
        tested.y.copy_(y)
        tested.rate.fill_(0.1 / (i + 1))
        adam.param_groups[0]["lr"] = 0.1 / (i + 1)
        tested()
        adam.zero_grad()
        F.mse_loss(truth(x), y).backward()
        adam.step()
        state = tested.optimizer.state_dict()
        tested = kind(model, x, y)
        tested.optimizer.load_state_dict(state)
    torch.testing.assert_close(model.state_dict(), truth.state_dict())


def model_with_cache() -> None:
    """Test a prompt in pieces of different sizes, also in bf16, and its continuation."""
    module = program("09_inference/kv_cache")
    torch.manual_seed(0)
    ids = torch.randint(V, (2, 9))
    for dtype in (torch.float64, torch.bfloat16):
        model, cache, parts = (
            module.CachedModel(V, 12, heads=3, layers=1, context=9),
            None,
            [],
        )
        model.to(dtype)
        for piece in ids.split([4, 1, 3, 1], 1):
            logits, cache = model(piece, cache)
            parts.append(logits)
        tolerances = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(torch.cat(parts, 1), model(ids)[0], **tolerances)
    model.double()
    made = [f(model, ids[:, :3], 6) for f in (module.with_cache, module.without_any_cache)]
    assert torch.equal(*made)


def gathered_linear() -> None:
    """Test with and without bias, under autocast, with tokens in fp32 and bf16."""
    apply = program("03_model_parallelism/activation_formula").GatheredLinear.apply
    torch.manual_seed(0)
    for bias, dtype in ((None, torch.float32), (torch.rand(3), torch.bfloat16)):
        layer = nn.Linear(H, 3, bias is not None).float()
        gradients = []
        for linear in (lambda *arguments: apply(*arguments, None), F.linear):
            x = torch.linspace(-1, 1, 4 * H).view(2, 2, H).to(dtype).requires_grad_()
            layer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                linear(x, layer.weight, layer.bias).square().sum().backward()
            gradients.append([x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(*gradients, rtol=0.02, atol=0.02)


def differentiate_twice(name: str) -> None:
    """Differentiate twice a function that has no second derivative."""
    x, weight = torch.randn(2, H), torch.randn(3, H)
    heads = torch.randn(1, 2, 3, 4, dtype=torch.float32)
    whole = [torch.randn(1, 1, 4, 16, dtype=torch.float32) for _ in "qkv"]
    rows = [torch.randn(5, 8, dtype=torch.float32) for _ in "qkv"]
    fp8 = program("05_mixed_precision/fp8_training")
    scales = {name: fp8.Scale(fp8.E4M3, "current") for name in "xwg"}
    checkpoint = program("07_memory_and_performance/checkpoint").Checkpoint
    ring = program("03_model_parallelism/ring_attention").RingAttention
    loss = program("03_model_parallelism/vocabulary_parallel").VocabularyParallelLoss
    gather = program("03_model_parallelism/context_parallel_api").GatherTokens
    linear = program("03_model_parallelism/activation_formula").GatheredLinear
    zigzag = program("10_flash_attention/ring_flash").ZigzagRing
    tiled = program("10_flash_attention/tiled_attention").TiledAttention
    flash = program("10_flash_attention/memory_peak").Flash
    function, *inputs = {
        "Checkpoint": (checkpoint, torch.sin, True, x),
        "Fp8Product": (fp8.Fp8Product, x, weight, scales),
        "GatherTokens": (gather, heads, None),
        "GatheredLinear": (linear, x[None], weight, None, None),
        "RingAttention": (ring, *whole, None),
        "VocabularyParallelLoss": (loss, x, torch.tensor([1, 2])),
        "ZigzagRing": (zigzag, *whole),
        "TiledAttention": (tiled, *rows, False, 32, 32),
        "Flash": (flash, *rows),
    }[name]
    floats = [y for y in inputs if isinstance(y, torch.Tensor) and y.is_floating_point()]
    for y in floats:
        y.requires_grad_()
    with_penalty(function.apply(*inputs).sin().sum(), *floats).backward()


def checkpoint_function(needs: bool = True) -> None:
    """Test autocast, dropout, and frozen and tied parameters inside of the checkpoint."""
    apply = program("07_memory_and_performance/checkpoint").Checkpoint.apply
    model = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5), nn.Linear(H, H)).float()
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    gradients = []
    for run in (model, lambda x: apply(model, True, x)):
        x = torch.ones(3, H, dtype=torch.float32, requires_grad=needs)
        model.zero_grad()
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            run(x).square().sum().backward()
        gradients.append([x.grad, model[0].weight.grad, model[2].bias.grad])
        assert model[0].bias.grad is None
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def offloaded_activations() -> None:
    """Test every model of CASES, with the tensors that autograd saves in files."""
    offload = program("07_memory_and_performance/offload_activations").Offload
    for case in CASES.values():
        torch.manual_seed(0)
        model = Model()
        case.change(model)
        found = []
        with tempfile.TemporaryDirectory() as folder:
            for to in (contextlib.nullcontext(), offload(model, Path(folder), 1)):
                model.zero_grad()
                with to, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = model(torch.arange(V)[None], scale=0.5)["logits"].square().mean()
                loss.backward()
                found.append(
                    [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
                )
            assert any(Path(folder).iterdir())
        torch.testing.assert_close(*found, rtol=0, atol=0)


def beam_without_end() -> None:
    """Test a model whose continuations never end; compare with a search over all of them."""
    beam = program("09_inference/beam").beam
    torch.manual_seed(0)
    table = torch.randn(V, V).log_softmax(-1)  # the logits of a bigram model
    table[:, 0] = -torch.inf
    prompt = torch.tensor([3, 5])
    found, score = beam(lambda rows: table[rows], prompt, 3, V**2, end=0)
    a, b, c = torch.cartesian_prod(*[torch.arange(V)] * 3).T
    logs = table.log_softmax(-1)
    scores = logs[5, a] + logs[a, b] + logs[b, c]
    assert found.tolist() == [x[scores.argmax()].item() for x in (a, b, c)]
    torch.testing.assert_close(score, scores.max().item())


NO_SECOND_DERIVATIVE = (
    "trying to differentiate twice a function that was marked|.* has no second derivative"
)
MISSING_WAIT = "call wait\\(\\) after each backward"
MODEL_CASES = {  # name → the function, and the beginning of its error message or None
    "HookedDDP: two backwards": (backward_twice(hooked_ddp), MISSING_WAIT),
    "BucketedDDP: two backwards": (backward_twice(bucketed_ddp), MISSING_WAIT),
    "MiniFSDP: checkpoints": (checkpoints_and_units, None),
    "MiniFSDP: a weight of two units": (tied_over_two_units, ".*head.weight are in two units"),
    "MiniFSDP: a unit without tensors": (unit_without_tensors, "a unit returns tensors"),
    "MiniFSDP: parameters()": (parameters_of_shards, None),
    "MiniFSDP: frozen too late": (frozen_after_sharding, "freeze parameters before MiniFSDP"),
    "MiniFSDP: cast too late": (lambda: fsdp_of(Model()).half(), "cast or move the module"),
    "MiniFSDP: a state of a different model": (
        state_of_different_model,
        ".*\\['head.weight', 'head.weights'\\]",
    ),
    "MiniFSDP: a state of a different shape": (
        state_of_different_shape,
        ".*\\['head.weight'\\]",
    ),
    "ColumnParallel, RowParallel, CopyToRanks, SumOverRanks": (linears_in_parallel, None),
    "GatherTokens, ScatterSum": (tokens_in_parallel, None),
    "Exchange, AllToAll": (exchanges, None),
    "ByRows, ByColumns, MeanOfLosses": (tables, None),
    "ByRows, ByColumns: bf16": (lambda: tables(torch.bfloat16), None),
    "ByColumns: a different width": (
        table_of_different_width,
        "2 ranks do not divide the 5 columns",
    ),
    "VocabularyParallelLoss": (loss_over_shards, None),
    "RingAttention, ulysses_attention": (attention_of_all_ranks, None),
    "gpipe_step, OneFOneB": (stages, None),
    "gpipe_step: m does not divide the batch": (lambda: stages(m=5), "5 micro-batches do not"),
    "OneFOneB: m does not divide the batch": (
        lambda: one_f_one_b(H, m=5),
        "5 micro-batches do not",
    ),
    "gpipe_step: a different width": (stage_of_different_width, "every stage but the last"),
    "OneFOneB: a different width": (lambda: one_f_one_b(V), "every stage but the last"),
    "norm_over_mesh, sum_over_ranks": (norms, None),
    "drifted, check_same_model": (check_of_equal_models, None),
    "SynchronizedBatchNorm": (lambda: synchronized_norm(ROWS, H), None),
    "SynchronizedBatchNorm: sequences": (
        lambda: synchronized_norm(ROWS, H, 2),
        "SynchronizedBatchNorm takes",
    ),
    "SynchronizedBatchNorm: options": (
        lambda: synchronized_norm(ROWS, H, affine=False),
        ".*affine",
    ),
}
ONE_RANK_MODEL_CASES = {  # the same for cases that need only one rank
    "MiniScaler": (scaler_of_two_optimizers, None),
    "StochasticAdam": (stochastic_adam, None),
    "StochasticAdam: fp32": (lambda: stochastic_adam(torch.float32), "StochasticAdam takes"),
    "StochasticAdam: decay": (lambda: stochastic_adam(weight_decay=0.1), ".*weight_decay"),
    "LoRALinear, QLoRALinear, DecodedProduct, NF4Linear": (adapters, None),
    "LoRALinear, QLoRALinear: bf16": (lambda: adapters(torch.bfloat16), None),
    "LoRALinear, QLoRALinear: autocast": (lambda: adapters(torch.float32, True), None),
    "QLoRALinear: half a block": (lambda: adapters(width=96), "64 must divide the row length"),
    "GatheredLinear": (gathered_linear, None),
    "StaticStep": (static_step, None),
    "ConcatBlock, CachedModel, with_cache, without_any_cache": (model_with_cache, None),
    "Checkpoint": (checkpoint_function, None),
    "Checkpoint: an input without a gradient": (
        lambda: checkpoint_function(False),
        "the input of a check",
    ),
    "Offload": (offloaded_activations, None),
    "beam": (beam_without_end, None),
}
TWICE_ON_ALL_RANKS = ("RingAttention", "VocabularyParallelLoss", "ZigzagRing")
TWICE_ON_ONE_RANK = (
    "Checkpoint",
    "Flash",
    "Fp8Product",
    "GatherTokens",
    "GatheredLinear",
    "TiledAttention",
)
MODEL_CASES |= {
    f"{name}: twice": (partial(differentiate_twice, name), NO_SECOND_DERIVATIVE)
    for name in TWICE_ON_ALL_RANKS
}
ONE_RANK_MODEL_CASES |= {
    f"{name}: twice": (partial(differentiate_twice, name), NO_SECOND_DERIVATIVE)
    for name in TWICE_ON_ONE_RANK
}


# --- cases with tensors: sizes, dtypes and strides that the programs do not use ---------------

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.01}


def assert_near(
    found: list[torch.Tensor], truth: list[torch.Tensor], dtype: torch.dtype
) -> None:
    for tensor, exact in zip(found, truth, strict=True):
        off = (tensor.double() - exact).norm() / exact.norm()
        assert tensor.dtype == dtype and off < TOLERANCES[dtype], (dtype, off)


def compare_with_sdpa(
    attend: Callable, *q: int, keys: int, causal=False, kinds=tuple(TOLERANCES)
) -> None:
    """Compare output and gradients for q [..., s, d] with SDPA in float64."""
    *batch, s, d = q
    mask = torch.ones(s, keys, dtype=torch.bool).tril(keys - s) if causal else None
    for dtype in kinds:
        torch.manual_seed(0)
        leaves = [torch.randn(*batch, n, d).to(dtype).requires_grad_() for n in (s, keys, keys)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out, truth = attend(*leaves), F.scaled_dot_product_attention(*exact, mask)
        do = torch.randn(*q).to(dtype)
        gradients = torch.autograd.grad(out, leaves, do)
        assert_near(
            [out, *gradients], [truth, *torch.autograd.grad(truth, exact, do.double())], dtype
        )


def tiles_in_pytorch() -> None:
    """Test more queries than keys, and so many keys that a sum in bf16 would stop growing."""
    attend = program("10_flash_attention/tiled_attention").attention
    for causal in (False, True):
        compare_with_sdpa(
            lambda *x, c=causal: attend(*x, c), 2, 20, 24, keys=2048, causal=causal
        )
    q, k = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
    assert attend(q, k, k, True)[:, :2].eq(0).all()
    compare_with_sdpa(program("10_flash_attention/memory_peak").Flash.apply, 150, 24, keys=2048)


def parts_of_keys() -> None:
    part = program("10_flash_attention/lse_gradient").Part.apply
    merge = program("10_flash_attention/merge_lse").merge

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        halves = zip(k.split(4, -2), v.split(4, -2), strict=True)
        return merge(*(part(q, kk, vv, True) for kk, vv in halves))[0]

    compare_with_sdpa(attend, 2, 5, 24, keys=7, kinds=(torch.float64, torch.float32))
    leaves = [torch.randn(n, 3, requires_grad=True) for n in (4, 5, 5)]
    assert torch.autograd.gradgradcheck(lambda *x: part(*x, True), leaves)
    none = torch.zeros(2, 3), torch.full((2, 1), -torch.inf)
    torch.testing.assert_close(merge(none, none), none)


def triton_attention(q: int = 4, v: int = 32, change: Callable = torch.Tensor.float) -> None:
    """Test packed sequences with `q` heads, values of width `v`, and a different dtype."""
    module = program("10_flash_attention/triton_autograd")
    module.FlashAttention.kernels = [
        program("10_flash_attention/triton_forward"),
        program("10_flash_attention/triton_backward"),
    ]
    rest = torch.tensor([0, 1, 12, 20]), True, (16, 16)
    torch.manual_seed(0)
    shapes = (20, q, 32), (20, 2, 32), (20, 2, v)
    leaves = [change(torch.randn(shape)).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = module.FlashAttention.apply(*leaves, *rest)
    truth, do = module.plain(*exact, *rest), torch.randn(20, q, v)
    found = [out, *torch.autograd.grad(out, leaves, do.float(), retain_graph=True)]
    assert_near(found, [truth, *torch.autograd.grad(truth, exact, do)], torch.float32)
    with expect_error(NO_SECOND_DERIVATIVE):
        with_penalty(out.square().sum(), *leaves).backward()


def zigzag_ring() -> None:
    """Test the kernel and the definition that replaces it; the last stride of q is not 1."""
    ring = program("10_flash_attention/ring_flash")
    rank, n = dist.get_rank(), dist.get_world_size()

    def local(x: torch.Tensor) -> torch.Tensor:
        chunks = x.tensor_split(2 * n, -2)
        return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], -2)

    kernel = {"tile_forward": ring.tile_forward, "tile_backward": ring.tile_backward}
    definition = {
        "tile_forward": ring.forward_by_definition,
        "tile_backward": ring.backward_by_definition,
    }
    for dtype, tiles in [(d, t) for d in TOLERANCES for t in (kernel, definition)]:
        torch.manual_seed(0)
        qkv, do = torch.randn(3, 2, 3, 24, 40).to(dtype), torch.randn(2, 3, 24, 40).to(dtype)
        whole = qkv.clone().double().requires_grad_()
        truth = F.scaled_dot_product_attention(*whole, is_causal=True)
        truth.backward(do.double())
        tested = local(qkv).mT.contiguous().requires_grad_()
        with mock.patch.multiple(ring, **tiles):
            out = ring.ZigzagRing.apply(*tested.mT)
            out.backward(local(do))
        assert_near([out, tested.grad.mT], [local(truth), local(whole.grad)], dtype)


def zigzag_of(queries: int, keys: int) -> None:
    q, k = torch.randn(1, 1, queries, 16), torch.randn(1, 1, keys, 16)
    program("10_flash_attention/ring_flash").ZigzagRing.apply(q, k, k)


def conjugates_twice() -> None:
    """Test the functions f and g of five programs with two uses of f, and with a penalty."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def region(x, y, a, b, f=lambda x: x, g=lambda x: x) -> torch.Tensor:
        return (x + g(((f(x) + f(y)) @ a).tanh() @ b)).square().sum()

    for module in (
        program("01_parallelism_strategies/what_is_sent"),
        program("03_model_parallelism/missing_f"),
        program("03_model_parallelism/vocabulary_parallel"),
        program("03_model_parallelism/tensor_parallel_block"),
        program("03_model_parallelism/sequence_parallel"),
    ):
        torch.manual_seed(0)
        whole = [torch.randn(s) for s in ((4, H), (4, H), (H, 2 * n), (2 * n, H))]
        x, y, a, b = whole
        shards = [x, y, a.chunk(n, 1)[rank], b.chunk(n)[rank]]
        leaves, exact = ([t.clone().requires_grad_() for t in ts] for ts in (shards, whole))
        with_penalty(
            region(*leaves, module.CopyToRanks.apply, module.SumOverRanks.apply),
            *leaves[:2],
        ).backward()
        with_penalty(region(*exact), *exact[:2]).backward()
        x, y, a, b = (t.grad for t in exact)
        torch.testing.assert_close(
            [t.grad for t in leaves], [x, y, a.chunk(n, 1)[rank], b.chunk(n)[rank]]
        )


def tokens_twice() -> None:
    """Test operations on split tokens with a penalty, also two exchanges that are inverse."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sequence = program("03_model_parallelism/sequence_parallel")
    counted = program("03_model_parallelism/activation_formula")
    ulysses = program("03_model_parallelism/ulysses").AllToAll.apply
    norm = program("02_ddp/batchnorm").SumOverRanks.apply
    torch.manual_seed(0)
    x, w = torch.randn(2, 4 * n, 3 * n), torch.randn(3 * n, 3 * n)

    for gather, scatter in (
        (sequence.GatherTokens.apply, sequence.ScatterSum.apply),
        (
            lambda x: counted.GatherTokensInGroup.apply(x, None),
            lambda x: counted.ScatterSumInGroup.apply(x, None),
        ),
    ):
        local, exact = x.chunk(n, 1)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        with_penalty(
            (local + scatter(gather(local).tanh() @ w / n)).square().sum(), local
        ).backward()
        with_penalty((exact + exact.tanh() @ w).square().sum(), exact).backward()
        torch.testing.assert_close(local.grad, exact.grad.chunk(n, 1)[rank])
    local, exact = (x[:, None].clone().requires_grad_() for _ in "ab")
    with_penalty(ulysses(ulysses(local, 3, 2).tanh(), 2, 3).square().sum(), local).backward()
    with_penalty(exact.tanh().square().sum(), exact).backward()
    torch.testing.assert_close(local.grad, exact.grad)
    local, exact = (torch.ones(3).requires_grad_() for _ in "ab")
    with_penalty(norm(local).pow(3).sum(), local).backward()
    with_penalty((n * exact).pow(3).sum(), exact).backward()
    torch.testing.assert_close(local.grad, exact.grad)


def attention_by_functions() -> None:
    tiled = program("10_flash_attention/kernel_test").tiled
    compare_with_sdpa(tiled, 2, 5, 24, keys=40, kinds=(torch.float32,))
    attend = program("10_flash_attention/batch_invariance").attend
    compare_with_sdpa(
        lambda *x: attend(*x, 16), 1, 24, keys=40, kinds=(torch.float64, torch.float32)
    )
    q, k, v = torch.randn(40, 24), torch.randn(100, 24), torch.randn(100, 24)
    z = q @ k.T * 24**-0.5
    truth = F.scaled_dot_product_attention(q, k, v)
    out, lse, *_ = program("10_flash_attention/rare_rescaling").attention(
        q, k, v, 8, torch.exp2
    )
    torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse.double(), z.logsumexp(1), rtol=1e-5, atol=1e-5)
    online = program("10_flash_attention/bf16_accumulators").online
    out = online(z, v, torch.float32).double()
    torch.testing.assert_close(out, truth, rtol=0.02, atol=0.01)
    io = program("10_flash_attention/io_complexity")
    q, k, v = torch.randn(3, 60, io.D).float()
    for order in (io.queries_outside, io.keys_outside):
        order(q, k, v, out := torch.empty_like(v), 2048)
        torch.testing.assert_close(out, (q @ k.T).softmax(1) @ v)


def dropout_by_position() -> None:
    """Test more keys than queries, with dropout that depends on the positions."""
    module = program("10_flash_attention/dropout_counter")
    q, k, v = (torch.randn(n, 24).requires_grad_() for n in (10, 100, 100))
    full = module.keep(module.SEED, torch.arange(10), torch.arange(100), 100)
    truth = ((q @ k.T * 24**-0.5).softmax(1) * full) @ v
    out, lse = module.forward(q.detach(), k.detach(), v.detach(), module.keep, 4)
    gradients = module.backward(torch.ones(10, 24), q, k, v, out, lse, module.keep, 7)
    torch.testing.assert_close(
        [out, *gradients], [truth, *torch.autograd.grad(truth.sum(), (q, k, v))]
    )


def documents_and_zeros() -> None:
    orders = program("10_flash_attention/document_balance")
    for order in (orders.contiguous, orders.zigzag, orders.zigzag_per_document):
        shards = order([5, 1], 4)
        assert len(shards) == 4 and torch.cat(shards).sort().values.equal(torch.arange(6))
    zeros = torch.zeros(1, 2, 4, 8)
    assert program("10_flash_attention/incoherent").to_fp8(zeros, 4).eq(0).all()
    assert program("09_inference/eight_bit_cache").per_token(zeros, 127).eq(0).all()


def caches_of_others() -> None:
    """Test a cache of a different length, a ring in bf16, and models of a different size."""
    static = program("09_inference/static_cache").static
    q, k = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 5, 8)
    keys = F.pad(k[:, :, :4], (0, 0, 0, 6))
    out = static(q, k[:, :, 4:], k[:, :, 4:], keys, keys.clone(), torch.tensor([4]))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k))
    cache = program("09_inference/window_and_sinks")
    q, seen = torch.randn(1, 2, 9, 8).bfloat16(), cache.window(9, 3, 1)
    out = cache.ring(q, q, q, 3, 1)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, q, q, seen))
    ids = [1, 5, 2, 7, 3, 1, 4, 1, 5, 9]
    with torch.no_grad():
        chunked = program("09_inference/chunked_prefill")
        model = chunked.CachedCharModel(hidden=24, heads=2)
        engine = chunked.ChunkedSlots(model, 2)
        engine.run(1, ids[:6])
        torch.testing.assert_close(
            engine.run(1, ids[6:]), chunked.without_cache(model, ids)[-1]
        )
        stale = program("09_inference/stale_block")
        model = stale.CachedCharModel(hidden=24, heads=2)
        logits = stale.PrefillPool(model, 4).prefill(ids, careless=False)
        torch.testing.assert_close(logits, stale.without_cache(model, ids)[-1])


def sampled_in_16_bits() -> None:
    """top_p must keep the same tokens as in fp64, and at least one.

    A penalty works in batches.
    """
    for module in (
        program("09_inference/sampling"),
        program("09_inference/sampling_failures"),
    ):
        logits = torch.randn(2, 32000).mul(2).bfloat16()
        count, exact = (
            module.top_p(x, 0.99).isfinite().sum() for x in (logits, logits.double())
        )
        assert abs(count / exact - 1) < 1e-3
        assert module.top_p(logits, 0.0).isfinite().sum(1).tolist() == [1, 1]
    penalty = program("09_inference/sampling").repetition_penalty
    logits, used = torch.randn(2, 9), torch.tensor([[1, 1], [8, 0]])
    rows = [penalty(*row, 1.3) for row in zip(logits, used, strict=True)]
    torch.testing.assert_close(penalty(logits, used, 1.3), torch.stack(rows))


def shards_of_others() -> None:
    """Test different numbers of heads and experts, and a cache that is transferred in fp32."""
    rank, n = dist.get_rank(), dist.get_world_size()
    decode = program("09_inference/tensor_parallel_decode")
    with mock.patch.multiple(decode, HEADS=6 * n, HIDDEN=12 * n):
        weights = decode.draw_weights(torch.device("cpu"))
    whole = weights["layers"][0]
    (qkv, out, up, down), *_ = decode.shard(weights, rank, n)["layers"]
    assert qkv.equal(whole[0].chunk(n, 2)[rank]) and out.equal(whole[1].chunk(n)[rank])
    assert up.equal(whole[2].chunk(n, 1)[rank]) and down.equal(whole[3].chunk(n)[rank])
    wide = program("09_inference/wide_expert_parallel")
    torch.manual_seed(0)
    w = dict(zip(("wide", "narrow"), torch.randn(2, 2 * n, H, H), strict=True))
    w["router"], x = torch.randn(H, 2 * n), torch.randn(5, H)
    gates, chosen = (x @ w["router"]).topk(wide.K)
    every = torch.stack(
        [F.gelu(x @ a) @ b for a, b in zip(w["wide"], w["narrow"], strict=True)], 1
    )
    truth = (gates.softmax(1)[..., None] * every.take_along_dim(chosen[..., None], 1)).sum(1)
    torch.testing.assert_close(wide.Travel(range(2 * rank, 2 * rank + 2))(w, x), truth)
    disaggregated = program("09_inference/disaggregated")
    if n == 2:
        with torch.no_grad():
            model = disaggregated.CachedCharModel().float()  # the same seed on both ranks
            answers, _ = disaggregated.hand_over(model, [[1, 5, 2]])
            answer = disaggregated.decode(model, *disaggregated.prefill(model, [1, 5, 2]))
        assert answers == [answer] * rank


def experts_that_do_not_fit(slots: int, groups: int) -> None:
    program("09_inference/expert_copies").place_by_node([1.0] * 10, 4, slots, 2, groups)


def document_that_does_not_fit() -> None:
    program("10_flash_attention/packing").pack([3, 9], 8)


def checkpoint_elsewhere() -> None:
    apply = program("07_memory_and_performance/checkpoint").Checkpoint.apply
    apply(torch.tanh, True, torch.randn(2, 3, device="meta", requires_grad=True))


TENSOR_CASES = {  # name → the function, and the beginning of its error message or None
    "ZigzagRing": (zigzag_ring, None),
    "ZigzagRing: half a chunk": (lambda: zigzag_of(5, 5), "q, k and v of a rank need"),
    "ZigzagRing: more keys": (lambda: zigzag_of(4, 8), "q, k and v of a rank need"),
    "CopyToRanks, SumOverRanks: twice": (conjugates_twice, None),
    "GatherTokens, ScatterSum, AllToAll: twice": (tokens_twice, None),
    "shard, Travel, hand_over": (shards_of_others, None),
}
ONE_RANK_TENSOR_CASES = {  # the same for cases that need only one rank
    "TiledAttention, Flash": (tiles_in_pytorch, None),
    "Part, merge": (parts_of_keys, None),
    "Checkpoint: a different device": (
        checkpoint_elsewhere,
        "a checkpoint restores the random states",
    ),
    "tiled, attend, attention, online": (attention_by_functions, None),
    "keep, forward, backward": (dropout_by_position, None),
    "contiguous, zigzag, to_fp8, per_token": (documents_and_zeros, None),
    "static, ring, ChunkedSlots, PrefillPool": (caches_of_others, None),
    "top_p, repetition_penalty": (sampled_in_16_bits, None),
    "pack: a long document": (document_that_does_not_fit, "a document has 9 tokens"),
    "copies: too few slots": (lambda: experts_that_do_not_fit(8, 10), "5 experts need a slot"),
    "place_by_node: groups": (lambda: experts_that_do_not_fit(12, 4), "groups must divide"),
}
if importlib.util.find_spec("triton"):
    WIDTH = "attention takes k, v as wide as q"
    ONE_RANK_TENSOR_CASES |= {
        "FlashAttention": (triton_attention, None),
        "FlashAttention: other heads": (lambda: triton_attention(q=3), WIDTH),
        "FlashAttention: narrow values": (lambda: triton_attention(v=8), WIDTH),
        "FlashAttention: fp64": (lambda: triton_attention(change=torch.clone), WIDTH),
    }


def cases() -> Iterator[tuple[str, Callable[[], None], str | None]]:
    """Yield the title, the function and the beginning of the error message of each case."""
    for name, make in WRAPPERS.items():
        for title, case in CASES.items():
            message = EXPECTED_ERRORS.get((name, title))
            yield f"{name}: {title}", lambda m=make, c=case: compare(m, c), message
    others = (
        MODEL_CASES
        | TENSOR_CASES
        | (ONE_RANK_MODEL_CASES | ONE_RANK_TENSOR_CASES if dist.get_world_size() == 1 else {})
    )
    for title, (function, message) in others.items():
        yield title, function, message


def names(title: str) -> list[str]:
    """Return the classes and functions at the beginning of a title."""
    return title.partition(":")[0].split(", ")


@contextlib.contextmanager
def expect_error(sentence: str) -> Iterator[None]:
    """Fail unless the block raises an error whose message starts with this sentence."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        assert re.match(sentence, str(error)), error
    else:
        raise AssertionError("the expected error was not raised")


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    for title, function, message in cases():
        try:
            with expect_error(message) if message else contextlib.nullcontext():
                function()
        except Exception as error:
            print(f"rank {dist.get_rank()}, {title}: {error!r}", flush=True)
            traceback.print_exc()
        dist.barrier()
    if dist.get_rank() == 0:
        print("all cases ran")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
