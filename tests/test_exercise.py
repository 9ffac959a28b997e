"""The exercise: how it begins, what its two programs share, and the second line of a hint.

Its wrong answers are graded in test_assessment.py; that the finished program passes and the slow
one fails kindly, with each of its faults named, stands in their transcripts.
"""

import sys
from pathlib import Path

from grading import LABS, ROOT, check, run, spoiled

INPUTS = [
    "assessment/exercise.py", "assessment/exercise_slow.py", "assessment/graders/exercise.py",
    "labs", "tests/assessment/exercise", "tests/grading.py", "tests/test_exercise.py",
]  # fmt: skip

ASSESSMENT = ROOT / "assessment"


def test_exercise_begins_as_the_slow_program_and_is_not_overwritten(tmp_path: Path) -> None:
    for status in (0, 1):
        done = run(sys.executable, LABS / "start.py", "exercise", cwd=tmp_path)
        assert done.returncode == status
    copy = tmp_path / "my_labs/exercise.py"
    assert copy.read_text() == (ASSESSMENT / "exercise_slow.py").read_text()
    assert "I will not overwrite your work" in done.stderr


def test_more_says_how_to_mend_it(tmp_path: Path) -> None:
    wrong = (ROOT / "tests/assessment/exercise/collects_garbage.py").read_text()
    copy = tmp_path / "exercise.py"
    copy.write_text(spoiled((ASSESSMENT / "exercise.py").read_text(), wrong))
    done = check(copy, "--step", "18", "--more", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "        mend:  Drop gc.collect()." in done.stdout


def test_the_two_programs_of_the_exercise_share_what_must_stay() -> None:
    ours, slow = (
        (ASSESSMENT / f"{name}.py").read_text() for name in ("exercise", "exercise_slow")
    )
    for first, last in (
        ("CLASSES, BATCH", "\n\n\ndef write_data"),
        ("def write_data", "\n\n\n"),
    ):
        start = slow.index(first)
        assert slow[start : slow.index(last, start)] in ours
    start = slow.index("def order")
    assert slow[start : slow.index("\n\n\n", start)] in ours
    assert slow[slow.index("def main") :] in ours
