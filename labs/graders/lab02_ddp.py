"""The steps of lab 02: what each must do, how that is measured, and the hint for each symptom.

Every measurement of gradients begins each of its three training steps from the parameters that
one process has there, so that one step's mistake does not hide in the next step's numbers.
"""

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from graders.runner import Group, Lesson, Step, Wrong

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
        if self.twisted:
            right = self.right(hidden)
            left = self.left(hidden)
        else:
            left = self.left(hidden)
            right = self.right(hidden)
        return self.last(torch.tanh(torch.cat([left, right], dim=1)))


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
            if gradient is None or gradient.shape != whole.shape:
                verdicts[name] = "none"
                continue
            gradient = gradient.detach().clone()
            factor = ((gradient * whole).sum() / (whole * whole).sum()).item()
            if close(gradient, whole):
                verdicts[name] = "right"
            elif close(gradient, self.own[step][name]):
                verdicts[name] = "own"
            elif close(gradient, factor * whole) and factor > 1e-3:
                verdicts[name] = round(factor, 4)
            else:
                verdicts[name] = "other"
        return verdicts


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal up to float32 rounding."""
    return torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def broadcast_state(module: nn.Module) -> None:
    """Step 3 as it should be, so that later steps can be graded without the learner's."""
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)


def measure(
    lesson: Lesson,
    wrap: Callable[[nn.Module], nn.Module],
    backward: Callable[[nn.Module, Truth], None],
    starts_equal: bool = True,
) -> tuple[nn.Module, Truth]:
    """Three training steps; report what each gradient is after each of them."""
    lesson.module.broadcast_state = broadcast_state
    truth = Truth(lesson.rank, lesson.world)
    model = Model(seed=lesson.rank, twisted=lesson.rank % 2 == 1)
    with lesson.phase("wrap"):
        wrapped = wrap(model)
    if starts_equal:
        start = truth.states[0]
        same = all(
            torch.equal(value, start[name]) for name, value in model.state_dict().items()
        )
        lesson.fact("same start", same)
    explained = []
    for step in range(STEPS_TRAINED):
        with torch.no_grad():
            for name, value in model.state_dict().items():
                value.copy_(truth.states[step][name])
        model.zero_grad()
        with lesson.phase(f"step {step}"):
            backward(wrapped, truth)
        explained.append(truth.explain(model, step))
        lesson.fact("gradients", explained)
    return model, truth


def judge_gradients(
    group: Group, right: Callable[[str], None], accumulating: bool = False
) -> None:
    """Find out from the gradients, and from what was called, what went wrong."""
    n = group.world
    if group.facts("same start").count(False):
        raise Wrong("the ranks begin with different models", HINTS["no_initial_broadcast"])
    for step in range(STEPS_TRAINED):
        found = [
            verdict for rank in group.facts("gradients") for verdict in rank[step].values()
        ]
        when = f"in step {step + 1} of {STEPS_TRAINED} "
        calls = [
            call for rank in group.ranks for call in rank.calls if call.name != "broadcast"
        ]
        here = [call for call in calls if call.phase.startswith(f"step {step}")]
        touched = any(call.touched for call in here)
        if not touched and all(verdict == "right" for verdict in found):
            continue
        if step > 0:
            right("the gradients of the first step are those of one process")
        if touched:
            what = f"{when}a gradient changed while its all-reduce was running"
            raise Wrong(what, HINTS["not_forgotten" if step else "touched"])
        if any(call.asynchronous and not call.returned for call in here):
            raise Wrong(
                f"{when}all-reduces were started and not waited for", HINTS["not_waited"]
            )
        if all(verdict == "own" for verdict in found):
            what = f"{when}every rank has the gradients of its own samples"
            if step > 0:
                raise Wrong(what, HINTS["reallocated" if here else "first_step_only"])
            raise Wrong(what, HINTS["copy_reduced" if here else "not_reduced"])
        factors = {verdict for verdict in found if isinstance(verdict, float)}
        if len(factors) == 1 and factors == set(found):
            factor = factors.pop()
            what = f"{when}the gradients are {factor:g} times those of one process"
            if accumulating:
                whole = abs(factor - MICRO_BATCHES) < 1e-2
                raise Wrong(what, HINTS["loss_not_divided" if whole else "loss_wrong"])
            if abs(factor - n) < 1e-2:
                raise Wrong(what, HINTS["not_divided"])
            if factor < 1:
                raise Wrong(what, HINTS["not_forgotten" if step else "divided_twice"])
        if set(found) <= {"right", "own", *factors} and "own" in found:
            names = {
                name
                for rank in group.facts("gradients")
                for name, verdict in rank[step].items()
                if verdict == "own"
            }
            total = len(group.facts("gradients")[0][step])
            what = f"{when}{len(names)} of {total} gradients are still each rank's own"
            raise Wrong(f"{what}: {', '.join(sorted(names))}", HINTS["subset"])
        if step > 0 and any(verdict != "right" for verdict in found) and here:
            raise Wrong(f"{when}the gradients are no longer right", HINTS["reallocated"])
        hint = HINTS["micro_batch_lost" if accumulating else "other"]
        raise Wrong(f"{when}the gradients are not those of one process", hint)
    right("the gradients are those of one process in every step")


# --- step 1 -------------------------------------------------------------------------------


def pretend(lesson: Lesson, devices: int) -> str:
    """What start() returns on the second of two machines that have so many accelerators."""
    environment = {
        "RANK": str(lesson.rank + lesson.world),
        "WORLD_SIZE": str(2 * lesson.world),
    }
    nothing = mock.Mock()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(dist, "init_process_group", nothing),
        mock.patch.object(lesson.module, "init_process_group", nothing, create=True),
        mock.patch.object(torch.accelerator, "is_available", lambda: True),
        mock.patch.object(torch.accelerator, "device_count", lambda: devices),
        mock.patch.object(
            torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
        ),
        mock.patch.object(torch.accelerator, "set_device_index", nothing),
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", lambda: devices),
        mock.patch.object(torch.cuda, "set_device", nothing),
    ):
        return str(lesson.module.start())


def probe_start(lesson: Lesson) -> None:
    device = lesson.module.start()
    lesson.fact("device", device.type if isinstance(device, torch.device) else None)
    lesson.fact("joined", dist.is_initialized())
    if dist.is_initialized():
        lesson.fact("who", [dist.get_rank(), dist.get_world_size()])
        total = torch.tensor(float(lesson.rank + 1))
        dist.all_reduce(total)
        lesson.fact("total", total.item())
    lesson.fact("enough", pretend(lesson, lesson.world))
    if lesson.world > 1:
        lesson.fact("too few", pretend(lesson, lesson.world - 1))


def judge_start(group: Group, right: Callable[[str], None]) -> None:
    n = group.world
    if not all(group.facts("joined")):
        raise Wrong("no process group has been initialised", HINTS["not_joined"])
    if group.facts("who") != [[r, n] for r in range(n)]:
        raise Wrong(f"the ranks see themselves as {group.facts('who')}", HINTS["not_joined"])
    right(f"{n} ranks are in one group, and an all-reduce adds them up")
    if None in group.facts("device"):
        raise Wrong("start() does not return a torch.device", HINTS["not_a_device"])
    enough = group.facts("enough")
    if "cpu" in enough:
        what = f"on a machine with {n} accelerators, the devices are {', '.join(enough)}"
        raise Wrong(what, HINTS["no_accelerator"])
    if enough != [f"cuda:{r}" for r in range(n)]:
        what = f"on the second machine of two, the devices are {', '.join(enough)}"
        raise Wrong(what, HINTS["device_index"])
    right("on a GPU machine every rank would take its own GPU")
    if n > 1 and group.facts("too few") != ["cpu"] * n:
        devices = ", ".join(group.facts("too few"))
        raise Wrong(
            f"with {n - 1} for {n} ranks, the devices are {devices}", HINTS["shared_device"]
        )


# --- step 2 -------------------------------------------------------------------------------


def probe_shard(lesson: Lesson) -> None:
    shard, n = lesson.module.shard, lesson.world
    first = shard(12 * n, lesson.rank, n, 0)
    lesson.fact("kind", type(first).__name__)
    for length in (12 * n, 5 * n + 1):
        mine = [list(map(int, shard(length, lesson.rank, n, epoch))) for epoch in (0, 1)]
        all_here = [list(map(int, shard(length, rank, n, 0))) for rank in range(n)]
        lesson.fact(f"length {length}", {"mine": mine, "all": all_here})


def judge_shard(group: Group, right: Callable[[str], None]) -> None:
    n = group.world
    kind = group.facts("kind")[0]
    if kind != "list":
        raise Wrong(f"shard() returns a {kind}, not a list", HINTS["not_a_list"])
    for length in (12 * n, 5 * n + 1):
        facts = group.facts(f"length {length}")
        shards = [fact["mine"][0] for fact in facts]
        dealt = [index for shard in shards for index in shard]
        absent, extra = set(range(length)) - set(dealt), len(dealt) - len(set(dealt))
        wrong_range = [index for index in dealt if not 0 <= index < length]
        what = f"of {length} samples"
        if wrong_range:
            raise Wrong(f"{what} index {wrong_range[0]} does not exist", HINTS["overlap"])
        if n > 1 and len({tuple(shard) for shard in shards}) == 1:
            raise Wrong(
                f"{what} all {n} ranks read the same {len(shards[0])}", HINTS["same_shard"]
            )
        if len({len(shard) for shard in shards}) > 1:
            lengths = ", ".join(str(len(shard)) for shard in shards)
            raise Wrong(f"{what} the ranks read {lengths}", HINTS["uneven"])
        counts = f"{what} {len(absent)} are read by nobody and {extra} more than once"
        if (
            absent
            and extra
            and any(fact["all"][r] != shards[r] for r, fact in enumerate(facts))
        ):
            raise Wrong(counts, HINTS["unseeded"])
        if absent and not extra:
            raise Wrong(counts, HINTS["dropped"])
        if absent or extra >= n:
            raise Wrong(counts, HINTS["overlap"])
        right(f"{what} every one is read, {extra} of them twice")
        if facts[0]["mine"][0] == facts[0]["mine"][1]:
            raise Wrong("epochs 0 and 1 have the same order", HINTS["epoch_ignored"])


# --- step 3 -------------------------------------------------------------------------------


def probe_broadcast(lesson: Lesson) -> None:
    model = Model(seed=lesson.rank)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lesson.module.broadcast_state(model)
    expected = Model(seed=0).state_dict()
    state = {}
    for name, value in model.state_dict().items():
        if torch.equal(value, expected[name]):
            state[name] = "right"
        else:
            state[name] = "own" if torch.equal(value, before[name]) else "other"
    lesson.fact("state", state)


def judge_broadcast(group: Group, right: Callable[[str], None]) -> None:
    states = group.facts("state")
    wrong = {name for state in states for name, what in state.items() if what != "right"}
    own = {name for state in states for name, what in state.items() if what == "own"}
    total, buffers = len(states[0]), {"mean", "std", "seen"}
    if not wrong:
        return
    if any(what == "other" for state in states for what in state.values()):
        raise Wrong("the tensors do not hold rank 0's values", HINTS["other_source"])
    if len(own) == total:
        what = f"each rank keeps its own values in all {total} tensors"
        raise Wrong(what, HINTS["not_broadcast"])
    if len(own) < total:
        right(f"{total - len(own)} of {total} tensors are rank 0's")
    what = f"each rank keeps its own {', '.join(sorted(own))}"
    if own == {"offset"}:
        raise Wrong(what, HINTS["frozen"])
    raise Wrong(what, HINTS["buffers" if own & buffers else "not_broadcast"])


# --- steps 4 and 5 ------------------------------------------------------------------------


def probe_average(lesson: Lesson) -> None:
    def backward(model: nn.Module, truth: Truth) -> None:
        truth.loss(model, truth.mine).backward()
        lesson.module.average_gradients(model)

    measure(lesson, lambda model: model, backward, starts_equal=False)


def backward_then_finish(lesson: Lesson) -> Callable[[nn.Module, Truth], None]:
    def backward(ddp: nn.Module, truth: Truth) -> None:
        step = lesson.current_phase
        with lesson.phase(f"{step} backward"):
            truth.loss(ddp, truth.mine).backward()
        with lesson.phase(f"{step} finish"):
            ddp.finish()

    return backward


def probe_hooks(lesson: Lesson) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        # one graph on all ranks: hooks may launch in the order in which gradients are ready
        model.twisted = False
        return lesson.module.HookDDP(model)

    measure(lesson, wrap, backward_then_finish(lesson))


def judge_overlap(group: Group) -> None:
    """All-reduces must begin during backward, and must not be waited for there."""
    for rank in group.ranks:
        during = [call for call in rank.calls if call.phase.endswith("backward")]
        if not during:
            raise Wrong("no all-reduce began before backward ended", HINTS["not_early"])
        if not all(call.asynchronous for call in during):
            raise Wrong("backward waits for each all-reduce", HINTS["synchronous"])


def judge_hooks(group: Group, right: Callable[[str], None]) -> None:
    judge_gradients(group, right)
    judge_overlap(group)


# --- step 6 -------------------------------------------------------------------------------


def probe_buckets(lesson: Lesson) -> None:
    model = Model(seed=0)
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    buckets = lesson.module.make_buckets(list(trained), BUCKET_BYTES)
    lesson.fact("buckets", [[trained[p] for p in bucket.views] for bucket in buckets])
    start = [bucket.flat.untyped_storage().data_ptr() for bucket in buckets]
    shared = [
        view.untyped_storage().data_ptr() == start[i] and view.shape == p.shape
        for i, bucket in enumerate(buckets)
        for p, view in bucket.views.items()
    ]
    lesson.fact("shared", all(shared))
    model, _ = measure(
        lesson,
        lambda model: lesson.module.BucketDDP(model, BUCKET_BYTES),
        backward_then_finish(lesson),
    )
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    owners = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    lesson.fact("memories", len(owners))


FILLED = [
    ["scale.input", "last.bias", "last.weight", "right.bias"],
    ["right.weight"],
    ["left.bias", "left.weight"],
    ["first.bias", "first.weight"],
]


def judge_buckets(group: Group, right: Callable[[str], None]) -> None:
    buckets = group.facts("buckets")[0]
    flat = [name for bucket in buckets for name in bucket]
    shown = " | ".join(", ".join(bucket) for bucket in buckets)
    if flat and flat[0] == "first.weight":
        raise Wrong(f"the buckets are {shown}", HINTS["fill_order"])
    if buckets != FILLED:
        raise Wrong(f"with {BUCKET_BYTES} bytes the buckets are {shown}", HINTS["bucket_size"])
    right(f"{len(flat)} parameters are in {len(buckets)} buckets, the last ones first")
    if not all(group.facts("shared")):
        raise Wrong("the views do not share the memory of their bucket", HINTS["not_views"])
    judge_gradients(group, right)
    judge_overlap(group)
    if group.facts("memories") != [len(FILLED)] * group.world:
        what = f"{len(flat)} gradients lie in {max(group.facts('memories'))} pieces of memory"
        raise Wrong(f"{what}, not in the {len(FILLED)} buckets", HINTS["not_views"])


# --- steps 7 and 8 ------------------------------------------------------------------------


def micro_batches(truth: Truth) -> list[list[int]]:
    size = SHARD // MICRO_BATCHES
    return [truth.mine[first : first + size] for first in range(0, SHARD, size)]


def probe_accumulate(lesson: Lesson) -> None:
    def sent() -> int:
        return lesson.calls

    counts: list[list[int]] = []

    def backward(ddp: nn.Module, truth: Truth) -> None:
        before = []

        def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
            before.append(sent())
            return truth.loss(model, samples)

        lesson.module.accumulate(ddp, loss_of, micro_batches(truth))
        counts.append(
            [len(before), before[-1] - before[0] if before else 0, sent() - before[0]]
        )
        lesson.fact("counts", counts)

    def wrap(model: nn.Module) -> nn.Module:
        ddp, data = lesson.module.AccumulatingDDP(model, BUCKET_BYTES), Truth(0, 1)
        before = sent()
        with ddp.no_sync():
            data.loss(ddp, data.mine).backward()
        lesson.fact("silent", sent() - before)
        return ddp

    made: list[nn.Module] = []
    _, truth = measure(lesson, lambda model: made.append(wrap(model)) or made[0], backward)
    wrapped = made[0]
    try:
        with wrapped.no_sync():
            raise InterruptedError
    except InterruptedError:
        pass
    before = sent()
    truth.loss(wrapped, truth.mine).backward()
    lesson.fact("after error", sent() - before)


def judge_accumulate(group: Group, right: Callable[[str], None]) -> None:
    if any(group.facts("silent")):
        what = f"a backward inside no_sync started {group.facts('silent')[0]} all-reduces"
        raise Wrong(what, HINTS["no_sync_sends"])
    right("a backward inside no_sync starts no all-reduce")
    for rank in group.facts("counts"):
        for forwards, silent, total in rank:
            if forwards == MICRO_BATCHES and silent:
                what = f"{silent} of {total} all-reduces came before the last micro-batch"
                raise Wrong(what, HINTS["no_sync_sends"])
    judge_gradients(group, right, accumulating=True)
    if not all(group.facts("after error")):
        raise Wrong("after an error in no_sync, backward starts nothing", HINTS["not_restored"])


def probe_torch(lesson: Lesson) -> None:
    counts: list[list[int]] = []
    sent: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().numel())
        return allreduce_hook(dist.group.WORLD, bucket)

    def wrap(model: nn.Module) -> nn.Module:
        ddp = lesson.module.wrap(model, torch.device("cpu"))
        is_torch = isinstance(ddp, DistributedDataParallel)
        lesson.fact("is torch", is_torch)
        if is_torch:
            lesson.fact("views", ddp.gradient_as_bucket_view)
            ddp.register_comm_hook(None, count)
        return ddp

    def backward(ddp: nn.Module, truth: Truth) -> None:
        before, sent[:] = [], []

        def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
            before.append(len(sent))
            return truth.loss(model, samples)

        if isinstance(ddp, DistributedDataParallel):
            lesson.module.accumulate_with_torch(ddp, loss_of, micro_batches(truth))
        counts.append([before[-1] if before else 0, len(sent)])
        lesson.fact("counts", counts)

    measure(lesson, wrap, backward)


def judge_torch(group: Group, right: Callable[[str], None]) -> None:
    if not all(group.facts("is torch")):
        raise Wrong("wrap() returns something else", HINTS["not_torch"])
    if not all(group.facts("views")):
        raise Wrong("the gradients are not views of the buckets", HINTS["not_bucket_view"])
    right("wrap() gives a DistributedDataParallel whose gradients are views")
    for rank in group.facts("counts"):
        for silent, total in rank:
            if silent:
                what = f"{silent} of {total} buckets were sent before the last micro-batch"
                raise Wrong(what, HINTS["forward_outside"])
    if not all(total for rank in group.facts("counts") for _, total in rank):
        raise Wrong("no bucket was sent", HINTS["not_reenabled"])
    judge_gradients(group, right, accumulating=True)


STEPS = [
    Step(
        1,
        "start the process group, pick the device",
        "all ranks are in one group, each with a device of its own or on the CPU",
        probe_start,
        judge_start,
        uses=("start",),
        joins=False,
        crashes=(("NCCL|nccl", HINTS["no_gpu"]),),
    ),
    Step(
        2,
        "deal out the samples",
        "every sample is read, in equal shares and in a new order each epoch",
        probe_shard,
        judge_shard,
        uses=("shard",),
        worlds=(2, 3, 4, 1),
    ),
    Step(
        3,
        "begin from the same model",
        "parameters, frozen parameters and buffers are rank 0's",
        probe_broadcast,
        judge_broadcast,
        uses=("broadcast_state",),
    ),
    Step(
        4,
        "average the gradients",
        "three steps have the gradients of one process",
        probe_average,
        judge_gradients,
        uses=("average_gradients",),
        crashes=(("NoneType", HINTS["none_gradient"]), ("AVG", HINTS["average"])),
    ),
    Step(
        5,
        "begin while backward still runs",
        "three steps have the gradients of one process, reduced during backward",
        probe_hooks,
        judge_hooks,
        uses=("HookDDP",),
        crashes=(
            ("doesn't require gradient", HINTS["frozen_hook"]),
            ("NoneType", HINTS["none_gradient"]),
            ("AVG", HINTS["average"]),
        ),
    ),
    Step(
        6,
        "buckets",
        "three steps have the gradients of one process, in 4 buckets for 9 parameters, "
        "launched in one order though the ranks' gradients are ready in different orders",
        probe_buckets,
        judge_buckets,
        uses=("make_buckets", "BucketDDP"),
        worlds=(2, 3, 4, 1),
        crashes=((r"buckets not launched, 0 ", HINTS["one_launch"]), ("AVG", HINTS["average"])),
        order_hint=HINTS["launch_order"],
    ),
    Step(
        7,
        "accumulate, and be silent meanwhile",
        "5 micro-batches have the gradients of one process, and only the last communicates",
        probe_accumulate,
        judge_accumulate,
        uses=("AccumulatingDDP", "accumulate"),
        needs=(6,),
        crashes=(("buckets not launched", HINTS["not_reenabled"]),),
    ),
    Step(
        8,
        "torch's DistributedDataParallel",
        "5 micro-batches have the gradients of one process, and only the last communicates",
        probe_torch,
        judge_torch,
        uses=("wrap", "accumulate_with_torch"),
        worlds=(2, 3, 4, 1),
    ),
]
