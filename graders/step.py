"""Step: the definition of one step of a lab, or of one part of the assessment."""

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
    """One step. `graders.dsl.Lab` makes it from the functions that judge the step.

    `probe(submission, reference, lesson)` runs on every rank, with the learner's module and the
    finished one. `together(group)` runs afterwards in the checker. Each of them can be missing.
    Both are generators that yield a sentence for each correct result and raise `Wrong`.
    """

    number: int
    title: str
    proves: str
    uses: tuple[str, ...]  # the names that the learner must define
    world_sizes: tuple[int, ...] = (2, 3, 1)
    needs: tuple[int, ...] = ()  # the steps that must pass before this one can be judged
    joins: bool = True  # the process group is initialised before the probe
    symmetric: bool = True  # all ranks must call the same collectives
    # a pattern for the text of an error: the hint for this error
    crashes: dict[str, str] = field(default_factory=dict)
    compiles: bool = False  # the step uses torch.compile: a rank may use the whole limit
    order_hint: str = "order"  # for ranks that call collectives in different orders
    probe: Callable[..., Judge | None] | None = None
    together: Callable[[Group], Judge | None] | None = None
    # raises Wrong if it recognises why the ranks of a step that is not symmetric wait
    stuck: Callable[[Group], None] | None = None


@dataclass
class IntegrationStep(Step):
    """A step whose `trial(workspace)` runs groups and commands itself, and judges them.

    The ranks of a group run `probe`, and find the arguments of the trial in `lesson.scene`. A
    trial that only runs commands needs no probe.
    """

    trial: Callable[[Workspace], Judge | None] | None = None


def lab_of(name: str) -> Lab:
    """Import the grader of a lab, or of a part of the assessment, and return its `Lab`."""
    kind = "labs" if name.startswith("lab") else "assessment"
    grader: Any = importlib.import_module(f"graders.{kind}.{name}")
    return grader.LAB
