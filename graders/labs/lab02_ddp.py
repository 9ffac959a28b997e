"""The steps of lab 02: what each must do, how that is measured, and the hint for each symptom.

Every measurement of gradients begins each of its three training steps from the parameters that
one process has there, so that one step's mistake does not hide in the next step's numbers.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from graders.tools import Lab, Lesson, Wrong, ask, judge_devices, same, second_machine, verdict

HINTS = {
    "not_joined": "start() must call dist.init_process_group: it reads RANK, WORLD_SIZE, "
    "MASTER_ADDR and MASTER_PORT from the environment by itself.",
    "not_a_device": "start() must return a torch.device: the accelerator with this rank's "
    'index, or torch.device("cpu").',
    "no_gpu": "NCCL needs an NVIDIA GPU for each rank. Where there are fewer accelerators than "
    'processes on this machine, return torch.device("cpu") and use gloo.',
    "no_accelerator": "With as many accelerators as processes on this machine, use them: "
    "compare torch.accelerator.device_count() with LOCAL_WORLD_SIZE.",
    "device_index": "The index of the device is LOCAL_RANK. RANK counts over all machines, and "
    "without an index every process would take device 0.",
    "shared_device": "There are fewer accelerators here than processes. NCCL refuses two ranks "
    "on one device: fall back to the CPU and gloo.",
    "same_shard": "Every rank takes the same samples, so N ranks do the work of one. Where "
    "does `rank` enter your slice?",
    "not_a_list": "Return a list of int, which `.tolist()` makes of torch.randperm: two tensor "
    "elements with the same number are not the same in a set.",
    "uneven": "The shards differ in length: a rank with a batch more would wait for ever in "
    "its last all-reduce. Pad the order to a multiple of `world` before you slice.",
    "dropped": "Some samples are read by nobody. Where `world` does not divide `length`, pad "
    "by the beginning of the order: do not cut the end.",
    "overlap": "Shards overlap, and other samples are read by nobody. All ranks must cut one "
    "and the same order: seed it with the epoch alone, not with the rank, and slice "
    "order[rank::world].",
    "unseeded": "Each process draws an order of its own. Give torch.randperm a generator which "
    "is seeded with the epoch, the same in every process.",
    "epoch_ignored": "The order is the same in every epoch: seed the generator with `epoch`. "
    "(With DistributedSampler this is the forgotten set_epoch.)",
    "not_broadcast": "Every rank still has a model of its own. Broadcast each tensor in place, "
    "with src=0: dist.broadcast(tensor.detach(), src=0).",
    "other_source": "The ranks agree, but not on rank 0's values.",
    "buffers": "module.parameters() does not hold the buffers. Broadcast module.buffers() too.",
    "frozen": "Frozen parameters take part in the forward pass: broadcast those with "
    "requires_grad=False as well.",
    "not_divided": "The gradients are the sum over the ranks. The mean is the sum divided by "
    "dist.get_world_size().",
    "divided_twice": "The gradients are divided by the world size more than once. Divide in "
    "one place only: either before the all-reduce or after it.",
    "not_reduced": "Every rank still has the gradients of its own samples. Sum each "
    "parameter.grad over the ranks with dist.all_reduce.",
    "copy_reduced": "You did reduce something, but the result did not reach parameter.grad. "
    "Did you reduce a copy? all_reduce writes into the tensor you pass.",
    "subset": "Some gradients were reduced, the others are still this rank's own. Every "
    "parameter that requires a gradient needs its all-reduce (and its hook).",
    "none_gradient": "A frozen parameter has no gradient: its .grad is None. Skip it.",
    "frozen_hook": "A parameter with requires_grad=False can have no such hook. Skip it.",
    "average": "gloo has no ReduceOp.AVG (NCCL has): sum, then divide by the world size.",
    "not_waited": "Nobody waited for the all-reduces. work.wait() for each, before anything "
    "reads the gradients; here they arrive no earlier than that.",
    "touched": "You changed a tensor while its all-reduce was still running. Divide after "
    "wait(), or before the launch.",
    "synchronous": "The hook waits for its all-reduce, and backward for the hook. Pass "
    "async_op=True, keep the Work, and wait in finish().",
    "not_early": "No all-reduce began before backward ended. Start it in the hook: "
    "register_post_accumulate_grad_hook, for each parameter.",
    "first_step_only": "Only the first step is synchronised. Look for state that finish() does "
    "not set back, or a hook which removes itself.",
    "not_forgotten": "finish() works through the Works of earlier steps again, and divides "
    "gradients which belong to this step's all-reduces. Clear the list at its end.",
    "no_initial_broadcast": "The ranks begin with different models. Keep the call of "
    "broadcast_state in __init__.",
    "fill_order": "The first bucket must hold the last parameters: their gradients are ready "
    "first. Go through reversed(parameters).",
    "bucket_size": "Close a bucket when the next parameter would take it past `bucket_bytes` "
    "(count bytes, not numbers); a larger parameter has one of its own.",
    "not_views": "A gradient has memory of its own beside its bucket. Views must share the "
    "memory of `flat` (slice it, then view_as), and parameter.grad must be the view.",
    "reallocated": "Right in the first step, own gradients from the second on: zero_grad() set "
    "them to None, backward made new tensors, and the bucket reduced old numbers. In the "
    "hook: if the gradient is not the view, copy it there and set parameter.grad = view.",
    "one_launch": "All gradients were ready, and yet a bucket was not launched. One gradient "
    "can complete several buckets in a row, as some had to wait: use `while`, not `if`.",
    "launch_order": "The ranks launched their buckets in different orders, for their gradients "
    "were ready in different orders. Launch strictly in the order of the list: a bucket which "
    "is complete too early waits for those before it.",
    "no_sync_sends": "Backward communicates inside no_sync. There the hook must keep the "
    "gradient in its bucket, and launch nothing.",
    "not_reenabled": "After no_sync nothing is launched any more. Set self.sync back when the "
    "context ends, and run the last micro-batch outside it.",
    "not_restored": "After an exception inside no_sync, nothing is launched any more. Put the "
    "`yield` in a try, and set self.sync back in its finally.",
    "nested": "The end of an inner no_sync lets the outer one communicate. Put self.sync back "
    "to what it was, not to True.",
    "loss_not_divided": "The gradients of the micro-batches' means are added up. Divide each "
    "loss by the number of micro-batches.",
    "loss_wrong": "The gradients have the right direction and the wrong length. Divide each "
    "loss once, by the number of micro-batches, and by nothing else: finish() does the rest.",
    "micro_batch_lost": "Not every micro-batch counts. Call backward on each of them, once, "
    "and do not zero the gradients in between.",
    "not_torch": "wrap() must return torch's DistributedDataParallel around the module.",
    "not_bucket_view": "Pass gradient_as_bucket_view=True: without it, DDP copies gradients "
    "into the buckets and out again.",
    "forward_outside": "DDP decides in forward whether the next backward communicates. Compute "
    "the loss inside `with ddp.no_sync():` too, not only the backward.",
    "other": "The numbers fit no common mistake. Try one rank first, then two; print one "
    "gradient before and after, on every rank.",
}

LAB = Lab(HINTS)
STEPS_TRAINED, SHARD, MICRO_BATCHES, BUCKET_BYTES = 3, 10, 5, 200


# --- the model and the truth --------------------------------------------------------------


class Model(nn.Module):
    """Two branches, a parameter whose gradient comes late, a frozen one, and three buffers.

    `twisted` computes the branches in the other order, and so has their gradients ready in
    the other order: the same numbers, another timing.
    """

    def __init__(self, seed: int, twisted: bool = False):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.twisted = twisted
        self.offset = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.first, self.left = nn.Linear(4, 8), nn.Linear(8, 5)
        self.right, self.last = nn.Linear(8, 12), nn.Linear(17, 1)
        # the last parameter in the list is the first in use: its gradient is ready last
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
        order = (self.right, self.left) if self.twisted else (self.left, self.right)
        done = {branch: branch(hidden) for branch in order}
        return self.last(torch.tanh(torch.cat([done[self.left], done[self.right]], dim=1)))


class Truth:
    """The parameters and gradients of one process that trains with the whole batch."""

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
        """The mean squared error over these samples."""
        return nn.functional.mse_loss(model(self.x[samples]), self.y[samples])

    def _gradients(self, model: nn.Module, samples: list[int]) -> dict[str, torch.Tensor]:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(self.loss(model, samples), list(named.values()))
        return dict(zip(named, found, strict=True))

    def explain(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Each gradient: "right", "own", "none", "other", or its multiple of the truth."""
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
    """Three training steps of a model, and what each gradient is after each of them."""

    def __init__(self, lesson: Lesson, model: Model, backward: Callable[[Truth], None]):
        self.lesson, self.truth = lesson, Truth(lesson.rank, lesson.world)
        state, start = model.state_dict(), self.truth.states[0]
        self.starts_equal = all(torch.equal(state[name], start[name]) for name in start)
        self.gradients = []
        for step in range(STEPS_TRAINED):
            model.load_state_dict(self.truth.states[step])
            model.zero_grad()
            with lesson.phase(f"step {step}"):
                backward(self.truth)
            self.gradients.append(self.truth.explain(model, step))
        lesson.meet()

    def judge(self, accumulating: bool = False) -> Iterator[str]:
        """Find out from the gradients, and from what was called, what went wrong."""
        ask(self.starts_equal, "the ranks begin with different models", "no_initial_broadcast")
        calls = [call for call in self.lesson.calls if call.name != "broadcast"]
        for step, verdicts in enumerate(self.gradients):
            here = [call for call in calls if call.phase.startswith(f"step {step}")]
            if set(verdicts.values()) != {"right"} or any(call.touched for call in here):
                if step > 0:
                    yield "the gradients of the first step are those of one process"
                self._explain(step, verdicts, here, accumulating)
        yield "the gradients are those of one process in every step"

    def _explain(self, step: int, verdicts: dict, here: list, accumulating: bool) -> None:
        """Raise `Wrong` for a step that has these gradients and these calls."""
        found, when = set(verdicts.values()), f"in step {step + 1} of {STEPS_TRAINED} "
        if any(call.touched for call in here):
            what = f"{when}a gradient changed while its all-reduce was running"
            raise Wrong(what, "not_forgotten" if step else "touched")
        if any(call.asynchronous and not call.returned for call in here):
            raise Wrong(f"{when}all-reduces were started and not waited for", "not_waited")
        if found == {"own"}:
            reduced, not_reduced = "copy_reduced", "not_reduced"
            if step > 0:
                reduced, not_reduced = "reallocated", "first_step_only"
            what = f"{when}every rank has the gradients of its own samples"
            raise Wrong(what, reduced if here else not_reduced)
        factors = {verdict for verdict in found if isinstance(verdict, float)}
        if len(found) == len(factors) == 1:
            factor = factors.pop()
            what = f"{when}the gradients are {factor:g} times those of one process"
            if accumulating:
                whole = abs(factor - MICRO_BATCHES) < 1e-2
                raise Wrong(what, "loss_not_divided" if whole else "loss_wrong")
            ask(abs(factor - self.lesson.world) > 1e-2, what, "not_divided")
            ask(factor >= 1, what, "not_forgotten" if step else "divided_twice")
        if "own" in found and found <= {"right", "own", *factors}:
            own = sorted(name for name, verdict in verdicts.items() if verdict == "own")
            what = f"{when}{len(own)} of {len(verdicts)} gradients are still each rank's own"
            raise Wrong(f"{what}: {', '.join(own)}", "subset")
        ask(not (step and here), f"{when}the gradients are no longer right", "reallocated")
        hint = "micro_batch_lost" if accumulating else "other"
        raise Wrong(f"{when}the gradients are not those of one process", hint)


# --- step 1 -------------------------------------------------------------------------------


@LAB.step(
    1, "start the process group, pick the device",
    "all ranks are in one group, each with a device of its own or on the CPU",
    "start", joins=False, crashes={"NCCL|nccl": "no_gpu"},
)  # fmt: skip
def start(theirs, ours, lesson):
    n, device = lesson.world, theirs.start()
    ask(dist.is_initialized(), "no process group has been initialised", "not_joined")
    who = dist.get_rank(), dist.get_world_size()
    what = f"rank {lesson.rank} sees itself as rank {who[0]} of {who[1]}"
    ask(who == (lesson.rank, n), what, "not_joined")
    dist.all_reduce(torch.ones(1))
    yield f"{n} ranks are in one group, and an all-reduce adds them up"
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
    2, "deal out the samples",
    "every sample is read, in equal shares and in a new order each epoch",
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
        what = f"of {length} samples"
        shards, later = zip(*group.facts(f"mine {length}"), strict=True)
        dealt = [index for shard in shards for index in shard]
        absent, extra = length - len(set(dealt)), len(dealt) - len(set(dealt))
        for index in dealt:
            ask(0 <= index < length, f"{what} index {index} does not exist", "overlap")
        alike = n > 1 and all(shard == shards[0] for shard in shards)
        ask(not alike, f"{what} all {n} ranks read the same {len(shards[0])}", "same_shard")
        lengths = [str(len(shard)) for shard in shards]
        ask(len(set(lengths)) == 1, f"{what} the ranks read {', '.join(lengths)}", "uneven")
        if absent or extra >= n:
            differ = any(cut != list(shards) for cut in group.facts(f"all {length}"))
            hint = "overlap" if extra else "dropped"
            hint = "unseeded" if absent and extra and differ else hint
            counts = f"{absent} are read by nobody and {extra} more than once"
            raise Wrong(f"{what} {counts}", hint)
        yield f"{what} every one is read, {extra} of them twice"
        ask(shards[0] != later[0], "epochs 0 and 1 have the same order", "epoch_ignored")


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "begin from the same model", "parameters, frozen parameters and buffers are rank 0's",
    "broadcast_state",
)  # fmt: skip
def broadcast(theirs, ours, lesson):
    model, mine = Model(lesson.rank), Model(lesson.rank).state_dict()
    with lesson.phase("broadcast"):
        theirs.broadcast_state(model)
    lesson.meet()
    state, first = model.state_dict(), Model(seed=0).state_dict()
    wrong = {name for name in first if not torch.equal(state[name], first[name])}
    own = all(torch.equal(state[name], mine[name]) for name in wrong)
    ask(own, "the tensors do not hold rank 0's values", "other_source")
    what = f"each rank keeps its own values in all {len(first)} tensors"
    ask(len(wrong) < len(first), what, "not_broadcast")
    if wrong:
        yield f"{len(first) - len(wrong)} of {len(first)} tensors are rank 0's"
        hint = "buffers" if wrong & {"mean", "std", "seen"} else "not_broadcast"
        hint = "frozen" if wrong == {"offset"} else hint
        raise Wrong(f"each rank keeps its own {', '.join(sorted(wrong))}", hint)


# --- steps 4 and 5 ------------------------------------------------------------------------


def late_model(lesson: Lesson) -> Model:
    """A model that differs from rank to rank, in its numbers and in what is ready first."""
    return Model(seed=lesson.rank, twisted=lesson.rank % 2 == 1)


@LAB.step(
    4, "average the gradients", "three steps have the gradients of one process",
    "average_gradients", crashes={"NoneType": "none_gradient", "AVG": "average"},
)  # fmt: skip
def average(theirs, ours, lesson):
    def backward(truth: Truth) -> None:
        truth.loss(model, truth.mine).backward()
        theirs.average_gradients(model)

    model = late_model(lesson)
    ours.broadcast_state(model)
    yield from Training(lesson, model, backward).judge()


def train_overlapping(lesson: Lesson, model: Model, ddp: nn.Module) -> Iterator[str]:
    """Train; all-reduces must begin during backward, and must not be waited for there."""

    def backward(truth: Truth) -> None:
        step = lesson.current_phase
        with lesson.phase(f"{step} backward"):
            truth.loss(ddp, truth.mine).backward()
        with lesson.phase(f"{step} finish"):
            ddp.finish()

    yield from Training(lesson, model, backward).judge()
    during = [call for call in lesson.calls if call.phase.endswith("backward")]
    ask(during, "no all-reduce began before backward ended", "not_early")
    waits = not all(call.asynchronous for call in during)
    ask(not waits, "backward waits for each all-reduce", "synchronous")


@LAB.step(
    5, "begin while backward still runs",
    "three steps have the gradients of one process, reduced during backward", "HookDDP",
    crashes={
        "doesn't require gradient": "frozen_hook", "NoneType": "none_gradient", "AVG": "average"
    },
)  # fmt: skip
def hooks(theirs, ours, lesson):
    # one graph on all ranks: hooks may launch in the order in which gradients are ready
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
    6, "buckets",
    "three steps have the gradients of one process, in 4 buckets for 9 parameters, "
    "launched in one order though the ranks' gradients are ready in different orders",
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
    ask(not forwards, f"the buckets are {shown}", "fill_order")
    ask(found == FILLED, f"with {BUCKET_BYTES} bytes the buckets are {shown}", "bucket_size")
    yield f"{len(names)} parameters are in {len(buckets)} buckets, the last ones first"
    shared = all(
        memory_of(view) == memory_of(bucket.flat) and view.shape == p.shape
        for bucket in buckets
        for p, view in bucket.views.items()
    )
    ask(shared, "the views do not share the memory of their bucket", "not_views")
    model = late_model(lesson)
    yield from train_overlapping(lesson, model, theirs.BucketDDP(model, BUCKET_BYTES))
    pieces = {memory_of(p.grad) for p in model.parameters() if p.grad is not None}
    what = f"{len(names)} gradients lie in {len(pieces)} pieces of memory"
    ask(len(pieces) == 4, f"{what}, not in the {len(FILLED)} buckets", "not_views")


# --- steps 7 and 8 ------------------------------------------------------------------------


class Accumulation:
    """A backward in micro-batches; `counts`: forwards, sent before the last of them, sent."""

    def __init__(self, accumulate: Callable, ddp: nn.Module, sent: Callable[[], int]):
        self.accumulate, self.ddp, self.sent, self.counts = accumulate, ddp, sent, []

    def __call__(self, truth: Truth) -> None:
        size, start, silent = SHARD // MICRO_BATCHES, self.sent(), []

        def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
            silent.append(self.sent() - start)
            return truth.loss(model, samples)

        parts = [truth.mine[first : first + size] for first in range(0, SHARD, size)]
        self.accumulate(self.ddp, loss_of, parts)
        self.counts.append((len(silent), (silent or [0])[-1], self.sent() - start))


@LAB.step(
    7, "accumulate, and be silent meanwhile",
    "5 micro-batches have the gradients of one process, and only the last communicates",
    "AccumulatingDDP accumulate", needs=(6,),
    own="Bucket make_buckets BucketDDP AccumulatingDDP accumulate",
    crashes={"buckets not launched": "not_reenabled"},
)  # fmt: skip
def accumulate(theirs, ours, lesson):
    model, truth, sent = late_model(lesson), Truth(0, 1), lambda: len(lesson.calls)
    ddp = theirs.AccumulatingDDP(model, BUCKET_BYTES)
    before = sent()
    with ddp.no_sync():
        truth.loss(ddp, truth.mine).backward()
        what = f"a backward inside no_sync started {sent() - before} all-reduces"
        ask(sent() == before, what, "no_sync_sends")
        with ddp.no_sync():
            pass
        truth.loss(ddp, truth.mine).backward()
    what = "behind a second no_sync within the first, backward communicates"
    ask(sent() == before, what, "nested")
    yield "a backward inside no_sync starts no all-reduce"
    backward = Accumulation(theirs.accumulate, ddp, sent)
    training = Training(lesson, model, backward)
    with contextlib.suppress(InterruptedError), ddp.no_sync():
        raise InterruptedError
    before = sent()
    training.truth.loss(ddp, training.truth.mine).backward()
    for forwards, silent, total in backward.counts:
        what = f"{silent} of {total} all-reduces came before the last micro-batch"
        ask(forwards != MICRO_BATCHES or not silent, what, "no_sync_sends")
    yield from training.judge(accumulating=True)
    ask(sent() > before, "after an error in no_sync, backward starts nothing", "not_restored")


@LAB.step(
    8, "torch's DistributedDataParallel",
    "5 micro-batches have the gradients of one process, and only the last communicates",
    "wrap accumulate_with_torch", worlds=(2, 3, 4, 1),
)  # fmt: skip
def with_torch(theirs, ours, lesson):
    sizes: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(dist.group.WORLD, bucket)

    model = late_model(lesson)
    ddp = theirs.wrap(model, torch.device("cpu"))
    ask(isinstance(ddp, DistributedDataParallel), "wrap() returns something else", "not_torch")
    views = ddp.gradient_as_bucket_view
    ask(views, "the gradients are not views of the buckets", "not_bucket_view")
    yield "wrap() gives a DistributedDataParallel whose gradients are views"
    ddp.register_comm_hook(None, count)
    backward = Accumulation(theirs.accumulate_with_torch, ddp, lambda: len(sizes))
    training = Training(lesson, model, backward)
    for _, silent, total in backward.counts:
        what = f"{silent} of {total} buckets were sent before the last micro-batch"
        ask(not silent, what, "forward_outside")
    ask(all(total for _, _, total in backward.counts), "no bucket was sent", "not_reenabled")
    yield from training.judge(accumulating=True)
