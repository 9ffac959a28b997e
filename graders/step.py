"""The definition of one step of a lab, or of one part of the assessment."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graders.protocol import Group, Judge

if TYPE_CHECKING:
    from graders.dsl import Lab
    from graders.supervisor import Workspace


@dataclass
class Step:
    """A step, which `graders.dsl.Lab` creates from the functions that judge it.

    `probe(submission, reference, lesson)` runs on every rank, with the learner's module and the
    module of the finished program. `judge_group(group)` runs afterwards in the checker. Both
    are optional. Both are generators, which yield a sentence for each correct result and raise
    `Wrong` for a mistake.
    """

    number: int
    title: str
    proves: str
    uses: tuple[str, ...]  # the names that the learner must define
    world_sizes: tuple[int, ...] = (2, 3, 1)
    needs: tuple[int, ...] = ()  # the steps that must pass before this one can be judged
    joins: bool = True  # the process group is initialised before the probe
    symmetric: bool = True  # all ranks must call the same collectives
    # the key is a pattern for the text of an error, and the value is the hint for this error
    crashes: dict[str, str] = field(default_factory=dict)
    compiles: bool = False  # the step uses torch.compile, so a rank may use the whole limit
    order_hint: str = "order"  # the hint if ranks call collectives in different orders
    probe: Callable[..., Judge | None] | None = None
    judge_group: Callable[[Group], Judge | None] | None = None
    # raises Wrong if it recognises why ranks wait that call different collectives on purpose
    explain_hang: Callable[[Group], None] | None = None


@dataclass
class IntegrationStep(Step):
    """A step whose function `trial(workspace)` runs groups and commands itself and judges them.

    The ranks of a group run `probe`. They find the arguments that the trial passes to them in
    `lesson.arguments`. A trial that only runs commands needs no probe.
    """

    trial: Callable[[Workspace], Judge | None] | None = None


def lab_of(name: str) -> Lab:
    """Import the grader of a lab, or of a part of the assessment, and return its `Lab`."""
    kind = "labs" if name.startswith("lab") else "assessment"
    grader: Any = importlib.import_module(f"graders.{kind}.{name}")
    return grader.LAB
