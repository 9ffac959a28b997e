"""The assessment: references pass, starters fail kindly, each hint answers to a wrong answer.

A wrong answer to `assessment/NAME.py` is a file in `tests/assessment/NAME/`, as for a lab: the
functions that replace those of the finished program, the step it spoils, the hint it must get.
"""

import functools
import importlib
import json
import random
import re
import sys
from pathlib import Path

import pytest
from grading import LABS, ROOT, all_hints, constants, grade_wrong_answers, run, spoiled

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
# whole runs of the capstone, whose step would first grade all others
WHOLE = [path for path in WRONG if path.parent.name == "capstone" and constants(path)[0] == 10]
PARTS = [path for path in WRONG if path not in WHOLE]
SMALL = [name for name in GRADED if name.startswith(("assignment", "challenge"))]


def together(name: str) -> list[str]:
    """What is graded in one process with this program: importing torch takes longest there."""
    return SMALL if name in SMALL else [name]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory):
    """Grade wrong answers in one process, all those to small programs; what is said of one."""

    @functools.lru_cache
    def of(*names: str) -> dict[Path, str]:
        answers = [path for path in PARTS if path.parent.name in names]
        return grade_wrong_answers(GRADED, answers, tmp_path_factory.mktemp("wrong"))

    return lambda path: of(*together(path.parent.name))[path]


# the names of what is graded together begin alike: one worker gets them (conftest.py)
@pytest.mark.parametrize("path", PARTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
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


BLANKED = [name for name in GRADED if ">>> solution" in GRADED[name].read_text()]


@pytest.fixture(scope="module")
def checked_starters(tmp_path_factory: pytest.TempPathFactory):
    """What is said of a starter; those of small programs are checked in one process."""
    folder = tmp_path_factory.mktemp("starters")

    @functools.lru_cache
    def of(*names: str) -> dict[str, str]:
        copies = [f"my_labs/{name}.py" for name in names]
        done = run(sys.executable, LABS / "check.py", *copies, cwd=folder)
        assert (done.returncode, done.stderr) == (1, "")
        parts = re.split(r"^my_labs/(\w+)\.py, graded .*\n", done.stdout, flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    for name in BLANKED:
        done = run(sys.executable, LABS / "start.py", name, cwd=folder)
        assert done.returncode == 0, done.stderr
    return folder, lambda name: of(*together(name))[name]


@pytest.mark.parametrize("name", BLANKED)
def test_starter_has_no_solution_and_fails_kindly(name: str, checked_starters) -> None:
    folder, said = checked_starters
    blanks = GRADED[name].read_text().count(">>> solution")
    text = (folder / f"my_labs/{name}.py").read_text()
    assert text.count("raise NotImplementedError(") + text.count('#error "step') >= blanks > 0
    again = run(sys.executable, LABS / "start.py", name, cwd=folder)
    assert again.returncode == 1
    assert "I will not overwrite your work" in again.stderr
    output = said(name)
    assert "Traceback" not in output
    assert re.search(r"^step 1  blank ", output, re.M), output
    assert "wrong " not in output


# --- the capstone's last step -------------------------------------------------------------


@pytest.fixture(scope="module")
def capstone():
    sys.path.insert(0, str(LABS))
    try:
        yield importlib.import_module("graders.capstone")
    finally:
        sys.path.remove(str(LABS))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What was found wrong with each whole run, and the hint; the judge is that of learners."""
    folder, reference = tmp_path_factory.mktemp("whole"), GRADED["capstone"]
    for path in WHOLE:
        program = folder / f"{constants(path)[1]}-{path.name}"
        program.write_text(spoiled(reference.read_text(), path.read_text()))
    judge = ROOT / "tests/assessment/whole_runs.py"
    programs = sorted(folder.glob("*.py"))
    done = run(sys.executable, judge, reference, *programs, cwd=folder, limit=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.stem)
def test_wrong_whole_run_gets_its_hint(path: Path, judged, capstone) -> None:
    hint = constants(path)[1]
    what, given = judged[f"{hint}-{path.stem}"]
    assert given == capstone.HINTS[hint], what


def test_capstone_survives_a_killed_rank(capstone, pytestconfig, tmp_path: Path) -> None:
    """Each time another rank at another moment: `pytest -k killed_rank --times 20`."""
    times = pytestconfig.getoption("--times")
    if not times:
        pytest.skip("the grader does it once; --times 20 does it twenty times in a row")
    runner = sys.modules["graders.runner"]
    step = capstone.STEPS[-1]
    with runner.Runner("capstone", 300.0) as machine:
        for number in range(times):
            with machine.bench(step, GRADED["capstone"]) as bench:
                if not number:
                    scene = {"config": capstone.RUN}
                    undisturbed = bench.group(4, **scene).facts("history")[0]
                chance = random.Random(number)
                lost = capstone.kill_and_resume(bench, undisturbed, chance)
                print(f"{number + 1}: {lost} steps computed again", flush=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("mesh.tp=3", "heads = 4 cannot be cut into 3 equal parts"),
        ("mesh.dp=0", "dp is a whole number from 1 on, not 0"),
        ("train.batch=10", "batch = 10 cannot be cut into 8 equal parts"),
        ("train.speed=1", "unknown or missing: speed"),
        ("mesh", "cannot be read with"),
    ],
)
def test_capstone_refuses_a_configuration(change, sentence, capstone) -> None:
    program = capstone.finished()
    with pytest.raises(SystemExit) as refused:
        program.read_config(str(ASSESSMENT / "capstone.toml"), [change])
    assert sentence in str(refused.value)
