"""What programs repeat, since each must survive being copied, is the same in all of them."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache
from itertools import combinations
from pathlib import Path

from book.core import page

ROOT = Path(__file__).resolve().parent.parent
INPUTS = ["assessment", "CONTRIBUTING.md", "book/core", "labs", "snippets",
          "tests/test_copies.py"]  # fmt: skip
ALIKE = 0.8  # two definitions of one name that share more of their lines were one
# names whose definitions may differ in one folder, or be alike, and why
DIFFER = {
    "start": "in lab02_ddp.py it is the exercise",
    "mean_loss": "each lab has a task of its own",
    "train_alone": "each lab's truth, by the build_optimizer that its learner writes",
    "CopyToRanks": "Megatron's f: in the two programs that count what it sends, with a helper",
    "SumOverRanks": "Megatron's g: likewise, and over the group of a mesh",
}
Shapes = dict[str, list[Path]]  # a definition without docstrings, and the programs that have it


def definitions(text: str) -> Iterator[tuple[str, str]]:
    """Name and source of a program's functions and classes but main, without comments."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in ast.parse(text).body:
        if isinstance(node, kinds) and node.name != "main":
            for inner in ast.walk(node):
                if isinstance(inner, kinds) and ast.get_docstring(inner) is not None:
                    inner.body = inner.body[1:] or [ast.Pass()]
            yield node.name, ast.unparse(node)


def programs() -> list[Path]:
    folders = (ROOT / name for name in ("snippets", "labs", "assessment"))
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


@cache
def shapes_by_name() -> dict[str, Shapes]:
    found: dict[str, Shapes] = defaultdict(lambda: defaultdict(list))
    for path in programs():
        for name, source in definitions(path.read_text("utf-8")):
            found[name][source].append(path)
    return found


def alike(a: str, b: str) -> bool:
    lines = SequenceMatcher(None, a.splitlines(), b.splitlines(), autojunk=False)
    return lines.real_quick_ratio() > ALIKE and lines.ratio() > ALIKE


def drifted(shapes: Shapes) -> Iterator[tuple[list[Path], list[Path]]]:
    """Programs with one shape, and programs with another which should have the same.

    Two shapes that are alike should, wherever they are; and in a folder where two programs
    have the same shape, all that use its name.
    """
    for (a, some), (b, others) in combinations(shapes.items(), 2):
        if alike(a, b):
            yield some, others
            continue
        for folder in {path.parent for path in some} & {path.parent for path in others}:
            here = [[path for path in part if path.parent == folder] for part in (some, others)]
            if max(map(len, here)) > 1:
                yield here[0], here[1]


def test_what_programs_repeat_is_the_same_in_all() -> None:
    wrong = []
    for name, shapes in shapes_by_name().items():
        for parts in drifted(shapes) if name not in DIFFER else ():
            some, others = (
                ", ".join(str(path.relative_to(ROOT)) for path in part) for part in parts
            )
            wrong.append(f"{name} of {some}\n  and {name} of {others}")
    rule = "same name, another shape: copy it or rename it"
    assert not wrong, "\n".join([rule, *wrong])


def test_names_that_may_differ_do() -> None:
    shapes = shapes_by_name()
    assert [name for name in DIFFER if not any(drifted(shapes[name]))] == []


def test_every_start_is_the_same() -> None:
    """One function joins the process group in all programs, and in the one that shows how."""
    start = dict(definitions((ROOT / "snippets/02_ddp/naive.py").read_text("utf-8")))["start"]
    exercise = ROOT / "labs/lab02_ddp.py"
    assert set(shapes_by_name()["start"]) - {start} <= {
        source for name, source in definitions(exercise.read_text("utf-8")) if name == "start"
    }
    fences = page.read(ROOT / "CONTRIBUTING.md").fences
    example = next(each for each in fences if "title" in each.options)
    assert dict(definitions("\n".join(example.lines)))["start"] == start


def test_a_blank_ends_a_program_kindly() -> None:
    """What has stop_at_blank installs it, before main; what has blanks has one of these ways."""
    for path in sorted((ROOT / "assessment").glob("*.py")):
        text = path.read_text("utf-8")
        if "def stop_at_blank" in text:
            assert text.endswith("    sys.excepthook = stop_at_blank\n    main()\n"), path.name
        elif ">>> solution" in text:
            assert "except NotImplementedError as" in text, path.name
