"""The quiz: from `docs/assessment/quiz.yml` to the questions of the page `quiz.md`.

The page has three comment lines:

    <!-- quiz: size -->          a sentence with the number of questions and lessons
    <!-- quiz: questions -->     every lesson and its questions
    <!-- quiz: lessons -->       a table of lessons, in which docs/assets/quiz.js counts

The templates in `templates/quiz/` determine how these look.

There are five kinds of questions: `one` choice, `several` choices, a `number`, the meaning of
an `output`, and steps to put in `order`. A new question needs an entry in the file and nothing
else. If a program of the book settles its answer, `evidence` names the program and the lines of
its transcript by how they begin, and the page quotes these lines. `expect` contains patterns
that the lines must match. For a number, the pattern `number` finds the answer in the lines,
and the arithmetic `expression` must give the answer. All of this is checked whenever the page
is built. A field that is missing, unknown or given twice stops the build, and the message
names the question.
"""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from worldsize.model import ROOT
from worldsize.model.program import Program
from worldsize.site import template, yaml_schema
from worldsize.site.cross_references import link
from worldsize.site.embeds import program_page
from worldsize.site.yaml_schema import Schema, SchemaError

FILE = "docs/assessment/quiz.yml"
_BYTES = {"B": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{ending}": base ** (power + 1)
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_BYTES["kB"] = 1000
_ARITHMETIC = {"__builtins__": {}, "sqrt": math.sqrt, "log2": math.log2, "ceil": math.ceil}


def units(unit: str, others: Sequence[str] = ()) -> dict[str, float]:
    """How an answer's unit may be written, and its size in `unit`; no unit means `unit`.

    `others` are other ways to write a unit that is not a number of bytes.
    """
    if unit in _BYTES:
        sizes = {name: size / _BYTES[unit] for name, size in _BYTES.items()}
    else:
        sizes = dict.fromkeys([unit, *others], 1.0)
    return {"": 1.0} | {name.lower(): size for name, size in sizes.items()} | sizes


# ---- what a program printed


class Quote(Schema, dict=True):
    """Lines of a program's transcript, found by how they begin."""

    program: str
    begins: list[str] = msgspec.field(name="lines")
    command: str = ""

    def find(self, root: Path) -> None:
        """Find the lines in the transcript. Each is the one line that begins so."""
        program = Program(root, root / "snippets" / self.program)
        if not program.path.is_file() or "cpu" not in program.devices:
            raise SchemaError(f"{self.program} is not a program with a transcript")
        transcript, name = program.transcript("cpu"), program.transcript_path("cpu").name
        commands = [each for each in transcript.commands if self.command in each.command_line]
        if self.command and len(commands) != 1:
            raise SchemaError(
                f"{len(commands)} commands of {name} contain {self.command!r}, not 1"
            )
        printed = [
            (number, place, " ".join(line.split()) + " ")
            for number, command in enumerate(commands)
            for place, line in enumerate(command.output)
        ]
        chosen: dict[int, list[int]] = defaultdict(list)
        for start in self.begins:
            wanted = " ".join(start.split()) + (" " if start.endswith(" ") else "")
            found = [(n, place) for n, place, line in printed if line.startswith(wanted)]
            if len(found) != 1:
                raise SchemaError(f"{len(found)} lines of {name} begin with {start!r}, not 1")
            chosen[found[0][0]].append(found[0][1])
        # each command, and which of its lines are quoted
        self.chosen = [(commands[number], sorted(chosen[number])) for number in sorted(chosen)]
        self.provenance = transcript.provenance
        self.page = program_page(f"snippets/{self.program}")

    @property
    def lines(self) -> list[str]:
        return [command.output[place] for command, places in self.chosen for place in places]

    @property
    def excerpt(self) -> list[str]:
        """The lines, each command before its own, and `…` where some are left out."""
        out = []
        for command, places in self.chosen:
            out.append(f"$ {command.command_line}")
            for before, place in zip([-1, *places], places, strict=False):
                out += [*["…"] * (place != before + 1), command.output[place]]
            out += ["…"] * (places[-1] != len(command.output) - 1)
        return out


# ---- the questions


class Choice(Schema):
    """A possible answer. Its text becomes a label, and screen readers announce its feedback."""

    feedback: str
    text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if "](" in self.text or "$" in self.feedback + self.text:
            raise SchemaError(
                "an option must not contain a link, and option and feedback no formula"
            )


class Line(Choice):
    text: str


class Option(Line):
    right: bool = False


class WrongValue(Choice):
    """A wrong number, and the mistake that leads to it."""

    value: int | float


class Question(Schema, tag_field="kind", kw_only=True, dict=True):
    """The fields of every question. Each kind of question has more fields."""

    id: str
    title: str
    ask: str
    explanation: str
    read: list[str]
    evidence: tuple[Quote, ...] = ()

    options: ClassVar[tuple[Line, ...]] = ()
    answer: ClassVar[float] = 0.0
    wrong_values: ClassVar[tuple[WrongValue, ...]] = ()
    shows: ClassVar[Quote | None] = None

    def __post_init__(self) -> None:
        if not self.read:
            raise SchemaError("`read` is empty: it must name a section")
        yaml_schema.require_unique(each.text for each in self.options)

    @property
    def kind(self) -> str:
        return self.__struct_config__.tag

    @property
    def version(self) -> str:
        """A checksum. A browser drops a stored answer if the checksum has changed."""
        said = [self.kind, self.ask, self.answer, [each.text for each in self.options]]
        return f"{zlib.crc32(json.dumps(said).encode()):08x}"

    def find(self, root: Path) -> None:
        """Find the links and quotes of the question, and compare the answer with the quotes."""
        self.links = [link(target, root) for target in self.read]
        for quote in [*self.evidence, *filter(None, [self.shows])]:
            quote.find(root)
        self.check_answer("\n".join(line for quote in self.evidence for line in quote.lines))

    # Each kind has a `hint`. Its `check_answer` raises SchemaError if the quoted lines do not
    # confirm the answer.


class Worded(Question, kw_only=True):
    """A question that is answered by its options."""

    expect: tuple[str, ...] = ()  # patterns that the quoted lines match

    def check_answer(self, text: str) -> None:
        if bool(self.evidence) != bool(self.expect):
            raise SchemaError("`evidence` needs `expect`, and `expect` needs `evidence`")
        for each in self.expect:
            if not re.search(each, text):
                raise SchemaError(f"the program no longer prints {each!r}:\n{text}")


class Several(Worded, tag="several", kw_only=True):
    options: list[Option]
    hint = "Choose every right option. There may be one or several."

    @property
    def right(self) -> list[int]:
        return [number for number, each in enumerate(self.options) if each.right]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.right) < len(self.options):
            raise SchemaError("the options must contain right ones and wrong ones")

    @property
    def letters(self) -> str:
        *others, last = ["ABCDEFGHIJ"[place] for place in self.right]
        return " and ".join(filter(None, [", ".join(others), last]))


class One(Several, tag="one", kw_only=True):
    hint = "Choose one."

    def __post_init__(self) -> None:
        if len(self.right) != 1 or len(self.options) < 3:
            raise SchemaError(
                "there must be at least three options, and exactly one of them must be right"
            )
        super().__post_init__()


class Output(One, tag="output", kw_only=True):
    shows: Quote
    evidence: list[Quote]
    expect: list[str]
    hint = "Read the output, then choose one."


class Order(Worded, tag="order", kw_only=True):
    options: list[Line] = msgspec.field(name="steps")  # as they go
    hint = "Put these in the right order."

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.options) < 3:
            raise SchemaError("there must be at least three steps")

    def shuffled(self) -> list[int]:
        """The steps as they are shown: the same in every build, and no step in its place."""
        places = list(range(len(self.options)))
        shuffle, order = random.Random(self.id), places.copy()
        while any(a == b for a, b in zip(order, places, strict=True)):
            shuffle.shuffle(order)
        return order


class Number(Question, tag="number", kw_only=True):
    answer: int | float
    unit: str
    wrong_values: list[WrongValue]
    tolerance: int | float = 0.02
    number: str = ""  # a pattern that finds the answer in the quoted lines
    expression: str = ""  # arithmetic that gives the answer: `2 * (8 - 1) / 8 * 12`
    other_units: tuple[str, ...] = ()  # other ways to write the unit

    @property
    def hint(self) -> str:
        of = f"{', in' if self.unit in _BYTES else ' of'} {self.unit}" if self.unit else ""
        return f"Give a number{of}."

    def accepts(self, value: float) -> bool:
        """Whether a number in the question's own unit is right, as the script judges it."""
        return abs(value - self.answer) <= self.tolerance * abs(self.answer) + 1e-9

    def computed(self) -> float:
        """The value of `expression`. Raises SchemaError if it is not arithmetic."""
        try:
            return float(eval(self.expression, dict(_ARITHMETIC)))
        except Exception as error:
            raise SchemaError(f"`expression` is not arithmetic: {error}") from None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit in _BYTES and self.other_units:
            raise SchemaError(
                f"`other_units` is for units that are not bytes, and not for {self.unit}"
            )
        if self.expression:
            value = self.computed()
            if not self.accepts(value):
                raise SchemaError(
                    f"the answer is {self.answer}, but `expression` gives {value:g}"
                )
        for wrong in self.wrong_values:
            if self.accepts(wrong.value):
                raise SchemaError(f"the wrong value {wrong.value} counts as right")

    def check_answer(self, text: str) -> None:
        if bool(self.evidence) != bool(self.number):
            raise SchemaError("`evidence` needs `number`, and `number` needs `evidence`")
        if self.number:
            found = re.findall(self.number, text)
            if len(found) != 1:
                raise SchemaError(
                    f"{self.number!r} matches {len(found)} places of the quoted lines, not 1"
                )
            if not math.isclose(float(found[0].replace(",", "")), self.answer):
                raise SchemaError(
                    f"the answer is {self.answer}, but the program printed {found[0]}"
                )

    @property
    def units(self) -> str:
        return json.dumps(units(self.unit, self.other_units))

    def shown(self, value: float) -> str:
        """`1,024 B`, `295.2 FLOPs per byte`."""
        return f"{value:{',.6g' if value < 1e6 else 'g'}} {self.unit}".strip()


# ---- the page


class Lesson(Schema):
    id: str
    name: str
    questions: list[One | Several | Number | Output | Order]


class Quiz(Schema):
    lessons: list[Lesson]

    def __post_init__(self) -> None:
        questions = [question for lesson in self.lessons for question in lesson.questions]
        yaml_schema.require_unique(each.id for each in [*self.lessons, *questions])


def load(root: Path = ROOT) -> list[Lesson]:
    """Return the lessons of the quiz. Raises DataError, which names the wrong question."""
    lessons = yaml_schema.read(root, FILE, Quiz).lessons
    questions = [question for lesson in lessons for question in lesson.questions]
    for place, question in enumerate(questions, 1):
        question.place = place  # counted through all lessons
        with yaml_schema.locate_errors(FILE, question.id):
            question.find(root)
    return lessons


def show(words: list[str], root: Path) -> str:
    """The Markdown of the size of the quiz, of its questions, or of the table of lessons."""
    if words not in (["size"], ["questions"], ["lessons"]):
        raise SchemaError("the quiz has only the parts `size`, `questions` and `lessons`")
    return template.render(f"quiz/{words[0]}", lessons=load(root))
