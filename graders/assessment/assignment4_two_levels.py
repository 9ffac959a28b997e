"""The steps of assignment 4, on four ranks: two nodes of two."""

import functools
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from graders.runner import Group
from graders.tools import Lab, Passes, ask, at_most, before, check

HINTS = {
    "not_all": "dist.new_group is collective: every rank calls it for every group, in one "
    "order, also for groups it does not belong to.",
    "node": "Neighbours share a node: with local = 2 ranks 0 and 1, then 2 and 3.",
    "rail": "A rail has one rank of each node: with local = 2 ranks 0 and 2, then 1 and 3.",
    "between": "More than 1/local of the tensor goes between the nodes: first reduce-scatter "
    "within the node, so that each rank is responsible for a piece.",
    "not_padded": "The tensor's length need not be a multiple of local: pad it.",
    "one_node": "The result is the sum over one node: the pieces must be added up by rails.",
    "twice": "Something is added up more than once. After the reduce-scatter a rank works with "
    "its piece alone.",
    "in_place": "The caller's tensor still has its old values: copy the sum into it.",
    "wire": "What is sent is not bf16.",
    "mean": "The hook returns the mean over all ranks, as fp32, and DDP does not divide again.",
    "no_feedback": "What rounding takes is lost in every step anew: keep it, and add it to the "
    "next gradient before it is rounded.",
    "feedback_scale": "What is kept must be in the scale of the gradient: if you divide before "
    "you round, multiply what was sent by the world size again.",
    "shared": "The buckets share one residual: keep one for each bucket.index().",
    "waits": "The hook waits for its all-reduce, and DDP cannot go on with backward: "
    "async_op=True, and the rest in a callback of the future.",
    "too_often": "Averaged every step, nothing is saved.",
    "when": "With every = 3 the weights are averaged after steps 3, 6 and so on: count "
    "the step before you ask.",
    "never": "After `every` steps the weights still differ: is the mean copied into them?",
    "sum": "The weights are the sum over the ranks: divide.",
    "one_by_one": "One all-reduce for each parameter: put them into one flat tensor.",
    "gradients": "The optimizer must step before the average, or its last step is missing in "
    "the mean.",
    "other": "The numbers fit no common mistake. Compare with one all_reduce, on two ranks.",
}  # fmt: skip
LAB = Lab(HINTS)
step = functools.partial(LAB.step, worlds=(4,))


def on_all(group: Group, fact: str, wanted: Any, hint: str) -> None:
    """Raise `Wrong` unless what each rank reported under this name is what it should be."""
    for found in group.facts(fact):
        check(fact, found, wanted, hint)


# --- 1: groups ----------------------------------------------------------------------------


@step(1, "nodes and rails", "two groups, made by all ranks alike", "make_groups")
def groups(theirs, ours, lesson):
    made = []
    new_group = dist.new_group

    def noted(ranks=None, *args, use_local_synchronization=False, **kwargs):
        if not use_local_synchronization:  # with it, a group is made by its members alone
            made.append(sorted(ranks))

    # a rank alone in its calls would wait for the others: look before any group is made
    dist.new_group = noted
    theirs.make_groups(2)
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, made)
    alike = all(other == made for other in everyone)
    check("all ranks make the same groups in one order", alike, True, "not_all")
    dist.new_group = new_group
    node, rail = map(dist.get_process_group_ranks, theirs.make_groups(2))
    check("right node", node == [[0, 1], [2, 3]][lesson.rank // 2], True, "node")
    check("right rail", rail == [[0, 2], [1, 3]][lesson.rank % 2], True, "rail")


# --- 2: two levels ------------------------------------------------------------------------

SENDING = (
    "all_reduce reduce_scatter_tensor reduce_scatter reduce broadcast all_gather_into_tensor "
    "all_gather all_to_all_single"
)
MISTAKES = {"unchanged": "in_place", "the sum of a node": "one_node", "too much": "twice"}


@step(
    2, "a sum in two levels", "the sum, with half of the bytes between nodes",
    "all_reduce_two_levels",
    crashes={r"[sS]hape|size|divisible|equal|multiple": "not_padded"},
    symmetric=False,  # one rank of a node may do more, and is told that it sends too much
)  # fmt: skip
def two_levels(theirs, ours, lesson):
    node, rail = ours.make_groups(2)
    rail_numel = [0]

    def count(*args, **kwargs):
        given = (*args, *kwargs.values())
        if not any(value is node for value in given):
            tensors = (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))
            rail_numel[0] += next(tensors).numel()

    for name in SENDING.split():
        before(dist, name, count)
    for n in (64, 65):
        one = torch.arange(n) + 1.0
        truth, within = 10 * one, one * (3 if lesson.rank < 2 else 7)
        own, flat = (one * (lesson.rank + 1) for _ in range(2))
        rail_numel[0] = 0
        with lesson.phase("sum"):
            theirs.all_reduce_two_levels(flat, node, rail)
        found = "too much" if (flat > truth).any() else "other"
        known = {"the sum": truth, "unchanged": own, "the sum of a node": within}
        found = next((name for name, t in known.items() if torch.equal(flat, t)), found)
        lesson.fact(f"{n} numbers become", found)
        lesson.fact(f"of {n} numbers, sent between nodes", rail_numel[0])


@two_levels.judge
def _(group):
    found = group.facts("64 numbers become")
    for mistake, hint in MISTAKES.items():
        ask(mistake not in found, f"64 numbers become: {mistake}; it should be the sum", hint)
    on_all(group, "64 numbers become", "the sum", "other")
    on_all(group, "65 numbers become", "the sum", "not_padded")
    on_all(group, "of 64 numbers, sent between nodes", at_most(32), "between")
    on_all(group, "of 65 numbers, sent between nodes", at_most(33), "between")


# --- 3: a hook ----------------------------------------------------------------------------


class Bucket:
    def __init__(self, gradient: torch.Tensor, index: int):
        self.gradient, self.number = gradient, index

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return self.number


@step(
    3, "bf16 that forgets nothing", "half of the bytes, and 8 steps without drift",
    "bf16_hook", own="bf16_hook Feedback",
)  # fmt: skip
def hook(theirs, ours, lesson):
    kinds, waits, sent, means = set(), [], torch.zeros(2, 256), []
    real, now = dist.all_reduce, [0]

    def counted(tensor, *args, **kwargs):
        kinds.add(str(tensor.dtype).removeprefix("torch."))
        waits.append(not kwargs.get("async_op", False))
        sent[now[0]] += tensor.float()
        work = real(tensor, *args, **kwargs)
        if work is not None:
            wait = work.wait
            work.wait = lambda *args: waits.append(True) or wait(*args)
        return work

    dist.all_reduce = counted
    gradients = torch.randn(2, 256, generator=torch.Generator().manual_seed(lesson.rank))
    truth = gradients.clone()
    real(truth)
    truth /= 4

    def error(found, wanted) -> float:
        return ((found - wanted).norm() / wanted.norm()).item()

    def drift(*buckets: int) -> float:
        """How far the sum of what was sent is from that of 8 equal gradients."""
        state = theirs.Feedback()
        sent.zero_()
        for _ in range(8):
            for i in buckets:
                now[0] = i
                mean = theirs.bf16_hook(state, Bucket(gradients[i].clone(), i)).wait()
                means.append(mean[0] if isinstance(mean, (list, tuple)) else mean)
        wanted = 8 * gradients[list(buckets)]
        found = sent[list(buckets)]
        return min(error(found, wanted), error(4 * found, wanted))  # divided before, or after

    one, two = drift(0), drift(0, 1)
    check("sent as", sorted(kinds), ["bfloat16"], "wire")
    check("the hook waits", any(waits), False, "waits")
    kept = Passes("not that of rounding", lambda e: not 5e-4 < e < 1e-2)
    check("drift of one bucket in 8 steps", one, kept, "no_feedback")
    check("drift of one bucket in 8 steps", one, at_most(5e-4), "feedback_scale")
    check("drift of two buckets in 8 steps", two, at_most(5e-4), "shared")
    relative = error(means[-1].float(), truth[1])
    check("relative error of the mean", relative, at_most(0.02), "mean")
    check("dtype of the mean", str(means[-1].dtype), "torch.float32", "mean")


# --- 4: local SGD -------------------------------------------------------------------------


@step(4, "local SGD", "one collective for `every` steps, and the mean of all weights",
      "LocalSGD")  # fmt: skip
def local(theirs, ours, lesson):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = theirs.LocalSGD(optimizer, every=3)
    start, moved = model[0].weight[0, 0].item(), []
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, float(lesson.rank + 1))
        with lesson.phase(f"step {step + 1}"):
            trainer.step()
        moved.append(round(model[0].weight[0, 0].item() - start, 3))
    lesson.fact("moved", moved)


@local.judge
def _(group):
    # rank r moves by -0.5 (r + 1) in each step alone; the mean of the ranks is -1.25
    calls = [c for c in group.ranks[0].calls if c.phase.startswith("step")]
    phases = sorted({c.phase for c in calls})
    hint = "too_often" if len(phases) > 2 else "when"
    right = phases in (["step 3", "step 6"], [])
    ask(right, f"the ranks talk in {', '.join(phases)}, every = 3", hint)
    *_, after, then, _, _ = zip(*group.facts("moved"), strict=True)
    apart = max(after) - min(after)
    hint = "gradients" if abs(apart - 1.5) < 1e-3 and phases else "never"
    ask(apart <= 1e-3, f"after step 3 the weights have moved by {[*after]}", hint)
    mean = f"after step 3 the mean has moved by {after[0]}, not -3.75"
    ask(abs(after[0] + 3.75) <= 1e-2, mean, "sum")
    ask(len(calls) <= 2, f"{len(calls)} collectives for two averages", "one_by_one")
    alone = tuple(round(-3.75 - 0.5 * (r + 1), 3) for r in range(4))
    ask(then == alone, f"after step 4 the weights have moved by {[*then]}", "other")
