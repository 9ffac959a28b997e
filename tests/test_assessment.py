"""The assessment: references pass, starters fail kindly, each hint answers to a wrong answer.

A wrong answer to `assessment/NAME.py` is a file in `tests/assessment/NAME/`, as for a lab: the
functions that replace those of the finished program, the step it spoils, the hint it must get.
"""

import functools
import importlib
import json
import random
import re
import subprocess
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
SMALL = [name for name in GRADED if name.startswith(("assignment", "challenge"))]


def together(name: str) -> list[str]:
    """What is graded in one process with this program: importing torch takes longest there."""
    return SMALL if name in SMALL else [name]


# hints of judges that are given what a group or a command would have come to, below
JUDGED = {
    ("capstone", hint)
    for hint in ("not_truth", "slow", "not_recovered", "lost_steps", "after_kill")
}


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory):
    """Grade wrong answers in one process, all those to small programs; what is said of one."""

    @functools.lru_cache
    def of(*names: str) -> dict[Path, str]:
        answers = [path for path in WRONG if path.parent.name in names]
        return grade_wrong_answers(GRADED, answers, tmp_path_factory.mktemp("wrong"))

    return lambda path: of(*together(path.parent.name))[path]


# the names of what is graded together begin alike: one worker gets them (conftest.py)
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
    provoked |= {hint for program, hint in JUDGED if program == name}
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

STEPS = 10


def history(first: int = 1, loss: float = 3.0) -> list[list[float]]:
    return [[step, loss, 1.0] for step in range(first, STEPS + 1)]


class FakeBench:
    """A bench where everything has happened already."""

    def __init__(self, runner, folder: Path, spoilt: str) -> None:
        self.runner, self.folder, self.spoilt = runner, folder, spoilt
        self.path = folder / "capstone.py"

    def group(self, world: int, **scene):
        facts = {
            "history": history(loss=4.0 if self.spoilt == "not_truth" else 3.0),
            "seconds": 9.0 if self.spoilt == "slow" and "finished" not in scene else 1.0,
            "truth": [[3.0, 1.0]] * STEPS,
        }
        return self.runner.Group(world, [self.runner.Rank(facts) for _ in range(world)])

    def run(self, *command, watch, **options):
        """A run that is killed after step 8, and begins its second life after step 6."""
        (self.folder / "killed").mkdir()
        (self.folder / "said.txt").write_text("step    8/10  loss\n")
        victim = subprocess.Popen(["sleep", "60"])
        watch(dict.fromkeys(range(4), victim.pid))
        assert victim.wait(10) == -9
        first = 1 if self.spoilt == "lost_steps" else 7
        loss = 3.1 if self.spoilt == "after_kill" else 3.0
        (self.folder / "life-1.json").write_text(json.dumps(history(first, loss)))
        said = "life 0\n" + "".join(f"step    {n}/10  loss\n" for n in range(1, 9))
        said += "life 1\n" + "".join(f"step    {n}/10  loss\n" for n in range(first, 11))
        return self.runner.Done(int(self.spoilt == "not_recovered"), said, "", 1.0)


@pytest.fixture(scope="module")
def capstone():
    sys.path.insert(0, str(LABS))
    try:
        yield importlib.import_module("graders.capstone")
    finally:
        sys.path.remove(str(LABS))


@pytest.mark.parametrize("hint", ["", *sorted(hint for _, hint in JUDGED)])
def test_capstone_judges_a_whole_run(hint: str, capstone, tmp_path: Path) -> None:
    runner, found = sys.modules["graders.runner"], []
    assert capstone.RUN["steps"] == STEPS
    bench = FakeBench(runner, tmp_path, hint)
    if hint:
        with pytest.raises(runner.Wrong) as wrong:
            capstone.judge_run(bench, found.append)
        assert wrong.value.hint == capstone.HINTS[hint]
    else:
        capstone.judge_run(bench, found.append)
        assert found[-1].startswith("a rank was killed; ≈2 steps were computed again")


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
