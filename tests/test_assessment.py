"""Tests of the assessment: wrong answers get their hints, and starters report their blanks.

The wrong answers are in `tests/wrong_answers/`, as those of the labs.
"""

import functools
import json
import random
import re

import pytest
from grading import (
    LABS,
    ROOT,
    assert_gets_its_hint,
    grader,
    hints_not_provoked,
    run,
    supervisor,
    wrong_answers,
)
from wrong_answers import Answer

INPUTS = [
    "assessment", "graders", "labs/check.py", "labs/cuda_on_cpu.py", "labs/lab06_cuda_basics.py", "labs/start.py", "tests/grading.py", "tests/whole_runs.py", "tests/wrong_answers",
    "snippets/planner/large_capstone.cpu.txt", "snippets/planner/large_capstone.py",
]  # fmt: skip

ASSESSMENT = ROOT / "assessment"
GRADED = {
    path.stem: ASSESSMENT / path.name
    for path in sorted((ROOT / "graders/assessment").glob("*.py"))
}
WRONG = [answer for name in GRADED for answer in wrong_answers(name).values()]
# Wrong answers to the last step of the capstone, which trains, kills a rank and resumes.
# check.py would first grade all other steps, so whole_runs.py grades them.
WHOLE_RUNS = [a for a in WRONG if a.reference == GRADED["capstone"] and a.step == 10]
SINGLE_STEPS = [a for a in WRONG if a not in WHOLE_RUNS]
SMALL = [name for name in GRADED if name.startswith(("assignment", "challenge"))]


def graded_together(name: str) -> list[str]:
    """Return the programs that are graded in the same process as this program.

    Small programs share a process, because the import of torch takes most of the time.
    """
    return SMALL if name in SMALL else [name]


# conftest.py sends all answers that are graded in one process to the same worker
@pytest.mark.parametrize("answer", SINGLE_STEPS, ids=str)
def test_wrong_answer_gets_its_hint(answer: Answer, request: pytest.FixtureRequest) -> None:
    names = graded_together(answer.reference.stem)
    others = [other for other in SINGLE_STEPS if other.reference.stem in names]
    assert_gets_its_hint(answer, others, request.session)


@pytest.mark.parametrize("name", GRADED)
def test_every_hint_has_a_wrong_answer(name: str) -> None:
    # only a machine with a GPU can print the hint `gpu`
    assert hints_not_provoked(name) <= {"other", "gpu"}
    assert any(answer.hint for answer in wrong_answers(name).values())


WITH_BLANKS = [name for name in GRADED if ">>> solution" in GRADED[name].read_text()]


@pytest.fixture(scope="module")
def checked_starters(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of the starters, and a function that returns the verdict on one."""
    folder = tmp_path_factory.mktemp("starters")

    @functools.lru_cache
    def verdicts(*names: str) -> dict[str, str]:
        copies = [f"my_labs/{name}.py" for name in names]
        done = run("python", LABS / "check.py", *copies, cwd=folder)
        assert (done.returncode, done.stderr) == (1, "")
        parts = re.split(r"^my_labs/(\w+)\.py, graded .*\n", done.stdout, flags=re.M)
        return dict(zip(parts[1::2], parts[2::2], strict=True))

    for name in WITH_BLANKS:
        done = run("python", LABS / "start.py", name, cwd=folder)
        assert done.returncode == 0, done.stderr
        command = re.search(r"^run it: .*", done.stdout, re.M)[0]
        assert "my_labs/" in command and "assessment/" not in command
    return folder, lambda name: verdicts(*graded_together(name))[name]


@pytest.mark.parametrize("name", WITH_BLANKS)
def test_a_starter_has_no_solution_and_reports_its_first_blank(
    name: str, checked_starters
) -> None:
    folder, verdict_on = checked_starters
    blanks = GRADED[name].read_text().count(">>> solution")
    text = (folder / f"my_labs/{name}.py").read_text()
    assert text.count("raise NotImplementedError(") + text.count('#error "step') >= blanks > 0
    again = run("python", LABS / "start.py", name, cwd=folder)
    assert again.returncode == 1
    assert "does not overwrite your work" in again.stderr
    output = verdict_on(name)
    assert "Traceback" not in output
    assert re.search(r"^step 1  blank ", output, re.M), output
    assert "wrong " not in output


# --- the last step of the capstone ----------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the error and the hint of each wrong whole run, by the name of its program."""
    folder = tmp_path_factory.mktemp("whole")
    for answer in WHOLE_RUNS:
        (folder / f"{answer.hint}-{answer.name}.py").write_text(answer.program())
    grade = ROOT / "tests/whole_runs.py"
    programs = sorted(folder.glob("*.py"))
    done = run("python", grade, GRADED["capstone"], *programs, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("answer", WHOLE_RUNS, ids=str)
def test_wrong_whole_run_gets_its_hint(answer: Answer, whole_run_verdicts) -> None:
    what, hint = whole_run_verdicts[f"{answer.hint}-{answer.name}"]
    assert hint == answer.hint, what


def test_the_capstone_resumes_after_a_killed_rank(pytestconfig) -> None:
    """Kill a different rank at a different moment: `pytest -k killed_rank --times 20`."""
    times = pytestconfig.getoption("--times")
    if not times:
        pytest.skip("the grader kills one rank; run with --times 20 for twenty kills")
    capstone = grader("capstone")
    step = capstone.LAB[10]
    with supervisor().Supervisor("capstone", 300.0) as runs:
        for number in range(times):
            with runs.workspace(step, GRADED["capstone"]) as workspace:
                if not number:
                    arguments = {"config": capstone.RUN}
                    undisturbed = workspace.group(2, **arguments).facts("history")[0]
                chance = random.Random(number)
                lost = capstone.kill_and_resume(workspace, undisturbed, chance)
                print(f"{number + 1}: {lost} steps computed again", flush=True)


def test_the_large_configuration_equals_the_plan_and_can_be_trained(
    tmp_path, monkeypatch
) -> None:
    torch = pytest.importorskip("torch")
    capstone = grader("capstone")
    program, path = capstone.LAB.finished, str(ASSESSMENT / "capstone_large.toml")
    (tmp_path / "a.md").write_bytes(bytes(range(256)) * 8)
    text = f'train.text="{tmp_path}/*.md"'
    config = program.read_config(path, [text])
    with torch.device("meta"):
        block, h = program.Block(config), config.hidden
    inner = sum(p.numel() for p in block.parameters())
    total = config.layers * inner + 2 * h * config.vocabulary + 2 * h
    assert 124e6 < total < 1e9
    planned = (ROOT / "snippets/planner/large_capstone.py").read_text()
    heads = config.heads
    assert (
        f"Shape({config.layers}, {h}, {heads}, {heads}, 4 * {h}, {config.vocabulary},"
        in planned
    )
    numbers = config.sequence, config.batch, config.micro, config.steps
    assert f"= {', '.join(map(str, numbers))}  #" in planned
    # the planner does not count the biases of the norms
    planner_output = (ROOT / "snippets/planner/large_capstone.cpu.txt").read_text()
    assert f"{total - (2 * config.layers + 1) * h:,} parameters" in planner_output
    for gpus in (1, 2, 4, 8):
        assert program.read_config(path, [text, f"mesh.dp={gpus}"]).micro_batches * gpus == 8

    small = ["model.layers=1", "model.hidden=32", "model.sequence=32", 'train.precision="fp32"']
    config = program.read_config(path, [text, *small, "train.batch=2", "train.micro=2"])
    traced = functools.partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)  # compiles no C++
    model, rows = capstone.whole_model(config), program.Stream(config).next(0)
    assert rows.shape == (2, 33) and ((rows[:, 1:] - rows[:, :-1]) % 256 == 1).all()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = capstone.loss_of(model, rows)
    before.backward()
    optimizer.step()
    assert capstone.loss_of(model, rows) < before


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("mesh.tp=3", "heads = 4 cannot be cut into 3 equal parts"),
        ("mesh.dp=0", "dp is a whole number from 1 on, not 0"),
        ("train.batch=10", "batch = 10 cannot be cut into 8 equal parts"),
        ("train.speed=1", "unknown or missing: speed"),
        ("mesh", "cannot be read with"),
        ('train.text="no/such/*.md"', "no file here is no/such/*.md"),
        (f'train.text="{__file__}"', "bytes need a vocabulary of 256, not 64"),
    ],
)
def test_the_capstone_rejects_a_wrong_configuration(change: str, sentence: str) -> None:
    program = grader("capstone").LAB.finished
    with pytest.raises(SystemExit) as error:
        program.read_config(str(ASSESSMENT / "capstone.toml"), [change])
    assert sentence in str(error.value)
