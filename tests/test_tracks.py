"""The tracks: every topic leads to a section and a program, and the times add up."""

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
INPUTS = ["src", "docs", "labs", "mkdocs.yml", "snippets"]
TOPICS = {
    "gpu_and_distributed": 97,
    "distributed_core": 92,
    "pytorch_gpu": 106,
}  # none gets lost
LESSONS = [60, 90, 75, 90, 90, 90, 75, 75]  # minutes
# What a learner must be able to do in the end: the criteria which show it.
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
    """The page with its tracks shown, as Markdown."""
    lines = (ROOT / f"docs/tracks/{track.name}.md").read_text("utf-8").split("\n")
    return "\n".join(yaml_schema.expand_directives(lines, {"track": tracks.show}, ROOT))


# ---- topics


def test_no_topic_is_lost(track: Track) -> None:
    assert sum(len(part.rows) for part in track.parts) == TOPICS[track.name]


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
            assert "](/" in found[0], f"no link: {part.id}: {row.topic}"


def test_every_row_leads_to_a_program_that_its_section_shows(track: Track) -> None:
    """Read the pages again, without the code that renders the tracks."""
    count = 0
    for part in track.parts:
        for row in part.rows:
            if not row.run:
                taught = [target for target in row.read if not re.match(r"(?!11)\d\d_", target)]
                assert taught, f"{part.id}: {row.topic} leads to chapters and names no program"
                continue
            count += 1
            program = ROOT / row.program
            assert list(program.parent.glob(f"{program.stem}.*.txt")), (
                f"{program} has never run"
            )
            files = {ROOT / f"docs/{target.partition('#')[0]}.md" for target in row.read}
            shown = [
                each.file for file in files if file.exists() for each in page.read(file).embeds
            ]
            assert row.program in shown, f"{part.id}: {row.topic}"
    assert count > 50


# ---- times


def test_lessons_take_what_the_plan_says() -> None:
    track = tracks.load("gpu_and_distributed")
    lessons = [part for part in track.parts if part.id.startswith("lesson-")]
    assert [part.minutes for part in lessons] == LESSONS
    labs = next(part for part in track.parts if part.id == "labs")
    assessment = next(part for part in track.parts if part.id == "assessment")
    assert 10 * 60 <= sum(LESSONS) <= 12 * 60
    assert 15 * 60 <= labs.minutes <= 20 * 60
    assert 3 * 60 <= assessment.minutes <= 4 * 60
    assert 30 * 60 <= track.minutes <= 35 * 60
    assert "More than half of the time is the labs" in page_of(track)
    assert labs.minutes > track.minutes / 2


def test_quiz_and_exercise_take_what_their_pages_say() -> None:
    parts = {part.id: part for part in tracks.load("gpu_and_distributed").parts}
    assert [row.minutes for row in parts["assessment"].rows] == [60, 3 * 60]
    assert parts["capstone"].minutes == 0
    for name, words in (
        ("assessment/quiz", "an hour if you calculate"),
        ("assessment/exercise", "Allow three to five hours"),
        ("assessment/capstone", "It takes ten to fifteen hours"),
        ("tracks/gpu_and_distributed", "A project of ten to fifteen hours"),
    ):
        assert words in (ROOT / f"docs/{name}.md").read_text("utf-8")


def test_assignments_take_what_their_page_says() -> None:
    """Each row of the track: the sum of a table's column, or the middle of a span in hours."""
    page = (ROOT / "docs/assessment/assignments.md").read_text("utf-8")
    hours = re.findall(r"^\| \[`assignment\d.*\| ([\d.]+) \|$", page, re.M)
    assert len(hours) == 7 and f"| all seven | | {sum(map(float, hours)):g} |" in page
    words = {"six": 6, "nine": 9, "eight": 8, "twelve": 12, "twenty": 20, "forty": 40}
    spans = re.findall(r"^\*(\w+) to (\w+) hours", page, re.M)
    middles = [30 * (words[low.lower()] + words[high]) for low, high in spans]
    for low, high in spans:
        assert re.search(rf"{low.lower()} to {high}", page.partition("## How they work")[0])
    steps = re.findall(r"^\d\. \*\*.+ \((\d+) to (\d+) hours", page, re.M)
    sums = [sum(map(int, ends)) for ends in zip(*steps, strict=True)]
    assert sums == [words[spans[-1][0].lower()], words[spans[-1][1]]]  # the final project
    part = next(part for part in tracks.load("pytorch_gpu").parts if part.id == "assignments")
    assert [row.minutes for row in part.rows] == [60 * sum(map(float, hours)), *middles]


def minutes_of(text: str) -> int:
    """The minutes that a cell shows: `50 min`, `2 h 30`, `–`."""
    match = re.fullmatch(r"\**(?:(\d+) h ?)?(?:(\d+)(?: min)?)?\**|–", text)
    assert match, text
    return int(match[1] or 0) * 60 + int(match[2] or 0)


def test_times_shown_add_up(track: Track) -> None:
    table = [line for line in track.show("overview").split("\n") if line.startswith("| ")][1:]
    *rows, total = numbers = [
        [minutes_of(cell.strip()) for cell in line.split("|")[3:6]] for line in table
    ]
    assert rows
    assert [sum(column) for column in zip(*rows, strict=True)] == total
    for read, do, together in numbers:
        assert read + do == together
    assert total[2] == track.minutes


def test_the_way_passes_every_part_and_lab(track: Track) -> None:
    """The picture has the parts of the overview in their order, and each lab of the table."""
    way = [track.stops[name] for stage in track.path for name in stage]
    parts = re.findall(r"^\| \[(.+?)\]\(", track.show("overview"), re.M)
    assert [stop.name for stop in way] == [name for name in parts if name != "Labs"]
    labs = next(part for part in track.parts if part.id == "labs")
    listed = {row.read[0].partition("#")[0].removeprefix("lab") for row in labs.rows}
    assert {lab for stop in way for lab in stop.labs} == listed


def test_reading_leaves_time_to_run(track: Track) -> None:
    """A part's time is at least one and a half times what its sections take to read."""
    for part in track.parts:
        if part.minutes and not part.states_minutes:
            reading = part.reading_minutes
            assert reading * 1.5 <= part.minutes, f"{part.id}: {reading} min to read"


def test_a_time_is_said_as_one_says_it() -> None:
    assert hours(50) == "50 min" and hours(60) == "1 h" and hours(125) == "2 h 05"


def test_labs_take_what_they_say_themselves(track: Track) -> None:
    """A lab says "Allow two to three hours"; rows that send to some of its steps say less."""
    words = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6}
    checked = 0
    for part in track.parts:
        for row in part.rows:
            if not row.states_minutes or not re.fullmatch(r"lab\d\d", row.read[0]):
                continue
            for lab in (ROOT / "labs").glob(f"{row.read[0]}_*.py"):
                text = re.sub(r"\n# ", " ", lab.read_text("utf-8"))
                said = re.search(r"(?:Allow|Plan) (\w+)(?: to (\w+))? hours", text)
                if said:
                    low, high = words[said[1]], words[said[2] or said[1]]
                    assert low * 60 <= row.minutes <= high * 60, lab.name
                    checked += 1
    assert checked >= 4


# ---- what the reader ticks


def test_criteria(track: Track) -> None:
    ids = [criterion.id for criterion in track.checklist]
    assert set(CRITERIA[track.name]) <= set(ids)
    assert len(ids) >= 7
    for criterion in track.checklist:
        assert criterion.outcome.startswith("I ") and criterion.how.endswith(".")
        # something of one's own shows it: a lab, a program or a question
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
def small_site(tmp_path: Path):
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


def test_a_good_track_reads(small_site) -> None:
    track = small_site(GOOD)
    row = track.parts[0].rows[0]
    assert (row.program, row.minutes) == (
        "snippets/s/p.py",
        3,
    )  # 2 of words, 12 + 3 lines of code
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
def test_a_wrong_track_names_file_and_row(small_site, old: str, new: str, why: str) -> None:
    assert old in GOOD
    with pytest.raises(DataError, match=re.escape(why)) as raised:
        small_site(GOOD.replace(old, new))
    assert "docs/tracks/t.yml" in str(raised.value)


def test_a_topic_stands_once(small_site) -> None:
    row = '          - {topic: a, outcome: b, read: ["01_a#first"], run: p}\n'
    with pytest.raises(DataError, match="one: a: occurs twice"):
        small_site(GOOD.replace("checklist:", row + "checklist:"))


def test_stated_minutes_add_up(small_site) -> None:
    rows = "            run: p\n            minutes: 9\n"
    with pytest.raises(DataError, match="one: the part has 10 minutes, but its rows have 9"):
        small_site(GOOD.replace("            run: p\n", rows))


def test_a_comment_that_is_not_understood_stops_the_build(small_site, tmp_path: Path) -> None:
    small_site(GOOD)
    fill = partial(
        yaml_schema.expand_directives, directives={"track": tracks.show}, root=tmp_path
    )
    for words in ("t", "t maps", "t rows h", "t path g", "t, path"):
        with pytest.raises(DataError, match=f"<!-- track: {words} -->"):
            fill([f"<!-- track: {words} -->"])
    with pytest.raises(DataError, match=r"docs/tracks/u\.yml: .*No such file"):
        fill(["<!-- track: u path -->"])
    assert fill(["text"]) == ["text"]


def test_another_build_reads_a_track_again(small_site, tmp_path: Path) -> None:
    small_site(GOOD)
    with assume_unchanged({}):  # as in one build
        before = tracks.load_once("t", tmp_path)
        assert tracks.load_once("t", tmp_path) is before
    with assume_unchanged({}):
        assert tracks.load_once("t", tmp_path) is not before


def test_a_lab_stands_at_its_first_stop() -> None:
    first, again = (tracks.Part(name, name, [], labs=("1",)) for name in ("first", "again"))
    first.minutes = again.minutes = 10
    first.lab_links = again.lab_links = {"1": "lab"}
    both = Track("T", [["first"], ["again"]], [tracks.Group("g", [first, again])], [])
    assert [labs for stage in both.stages for _, labs in stage] == [["lab"], []]


def test_sections_and_their_ends(small_site, tmp_path: Path) -> None:
    small_site(GOOD)
    here = page.read(tmp_path / "docs/01_a.md")
    assert list(here.headings) == ["a-page", "first", "second", "third-x-part"]
    assert here.headings["second"].end == len(here.lines)
    assert here.headings["first"].end == here.headings["second"].line - 1
    (embed,) = here.embeds
    assert embed.line in here.section("first") and embed.line not in here.section("second")
