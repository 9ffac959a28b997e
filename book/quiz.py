"""The quiz: from `docs/assessment/quiz.yml` to the questions of the page beside it.

A Python-Markdown extension. The page has two comment lines:

    <!-- quiz: questions -->     every lesson and its questions
    <!-- quiz: lessons -->       a table of lessons, for docs/assets/quiz.js to count in

Each becomes Markdown, so MkDocs checks every link. As it stands the page is whole: options are
lists, and answers are folded. The script makes the lists into forms.

A question is of one of five kinds: `one` choice, `several`, a `number`, what an `output` means,
and steps to put in `order`. One that a program settles names the program and the lines of its
transcript by how they begin; the page quotes them from there. What the lines must say (`holds`,
or the `number` in them) is checked whenever the page is built, so a key and its program cannot
come apart. Whatever is missing, unknown or said twice stops the build and names the question.
"""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from markdown.extensions.toc import slugify

from book import ROOT
from book.data import DataError, check_fields, extension, read_yaml
from book.markdown import program_page, provenance_sentence
from book.transcript import Step, Transcript

FILE = "docs/assessment/quiz.yml"
KINDS = {
    "one": "Choose one.",
    "several": "Choose all that hold; there may be one or more.",
    "number": "Give a number.",
    "output": "Read the output, then choose one.",
    "order": "Put these in order.",
}
_BYTES = {"B": 1, "byte": 1, "bytes": 1} | {
    f"{prefix}{ending}": base ** (power + 1)
    for ending, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}
_BYTES["kB"] = 1000
_ALIASES = {  # the unit of a question that counts something else, and how it may be written
    "": [],
    "FLOPs per byte": ["FLOP per byte", "FLOP/byte", "FLOPs/byte", "FLOP/B", "FLOPs/B"],
    "segments": ["segment"],
    "workers": ["worker"],
}
_ALWAYS = {"id", "title", "kind", "ask", "say", "read"}
_FIELDS = {
    "one": (_ALWAYS | {"options"}, {"settled", "holds"}),
    "several": (_ALWAYS | {"options"}, {"settled", "holds"}),
    "output": (_ALWAYS | {"options", "shows", "settled", "holds"}, set()),
    "number": (_ALWAYS | {"answer", "unit", "slips"}, {"tolerance", "settled", "number"}),
    "order": (_ALWAYS | {"steps"}, {"settled", "holds"}),
    "the quiz": ({"lessons"}, set()),
    "a lesson": ({"id", "name", "questions"}, set()),
    "an option": ({"text", "why"}, {"right"}),
    "a slip": ({"value", "why"}, set()),
    "a step": ({"text", "why"}, set()),
    "a quote": ({"program", "lines"}, {"command"}),
}
_COMMENT = re.compile(r"<!-- quiz: (?P<what>\w+) -->$")


def units(unit: str) -> dict[str, float]:
    """How an answer's unit may be written, and its size in `unit`; no unit means `unit`."""
    if unit in _BYTES:
        sizes = {name: size / _BYTES[unit] for name, size in _BYTES.items()}
    else:
        sizes = dict.fromkeys([unit, *_ALIASES[unit]], 1.0)
    return {"": 1.0} | {name.lower(): size for name, size in sizes.items()} | sizes


# ---- what a program printed


@dataclass
class Quote:
    """Lines of a program's transcript, found by how they begin."""

    program: str
    steps: list[tuple[Step, list[int]]]  # each command, and which of its lines are quoted
    provenance: str

    @property
    def lines(self) -> list[str]:
        return [step.output[place] for step, places in self.steps for place in places]

    def markdown(self, with_source: bool = True) -> list[str]:
        out = ["```console"]
        for step, places in self.steps:
            out.append(f"$ {step.command}")
            last = -1
            for place in places:
                if place != last + 1:
                    out.append("…")
                out.append(step.output[place])
                last = place
            if last != len(step.output) - 1:
                out.append("…")
        name = f"snippets/{self.program}"
        source = f"From [{name}]({program_page(name)}). {self.provenance}".strip()
        return [*out, "```", "", *([source, "{ .provenance }", ""] if with_source else [])]


def quote(data: dict, where: str, root: Path) -> Quote:
    """Find the lines that `data` names. Each is the one line that begins so."""
    _check("a quote", data, where)
    path = (root / "snippets" / data["program"]).with_suffix(".cpu.txt")
    if not path.is_file() or not (root / "snippets" / data["program"]).is_file():
        raise DataError(f"{where}: {data['program']} is no program with a transcript")
    transcript = Transcript.parse(path.read_text("utf-8"))
    command = data.get("command", "")
    steps = [step for step in transcript.steps if command in step.command]
    if command and len(steps) != 1:
        raise DataError(
            f"{where}: {len(steps)} commands of {path.name} have {command!r} in them"
        )
    chosen: dict[int, list[int]] = {}
    for start in data["lines"]:
        wanted = " ".join(start.split()) + (" " if start.endswith(" ") else "")
        found = [
            (number, place)
            for number, step in enumerate(steps)
            for place, line in enumerate(step.output)
            if (" ".join(line.split()) + " ").startswith(wanted)
        ]
        if len(found) != 1:
            raise DataError(f"{where}: {len(found)} lines of {path.name} begin with {start!r}")
        chosen.setdefault(found[0][0], []).append(found[0][1])
    said = provenance_sentence(transcript.provenance) if transcript.provenance else ""
    return Quote(
        data["program"],
        [(steps[number], sorted(chosen[number])) for number in sorted(chosen)],
        said,
    )


def section_link(target: str, where: str, root: Path) -> str:
    """The Markdown link to `02_ddp#overlap`, with the title of the section."""
    page, _, anchor = target.partition("#")
    path = root / "docs" / f"{page}.md"
    if not path.is_file():
        raise DataError(f"{where}: there is no page {page}")
    text = re.sub(r"^(`{3,}).*?^\1`*$", "", path.read_text("utf-8"), flags=re.M | re.S)
    for title in re.findall(r"^#{1,4} (.+?)(?:\s*\{[^}]*\})?$", text, re.MULTILINE):
        if not anchor or slugify(re.sub(r"[`*$]", "", title), "-") == anchor:
            number = re.match(r"\d\d", page)
            shown = title.split(":")[0] if not anchor else title
            return f"[{number[0] + ' · ' if number else ''}{shown}](/{page}.md" + (
                f"#{anchor})" if anchor else ")"
            )
    raise DataError(f"{where}: {page} has no section #{anchor}")


# ---- the questions


@dataclass
class Option:
    text: str
    why: str
    right: bool = False


@dataclass
class Question:
    id: str
    title: str
    kind: str
    ask: str
    say: str
    read: list[str]
    options: list[Option] = field(default_factory=list)  # of an order: the steps as they go
    answer: float = 0.0
    unit: str = ""
    tolerance: float = 0.02
    slips: list[dict] = field(default_factory=list)
    shows: Quote | None = None
    settled: list[Quote] = field(default_factory=list)
    holds: list[str] = field(default_factory=list)

    @property
    def version(self) -> str:
        """Another one whenever an answer that a browser has kept might mean another thing."""
        said = [self.kind, self.ask, self.answer, [each.text for each in self.options]]
        return f"{zlib.crc32(json.dumps(said).encode()):08x}"

    @property
    def right(self) -> list[int]:
        return [number for number, each in enumerate(self.options) if each.right]

    def shuffled(self) -> list[int]:
        """The steps as they are shown: the same in every build, and no step in its place."""
        places = list(range(len(self.options)))
        shuffle, order = random.Random(self.id), places.copy()
        while any(a == b for a, b in zip(order, places, strict=True)):
            shuffle.shuffle(order)
        return order

    def accepts(self, value: float) -> bool:
        """Whether a number in the question's own unit is right, as the script judges it."""
        return abs(value - self.answer) <= self.tolerance * abs(self.answer) + 1e-9


@dataclass
class Lesson:
    id: str
    name: str
    questions: list[Question]


def _check(kind: str, data: object, where: str) -> None:
    what = f"a question {kind!r}" if kind in KINDS else kind
    check_fields(data, what, *_FIELDS[kind], where)


def _question(data: dict, root: Path) -> Question:
    where = f"{FILE}: {data.get('id') if isinstance(data, dict) else data}"
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise DataError(f"{where}: {kind!r} is no kind; they are {', '.join(KINDS)}")
    _check(kind, data, where)
    data = dict(data)
    pattern = data.pop("number", None)
    for name, each_kind in (("options", "an option"), ("steps", "a step"), ("slips", "a slip")):
        for each in data.get(name, []):
            _check(each_kind, each, where)
            if "](" in each.get("text", "") or "$" in each["why"] + each.get("text", ""):
                # an option becomes a label, and what is said of it is read aloud
                raise DataError(f"{where}: no link in an option, no formula in it or its why")
    options = [Option(**each) for each in data.pop("options", data.pop("steps", []))]
    settled = [quote(each, where, root) for each in data.pop("settled", [])]
    shows = data.pop("shows", None)
    question = Question(
        **data,
        options=options,
        settled=settled,
        shows=quote(shows, where, root) if shows else None,
    )
    if len({each.text for each in options}) != len(options):
        raise DataError(f"{where}: an option is said twice")
    if kind in ("one", "output") and (len(question.right) != 1 or len(options) < 3):
        raise DataError(f"{where}: needs three options or more, one of them right")
    if kind == "several" and not 0 < len(question.right) < len(options):
        raise DataError(f"{where}: needs right options and wrong ones")
    if kind == "order" and len(options) < 3:
        raise DataError(f"{where}: needs three steps or more")
    if not question.read:
        raise DataError(f"{where}: leads to no section")
    for target in question.read:
        section_link(target, where, root)
    if kind == "number":
        if question.unit not in _BYTES and question.unit not in _ALIASES:
            raise DataError(f"{where}: the unit {question.unit!r} is not known")
        for slip in question.slips:
            if question.accepts(slip["value"]):
                raise DataError(f"{where}: the slip {slip['value']} counts as right")
    _hold(question, pattern, where)
    return question


def _hold(question: Question, pattern: str | None, where: str) -> None:
    """The lines that settle a question say what its key says."""
    text = "\n".join(line for each in question.settled for line in each.lines)
    if question.kind == "number":
        if bool(question.settled) != bool(pattern):
            raise DataError(f"{where}: `settled` and `number` go together")
        if pattern:
            found = re.findall(pattern, text)
            if len(found) != 1:
                raise DataError(
                    f"{where}: {pattern!r} is in the quoted lines {len(found)} times"
                )
            if not math.isclose(float(found[0].replace(",", "")), question.answer):
                raise DataError(
                    f"{where}: the answer is {question.answer}, the program printed {found[0]}"
                )
        return
    if bool(question.settled) != bool(question.holds):
        raise DataError(f"{where}: `settled` and `holds` go together")
    for each in question.holds:
        if not re.search(each, text):
            raise DataError(f"{where}: the program no longer says {each!r}:\n{text}")


def load(root: Path = ROOT) -> list[Lesson]:
    """Read the quiz; raise DataError where it does not hold."""
    data = read_yaml(root / FILE, FILE)
    _check("the quiz", data, FILE)
    lessons, ids = [], set()
    for each in data["lessons"]:
        _check(
            "a lesson", each, f"{FILE}: {each.get('id') if isinstance(each, dict) else each}"
        )
        questions = [_question(question, root) for question in each["questions"]]
        lessons.append(Lesson(each["id"], each["name"], questions))
        for name in [each["id"], *(question.id for question in questions)]:
            if name in ids:
                raise DataError(f"{FILE}: {name}: said twice")
            ids.add(name)
    return lessons


# ---- the page


def _list(tag: str, items: list[tuple[str, str]], name: str) -> list[str]:
    """A list of one line each: attributes and text."""
    out = [f'<{tag} class="{name}" markdown="1">']
    out += [
        f'<li markdown="1"{attributes}>{" ".join(text.split())}</li>'
        for attributes, text in items
    ]
    return [*out, f"</{tag}>", ""]


def _letters(places: list[int]) -> str:
    names = ["ABCDEFGHIJ"[place] for place in places]
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def shown_number(value: float, unit: str) -> str:
    """`1,024 B`, `295.2 FLOPs per byte`."""
    return f"{value:,.6g} {unit}".strip() if value < 1e6 else f"{value:g} {unit}".strip()


def _attributes(question: Question, lesson: str) -> str:
    data = {"quiz": question.id, "lesson": lesson}
    data |= {"kind": question.kind, "version": question.version}
    if question.kind == "number":
        data |= {
            "answer": f"{question.answer:.12g}",
            "tolerance": f"{question.tolerance:g}",
            "unit": question.unit,
            "units": json.dumps(units(question.unit)),
        }
    elif question.kind != "order":
        data["right"] = ",".join(map(str, question.right))
    return "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())


def show_question(number: int, question: Question, lesson: str, root: Path) -> list[str]:
    """One question as Markdown."""
    kind, options = question.kind, question.options
    out = [f"### {number} · {question.title} {{ #{question.id} }}", ""]
    out += [f'<div class="quiz-question"{_attributes(question, lesson)} markdown="1">', ""]
    out += [f'<div class="quiz-text" id="{question.id}-text" markdown="1">', ""]
    out += [*question.ask.strip().split("\n"), "", "</div>", ""]
    if question.shows:
        out += question.shows.markdown()
    hint = KINDS[kind]
    if kind == "number" and question.unit:
        hint = f"Give a number{', in' if question.unit in _BYTES else ' of'} {question.unit}."
    out += [f'<p class="quiz-hint">{hint}</p>', ""]
    if kind == "order":
        items = [
            (f' data-step="{place}"', options[place].text) for place in question.shuffled()
        ]
        out += _list("ul", items, "quiz-steps")
    elif options:
        out += _list("ol", [("", each.text) for each in options], "quiz-options")

    out += ['<details class="quiz-answer" markdown="1">', "<summary>Answer</summary>", ""]
    if kind == "number":
        near = f", give or take {question.tolerance:.0%}" if question.tolerance else ""
        out += [f"**{shown_number(question.answer, question.unit)}**{near}."]
    elif kind == "order":
        out += ["In this order:"]
    else:
        out += [f"**{_letters(question.right)}**."]
    out[-1] += "\n{ .quiz-key }"
    out += [""]
    if kind == "number":
        items = [
            (
                f' data-value="{each["value"]}"',
                f"**{shown_number(each['value'], question.unit)}:** {each['why']}",
            )
            for each in question.slips
        ]
        out += _list("ul", items, "quiz-why")
    elif kind == "order":
        items = [("", f"{each.text.rstrip('.')} – {each.why}") for each in options]
        out += _list("ol", items, "quiz-why quiz-ordered")
    else:
        items = [("", f"**{'Right' if e.right else 'Wrong'}.** {e.why}") for e in options]
        out += _list("ol", items, "quiz-why")
    out += [*question.say.strip().split("\n"), ""]
    for each in question.settled:
        out += each.markdown()
    links = [section_link(each, question.id, root) for each in question.read]
    out += [f"Read again: {' · '.join(links)}", "{ .quiz-read }", "", "</details>", ""]
    return [*out, "</div>", ""]


def show_questions(lessons: list[Lesson], root: Path) -> list[str]:
    out, number = [], 0
    for place, lesson in enumerate(lessons, 1):
        out += [f"## Lesson {place}: {lesson.name} {{ #{lesson.id} }}", ""]
        for question in lesson.questions:
            number += 1
            out += show_question(number, question, lesson.id, root)
    return out


def show_lessons(lessons: list[Lesson]) -> list[str]:
    """The table of lessons: what the script counts, and by hand where there is none."""
    out = ['<div class="quiz-result" markdown="1">', ""]
    out += ["| lesson | questions |", "|---|--:|"]
    for place, lesson in enumerate(lessons, 1):
        out.append(f"| [{place} · {lesson.name}](#{lesson.id}) | {len(lesson.questions)} |")
    total = sum(len(lesson.questions) for lesson in lessons)
    return [*out, f"| all | {total} |", "", "</div>", ""]


def render(lines: list[str], root: Path = ROOT) -> list[str]:
    """A page's Markdown with the quiz shown."""
    if not any("<!-- quiz:" in line for line in lines):
        return lines
    lessons, out = load(root), []
    for line in lines:
        match = _COMMENT.match(line.strip())
        if match is None and "<!-- quiz:" in line:
            raise DataError(f"not understood: {line.strip()}")
        if match is None:
            out.append(line)
        elif match["what"] == "questions":
            out += ["", *show_questions(lessons, root)]
        elif match["what"] == "lessons":
            out += ["", *show_lessons(lessons)]
        else:
            raise DataError(f"{match['what']} is nothing that the quiz shows")
    return out


makeExtension = extension("book_quiz", render)
