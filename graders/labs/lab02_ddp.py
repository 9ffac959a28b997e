"""Grade lab 02: for each step, the checks, and the hint for each mistake that they find.

Gradients are checked in three training steps. Each training step starts from the parameters
that a single process has at this point, so that a mistake does not change the gradients of
later training steps.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers need it: import it once here, and not in every process
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from graders.tools import Lab, Lesson, Wrong, ask, judge_devices, same, second_machine, verdict

HINTS = {
    "not_joined": "After start(), this process is not in the group of all ranks. Call "
    "dist.init_process_group without a rank or a world size: it reads RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT from the environment.",
    "not_a_device": "start() returns something that is not a torch.device. Return the "
    'accelerator with the local rank of this process as its index, or torch.device("cpu").',
    "no_gpu": "Your code uses NCCL, but this machine has fewer NVIDIA GPUs than processes. In "
    'this case, initialise the group with gloo and return torch.device("cpu").',
    "no_accelerator": "The machine has at least as many accelerators as processes, but your "
    "code uses the CPU. Compare torch.accelerator.device_count() with LOCAL_WORLD_SIZE, and "
    "use the accelerators if there are enough.",
    "device_index": "The index of a device must be LOCAL_RANK. RANK counts the processes of "
    "all machines, and without an index every process would use device 0.",
    "shared_device": "The machine has fewer accelerators than processes, so two ranks share a "
    "device, which NCCL refuses. In this case, use the CPU and gloo.",
    "same_shard": "All ranks read the same samples, so N ranks do the work of one rank. Let "
    "`rank` decide where your slice starts.",
    "not_a_list": "shard() must return a list of int. Call .tolist() on the result of "
    "torch.randperm: in a set, two tensor elements with the same number count as different.",
    "uneven": "The shards have different lengths, so the last all-reduce of the rank with the "
    "longest shard would never complete. Pad the order to a multiple of `world` before you "
    "slice it.",
    "no_such_index": "shard() returns an index that is not in the data set. Pad the order by "
    "repeating indices from its own beginning, and do not invent new indices.",
    "dropped": "Some samples are read by no rank. If `world` does not divide `length`, append "
    "indices from the beginning of the order, and do not cut off its end.",
    "overlap": "Several ranks read the same samples, beyond the few that padding repeats. All "
    "ranks must slice the same order: seed the generator with the epoch and not with the "
    "rank, and return order[rank::world].",
    "unseeded": "Each process shuffles differently. Give torch.randperm a generator that "
    "every process seeds with the epoch.",
    "epoch_ignored": "The order is the same in every epoch. Seed the generator with `epoch`. "
    "(With DistributedSampler, the same mistake is a missing call of set_epoch.)",
    "not_broadcast": "Tensors of the model still have the values of each rank. Broadcast each "
    "tensor itself, and not a copy, from rank 0: dist.broadcast(tensor.detach(), src=0).",
    "other_source": "The values of the tensors changed, but not to the values of rank 0. Use "
    "rank 0 as the source on every rank: src=0.",
    "buffers": "The buffers were not broadcast, because module.parameters() does not contain "
    "them. Broadcast module.buffers() as well.",
    "frozen": "The frozen parameters were not broadcast, although they take part in the "
    "forward pass. Broadcast the parameters with requires_grad=False as well.",
    "not_divided": "The gradients are the sum over the ranks, and not the mean. Divide the "
    "sum by dist.get_world_size().",
    "divided_twice": "The gradients are divided by the world size more than once. Divide them "
    "in one place only, either before the all-reduce or after it. (If a gradient is a view of "
    "its bucket, dividing the bucket divides the gradient, too.)",
    "not_reduced": "Every rank still has the gradients of its own samples. Sum each "
    "parameter.grad over the ranks with dist.all_reduce.",
    "copy_reduced": "An all-reduce ran, but its result did not reach parameter.grad, probably "
    "because you reduced a copy. all_reduce writes into the tensor that you pass, so "
    "parameter.grad must be this tensor or a view of it.",
    "subset": "Only some gradients were reduced. Every parameter that requires a gradient "
    "needs an all-reduce (and in step 5 a hook that starts it).",
    "none_gradient": "Your code uses the gradient of a frozen parameter, which is None. Skip "
    "parameters whose .grad is None.",
    "frozen_hook": "Your code registers a hook on a parameter with requires_grad=False, which "
    "is an error. Skip these parameters.",
    "average": "gloo does not support ReduceOp.AVG (NCCL does). Use the sum, and divide it by "
    "the world size.",
    "not_waited": "Your code does not wait for the all-reduces that it starts. Call "
    "work.wait() for each of them before anything reads the gradients. (Here, an all-reduce "
    "delivers its result only when your code waits for it.)",
    "touched": "Your code changed a tensor while its all-reduce was still running. Divide the "
    "tensor after wait(), or before you start the all-reduce.",
    "synchronous": "The hook waits for an all-reduce, so the backward pass waits, too. Pass "
    "async_op=True, keep the Work, and wait for it in finish().",
    "not_early": "No all-reduce started before the backward pass ended. Start the all-reduces "
    "in a hook that you register with register_post_accumulate_grad_hook for each parameter.",
    "first_step_only": "The gradients are averaged only in the first training step. Look for "
    "state that finish() does not reset, or for a hook that removes itself.",
    "not_forgotten": "finish() also processes the Works of earlier training steps, so it "
    "divides gradients that the current all-reduces still use. Clear the list at the end of "
    "finish().",
    "no_initial_broadcast": "The ranks start with different models. Keep the call of "
    "broadcast_state in __init__.",
    "fill_order": "The first bucket contains the first parameters, whose gradients are ready "
    "last. Go through reversed(parameters), so that the first bucket has the last parameters.",
    "bucket_size": "The buckets have the wrong sizes. Close a bucket if the next parameter "
    "would make it larger than `bucket_bytes`, and count bytes and not elements. A parameter "
    "that is larger than `bucket_bytes` gets a bucket of its own.",
    "not_views": "A gradient has memory of its own, outside its bucket. Make each view from a "
    "slice of `flat` with view_as, and set parameter.grad to this view.",
    "reallocated": "The first training step is right, but a later one is not: zero_grad() set "
    "the gradients to None, the backward pass made new tensors, and your code reduced the old "
    "ones. In the hook, if the gradient is not the view of the bucket, copy it into the view "
    "and set parameter.grad to the view.",
    "one_launch": "All gradients were ready, but a bucket was not launched. One gradient can "
    "make it possible to launch several buckets, because complete buckets may have waited for "
    "it. Use `while`, and not `if`.",
    "launch_order": "The ranks launched their buckets in different orders, because their "
    "gradients became ready in different orders. Launch the buckets strictly in the order of "
    "the list: a bucket that is complete too early waits for the buckets before it.",
    "no_sync_sends": "The backward pass communicates inside no_sync. In no_sync, the hook "
    "must keep the gradient in its bucket and launch nothing.",
    "no_sync_unused": "Micro-batches before the last one communicate. Run the backward pass "
    "of all micro-batches except the last one inside `with ddp.no_sync():`, and call finish() "
    "once, after the last one.",
    "not_reenabled": "After no_sync, buckets are no longer launched. Restore self.sync when "
    "the context ends, and run the last micro-batch outside the context.",
    "all_silent": "All micro-batches ran inside no_sync, so DDP never communicated. Run the "
    "forward and backward pass of the last micro-batch outside `with ddp.no_sync():`.",
    "not_restored": "After an exception inside no_sync, the backward pass launches nothing. "
    "Put the `yield` into a try block, and restore self.sync in its finally block.",
    "nested": "The end of an inner no_sync makes the outer one communicate. Restore the "
    "previous value of self.sync, which is not always True.",
    "loss_not_divided": "The gradients are too large, because the backward passes add the "
    "gradients of all micro-batches. Divide each loss by the number of micro-batches.",
    "loss_wrong": "The gradients have the right direction but the wrong length. Divide each "
    "loss once by the number of micro-batches, and by nothing else. (The division by the "
    "number of ranks is not the task of this function.)",
    "micro_batch_lost": "The gradients do not contain all micro-batches. Call backward "
    "exactly once for each micro-batch, and do not set the gradients to zero in between.",
    "not_torch": "wrap() does not return PyTorch's DistributedDataParallel. Return "
    "DistributedDataParallel(module, ...).",
    "not_bucket_view": "Without gradient_as_bucket_view=True, DDP copies gradients into the "
    "buckets and out again. Pass gradient_as_bucket_view=True.",
    "forward_outside": "DDP communicated before the last micro-batch. The forward pass "
    "decides whether the backward pass communicates, so put both inside `with ddp.no_sync():` "
    "for all micro-batches except the last one.",
    "other": "The numbers do not fit any common mistake. Print one gradient before and after "
    "your function on every rank, first with one rank and then with two.",
}

LAB = Lab(HINTS)
STEPS_TRAINED, SHARD, MICRO_BATCHES, BUCKET_BYTES = 3, 10, 5, 200


# --- the model and the reference ----------------------------------------------------------


class Model(nn.Module):
    """A model with two branches, a frozen parameter and three buffers.

    With `right_first` it computes the branches in the opposite order. The numbers are the same,
    but the gradients of the branches become ready in the opposite order.
    """

    def __init__(self, seed: int, right_first: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.right_first = right_first
        self.offset = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.first, self.left = nn.Linear(4, 8), nn.Linear(8, 5)
        self.right, self.last = nn.Linear(8, 12), nn.Linear(17, 1)
        # the last parameter of the list is used first, so its gradient is ready last
        self.scale = nn.ParameterDict({"input": nn.Parameter(torch.zeros(4))})
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("std", torch.zeros(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for tensor in [*self.parameters(), self.mean]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
            self.std.copy_(torch.rand(4, generator=generator) + 1)
            self.seen.fill_(seed + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.mean) / self.std * self.scale["input"] + self.offset
        hidden = torch.tanh(self.first(x))
        order = (self.right, self.left) if self.right_first else (self.left, self.right)
        done = {branch: branch(hidden) for branch in order}
        return self.last(torch.tanh(torch.cat([done[self.left], done[self.right]], dim=1)))


class Reference:
    """The parameters and gradients of a single process that trains with the whole batch.

    `whole` has the gradients of the whole batch for each training step, and `own` has those of
    the samples of this rank.
    """

    def __init__(self, rank: int, world: int):
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(SHARD * world, 4, generator=generator)
        self.y = torch.randn(SHARD * world, 1, generator=generator)
        self.mine = list(range(rank, SHARD * world, world))
        self.states, self.whole, self.own = [], [], []
        model = Model(seed=0)
        for _ in range(STEPS_TRAINED):
            self.states.append({k: v.clone() for k, v in model.state_dict().items()})
            self.own.append(self._gradients(model, self.mine))
            self.whole.append(self._gradients(model, list(range(SHARD * world))))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        parameter -= 0.3 * self.whole[-1][name]

    def loss(self, model: nn.Module, samples: list[int]) -> torch.Tensor:
        """Return the mean squared error over these samples."""
        return nn.functional.mse_loss(model(self.x[samples]), self.y[samples])

    def _gradients(self, model: nn.Module, samples: list[int]) -> dict[str, torch.Tensor]:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(self.loss(model, samples), list(named.values()))
        return dict(zip(named, found, strict=True))

    def compare(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Return a verdict for each gradient, by the name of its parameter.

        A verdict is "right", "own" (the gradient of this rank's samples), "none", "other", or
        a factor, if the gradient is a multiple of the right one.
        """
        verdicts: dict[str, Any] = {}
        for name, whole in self.whole[step].items():
            gradient = model.get_parameter(name).grad
            verdicts[name] = verdict(gradient, right=whole, own=self.own[step][name])
            if verdicts[name] == "other":
                factor = ((gradient * whole).sum() / (whole * whole).sum()).item()
                if factor > 1e-3 and same(gradient, factor * whole):
                    verdicts[name] = round(factor, 4)
        return verdicts


class Training:
    """Three training steps of a model, with a verdict for each gradient in each of them."""

    def __init__(self, lesson: Lesson, model: Model, backward: Callable[[Reference], None]):
        self.lesson, self.reference = lesson, Reference(lesson.rank, lesson.world)
        state, start = model.state_dict(), self.reference.states[0]
        self.starts_equal = all(torch.equal(state[name], start[name]) for name in start)
        self.gradients = []
        for step in range(STEPS_TRAINED):
            model.load_state_dict(self.reference.states[step])
            model.zero_grad()
            with lesson.phase(f"step {step}"):
                backward(self.reference)
            self.gradients.append(self.reference.compare(model, step))
        lesson.meet()

    def judge(self, accumulating: bool = False) -> Iterator[str]:
        """Raise `Wrong` for the first training step with a wrong gradient or a wrong call."""
        ask(self.starts_equal, "the ranks start with different models", "no_initial_broadcast")
        calls = [call for call in self.lesson.calls if call.name != "broadcast"]
        for step, verdicts in enumerate(self.gradients):
            here = [call for call in calls if call.phase.startswith(f"step {step}")]
            if set(verdicts.values()) != {"right"} or any(call.touched for call in here):
                if step > 0:
                    yield "the gradients of training step 1 equal those of a single process"
                self._explain(step, verdicts, here, accumulating)
        yield "the gradients equal those of a single process in every training step"

    def _explain(self, step: int, verdicts: dict, here: list, accumulating: bool) -> None:
        """Raise the `Wrong` that fits these verdicts and these calls of one training step."""
        found = set(verdicts.values())
        when = f"in training step {step + 1} of {STEPS_TRAINED}, "
        if any(call.touched for call in here):
            what = f"{when}a gradient changed while its all-reduce was running"
            raise Wrong(what, "not_forgotten" if step else "touched")
        if any(call.asynchronous and not call.returned for call in here):
            what = f"{when}all-reduces were started, but nothing waits for them"
            raise Wrong(what, "not_waited")
        if found == {"own"}:
            reduced, not_reduced = "copy_reduced", "not_reduced"
            if step > 0:
                reduced, not_reduced = "reallocated", "first_step_only"
            what = f"{when}every rank has the gradients of its own samples"
            raise Wrong(what, reduced if here else not_reduced)
        factors = {verdict for verdict in found if isinstance(verdict, float)}
        if len(found) == len(factors) == 1:
            factor = factors.pop()
            what = f"{when}the gradients are {factor:g} times those of a single process"
            if accumulating:
                whole = abs(factor - MICRO_BATCHES) < 1e-2
                raise Wrong(what, "loss_not_divided" if whole else "loss_wrong")
            ask(abs(factor - self.lesson.world) > 1e-2, what, "not_divided")
            ask(factor >= 1, what, "not_forgotten" if step else "divided_twice")
        if "own" in found and found <= {"right", "own", *factors}:
            own = sorted(name for name, verdict in verdicts.items() if verdict == "own")
            what = f"{when}{len(own)} of {len(verdicts)} gradients are not averaged"
            raise Wrong(f"{what}: {', '.join(own)}", "subset")
        ask(not (step and here), f"{when}the gradients are no longer right", "reallocated")
        hint = "micro_batch_lost" if accumulating else "other"
        raise Wrong(f"{when}the gradients differ from those of a single process", hint)


# --- step 1 -------------------------------------------------------------------------------


@LAB.step(
    1, "join the process group and choose the device",
    "all ranks are in one group, and each rank has its own device or uses the CPU",
    "start", joins=False, crashes={"NCCL|nccl": "no_gpu"},
)  # fmt: skip
def start(theirs, ours, lesson):
    n, device = lesson.world, theirs.start()
    ask(dist.is_initialized(), "start() did not initialise a process group", "not_joined")
    who = dist.get_rank(), dist.get_world_size()
    what = f"in the process group, rank {lesson.rank} of {n} is rank {who[0]} of {who[1]}"
    ask(who == (lesson.rank, n), what, "not_joined")
    dist.all_reduce(torch.ones(1))
    yield f"{n} ranks are in one group, and an all-reduce completes"
    is_device = isinstance(device, torch.device)
    ask(is_device, "start() does not return a torch.device", "not_a_device")

    def pick(number: int, rank: int) -> str:
        group = {"init_process_group": mock.Mock(), "get_world_size": lambda *_: 2 * n}
        group["get_rank"] = lambda *_: rank + n
        with (
            second_machine(number, rank, n),
            mock.patch.multiple(dist, **group),
            mock.patch.multiple(theirs, create=True, **group),
        ):
            return str(theirs.start())

    yield from judge_devices(n, pick, n, n - 1)


# --- step 2 -------------------------------------------------------------------------------


@LAB.step(
    2, "give each rank its own samples",
    "every sample is read, all shards have the same length, and each epoch has a new order",
    "shard", worlds=(2, 3, 4, 1),
)  # fmt: skip
def shard(theirs, ours, lesson):
    n = lesson.world
    kind = type(theirs.shard(12 * n, lesson.rank, n, 0)).__name__
    ask(kind == "list", f"shard() returns a {kind}, not a list", "not_a_list")
    for length in (12 * n, 5 * n + 1):
        mine = [theirs.shard(length, lesson.rank, n, epoch) for epoch in (0, 1)]
        cut = [theirs.shard(length, rank, n, 0) for rank in range(n)]
        lesson.fact(f"mine {length}", [list(map(int, samples)) for samples in mine])
        lesson.fact(f"all {length}", [list(map(int, samples)) for samples in cut])


@shard.judge
def _(group):
    n = group.world
    for length in (12 * n, 5 * n + 1):
        case = f"with {length} samples"
        shards, later = zip(*group.facts(f"mine {length}"), strict=True)
        indices = [index for shard in shards for index in shard]
        absent, extra = length - len(set(indices)), len(indices) - len(set(indices))
        for index in indices:
            what = f"{case}, shard() returns the index {index}, which does not exist"
            ask(0 <= index < length, what, "no_such_index")
        alike = n > 1 and all(shard == shards[0] for shard in shards)
        what = f"{case}, all {n} ranks read the same {len(shards[0])} samples"
        ask(not alike, what, "same_shard")
        lengths = [str(len(shard)) for shard in shards]
        what = f"{case}, the shards of the ranks have the lengths {', '.join(lengths)}"
        ask(len(set(lengths)) == 1, what, "uneven")
        if absent or extra >= n:
            differ = any(cut != list(shards) for cut in group.facts(f"all {length}"))
            hint = "overlap" if extra else "dropped"
            hint = "unseeded" if absent and extra and differ else hint
            what = f"samples that no rank reads: {absent}; repeated reads: {extra}"
            raise Wrong(f"{case}, {what}", hint)
        yield f"{case}, every sample is read; samples that are read twice: {extra}"
        ask(shards[0] != later[0], "epochs 0 and 1 have the same order", "epoch_ignored")


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "start from the same model",
    "parameters, frozen parameters and buffers equal those of rank 0", "broadcast_state",
)  # fmt: skip
def broadcast(theirs, ours, lesson):
    model, mine = Model(lesson.rank), Model(lesson.rank).state_dict()
    with lesson.phase("broadcast"):
        theirs.broadcast_state(model)
    lesson.meet()
    state, first = model.state_dict(), Model(seed=0).state_dict()
    wrong = {name for name in first if not torch.equal(state[name], first[name])}
    own = all(torch.equal(state[name], mine[name]) for name in wrong)
    ask(own, "the tensors do not have the values of rank 0", "other_source")
    what = f"each rank keeps its own values in all {len(first)} tensors"
    ask(len(wrong) < len(first), what, "not_broadcast")
    if wrong:
        yield f"{len(first) - len(wrong)} of {len(first)} tensors equal those of rank 0"
        hint = "buffers" if wrong & {"mean", "std", "seen"} else "not_broadcast"
        hint = "frozen" if wrong == {"offset"} else hint
        raise Wrong(f"each rank keeps its own values in {', '.join(sorted(wrong))}", hint)


# --- steps 4 and 5 ------------------------------------------------------------------------


def make_model(lesson: Lesson) -> Model:
    """Make a model whose numbers, and whose order of gradients, differ from rank to rank."""
    return Model(seed=lesson.rank, right_first=lesson.rank % 2 == 1)


@LAB.step(
    4, "average the gradients",
    "in three training steps, the gradients equal those of a single process",
    "average_gradients", crashes={"NoneType": "none_gradient", "AVG": "average"},
)  # fmt: skip
def average(theirs, ours, lesson):
    def backward(reference: Reference) -> None:
        reference.loss(model, reference.mine).backward()
        theirs.average_gradients(model)

    model = make_model(lesson)
    ours.broadcast_state(model)
    yield from Training(lesson, model, backward).judge()


def train_overlapping(lesson: Lesson, model: Model, ddp: nn.Module) -> Iterator[str]:
    """Train, and check that all-reduces start during the backward pass without a wait."""

    def backward(reference: Reference) -> None:
        step = lesson.current_phase
        with lesson.phase(f"{step} backward"):
            reference.loss(ddp, reference.mine).backward()
        with lesson.phase(f"{step} finish"):
            ddp.finish()

    yield from Training(lesson, model, backward).judge()
    during = [call for call in lesson.calls if call.phase.endswith("backward")]
    ask(during, "no all-reduce started before the backward pass ended", "not_early")
    waits = not all(call.asynchronous for call in during)
    count = sum(not call.asynchronous for call in during)
    what = f"the backward pass waits for {count} of its {len(during)} all-reduces"
    ask(not waits, what, "synchronous")


@LAB.step(
    5, "start the all-reduces during the backward pass",
    "in three training steps, the gradients equal those of a single process, and all-reduces "
    "start during the backward pass", "HookDDP",
    crashes={
        "doesn't require gradient": "frozen_hook", "NoneType": "none_gradient", "AVG": "average"
    },
)  # fmt: skip
def hooks(theirs, ours, lesson):
    # all ranks use the same graph here, so hooks may launch as soon as a gradient is ready
    model = Model(seed=lesson.rank)
    yield from train_overlapping(lesson, model, theirs.HookDDP(model))


# --- step 6 -------------------------------------------------------------------------------

FILLED = [
    ["scale.input", "last.bias", "last.weight", "right.bias"],
    ["right.weight"],
    ["left.bias", "left.weight"],
    ["first.bias", "first.weight"],
]


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@LAB.step(
    6, "put gradients into buckets",
    "in three training steps, the gradients equal those of a single process; 9 parameters are "
    "in 4 buckets, and all ranks launch the buckets in the same order, although their "
    "gradients become ready in different orders",
    "make_buckets BucketDDP", own="Bucket make_buckets BucketDDP", worlds=(2, 3, 4, 1),
    crashes={r"buckets not launched, 0 ": "one_launch", "AVG": "average"},
    order_hint="launch_order",
)  # fmt: skip
def buckets(theirs, ours, lesson):
    names = {p: name for name, p in Model(seed=0).named_parameters() if p.requires_grad}
    buckets = theirs.make_buckets(list(names), BUCKET_BYTES)
    found = [[names[p] for p in bucket.views] for bucket in buckets]
    shown = " | ".join(", ".join(bucket) for bucket in found)
    forwards = shown.startswith("first.weight")
    ask(not forwards, f"the buckets contain {shown}", "fill_order")
    what = f"with at most {BUCKET_BYTES} bytes, the buckets contain {shown}"
    ask(found == FILLED, what, "bucket_size")
    yield f"{len(names)} parameters are in {len(buckets)} buckets, the last parameters first"
    shared = all(
        memory_of(view) == memory_of(bucket.flat) and view.shape == p.shape
        for bucket in buckets
        for p, view in bucket.views.items()
    )
    ask(shared, "the views do not share the memory of their bucket", "not_views")
    model = make_model(lesson)
    yield from train_overlapping(lesson, model, theirs.BucketDDP(model, BUCKET_BYTES))
    pieces = {memory_of(p.grad) for p in model.parameters() if p.grad is not None}
    what = f"the gradients are in {len(pieces)} tensors of memory"
    ask(len(pieces) == 4, f"{what}, and not in the {len(FILLED)} buckets", "not_views")


# --- steps 7 and 8 ------------------------------------------------------------------------


class Accumulation:
    """A backward pass in micro-batches that counts messages.

    For each training step, `counts` has the number of forward passes, the number of messages
    before the last of them, and the number of all messages.
    """

    def __init__(self, accumulate: Callable, ddp: nn.Module, sent: Callable[[], int]):
        self.accumulate, self.ddp, self.sent, self.counts = accumulate, ddp, sent, []

    def __call__(self, reference: Reference) -> None:
        size, start, silent = SHARD // MICRO_BATCHES, self.sent(), []

        def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
            silent.append(self.sent() - start)
            return reference.loss(model, samples)

        parts = [reference.mine[first : first + size] for first in range(0, SHARD, size)]
        self.accumulate(self.ddp, loss_of, parts)
        self.counts.append((len(silent), (silent or [0])[-1], self.sent() - start))


@LAB.step(
    7, "accumulate gradients without communication",
    "with 5 micro-batches, the gradients equal those of a single process, and only the last "
    "micro-batch communicates",
    "AccumulatingDDP accumulate", needs=(6,),
    own="Bucket make_buckets BucketDDP AccumulatingDDP accumulate",
    crashes={"buckets not launched": "not_reenabled"},
)  # fmt: skip
def accumulate(theirs, ours, lesson):
    model, reference, sent = make_model(lesson), Reference(0, 1), lambda: len(lesson.calls)
    ddp = theirs.AccumulatingDDP(model, BUCKET_BYTES)
    before = sent()
    with ddp.no_sync():
        reference.loss(ddp, reference.mine).backward()
        what = f"a backward pass inside no_sync started {sent() - before} all-reduces"
        ask(sent() == before, what, "no_sync_sends")
        with ddp.no_sync():
            pass
        reference.loss(ddp, reference.mine).backward()
    what = "after a second no_sync inside the first one, the backward pass communicates"
    ask(sent() == before, what, "nested")
    yield "a backward pass inside no_sync starts no all-reduce"
    backward = Accumulation(theirs.accumulate, ddp, sent)
    training = Training(lesson, model, backward)
    with contextlib.suppress(InterruptedError), ddp.no_sync():
        raise InterruptedError
    before = sent()
    training.reference.loss(ddp, training.reference.mine).backward()
    for forwards, silent, total in backward.counts:
        what = f"{silent} of {total} all-reduces started before the last micro-batch"
        ask(forwards != MICRO_BATCHES or not silent, what, "no_sync_unused")
    yield from training.judge(accumulating=True)
    what = "after an exception inside no_sync, the backward pass starts no all-reduce"
    ask(sent() > before, what, "not_restored")


@LAB.step(
    8, "use PyTorch's DistributedDataParallel",
    "with 5 micro-batches, the gradients equal those of a single process, and only the last "
    "micro-batch communicates",
    "wrap accumulate_with_torch", worlds=(2, 3, 4, 1),
)  # fmt: skip
def with_torch(theirs, ours, lesson):
    sizes: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(dist.group.WORLD, bucket)

    model = make_model(lesson)
    ddp = theirs.wrap(model, torch.device("cpu"))
    what = f"wrap() returns a {type(ddp).__name__}, and not a DistributedDataParallel"
    ask(isinstance(ddp, DistributedDataParallel), what, "not_torch")
    views = ddp.gradient_as_bucket_view
    ask(views, "the gradients are not views of the buckets", "not_bucket_view")
    yield "wrap() returns a DistributedDataParallel whose gradients are views of its buckets"
    ddp.register_comm_hook(None, count)
    backward = Accumulation(theirs.accumulate_with_torch, ddp, lambda: len(sizes))
    training = Training(lesson, model, backward)
    for _, silent, total in backward.counts:
        what = f"{silent} of {total} buckets were sent before the last micro-batch"
        ask(not silent, what, "forward_outside")
    what = "in a training step, no bucket was sent"
    ask(all(total for _, _, total in backward.counts), what, "all_silent")
    yield from training.judge(accumulating=True)
