"""The assessment: references pass, starters fail kindly, each hint answers to a wrong answer.

A wrong answer to `assessment/NAME.py` is a file in `tests/assessment/NAME/`, as for a lab: the
functions that replace those of the finished program, the step it spoils, the hint it must get.
"""

import functools
import re
import sys
from pathlib import Path

import pytest
from grading import LABS, ROOT, all_hints, constants, grade_wrong_answers, run

INPUTS = [
    "assessment", "book/runner.py", "labs/check.py", "labs/start.py", "labs/graders/runner.py",
    "labs/graders/__init__.py", "tests/assessment", "tests/grading.py",
    "tests/test_assessment.py",
]  # fmt: skip

ASSESSMENT = ROOT / "assessment"
GRADED = {
    path.stem: ASSESSMENT / path.name
    for path in sorted((ASSESSMENT / "graders").glob("[a-z]*.py"))
    if (ASSESSMENT / path.name).exists()
}
WRONG = sorted((ROOT / "tests/assessment").glob("*/*.py"))


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory):
    """Grade the wrong answers to one program in one process; return what was said of one."""

    @functools.lru_cache
    def of(name: str) -> dict[str, str]:
        answers = [path for path in WRONG if path.parent.name == name]
        return grade_wrong_answers(GRADED[name], answers, tmp_path_factory.mktemp(name))

    return lambda path: of(path.parent.name)[path.name]


# the names of one program begin alike: they go to one worker, and are graded in one process
@pytest.mark.parametrize("path", WRONG, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_wrong_answer_gets_its_hint(path: Path, graded) -> None:
    step, hint = constants(path)
    output, hints = graded(path), all_hints(GRADED[path.parent.name])
    given = [name for name, text in hints.items() if f"hint:  {text}" in output]
    assert given == [hint], output
    assert f"step {step}  wrong" in output


@pytest.mark.parametrize("name", GRADED)
def test_every_hint_is_provoked(name: str) -> None:
    provoked = {constants(path)[1] for path in WRONG if path.parent.name == name}
    assert set(all_hints(GRADED[name], runners=False)) - provoked <= {"other"}
    assert len(provoked) >= 5


@pytest.mark.parametrize("name", GRADED)
def test_starter_has_no_solution_and_fails_kindly(name: str, tmp_path: Path) -> None:
    done = run(sys.executable, LABS / "start.py", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    copy = tmp_path / f"my_labs/{name}.py"
    blanks = GRADED[name].read_text().count("# >>> solution")
    assert copy.read_text().count("raise NotImplementedError(") >= blanks > 0
    again = run(sys.executable, LABS / "start.py", name, cwd=tmp_path)
    assert again.returncode == 1
    assert "I will not overwrite your work" in again.stderr
    done = run(sys.executable, LABS / "check.py", copy, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "Traceback" not in done.stdout
    assert re.search(r"^step 1  blank ", done.stdout, re.M), done.stdout
    assert "wrong " not in done.stdout
