"""Grade lab 02: for each step, the checks, and the hint for each mistake that they find.

Gradients are checked in three training steps. Each training step starts from the parameters
that a single process has at this point, so that a mistake does not change the gradients of
later training steps.
"""

import contextlib
import inspect
import itertools
import operator
import os
import random
import re
import traceback
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it; import it here once for all processes
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from graders.dsl import (
    Lab,
    Lesson,
    Wrong,
    allclose,
    call_before,
    describe_error,
    judge_devices,
    matching_name,
    require,
    second_machine,
)
from graders.protocol import Call
from graders.rank import DelayedWork

LAB = Lab()
STEPS_TRAINED, SHARD, MICRO_BATCHES = 3, 10, 5
BUCKET_BYTES = 180  # one of the buckets is filled exactly


# --- the model and the true gradients -----------------------------------------------------


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
        self.last.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for tensor in [*self.parameters(), self.mean]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 2)
            self.std.copy_(torch.rand(4, generator=generator) + 1)
            self.last.seen.fill_(2**24 + 1 + seed)  # not a number of float32 for seed 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - self.mean) / self.std * self.scale["input"] + self.offset
        hidden = torch.tanh(self.first(x))
        order = (self.right, self.left) if self.right_first else (self.left, self.right)
        done = {branch: branch(hidden) for branch in order}
        return self.last(torch.tanh(torch.cat([done[self.left], done[self.right]], dim=1)))


class SingleProcess:
    """The parameters and gradients of a single process that trains with the whole batch.

    `whole` has the gradients of the whole batch for each training step, and `own` has those of
    the samples of this rank. In the last training step, the samples of rank 0 do not count, so
    that all gradients of rank 0 are zero there (unless it is the only rank).
    """

    def __init__(self, rank: int, world: int):
        generator, self.world = torch.Generator().manual_seed(7), world
        self.x = torch.randn(SHARD * world, 4, generator=generator)
        self.y = torch.randn(SHARD * world, 1, generator=generator)
        self.mine = list(range(rank, SHARD * world, world))
        self.weights = torch.ones(STEPS_TRAINED, SHARD * world, 1)
        self.step = 0  # the training step
        if world > 1:
            self.weights[-1, ::world] = 0
        self.states, self.whole, self.own = [], [], []
        model = Model(seed=0)
        for self.step in range(STEPS_TRAINED):
            self.states.append({k: v.clone() for k, v in model.state_dict().items()})
            self.own.append(self._gradients(model, self.mine))
            self.whole.append(self._gradients(model, list(range(SHARD * world))))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if parameter.requires_grad:
                        parameter -= 0.3 * self.whole[-1][name]

    def loss(self, model: nn.Module, samples: list[int]) -> torch.Tensor:
        """Return the mean squared error over these samples."""
        errors = (model(self.x[samples]) - self.y[samples]) ** 2
        return (errors * self.weights[self.step, samples]).mean()

    def _gradients(self, model: nn.Module, samples: list[int]) -> dict[str, torch.Tensor]:
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found = torch.autograd.grad(self.loss(model, samples), list(named.values()))
        return dict(zip(named, found, strict=True))

    def compare(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Return a verdict for each gradient, by the name of its parameter.

        A verdict is "right", "own" (the gradient of this rank's samples, or this gradient
        divided by the number of ranks), "zero", "added" (the sum of the right gradient and the
        one of the training step before), "rounded" (right to about two digits), "none",
        "other", or a factor, if the gradient is a multiple of the right one.
        """
        verdicts: dict[str, Any] = {}
        for name, whole in self.whole[step].items():
            gradient = model.get_parameter(name).grad
            own = self.own[step][name]
            candidates = {"right": whole, "own": own, "own divided": own / self.world}
            candidates |= {"zero": torch.zeros_like(whole)}
            if step > 0:
                candidates |= {"added": whole + self.whole[step - 1][name]}
            verdicts[name] = matching_name(gradient, **candidates)
            if verdicts[name] == "own divided":
                verdicts[name] = "own"
            if verdicts[name] == "other":
                factor = ((gradient * whole).sum() / (whole * whole).sum()).item()
                if factor > 1e-3 and allclose(gradient, factor * whole):
                    verdicts[name] = round(factor, 4)
                elif (gradient - whole).norm() < 1e-2 * whole.norm():
                    verdicts[name] = "rounded"
        return verdicts


class Training:
    """Three training steps of a model, with a verdict for each gradient in each of them.

    `why(step)` raises `Wrong` if it recognises why the gradients of this training step are
    wrong, or why this training step failed. With `buckets`, gradients should be views of
    buckets.
    """

    def __init__(
        self, lesson: Lesson, model: Model, backward: Callable[[SingleProcess], None],
        why: Callable[[int], None] | None = None, buckets: bool = False,
    ):  # fmt: skip
        self.lesson, self.truth = lesson, SingleProcess(lesson.rank, lesson.world)
        self.stale = "reallocated" if buckets else "stale_gradients"
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # as if on separate machines
        self.model, self.why, self.error = model, why, None
        self.hooks_when_ready = any(p._post_accumulate_grad_hooks for p in model.parameters())
        self.sums_only = True  # every all-reduce adds, or takes the mean
        self.waited_in = None  # the last phase in which the code waited for a collective
        self.waited_early = False  # it started another collective after this wait
        call_before(dist, "all_reduce", self._note_operation)
        self.frozen: set[str] = set()  # frozen parameters that got a gradient
        self.waits_again = False  # the code waited for a collective of an earlier step
        call_before(DelayedWork, "wait", lambda work, *_: self._note_wait(work))
        call_before(torch._C.Future, "wait", lambda future: future.done() or self._note_wait())
        state, start = model.state_dict(), self.truth.states[0]
        self.starts_equal = all(torch.equal(state[name], start[name]) for name in start)
        self.gradients = []
        for step in range(STEPS_TRAINED):
            model.load_state_dict(self.truth.states[step])
            model.zero_grad()
            self.truth.step = step
            try:
                with lesson.phase(f"step {step}"):
                    backward(self.truth)
            except Exception as error:
                self.error = error
                return
            self.gradients.append(self.truth.compare(model, step))
            named = model.named_parameters()
            graded = {name for name, parameter in named if parameter.grad is not None}
            self.frozen |= graded - set(self.truth.whole[step])
        lesson.wait_for_ranks()

    def _note_operation(
        self, tensor: Any = None, op: Any = dist.ReduceOp.SUM, *_: Any, **__: Any
    ) -> None:
        self.sums_only = self.sums_only and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
        phase = self.lesson.current_phase
        self.waited_early = self.waited_early or phase == self.waited_in

    def _note_wait(self, work: DelayedWork | None = None) -> None:
        step = f"step {self.truth.step}"
        in_step = work is not None and self.lesson.current_phase.startswith(step)
        again = in_step and not work.call.phase.startswith(step)
        self.waits_again = self.waits_again or again
        self.waited_in = self.lesson.current_phase

    def judge(self, accumulating: bool = False) -> Iterator[str]:
        """Raise `Wrong` for the first training step with a wrong gradient or a wrong call."""
        require(
            self.starts_equal, "the ranks start with different models", "no_initial_broadcast"
        )
        for step, verdicts in enumerate(self.gradients):
            here = self._calls_of(step)
            if set(verdicts.values()) != {"right"} or any(call.touched for call in here):
                if step > 0:
                    yield "the gradients of training step 1 equal those of a single process"
                if self.why:
                    self.why(step)
                self._explain(step, verdicts, here, accumulating)
        if self.error is not None:
            self._explain_error(self.error)
        yield "the gradients equal those of a single process in every training step"
        what = f"a frozen parameter has a gradient: {', '.join(sorted(self.frozen))}"
        require(not self.frozen, what, "frozen_graded")
        what = "the code waits for all-reduces of earlier training steps again"
        require(not self.waits_again, what, "not_forgotten")
        once = sum(gradient.numel() for gradient in self.truth.whole[0].values())
        reduced = sum(call.numel for call in self._calls_of(0) if call.name == "all_reduce")
        what = f"each training step reduces {reduced} numbers for {once} numbers in gradients"
        require(accumulating or reduced < 2 * once, what, "reduced_again")

    def _calls_of(self, step: int) -> list[Call]:
        """Return the collectives of a training step, without broadcasts if there are others."""
        calls = [call for call in self.lesson.calls if call.phase.startswith(f"step {step}")]
        return [call for call in calls if call.name != "broadcast"] or calls

    def _explain_error(self, error: Exception) -> None:
        """Raise the `Wrong` that fits this error of the learner's code, or the error itself."""
        if isinstance(error, (NotImplementedError, Wrong)):
            raise error
        (what, code), text = describe_error(error, self.lesson.module), f"{error}"
        if self.why:
            self.why(len(self.gradients))
        if "NoneType" in text:
            require("backward()" not in code, what, "backward_none")
            if re.search("attribute '(append|extend|clear|add)'|not iterable", text):
                raise Wrong(what, "list_is_none")
            trained = [p for p in self.model.parameters() if p.requires_grad]
            is_work = re.search("attribute '(wait|get_future|is_completed|result)'", text)
            if is_work:
                is_async = any(call.asynchronous for call in self.lesson.calls)
                raise Wrong(what, "work_lost" if is_async else "returns_none")
            if "unsupported operand" in text and "all_reduce" in code:
                raise Wrong(what, "returns_none")
            if any(p.grad is None for p in trained):
                in_hook = self.why and "unsupported operand" not in text
                hint = "other_parameter" if self.hooks_when_ready else "hook_too_early"
                raise Wrong(what, hint if in_hook else "returns_none")
            raise Wrong(what, "none_gradient")
        if "of type torch.Tensor" in text:
            raise Wrong(what, "not_a_tensor")
        if ".remove(" in code and re.search("Boolean value|must match|not in list", text):
            raise Wrong(what, "list_remove")
        raise error

    def _explain(self, step: int, verdicts: dict, here: list, accumulating: bool) -> None:
        """Raise the `Wrong` that fits these verdicts and these calls of one training step."""
        found = set(verdicts.values())
        when = f"in training step {step + 1} of {STEPS_TRAINED}, "
        first = len(self._calls_of(0))
        what = f"{when}your code calls {len(here)} collectives, and {first} in the first one"
        require(len(here) <= first, what, "more_each_step")
        touched = any(call.touched for call in here)
        what = f"{when}your code starts {len(here)} all-reduces for {len(verdicts)} gradients"
        require(not touched or step or len(here) <= len(verdicts), what, "hooked_again")
        if touched:
            what = f"{when}a gradient changed while its all-reduce was running"
            hint = "launched_early" if accumulating else "touched"
            raise Wrong(what, "not_forgotten" if step else hint)
        if {call.name for call in here} == {"broadcast"}:
            what = f"{when}every rank has the gradients of one rank"
            raise Wrong(what, "broadcast_gradients")
        if {call.name for call in here} == {"reduce"}:
            what = f"{when}only one rank gets the sum of the gradients"
            raise Wrong(what, "one_rank_only")
        if any(call.asynchronous and not call.returned for call in here):
            what = f"{when}all-reduces were started, but nothing waits for them"
            raise Wrong(what, "not_waited")
        what = f"{when}an all-reduce does not compute a sum"
        require(self.sums_only, what, "other_operation")
        require(found != {"zero"}, f"{when}all gradients are zero", "zero_gradients")
        what = f"{when}the gradients of the training step before are added to the right ones"
        require("added" not in found, what, "old_values")
        if found == {"none"} and here:
            is_async = any(call.asynchronous for call in here)
            hint = "gradient_removed" if is_async else "returns_none"
            raise Wrong(f"{when}every .grad is None after your function", hint)
        if found == {"own"}:
            reduced, not_reduced = "copy_reduced", "not_reduced"
            if step > 0:
                reduced, not_reduced = self.stale, "first_step_only"
            what = f"{when}every rank has the gradients of its own samples"
            raise Wrong(what, reduced if here else not_reduced)
        factors = {verdict for verdict in found if isinstance(verdict, float)}
        if len(found) == len(factors) == 1:
            factor = factors.pop()
            what = f"{when}the gradients are {factor:g} times those of a single process"
            if accumulating:
                is_sum = abs(factor - MICRO_BATCHES) < 1e-2
                raise Wrong(what, "loss_not_divided" if is_sum else "loss_wrong")
            require(abs(factor - self.lesson.world) > 1e-2, what, "not_divided")
            powers = [self.lesson.world**-k for k in range(1, 10)]
            again = any(abs(factor / power - 1) < 1e-2 for power in powers)
            hint = "divided_twice" if again else "divided_by_other"
            require(factor >= 1, what, "not_forgotten" if step else hint)
            require(step, what, "divided_by_other")
        what = f"{when}the gradients differ slightly from those of a single process"
        require(
            "rounded" not in found or found - {"right", "rounded", *factors}, what, "rounded"
        )
        sums = {each for each in factors if abs(each - self.lesson.world) < 1e-2}
        if not accumulating and found == {"right", *sums}:
            count = sum(verdict in sums for verdict in verdicts.values())
            what = f"{when}{count} of {len(verdicts)} gradients are {self.lesson.world} times"
            raise Wrong(f"{what} those of a single process", "not_divided")
        if "own" in found and found <= {"right", "own", *factors}:
            own = sorted(name for name, verdict in verdicts.items() if verdict == "own")
            what = f"{when}{len(own)} of {len(verdicts)} gradients are not averaged"
            raise Wrong(f"{what}: {', '.join(own)}", "subset")
        too_small = found <= {"right", *factors} and factors and max(factors) < 1
        what = f"{when}some gradients are {min(factors, default=0):g} times the right ones"
        require(accumulating or not too_small, what, "divided_twice")
        require(not (step and here), f"{when}the gradients are no longer right", self.stale)
        hint = "micro_batch_lost" if accumulating else "other"
        hint = "gathered" if {call.name for call in here} == {"all_gather"} else hint
        raise Wrong(f"{when}the gradients differ from those of a single process", hint)


MISTAKES = {
    "Boolean value of Tensor": "truth_of_tensor",
    "'(builtin_function_or_method|function|method)'|iterable, not method": "not_called",
    r"append\(\) takes exactly one argument": "append_one",
    "'(Parameter|Tensor)' object has no attribute 'wait'": "wait_of_tensor",
}


# --- step 1 -------------------------------------------------------------------------------


@LAB.step(
    1, "join the process group and choose the device",
    "all ranks are in one group, and each rank has its own device or uses the CPU",
    "init_distributed", joins=False,
    crashes={
        "NCCL|nccl": "no_gpu",
        "'(int|str)' and '(int|str)'|must be int, not str": "env_text",
    },
)  # fmt: skip
def init_distributed(submission, reference, lesson):
    signature, not_set = inspect.signature(dist.init_process_group), []

    def address() -> str:
        return ":".join(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT"))

    def check_address(*args: Any, **kwargs: Any) -> None:
        method = signature.bind(*args, **kwargs).arguments.get("init_method") or "env://"
        used = method.rpartition("/")[2] or address()
        what = f"torchrun sets the address {given}, and init_distributed() uses {used}"
        require(used == given, what, "own_address")

    given = address()
    call_before(dist, "init_process_group", check_address)
    n, device = lesson.world, submission.init_distributed()
    what = "init_distributed() did not initialise a process group"
    require(dist.is_initialized(), what, "not_joined")
    actual = dist.get_rank(), dist.get_world_size()
    what = f"in the process group, rank {lesson.rank} of {n} is rank {actual[0]} of {actual[1]}"
    require(actual == (lesson.rank, n), what, "not_joined")
    dist.all_reduce(torch.ones(1))
    yield f"{n} ranks are in one group, and an all-reduce completes"
    require(device is not None, "init_distributed() returns None", "start_none")
    is_device = isinstance(device, torch.device)
    require(is_device, "init_distributed() does not return a torch.device", "not_a_device")

    def pick(number: int, rank: int) -> str:
        """Return the device of a rank, and check the group that it joins."""
        joined: list[dict[str, Any]] = []

        def join(*args: Any, **kwargs: Any) -> None:
            check_address(*args, **kwargs)
            joined.append(signature.bind(*args, **kwargs).arguments)

        group = {"init_process_group": join, "get_world_size": lambda *_: 2 * n}
        group["get_rank"] = lambda *_: rank + n
        group["init_device_mesh"] = mock.Mock()  # it also creates the process group
        with (
            second_machine(number, rank, n) as chosen,
            mock.patch.multiple(dist, **group),
            mock.patch.multiple(device_mesh, **group),
            mock.patch.multiple(submission, create=True, **group),
        ):
            device = submission.init_distributed()
        what = f"with {number} accelerators for {n} ranks, init_distributed() returns a"
        is_device = isinstance(device, torch.device)
        require(
            is_device, f"{what} {type(device).__name__}, not a torch.device", "not_a_device"
        )
        device = "cpu" if device.type == "cpu" else str(device)  # a CPU may have any index
        indices = [
            each.args[0] if isinstance(each.args[0], int) else torch.device(each.args[0]).index
            for each in chosen.mock_calls
            if isinstance(next(iter(each.args), None), (int, str, torch.device))
        ]
        count = f"{number} accelerator{'s' * (number != 1)}"
        what = f"on a machine with {count}, local rank {rank} sets the current device"
        what += f" to {', '.join(map(str, indices))}"
        exist = all(index is None or index < number for index in indices)
        require(device != "cpu" or exist, what, "device_absent")
        what = f"on the second of two machines, local rank {rank} sets the current device to"
        what += f" {', '.join(map(str, indices))}"
        on_own_gpu = device != "cpu" and number >= n
        require(not on_own_gpu or set(indices) <= {rank}, what, "device_index")
        what = f"with {number} accelerators for {n} ranks, the device is {device}, but the"
        if on_own_gpu and not indices and not group["init_device_mesh"].called:
            not_set.append(f"{what} current device is not set")
        for each in joined:
            for name, true in (("rank", rank + n), ("world_size", 2 * n)):
                what = f"on the second of two machines, {name} {true} joins the group as"
                what += f" {name} {(given := each.get(name, -1))}"
                require(given in (-1, true), what, "not_joined")
            device_id = each.get("device_id")
            index = getattr(device_id, "index", device_id)
            what = (
                f"on the second of two machines, local rank {rank} passes device_id={device_id}"
            )
            require(not on_own_gpu or index in (None, rank), what, "device_index")
            backend = str(each.get("backend")).lower()
            what = f"with {number} accelerators for {n} ranks, the device is {device}, and the"
            what += f" backend is {backend}"
            require(not on_own_gpu or backend != "gloo", what, "gloo_on_gpu")
            require(device != "cpu" or backend != "nccl", what, "no_gpu")
        return device

    os.environ["MASTER_ADDR"] = "10.0.0.7"  # as if the first machine were a different one
    given = address()
    yield from judge_devices(n, pick, n, n - 1)
    names = [pick(n + 1, rank) for rank in range(n)]
    what = f"on the second of two machines with {n + 1} accelerators each, the devices are"
    right = names == [f"cuda:{rank}" for rank in range(n)]
    require(right, f"{what} {', '.join(names)}", "device_index")
    require(not not_set, next(iter(not_set), ""), "device_not_set")


# --- step 2 -------------------------------------------------------------------------------


def lengths(world: int) -> tuple[int, ...]:
    """Return three lengths of data sets. If `world` is above 2, 1 is less than half of it."""
    return 12 * world, 5 * world + 1, 1


@LAB.step(
    2, "give each rank its own samples",
    "every sample is read, all shards have the same length, and each epoch has a new order",
    "shard", world_sizes=(2, 3, 4, 1),
    crashes={"tuple index out of range": "uneven", "list index out of range": "no_element",
             "NoneType": "list_is_none", r"got \(int, (generator=)?int": "generator_kind",
             "'Tensor' and 'list'|'list' and 'Tensor'": "not_a_list"},
)  # fmt: skip
def shard(submission, reference, lesson):
    def salted_hash(value: Any) -> int:
        """Return a hash. The hash of a text differs between ranks, as in separate processes."""
        parts = value if isinstance(value, tuple) else (value,)
        has_text = any(isinstance(each, (str, bytes)) for each in parts)
        return hash((lesson.rank, value) if has_text else value)

    n, submission.hash = lesson.world, salted_hash
    samples = submission.shard(12 * n, lesson.rank, n, 0)
    kind = type(samples).__name__
    require(kind == "list", f"shard() returns a {kind}, not a list", "not_a_list")
    kinds = {type(each).__name__ for each in samples if not isinstance(each, Integral)}
    what = f"shard() returns a list that contains a {' and a '.join(sorted(kinds))}, not an int"
    require(not kinds, what, "not_a_list")
    for length in lengths(n):
        torch.manual_seed(lesson.rank)  # as if each rank had used random numbers before
        random.seed(lesson.rank)
        mine = [submission.shard(length, lesson.rank, n, epoch) for epoch in (0, 1, 2)]
        cut = [submission.shard(length, rank, n, 0) for rank in range(n)]
        lesson.fact(f"mine {length}", [list(map(int, samples)) for samples in mine])
        lesson.fact(f"all {length}", [list(map(int, samples)) for samples in cut])
    cut = [submission.shard(7, rank, 5, 0) for rank in range(5)]
    lesson.fact("five", [list(map(int, samples)) for samples in cut])


@shard.judge
def _(group):
    n = group.world
    for length in lengths(n):
        case = f"with {length} sample{'s' * (length > 1)}"
        shards, later, latest = zip(*group.facts(f"mine {length}"), strict=True)
        indices = [index for shard in shards for index in shard]
        absent, extra = length - len(set(indices)), len(indices) - len(set(indices))
        for index in itertools.chain(indices, *later, *latest):
            what = f"{case}, shard() returns the index {index}, which does not exist"
            require(0 <= index < length, what, "no_such_index")
        are_equal = 1 < n < length and all(shard == shards[0] for shard in shards)
        what = f"{case}, all {n} ranks read the same {len(shards[0])} samples"
        require(not are_equal, what, "same_shard")
        sizes = [str(len(shard)) for shard in shards]
        what = f"{case}, the shards of the ranks have the lengths {', '.join(sizes)}"
        hint = "uneven" if length > n else "short_padding"
        require(len(set(sizes)) == 1, what, hint)
        per_rank = -(-length // n)
        what = f"{case}, each of {n} ranks reads {len(shards[0])} samples, and not {per_rank}"
        require(absent or len(shards[0]) <= per_rank, what, "padding_too_long")
        if length == 12 * n:
            twice = max(len(shard) - len(set(shard)) for shard in shards)
            what = f"{case}, {twice} of the {per_rank} reads of a rank are repetitions"
            require(not twice, what, "not_a_permutation")
        if absent or extra >= n:
            differ = any(cut != list(shards) for cut in group.facts(f"all {length}"))
            hint = "overlap" if extra else "dropped"
            hint = "unseeded" if absent and extra and differ else hint
            what = f"samples that no rank reads: {absent}; repeated reads: {extra}"
            raise Wrong(f"{case}, {what}", hint)
        again = [cut[rank] for rank, cut in enumerate(group.facts(f"all {length}"))]
        what = f"{case}, a second call of shard() for epoch 0 returns different indices"
        require(again == list(shards), what, "not_repeated")
        yield f"{case}, every sample is read; samples that are read twice: {extra}"
        for epoch, cut in ((1, later), (2, latest)):
            sizes = sorted(map(len, cut))
            what = f"{case}, in epoch {epoch} the shards have {sizes[0]} to {sizes[-1]} indices"
            require(sizes[0] == sizes[-1] == len(shards[0]), what, "uneven")
            absent = length - len({index for shard in cut for index in shard})
            what = f"{case}, no rank reads {absent} of the samples in epoch {epoch}"
            require(not absent, what, "overlap")
        if length > n:
            for epoch, other in ((1, later), (2, latest)):
                what = f"{case}, epochs 0 and {epoch} have the same order"
                require(shards[0] != other[0], what, "epoch_ignored")
        pairs = zip(shards[0], shards[0][1:], strict=False)
        follow = sum((a + 1) % length == b for a, b in pairs) if n == 1 else 0
        what = f"{case}, {follow} of the {length} indices are followed by the next index"
        require(follow <= length // 2, what, "not_shuffled")
        if length == 12 * n and n > 1:
            fixed = all(set(a) == set(b) for a, b in zip(shards, later, strict=True))
            what = f"{case}, each rank reads the same samples in epochs 0 and 1"
            require(not fixed, what, "fixed_shards")
    for rank, cut in enumerate(group.facts("five")):
        whole = {index for shard in cut for index in shard} == set(range(7))
        what = f"on rank {rank}, shard(7, r, 5, 0) returns {cut} for r = 0 to 4"
        require(whole and {len(shard) for shard in cut} == {2}, what, "arguments_ignored")


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "start from the same model",
    "parameters, frozen parameters and buffers equal those of rank 0", "broadcast_state",
    crashes={
        "NoneType": "broadcast_none", "of type torch.Tensor": "broadcast_kind",
        "can't be cast to the desired output type": "state_averaged",
        "'(tuple|str)' object has no attribute|values to unpack": "broadcast_kind",
        **MISTAKES,
    },
)  # fmt: skip
def broadcast(submission, reference, lesson):
    model, mine = Model(lesson.rank), Model(lesson.rank).state_dict()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
    with lesson.phase("broadcast"):
        submission.broadcast_state(model)
    lesson.wait_for_ranks()
    state, first = model.state_dict(), Model(seed=0).state_dict()
    late = [c for c in lesson.calls if c.name == "broadcast" and not c.returned]
    what = f"nothing waits for {len(late)} of {len(lesson.calls)} collectives"
    require(not late, what, "broadcast_not_waited")
    wrong = {name for name in first if not torch.equal(state[name], first[name])}
    are_own = all(torch.equal(state[name], mine[name]) for name in wrong)
    seen = f"last.seen is {state['last.seen']} after the broadcast, and not {2**24 + 1}"
    require(are_own or wrong != {"last.seen"}, seen, "digits_lost")
    require(are_own, "the tensors do not have the values of rank 0", "other_source")
    what = f"each rank keeps its own values in all {len(first)} tensors"
    require(len(wrong) < len(first), what, "not_broadcast")
    if wrong:
        yield f"{len(first) - len(wrong)} of {len(first)} tensors equal those of rank 0"
        hint = "buffers" if wrong & {"mean", "std", "last.seen"} else "not_broadcast"
        hint = "own_tensors" if wrong == {"offset", "mean", "std"} else hint
        hint = "frozen" if wrong == {"offset"} else hint
        hint = "parameters" if wrong == {name for name, _ in model.named_parameters()} else hint
        raise Wrong(f"each rank keeps its own values in {', '.join(sorted(wrong))}", hint)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    new = sorted(name for name in tensors if found.get(name) is not tensors[name])
    require(not new, f"these tensors of the module were replaced: {', '.join(new)}", "replaced")
    changed = sorted(name for name in tensors if found[name].requires_grad != trained[name])
    what = f"requires_grad has changed for {', '.join(changed)}"
    require(not changed, what, "requires_grad_changed")


# --- steps 4 and 5 ------------------------------------------------------------------------


def make_model(lesson: Lesson) -> Model:
    """Make a model whose numbers, and whose order of gradients, differ from rank to rank."""
    return Model(seed=lesson.rank, right_first=lesson.rank % 2 == 1)


@LAB.step(
    4, "average the gradients",
    "in three training steps, the gradients equal those of a single process",
    "average_gradients",
    crashes={
        "AVG": "average", r"^shape '.*' is invalid for input of size": "piece_sizes",
        **MISTAKES,
    },
)  # fmt: skip
def average(submission, reference, lesson):
    def backward(truth: SingleProcess) -> None:
        truth.loss(model, truth.mine).backward()
        submission.average_gradients(model)

    model = make_model(lesson)
    reference.broadcast_state(model)
    yield from Training(lesson, model, backward).judge()


def train_overlapping(
    lesson: Lesson, model: Model, ddp: nn.Module, why: Callable[[int], None],
    buckets: bool = False,
) -> Iterator[str]:  # fmt: skip
    """Train, and check that all-reduces start during the backward pass without a wait."""

    def backward(truth: SingleProcess) -> None:
        step = lesson.current_phase
        with lesson.phase(f"{step} backward"):
            truth.loss(ddp, truth.mine).backward()
        with lesson.phase(f"{step} finish"):
            ddp.finish()

    training = Training(lesson, model, backward, why, buckets)
    yield from training.judge()
    require(
        any(call.phase.endswith(("backward", "finish")) for call in lesson.calls),
        "no collective was seen in backward or in finish()", "not_seen",
    )  # fmt: skip
    during = [call for call in lesson.calls if call.phase.endswith("backward")]
    require(during, "no all-reduce started before the backward pass ended", "not_early")
    count = sum(not call.asynchronous for call in during)
    what = f"the backward pass waits for {count} of its {len(during)} all-reduces"
    require(not count, what, "synchronous")
    what = "the backward pass waits for an all-reduce before it starts the next one"
    require(not training.waited_early, what, "synchronous")


@LAB.step(
    5, "start the all-reduces during the backward pass",
    "in three training steps, the gradients equal those of a single process, and all-reduces "
    "start during the backward pass", "HookDDP",
    crashes={
        "doesn't require gradient": "frozen_hook", "AVG": "average",
        "assigned grad expected": "work_as_gradient",
        r"<lambda>\(\) takes 0 positional": "hook_arguments",
        r"start\(\) takes 2 positional": "hook_of_module", **MISTAKES,
    },
)  # fmt: skip
def hooks(submission, reference, lesson):
    # all ranks use the same graph here, so hooks may launch as soon as a gradient is ready
    model = Model(seed=lesson.rank)
    real, tensors_with_hook = torch.Tensor.register_hook, []
    started: list[int] = []  # the all-reduces before the last gradient of a backward pass

    def count(_: torch.Tensor) -> None:
        started.append(sum(call.phase == lesson.current_phase for call in lesson.calls))

    model.scale["input"].register_hook(count)

    def register_hook(tensor: torch.Tensor, hook: Callable) -> Any:
        tensors_with_hook.append(tensor)
        return real(tensor, hook)

    with mock.patch.object(torch.Tensor, "register_hook", register_hook):
        try:
            ddp = submission.HookDDP(model)
        except (AttributeError, TypeError) as error:
            text = f"{error}"
            hint = "hook_on_gradient" if "attribute 'register" in text else "hook_called"
            require("NoneType" not in text, describe_error(error, submission)[0], hint)
            raise

    def why(step: int) -> None:
        what = f"{len(tensors_with_hook)} hooks were registered with register_hook"
        require(not tensors_with_hook, what, "hook_kind")

    yield from train_overlapping(lesson, model, ddp, why)
    what = "no all-reduce started before the last gradient was computed"
    require(all(started), what, "started_late")


# --- step 6 -------------------------------------------------------------------------------

EXPECTED_BUCKETS = [
    ["scale.input", "last.bias", "last.weight", "right.bias"],
    ["right.weight"],
    ["left.bias", "left.weight"],
    ["first.bias", "first.weight"],
]


def memory_of(tensor: torch.Tensor) -> int:
    """Return the address of the memory in which a tensor is stored."""
    return tensor.untyped_storage().data_ptr()


@LAB.step(
    6, "put gradients into buckets",
    "in three training steps, the gradients equal those of a single process; 9 parameters are "
    "in 4 buckets, and all ranks launch the buckets in the same order, although their "
    "gradients become ready in different orders",
    "make_buckets BucketDDP", own="Bucket make_buckets BucketDDP", world_sizes=(2, 3, 4, 1),
    crashes={
        "buckets not launched, 0 ": "one_launch", "buckets not launched": "not_noted",
        "AVG": "average", "list index out of range": "no_bound",
        r"^shape '.*' is invalid for input of size": "piece_sizes",
        "^Parameter containing": "other_bucket",
        "'Bucket' .* attribute 'detach'": "not_a_tensor",
        **MISTAKES,
    },
    order_hint="launch_order",
)  # fmt: skip
def buckets(submission, reference, lesson):
    names = {p: name for name, p in Model(seed=0).named_parameters() if p.requires_grad}
    in_order = [name for bucket in EXPECTED_BUCKETS for name in bucket]
    each = [[name] for name in in_order]
    for limit, wanted in (
        (BUCKET_BYTES + 1, EXPECTED_BUCKETS),
        (BUCKET_BYTES, EXPECTED_BUCKETS),
        (1, each),
    ):
        given = list(names)
        try:
            made = submission.make_buckets(given, limit)
        except (IndexError, ValueError) as error:
            empty = re.search("list index out of range|non-empty list", f"{error}")
            require(not empty, describe_error(error, submission)[0], "list_empty")
            raise
        is_unchanged = len(given) == len(names) and all(map(operator.is_, given, names))
        require(is_unchanged, "make_buckets() changes the list of parameters", "list_changed")
        require(
            isinstance(made, (list, tuple)), f"make_buckets() returns {made}", "bucket_list"
        )
        keys = [bucket.views if isinstance(bucket.views, dict) else "?" for bucket in made]
        known = all(p in names for views in keys for p in views)
        require(known, "the keys of `views` are not the parameters", "views_kind")
        found = [[names[p] for p in views] for views in keys]
        shown = " | ".join(", ".join(bucket) for bucket in found)
        what = f"with at most {limit} byte{'s' * (limit > 1)}, the buckets contain {shown}"
        require(not shown.startswith("first.weight"), what, "fill_order")
        require(all(found), f"{what}; {found.count([])} of them are empty", "bucket_empty")
        lost = set(names.values()) - {name for bucket in found for name in bucket}
        require(not lost, f"{what}; not in a bucket: {', '.join(sorted(lost))}", "bucket_lost")
        hint = "exact_fit" if limit == BUCKET_BYTES else "bucket_size"
        require([name for bucket in found for name in bucket] == in_order, what, "not_in_order")
        require(found == wanted, what, hint)
    buckets = submission.make_buckets(list(names), BUCKET_BYTES)
    yield f"{len(names)} parameters are in {len(buckets)} buckets, the last parameters first"
    graph = any(bucket.flat.requires_grad for bucket in buckets)
    require(not graph, "the flat tensor of a bucket requires a gradient", "flat_graph")
    shared = all(
        memory_of(view) == memory_of(bucket.flat) and view.shape == p.shape
        for bucket in buckets
        for p, view in bucket.views.items()
    )
    require(shared, "the views do not share the memory of their bucket", "not_views")
    starts = [view.data_ptr() for bucket in buckets for view in bucket.views.values()]
    what = f"the {len(starts)} views start at {len(set(starts))} different addresses"
    require(len(set(starts)) == len(starts), what, "views_overlap")
    doubles = [nn.Parameter(torch.zeros(3, dtype=torch.float64, device="meta")) for _ in "ab"]
    made = submission.make_buckets(doubles, 40)
    what = "with at most 40 bytes, two parameters of 24 bytes in float64 are in one bucket"
    require(len(made) == 2, what, "bucket_size")
    flat = made[0].flat
    what = "for parameters of torch.float64 on the device meta, the flat tensor of a bucket is"
    good = (flat.dtype, flat.device.type) == (torch.float64, "meta")
    require(good, f"{what} of {flat.dtype} on {flat.device}", "flat_kind")
    model = make_model(lesson)
    ddp = submission.BucketDDP(model, BUCKET_BYTES)
    ddp.begin = mock.Mock(wraps=ddp.begin)

    def why(step: int) -> None:
        if step > 0:
            require(
                ddp.begin.called, "begin() was not called after a training step", "not_begun"
            )
        whole = {0, *(bucket.flat.numel() for bucket in ddp.buckets)}
        here = [call for call in lesson.calls if call.phase.startswith(f"step {step}")]
        sums = [call.numel for call in here if call.name == "all_reduce"]
        parts = [number for number in sums if number not in whole]
        what = (
            f"an all-reduce sends {max(parts, default=0)} numbers, but no bucket has this size"
        )
        require(not parts, what, "not_the_bucket")

    yield from train_overlapping(lesson, model, ddp, why, buckets=True)
    pieces = {memory_of(p.grad) for p in model.parameters() if p.grad is not None}
    what = f"the gradients are in the memory of {len(pieces)} tensors"
    require(
        len(pieces) == 4, f"{what}, and not in the {len(EXPECTED_BUCKETS)} buckets", "not_views"
    )
    parameter, view = next(iter(ddp.buckets[0].views.items()))
    parameter.grad = view.clone()
    ddp.keep_in_bucket(parameter)
    what = "a gradient outside its bucket stays there if its numbers equal those of its view"
    require(memory_of(parameter.grad) == memory_of(view), what, "same_numbers")
    for number, bucket in enumerate(ddp.buckets, start=1):
        before_bucket = len(lesson.calls)
        for parameter, view in bucket.views.items():
            parameter.grad = torch.zeros_like(view)
            ddp.on_gradient(parameter)
            what = f"a gradient of bucket {number} does not become a view of the bucket"
            require(memory_of(parameter.grad) == memory_of(view), what, "not_views")
        sent = len(lesson.calls) - before_bucket
        what = f"when bucket {number} is complete, {sent} all-reduces start"
        require(sent == 1, what, "launched_again" if sent > 1 else "launched_late")
    ddp.finish()


# --- steps 7 and 8 ------------------------------------------------------------------------


def has_saved_tensors(node: Any) -> bool:
    """Return whether the node of a product has its saved tensors, which backward frees."""
    try:
        return node._saved_other is not None
    except RuntimeError:  # they are freed
        return False


MICRO_BATCH_CRASHES = {
    "backward through the graph a second time": "graph_twice",
    "context manager protocol|__enter__|attribute 'no_sync'": "no_sync_not_called",
}


class Accumulation:
    """A backward pass in micro-batches that counts messages.

    For each training step, `counts` has the number of forward passes, the number of messages
    before the last of them, and the number of all messages. `most_open` is the largest number
    of losses whose backward pass had not yet run when the next forward pass began.
    """

    def __init__(self, accumulate: Callable, ddp: nn.Module, sent: Callable[[], int]):
        self.accumulate, self.ddp, self.sent, self.counts = accumulate, ddp, sent, []
        self.most_open, self.finish, self.is_retained = 0, mock.Mock(), False
        self.is_bypassed = False  # loss_of got a different model
        self.is_changed = False  # accumulate() changed the list of micro-batches
        self.samples = 0  # the largest number of samples in a forward pass
        self.finishes: list[int] = []  # calls of finish() in each completed training step
        self.remaining = 0  # micro-batches without a forward pass
        if hasattr(ddp, "finish"):
            finish = ddp.finish

            def checked_finish() -> None:
                try:
                    finish()
                except RuntimeError:
                    what = (
                        f"accumulate() calls finish() {self.remaining} micro-batches too early"
                    )
                    require(self.remaining <= 0, what, "finished_early")
                    raise

            ddp.finish = self.finish = mock.Mock(wraps=checked_finish)

    def __call__(self, truth: SingleProcess) -> None:
        size, start, silent = SHARD // MICRO_BATCHES, self.sent(), []
        open_losses, graphs = 0, []

        def backward_runs(_: torch.Tensor) -> None:
            nonlocal open_losses
            open_losses -= 1

        def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
            nonlocal open_losses
            silent.append(self.sent() - start)
            self.remaining -= 1
            self.is_bypassed = self.is_bypassed or model is not self.ddp
            self.samples = max(self.samples, len(samples))
            self.most_open = max(self.most_open, open_losses)
            self.is_retained = self.is_retained or any(map(has_saved_tensors, graphs))
            loss = truth.loss(model, samples)
            if loss.requires_grad:
                open_losses += 1
                loss.register_hook(backward_runs)
                graphs[:] = [loss.grad_fn.next_functions[0][0]]
            return loss

        parts = [truth.mine[first : first + size] for first in range(0, SHARD, size)]
        self.finish.reset_mock()
        self.remaining = len(parts)
        try:
            self.accumulate(self.ddp, loss_of, given := list(parts))
            self.is_changed = self.is_changed or given != parts
            self.finishes.append(self.finish.call_count)
        except (RuntimeError, TypeError) as error:
            frames = traceback.extract_tb(error.__traceback__)
            in_forward = not silent and any(frame.name == "forward" for frame in frames)
            file = inspect.getfile(self.accumulate)
            line = next((frame.lineno for frame in frames if frame.filename == file), 0)
            what = f"in line {line}, the model fails, because it was not called by loss_of"
            require(not in_forward, what, "loss_of_unused")
            raise
        finally:
            self.counts.append((len(silent), (silent or [0])[-1], self.sent() - start))


@LAB.step(
    7, "accumulate gradients without communication",
    "with 5 micro-batches, the gradients equal those of a single process, and only the last "
    "micro-batch communicates",
    "AccumulatingDDP accumulate", needs=(6,),
    own="Bucket make_buckets BucketDDP AccumulatingDDP accumulate",
    crashes={
        "buckets not launched": "not_reenabled",
        "is not an iterator|generator didn't": "no_yield",
        "does not require grad": "no_grad", **MICRO_BATCH_CRASHES,
    },
)  # fmt: skip
def accumulate(submission, reference, lesson):
    model, truth, sent = make_model(lesson), SingleProcess(0, 1), lambda: len(lesson.calls)
    ddp = submission.AccumulatingDDP(model, BUCKET_BYTES)
    earlier = sent()
    with ddp.no_sync():
        truth.loss(ddp, truth.mine).backward()
        what = f"a backward pass inside no_sync started {sent() - earlier} all-reduces"
        require(sent() == earlier, what, "no_sync_sends")
        parameter = next(iter(ddp.buckets[0].views))
        ddp.buckets[0].waiting = {parameter}  # as if this were the only parameter of the bucket
        ddp.on_gradient(parameter)
        what = "inside no_sync, a bucket with a single parameter is launched"
        require(sent() == earlier, what, "no_sync_sends")
        ddp.begin()
        flats = {memory_of(bucket.flat) for bucket in ddp.buckets}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        outside = sum(memory_of(gradient) not in flats for gradient in gradients)
        what = f"after a backward pass inside no_sync, {outside} of {len(gradients)} gradients "
        require(not outside, f"{what}are not in their buckets", "silent_not_kept")
        what = "no_sync changes the attribute `sync` of the class AccumulatingDDP"
        require(getattr(submission.AccumulatingDDP, "sync", True), what, "shared_sync")
        with ddp.no_sync():
            truth.loss(ddp, truth.mine).backward()
        what = "inside a second no_sync within the first one, the backward pass communicates"
        require(sent() == earlier, what, "nested")
        truth.loss(ddp, truth.mine).backward()
    what = "after a second no_sync inside the first one, the backward pass communicates"
    require(sent() == earlier, what, "nested")
    yield "a backward pass inside no_sync starts no all-reduce"
    backward = Accumulation(submission.accumulate, ddp, sent)

    def why(step: int) -> None:
        for forwards, silent, total in backward.counts[: step + 1]:
            what = f"{silent} of {total} all-reduces started before the last micro-batch"
            require(forwards < 2 or not silent, what, "no_sync_unused")
        again = backward.finish.call_count
        require(again < 2, f"accumulate() called finish() {again} times", "finished_twice")
        called = all(backward.finishes[: step + 1])
        require(called, "accumulate() ended without a call of finish()", "not_finished")

    training = Training(lesson, model, backward, why, buckets=True)
    for forwards, silent, total in backward.counts:
        what = f"{silent} of {total} all-reduces started before the last micro-batch"
        require(forwards != MICRO_BATCHES or not silent, what, "no_sync_unused")
    yield from training.judge(accumulating=True)
    require_one_graph(backward, training.truth)
    is_swallowed = True
    try:
        with ddp.no_sync():
            raise InterruptedError
    except InterruptedError:
        is_swallowed = False
    earlier, training.truth.step = sent(), 0
    model.load_state_dict(training.truth.states[0])
    model.zero_grad()
    training.truth.loss(ddp, training.truth.mine).backward()
    what = "after an exception inside no_sync, the backward pass starts no all-reduce"
    require(sent() > earlier, what, "not_restored")
    require(
        not is_swallowed, "an exception inside no_sync does not leave the context", "swallowed"
    )
    ddp.finish()
    found = set(training.truth.compare(model, 0).values())
    what = "the gradients of one backward pass without micro-batches are wrong"
    require(found == {"right"}, what, "kept_late")


def require_one_graph(backward: Accumulation, truth: SingleProcess) -> None:
    """Raise `Wrong` if a forward pass began before the backward pass of an earlier one.

    Raise it also if `accumulate` takes the first of two equal micro-batches for the last one.
    """
    size = SHARD // MICRO_BATCHES
    what = f"a micro-batch has {size} samples, but a forward pass has {backward.samples}"
    require(backward.samples <= size, what, "batch_joined")
    require(not backward.is_changed, "the list of micro-batches has changed", "batches_changed")
    what = (
        f"a forward pass began while {backward.most_open} earlier losses had no backward pass"
    )
    require(not backward.most_open, what, "one_backward")
    what = "a backward pass does not free the tensors that its graph has saved"
    require(not backward.is_retained, what, "retained")
    start, silent, same_samples = backward.sent(), [], truth.mine[:1]

    def loss_of(model: nn.Module, samples: list[int]) -> torch.Tensor:
        silent.append(backward.sent() - start)
        return truth.loss(model, samples)

    truth.step = 0
    backward.accumulate(backward.ddp, loss_of, [same_samples, same_samples])
    what = f"of two equal micro-batches, the first one sends {silent[-1]} messages"
    require(not silent[-1], what, "which_is_last")


@LAB.step(
    8, "use PyTorch's DistributedDataParallel",
    "with 5 micro-batches, the gradients equal those of a single process, and only the last "
    "micro-batch communicates",
    "wrap accumulate_with_torch", world_sizes=(2, 3, 4, 1),
    crashes={
        "no attribute 'finish'": "finish_of_torch", "^Distrib.*device_ids": "device_ids",
        "does not require grad": "no_grad", "expect_autograd_hooks_": "static_graph",
        **MICRO_BATCH_CRASHES,
    },
)  # fmt: skip
def with_torch(submission, reference, lesson):
    sizes: list[int] = []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().numel())
        return allreduce_hook(dist.group.WORLD, bucket)

    model = make_model(lesson)
    ddp = submission.wrap(model, torch.device("cpu"))
    what = f"wrap() returns a {type(ddp).__name__}, and not a DistributedDataParallel"
    require(isinstance(ddp, DistributedDataParallel), what, "not_torch")
    views = ddp.gradient_as_bucket_view
    require(views, "the gradients are not views of the buckets", "not_bucket_view")
    cap = ddp.bucket_bytes_cap
    require(0 < cap <= 2**30, f"the limit of a bucket is {cap:,} bytes", "cap_unit")
    given: list[Any] = []

    def record(self, module: nn.Module, device_ids: Any = None, *_: Any, **__: Any) -> None:
        given.extend(device_ids or ())

    with (
        mock.patch.object(DistributedDataParallel, "__init__", record),
        contextlib.suppress(Exception),  # the machine may have no GPU 1
    ):
        submission.wrap(nn.Linear(1, 1), torch.device("cuda", 1))
    what = f"for the device cuda:1, wrap() passes device_ids={given}"
    right = all(torch.device(*["cuda"] * isinstance(n, int), n).index == 1 for n in given)
    require(right, what, "device_of_rank")
    yield "wrap() returns a DistributedDataParallel whose gradients are views of its buckets"
    ddp.register_comm_hook(None, count)
    backward = Accumulation(submission.accumulate_with_torch, ddp, lambda: len(sizes))
    training = Training(lesson, model, backward, buckets=True)
    for _, silent, total in backward.counts:
        what = f"{silent} of {total} buckets were sent before the last micro-batch"
        require(not silent, what, "forward_outside")
    what = "in a training step, no bucket was sent"
    failed = training.error is not None
    sent = failed or all(total for _, _, total in backward.counts)
    require(sent or not backward.is_bypassed, f"{what}: loss_of got ddp.module", "bypassed")
    require(failed or all(total for _, _, total in backward.counts), what, "all_silent")
    require(training.starts_equal, "the ranks start with different models", "not_sent_by_torch")
    yield from training.judge(accumulating=True)
    calls = [call for call in lesson.calls if call.phase.startswith("step")]
    what = f"DDP sent {len(sizes)} buckets, but there were {len(calls)} collectives"
    require(len(calls) <= len(sizes), what, "averaged_again")
    require_one_graph(backward, training.truth)
