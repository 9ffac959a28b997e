"""The steps of assignment 4, on four ranks: two nodes of two."""

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from graders.dsl import (
    Lab,
    allclose,
    at_most,
    call_before,
    matching_hint,
    requested_groups,
    require,
    require_equal,
    show,
)
from graders.protocol import Group

LAB = Lab()
step = functools.partial(LAB.step, world_sizes=(4,))


def on_all(group: Group, fact: str, wanted: Any, hint: str) -> None:
    """Raise `Wrong` unless what each rank reported under this name is what it should be."""
    for found in group.facts(fact):
        require_equal(fact, found, wanted, hint)


# --- 1: groups ----------------------------------------------------------------------------


@step(1, "nodes and rails", "two groups, made by all ranks alike", "make_groups")
def groups(submission, reference, lesson):
    world, rank = lesson.world, lesson.rank
    for local in (2, world, 1):  # two nodes, one node, and nodes of one rank
        # a rank alone in its calls would wait for the others: look before any group is made
        wanted = requested_groups(submission, lambda n=local: submission.make_groups(n))
        everyone: list = [None] * world
        dist.all_gather_object(everyone, wanted)
        for other, calls in enumerate(everyone):
            what = f"with local = {local}, rank 0 makes the groups {everyone[0]}, and rank"
            require(calls == everyone[0], f"{what} {other} makes {calls}", "not_all")
        for ranks in wanted:
            what = f"with local = {local}, a group has the ranks {ranks}, and there are {world}"
            require(max(ranks) < world, what, "outside")
        made = submission.make_groups(local)
        pair = isinstance(made, (tuple, list)) and len(made) == 2
        what = f"make_groups({local}) returns {made if made is None else 'one value'}"
        require(pair, f"{what} on rank {rank}", "two_groups")
        first = rank // local * local
        for name, group, true in (
            ("node", made[0], list(range(first, first + local))),
            ("rail", made[1], list(range(rank % local, world, local))),
        ):
            is_group = isinstance(group, dist.ProcessGroup)
            found = sorted(dist.get_process_group_ranks(group)) if is_group else show(group)
            what = f"make_groups({local}) returns a {type(group).__name__} as the {name}"
            outside = group == dist.GroupMember.NON_GROUP_MEMBER
            require(is_group or outside, f"{what}, and not a process group", "two_groups")
            found = "a group to which the rank does not belong" if outside else found
            require_equal(f"with local = {local}, the {name} of rank {rank}", found, true, name)


# --- 2: two levels ------------------------------------------------------------------------

SENDING = (
    "all_reduce reduce_scatter_tensor reduce_scatter reduce broadcast all_gather_into_tensor "
    "all_gather all_to_all_single"
)
MISTAKES = {
    "unchanged": "in_place", "the sum of a node": "one_node", "too much": "twice",
    "the mean": "not_sum", "half of the sum": "not_sum", "not waited for": "not_waited",
    (ONE_PIECE := "the sum in one piece only"): "not_gathered",
}  # fmt: skip
REDUCES, GATHERS = re.compile("reduce_scatter"), re.compile("all_gather|all_to_all|broadcast")
SIZES = r"[sS]hape|size|divisible|equal|multiple"


@step(
    2, "a sum in two levels", "the sum, with half of the bytes between nodes",
    "all_reduce_two_levels",
    crashes={SIZES: "not_padded"},
    symmetric=False,  # one rank of a node may do more, and is told that it sends too much
)  # fmt: skip
def two_levels(submission, reference, lesson):
    node, rail = reference.make_groups(2)
    rail_numel = [0]

    def count(*args, **kwargs):
        given = (*args, *kwargs.values())
        if not any(value is node for value in given):
            tensors = (t for t in tree_leaves(given) if isinstance(t, torch.Tensor))
            rail_numel[0] += next(tensors).numel()

    for name in SENDING.split():
        call_before(dist, name, count)
    for n in (64, 65):
        one = torch.arange(n) + 1.0
        truth, within = 10 * one, one * (3 if lesson.rank < 2 else 7)
        own, flat = (one * (lesson.rank + 1) for _ in range(2))
        rail_numel[0] = 0
        with lesson.phase("sum"):
            try:
                result = submission.all_reduce_two_levels(flat, node, rail)
            except RuntimeError as error:
                fits = n == 65 or not re.search(SIZES, str(error))
                what = f"with {n} numbers, a collective gets tensors whose sizes do not fit"
                require(fits, what, "piece_size")
                raise
        known = {"the sum": truth, "unchanged": own, "the sum of a node": within}
        known |= {"the mean": truth / lesson.world, "half of the sum": truth / 2}
        names = {call.name for call in lesson.calls if call.phase == "sum"}
        found = next((name for name, t in known.items() if torch.equal(flat, t)), None)
        if found is None:
            found = "too much" if (flat > truth).any() else "something else"
            pieces = zip(flat.tensor_split(2), truth.tensor_split(2), strict=True)
            if [torch.equal(*each) for each in pieces].count(True) == 1:
                found = ONE_PIECE
        elif found == "unchanged" and any(map(REDUCES.match, names)) and result is None:
            found = found if any(map(GATHERS.match, names)) else ONE_PIECE
        calls = [c for c in lesson.calls if c.phase == "sum" and c.name == "all_reduce"]
        if found != "the sum" and any(c.asynchronous and not c.returned for c in calls):
            found = "not waited for"
        lesson.fact(f"{n} numbers become", found)
        lesson.fact(f"of {n} numbers, sent between nodes", rail_numel[0])
    node, rail = reference.make_groups(lesson.world)  # one node of four ranks
    flat = (torch.arange(8) + 1.0) * (lesson.rank + 1)
    try:
        submission.all_reduce_two_levels(flat, node, rail)
    except RuntimeError as error:
        if not re.search(SIZES, str(error)):
            raise
    lesson.fact("on one node of 4 ranks, the numbers become the sum", allclose(flat, truth[:8]))


@two_levels.judge
def _(group):
    found = group.facts("64 numbers become")
    for mistake, hint in MISTAKES.items():
        require(
            mistake not in found, f"64 numbers become {mistake}; it should be the sum", hint
        )
    on_all(group, "64 numbers become", "the sum", "other")
    on_all(group, "65 numbers become", "the sum", "not_padded")
    sent = max(group.facts("of 64 numbers, sent between nodes"))
    padded = f"of 64 numbers, a rank sends {sent} between the nodes; 32 are enough"
    require(sent != 33, padded, "padded_always")
    on_all(group, "of 64 numbers, sent between nodes", at_most(32), "between")
    on_all(group, "of 65 numbers, sent between nodes", at_most(33), "between")
    on_all(group, "on one node of 4 ranks, the numbers become the sum", True, "piece_size")


# --- 3: a hook ----------------------------------------------------------------------------


class Bucket:
    def __init__(self, gradient: torch.Tensor, index: int):
        self.gradient, self.number = gradient, index

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return self.number


class Waits:
    """Whether something waited, while the hook was running, for a message or a future."""

    def __init__(self) -> None:
        self.inside, self.found, self.callbacks = False, False, 0


def watch_waits() -> Waits:
    """Notice waits of this thread. A callback may wait for its future, which is complete."""
    waits, thread = Waits(), threading.get_ident()
    then = torch._C.Future.then

    def watched(real: Callable) -> Callable:
        def wait(self, *args: Any) -> Any:
            if waits.inside and not waits.callbacks and threading.get_ident() == thread:
                waits.found = True
            return real(self, *args)

        return wait

    def noted_then(future: torch.futures.Future, callback: Callable) -> torch.futures.Future:
        def call(done: torch.futures.Future) -> Any:
            mine = threading.get_ident() == thread
            waits.callbacks += mine
            try:
                return callback(done)
            finally:
                waits.callbacks -= mine

        return then(future, call)

    torch._C.Future.then = noted_then
    for kind in (torch._C.Future, dist.Work):
        kind.wait = watched(kind.wait)
    return waits


@step(
    3, "bf16 that forgets nothing", "half of the bytes, and 8 steps without drift",
    "bf16_hook", own="bf16_hook Feedback",
)  # fmt: skip
def hook(submission, reference, lesson):
    kinds, sent, means, firsts = set(), torch.zeros(2, 256), [], []
    now, waits = [0], watch_waits()
    real = dist.ProcessGroup.allreduce

    def counted(group, tensors, *args, **kwargs):
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        if not waits.inside:
            return real(group, tensors, *args, **kwargs)
        kinds.add(str(tensor.dtype).removeprefix("torch."))
        sent[now[0]] += tensor.float()
        waits.inside = False  # the recorder calls dist.all_reduce, which comes here again
        try:
            return real(group, tensors, *args, **kwargs)
        finally:
            waits.inside = True

    dist.ProcessGroup.allreduce = counted
    gradients = torch.randn(2, 256, generator=torch.Generator().manual_seed(lesson.rank))
    truth = gradients.clone()
    dist.all_reduce(truth)
    truth /= 4

    def error(found, wanted) -> float:
        return ((found - wanted).norm() / wanted.norm()).item()

    def drift(*buckets: int) -> float:
        """How far the sum of what was sent is from that of 8 equal gradients."""
        state = submission.Feedback()
        sent.zero_()
        for again in range(8):
            for i in buckets:
                now[0], waits.inside = i, True
                future = submission.bf16_hook(state, Bucket(gradients[i].clone(), i))
                waits.inside = False
                kind = type(future).__name__
                what = f"the hook returns {'None' if future is None else f'a {kind}'}"
                require(isinstance(future, torch._C.Future), what, "future")
                mean = future.wait()
                means.append(mean[0] if isinstance(mean, (list, tuple)) else mean)
                if again == i == 0:
                    firsts.append(sent[0].clone())
        wanted = 8 * gradients[list(buckets)]
        found = sent[list(buckets)]
        return min(error(found, wanted), error(4 * found, wanted))  # divided before, or after

    def mistaken(residual: Callable) -> float:
        """The drift if what is kept is this, of (gradient, wanted, sent)."""
        left, total = torch.zeros(256), torch.zeros(256)
        for _ in range(8):
            wanted = gradients[0] + left
            rounded = wanted.bfloat16().float()
            left, total = residual(gradients[0], wanted, rounded), total + rounded
        return error(total, 8 * gradients[0])

    one, two = drift(0), drift(0, 1)
    require(kinds, "the hook calls no all-reduce that the checker sees", "not_sent")
    require_equal("the hook sends tensors of", sorted(kinds), ["bfloat16"], "wire")
    require(not waits.found, "the hook waits before it returns", "waits")
    known = {
        "no_feedback": mistaken(lambda g, wanted, rounded: 0 * g),
        "feedback_of_gradient": mistaken(lambda g, wanted, rounded: g - rounded),
    }
    what = (
        "after 8 steps, the sum of what was sent for {} differs from the sum of the gradients"
    )
    what += " by a relative error of {:.1e}; with feedback, it is less than 5e-04"
    hint = matching_hint(one, known, 1e-3, "feedback_scale")
    require(one <= 5e-4, what.format("one bucket", one), hint)
    require(two <= 5e-4, what.format("two buckets", two), "shared")
    what = "the first call with a new Feedback() sends other numbers than in the run before"
    require(torch.equal(*firsts), what, "state")
    relative = error(means[-1].float(), truth[1])
    require_equal("the relative error of the mean", relative, at_most(0.02), "mean")
    require_equal("the dtype of the mean", str(means[-1].dtype), "torch.float32", "mean")


# --- 4: local SGD -------------------------------------------------------------------------


@step(4, "local SGD", "one collective for `every` steps, and the mean of all weights",
      "LocalSGD", world_sizes=(4, 2))  # fmt: skip
def local(submission, reference, lesson):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.5)
    trainer = submission.LocalSGD(optimizer, every=3)
    firsts, bias = [part.weight.flatten()[0] for part in model], model[0].bias.detach().clone()
    start = torch.stack(firsts).tolist()
    moved: list[list[float]] = [[], []]  # of the two groups of parameters
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, float(lesson.rank + 1))
        with lesson.phase(f"step {step + 1}"):
            trainer.step()
        for part, place, was in zip(moved, model, start, strict=True):
            part.append(round(place.weight.flatten()[0].item() - was, 3))
        if step == 2:
            lesson.fact("bias moved", round((model[0].bias - bias)[0].item(), 3))
    lesson.fact("moved", moved[0])
    lesson.fact("second group moved", moved[1])
    lesson.fact("start", start[0])


@local.judge
def _(group):
    # rank r moves by -0.5 (r + 1) in each step alone; the mean of n ranks is -0.25 (n + 1)
    n = group.world
    due = 0.75 * (n + 1)
    calls = [c for c in group.ranks[0].calls if c.phase.startswith("step")]
    phases = sorted({c.phase for c in calls})
    hint = "too_often" if len(phases) > 2 else "when"
    right = phases in (["step 3", "step 6"], [])
    require(right, f"the ranks call collectives in {', '.join(phases)}, and every = 3", hint)
    _, _, after, then, _, _ = zip(*group.facts("moved"), strict=True)
    apart, start = max(after) - min(after), group.facts("start")[0]
    idle = all(abs(moved) < 1e-3 for moved in after)
    require(not idle, "after step 3 no weight has moved", "no_step")
    hint = "gradients" if abs(apart - 0.5 * (n - 1)) < 1e-3 and phases else "never"
    require(apart <= 1e-3, f"after step 3 the weights have moved by {[*after]}", hint)
    mean = f"after step 3 the mean of the weights has moved by {after[0]}; it should be {-due}"
    alone = [-1.5 * (rank + 1) for rank in range(n)]
    known = {
        "sum": (n - 1) * start - n * due, "one_rank": alone,
        "of_gradients": (n + 1) / 2 - start,
    }  # fmt: skip
    require(abs(after[0] + due) <= 1e-2, mean, matching_hint(after[0], known, 1e-2))
    biases = group.facts("bias moved")
    what = f"after step 3, a bias has moved by {biases}; it should be {-due} on all ranks"
    require(all(abs(each + due) <= 1e-2 for each in biases), what, "all_weights")
    second = [moved[2] for moved in group.facts("second group moved")]
    what = "after step 3, the weights of the second group of parameters have moved by"
    require(all(abs(each + due) <= 1e-2 for each in second), f"{what} {second}", "all_groups")
    require(len(calls) <= 2, f"two averages call {len(calls)} collectives", "one_by_one")
    alone = tuple(round(-due - 0.5 * (r + 1), 3) for r in range(n))
    require(then == alone, f"after step 4 the weights have moved by {[*then]}", "other")
