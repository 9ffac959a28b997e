"""The hints: every name that a grader uses has a text, and every text is used."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from graders.hints import Hints, common_hints, hints_of, read_hints

INPUTS = ["assessment", "graders", "labs"]
ROOT = Path(__file__).resolve().parent.parent
GRADERS = sorted([*ROOT.glob("graders/labs/*.py"), *ROOT.glob("graders/assessment/*.py")])
# calls whose last argument, or the argument `hint`, is the name of a hint
CALLS = {"require", "require_equal", "Wrong"}


def names_in(program: str) -> re.Pattern:
    """Return a pattern for all names that code contains: strings, keywords and f-strings."""
    patterns = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.JoinedStr):  # f"{side}_forward" names several hints
            parts = [getattr(part, "value", "") for part in node.values]
            parts = [re.escape(part) if isinstance(part, str) else r"\w+" for part in parts]
            if "_" in "".join(parts):
                patterns.add("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            patterns.add(re.escape(node.value))
        elif isinstance(node, ast.keyword) and node.arg:
            patterns.add(node.arg)
    return re.compile("|".join(patterns))


def named_hints(code: ast.Module) -> Iterator[str]:
    """Yield the hints that a grader names in its calls, apart from names that it computes."""
    for node in ast.walk(code):
        if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in CALLS:
            continue
        hints = [each.value for each in node.keywords if each.arg == "hint"] or node.args[-1:]
        for hint in hints:
            choices = [hint.body, hint.orelse] if isinstance(hint, ast.IfExp) else [hint]
            for choice in choices:
                if isinstance(choice, ast.Constant) and isinstance(choice.value, str):
                    yield choice.value


def faults(program: str, hints: Hints, shared: str = "") -> list[str]:
    """Return a sentence for each unknown hint of a grader, and for each hint without a use.

    `shared` is the code of other modules which may name hints of this grader.
    """
    code = ast.parse(program)
    known = hints.texts.keys() | common_hints().keys()
    used = names_in(f"{program}\n{shared}")
    unknown = sorted(set(named_hints(code)) - known)
    unused = sorted(name for name in hints.texts if not used.fullmatch(name))
    return [
        *(f"{name}: the grader names this hint, but the hint has no text" for name in unknown),
        *(f"{name}: no line of the grader names this hint" for name in unused),
    ]


@pytest.mark.parametrize("grader", GRADERS, ids=lambda path: path.stem)
def test_each_hint_of_a_grader_has_a_text_and_a_use(grader: Path) -> None:
    finished = ROOT / grader.parent.name / grader.name
    shared = (ROOT / "graders/dsl.py").read_text("utf-8") + finished.read_text("utf-8")
    found = faults(grader.read_text("utf-8"), hints_of(grader), shared)
    assert not found, f"{grader.relative_to(ROOT)} and its file of hints: {found}"


def test_each_common_hint_has_a_use() -> None:
    modules = [path.read_text("utf-8") for path in ROOT.glob("graders/*.py")]
    used = names_in("\n".join(modules))
    assert [name for name in common_hints() if not used.fullmatch(name)] == []


def test_a_hint_without_a_text_and_a_hint_without_a_use_are_reported() -> None:
    program = (
        'require(right, "wrong", "first" if early else "second")\nraise Wrong("x", "crash")'
    )
    hints = Hints({"first": "Look here.", "third": "Look there."})
    assert faults(program, hints) == [
        "second: the grader names this hint, but the hint has no text",
        "third: no line of the grader names this hint",
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "lab99.hints.toml does not exist. Every grader needs a file with its hints"),
        ("[hints\n", "lab99.hints.toml is not a TOML file: Expected ']'"),
        ('first = "Look."\n', "contains first outside of the tables"),
        ("[hints]\nfirst = 1\n", "the value of first in [hints] must be a text"),
        ('[hints]\nfirst = """\n"""\n', "the value of first in [hints] must be a text"),
        ('[fixes]\nfirst = "Do it."\n', "[fixes] has a text for first, but [hints] has none"),
        ('[hints]\na = "A"\na = "B"\n', "is not a TOML file: Cannot overwrite a value"),
    ],
    ids=["missing", "no TOML", "no table", "number", "empty", "only a fix", "twice"],
)
def test_an_error_in_a_file_of_hints_is_reported(
    content: str | None, sentence: str, tmp_path
) -> None:
    path = tmp_path / "lab99.hints.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        hints_of(tmp_path / "lab99.py")
    assert sentence in str(error.value)


def test_line_breaks_in_a_text_count_as_spaces(tmp_path: Path) -> None:
    path = tmp_path / "lab99.hints.toml"
    path.write_text('[hints]\nfirst = """\nLook at\nthe  loop.\n"""\n')
    assert read_hints(path).texts == {"first": "Look at the loop."}
