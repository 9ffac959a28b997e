"""Wrong answers: for each lab and each part of the assessment a table of mistakes.

An entry is the finished program with one mistake in it, the step that it spoils, and the hint
that a learner who makes it must get:

    wrong = Table("labs/lab02_ddp.py")

    wrong("average_not_divided", step=4, hint="not_divided",
          old="parameter.grad /= dist.get_world_size()", new="")

`old` is a piece of the finished program and occurs in it once; `new` stands there instead. A
mistake in several places has `edits=[(old, new), …]`. Without a hint it is no mistake but
another right answer, and must pass. `make test` grades a third of the right answers and a
seventh of the mistakes. An edit of the program or of its grader selects other ones. With
`--every-answer`, all of them are graded, as on one Python of the workflow.

Text of several lines in triple quotes is written without its indentation: lines after the first
stand in the program as far to the right as the line in which `old` begins. Where an answer is
new code, `old=Body("HookDDP.start")` is all that this function does, without its docstring.
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


RIGHT, WRONG = 3, 7  # `make test` grades one in so many right and wrong answers


def in_turn(name: str, program: Path, cycle: int) -> bool:
    """Whether something with this name is in the sample, which has one in `cycle` of all names.

    The texts of the finished program and its grader decide which part is the sample. A run with
    the same texts has the same sample, and an edit selects another one.
    """
    grader = ROOT / "graders" / program.relative_to(ROOT)
    return (_checksum(name) + _checksum_of(program) + _checksum_of(grader)) % cycle == 0


@functools.cache
def _checksum_of(path: Path) -> int:
    return _checksum(path.read_text("utf-8"))


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


class Body(str):
    """The name of a function or method all of whose body is replaced."""


class Stale(Exception):
    """What a wrong answer replaces does not occur once in the finished program."""


def edited(program: str, *edits: tuple[str, str]) -> str:
    """The program with `new` in place of `old`, for each (old, new).

    Raises `Stale` for an `old` that does not occur once.
    """
    places = sorted((*_place(program, _plain(old)), _plain(new)) for old, new in edits)
    for start, end, new in reversed(places):
        line = program[program.rfind("\n", 0, start) + 1 : start]
        indent = re.match(" *", line)[0]
        new = re.sub(r"\n(?=[^\n])", f"\n{indent}", new)
        program = program[:start] + new + program[end:]
    return program


def _plain(text: str) -> str:
    """Text in triple quotes without its indentation and the line breaks at its ends."""
    return textwrap.dedent(text).strip("\n") if text.startswith("\n") else text


def _place(program: str, old: str) -> tuple[int, int]:
    """Where `old` starts and ends in the program."""
    if isinstance(old, Body):
        return _body(program, old)
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


def _body(program: str, name: str) -> tuple[int, int]:
    """Where the body of a function starts and ends in the program, after its docstring."""
    node = _parsed(program)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", "") == part]
        if len(found) != 1:
            raise Stale(f"is defined {len(found)} times, not once: {name}")
        (node,) = found
    statements = node.body[1:] if ast.get_docstring(node) else node.body
    lines = program.splitlines(keepends=True)

    def position(line: int, column: int) -> int:
        before = lines[line - 1].encode()[:column].decode()  # columns are counted in bytes
        return sum(map(len, lines[: line - 1])) + len(before)

    first, last = statements[0], statements[-1]
    return (
        position(first.lineno, first.col_offset),
        position(last.end_lineno, last.end_col_offset),
    )


@dataclass(frozen=True)
class Answer:
    """A wrong answer: the program it spoils, its name, the step, the hint it must get, if any."""

    reference: Path
    name: str
    step: int
    hint: str
    edits: tuple[tuple[str, str], ...]

    @property
    def sampled(self) -> bool:
        """Whether `make test` grades it, without `--every-answer`."""
        return in_turn(str(self), self.reference, WRONG if self.hint else RIGHT)

    def __str__(self) -> str:
        return f"{self.reference.stem}-step{self.step}-{self.name}"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The files of the repository on which its verdict depends."""
        program = self.reference.relative_to(ROOT)
        folder, name = program.parent, program.stem
        table = name[:5] if folder.name == "labs" else name
        if folder.name == "assessment":  # several are graded in one process
            return (*ASSESSED, f"tests/wrong_answers/{table}.py", *GRADING)
        return (
            str(program),
            f"graders/labs/{name}.py",
            f"graders/labs/{name}.hints.toml",
            f"tests/wrong_answers/{table}.py",
            *GRADING,
        )

    def program(self) -> str:
        """The finished program with the mistake in it.

        Raises `Stale`, which names table and entry, where an `old` does not occur once.
        """
        try:
            return edited(self.reference.read_text(), *self.edits)
        except Stale as stale:
            program = self.reference.relative_to(ROOT)
            raise Stale(f"{self.name}, a wrong answer to {program}: `old` {stale}") from None


class Table(dict[str, Answer]):
    """The wrong answers to a program, by name."""

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
        assert name not in self, f"{self.reference.name} has two wrong answers {name}"
        edits = tuple(edits) if old is None else ((old, new),)
        self[name] = Answer(self.reference, name, step, hint, edits)
