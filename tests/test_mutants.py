"""Mutants: those written by hand apply to the programs as they stand, and the tool finds survivors."""

import ast
import re

import pytest
from conftest import ROOT, Book

from worldsize.model import BookError
from worldsize.model.program import LAUNCH, Program, programs
from worldsize.model.transcript import Tolerances, same_line
from worldsize.testing import mutation

INPUTS = ["src"]
LISTED = pytest.mark.inputs("assessment", "src", "graders", "labs", "snippets", "tests/mutants")
LEAST = 3  # written for each program that computes something
PROGRAMS = [  # what launchers do is not computed by the programs of labs/launch
    each
    for each in programs(ROOT)
    if "cpu" in each.devices and not each.name.startswith(LAUNCH)
]
LISTS = sorted((ROOT / "tests" / "mutants").glob("*.toml"))


@LISTED
@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_written_mutants_apply(path) -> None:
    """Each program is one of this list's chapter, and each change leaves a program."""
    listed = mutation.read_list(path, path.stat().st_mtime_ns)
    own = {
        each.name: each for each in PROGRAMS if mutation.list_of(each.path, each.root) == path
    }
    assert set(listed) <= set(own), f"no such program: {sorted(set(listed) - set(own))}"
    few = {name for name, each in own.items() if len(listed.get(name, {})) < LEAST}
    assert not few, f"fewer than {LEAST} mutants: {sorted(few)}"
    for name in listed:
        for mutant in mutation.of(own[name], "written"):
            if name.endswith(".py"):
                ast.parse(mutant.source)


@LISTED
def test_every_chapter_has_a_list() -> None:
    assert {mutation.list_of(each.path, each.root) for each in PROGRAMS} == {*LISTS}


def test_a_mutant_that_no_longer_applies_is_named(book: Book) -> None:
    path = book.program("add", "print(1 + 1)\n", "$ python add.py\n2\n")
    book.write("tests/mutants/t.toml", f'["{path}"]\n"gone" = ["2 + 2", "5"]\n')
    with pytest.raises(BookError, match=r"tests/mutants/t\.toml:1: .*'gone': occurs 0 times"):
        mutation.of(Program(book.root, book.root / path), "written")


def test_what_survives_fails_and_is_counted(book: Book) -> None:
    """One is noticed by the output, one by an assertion, one by nobody; one is the same."""
    code = """\
        half = 10 / 2
        double = 10 * 2
        assert double == 20
        unseen = 3 - 1
        print(half)
        """
    path = book.program("sums", book_text(code), "$ python sums.py\n5.0\n")
    changes = """
        "half of it is all of it" = ["10 / 2", "10"]
        "double is added" = ["10 * 2", "10 + 2"]
        "the difference is a sum" = ["3 - 1", "3 + 1"]
        "the same" = ["print(half)", "print(half + 0)", "adding nothing changes nothing"]
        """
    book.write("tests/mutants/t.toml", f'["{path}"]\n{book_text(changes)}')
    report = book.pytest("--mutants", "written", path)
    found = {name.rpartition("::")[2]: how for name, how in report.outcomes.items()}
    assert found == {
        "half of it is all of it": "passed",
        "double is added": "passed",
        "the difference is a sum": "failed",
        "the same": "skipped",
    }
    assert f"{path}:4: survived: the difference is a sum\n- 3 - 1\n+ 3 + 1" in report.text
    assert "snippets/t: 2 of 3 mutants killed, 67%" in report.text
    again = book.pytest("--mutants", "written", path)
    assert "1 failed, 1 skipped, 2 unchanged" in again.text  # what was noticed is remembered


def test_a_module_is_held_by_its_tests(book: Book) -> None:
    """One mutant turns a test red, one turns none, and two name tests that are not there."""
    (book.root / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    book.write("graders/sums.py", "def add(a, b):\n    return a + b\n\n\nUNUSED = 1\n")
    book.write("graders/site/more.py", "THREE = 3\n")  # copied too: not the site that is built
    test = "from graders.sums import add\nfrom graders.site.more import THREE\n\n\n"
    test += "def test_add():\n    assert add(1, 2) == THREE\n"
    book.write("tests/test_sums.py", test)
    changes = """\
        ["graders/sums.py"]
        tests = "tests/test_sums.py"
        "b is taken off" = ["a + b", "a - b"]
        "another constant" = ["UNUSED = 1", "UNUSED = 2"]
        "unheard" = ["UNUSED = 1", "UNUSED = 3", "tests -k no_such"]
        "nowhere" = ["UNUSED = 1", "UNUSED = 4", "tests/test_no_such.py"]
        """
    book.write("tests/mutants/graders.toml", book_text(changes))
    path, said = book.root / "graders" / "sums.py", {}
    for mutant, tests in mutation.of_module(path, book.root, "written"):
        try:
            mutation.check_module(path, book.root, mutant, tests)
        except BookError as error:
            said[mutant.what] = str(error)
    assert said == {
        "another constant": "graders/sums.py:5: survived: another constant\n"
        "- UNUSED = 1\n+ UNUSED = 2",
        "unheard": "graders/sums.py:5: no test of `pytest tests -k no_such` ran",
        "nowhere": "graders/sums.py:5: no test of `pytest tests/test_no_such.py` ran\n"
        "ERROR: file or directory not found: tests/test_no_such.py",
    }


def book_text(text: str) -> str:
    return re.sub(r"(?m)^ {8}", "", text)


SOURCE = """\
def mean(values, n):
    assert n == len(values)
    total = values.sum(0) / n
    work.wait()
    return -total[0]
"""


def test_made_mutants_are_wrong_in_one_place_and_always_the_same() -> None:
    found = mutation.made(SOURCE, 99)
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
        ours, theirs = SOURCE.splitlines(), mutant.source.splitlines()
        differ = [
            n for n, pair in enumerate(zip(ours, theirs, strict=True), 1) if len({*pair}) > 1
        ]
        assert differ == [mutant.line]
    assert mutation.made(SOURCE, 2) == mutation.made(SOURCE, 99)[:2] == mutation.made(SOURCE, 2)


def test_a_made_one_that_is_written_down_is_not_made(book: Book) -> None:
    path = book.program("half", "print(1 + 10 // 2)\n", "$ python half.py\n6\n")
    program = Program(book.root, book.root / path)
    assert [mutant.change for mutant in mutation.of(program, "made")] == [
        "- 1 + 10 // 2\n+ 1 - 10 // 2",
        "- 10 // 2\n+ 10 * 2",
    ]
    book.write("tests/mutants/t.toml", f'["{path}"]\n"twice" = ["10 // 2", "10 * 2", "why"]\n')
    changes = [mutant.change for mutant in mutation.of(program, "made")]
    assert changes == ["- 1 + 10 // 2\n+ 1 - 10 // 2"]
    assert len(mutation.of(program, "all")) == 2


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
def test_a_number_may_differ_as_much_as_its_program_declares(
    measured, recorded, printed, same
) -> None:
    tolerances = Tolerances((".*",) if measured else ())
    assert same_line(recorded, printed, tolerances) is same
    assert same_line(printed, recorded, tolerances) is same


@pytest.mark.parametrize("declared", [False, True])
def test_only_a_declared_curve_may_have_another_height(book: Book, declared: bool) -> None:
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
    assert declared or "curve.py draws a point 40 away" in report.text
