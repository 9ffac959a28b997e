"""Helpers for the tests of the graders: run programs, read hints, and grade wrong answers."""

import functools
import importlib
import json
import os
import re
import subprocess
import tempfile
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest
from conftest import with_read_log
from processes import HANG, end, left_behind, start
from wrong_answers import Answer, Stale, Table

from graders.hints import common_hints

ROOT = Path(__file__).parent.parent
LABS = ROOT / "labs"
TAG = "WORLD_SIZE_LAB_TEST"


def grader(name: str) -> ModuleType:
    """Return the grader of a lab or of a part of the assessment; this imports torch."""
    kind = "labs" if name.startswith("lab") else "assessment"
    return importlib.import_module(f"graders.{kind}.{name}")


def supervisor() -> ModuleType:
    """Return the module `graders.supervisor`; this imports torch."""
    return importlib.import_module("graders.supervisor")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run `python …` or `torchrun …` in a folder; fail if it leaves a process running."""
    tag = f"{TAG}={uuid.uuid4().hex}"
    name, _, value = tag.partition("=")
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ
    }
    environment |= {"OMP_NUM_THREADS": "1", name: value}
    process = start(list(map(str, command)), cwd, with_read_log(environment))
    try:
        out, err = process.communicate(timeout=HANG)
        leftovers = left_behind(tag)
        assert not leftovers, f"{command} left processes running: {leftovers}"
    finally:
        end(tag)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run check.py with these arguments."""
    return run("python", LABS / "check.py", *arguments, cwd=cwd)


def unwrapped(output: str) -> str:
    """Return the output of check.py with each paragraph in one line."""
    return re.sub(r"\n {15}", " ", output)


def all_hints(reference: Path) -> dict[str, str]:
    """Return {name: text} for the hints of this grader and the hints that all graders share."""
    return common_hints() | grader(reference.stem).LAB.hints.texts


def hints_in(output: str, reference: Path) -> list[str]:
    """Return the names of the hints in an unwrapped output of check.py."""
    return [name for name, text in all_hints(reference).items() if f"hint:  {text}" in output]


# --- wrong answers ------------------------------------------------------------------------


def wrong_answers(name: str) -> Table:
    """Return the wrong answers to a lab or a part of the assessment: "lab02" or "capstone"."""
    return importlib.import_module(f"wrong_answers.{name}").wrong


@functools.cache
def _selected(session: pytest.Session) -> frozenset[Answer]:
    """Return the wrong answers that are graded in this session."""
    params = (getattr(item, "callspec", None) for item in session.items)
    return frozenset(
        each.params["answer"] for each in params if each and "answer" in each.params
    )


def assert_gets_its_hint(
    answer: Answer, others: Iterable[Answer], session: pytest.Session
) -> None:
    """Fail unless the grader gives a wrong answer its hint, and no other hint.

    All selected answers in ``others``, which contains ``answer``, are graded together once.
    """
    answer.program()  # fails if this entry does not fit the reference
    output = _verdicts(tuple(each for each in others if each in _selected(session)))[answer]
    assert hints_in(output, answer.reference) == [answer.hint] * bool(answer.hint), output
    assert f"step {answer.step}  {'wrong' if answer.hint else 'passed'}" in output, output


def hints_not_provoked(name: str) -> set[str]:
    """Return the hints of a lab or a part of the assessment that no wrong answer gets."""
    table = wrong_answers(name)
    provoked = {answer.hint for answer in table.values()}
    return set(grader(table.reference.stem).LAB.hints.texts) - provoked


# A program that calls the function main of check.py once for each step, with all wrong answers
# to this step. The other steps of a wrong answer are not graded: they equal the reference.
GRADE_ALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import check
grade = check.Grading.grade
check.Grading.grade = lambda self, each: str(each.number) != step or grade(self, each)
for step, names in json.loads(sys.argv[2]).items():
    sys.argv = ["check.py", *names, "--step", step]
    try:
        check.main()
    except SystemExit as end:
        assert end.code in (0, 1), end.code
"""


@functools.cache
def _verdicts(answers: tuple[Answer, ...]) -> dict[Answer, str]:
    """Grade wrong answers in one process; return the output of check.py for each of them."""
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[int, list[str]] = {}
        names: dict[Answer, str] = {}
        for answer in answers:
            try:
                program = answer.program()
            except Stale:
                continue  # the test of this answer reports it
            names[answer] = f"{answer.reference.stem}-{answer.name}.py"
            Path(folder, names[answer]).write_text(program)
            steps.setdefault(answer.step, []).append(names[answer])
        all_steps = json.dumps(steps, sort_keys=True)
        Path(folder, "grade_all.py").write_text(GRADE_ALL)
        done = run("python", "grade_all.py", LABS, all_steps, cwd=folder)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(\w+-\w+\.py), graded .*\n", done.stdout, flags=re.M)
    outputs = dict(zip(parts[1::2], map(unwrapped, parts[2::2]), strict=True))
    return {answer: outputs[name] for answer, name in names.items()}
