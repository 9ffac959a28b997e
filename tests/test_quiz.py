"""Tests of the quiz: programs of the book confirm the answers, and an invalid file is rejected.

A new question needs only an entry in docs/assessment/quiz.yml. The build of the page checks its
answer. This module may also contain a check that computes the answer in a different way.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
import yaml

pytest.importorskip("mkdocs")

import markdown

from worldsize.site import quiz
from worldsize.site.markdown_extension import BookMarkdown
from worldsize.site.quiz import Question
from worldsize.site.yaml_schema import DataError

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["src", "docs", "code of snippets"]


def by_id(lessons: list[quiz.Lesson]) -> dict[str, Question]:
    return {each.id: each for lesson in lessons for each in lesson.questions}


QUESTIONS = by_id(quiz.load(ROOT))
ONE_MORE = """
      - id: one-more
        title: A question that only the data file contains
        kind: number
        ask: How many seconds do three steps of 20 seconds take?
        unit: seconds
        other_units: [s, second]
        answer: 60
        expression: 3 * 20
        wrong_values:
          - value: 20
            feedback: This is the time of one step, and not of three steps.
          - value: 6.67
            feedback: This divides by the number of steps instead of multiplying.
          - value: 23
            feedback: This adds the two numbers instead of multiplying them.
        explanation: Three times twenty is sixty.
        read: ["01_communication_costs#all-reduce-from-send-and-recv"]
"""


@cache
def program(name: str) -> ModuleType:
    """Import a program of the book, and return its module."""
    path = ROOT / "snippets" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"quiz_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- the quiz of the book


@pytest.fixture(scope="module", params=["the quiz", "a copy with one more question"])
def book(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the book, or of a copy with one more question in the data file."""
    if request.param == "the quiz":
        return ROOT
    root = tmp_path_factory.mktemp("book")
    (root / "snippets").symlink_to(ROOT / "snippets")
    (root / "docs/assessment").mkdir(parents=True)
    for path in (ROOT / "docs").iterdir():
        if path.name != "assessment":
            (root / "docs" / path.name).symlink_to(path)
    text = (ROOT / quiz.FILE).read_text("utf-8")
    (root / quiz.FILE).write_text(text + ONE_MORE, "utf-8")
    return root


@pytest.fixture
def lessons(book: Path) -> list[quiz.Lesson]:
    return quiz.load(book)


@pytest.fixture
def questions(lessons: list[quiz.Lesson]) -> dict[str, Question]:
    return by_id(lessons)


def test_every_lesson_of_the_track_has_questions_and_every_kind_is_used(
    lessons: list[quiz.Lesson], questions: dict[str, Question]
) -> None:
    track = yaml.safe_load((ROOT / "docs/tracks/gpu_and_distributed.yml").read_text("utf-8"))
    parts = [part["id"] for group in track["groups"] for part in group["parts"]]
    assert [each.id for each in lessons] == [
        part for part in parts if part.startswith("lesson-")
    ]
    assert all(len(lesson.questions) >= 2 for lesson in lessons)
    kinds = Counter(question.kind for question in questions.values())
    assert len(kinds) == 5 and min(kinds.values()) >= 4
    proven = [question for question in questions.values() if question.evidence]
    assert len(proven) >= 0.8 * len(questions)


def test_the_page_shows_all_questions_and_their_number(
    book: Path, questions: dict[str, Question]
) -> None:
    lessons = len(yaml.safe_load((book / quiz.FILE).read_text("utf-8"))["lessons"])
    size = quiz.show(["size"], book)
    assert f"{len(questions)} questions in {lessons} lessons" in size
    assert f"| all | {len(questions)} |" in quiz.show(["lessons"], book)
    shown = quiz.show(["questions"], book)
    assert shown.count('class="quiz-question"') == len(questions)
    assert len(questions) == len(QUESTIONS) + (book != ROOT)


def test_no_text_contains_the_number_of_questions() -> None:
    """A number in the text would be wrong after the next question."""
    count = r"\b(\d+|twenty(-\w+)?|thirty(-\w+)?|two dozen) questions\b"
    for name in ("assessment/quiz.md", "tracks/gpu_and_distributed.yml", "index.md"):
        text = (ROOT / "docs" / name).read_text("utf-8")
        assert not re.findall(count, text, re.I), name


def test_the_right_answer_cannot_be_guessed_from_its_place_or_length(
    questions: dict[str, Question],
) -> None:
    places = [
        each.right[0] for each in questions.values() if len(getattr(each, "right", [])) == 1
    ]
    assert max(Counter(places).values()) <= len(places) // 2
    is_longest = []
    for question in questions.values():
        if question.kind in ("one", "output"):
            texts = [each.text for each in question.options]
            is_longest.append(max(texts, key=len) == texts[question.right[0]])
    assert sum(is_longest) <= len(is_longest) // 2


def test_every_option_has_its_own_explanation(questions: dict[str, Question]) -> None:
    texts = [each.feedback for question in questions.values() for each in question.options] + [
        wrong.feedback for question in questions.values() for wrong in question.wrong_values
    ]
    assert len(set(texts)) == len(texts)
    assert min(len(text) for text in texts) > 15
    for question in questions.values():
        assert question.kind != "number" or len(question.wrong_values) >= 3


def test_steps_are_shuffled_equally_in_every_build(
    questions: dict[str, Question],
) -> None:
    for question in questions.values():
        if question.kind == "order":
            shown = question.shuffled()
            assert shown == question.shuffled()
            assert all(step != place for place, step in enumerate(shown))


# ---- answers that this module computes

CHECKS: dict[str, Callable[[Question], None]] = {}  # by the id of the question


def checks(name: str) -> Callable[[Callable], Callable]:
    """Register a function that computes the answer of the question with this id."""

    def register(check: Callable[[Question], None]) -> Callable[[Question], None]:
        CHECKS[name] = check
        return check

    return register


def check_number(question: Question, value: float) -> None:
    """Check that the question accepts this value, and none of its wrong values."""
    assert question.accepts(value), f"{question.id}: {question.answer}, computed {value}"
    assert not any(question.accepts(wrong.value) for wrong in question.wrong_values)


def check_options(question: Question, is_right: Callable[[str], bool]) -> None:
    """Check that exactly those options count as right for whose text `is_right` is true."""
    for option in question.options:
        assert is_right(option.text) == option.right, f"{question.id}: {option.text}"


def check_order(question: Question, *words: str) -> None:
    """Check that the first step contains the first of these words, and so on."""
    assert len(words) == len(question.options)
    for word, step in zip(words, question.options, strict=True):
        assert word in step.text, f"{question.id}: {word}: {step.text}"


@checks("ridge")
def ridge(question: Question) -> None:
    check_number(question, 989e12 / 3350e9)
    values = [each.value for each in question.wrong_values]
    computed = [3350e9 / 989e12, 989 / 3350, 2 * 989e12 / 3350e9, 67e12 / 3350e9]
    assert values == pytest.approx(computed, rel=0.01)


@checks("wider")
def wider(question: Question) -> None:
    crossing = program("06_gpu_computing/crossing")

    def step(width: int) -> float:
        """Return the seconds by the model of the program, with three layers and batch 32."""
        flops, weights = 3 * 3 * 2 * 32 * width**2, 3 * width**2
        return crossing.modelled(flops, 3 * 4 * weights, 0, launches=30)

    assert step(64) == pytest.approx(300e-6, rel=0.02)
    check_options(question, lambda text: f"about {1e5 * step(1024):.0f}0 µs" in text)


@checks("hierarchy")
def hierarchy(question: Question) -> None:
    page = (ROOT / "docs/06_gpu_computing.md").read_text("utf-8")
    check_order(question, "registers", "shared", "L2", "device memory", "NVLink", "PCIe")
    assert round(132 * 128 * 1.98e9 / 1e12) == 33
    for rate in ("33$ TB/s", "3,350 GB/s", "450 GB/s one way", "63 GB/s one way"):
        assert rate.replace("$", "") in page.replace("$", "")


@checks("sectors")
def sectors(question: Question) -> None:
    coalescing = program("06_gpu_computing/coalescing")

    def delivered(stride: int) -> int:
        return 32 * coalescing.sectors(coalescing.strided(stride), 4)

    check_number(question, delivered(8))
    assert delivered(2) == 256 and delivered(1) == 128 and delivered(1024) == 1024


@checks("divergence")
def divergence(question: Question) -> None:
    simt = program("06_gpu_computing/divergence")
    without, _ = simt.run(lambda warp: warp.work(10))

    def diverges(condition: str) -> bool:
        side = condition.strip("`").replace("/", "//")  # integer division, as in C
        issued, _ = simt.run(simt.two_sides(lambda thread: eval(side, {"thread": thread})))
        return issued == 2 * without

    check_options(question, diverges)


@checks("syncs")
def syncs(question: Question) -> None:
    import torch

    counter = program("06_gpu_computing/hidden_syncs").CountWaits

    def waits(line: str) -> bool:
        line = line.strip("`").replace("break", "pass").replace("print(", "str(")
        names = {
            "torch": torch,
            "total": torch.zeros(()),
            "loss": torch.tensor(2.0, requires_grad=True) * 1,
            "labels": torch.arange(4),
            "predicted": torch.tensor([0, 1, 3, 2]),
            "x": torch.ones(4),
            "mask": torch.tensor([True, False, True, True]),
            "logits": torch.randn(4, 3),
        }
        with counter() as counted:
            exec(line, names)
        return sum(counted.waits.values()) > 0

    check_options(question, waits)


def measured(question: Question) -> list[float]:
    """Return the measured numbers in the output that a question shows."""
    return [float(n) for n in re.findall(r"≈([\d.]+)", "\n".join(question.shows.lines))]


@checks("clock")
def clock(question: Question) -> None:
    launches, synchronized, events = measured(question)
    assert synchronized >= 3 * 40 and events >= 3 * 40 > 100 * launches
    assert "launches into a queue" in question.options[question.right[0]].text


@checks("oom")
def oom(question: Question) -> None:
    requested, capacity, free, allocated, cached = measured(question)
    assert cached > 3 * requested > requested > free  # the cached memory would be enough
    # no other process uses memory
    assert capacity == pytest.approx(allocated + cached + free, abs=1)
    assert 0.6 < allocated / capacity < 0.75  # "about two thirds"
    assert "fragmentation" in question.options[question.right[0]].text


@checks("staging")
def staging(question: Question) -> None:
    import torch

    staged = program("07_memory_and_performance/staging")
    engine, target = staged.CopyEngine(seconds=0.02), torch.full((6, 4), -1.0)
    staged.one_buffer(engine, target, pinned=True)
    assert target[:, 0].tolist() == [5.0] * 6 and question.right == [1]


@checks("counter")
def counter(question: Question) -> None:
    import torch

    for dtype, stops in ((torch.bfloat16, 256), (torch.float16, 2048)):
        total, one = torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype)
        for _ in range(1024 if dtype is torch.bfloat16 else 2100):
            total += one
        assert total.item() == stops
        if dtype is torch.bfloat16:
            check_number(question, total.item())


@checks("scaler")
def scaler(question: Question) -> None:
    """Run the lines in the right order and in two wrong orders.

    Only in the right order does clipping receive the true norm of the gradients.
    """
    import torch

    def run(order: list[int]) -> tuple[float, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        names = {
            "torch": torch,
            "x": torch.ones(2, 4),
            "y": None,
            "model": lambda x, y: forward(x).sum(),
            "optimizer": torch.optim.SGD(model.parameters(), 0.1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0),
        }
        forward, model_parameters = model, model.parameters
        names["before"] = model.weight.detach().clone()
        names["model"].parameters = model_parameters
        for step in order:
            line = question.options[step].text.strip("`")
            line = line.replace('"cuda", torch.float16', '"cpu", torch.bfloat16')
            is_clip = re.match(r"torch.nn.utils.clip", line)
            exec(f"norm = {line}" if is_clip else line, names)
        return float(names["norm"]), names["before"] - forward.weight.detach()

    right, moved = run([0, 1, 2, 3, 4, 5])
    # the learning rate times the clipped norm
    assert moved.norm() == pytest.approx(0.1 * (16 / 20) ** 0.5, rel=0.01)
    assert run([0, 1, 3, 2, 4, 5])[0] == pytest.approx(1024 * right, rel=0.01)
    assert run([0, 1, 2, 3, 5, 4])[1].norm() < moved.norm() / 100  # unscaled twice


@checks("ring")
def ring(question: Question) -> None:
    def sent(n: int) -> float:
        return 2 * (n - 1) / n * 12

    check_number(question, sent(8))
    values = {wrong.value for wrong in question.wrong_values}
    assert values == {12, 24, sent(8) / 2, 7 * 12, sent(4)}


@checks("halves")
def halves(question: Question) -> None:
    n, size = 8, 1.0
    reduce_scatter = all_gather = (n - 1) / n * size
    assert reduce_scatter + all_gather == 2 * (n - 1) / n * size
    assert question.options[question.right[0]].text == "the same amount"


@checks("state")
def state(question: Question) -> None:
    check_number(question, 70 * (2 + 2 + 4 + 4 + 4) / 8)
    assert [each.value for each in question.wrong_values] == [
        70 * 16, 70 * 2 / 8, 70 * 4 / 8, 70 * 12 / 8,
    ]  # fmt: skip


@checks("padding")
def padding(question: Question) -> None:
    from torch.utils.data import DistributedSampler

    drawn = [list(DistributedSampler(range(10), 4, rank, shuffle=False)) for rank in range(4)]
    twice = [each for each, count in Counter(chain(*drawn)).items() if count > 1]
    assert sum(map(len, drawn)) == 12 and twice == [0, 1]
    check_options(question, lambda text: "Twelve samples" in text)


@checks("ddp-step")
def ddp_step(question: Question) -> None:
    check_order(
        question, "forward", "last layers", "first bucket", "last gradient",
        "end of backward", "optimizer",
    )  # fmt: skip
    _, gradients, *buckets = question.evidence[0].lines
    gradients = gradients.partition(": ")[2].split(", ")
    buckets = [bucket.partition(" with ")[2].split(", ") for bucket in buckets]
    # the first bucket is full before the last gradient
    assert list(chain(*buckets)) == gradients


@checks("silent")
def silent(question: Question) -> None:
    programs = {
        "ddp.module": "bypassed_wrapper", "un-freezing": "late_parameters",
        "leaves out": "unused_parameters", "set_epoch": "sampler",
        "batch more": "uneven_inputs",
    }  # fmt: skip
    outputs = {Path(each.program).stem: "\n".join(each.lines) for each in question.evidence}

    def prints_no_error(text: str) -> bool:
        (program,) = (program for words, program in programs.items() if words in text)
        return "Error" not in outputs[program]

    check_options(question, prints_no_error)


@checks("one-f-one-b")
def one_f_one_b(question: Question) -> None:
    schedules = program("03_model_parallelism/schedules")
    first, second = schedules.gpipe(4, 8), schedules.one_f_one_b(4, 8)
    assert schedules.bubble(first) == schedules.bubble(second) == pytest.approx(3 / 11)
    assert [schedules.peak_live(ops, 1) for ops in first] == [8, 8, 8, 8]
    assert [schedules.peak_live(ops, 1) for ops in second] == [4, 3, 2, 1]
    check_options(question, lambda text: text.startswith("Less memory"))


@checks("column-row")
def column_row(question: Question) -> None:
    t, wide = 4, 4  # ranks; the hidden layer is four times as wide; in b·s·h
    part = (t - 1) / t
    sent = {  # all-reduce 2·part, reduce-scatter and all-gather part each
        "the first by columns, the second by rows": 2 * part,
        "both matrices by columns": wide * part + part,
        "both matrices by rows": wide * part + 2 * part,
        "the first by rows, the second by columns": 2 * wide * part + part,
    }
    check_options(question, lambda text: sent[text] == min(sent.values()))


@checks("mesh")
def mesh(question: Question) -> None:
    import torch

    def keeps_tp_in_a_node(text: str) -> bool:
        call = re.search(r'\((\d), (\d)\), mesh_dim_names=\("(\w+)", "(\w+)"\)', text)
        if not call:
            return False
        ranks = torch.arange(32).reshape(int(call[1]), int(call[2]))
        groups = (ranks if call[4] == "tp" else ranks.T).tolist()
        nodes = [{rank // 8 for rank in group} for group in groups]
        return all(len(each) == 1 for each in nodes) and len(groups[0]) == 8

    check_options(question, keeps_tp_in_a_node)


@checks("segments")
def segments(question: Question) -> None:
    def peak(k: int) -> float:
        return k + 2 * 64 / k

    check_number(question, min(range(1, 65), key=peak))
    check_number(question, (2 * 64) ** 0.5)
    assert peak(2) == peak(64) == 66


@checks("leaks")
def leaks(question: Question) -> None:
    program_ = program("07_memory_and_performance/leaks")
    ways = [
        program_.loss_with_graph,
        program_.loss_as_number,
        program_.error_kept,
        program_.hook_left,
        None,  # zero_grad, below
    ]
    unit = program_.TOKENS * program_.H * 4
    for option, way in zip(question.options, ways, strict=True):
        if way is None:
            assert not option.right
        else:
            assert (program_.leak(way) > 5 * unit) == option.right, option.text

    import torch

    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).zero_grad()
    assert model.weight.grad is None


@checks("utilisation")
def utilisation(question: Question) -> None:
    gpu = program("07_memory_and_performance/utilisation")
    kernels = gpu.back_to_back(1.0, 0.0, 1, 1.0)
    end = kernels[-1].start + 1.0
    assert gpu.utilisation(kernels, 0.0, end) == 1.0 > 100 * gpu.sm_activity(kernels, 0.0, end)
    check_options(question, lambda text: "some kernel was executing" in text)


@checks("workers")
def workers(question: Question) -> None:
    def batch(workers: int) -> float:
        return max(80 / workers, 20)

    check_number(question, min(range(1, 20), key=lambda w: (batch(w), w)))
    assert batch(3) == pytest.approx(26.7, abs=0.1)


@checks("graph")
def graph(question: Question) -> None:
    """Compare with the order of the lines in the GPU program of the chapter."""
    code = (ROOT / "snippets/07_memory_and_performance/cuda_graph_step.py").read_text("utf-8")
    code = code[code.index("torch.cuda.stream(side)") :]
    lines = [
        "step()",
        "torch.cuda.graph(graph)",
        "graph.replay()",
        "static.x.copy_(x)",
        "step().clone",
    ]
    places = [code.index(line) for line in lines]
    assert places == sorted(places)
    check_order(
        question, "Allocate static", "side", "torch.cuda.graph", "copy_", "replay", "loss"
    )


def test_the_answers_equal_those_that_programs_compute(questions: dict[str, Question]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    for name, check in CHECKS.items():
        check(questions[name])


def test_the_arithmetic_of_a_question_gives_its_answer(questions: dict[str, Question]) -> None:
    computed = [
        each for each in questions.values() if each.kind == "number" and each.expression
    ]
    assert computed
    for question in computed:
        check_number(question, question.expression_value())


# ---- a program whose output differs, and an invalid file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the folder of a book with one program and the page to which its quiz links."""
    for name in ("06_gpu_computing/coalescing.py", "06_gpu_computing/coalescing.cpu.txt"):
        (tmp_path / "snippets" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "snippets" / name, tmp_path / "snippets" / name)
    (tmp_path / "docs/assessment").mkdir(parents=True)
    (tmp_path / "docs/06_gpu_computing.md").write_text("# 06\n\n## Global `memory` here\n")
    return tmp_path


QUOTE = {"program": "06_gpu_computing/coalescing.py", "lines": ["x[8 * i]"]}
COMMON = {
    "title": "t",
    "ask": "a?",
    "explanation": "s.",
    "read": ["06_gpu_computing#global-memory-here"],
}
NUMBER = COMMON | {
    "id": "n", "kind": "number", "unit": "B", "answer": 1024, "tolerance": 0,
    "number": r"x\[8 \* i\] +128 B +\d+ +(\d+) B", "evidence": [QUOTE],
    "wrong_values": [{"value": 128, "feedback": "asked for."}],
}  # fmt: skip
ONE = COMMON | {
    "id": "o", "kind": "one",
    "options": [
        {"text": "one", "feedback": "no."},
        {"text": "two", "right": True, "feedback": "yes."},
        {"text": "three", "feedback": "no, either."},
    ],
    "evidence": [QUOTE], "expect": ["12.5%"],
}  # fmt: skip


def load(root: Path, *questions: dict) -> list[quiz.Lesson]:
    data = {"lessons": [{"id": "l", "name": "L", "questions": list(questions)}]}
    (root / quiz.FILE).write_text(yaml.safe_dump(data))
    return quiz.load(root)


def edited(question: dict, **changes: object) -> dict:
    """Return a copy of a question with changed fields; the value None removes a field."""
    made = copy.deepcopy(question) | changes
    return {name: value for name, value in made.items() if value is not None}


def test_a_small_quiz_is_shown(root: Path) -> None:
    (lesson,) = load(root, NUMBER, ONE)
    assert [each.id for each in lesson.questions] == ["n", "o"]
    page = markdown.markdown(
        "# Q\n\n<!-- quiz: questions -->\n\n<!-- quiz: lessons -->",
        extensions=[
            BookMarkdown(root),
            "md_in_html", "attr_list", "tables", "pymdownx.superfences",
        ],
    )  # fmt: skip
    assert 'id="n"' in page and "<strong>1,024 B</strong>" in page
    text = re.sub(r"<[^>]*>", "", page)
    assert re.search(r"\$ python coalescing.py\n…\nx\[8 \* i\] +128 B .*\n…", text)
    assert (
        'href="/06_gpu_computing.md#global-memory-here">06 · Global <code>memory</code>' in page
    )
    assert '<p class="quiz-key"><strong>B</strong>' in page  # the second option is right
    assert page.count("<details") == 2 and "<td><a" in page


def test_a_changed_output_of_a_program_is_reported(root: Path) -> None:
    load(root, NUMBER, ONE)
    transcript = root / "snippets/06_gpu_computing/coalescing.cpu.txt"
    text = transcript.read_text()
    transcript.write_text(
        text.replace("32  1024 B    12.5%\nx[1024", "16   512 B    25.0%\nx[1024")
    )
    with pytest.raises(DataError, match=r"n: the answer is 1024, but the program printed 512"):
        load(root, NUMBER)
    with pytest.raises(DataError, match=r"o: the program no longer prints '12.5%'"):
        load(root, ONE)
    transcript.write_text(text.replace("x[8 * i] ", "x[9 * i] "))
    with pytest.raises(DataError, match=r"n: 0 lines of coalescing.cpu.txt begin with"):
        load(root, NUMBER)


WRONG = {
    "a field is missing": (edited(ONE, explanation=None), "o: Object missing required field `explanation`"),
    "a field is unknown": (edited(ONE, hint="h"), "o: Object contains unknown field `hint`"),
    "an unknown kind": (edited(ONE, kind="essay"), "o: kind: Invalid value 'essay'"),
    "no such page": (edited(ONE, read=["99_none"]), "o: there is no page 99_none"),
    "no such section": (
        edited(ONE, read=["06_gpu_computing#none"]),
        "o: 06_gpu_computing has no section #none",
    ),
    "no section to read": (edited(ONE, read=[]), "o: `read` is empty"),
    "no such program": (
        edited(ONE, evidence=[QUOTE | {"program": "06_gpu_computing/none.py"}]),
        "o: 06_gpu_computing/none.py is not a program with a transcript",
    ),
    "several lines": (
        edited(ONE, evidence=[QUOTE | {"lines": ["x["]}]), "o: 8 lines of coalescing",
    ),
    "no such command": (
        edited(ONE, evidence=[QUOTE | {"command": "--none"}]), "o: 0 commands of coalescing",
    ),
    "evidence without a pattern": (edited(ONE, expect=None), "o: `evidence` needs `expect`"),
    "evidence without a number": (edited(NUMBER, number=None), "n: `evidence` needs `number`"),
    "two right ones": (
        edited(ONE, options=[each | {"right": True} for each in ONE["options"]]),
        "o: there must be at least three options, and exactly one",
    ),
    "several, and all of them right": (
        edited(
            ONE, kind="several", options=[each | {"right": True} for each in ONE["options"]]
        ),
        "o: there must be at least one right option and one wrong option",
    ),
    "an option twice": (edited(ONE, options=[*ONE["options"], ONE["options"][0]]), "occurs twice"),
    "an option without feedback": (
        edited(ONE, options=[*ONE["options"], {"text": "four"}]), "o: options 3: Object missing required field `feedback`",
    ),
    "a link in an option": (
        edited(ONE, options=[*ONE["options"], {"text": "[a](b)", "feedback": "w"}]), "o: options 3: an option must not contain a link",
    ),
    "a formula in the feedback": (
        edited(ONE, options=[*ONE["options"], {"text": "b", "feedback": "$w$"}]), "o: options 3: an option must not contain a link",
    ),
    "a number that occurs twice": (
        edited(NUMBER, number=r" (\d+)"), "n: ' (\\\\d+)' matches 4 places of the quoted lines",
    ),
    "a wrong value that is right": (
        edited(NUMBER, wrong_values=[{"value": 1024, "feedback": "w"}]), "n: the wrong value 1024 counts as right",
    ),
    "a second name for bytes": (
        edited(NUMBER, other_units=["octets"]), "n: remove `other_units`: all units of bytes are accepted",
    ),
    "an expression with another value": (
        edited(NUMBER, expression="32 * 16"), "n: the answer is 1024, but `expression` gives 512",
    ),
    "an expression that is no arithmetic": (
        edited(NUMBER, expression="open('x')"), "n: `expression` is not arithmetic",
    ),
    "no mapping": ("text", "l: questions 0: Expected `object`, got `str`"),
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_an_error_in_the_file_is_reported_with_its_question(root: Path, why: str) -> None:
    question, message = WRONG[why]
    with pytest.raises(DataError) as raised:
        load(root, question)
    assert message in str(raised.value) and quiz.FILE in str(raised.value)


def test_a_repeated_id_and_an_unknown_directive_are_reported(root: Path) -> None:
    with pytest.raises(DataError, match="o: occurs twice"):
        load(root, ONE, ONE)
    load(root, ONE)
    for comment in ("<!-- quiz: score -->", "<!-- quiz: a b -->"):
        with pytest.raises(DataError):
            markdown.markdown(comment, extensions=[BookMarkdown(root)])


def test_a_command_that_matches_twice_is_reported(root: Path) -> None:
    transcript = root / "snippets/06_gpu_computing/coalescing.cpu.txt"
    again = transcript.read_text() + "$ python coalescing.py --again\nmore\n"
    transcript.write_text(again)
    with pytest.raises(DataError, match=r"o: 2 commands of coalescing\.cpu\.txt contain 'coal"):
        load(root, edited(ONE, evidence=[QUOTE | {"command": "coalescing"}]))


def test_an_answer_is_right_within_its_tolerance() -> None:
    ring = QUESTIONS["ring"]
    near = ring.answer * (1 + ring.tolerance)
    assert ring.accepts(near) and not ring.accepts(near * 1.001)


def test_an_edited_question_has_a_different_version(root: Path) -> None:
    def version(question: dict) -> str:
        return load(root, question)[0].questions[0].version

    assert version(ONE) == version(edited(ONE, explanation="Something else."))
    assert version(ONE) != version(edited(ONE, options=ONE["options"][::-1]))
    unsettled = edited(NUMBER, evidence=None, number=None)
    assert version(unsettled) != version(edited(unsettled, answer=1025))


def test_units_of_bytes_are_converted() -> None:
    sizes = quiz.units("MiB")
    assert sizes[""] == sizes["MiB"] == sizes["mib"] == 1.0
    assert (
        sizes["KiB"] == 1 / 1024 and sizes["MB"] == 1e6 / 2**20 and sizes["kB"] == 1e3 / 2**20
    )
    assert "Mb" not in sizes  # bits are no bytes
    assert quiz.units("FLOPs per byte", ["FLOP/B"])["FLOP/B"] == 1.0
    assert quiz.units("") == {"": 1.0}
