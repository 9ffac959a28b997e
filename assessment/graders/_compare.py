"""What the graders of the assignments share: facts of a probe, held to what they should be.

A probe names its facts in words ("a request of 513 bytes takes"), so that the verdict can be
read: the fact, what was found, what it should have been.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from graders.runner import Group, Step, Wrong
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Check = tuple[str, Any, str]  # a fact, what it should be (or a test of it), the hint if not


class Watch(TorchDispatchMode):
    """What is launched: names with the dtype of the first tensor, and what new tensors hold."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, str]] = []
        self.largest = 0  # numbers in one new tensor

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
    """What it stores: of a sparse tensor the values."""
    if tensor.layout == torch.strided:
        return tensor
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()


def import_late_parts() -> None:
    """What torch imports when a mode or assert_close is first used: here, not in each fork."""
    with Watch():
        torch.testing.assert_close(torch.ones(1) + 1, torch.ones(1) + 1)


@functools.lru_cache
def finished(name: str) -> ModuleType:
    """A program of the assessment with its solutions."""
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"finished_{name}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def borrow(theirs: ModuleType, ours: ModuleType, names: str, keep: str) -> None:
    """Put finished functions and methods in place of those that this step does not grade."""
    for name in set(names.split()) - set(keep.split()):
        owner, _, method = name.rpartition(".")
        target, source = theirs, ours
        if owner:
            target, source = getattr(theirs, owner), getattr(ours, owner)
        setattr(target, method, vars(source)[method])


def alone(
    hints: dict[str, str], number: int, title: str, proves: str, probe: Callable, uses: str,
    *checks: Check, crashes: tuple[tuple[str, str], ...] = (),
) -> Step:  # fmt: skip
    """A step in one process, judged by checks."""
    return Step(
        number, title, proves, probe, hold(hints, *checks), tuple(uses.split()), (1,),
        joins=False, crashes=crashes,
    )  # fmt: skip


class below:
    """A bound: the fact is a number under it (or equal)."""

    def __init__(self, bound: float):
        self.bound = bound

    def __call__(self, found: Any) -> bool:
        return found is not None and found <= self.bound

    def __str__(self) -> str:
        return f"at most {self.bound:.3g}"


class that:
    """A test with its words, for a table of checks."""

    def __init__(self, words: str, test: Callable[[Any], bool]):
        self.words, self.test = words, test

    def __call__(self, found: Any) -> bool:
        return found is not None and self.test(found)

    def __str__(self) -> str:
        return self.words


def show(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) < 90 else text[:87] + "…"


def hold(hints: dict[str, str], *checks: Check) -> Callable[[Group, Callable], None]:
    """A judge: the first check that fails on any rank gives the verdict."""

    def judge(group: Group, right: Callable[[str], None]) -> None:
        for fact, wanted, hint in checks:
            for facts in (rank.facts for rank in group.ranks):
                found = facts.get(fact)
                if not (wanted(found) if callable(wanted) else found == wanted):
                    what = f"{fact}: {show(found)}; it should be {show(wanted)}"
                    raise Wrong(what, hints[hint])

    return judge
