"""`make update-mutants`: texts of mutants follow the edits of the programs."""

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
# why a comment stays
["{PROGRAM}"]
"the sum is returned" = ["    return total / n\\n", "    return total\\n"]
"n is 1" = ["average(grad, n):", "average(grad, n=1):", "nobody passes n"]
'other "quotes"' = ['print("mean")', 'print("sum")']

["snippets/t/gone.py"]
"kept" = ["a + b", "a - b"]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in {PROGRAM: SOURCE, "tests/mutants/t.toml": LIST}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(text, "utf-8")
    return tmp_path


def test_entries_follow_a_renamed_variable(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert update_mutants.main([], root) == 0
    text = (root / "tests/mutants/t.toml").read_text("utf-8")
    assert text.startswith("# why a comment stays\n")
    assert tomllib.loads(text) == {
        PROGRAM: {
            "the sum is returned": ["    return total / ranks\n", "    return total\n"],
            "n is 1": [
                "average(gradient, ranks):",
                "average(gradient, ranks=1):",
                "nobody passes n",
            ],
            'other "quotes"': ['print("mean")', 'print("sum")'],
        },
        "snippets/t/gone.py": {"kept": ["a + b", "a - b"]},
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
def test_ambiguous_entries_stay_and_are_printed(
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
def test_a_text_survives_any_quotation_marks(text: str, quoted: str) -> None:
    written = update_mutants.toml_string(text, quoted)
    assert tomllib.loads(f"a = {written}") == {"a": text}
