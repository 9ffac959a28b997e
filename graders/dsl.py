"""The language of the graders: functions to define the steps of a lab, and to judge them.

A grader makes a `Lab`, which reads the hints of the grader, and defines each step as a
generator::

    LAB = Lab()

    @LAB.step(4, "average the gradients", "every gradient is the mean", "average_gradients")
    def average(submission, reference, lesson):
        submission.average_gradients(module)
        right = allclose(module.weight.grad, mean)
        require(right, "the gradients are not the mean", "not_divided")
        yield "the gradients equal those of one process"

The generator runs on every rank. `submission` is the learner's module and `reference` is the
finished one. Some mistakes become visible only in a comparison of all ranks. A second generator
finds them. It runs in the checker, and is defined by ``@average.judge`` above ``def _(group)``.
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

    `isolate_steps`: a step replaces everything that it does not grade by the definitions of the
    finished program, so that one mistake fails only one step. `preload_reference`: the finished
    program is imported once, before the ranks are forked. `ranks_named`: the sentence about a
    mistake begins with the number of the rank.
    """

    def __init__(
        self,
        *,
        isolate_steps: bool = True,
        preload_reference: bool = True,
        ranks_named: bool = False,
    ):
        self.path = Path(sys._getframe(1).f_globals["__file__"])
        self.hints = hints_of(self.path)
        self.steps: list[Step] = []
        self.isolate_steps, self.ranks_named = isolate_steps, ranks_named
        self.preload_reference = preload_reference

    @functools.cached_property
    def finished(self) -> ModuleType:
        """The finished program, which contains the solutions."""
        path = ROOT / self.path.parent.name / self.path.name
        return load(path, f"finished_{path.stem}")

    def hint(self, name: str) -> str:
        """Return the text of a hint of this grader, or of all graders."""
        texts = common_hints() | self.hints.texts
        return texts.get(name, f"there is no hint with the name {name}")

    def step(
        self, number: int, title: str, proves: str, uses: str = "", *, own: str | None = None,
        kind: type[Step] = Step, **settings: Any,
    ) -> Callable[[Callable], "StepBuilder"]:  # fmt: skip
        """Return a decorator that makes a step from a generator.

        The generator has the arguments `(submission, reference, lesson)`; a trial has the
        argument `(workspace)`. `uses`: the names that the learner must define. `own`: the
        definitions of the learner that the step uses, if they are not the same. `settings`: the
        fields of `graders.step.Step`.
        """

        def decorate(judge: Callable) -> StepBuilder:
            step = kind(number, title, proves, tuple(uses.split()), **settings)
            self.steps.append(step)
            return StepBuilder(self, step, judge, (uses if own is None else own).split())

        return decorate

    def alone(self, *facts: Any, **settings: Any) -> Callable[[Callable], "StepBuilder"]:
        """Return a decorator for a step in one process without a process group."""
        return self.step(*facts, world_sizes=(1,), joins=False, **settings)

    def trial(self, *facts: Any, **settings: Any) -> Callable[[Callable], "StepBuilder"]:
        """Return a decorator for a trial. Its ranks run the generator under `@name.probe`."""
        return self.step(*facts, kind=IntegrationStep, **settings)

    def __getitem__(self, number: int) -> Step:
        return next(step for step in self.steps if step.number == number)


class StepBuilder:
    """A step, with decorators that add its other functions."""

    def __init__(self, lab: Lab, step: Step, judge: Callable, own: list[str]):
        self.lab, self.step, self.own = lab, step, own
        if isinstance(step, IntegrationStep):
            step.trial = judge
        else:
            self.probe(judge)

    def probe(self, judge: Callable[[ModuleType, ModuleType, Lesson], Judge | None]):
        """Set the generator that runs on every rank."""

        @functools.wraps(judge)
        def run(submission: ModuleType, reference: ModuleType, lesson: Lesson) -> Judge:
            if self.lab.isolate_steps:
                keep_only(submission, reference, *self.own)
            try:
                yield from judge(submission, reference, lesson) or ()
            except Wrong as wrong:
                if self.lab.ranks_named and lesson.world > 1:
                    what = f"rank {lesson.rank}: {wrong.what}"
                    raise Wrong(what, wrong.hint) from wrong
                raise

        self.step.probe = run
        return self

    def judge(self, together: Callable[[Group], Judge | None]):
        """Set the generator that runs in the checker and compares all ranks."""
        self.step.together = together
        return self

    def stuck(self, why: Callable[[Group], None]):
        """Set a function that raises `Wrong` if it recognises why the ranks wait.

        It is for steps in which the ranks do not call the same collectives.
        """
        self.step.stuck = why
        return self


def keep_only(submission: ModuleType, reference: ModuleType, *own: str) -> None:
    """Replace all definitions of the learner, except `own`, by those of the finished program.

    `own` contains names of functions, of classes, and of methods such as "HookDDP.start".
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


def require(good: Any, what: str, hint: str) -> None:
    """Raise `Wrong` with a sentence and a hint unless `good` is true."""
    if not good:
        raise Wrong(what, hint)


def require_equal(fact: str, found: Any, wanted: Any, hint: str) -> None:
    """Raise `Wrong` unless a fact, named in words, equals `wanted` (or passes this test)."""
    good = wanted(found) if callable(wanted) else found == wanted
    if wanted is True and found is False:
        raise Wrong(f"this must be true, but it is not: {fact}", hint)
    if wanted is False and found is True:
        raise Wrong(f"this must not be true, but it is: {fact}", hint)
    require(good, f"{fact}: {show(found)}; it should be {show(wanted)}", hint)


def show(value: Any) -> str:
    """Return a value as a short text."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) < 90 else text[:87] + "…"


def described(error: Exception, module: ModuleType) -> tuple[str, str]:
    """Return a sentence about an error, and the learner's line of code that caused it."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if frame.filename == module.__file__]
    where = f", line {frames[-1].lineno}" if frames else ""
    text = " ".join(f"{error}".split())[:200]
    return f"{type(error).__name__}{where}: {text}", frames[-1].line if frames else ""


class Passes:
    """A test for `require_equal`, with the words that describe it."""

    def __init__(self, words: str, test: Callable[[Any], bool]):
        self.words, self.test = words, test

    def __call__(self, found: Any) -> bool:
        return found is not None and self.test(found)

    def __str__(self) -> str:
        return self.words


def at_most(bound: float) -> Passes:
    """Return the test that a number is not larger than this."""
    return Passes(f"at most {bound:.3g}", lambda found: found <= bound)


# --- comparing ----------------------------------------------------------------------------


def isclose(reference: Any, true: float, wide: float = 1e-6) -> bool:
    """Return whether something is a number and equals this number, apart from rounding."""
    try:
        return math.isclose(float(reference), true, rel_tol=wide, abs_tol=1e-30)
    except (TypeError, ValueError):
        return False


def allclose(a: Any, b: Any, wide: float = 1e-4, least: float = 1e-6) -> bool:
    """Return whether tensors, numbers, or lists of them are equal, apart from rounding.

    `wide` is the relative tolerance, and `least` the absolute one.
    """
    if isinstance(b, (list, tuple)):
        fits = isinstance(a, (list, tuple)) and len(a) == len(b)
        return fits and all(allclose(x, y, wide, least) for x, y in zip(a, b, strict=True))
    if isinstance(b, float):
        a, b = torch.as_tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=wide, atol=least)


def verdict(found: Any, wide: float = 1e-4, least: float = 1e-6, **candidates: Any) -> str:
    """Return the name of the first candidate that `found` equals, or "none" or "other"."""
    if found is None:
        return "none"
    equal = (name for name, each in candidates.items() if allclose(found, each, wide, least))
    return next(equal, "other")


def named(found: Any, hints: dict[str, Any], wide: float = 1e-6, other: str = "other") -> str:
    """Return the first hint with a number that equals `found`, or `other`."""
    for hint, numbers in hints.items():
        numbers = numbers if isinstance(numbers, (list, tuple)) else [numbers]
        if any(isclose(found, number, wide) for number in numbers):
            return hint
    return other


class Watch(TorchDispatchMode):
    """Records each operator with the dtype of its first tensor, and the largest new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, str]] = []
        self.largest = 0  # elements of the largest new tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        dtype = str(given[0].dtype) if given else ""
        self.launched.append((func.overloadpacket.__name__, dtype))
        old = {numbers(t).data_ptr() for t in given}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and numbers(tensor).data_ptr() not in old:
                self.largest = max(self.largest, numbers(tensor).numel())
        return result


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the stored elements of a tensor; of a sparse tensor, the values."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


@contextlib.contextmanager
def second_machine(accelerators: int, rank: int, world: int) -> Iterator[mock.Mock]:
    """Simulate the second of two machines, each with this number of GPUs, for a local rank.

    Yields the mock that is called to set the current device.
    """
    chosen = mock.Mock()

    def current() -> int:
        given = next((call.args[0] for call in reversed(chosen.mock_calls) if call.args), 0)
        return given if isinstance(given, int) else torch.device(given).index or 0

    variables = {"RANK": rank + world, "LOCAL_RANK": rank, "WORLD_SIZE": 2 * world}
    here = {"is_available": lambda: accelerators > 0, "device_count": lambda: accelerators}
    here_only = {"current_accelerator": lambda *_, **__: torch.device("cuda")}
    here_only |= {"set_device_index": chosen, "set_device_idx": chosen}
    here_only |= {"current_device_index": current, "current_device_idx": current}
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in variables.items()}),
        mock.patch.multiple(torch.accelerator, create=True, **here, **here_only),
        mock.patch.multiple(torch.cuda, set_device=chosen, current_device=current, **here),
    ):
        yield chosen


def judge_devices(
    world: int, pick: Callable[[int, int], str], *numbers: int, no_index: str = "device_index"
) -> Judge:
    """Judge the devices that all local ranks choose on machines with these numbers of GPUs.

    The first machine has enough GPUs. `pick(number, rank)` returns the name of the device that
    a rank chooses on a `second_machine` with this number of GPUs.
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


def groups_wanted(module: ModuleType, call: Callable[[], Any]) -> list[list[int]]:
    """Return the groups that a call requests from `new_group`, in order, without making them.

    Ranks that make different groups would wait for each other forever, so compare these lists
    first. Groups that only their members make (`use_local_synchronization`) are left out.
    During the call, a rank gets the group of all ranks for each group that it belongs to.
    """
    wanted: list[list[int]] = []
    real = distributed_c10d.new_group

    def note(
        ranks: Sequence[int] | None = None, *_: Any,
        use_local_synchronization: bool = False, **__: Any,
    ) -> Any:  # fmt: skip
        ranks = sorted(map(int, range(dist.get_world_size()) if ranks is None else ranks))
        if not use_local_synchronization:
            wanted.append(ranks)
        mine = dist.get_rank() in ranks
        return dist.group.WORLD if mine else dist.GroupMember.NON_GROUP_MEMBER

    with contextlib.ExitStack() as stack:
        for place in (dist, distributed_c10d, module):
            for name in [name for name, value in vars(place).items() if value is real]:
                stack.enter_context(mock.patch.object(place, name, note))
        call()
    return wanted


def before(owner: Any, name: str, note: Callable) -> None:
    """Let this function call `note` with the same arguments before each call."""
    real = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, noted)


def import_late_parts() -> None:
    """Use a dispatch mode and assert_close once, so that the forks need not import them."""
    with Watch():
        torch.testing.assert_close(torch.ones(1) + 1, torch.ones(1) + 1)
