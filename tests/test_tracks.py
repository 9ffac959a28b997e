"""Tests of the tracks: every topic links to a section and a program, and the times add up."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")

from worldsize.model import page
from worldsize.model.program import assume_unchanged
from worldsize.site import tracks, yaml_schema
from worldsize.site.tracks import Track, hours
from worldsize.site.yaml_schema import DataError

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["src", "docs", "labs", "mkdocs.yml", "code of snippets"]
# the number of topics in the syllabus of each track
TOPICS = {
    "gpu_and_distributed": 97,
    "distributed_core": 92,
    "pytorch_gpu": 106,
}
LESSONS = [60, 90, 75, 90, 90, 90, 75, 75]  # minutes of each lesson in the syllabus
NUMBERS = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "eight": 8,
    "nine": 9,
    "ten": 10,
}
NUMBERS |= {"twelve": 12, "fifteen": 15, "twenty": 20, "forty": 40}
# The ids of the criteria in the checklist that show what a learner is able to do in the end.
CRITERIA = {
    "gpu_and_distributed": {
        "architecture", "kernels", "training", "ddp", "one-node", "model-parallelism", "profile",
        "oom", "memory", "several-nodes",
    },
    "distributed_core": {"doctor", "ddp", "shard", "precision", "deepspeed"},
    "pytorch_gpu": {
        "components", "optimize", "extensions", "debug", "contribute", "advanced", "trade-offs",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=TOPICS)
def track(request) -> Track:
    return tracks.load(request.param)


def page_of(track: Track) -> str:
    """Return the Markdown of the page of a track, with its directives expanded."""
    lines = (ROOT / f"docs/tracks/{track.name}.md").read_text("utf-8").split("\n")
    return "\n".join(yaml_schema.expand_directives(lines, {"track": tracks.show}, ROOT))


# ---- topics


def test_a_track_has_a_row_for_each_topic_of_its_syllabus(track: Track) -> None:
    assert sum(len(part.rows) for part in track.parts) >= TOPICS[track.name]


def test_every_row_is_on_its_page_with_a_link(track: Track) -> None:
    page = page_of(track)
    lines = [line for line in page.split("\n") if line.startswith("| ")]
    for part in track.parts:
        assert f"{{ #{part.id} }}" in page, f"{track.name} does not show {part.id}"
        for row in part.rows:
            found = [
                line for line in lines if line.startswith(f"| {row.topic} | {row.outcome} |")
            ]
            assert len(found) == 1, f"{part.id}: {row.topic}"
            assert "](/" in found[0], f"{part.id}: the row {row.topic} has no link"


def test_every_row_names_a_program_that_its_sections_show(track: Track) -> None:
    """Read the pages with `page.read`, without the code that renders the tracks."""
    count = 0
    for part in track.parts:
        for row in part.rows:
            if not row.run:
                taught = [target for target in row.read if not re.match(r"(?!11)\d\d_", target)]
                assert taught, (
                    f"{part.id}: the row {row.topic} links only to chapters, so add `run`"
                )
                continue
            count += 1
            program = ROOT / row.program
            assert list(program.parent.glob(f"{program.stem}.*.txt")), (
                f"{program} has no transcript"
            )
            files = {ROOT / f"docs/{target.partition('#')[0]}.md" for target in row.read}
            shown = [
                each.file for file in files if file.exists() for each in page.read(file).embeds
            ]
            assert row.program in shown, f"{part.id}: {row.topic}"
    assert count > sum(len(part.rows) for part in track.parts) / 2


# ---- times


HOURS = r"\b(\w+) to (\w+) hours"
HOURS_OF_LAB = r"(?:Allow|Plan|takes about) (\w+)(?: to (\w+))? hours"


def test_lessons_have_the_minutes_of_the_syllabus() -> None:
    track = tracks.load("gpu_and_distributed")
    lessons = [part for part in track.parts if part.id.startswith("lesson-")]
    assert [part.minutes for part in lessons] == LESSONS
    labs = next(part for part in track.parts if part.id == "labs")
    assessment = next(part for part in track.parts if part.id == "assessment")
    assert 10 * 60 <= sum(LESSONS) <= 12 * 60
    assert 15 * 60 <= labs.minutes <= 20 * 60
    assert 3 * 60 <= assessment.minutes <= 4 * 60
    assert 30 * 60 <= track.minutes <= 35 * 60
    assert labs.minutes > track.minutes / 2  # the page of the track says this


def test_quiz_exercise_and_capstone_have_the_hours_of_their_pages() -> None:
    parts = {part.id: part for part in tracks.load("gpu_and_distributed").parts}
    assert parts["capstone"].minutes == 0
    quiz, exercise, capstone, track = (
        (ROOT / f"docs/{name}.md").read_text("utf-8")
        for name in (
            "assessment/quiz",
            "assessment/exercise",
            "assessment/capstone",
            "tracks/gpu_and_distributed",
        )
    )
    assert re.search(r"takes an hour\b", quiz)
    shortest = NUMBERS[re.search(HOURS, exercise)[1]]  # the page of the track says this
    assert [row.minutes for row in parts["assessment"].rows] == [60, 60 * shortest]
    assert re.search(HOURS, capstone).groups() == re.search(HOURS, track).groups()


def test_assignments_have_the_hours_of_their_page() -> None:
    """The first row has the sum of a column, and the other rows have the middle of a range."""
    page = (ROOT / "docs/assessment/assignments.md").read_text("utf-8")
    hours = re.findall(r"^\| \[`assignment\d.*\| ([\d.]+) \|$", page, re.M)
    total = re.search(r"^\| all \w+ \| \| ([\d.]+) \|$", page, re.M)[1]
    assert hours and sum(map(float, hours)) == float(total)
    ranges = re.findall(r"^\*(\w+) to (\w+) hours", page, re.M)
    middles = [30 * (NUMBERS[low.lower()] + NUMBERS[high]) for low, high in ranges]
    for low, high in ranges:
        assert re.search(rf"{low.lower()} to {high}", page.partition("## How they work")[0])
    steps = re.findall(r"^\d\. \*\*.+ \((\d+) to (\d+) hours", page, re.M)
    sums = [sum(map(int, ends)) for ends in zip(*steps, strict=True)]
    assert sums == [NUMBERS[each.lower()] for each in ranges[-1]]  # the final project
    part = next(part for part in tracks.load("pytorch_gpu").parts if part.id == "assignments")
    assert [row.minutes for row in part.rows] == [60 * sum(map(float, hours)), *middles]


def minutes_of(text: str) -> int:
    """Return the minutes that a cell shows, for example `50 min`, `2 h 30` or `–`."""
    match = re.fullmatch(r"\**(?:(\d+) h ?)?(?:(\d+)(?: min)?)?\**|–", text)
    assert match, text
    return int(match[1] or 0) * 60 + int(match[2] or 0)


def test_the_times_in_the_overview_add_up(track: Track) -> None:
    table = [line for line in track.show("overview").split("\n") if line.startswith("| ")][1:]
    *rows, total = numbers = [
        [minutes_of(cell.strip()) for cell in line.split("|")[3:6]] for line in table
    ]
    assert rows
    assert [sum(column) for column in zip(*rows, strict=True)] == total
    for read, do, together in numbers:
        assert read + do == together
    assert total[2] == track.minutes


def test_the_path_contains_every_part_and_lab(track: Track) -> None:
    """The path shows the parts in the order of the overview, and all labs of the table."""
    stops = [track.stops[name] for stage in track.path for name in stage]
    parts = re.findall(r"^\| \[(.+?)\]\(", track.show("overview"), re.M)
    assert [stop.name for stop in stops] == [name for name in parts if name != "Labs"]
    labs = next(part for part in track.parts if part.id == "labs")
    listed = {row.read[0].partition("#")[0].removeprefix("lab") for row in labs.rows}
    assert {lab for stop in stops for lab in stop.labs} == listed


def test_every_part_has_time_to_run_programs(track: Track) -> None:
    """The time of a part is at least 1.5 times the reading time of its sections."""
    for part in track.parts:
        if part.minutes and not part.states_minutes:
            reading = part.reading_minutes
            assert reading * 1.5 <= part.minutes, f"{part.id}: {reading} min to read"


def test_a_time_is_printed_in_hours_and_minutes() -> None:
    assert hours(50) == "50 min" and hours(60) == "1 h" and hours(125) == "2 h 05"


def test_labs_have_the_hours_of_their_texts(track: Track) -> None:
    """The text of a lab says, for example, "Allow two to three hours".

    A row that links to some steps of a lab is not checked.
    """
    checked = set()
    for part in track.parts:
        for row in part.rows:
            if not row.states_minutes or not re.fullmatch(r"lab\d\d", row.read[0]):
                continue
            for lab in (ROOT / "labs").glob(f"{row.read[0]}_*.py"):
                text = re.sub(r"\n# ", " ", lab.read_text("utf-8"))
                hours = re.search(HOURS_OF_LAB, text)
                assert hours, f"{lab.name} does not state its hours"
                low, high = NUMBERS[hours[1]], NUMBERS[hours[2] or hours[1]]
                assert low * 60 <= row.minutes <= high * 60, lab.name
                checked.add(lab.name)
    assert checked


# ---- the checklist


def test_the_checklist_contains_the_criteria_of_the_syllabus(track: Track) -> None:
    ids = [criterion.id for criterion in track.checklist]
    assert set(CRITERIA[track.name]) <= set(ids)
    for criterion in track.checklist:
        assert criterion.outcome.startswith("I ") and criterion.how.endswith(".")
        # learners show it with their own work: a lab, a program or the answer to a question
        assert any(re.match(r"lab|program:|[^#]+\?", each) for each in criterion.shown)


# ---- broken tracks

GOOD = """
title: T
path: [[one]]
groups:
  - id: g
    parts:
      - id: one
        name: One
        minutes: 10
        rows:
          - topic: a
            outcome: do a
            read: ["01_a#first"]
            run: p
checklist:
  - {id: c, outcome: I can., how: So., shown: ["01_a?Why so"]}
"""


@pytest.fixture
def write_track(tmp_path: Path):
    (tmp_path / "docs/tracks").mkdir(parents=True)
    (tmp_path / "labs").mkdir()
    (tmp_path / "snippets/s").mkdir(parents=True)
    (tmp_path / "snippets/s/p.py").write_text("print(1)\n")
    (tmp_path / "docs/01_a.md").write_text(
        "# A: page\n\n## First\n\n"
        + "word " * 480
        + '\n\n```python\n--8<-- "snippets/s/p.py"\n'
        '```\n\n## Second\n\n### `Third`: $x$ part\n\ntext\n\n??? question "Why so? And how?"\n'
    )

    def write(text: str) -> Track:
        (tmp_path / "docs/tracks/t.yml").write_text(text)
        return tracks.load("t", tmp_path)

    return write


def test_a_valid_track_is_read(write_track) -> None:
    track = write_track(GOOD)
    row = track.parts[0].rows[0]
    assert (row.program, row.minutes) == (
        "snippets/s/p.py",
        3,
    )  # 2 minutes for the words, and 1 minute for 12 + 3 lines of code
    assert "[01 · First](/01_a.md#first)" in track.show("rows", "g")
    assert "[01 · “Why so?”](/01_a.md#check-yourself)" in track.show("checklist")
    assert track.show("path").startswith("<ol")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("01_a#first", "01_a#frist", "one: a: 01_a has no section #frist"),
        ("01_a#first", "01_b#first", "one: a: there is no page 01_b"),
        ("01_a#first", "lab77#step-1", "one: a: there is no page lab77"),
        ('["01_a#first"]', "[]", "one: a: `read` is empty"),
        ("run: p", "run: q", "one: a: the sections of the row do not embed the program 'q'"),
        ("            run: p\n", "", "one: a: the row needs a program to `run`"),
        ("#first", "#second", "one: a: the sections of the row do not embed the program 'p'"),
        ("minutes: 10", "minutes: 2", "one: the part has 2 minutes, but its rows need 3"),
        (
            "            outcome: do a\n",
            "",
            "g: one: a: Object missing required field `outcome`",
        ),
        (
            "outcome: do a",
            "outcome: do a\n            why: so",
            "g: one: a: Object contains unknown field `why`",
        ),
        ("minutes: 10", "minutes: ten", "t.yml:7: g: one: minutes: Expected `int`, got `str`"),
        ("name: One", "nome: One", "t.yml:7: g: one: Object "),
        ("[[one]]", "[[two]]", "path: no part, and no group with `short`, has the id 'two'"),
        ("Why so", "Why not", "criterion c: 0 questions of 01_a.md begin with 'Why not'"),
        ('["01_a?Why so"]', "[]", "t.yml:16: c: `shown` is empty"),
        (
            '"01_a?Why so"',
            '"program:s/q.py"',
            "criterion c: there is no program snippets/s/q.py",
        ),
        ("checklist:\n", "checks:\n", "t.yml: Object "),
        (
            "  - {id: c",
            "  - {id: c, outcome: I., how: S., shown: [01_a]}\n  - {id: c",
            "c: occurs twice",
        ),
        ('shown: ["01_a?Why so"]', "shown: [index]", "criterion c: there is no page index"),
        ("title: T", "title: [", "docs/tracks/t.yml: while parsing"),
    ],
)
def test_an_error_in_a_track_is_reported_with_its_file_and_row(
    write_track, old: str, new: str, why: str
) -> None:
    assert old in GOOD
    with pytest.raises(DataError, match=re.escape(why)) as raised:
        write_track(GOOD.replace(old, new))
    assert "docs/tracks/t.yml" in str(raised.value)


def test_a_topic_that_occurs_twice_is_reported(write_track) -> None:
    row = '          - {topic: a, outcome: b, read: ["01_a#first"], run: p}\n'
    with pytest.raises(DataError, match="one: a: occurs twice"):
        write_track(GOOD.replace("checklist:", row + "checklist:"))


def test_minutes_of_rows_that_do_not_add_up_are_reported(write_track) -> None:
    rows = "            run: p\n            minutes: 9\n"
    with pytest.raises(DataError, match="one: the part has 10 minutes, but its rows have 9"):
        write_track(GOOD.replace("            run: p\n", rows))


def test_an_invalid_directive_stops_the_build(write_track, tmp_path: Path) -> None:
    write_track(GOOD)
    fill = partial(
        yaml_schema.expand_directives, directives={"track": tracks.show}, root=tmp_path
    )
    for words in ("t", "t maps", "t rows h", "t path g", "t, path"):
        with pytest.raises(DataError, match=f"<!-- track: {words} -->"):
            fill([f"<!-- track: {words} -->"])
    with pytest.raises(DataError, match=r"docs/tracks/u\.yml: .*No such file"):
        fill(["<!-- track: u path -->"])
    assert fill(["text"]) == ["text"]


def test_a_track_is_read_once_in_each_build(write_track, tmp_path: Path) -> None:
    write_track(GOOD)
    with assume_unchanged({}):  # as during one build
        before = tracks.load_once("t", tmp_path)
        assert tracks.load_once("t", tmp_path) is before
    with assume_unchanged({}):
        assert tracks.load_once("t", tmp_path) is not before


def test_a_lab_is_shown_at_its_first_stop() -> None:
    first, again = (tracks.Part(name, name, [], labs=("1",)) for name in ("first", "again"))
    first.minutes = again.minutes = 10
    first.lab_links = again.lab_links = {"1": "lab"}
    both = Track("T", [["first"], ["again"]], [tracks.Group("g", [first, again])], [])
    assert [labs for stage in both.stages for _, labs in stage] == [["lab"], []]


def test_a_section_ends_before_the_next_heading(write_track, tmp_path: Path) -> None:
    write_track(GOOD)
    here = page.read(tmp_path / "docs/01_a.md")
    assert list(here.headings) == ["a-page", "first", "second", "third-x-part"]
    assert here.headings["second"].end == len(here.lines)
    assert here.headings["first"].end == here.headings["second"].line - 1
    (embed,) = here.embeds
    assert embed.line in here.section("first") and embed.line not in here.section("second")
