"""Wrong answers: a table of mistakes for each lab and each part of the assessment.

An entry contains a mistake in the finished program, the step that fails because of it, and the
hint that the grader must print:

    wrong = Table("labs/lab02_ddp.py")

    wrong("average_not_divided", step=4, hint="not_divided",
          old="parameter.grad /= dist.get_world_size()", new="")

`old` is a text that occurs exactly once in the finished program, and `new` is the text that
replaces it. A mistake in several places has `edits=[(old, new), …]`. An entry without a hint is
not a mistake but a different right answer, so its step must pass. `make test` grades a third of
the right answers and a seventh of the mistakes. An edit of the program or of its grader selects
other answers. `-k NAME` grades all answers that it selects, and `--every-answer` grades all. CI does this with one version of
Python.

Write a text of several lines in triple quotes, without the indentation that it has in the
program. All lines after the first get the indentation of the line in which `old` begins.
`old=Body("HookDDP.start")` replaces the whole body of this method, apart from its docstring.
"""

from __future__ import annotations

import ast
import functools
import re
import textwrap
import zlib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRADING = (
    "graders/__init__.py", "graders/common.hints.toml", "graders/dsl.py", "graders/hints.py",
    "graders/protocol.py", "graders/rank.py", "graders/sandbox.py", "graders/scores.py",
    "graders/step.py", "graders/supervisor.py", "graders/verdict.py",
    "src/worldsize/__init__.py", "src/worldsize/execution",
    "labs/check.py", "labs/cuda_on_cpu.py", "labs/start.py", "tests/grading.py",
    "tests/wrong_answers/__init__.py",
)  # fmt: skip
ASSESSED = (
    "assessment", "graders/assessment", "graders/labs/lab06_cuda_basics.py",
    "graders/labs/lab06_cuda_basics.hints.toml", "graders/labs/lab07_pytorch_gpu.py",
    "graders/labs/lab07_pytorch_gpu.hints.toml", "labs/lab06_cuda_basics.py",
    "labs/lab07_pytorch_gpu.py", "tests/whole_runs.py",
)  # fmt: skip


RIGHT, WRONG = 3, 7  # `make test` grades 1/3 of the right answers and 1/7 of the wrong ones


def is_sampled(name: str, program: Path, cycle: int) -> bool:
    """Return whether a name belongs to the sample, which contains about 1/`cycle` of all names.

    The texts of the finished program and of its grader select the sample. Every run with the
    same texts uses the same sample, and an edit selects a different one.
    """
    grader = ROOT / "graders" / program.relative_to(ROOT)
    return (_checksum(name) + _checksum_of(program) + _checksum_of(grader)) % cycle == 0


@functools.cache
def _checksum_of(path: Path) -> int:
    return _checksum(path.read_text("utf-8"))


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


class Body(str):
    """The name of a function or method whose whole body is replaced."""


class Stale(Exception):
    """The `old` of an edit does not occur exactly once in the finished program."""


def edited(program: str, *edits: tuple[str, str]) -> str:
    """Return the program after these edits, which replace each `old` by its `new`.

    Raise `Stale` if an `old` does not occur exactly once.
    """
    places = sorted((*_span(program, _dedented(old)), _dedented(new)) for old, new in edits)
    for start, end, new in reversed(places):
        line = program[program.rfind("\n", 0, start) + 1 : start]
        indent = re.match(" *", line)[0]
        new = re.sub(r"\n(?=[^\n])", f"\n{indent}", new)
        program = program[:start] + new + program[end:]
    return program


def _dedented(text: str) -> str:
    """Return a text in triple quotes without its indentation and its outer line breaks."""
    return textwrap.dedent(text).strip("\n") if text.startswith("\n") else text


def _span(program: str, old: str) -> tuple[int, int]:
    """Return the positions at which `old` starts and ends in the program."""
    if isinstance(old, Body):
        return _body_span(program, old)
    first, *rest = (re.escape(line) for line in old.split("\n"))
    pattern = f"(?P<old>{first})"
    if rest:
        rest = "".join(f"\n(?P=indent){line}" if line else "\n" for line in rest)
        pattern = f"^(?P<indent> *)(?P<old>{first}{rest})$"
    found = list(re.finditer(pattern, program, re.MULTILINE))
    if len(found) != 1:
        raise Stale(f"occurs {len(found)} times, not once: {old}")
    return found[0].span("old")


_parsed = functools.lru_cache(maxsize=1)(ast.parse)


def _body_span(program: str, name: str) -> tuple[int, int]:
    """Return the start and the end of the body of a function, without its docstring."""
    node = _parsed(program)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", "") == part]
        if len(found) != 1:
            raise Stale(f"is defined {len(found)} times, not once: {name}")
        (node,) = found
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    lines = program.splitlines(keepends=True)

    def position(line: int, column: int) -> int:
        before = lines[line - 1].encode()[:column].decode()  # `ast` counts columns in bytes
        return sum(map(len, lines[: line - 1])) + len(before)

    first, last = statements[0], statements[-1]
    return (
        position(first.lineno, first.col_offset),
        position(last.end_lineno, last.end_col_offset),
    )


@dataclass(frozen=True)
class Answer:
    """A wrong answer, or a different right answer if `hint` is empty.

    `reference` is the path of the finished program, and `step` is the step to grade.
    """

    reference: Path
    name: str
    step: int
    hint: str
    edits: tuple[tuple[str, str], ...]

    @property
    def sampled(self) -> bool:
        """Return whether `make test` grades this answer without the option `--every-answer`."""
        return is_sampled(str(self), self.reference, WRONG if self.hint else RIGHT)

    def __str__(self) -> str:
        return f"{self.reference.stem}-step{self.step}-{self.name}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the files and folders of the repository on which the verdict depends."""
        program = self.reference.relative_to(ROOT)
        folder, name = program.parent, program.stem
        table = name[:5] if folder.name == "labs" else name
        if folder.name == "assessment":  # one process grades answers to several programs
            return (*ASSESSED, f"tests/wrong_answers/{table}.py", *GRADING)
        return (
            str(program),
            f"graders/labs/{name}.py",
            f"graders/labs/{name}.hints.toml",
            f"tests/wrong_answers/{table}.py",
            *GRADING,
        )

    def program(self) -> str:
        """Return the finished program with the mistake.

        Raise `Stale`, with the names of the entry and the program, if an edit does not fit.
        """
        try:
            return edited(self.reference.read_text(), *self.edits)
        except Stale as stale:
            program = self.reference.relative_to(ROOT)
            raise Stale(f"{self.name}, a wrong answer to {program}: `old` {stale}") from None


class Table(dict[str, Answer]):
    """A table of the wrong answers to a program, by name."""

    def __init__(self, program: str) -> None:
        self.reference = ROOT / program

    def __call__(
        self,
        name: str,
        *,
        step: int,
        hint: str = "",
        old: str | None = None,
        new: str = "",
        edits: list[tuple[str, str]] = (),
    ) -> None:
        """Add an entry, with either `old` and `new` or `edits`."""
        assert name not in self, (
            f"{self.reference.name} has two wrong answers with the name {name}"
        )
        edits = tuple(edits) if old is None else ((old, new),)
        self[name] = Answer(self.reference, name, step, hint, edits)
