"""Show the questions of `docs/assessment/quiz.yml` on the page of the quiz.

These comments become a part of the quiz:

    <!-- quiz: size -->          a sentence with the number of questions and lessons
    <!-- quiz: questions -->     all lessons with their questions
    <!-- quiz: lessons -->       a table of lessons, where docs/assets/quiz.js shows the score

The templates in `templates/quiz/` determine the appearance.

There are five kinds of questions: `one` choice, `several` choices, a `number`, the meaning of
an `output`, and steps to put in `order`. A new question needs only an entry in the file. If the
output of a program proves the answer, `evidence` names the program and how some lines of its
transcript begin. The page quotes these lines, and they must match the patterns in `expect`. For
a number, the pattern `number` finds the answer in the lines, and the arithmetic `expression`
must give the answer. Each build of the page checks this. A field that is missing, unknown or
given twice stops the build, and the message names the question.
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
    """Return the units that an answer may have, with their sizes relative to `unit`.

    An answer without a unit has the unit `unit`. `others` are different spellings of a unit
    that is not a number of bytes.
    """
    if unit in _BYTES:
        sizes = {name: size / _BYTES[unit] for name, size in _BYTES.items()}
    else:
        sizes = dict.fromkeys([unit, *others], 1.0)
    return {"": 1.0} | {name.lower(): size for name, size in sizes.items()} | sizes


# ---- what a program printed


class Quote(Schema, dict=True):
    """Lines of a program's transcript, which are found by their beginnings."""

    program: str
    beginnings: list[str] = msgspec.field(name="lines")
    command: str = ""

    def find(self, root: Path) -> None:
        """Find the lines. Raise SchemaError unless each beginning matches exactly one line."""
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
            (number, index, " ".join(line.split()) + " ")
            for number, command in enumerate(commands)
            for index, line in enumerate(command.output)
        ]
        quoted: dict[int, list[int]] = defaultdict(list)  # line numbers, by the command
        for start in self.beginnings:
            text = " ".join(start.split()) + (" " if start.endswith(" ") else "")
            found = [(n, index) for n, index, line in printed if line.startswith(text)]
            if len(found) != 1:
                raise SchemaError(f"{len(found)} lines of {name} begin with {start!r}, not 1")
            quoted[found[0][0]].append(found[0][1])
        # each command, and the indices of its quoted lines
        self.quoted = [(commands[number], sorted(quoted[number])) for number in sorted(quoted)]
        self.provenance = transcript.provenance
        self.page = program_page(f"snippets/{self.program}")

    @property
    def lines(self) -> list[str]:
        """Return the quoted lines."""
        return [command.output[index] for command, indices in self.quoted for index in indices]

    @property
    def excerpt(self) -> list[str]:
        """Return the commands with their quoted lines, and with `…` for omitted lines."""
        out = []
        for command, indices in self.quoted:
            out.append(f"$ {command.command_line}")
            for before, index in zip([-1, *indices], indices, strict=False):
                out += [*["…"] * (index != before + 1), command.output[index]]
            out += ["…"] * (indices[-1] != len(command.output) - 1)
        return out


# ---- the questions


class Choice(Schema):
    """A possible answer. Its text becomes a label, and screen readers announce its feedback."""

    feedback: str
    text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if "](" in self.text or "$" in self.feedback + self.text:
            raise SchemaError(
                "an option must not contain a link, and neither the option nor its feedback "
                "may contain a formula"
            )


class TextChoice(Choice):
    """A choice that the page shows as text."""

    text: str


class Option(TextChoice):
    """An option of a question, which is right or wrong."""

    right: bool = False


class WrongValue(Choice):
    """A wrong number, and the mistake that leads to it."""

    value: int | float


class Question(Schema, tag_field="kind", kw_only=True, dict=True):
    """A question, with the fields of all kinds. Each kind adds its own fields."""

    id: str
    title: str
    ask: str
    explanation: str
    read: list[str]
    evidence: tuple[Quote, ...] = ()

    options: ClassVar[tuple[TextChoice, ...]] = ()
    answer: ClassVar[float] = 0.0
    wrong_values: ClassVar[tuple[WrongValue, ...]] = ()
    shows: ClassVar[Quote | None] = None

    def __post_init__(self) -> None:
        if not self.read:
            raise SchemaError("`read` is empty: it must name a section")
        yaml_schema.require_unique(each.text for each in self.options)

    @property
    def kind(self) -> str:
        """Return the kind, as in the field `kind` of the file."""
        return self.__struct_config__.tag

    @property
    def version(self) -> str:
        """Return a checksum. A browser deletes a stored answer if the checksum has changed."""
        content = [self.kind, self.ask, self.answer, [each.text for each in self.options]]
        return f"{zlib.crc32(json.dumps(content).encode()):08x}"

    def find(self, root: Path) -> None:
        """Find the links and the quotes of the question, and check the answer.

        Raise SchemaError if the quoted lines do not confirm the answer.
        """
        self.links = [link(target, root) for target in self.read]
        for quote in [*self.evidence, *filter(None, [self.shows])]:
            quote.find(root)
        self.check_answer("\n".join(line for quote in self.evidence for line in quote.lines))

    # Each kind has a `hint`. Its `check_answer` raises SchemaError if the quoted lines do not
    # confirm the answer.


class TextQuestion(Question, kw_only=True):
    """A question whose answers are texts."""

    expect: tuple[str, ...] = ()  # patterns that the quoted lines must match

    def check_answer(self, text: str) -> None:
        if bool(self.evidence) != bool(self.expect):
            raise SchemaError("`evidence` needs `expect`, and `expect` needs `evidence`")
        for each in self.expect:
            if not re.search(each, text):
                raise SchemaError(f"the program no longer prints {each!r}:\n{text}")


class MultipleChoice(TextQuestion, tag="several", kw_only=True):
    """A question with one or several right options."""

    options: list[Option]
    hint = "Choose every right option. There may be one or several."

    @property
    def right(self) -> list[int]:
        """Return the indices of the right options."""
        return [number for number, each in enumerate(self.options) if each.right]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < len(self.right) < len(self.options):
            raise SchemaError("there must be at least one right option and one wrong option")

    @property
    def letters(self) -> str:
        """Return the letters of the right options, such as `A, B and D`."""
        *others, last = ["ABCDEFGHIJ"[index] for index in self.right]
        return " and ".join(filter(None, [", ".join(others), last]))


class SingleChoice(MultipleChoice, tag="one", kw_only=True):
    """A question with exactly one right option."""

    hint = "Choose one."

    def __post_init__(self) -> None:
        if len(self.right) != 1 or len(self.options) < 3:
            raise SchemaError(
                "there must be at least three options, and exactly one of them must be right"
            )
        super().__post_init__()


class Output(SingleChoice, tag="output", kw_only=True):
    """A question about the meaning of an output."""

    shows: Quote
    evidence: list[Quote]
    expect: list[str]
    hint = "Read the output, then choose one."


class Order(TextQuestion, tag="order", kw_only=True):
    """A question whose steps must be put in order."""

    options: list[TextChoice] = msgspec.field(name="steps")  # in the right order
    hint = "Put these in the right order."

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.options) < 3:
            raise SchemaError("there must be at least three steps")

    def shuffled(self) -> list[int]:
        """Return the indices of the steps in a wrong order, which is the same in every build.

        No step is at its right position.
        """
        right_order = list(range(len(self.options)))
        generator, order = random.Random(self.id), right_order.copy()
        while any(a == b for a, b in zip(order, right_order, strict=True)):
            generator.shuffle(order)
        return order


class Number(Question, tag="number", kw_only=True):
    """A question whose answer is a number."""

    answer: int | float
    unit: str
    wrong_values: list[WrongValue]
    tolerance: int | float = 0.02
    number: str = ""  # a pattern that finds the answer in the quoted lines
    expression: str = ""  # arithmetic that gives the answer: `2 * (8 - 1) / 8 * 12`
    other_units: tuple[str, ...] = ()  # different spellings of the unit

    @property
    def hint(self) -> str:
        unit = f"{', in' if self.unit in _BYTES else ' of'} {self.unit}" if self.unit else ""
        return f"Give a number{unit}."

    def accepts(self, value: float) -> bool:
        """Return whether a number in the unit of the question is right, as in quiz.js."""
        return abs(value - self.answer) <= self.tolerance * abs(self.answer) + 1e-9

    def expression_value(self) -> float:
        """Return the value of `expression`. Raise SchemaError if it is not arithmetic."""
        try:
            return float(eval(self.expression, dict(_ARITHMETIC)))
        except Exception as error:
            raise SchemaError(f"`expression` is not arithmetic: {error}") from None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit in _BYTES and self.other_units:
            raise SchemaError(
                f"remove `other_units`: all units of bytes are accepted instead of {self.unit}"
            )
        if self.expression:
            value = self.expression_value()
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
        """Return the units that an answer may have, as JSON."""
        return json.dumps(units(self.unit, self.other_units))

    def format_value(self, value: float) -> str:
        """Return a value with the unit, such as `1,024 B` or `295.2 FLOPs per byte`."""
        return f"{value:{',.6g' if value < 1e6 else 'g'}} {self.unit}".strip()


# ---- the page


class Lesson(Schema):
    """A lesson of the quiz with its questions."""

    id: str
    name: str
    questions: list[SingleChoice | MultipleChoice | Number | Output | Order]


class Quiz(Schema):
    """The content of the file."""

    lessons: list[Lesson]

    def __post_init__(self) -> None:
        questions = [question for lesson in self.lessons for question in lesson.questions]
        yaml_schema.require_unique(each.id for each in [*self.lessons, *questions])


def load(root: Path = ROOT) -> list[Lesson]:
    """Return the lessons of the quiz. Raise DataError, with the question, if it is wrong."""
    lessons = yaml_schema.read(root, FILE, Quiz).lessons
    questions = [question for lesson in lessons for question in lesson.questions]
    for position, question in enumerate(questions, 1):
        question.position = position  # in the whole quiz
        with yaml_schema.locate_errors(FILE, question.id):
            question.find(root)
    return lessons


def show(words: list[str], root: Path) -> str:
    """Return the Markdown that replaces the comment `<!-- quiz: WORDS -->`."""
    if words not in (["size"], ["questions"], ["lessons"]):
        raise SchemaError("write `size`, `questions` or `lessons` after `quiz:`")
    return template.render(f"quiz/{words[0]}", lessons=load(root))
