"""The steps of assignment 4, on four ranks: two nodes of two."""

from collections.abc import Callable

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
from graders._compare import below, borrow, finished, hold, that
from graders.runner import Group, Lesson, Step, Wrong
from torch import nn
from torch.utils._pytree import tree_leaves

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
OURS = finished("assignment4_two_levels")
SOLVED = "make_groups all_reduce_two_levels bf16_hook LocalSGD.step LocalSGD.average"


def other_than(word: str) -> that:
    return that("the sum", lambda found: found != word)


def probe_groups(lesson: Lesson) -> None:
    made = []
    new_group = dist.new_group

    def noted(ranks=None, *args, use_local_synchronization=False, **kwargs):
        if not use_local_synchronization:  # with it, a group is made by its members alone
            made.append(sorted(ranks))

    # a rank alone in its calls would wait for the others: look before any group is made
    dist.new_group = noted
    lesson.module.make_groups(2)
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, made)
    same = all(other == made for other in everyone)
    lesson.fact("all ranks make the same groups in one order", same)
    if not same:
        return
    dist.new_group = new_group
    node, rail = lesson.module.make_groups(2)
    found = [dist.get_process_group_ranks(group) for group in (node, rail)]
    lesson.fact("right node", found[0] == [[0, 1], [2, 3]][lesson.rank // 2])
    lesson.fact("right rail", found[1] == [[0, 2], [1, 3]][lesson.rank % 2])


def probe_two_levels(lesson: Lesson) -> None:
    borrow(lesson.module, OURS, SOLVED, "all_reduce_two_levels")
    node, rail = OURS.make_groups(2)
    rail_numel = [0]
    for name in ("all_reduce", "reduce_scatter_tensor", "reduce_scatter", "reduce", "broadcast",
                 "all_gather_into_tensor", "all_gather", "all_to_all_single"):  # fmt: skip
        real = getattr(dist, name)

        def counted(*args, real=real, **kwargs):
            given = (*args, *kwargs.values())
            if not any(value is node for value in given):
                tensors = (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))
                rail_numel[0] += next(tensors).numel()
            return real(*args, **kwargs)

        setattr(dist, name, counted)
    for n in (64, 65):
        mine = (torch.arange(n) + 1.0) * (lesson.rank + 1)
        truth = (torch.arange(n) + 1.0) * 10
        within = (torch.arange(n) + 1.0) * (3 if lesson.rank < 2 else 7)
        before, flat = mine.clone(), mine.clone()
        rail_numel[0] = 0
        lesson.module.all_reduce_two_levels(flat, node, rail)
        found = "other"
        if torch.equal(flat, truth):
            found = "the sum"
        elif torch.equal(flat, before):
            found = "unchanged"
        elif torch.equal(flat, within):
            found = "the sum of a node"
        elif (flat > truth).any():
            found = "too much"
        lesson.fact(f"{n} numbers become", found)
        lesson.fact(f"of {n} numbers, sent between nodes", rail_numel[0])


class Bucket:
    def __init__(self, gradient: torch.Tensor, index: int):
        self.gradient, self.number = gradient, index

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return self.number


def probe_hook(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "bf16_hook")
    kinds, waits, sent = set(), [], torch.zeros(2, 256)
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
        state = module.Feedback()
        sent.zero_()
        for _ in range(8):
            for i in buckets:
                now[0] = i
                mean = module.bf16_hook(state, Bucket(gradients[i].clone(), i)).wait()
                mean = mean[0] if isinstance(mean, (list, tuple)) else mean
                lesson.fact("relative error of the mean", error(mean.float(), truth[i]))
                lesson.fact("dtype of the mean", str(mean.dtype))
        wanted = 8 * gradients[list(buckets)]
        found = sent[list(buckets)]
        return min(error(found, wanted), error(4 * found, wanted))  # divided before, or after

    lesson.fact("drift of one bucket in 8 steps", drift(0))
    lesson.fact("drift of two buckets in 8 steps", drift(0, 1))
    lesson.fact("sent as", sorted(kinds))
    lesson.fact("the hook waits", any(waits))


def probe_local(lesson: Lesson) -> None:
    module = lesson.module
    borrow(module, OURS, SOLVED, "LocalSGD.step LocalSGD.average")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = module.LocalSGD(optimizer, every=3)
    start = [p.detach().clone() for p in model.parameters()]
    states = []
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, float(lesson.rank + 1))
        with lesson.phase(f"step {step + 1}"):
            trainer.step()
        with torch.no_grad():
            moved = model[0].weight[0, 0].item() - start[0][0, 0].item()
        states.append(round(moved, 3))
    lesson.fact("moved", states)


def judge_local(group: Group, right: Callable[[str], None]) -> None:
    # rank r moves by -0.5 (r + 1) in each step alone; the mean of the ranks is -1.25
    moved = group.facts("moved")
    calls = [c for c in group.ranks[0].calls if c.phase.startswith("step")]
    phases = sorted({c.phase for c in calls})
    if phases not in (["step 3", "step 6"], []):
        hint = "too_often" if len(phases) > 2 else "when"
        raise Wrong(f"the ranks talk in {', '.join(phases)}, every = 3", HINTS[hint])
    after = [m[2] for m in moved]
    if abs(max(after) - min(after) - 1.5) < 1e-3 and phases:
        what = f"after step 3 the weights have moved by {after}"
        raise Wrong(what, HINTS["gradients"])
    if max(after) - min(after) > 1e-3:
        raise Wrong(f"after step 3 the weights have moved by {after}", HINTS["never"])
    if abs(after[0] + 3.75) > 1e-2:
        what = f"after step 3 the mean has moved by {after[0]}, not -3.75"
        raise Wrong(what, HINTS["sum"])
    if len(calls) > 2:
        raise Wrong(f"{len(calls)} collectives for two averages", HINTS["one_by_one"])
    if [m[3] for m in moved] != [round(-3.75 - 0.5 * (r + 1), 3) for r in range(4)]:
        what = f"after step 4 the weights have moved by {[m[3] for m in moved]}"
        raise Wrong(what, HINTS["other"])


def step(number: int, title: str, proves: str, probe, uses: str, judge, **more) -> Step:
    return Step(number, title, proves, probe, judge, tuple(uses.split()), (4,), **more)


STEPS = [
    step(
        1, "nodes and rails", "two groups, made by all ranks alike", probe_groups,
        "make_groups",
        hold(
            HINTS,
            ("all ranks make the same groups in one order", True, "not_all"),
            ("right node", True, "node"),
            ("right rail", True, "rail"),
        ),
    ),
    step(
        2, "a sum in two levels", "the sum, with half of the bytes between nodes",
        probe_two_levels, "all_reduce_two_levels",
        hold(
            HINTS,
            ("64 numbers become", other_than("unchanged"), "in_place"),
            ("64 numbers become", other_than("the sum of a node"), "one_node"),
            ("64 numbers become", other_than("too much"), "twice"),
            ("64 numbers become", "the sum", "other"),
            ("65 numbers become", "the sum", "not_padded"),
            ("of 64 numbers, sent between nodes", below(32), "between"),
            ("of 65 numbers, sent between nodes", below(33), "between"),
        ),
        crashes=((r"[sS]hape|size|divisible|equal|multiple", HINTS["not_padded"]),),
        symmetric=False,  # one rank of a node may do more, and is told that it sends too much
    ),
    step(
        3, "bf16 that forgets nothing", "half of the bytes, and 8 steps without drift",
        probe_hook, "bf16_hook",
        hold(
            HINTS,
            ("sent as", ["bfloat16"], "wire"),
            ("the hook waits", False, "waits"),
            ("drift of one bucket in 8 steps",
             that("not that of rounding", lambda e: not 5e-4 < e < 1e-2), "no_feedback"),
            ("drift of one bucket in 8 steps", below(5e-4), "feedback_scale"),
            ("drift of two buckets in 8 steps", below(5e-4), "shared"),
            ("relative error of the mean", below(0.02), "mean"),
            ("dtype of the mean", "torch.float32", "mean"),
        ),
    ),
    step(
        4, "local SGD", "one collective for `every` steps, and the mean of all weights",
        probe_local, "LocalSGD", judge_local,
    ),
]  # fmt: skip
