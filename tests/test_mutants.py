"""Tests of the mutants: the lists fit the programs, and surviving mutants are reported."""

import ast
import re
from pathlib import Path

import pytest
from conftest import ROOT, Book

from worldsize.model import BookError
from worldsize.model.program import LAUNCH, Program, programs
from worldsize.model.transcript import Tolerances, same_line
from worldsize.testing import mutation

INPUTS = ["src"]
LISTED = pytest.mark.inputs("assessment", "src", "graders", "labs", "snippets", "tests/mutants")
MIN_MUTANTS = 3  # the number of listed mutants that each program must have
PROGRAMS = [  # without labs/launch: its programs show launchers and compute nothing themselves
    each
    for each in programs(ROOT)
    if "cpu" in each.devices and not each.name.startswith(LAUNCH)
]
LISTS = sorted((ROOT / "tests" / "mutants").glob("*.toml"))


@LISTED
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_listed_mutants_fit_their_programs(path: Path) -> None:
    """Every program of the chapter has enough mutants, and every mutant is valid Python."""
    listed = mutation.read_list(path, path.stat().st_mtime_ns)
    expected = {
        each.name: each for each in PROGRAMS if mutation.list_file(each.path, each.root) == path
    }
    unknown = set(listed) - set(expected)
    assert not unknown, f"{path.name} lists programs that do not exist: {sorted(unknown)}"
    few = {name for name in expected if len(listed.get(name, {})) < MIN_MUTANTS}
    assert not few, f"these programs have fewer than {MIN_MUTANTS} mutants: {sorted(few)}"
    for name in listed:
        for mutant in mutation.mutants_of_program(expected[name], "written"):
            if name.endswith(".py"):
                ast.parse(mutant.source)


@LISTED
def test_every_chapter_has_a_list_of_mutants() -> None:
    assert {mutation.list_file(each.path, each.root) for each in PROGRAMS} == {*LISTS}


def test_a_mutant_whose_text_is_gone_is_an_error(book: Book) -> None:
    path = book.program("add", "print(1 + 1)\n", "$ python add.py\n2\n")
    book.write("tests/mutants/t.toml", f'["{path}"]\n"gone" = ["2 + 2", "5"]\n')
    with pytest.raises(
        BookError, match=r"tests/mutants/t\.toml:1: .*'gone': the text occurs 0 times"
    ):
        mutation.mutants_of_program(Program(book.root, book.root / path), "written")


def test_a_surviving_mutant_fails_and_is_counted(book: Book) -> None:
    """The output detects one mutant, an assertion detects one, and no check detects two.

    One of these two is equivalent to the program, so its test is skipped.
    """
    code = """\
        half = 10 / 2
        double = 10 * 2
        assert double == 20
        unseen = 3 - 1
        print(half)
        """
    path = book.program("sums", dedent_8(code), "$ python sums.py\n5.0\n")
    changes = """
        "half of it is all of it" = ["10 / 2", "10"]
        "double is added" = ["10 * 2", "10 + 2"]
        "the difference is a sum" = ["3 - 1", "3 + 1"]
        "the same" = ["print(half)", "print(half + 0)", "adding nothing changes nothing"]
        """
    book.write("tests/mutants/t.toml", f'["{path}"]\n{dedent_8(changes)}')
    report = book.pytest("--mutants", "written", path)
    outcomes = {name.rpartition("::")[2]: each for name, each in report.outcomes.items()}
    assert outcomes == {
        "half of it is all of it": "passed",
        "double is added": "passed",
        "the difference is a sum": "failed",
        "the same": "skipped",
    }
    assert f"{path}:4: survived: the difference is a sum\n- 3 - 1\n+ 3 + 1" in report.text
    assert "snippets/t: 2 of 3 mutants killed, 67%" in report.text
    report = book.pytest("--mutants", "written", path)
    assert "1 failed, 1 skipped, 2 unchanged" in report.text
    changes = changes.replace("10 + 2", "10 + 3")
    book.write("tests/mutants/t.toml", f'["{path}"]\n{dedent_8(changes)}')
    report = book.pytest("--mutants", "written", path)
    assert "1 failed, 1 passed, 1 skipped, 1 unchanged" in report.text


def test_a_mutant_is_checked_by_the_tests_of_its_program(book: Book) -> None:
    """One mutant makes a test fail, one does not, and two name tests that do not exist."""
    (book.root / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    book.write("graders/sums.py", "def add(a, b):\n    return a + b\n\n\nUNUSED = 1\n")
    # this folder is copied, because only the folder site in the root is the built site
    book.write("graders/site/more.py", "THREE = 3\n")
    test = "from graders.sums import add\nfrom graders.site.more import THREE\n\n\n"
    test += "def test_add():\n    assert add(1, 2) == THREE\n"
    book.write("tests/test_sums.py", test)
    changes = """\
        ["graders/sums.py"]
        tests = "tests/test_sums.py"
        "b is subtracted" = ["a + b", "a - b"]
        "different constant" = ["UNUSED = 1", "UNUSED = 2"]
        "no selected test" = ["UNUSED = 1", "UNUSED = 3", "tests -k no_such"]
        "no such file" = ["UNUSED = 1", "UNUSED = 4", "tests/test_no_such.py"]
        """
    book.write("tests/mutants/graders.toml", dedent_8(changes))
    path, errors = book.root / "graders" / "sums.py", {}
    for mutant, tests in mutation.mutants_with_tests(path, book.root, "written"):
        try:
            mutation.check_with_tests(path, book.root, mutant, tests)
        except BookError as error:
            errors[mutant.description] = str(error)
    assert errors == {
        "different constant": "graders/sums.py:5: survived: different constant\n"
        "- UNUSED = 1\n+ UNUSED = 2",
        "no selected test": "graders/sums.py:5: no test of `pytest tests -k no_such` ran",
        "no such file": "graders/sums.py:5: no test of `pytest tests/test_no_such.py` ran\n"
        "ERROR: file or directory not found: tests/test_no_such.py",
    }


def dedent_8(text: str) -> str:
    """Remove 8 spaces at the start of each line."""
    return re.sub(r"(?m)^ {8}", "", text)


SOURCE = """\
def mean(values, n):
    assert n == len(values)
    total = values.sum(0) / n
    work.wait()
    return -total[0]
"""


def test_generated_mutants_differ_in_one_line_and_are_reproducible() -> None:
    found = mutation.generate(SOURCE, 99)
    assert {mutant.change for mutant in found} == {
        "- n == len(values)\n+ n != len(values)",
        "- values.sum(0) / n\n+ values.sum(0) * n",
        "- values.sum(0) / n\n+ values.sum(0)",
        "- values.sum(0)\n+ values.mean(0)",
        "- work.wait()\n+ pass",
        "- -total[0]\n+ total[0]",
        "- total[0]\n+ total[1]",
    }
    for mutant in found:
        ast.parse(mutant.source)
        pairs = zip(SOURCE.splitlines(), mutant.source.splitlines(), strict=True)
        changed = [number for number, (old, new) in enumerate(pairs, 1) if old != new]
        assert changed == [mutant.line]
    assert (
        mutation.generate(SOURCE, 2)
        == mutation.generate(SOURCE, 99)[:2]
        == mutation.generate(SOURCE, 2)
    )


def test_a_listed_equivalent_mutant_is_not_generated(book: Book) -> None:
    path = book.program("half", "print(1 + 10 // 2)\n", "$ python half.py\n6\n")
    program = Program(book.root, book.root / path)
    assert [mutant.change for mutant in mutation.mutants_of_program(program, "made")] == [
        "- 1 + 10 // 2\n+ 1 - 10 // 2",
        "- 10 // 2\n+ 10 * 2",
    ]
    book.write("tests/mutants/t.toml", f'["{path}"]\n"twice" = ["10 // 2", "10 * 2", "why"]\n')
    changes = [mutant.change for mutant in mutation.mutants_of_program(program, "made")]
    assert changes == ["- 1 + 10 // 2\n+ 1 - 10 // 2"]
    assert len(mutation.mutants_of_program(program, "all")) == 2


@pytest.mark.parametrize(
    ("measured", "recorded", "printed", "same"),
    [
        (True, "idle ≈75.0%", "idle ≈0.0%", False),
        (True, "idle ≈75%", "idle ≈75", False),
        (True, "idle ≈0.0%", "idle ≈0.4%", True),
        (True, "took ≈2 ms", "took ≈80 ms", True),
        (True, "took ≈2 ms", "took ≈2000 ms", False),
        (True, "off by ≈1.5e-7", "off by ≈2.2e-6", True),
        (True, "off by ≈1.5e-7", "off by ≈1.5e-3", False),
        (True, "off by ≈0e+00", "off by ≈1.2e-08", True),
        (True, "off by ≈0e+00", "off by ≈1.2e+00", False),
        (True, "≈nan", "≈nan", True),
        (True, "≈nan", "≈3", False),
        (True, "≈-inf", "≈-3", False),
        (True, "a gain of ≈-3", "a gain of ≈2", True),
        (True, "≈1,200 rows", "≈40 rows", True),
        (False, "loss ≈2.022", "loss ≈2.024", True),
        (False, "loss ≈2.022", "loss ≈1.202", False),
        (False, "gain ≈+0.054", "gain ≈+0.055", True),
        (False, "off by ≈3e-07", "off by ≈9e-07", True),
        (False, "off by ≈3e-07", "off by ≈3e-03", False),
        (False, "wins ≈28%", "wins ≈2%", False),
    ],
)
def test_a_measured_number_has_a_larger_tolerance(
    measured: bool, recorded: str, printed: str, same: bool
) -> None:
    tolerances = Tolerances((".*",) if measured else ())
    assert same_line(recorded, printed, tolerances) is same
    assert same_line(printed, recorded, tolerances) is same


@pytest.mark.parametrize("declared", [False, True])
def test_only_a_declared_figure_may_have_a_different_curve(book: Book, declared: bool) -> None:
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text>a</text><path d="M 0 0 L 9 {}"/></svg>'
    code = f"# time.perf_counter()\nopen('curve.svg', 'w').write({svg.format(40)!r})\n"
    path = book.program("curve", code, "$ python curve.py\n")
    book.write("snippets/measured.toml", f"figures = {[path] if declared else []}\n")
    outcomes = []
    for height in (40, 42, 80):
        book.write("snippets/t/curve.svg", svg.format(height))
        report = book.pytest(path)
        outcomes.append(report.outcomes["snippets.t.curve::cpu"])
    assert outcomes == ["passed", "passed", "passed" if declared else "failed"]
    assert declared or "curve.py draws a point at a distance of 40" in report.text
