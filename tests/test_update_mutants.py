"""Tests of `make update-mutants`, which adapts the texts of mutants to edited programs."""

import tomllib
from pathlib import Path

import pytest

from worldsize.tools import update_mutants

INPUTS = ["src"]
PROGRAM = "snippets/t/mean.py"
SOURCE = """\
import torch

def average(gradient, ranks):
    total = gradient.sum(0)
    print("mean")
    return total / ranks
"""
LIST = f"""\
# a comment
["{PROGRAM}"]
"the sum is returned" = ["    return total / n\\n", "    return total\\n"]
"n is 1" = ["average(grad, n):", "average(grad, n=1):", "no call passes n"]
'other "quotes"' = ['print("mean")', 'print("sum")']

["snippets/t/gone.py"]
"unchanged" = ["a + b", "a - b"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a folder with a program and a list of mutants."""
    for name, text in {PROGRAM: SOURCE, "tests/mutants/t.toml": LIST}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, "utf-8")
    return tmp_path


def test_a_renamed_variable_is_also_renamed_in_the_list(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert update_mutants.main([], root) == 0
    text = (root / "tests/mutants/t.toml").read_text("utf-8")
    assert text.startswith("# a comment\n")
    assert tomllib.loads(text) == {
        PROGRAM: {
            "the sum is returned": ["    return total / ranks\n", "    return total\n"],
            "n is 1": [
                "average(gradient, ranks):",
                "average(gradient, ranks=1):",
                "no call passes n",
            ],
            'other "quotes"': ['print("mean")', 'print("sum")'],
        },
        "snippets/t/gone.py": {"unchanged": ["a + b", "a - b"]},
    }
    assert capsys.readouterr().out.count("updated ") == 2
    assert update_mutants.main([], root) == 0
    assert (root / "tests/mutants/t.toml").read_text("utf-8") == text


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("x = 1\n", id="nothing is similar"),
        pytest.param("return total / a\nreturn total / b\n", id="two pieces are similar"),
        pytest.param("return total / n\nreturn total / n\n", id="the text occurs twice"),
    ],
)
def test_an_entry_without_a_clear_match_is_printed_and_not_changed(
    source: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "tests/mutants/t.toml"
    path.write_text(f'["{PROGRAM}"]\n"sum" = ["return total / n", "return total"]\n')
    before = path.read_text()
    (root / PROGRAM).write_text(source)
    assert update_mutants.main([PROGRAM], root) == 1
    assert path.read_text() == before
    printed = capsys.readouterr().out
    assert f"edit tests/mutants/t.toml yourself: {PROGRAM}, 'sum': return total / n" in printed
    assert printed.count(f"  {PROGRAM}:") == source.count("return")


def test_only_the_selected_programs_are_updated(root: Path) -> None:
    assert update_mutants.main(["snippets/u"], root) == 0
    assert (root / "tests/mutants/t.toml").read_text("utf-8") == LIST


@pytest.mark.parametrize("quoted", ['"a"', "'a'", '"""a"""'])
@pytest.mark.parametrize("text", ["a", 'say "a"', "it's", "a\nb", "\na\\n", "both \" and '\n"])
def test_a_toml_string_has_the_value_of_its_text(text: str, quoted: str) -> None:
    string = update_mutants.toml_string(text, quoted)
    assert tomllib.loads(f"a = {string}") == {"a": text}
