"""Tests of the exercise: its start file, the shared code of its programs, and its verdicts.

test_assessment.py grades the wrong answers. The transcripts of the exercise show that the
finished program passes, and that the slow program fails with a message for each of its
mistakes.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from grading import LABS, ROOT, check, grader, run, supervisor, wrong_answers

from graders.protocol import Wrong

INPUTS = [
    "assessment", "graders", "labs",
    "tests/grading.py", "tests/wrong_answers",
]  # fmt: skip

ASSESSMENT = ROOT / "assessment"


def test_start_copies_the_slow_program_and_does_not_overwrite_it(tmp_path: Path) -> None:
    for status in (0, 1):
        done = run("python", LABS / "start.py", "exercise", cwd=tmp_path)
        assert done.returncode == status
    copy = tmp_path / "my_labs/exercise.py"
    assert copy.read_text() == (ASSESSMENT / "exercise_slow.py").read_text()
    assert "does not overwrite your work" in done.stderr


def test_a_different_solution_passes_and_option_more_prints_a_fix(tmp_path: Path) -> None:
    solution = (ASSESSMENT / "exercise.py").read_text()
    for old, new in (("torch.no_grad()", "torch.inference_mode()"), (", fused=True", "")):
        assert old in solution
        solution = solution.replace(old, new)
    (tmp_path / "exercise-other.py").write_text(solution)
    loop = wrong_answers("exercise")["optimizer_loop"]
    (tmp_path / "exercise-loop.py").write_text(loop.program())
    done = check(
        "exercise-other.py", "exercise-loop.py", "--step", "15", "--more", cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    first, second = done.stdout.split("exercise-loop.py")
    assert "3 of 3 steps pass" in first, first
    assert "        fix:   Use fused=True, or at least the default" in second, second


@pytest.mark.parametrize(
    ("yours", "passes"),
    [(0.5, True), (0.9, True), (1.1, False), (0.049, True), (2.4, False)],
)
def test_both_limits_of_the_speed_apply(yours: float, passes: bool, monkeypatch) -> None:
    """The limits are 10 times the time of the finished program and 1/4 of the slow time."""
    exercise = grader("exercise")
    finished, slow = (0.1, 9.0) if yours < 2 else (0.3, 9.0)
    seconds = {"yours": yours, "finished": finished, "slow": slow}
    monkeypatch.setattr(exercise, "facts", lambda *_: {"seconds": seconds})
    workspace = SimpleNamespace(has_gpus=False)
    if passes:
        (found,) = exercise.LAB[23].trial(workspace)
        assert found.startswith(f"on the CPU ≈{slow / yours:.1f} times as fast")
    else:
        with pytest.raises(Wrong):
            list(exercise.LAB[23].trial(workspace))


CURVE = [[2.4, 2.2], [2.1]]
ON_A_GPU = {  # changes of the result, the loss curve, and the expected hint ("" if it passes)
    "correct": ({}, CURVE, ""),
    "different training": ({}, [[2.4, 1.9], [2.1]], "device_curve"),
    "an error": ({"status": 1, "stderr": "…\nRuntimeError: two devices"}, CURVE, "elsewhere"),
    "timeout": ({"status": -6, "stopped": "limit", "stderr": "stacks"}, CURVE, "slow"),
}


@pytest.mark.parametrize("end", ON_A_GPU)
def test_a_result_on_a_gpu_gets_the_right_hint(end: str) -> None:
    changes, yours, hint = ON_A_GPU[end]
    exercise = grader("exercise")
    result = {
        "device": "cuda",
        "seconds": {"yours": 0.1, "finished": 0.1, "slow": 9.0},
        "curves": {"yours": yours, "finished": CURVE, "slow": CURVE},
    }

    def ran(*_: object, limit: float) -> object:
        assert limit >= 240  # the slow program needs a minute there, and a machine may be busy
        return supervisor().CommandResult(
            changes.get("status", 0), f"printed\n{json.dumps(result)}\n",
            changes.get("stderr", ""), 9.4, changes.get("stopped", ""),
        )  # fmt: skip

    workspace = SimpleNamespace(has_gpus=True, path=ASSESSMENT / "exercise.py", run=ran)
    if hint:
        with pytest.raises(Wrong) as wrong:
            list(exercise.LAB[23].trial(workspace))
        assert wrong.value.hint == hint
    else:
        found = list(exercise.LAB[23].trial(workspace))
        assert found == ["on the cuda ≈90.0 times as fast as the slow program, the finished "
                         "one ≈90.0 times"]  # fmt: skip


def test_both_programs_of_the_exercise_share_their_fixed_parts() -> None:
    finished, slow = (
        (ASSESSMENT / f"{name}.py").read_text() for name in ("exercise", "exercise_slow")
    )
    for first, last in (
        ("CLASSES, BATCH", "\n\n\ndef write_data"),
        ("def write_data", "\n\n\n"),
    ):
        start = slow.index(first)
        assert slow[start : slow.index(last, start)] in finished
    start = slow.index("def order")
    assert slow[start : slow.index("\n\n\n", start)] in finished
    assert slow[slow.index("def main") :] in finished
