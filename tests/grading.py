"""Grading: what the tests of the labs and of the assessment share."""

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
from conftest import reading
from processes import HANG, end, left_behind, start
from wrong_answers import Answer, Stale, Table

from graders.hints import common_hints

ROOT = Path(__file__).parent.parent
LABS = ROOT / "labs"
TAG = "WORLD_SIZE_LAB_TEST"


def grader(name: str) -> ModuleType:
    """The module that grades this lab, or part of the assessment; importing it takes torch."""
    kind = "labs" if name.startswith("lab") else "assessment"
    return importlib.import_module(f"graders.{kind}.{name}")


def supervisor() -> ModuleType:
    """The module that runs steps; importing it imports torch."""
    return importlib.import_module("graders.supervisor")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    """Run `python …` or `torchrun …` in a folder; fail if it leaves a process behind."""
    tag = f"{TAG}={uuid.uuid4().hex}"
    name, _, value = tag.partition("=")
    environment = {
        key: os.environ[key] for key in ("PATH", "HOME", "TMPDIR") if key in os.environ
    }
    environment |= {"OMP_NUM_THREADS": "1", name: value}
    process = start(list(map(str, command)), cwd, reading(environment))
    try:
        out, err = process.communicate(timeout=HANG)
        left = left_behind(tag)
        assert not left, f"left behind by {command}: {left}"
    finally:
        end(tag)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def check(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return run("python", LABS / "check.py", *arguments, cwd=cwd)


def unwrapped(output: str) -> str:
    """The output of check.py with its paragraphs in one line each."""
    return re.sub(r"\n {15}", " ", output)


def all_hints(reference: Path) -> dict[str, str]:
    """The hints of a lab or a part of the assessment by name, and those of all graders."""
    return common_hints() | grader(reference.stem).LAB.hints.texts


def hints_in(output: str, reference: Path) -> list[str]:
    """The names of the hints that stand in an unwrapped output of check.py."""
    return [name for name, text in all_hints(reference).items() if f"hint:  {text}" in output]


# --- wrong answers ------------------------------------------------------------------------


def wrong_answers(name: str) -> Table:
    """The wrong answers to a lab, "lab02", or to a part of the assessment, "capstone"."""
    return importlib.import_module(f"wrong_answers.{name}").wrong


@functools.cache
def _chosen(session: pytest.Session) -> frozenset[Answer]:
    """The wrong answers that are graded in this session."""
    params = (getattr(item, "callspec", None) for item in session.items)
    return frozenset(
        each.params["answer"] for each in params if each and "answer" in each.params
    )


def assert_gets_its_hint(
    answer: Answer, others: Iterable[Answer], session: pytest.Session
) -> None:
    """Grade a wrong answer, in one process with others of the session, once for all of them."""
    answer.program()  # raises what is wrong with this entry
    output = _verdicts(tuple(each for each in others if each in _chosen(session)))[answer]
    assert hints_in(output, answer.reference) == [answer.hint] * bool(answer.hint), output
    assert f"step {answer.step}  {'wrong' if answer.hint else 'passed'}" in output, output


def hints_not_provoked(name: str) -> set[str]:
    """The hints of a lab or a part of the assessment that no wrong answer gets."""
    table = wrong_answers(name)
    provoked = {answer.hint for answer in table.values()}
    return set(grader(table.reference.stem).LAB.hints.texts) - provoked


# grades the wrong answers to each step in one call of check.py's main, in one process; steps
# which that one needs are as in the reference
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
    except SystemExit as left:
        assert left.code in (0, 1), left.code
"""


@functools.cache
def _verdicts(answers: tuple[Answer, ...]) -> dict[Answer, str]:
    """What check.py says of wrong answers, all graded in one process."""
    with tempfile.TemporaryDirectory() as folder:
        steps: dict[int, list[str]] = {}
        names: dict[Answer, str] = {}
        for answer in answers:
            try:
                program = answer.program()
            except Stale:
                continue  # its own test says so
            names[answer] = f"{answer.reference.stem}-{answer.name}.py"
            Path(folder, names[answer]).write_text(program)
            steps.setdefault(answer.step, []).append(names[answer])
        all_steps = json.dumps(steps, sort_keys=True)
        Path(folder, "grade_all.py").write_text(GRADE_ALL)
        done = run("python", "grade_all.py", LABS, all_steps, cwd=folder)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(\w+-\w+\.py), graded .*\n", done.stdout, flags=re.M)
    said = dict(zip(parts[1::2], map(unwrapped, parts[2::2]), strict=True))
    return {answer: said[name] for answer, name in names.items()}
