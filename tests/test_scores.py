"""Tests of the scores: the numbers in all reports and the counts of bytes are right."""

import importlib
import json
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
from grading import LABS, ROOT, check, run

from graders import scores
from worldsize.site import scores as table

INPUTS = ["assessment", "src/worldsize/site", "graders", "labs", "tests/grading.py"]

REPORTS = sorted((ROOT / "assessment/scores").glob("*.toml"))
ASSIGNMENT = (ROOT / "assessment/assignment3_graphs.py").read_text()
FIRST_FIT = "for number, birth in born.items():"
LARGEST_FIRST = "for number, birth in sorted(born.items(), key=lambda each: -sizes[each[0]]):"
OVERLAP = "if dies[other] >= birth"


Scores = dict[tuple[str, str, str], float]  # ("lab02_ddp", "step3", "messages"): 13


def printed(output: str) -> Scores:
    """Return the scores that check.py has printed."""
    found: Scores = {}
    graded = re.split(r"^(?:\S*/)?(\w+)\.py, graded .*\n", output, flags=re.M)
    for name, report in zip(graded[1::2], graded[2::2], strict=True):
        for number, line in re.findall(
            r"^score   step (\d+)  (.*?)(?: \(\d+ ranks\))?$", report, re.M
        ):
            for kind, _, value in (each.rpartition(" ") for each in line.split(", ")):
                found[name, f"step{number}", kind] = float(value.replace(",", ""))
    return found


def finished() -> Scores:
    """Return the scores in the transcripts of the finished programs, as `printed` does."""
    found: Scores = {}
    for path in [*ROOT.glob("labs/*.cpu.txt"), *ROOT.glob("assessment/*.cpu.txt")]:
        graded = re.split(r"^(?=\$ )", path.read_text(), flags=re.M)
        gradings = (
            each for each in graded if re.match(r"\$ python labs/check.py (?!my_)", each)
        )
        for each in gradings:
            found |= printed(each)
    return found


def wrong_scores(path: Path, folder: Path) -> str:
    """Grade the programs of a report again; return a line for each wrong score."""
    report = tomllib.loads(path.read_text())
    submitted = {name: lab for name, lab in report.items() if "program" in lab}
    for name, lab in submitted.items():
        (folder / f"{name}.py").write_text(lab["program"])
    found = finished()
    if submitted:
        done = check(*(f"{name}.py" for name in submitted), cwd=folder)
        if done.returncode:
            return done.stdout + done.stderr
        found |= printed(done.stdout)
    found = {key: value for key, value in found.items() if key[0] in report}
    claimed = {
        (name, step, kind): value
        for name, lab in report.items()
        for step in lab.keys() - {"file", "program"}
        for kind, value in lab[step].items()
    }
    wrong = [key for key in claimed | found if claimed.get(key) != found.get(key)]
    return "".join(
        f"{' '.join(key)}: {path.name} contains {claimed.get(key)}, "
        f"but the score is {found.get(key)}\n"
        for key in wrong
    )


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_scores_of_a_report_are_right(path: Path, tmp_path: Path) -> None:
    wrong = wrong_scores(path, tmp_path)
    assert not wrong, wrong


def test_the_reference_report_names_all_finished_programs_with_scores() -> None:
    report = tomllib.loads((ROOT / "assessment/scores/reference.toml").read_text())
    assert set(report) == {name for name, _, _ in finished()}


def test_a_better_report_is_accepted_and_a_forged_one_is_not(tmp_path: Path) -> None:
    better = ASSIGNMENT.replace(FIRST_FIT, LARGEST_FIRST)
    better = better.replace(OVERLAP, f"{OVERLAP} and born[other] <= dies[number]")
    (tmp_path / "assignment3_graphs-better.py").write_text(better)
    path = tmp_path / "better.toml"
    done = check("assignment3_graphs-better.py", "--report", path.name, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    reference = tomllib.loads((ROOT / "assessment/scores/reference.toml").read_text())
    peaks = [
        each["assignment3_graphs"]["step2"]["peak bytes"]
        for each in (tomllib.loads(path.read_text()), reference)
    ]
    assert peaks[0] < peaks[1]
    forged = tmp_path / "forged.toml"
    forged.write_text(path.read_text().replace(f"{peaks[0]}", f"{peaks[0] - 512}"))
    folder = tmp_path / "again"
    folder.mkdir()
    assert wrong_scores(path, folder) == ""
    assert wrong_scores(forged, folder) == (
        f"assignment3_graphs step2 peak bytes: forged.toml contains {peaks[0] - 512}, "
        f"but the score is {peaks[0]}.0\n"
    )


def test_check_writes_no_report_if_a_step_fails(tmp_path: Path) -> None:
    wrong = ASSIGNMENT.replace("dies[number] = len(nodes) if number in keep else i", "pass")
    (tmp_path / "assignment3_graphs.py").write_text(wrong)
    options = ["--report", "report.toml", "--draw", "drawing.svg"]
    done = check("assignment3_graphs.py", *options, cwd=tmp_path)
    assert done.returncode == 1 and "4 of 5 steps pass" in done.stdout
    assert done.stderr.splitlines() == [
        "No schedule was drawn: no step has run a pipeline. Only step 7 of lab 10 and step 6 of "
        "the capstone run one.",
        "No report was written: a report needs all steps to pass.",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["assignment3_graphs.py"]


def test_the_table_names_the_people_with_a_better_score(tmp_path: Path) -> None:
    folder = tmp_path / table.FOLDER
    folder.mkdir(parents=True)
    for who, messages in (("reference", 12), ("ann", 3), ("ben", 12), ("eve", 3), ("zoe", 20)):
        steps = {1: {"messages": messages, "bytes sent": 4000}}
        text = scores.report({"lab": ("program", "\n", steps)})
        (folder / f"{who}.toml").write_text(text)
    *_, first, second = table.show(["lab"], tmp_path).split("\n")[:4]
    assert first == "| 1 | messages | 12 | 3 by ann, eve |"
    assert second == "| 1 | bytes sent | 4,000 | — |"
    with pytest.raises(table.SchemaError, match="has no scores of other"):
        table.show(["other"], tmp_path)


EXISTS = "mine already exists, and check.py does not overwrite it. Name a new file."
NO_FOLDER = "There is no folder {}. Create it, or name a different folder."
REJECTED = {
    "--report mine": EXISTS,
    "--draw mine": EXISTS,
    "--report no/new.toml": NO_FOLDER.format("no"),
    "--report mine/new.toml": NO_FOLDER.format("mine"),
    "--report new --step 2": "--report needs the scores of all steps. Leave out --step.",
    "lab02_ddp-b.py --report new": "--report accepts only one program of each lab. Grade the "
    "others separately.",
    "lab02_ddp-b.py --draw new": "--draw draws one program, but you named 2. Name one program.",
    "--report new --draw new": "--draw and --report cannot both write to new. Name two files.",
}
CALL_CHECK = """
import json, sys
sys.path.insert(0, sys.argv[1])
import check
for words in json.loads(sys.argv[2]):
    sys.argv = ["check.py", "lab02_ddp.py", *words.split()]
    try:
        check.main()
    except SystemExit as end:
        print(end.code)
"""


def test_check_rejects_wrong_options_before_it_grades(tmp_path: Path) -> None:
    for name in ("lab02_ddp.py", "lab02_ddp-b.py", "mine"):
        (tmp_path / name).write_text("old text")
    done = run("python", "-c", CALL_CHECK, LABS, json.dumps(list(REJECTED)), cwd=tmp_path)
    assert (done.stdout.splitlines(), done.stderr) == (list(REJECTED.values()), "")
    assert {path.read_text() for path in tmp_path.iterdir()} == {"old text"}


# --- counting -----------------------------------------------------------------------------


def test_an_all_reduce_sends_as_much_as_its_two_halves() -> None:
    for n in (1, 2, 3, 8):
        whole, part = 4 * n, 4
        apart = scores.bytes_sent("reduce_scatter_tensor", part, n)
        apart += scores.bytes_sent("all_gather_into_tensor", whole, n)
        assert scores.bytes_sent("all_reduce", whole, n) == pytest.approx(apart)
        listed = scores.bytes_sent("reduce_scatter", part, n) + scores.bytes_sent(
            "all_gather", part, n
        )
        assert listed == pytest.approx(apart)
        assert scores.bytes_sent("all_to_all", part, n) == scores.bytes_sent(
            "all_to_all_single", whole, n
        )
    assert scores.bytes_sent("isend", 7, 2) == scores.bytes_sent("broadcast", 7, 4) == 7
    assert scores.bytes_sent("irecv", 7, 2) == scores.bytes_sent("recv", 7, 2) == 0


def test_the_score_of_a_group_is_the_maximum_over_ranks() -> None:
    def call(name: str, sent: float, phase: str = "it") -> SimpleNamespace:
        return SimpleNamespace(name=name, sent=sent, phase=phase)

    few = [call("isend", 90), call("irecv", 0), call("recv", 0)]
    many = [call("isend", 10.5), call("broadcast", 10), call("broadcast", 500, phase="")]
    facts = {"scores": [{"launches": 5}, {"launches": 3}], "schedule": [None, None]}
    ranks = [SimpleNamespace(calls=calls) for calls in (few, many)]
    group = SimpleNamespace(ranks=ranks, facts=facts.get)
    assert scores.group_scores(group) == {"messages": 2, "bytes sent": 90, "launches": 5}
    few.append(call("broadcast_object_list", 0))  # its number of bytes is unknown
    assert scores.group_scores(group) == {"launches": 5}


def test_positional_and_keyword_tensors_are_counted() -> None:
    sent = []
    probe = SimpleNamespace(
        calls={None: SimpleNamespace()}, _send=lambda message: None, is_recording=False
    )
    probe.record = lambda name, tensor, *_: sent.append(tensor)
    lesson = importlib.import_module("graders.rank").Lesson
    gather = lesson._recorder(probe, "all_gather_single", lambda to, one, group: None)
    gather("to", "one", None)
    gather(one="one", to="to", group=None)
    assert sent == ["to", "to"]


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (4, 2), (3, 7)])
def test_the_bubble_equals_the_formula(p: int, m: int) -> None:
    share = round(100 * (p - 1) / (m + p - 1), 1)
    gpipe = [[f"{letter}{k}" for letter in "FB" for k in range(m)]] * p
    for schedule in (gpipe, scores.one_f_one_b(p, m)):
        assert len(scores.bars(schedule)) == 2 * p * m
        assert scores.bubble(schedule) == share


def test_the_drawing_shows_both_schedules_and_events_that_never_start() -> None:
    drawn = scores.draw([["F0", "B0", "F1", "B1"], ["B0", "F0", "F1", "B1"]])
    words = [each.text for each in ElementTree.fromstring(drawn).iter() if each.text]
    assert "yours: 7 events never begin" in words
    assert "1F1B: bubble 33.3%" in words
    assert "4 events never begin" in scores.draw([["B0", "F0"], ["B0", "F0"]])


def test_a_program_in_a_report_is_read_back_unchanged() -> None:
    for program in (
        'x = "\\n"\n',
        '"""A "quoted" word"""\n',
        "'''a'''\n\tb = '\\\\'\n",
        'end"\n"',
    ):
        text = scores.report({"lab": ("program", program, {1: {"launches": 2}})})
        assert tomllib.loads(text)["lab"] == {"step1": {"launches": 2}, "program": program}
