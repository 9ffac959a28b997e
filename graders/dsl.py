"""The functions and classes with which a grader defines the steps of a lab and judges them.

A grader creates a `Lab` object, which reads the hints of the grader. It defines each step as a
generator::

    LAB = Lab()

    @LAB.step(4, "average the gradients", "every gradient is the mean", "average_gradients")
    def average(submission, reference, lesson):
        submission.average_gradients(module)
        right = allclose(module.weight.grad, mean)
        require(right, "the gradients are not the mean", "not_divided")
        yield "the gradients equal those of one process"

The generator runs on every rank. `submission` is the learner's module, and `reference` is the
module of the finished program. Some mistakes become visible only in a comparison of all ranks.
A second generator finds them. It runs in the process of the checker, and is defined by
``@average.judge`` above ``def _(group)``.
"""

import contextlib
import functools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graders.hints import common_hints, hints_of
from graders.protocol import Group, Judge, Wrong
from graders.rank import Lesson, load
from graders.step import IntegrationStep, Step

ROOT = Path(__file__).resolve().parents[1]


# --- a grader -----------------------------------------------------------------------------


class Lab:
    """The steps and the hints of one lab, or of one part of the assessment.

    `isolate_steps`: each step replaces everything that it does not grade by the definitions of
    the finished program, so that one mistake fails only one step.
    `preload_reference`: the finished program is imported once, before the ranks are forked.
    `names_rank`: the sentence about a mistake begins with the number of the rank.
    """

    def __init__(
        self,
        *,
        isolate_steps: bool = True,
        preload_reference: bool = True,
        names_rank: bool = False,
    ):
        self.path = Path(sys._getframe(1).f_globals["__file__"])
        self.hints = hints_of(self.path)
        self.steps: list[Step] = []
        self.isolate_steps, self.names_rank = isolate_steps, names_rank
        self.preload_reference = preload_reference

    @functools.cached_property
    def finished(self) -> ModuleType:
        """The module of the finished program, which contains the solutions."""
        path = ROOT / self.path.parent.name / self.path.name
        return load(path, f"finished_{path.stem}")

    def hint(self, name: str) -> str:
        """Return the text of a hint, which is a hint of this grader or of all graders."""
        texts = common_hints() | self.hints.texts
        return texts.get(name, f"there is no hint with the name {name}")

    def step(
        self, number: int, title: str, proves: str, uses: str = "", *, own: str | None = None,
        kind: type[Step] = Step, **settings: Any,
    ) -> Callable[[Callable], "StepBuilder"]:  # fmt: skip
        """Return a decorator that makes a step from a generator.

        The arguments of the generator are `(submission, reference, lesson)`. A trial has only
        the argument `(workspace)`.
        `proves`: the sentence that is printed if the step passes.
        `uses`: the names that the learner must define, with spaces between them.
        `own`: the names of the learner's definitions that the step does not replace by those of
        the finished program. Without `own`, these are the names in `uses`.
        `settings`: the other fields of `graders.step.Step`.
        """

        def decorate(judge: Callable) -> StepBuilder:
            step = kind(number, title, proves, tuple(uses.split()), **settings)
            self.steps.append(step)
            return StepBuilder(self, step, judge, (uses if own is None else own).split())

        return decorate

    def alone(self, *facts: Any, **settings: Any) -> Callable[[Callable], "StepBuilder"]:
        """Return a decorator for a step that runs in one process without a process group."""
        return self.step(*facts, world_sizes=(1,), joins=False, **settings)

    def trial(self, *facts: Any, **settings: Any) -> Callable[[Callable], "StepBuilder"]:
        """Return a decorator for a trial. Its ranks run the generator below `@name.probe`."""
        return self.step(*facts, kind=IntegrationStep, **settings)

    def __getitem__(self, number: int) -> Step:
        return next(step for step in self.steps if step.number == number)


class StepBuilder:
    """A step, with decorators that add further functions to it."""

    def __init__(self, lab: Lab, step: Step, judge: Callable, own: list[str]):
        self.lab, self.step, self.own = lab, step, own
        if isinstance(step, IntegrationStep):
            step.trial = judge
        else:
            self.probe(judge)

    def probe(self, judge: Callable[[ModuleType, ModuleType, Lesson], Judge | None]):
        """Use this generator on every rank."""

        @functools.wraps(judge)
        def run(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> Judge:
            if self.lab.isolate_steps:
                keep_only(submission, reference, *self.own)
            try:
                yield from judge(submission, reference, lesson) or ()
            except Wrong as wrong:
                if self.lab.names_rank and lesson.world > 1:
                    what = f"rank {lesson.rank}: {wrong.what}"
                    raise Wrong(what, wrong.hint) from wrong
                raise

        self.step.probe = run
        return self

    def judge(self, judge_group: Callable[[Group], Judge | None]):
        """Use this generator in the checker to compare all ranks."""
        self.step.judge_group = judge_group
        return self

    def explain_hang(self, explain: Callable[[Group], None]):
        """Use this function to raise `Wrong` if it recognises why the ranks wait.

        Only steps in which the ranks call different collectives need such a function.
        """
        self.step.explain_hang = explain
        return self


def keep_only(submission: ModuleType, reference: ModuleType, *own: str) -> None:
    """Replace all definitions of the learner except `own` by those of the finished program.

    `own` contains the names of functions, classes, and methods such as "HookDDP.start".
    """
    for name, value in vars(reference).items():
        defined = getattr(value, "__module__", None) == reference.__name__ or name.isupper()
        if not defined or name in own:
            continue
        methods = [each.partition(".")[2] for each in own if each.startswith(f"{name}.")]
        if not methods:
            setattr(submission, name, value)
        for method in vars(value) if methods else ():
            if callable(vars(value)[method]) and method not in methods:
                setattr(getattr(submission, name), method, vars(value)[method])


# --- requirements -------------------------------------------------------------------------


def require(condition: Any, what: str, hint: str) -> None:
    """Raise `Wrong` with the sentence `what` and a hint unless the condition is true."""
    if not condition:
        raise Wrong(what, hint)


def require_equal(fact: str, found: Any, wanted: Any, hint: str) -> None:
    """Raise `Wrong` unless the value `found` equals `wanted`, or meets the condition `wanted`.

    `fact` says in words what the value is. A condition is a callable such as `Condition`.
    """
    good = wanted(found) if callable(wanted) else found == wanted
    if wanted is True and found is False:
        raise Wrong(f"this must be true, but it is not: {fact}", hint)
    if wanted is False and found is True:
        raise Wrong(f"this must not be true, but it is: {fact}", hint)
    require(good, f"{fact}: {show(found)}; it should be {show(wanted)}", hint)


def show(value: Any) -> str:
    """Return a value as a text of fewer than 90 characters."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) < 90 else text[:87] + "…"


def describe_error(error: Exception, module: ModuleType) -> tuple[str, str]:
    """Return a sentence about an error, and the learner's line of code that caused it.

    The second text is empty if no line of the module caused the error.
    """
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if frame.filename == module.__file__]
    where = f", line {frames[-1].lineno}" if frames else ""
    text = " ".join(f"{error}".split())[:200]
    return f"{type(error).__name__}{where}: {text}", frames[-1].line if frames else ""


class Condition:
    """A condition for `require_equal`, with the words that describe it."""

    def __init__(self, words: str, predicate: Callable[[Any], bool]):
        self.words, self.predicate = words, predicate

    def __call__(self, value: Any) -> bool:
        return value is not None and self.predicate(value)

    def __str__(self) -> str:
        return self.words


def at_most(bound: float) -> Condition:
    """Return the condition that a number is not larger than this bound."""
    return Condition(f"at most {bound:.3g}", lambda value: value <= bound)


# --- comparing ----------------------------------------------------------------------------


def isclose(found: Any, true: float, rtol: float = 1e-6) -> bool:
    """Return whether `found` is a number and equals the number `true`, apart from rounding."""
    try:
        return math.isclose(float(found), true, rel_tol=rtol, abs_tol=1e-30)
    except (TypeError, ValueError):
        return False


def allclose(a: Any, b: Any, rtol: float = 1e-4, atol: float = 1e-6) -> bool:
    """Return whether tensors, numbers, or lists of them are equal, apart from rounding.

    `rtol` and `atol` are the relative and the absolute tolerance. Tensors of different shapes
    are not equal.
    """
    if isinstance(b, (list, tuple)):
        same_length = isinstance(a, (list, tuple)) and len(a) == len(b)
        return same_length and all(
            allclose(x, y, rtol, atol) for x, y in zip(a, b, strict=True)
        )
    if isinstance(b, float):
        a, b = torch.as_tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=rtol, atol=atol)


def matching_name(found: Any, rtol: float = 1e-4, atol: float = 1e-6, **candidates: Any) -> str:
    """Return the name of the first candidate that `found` equals.

    Returns "none" if `found` is None, and "other" if it equals no candidate.
    """
    if found is None:
        return "none"
    equal = (name for name, each in candidates.items() if allclose(found, each, rtol, atol))
    return next(equal, "other")


def matching_hint(
    found: Any, hints: dict[str, Any], rtol: float = 1e-6, other: str = "other"
) -> str:
    """Return the first hint whose number, or one of whose numbers, equals `found`.

    Returns `other` if no number equals `found`.
    """
    for hint, numbers in hints.items():
        numbers = numbers if isinstance(numbers, (list, tuple)) else [numbers]
        if any(isclose(found, number, rtol) for number in numbers):
            return hint
    return other


class OperatorRecorder(TorchDispatchMode):
    """Records the operators that run, and the size of the largest tensor that they create."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, str]] = []  # name, dtype of the first tensor
        self.largest = 0  # the number of elements of the largest new tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        dtype = str(inputs[0].dtype) if inputs else ""
        self.operators.append((func.overloadpacket.__name__, dtype))
        old = {stored_values(t).data_ptr() for t in inputs}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and stored_values(tensor).data_ptr() not in old:
                self.largest = max(self.largest, stored_values(tensor).numel())
        return result


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the values of a sparse tensor."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


@contextlib.contextmanager
def second_machine(accelerators: int, rank: int, world: int) -> Iterator[mock.Mock]:
    """Simulate that this process is a local rank on the second of two machines.

    Each machine has `accelerators` GPUs and `world` ranks. The context manager yields the mock
    that replaces the functions which set the current device.
    """
    set_device = mock.Mock()

    def current() -> int:
        device = next((c.args[0] for c in reversed(set_device.mock_calls) if c.args), 0)
        return device if isinstance(device, int) else torch.device(device).index or 0

    variables = {"RANK": rank + world, "LOCAL_RANK": rank, "WORLD_SIZE": 2 * world}
    both = {"is_available": lambda: accelerators > 0, "device_count": lambda: accelerators}
    accelerator = {"current_accelerator": lambda *_, **__: torch.device("cuda")}
    accelerator |= {"set_device_index": set_device, "set_device_idx": set_device}
    accelerator |= {"current_device_index": current, "current_device_idx": current}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.multiple(torch.accelerator, create=True, **both, **accelerator),
        mock.patch.multiple(torch.cuda, set_device=set_device, current_device=current, **both),
    ):
        yield set_device


def judge_devices(
    world: int, pick: Callable[[int, int], str], *numbers: int, no_index: str = "device_index"
) -> Judge:
    """Judge the devices that all local ranks choose on machines with these numbers of GPUs.

    The first number must be large enough for all ranks, and the others must be too small.
    `pick(number, rank)` returns the name of the device that a rank chooses on a
    `second_machine` with this number of GPUs.
    """
    enough, *few = [[pick(number, rank) for rank in range(world)] for number in numbers]
    devices = f"the devices are {', '.join(enough)}"
    what = f"on a machine with {numbers[0]} accelerators, {devices}"
    require("cpu" not in enough, what, "no_accelerator")
    hint = "device_index" if any(":" in name for name in enough) else no_index
    right = enough == [f"cuda:{rank}" for rank in range(world)]
    require(right, f"on the second of two machines, {devices}", hint)
    yield "on a machine with enough GPUs, every rank uses its own GPU"
    for number, names in zip(numbers[1:], few, strict=True):
        count = f"{number} accelerator{'s' * (number != 1)}"
        what = f"with {count} for {world} ranks, the devices are {', '.join(names)}"
        require(names == ["cpu"] * world, what, "shared_device")


def requested_groups(module: ModuleType, call: Callable[[], Any]) -> list[list[int]]:
    """Return the groups that a call requests from `new_group`, in order, without making them.

    Ranks that make different groups would wait for each other forever, so compare these lists
    first. Groups that only their members make (`use_local_synchronization`) are left out.
    During the call, `new_group` returns the group of all ranks if the rank is a member.
    """
    requests: list[list[int]] = []
    real = distributed_c10d.new_group

    def record_request(
        ranks: Sequence[int] | None = None, *_: Any,
        use_local_synchronization: bool = False, **__: Any,
    ) -> Any:  # fmt: skip
        ranks = sorted(map(int, range(dist.get_world_size()) if ranks is None else ranks))
        if not use_local_synchronization:
            requests.append(ranks)
        is_member = dist.get_rank() in ranks
        return dist.group.WORLD if is_member else dist.GroupMember.NON_GROUP_MEMBER

    with contextlib.ExitStack() as stack:
        for owner in (dist, distributed_c10d, module):
            for name in [name for name, value in vars(owner).items() if value is real]:
                stack.enter_context(mock.patch.object(owner, name, record_request))
        call()
    return requests


def gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks of a group, in rank order, by an unrecorded call."""
    values: list[Any] = [None] * dist.get_world_size(group)
    distributed_c10d.all_gather_object(values, value, group=group)
    return values


def call_before(owner: Any, name: str, hook: Callable) -> None:
    """Replace the function `owner.name` by one that first calls `hook` with its arguments."""
    real = getattr(owner, name)

    def with_hook(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, with_hook)


def import_late_parts() -> None:
    """Use a dispatch mode and assert_close once, because torch imports parts of them late.

    Ranks are forked from this process, so they do not have to import these parts again.
    """
    with OperatorRecorder():
        torch.testing.assert_close(torch.ones(1) + 1, torch.ones(1) + 1)
