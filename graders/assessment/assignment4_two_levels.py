"""The steps of assignment 4. They run on four ranks, which form two nodes of two ranks."""

import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # imported here once, because optimizers would import it in every rank
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
    """Call `require_equal` for the value that each rank reported as this fact."""
    for found in group.facts(fact):
        require_equal(fact, found, wanted, hint)


# --- 1: groups ----------------------------------------------------------------------------


@step(1, "nodes and rails", "two groups, which all ranks make in the same order", "make_groups")
def groups(submission, reference, lesson):
    world, rank = lesson.world, lesson.rank
    for local in (2, world, 1):  # two nodes, one node, and nodes of one rank
        # ranks that make different groups would wait forever, so compare the requests first
        requests = requested_groups(submission, lambda n=local: submission.make_groups(n))
        all_requests: list = [None] * world
        dist.all_gather_object(all_requests, requests)
        for other, calls in enumerate(all_requests):
            what = f"with local = {local}, rank 0 makes the groups {all_requests[0]}, and rank"
            require(calls == all_requests[0], f"{what} {other} makes {calls}", "not_all")
        for ranks in requests:
            what = f"with local = {local}, a group has the ranks {ranks}, but there are only "
            require(max(ranks) < world, f"{what}{world} ranks", "outside")
        made = submission.make_groups(local)
        is_pair = isinstance(made, (tuple, list)) and len(made) == 2
        kind = "None" if made is None else f"a {type(made).__name__}"
        what = f"make_groups({local}) returns {kind} on rank {rank}, and not two values"
        require(is_pair, what, "two_groups")
        first = rank // local * local
        for name, group, true in (
            ("node", made[0], list(range(first, first + local))),
            ("rail", made[1], list(range(rank % local, world, local))),
        ):
            is_group = isinstance(group, dist.ProcessGroup)
            found = sorted(dist.get_process_group_ranks(group)) if is_group else show(group)
            what = f"make_groups({local}) returns a {type(group).__name__} as the {name}"
            is_outside = group == dist.GroupMember.NON_GROUP_MEMBER
            require(is_group or is_outside, f"{what}, and not a process group", "two_groups")
            found = "a group to which the rank does not belong" if is_outside else found
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
    symmetric=False,  # if one rank of a node sends more, the verdict is that it sends too much
)  # fmt: skip
def two_levels(submission, reference, lesson):
    node, rail = reference.make_groups(2)
    rail_numel = [0]

    def count(*args, **kwargs):
        arguments = (*args, *kwargs.values())
        if not any(value is node for value in arguments):
            tensors = (t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor))
            rail_numel[0] += next(tensors).numel()

    for name in SENDING.split():
        call_before(dist, name, count)
    for n in (64, 65):
        one = torch.arange(n) + 1.0
        truth, node_sum = 10 * one, one * (3 if lesson.rank < 2 else 7)
        original, flat = (one * (lesson.rank + 1) for _ in range(2))
        rail_numel[0] = 0
        with lesson.phase("sum"):
            try:
                result = submission.all_reduce_two_levels(flat, node, rail)
            except RuntimeError as error:
                sizes_fit = n == 65 or not re.search(SIZES, str(error))
                what = f"with {n} numbers, a collective gets tensors whose sizes do not fit"
                require(sizes_fit, what, "piece_size")
                raise
        known = {"the sum": truth, "unchanged": original, "the sum of a node": node_sum}
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
    """A bucket of gradients, with the two methods of torch's `GradBucket` that a hook needs."""

    def __init__(self, gradient: torch.Tensor, index: int):
        self.gradient, self.number = gradient, index

    def buffer(self) -> torch.Tensor:
        return self.gradient

    def index(self) -> int:
        return self.number


class WaitRecorder:
    """Records whether the hook waits for a message or a future while it runs."""

    def __init__(self) -> None:
        self.is_in_hook = False  # the hook is running
        self.has_waited = False
        self.callbacks = 0  # the number of callbacks that are running in this thread


def record_waits() -> WaitRecorder:
    """Record the waits of this thread, and return the recorder.

    A callback may wait for its future, because this future is complete.
    """
    recorder, thread = WaitRecorder(), threading.get_ident()
    then = torch._C.Future.then

    def with_recorder(real: Callable) -> Callable:
        def wait(self, *args: Any) -> Any:
            in_thread = threading.get_ident() == thread
            if recorder.is_in_hook and not recorder.callbacks and in_thread:
                recorder.has_waited = True
            return real(self, *args)

        return wait

    def recorded_then(future: torch.futures.Future, callback: Callable) -> torch.futures.Future:
        def call(done: torch.futures.Future) -> Any:
            in_thread = threading.get_ident() == thread
            recorder.callbacks += in_thread
            try:
                return callback(done)
            finally:
                recorder.callbacks -= in_thread

        return then(future, call)

    torch._C.Future.then = recorded_then
    for kind in (torch._C.Future, dist.Work):
        kind.wait = with_recorder(kind.wait)
    return recorder


@step(
    3, "bf16 with error feedback", "half of the bytes, and no drift in 8 steps",
    "bf16_hook", own="bf16_hook Feedback",
)  # fmt: skip
def hook(submission, reference, lesson):
    dtypes, sent, means, first_sums = set(), torch.zeros(2, 256), [], []
    current, recorder = [0], record_waits()  # `current` is the index of the bucket
    real = dist.ProcessGroup.allreduce

    def allreduce(group, tensors, *args, **kwargs):
        tensor = tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        if not recorder.is_in_hook:
            return real(group, tensors, *args, **kwargs)
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
        sent[current[0]] += tensor.float()
        recorder.is_in_hook = False  # `real` calls dist.all_reduce, which calls this function
        try:
            return real(group, tensors, *args, **kwargs)
        finally:
            recorder.is_in_hook = True

    dist.ProcessGroup.allreduce = allreduce
    gradients = torch.randn(2, 256, generator=torch.Generator().manual_seed(lesson.rank))
    truth = gradients.clone()
    dist.all_reduce(truth)
    truth /= 4

    def error(found, wanted) -> float:
        return ((found - wanted).norm() / wanted.norm()).item()

    def drift(*buckets: int) -> float:
        """Return the relative error of the sum of all sent tensors in 8 equal steps."""
        state = submission.Feedback()
        sent.zero_()
        for step in range(8):
            for i in buckets:
                current[0], recorder.is_in_hook = i, True
                future = submission.bf16_hook(state, Bucket(gradients[i].clone(), i))
                recorder.is_in_hook = False
                kind = type(future).__name__
                what = f"the hook returns {'None' if future is None else f'a {kind}'}"
                require(isinstance(future, torch._C.Future), what, "future")
                mean = future.wait()
                means.append(mean[0] if isinstance(mean, (list, tuple)) else mean)
                if step == i == 0:
                    first_sums.append(sent[0].clone())
        wanted = 8 * gradients[list(buckets)]
        found = sent[list(buckets)]
        # the hook may divide by 4 after the all-reduce or before it
        return min(error(found, wanted), error(4 * found, wanted))

    def drift_with(residual: Callable) -> float:
        """Return the drift if `residual(gradient, corrected, rounded)` is the feedback."""
        feedback, total = torch.zeros(256), torch.zeros(256)
        for _ in range(8):
            corrected = gradients[0] + feedback
            rounded = corrected.bfloat16().float()
            feedback, total = residual(gradients[0], corrected, rounded), total + rounded
        return error(total, 8 * gradients[0])

    one, two = drift(0), drift(0, 1)
    require(dtypes, "the hook calls no all-reduce that the checker can record", "not_sent")
    require_equal("the hook sends tensors of", sorted(dtypes), ["bfloat16"], "wire")
    require(not recorder.has_waited, "the hook waits before it returns", "waits")
    known = {
        "no_feedback": drift_with(lambda g, corrected, rounded: 0 * g),
        "feedback_of_gradient": drift_with(lambda g, corrected, rounded: g - rounded),
    }
    what = "after 8 steps, the sum of the tensors that were sent for {} differs from the sum "
    what += (
        "of the gradients by a relative error of {:.1e}; with feedback, it is less than 5e-04"
    )
    hint = matching_hint(one, known, 1e-3, "feedback_scale")
    require(one <= 5e-4, what.format("one bucket", one), hint)
    require(two <= 5e-4, what.format("two buckets", two), "shared")
    what = "with two new Feedback() objects, the first call sends different numbers"
    require(torch.equal(*first_sums), what, "state")
    relative = error(means[-1].float(), truth[1])
    require_equal("the relative error of the mean", relative, at_most(0.02), "mean")
    require_equal("the dtype of the mean", str(means[-1].dtype), "torch.float32", "mean")


# --- 4: local SGD -------------------------------------------------------------------------


@step(4, "local SGD", "one collective after `every` steps, and the mean of all weights",
      "LocalSGD", world_sizes=(4, 2))  # fmt: skip
def local(submission, reference, lesson):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.5)
    trainer = submission.LocalSGD(optimizer, every=3)
    first_weights = [part.weight.flatten()[0] for part in model]
    start, bias = torch.stack(first_weights).tolist(), model[0].bias.detach().clone()
    moves: list[list[float]] = [[], []]  # of a weight of each group of parameters, by step
    for step in range(6):
        for p in model.parameters():
            p.grad = torch.full_like(p, float(lesson.rank + 1))
        with lesson.phase(f"step {step + 1}"):
            trainer.step()
        for layer_moves, layer, before in zip(moves, model, start, strict=True):
            layer_moves.append(round(layer.weight.flatten()[0].item() - before, 3))
        if step == 2:
            lesson.fact("bias moved", round((model[0].bias - bias)[0].item(), 3))
    lesson.fact("moved", moves[0])
    lesson.fact("second group moved", moves[1])
    lesson.fact("start", start[0])


@local.judge
def _(group):
    # Without averages, a step moves rank r by -0.5 (r + 1). The mean over n ranks of these
    # moves is -0.25 (n + 1).
    n = group.world
    expected = -0.75 * (n + 1)  # after three steps
    calls = [c for c in group.ranks[0].calls if c.phase.startswith("step")]
    phases = sorted({c.phase for c in calls})
    hint = "too_often" if len(phases) > 2 else "when"
    right = phases in (["step 3", "step 6"], [])
    require(right, f"the ranks call collectives in {', '.join(phases)}, but every = 3", hint)
    _, _, third, fourth, _, _ = zip(*group.facts("moved"), strict=True)
    spread, start = max(third) - min(third), group.facts("start")[0]
    has_moved = any(abs(moved) >= 1e-3 for moved in third)
    require(has_moved, "after step 3 no weight has moved", "no_step")
    hint = "gradients" if abs(spread - 0.5 * (n - 1)) < 1e-3 and phases else "never"
    what = (
        f"after step 3 the weights of the ranks have moved by {[*third]}, which must be equal"
    )
    require(spread <= 1e-3, what, hint)
    what = f"after step 3 the mean of the weights has moved by {third[0]}; it should be "
    known = {
        "sum": (n - 1) * start + n * expected,
        "one_rank": [-1.5 * (rank + 1) for rank in range(n)],
        "of_gradients": (n + 1) / 2 - start,
    }  # fmt: skip
    hint = matching_hint(third[0], known, 1e-2)
    require(abs(third[0] - expected) <= 1e-2, f"{what}{expected}", hint)
    biases = group.facts("bias moved")
    what = f"after step 3, a bias has moved by {biases}; it should be {expected} on all ranks"
    require(all(abs(each - expected) <= 1e-2 for each in biases), what, "all_weights")
    second = [moves[2] for moves in group.facts("second group moved")]
    what = (
        f"after step 3, the weights of the second group of parameters have moved by {second}; "
    )
    what += f"it should be {expected} on all ranks"
    require(all(abs(each - expected) <= 1e-2 for each in second), what, "all_groups")
    require(len(calls) <= 2, f"two averages call {len(calls)} collectives", "one_by_one")
    true = tuple(round(expected - 0.5 * (r + 1), 3) for r in range(n))
    what = f"after step 4 the weights have moved by {[*fourth]}; it should be {[*true]}"
    require(fourth == true, what, "other")
