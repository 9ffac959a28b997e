"""Mutants: wrong versions of a program, which the checks of the program must detect.

A program checks its results with assertions, and its output is compared with its transcript. A
mutant differs from the program in one place. If neither check detects a mutant, the mutant has
survived, and it shows that a check cannot fail.

Some mutants are written by hand in ``tests/mutants/CHAPTER.toml``. An entry describes what is
wrong, and contains two texts: the original text, which must occur exactly once, and the changed
text. If no check can detect the mutant, a third text gives the reason::

    ["snippets/02_ddp/naive.py"]
    "the gradients are summed, not averaged" = ["grad / n", "grad"]

Tests check a program whose output shows only a part of its results. Its list has the key
``tests``, which contains the arguments for pytest. With a mutant, this run of pytest must fail.
A third text in an entry replaces these arguments.

Other mutants are generated from the syntax tree of a Python program. They change operators,
reductions, slices and constants, remove calls and invert assertions. The same text always gives
the same mutants. If no check can detect a generated mutant, add it to the list with the reason.
It is then no longer generated.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pytest

from worldsize.model import BookError
from worldsize.model.program import Program
from worldsize.testing import program_check

KINDS = ("written", "made", "all")
TEST_TIMEOUT = 1800.0  # seconds after which the tests of a mutant are ended
NOT_COPIED = {".venv", ".git", ".cache", "site", "my_labs"}  # in the root of the repository
GENERATED = 2  # the number of generated mutants of each program
EXTRA_TIME = 60.0  # a mutant may run ten times as long as the program, plus these seconds

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
INVERTED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}  # fmt: skip
REPLACED_CALLS = {
    "sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "argmax": "argmin", "softmax": "log_softmax", "floor": "ceil", "ceil": "floor",
    "tril": "triu", "triu": "tril", "zeros": "ones", "zeros_like": "ones_like", "sin": "cos",
    "cos": "sin",
}  # fmt: skip
REMOVED_CALLS = {  # not `barrier`: without it, the result is only sometimes wrong
    "all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "copy_",
    "reduce_scatter_tensor", "wait", "zero_grad",
}  # fmt: skip
# functions that draw a figure, join the process group or run only on a GPU
UNCHANGED_FUNCTIONS = {"draw", "init_distributed", "on_gpu", "more_on_gpu"}
# the message of a program that runs only on a GPU
GPU_ONLY = re.compile(r"needs (an NVIDIA|a) GPU|on a GPU, and there is no")
CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time|elapsed_time)\(")
SVG = re.compile(r"<(svg|rect|text|path)\b")  # code that draws, where a few pixels may differ


@dataclass(frozen=True)
class Mutant:
    """A wrong version of a program, which differs from the program in one place."""

    description: str  # what is wrong
    line: int
    change: str  # the original and the changed text, as a diff
    source: str  # the whole changed program
    # The third text of its entry: why no check can detect it. For a program that tests check:
    # the arguments for pytest.
    third_text: str = ""


def mutants_of_program(program: Program, kind: str) -> list[Mutant]:
    """Return the mutants of a program. ``kind`` is one of `KINDS`.

    Raise BookError if an entry of the list does not fit the program.
    """
    source = program.path.read_text("utf-8")
    listed = list(_listed_mutants(program, source))
    found = [] if kind == "made" else listed
    commands = program.transcript("cpu").commands
    needs_gpu = all(each.status for each in commands) and GPU_ONLY.search(source)
    if kind != "written" and program.path.suffix == ".py" and not needs_gpu:
        known = [_normalized(mutant.source) for mutant in listed if mutant.third_text]
        extra = [
            mutant
            for mutant in generate(source)
            if not known or _normalized(mutant.source) not in known
        ]
        found = found + extra
    return found


def _normalized(source: str) -> str:
    """Return the same code without comments, in the layout of `ast.unparse`."""
    return ast.unparse(ast.parse(source))


def check(
    program: Program, device: str, mutant: Mutant, options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Run the program with the source of the mutant, and return the result.

    Raise BookError if the mutant survives.
    """
    recorded = program.transcript(device).provenance
    limit = EXTRA_TIME + 10 * (recorded.seconds if recorded else 0)
    outcome = program_check.check_changed_source(
        program, device, mutant.source, replace(options, limit=limit)
    )
    if outcome is None:
        raise BookError(_survival_message(program.name, mutant))
    return outcome


def _survival_message(name: str, mutant: Mutant) -> str:
    return f"{name}:{mutant.line}: survived: {mutant.description}\n{mutant.change}"


# --- programs that tests check ---------------------------------------------------------------


def mutants_with_tests(path: Path, root: Path, kind: str) -> list[tuple[Mutant, str]]:
    """Return mutants of a program, each with the arguments of the pytest run that must fail.

    Raise BookError if an entry of the list does not fit the program.
    """
    name, list_path = path.relative_to(root).as_posix(), list_file(path, root)
    tests, source = tests_of(path, root), path.read_text("utf-8")
    found = _mutants_from_entries(_entries(list_path, name), source, name, list_path)
    listed = [(mutant, mutant.third_text or tests) for mutant in found]
    if kind == "written":
        return listed
    extra = [(mutant, tests) for mutant in generate(source) if tests]
    return extra if kind == "made" else listed + extra


def tests_of(path: Path, root: Path) -> str:
    """Return the arguments of pytest for the tests of a program, or "" if no test checks it."""
    return _entries(list_file(path, root), path.relative_to(root).as_posix()).get("tests", "")


def check_with_tests(path: Path, root: Path, mutant: Mutant, tests: str) -> None:
    """Run the tests of a mutant in a copy of the repository.

    Raise BookError if all tests pass, or if no test ran.
    """

    def ignored(folder: str, names: list[str]) -> set[str]:
        in_root = Path(folder) == root  # src/worldsize/site, for example, must be copied
        return {"__pycache__", *(NOT_COPIED if in_root else ())} & {*names}

    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        repository = Path(folder, "copy")
        shutil.copytree(root, repository, ignore=ignored, symlinks=True)
        (repository / path.relative_to(root)).write_text(mutant.source, "utf-8")
        removed = ("PYTEST", "PYTHONPATH")
        env = {key: text for key, text in os.environ.items() if not key.startswith(removed)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(tests)]
        try:
            done = subprocess.run(
                command,
                cwd=repository,
                env=env,
                capture_output=True,
                text=True,
                timeout=TEST_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return  # a mutant that hangs is detected
    name = path.relative_to(root).as_posix()
    if done.returncode in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        errors = "\n".join(done.stderr.splitlines()[-3:])
        raise BookError(
            f"{name}:{mutant.line}: no test of `pytest {tests}` ran\n{errors}".strip()
        )
    if done.returncode == 0:
        raise BookError(_survival_message(name, mutant))


# --- the lists of mutants --------------------------------------------------------------------


def list_file(path: Path, root: Path) -> Path:
    """Return the path of the file that lists the mutants of a program."""
    top, *rest = path.relative_to(root).parts
    chapter = rest[0] if top == "snippets" else top
    return root / "tests" / "mutants" / f"{chapter}.toml"


@lru_cache
def read_list(path: Path, _mtime: int) -> dict[str, dict[str, list[str]]]:
    """Return the content of a file of mutants: program → what is wrong → the texts."""
    return tomllib.loads(path.read_text("utf-8"))


def _listed_mutants(program: Program, source: str) -> Iterator[Mutant]:
    path = list_file(program.path, program.root)
    entries = _entries(path, program.name)
    yield from _mutants_from_entries(entries, source, program.name, path)


def _entries(path: Path, name: str) -> dict[str, list[str]]:
    """Return the entries of a program in this file; none if the file does not exist."""
    return read_list(path, path.stat().st_mtime_ns).get(name, {}) if path.exists() else {}


def _mutants_from_entries(
    entries: dict[str, list[str]], source: str, name: str, path: Path
) -> Iterator[Mutant]:
    """Yield the mutants; raise BookError if an entry does not fit the source."""
    changes = [(what, *texts) for what, texts in entries.items() if what != "tests"]
    for what, old, new, *third in changes:
        if source.count(old) != 1 or old == new:
            problem = (
                "the text does not change"
                if old == new
                else f"the text occurs {source.count(old)} times, not once"
            )
            raise BookError(
                f"tests/mutants/{path.name}:1: {name}, {what!r}: {problem}: {old}\n"
                f"After an edit of the program, run: make update-mutants WHAT={name}"
            )
        line = source[: source.index(old)].count("\n") + 1
        changed = source.replace(old, new)
        yield Mutant(what, line, f"- {old}\n+ {new}", changed, "".join(third))


# --- mutants that are generated from the syntax tree -----------------------------------------


def generate(source: str, count: int = GENERATED) -> list[Mutant]:
    """Return at most ``count`` mutants of a Python source, selected by a hash of the change."""
    tree, lines = ast.parse(source), source.encode().split(b"\n")
    found: dict[str, Mutant] = {}
    for node, new in _replacements(tree, in_assertion=False):
        old_text, new_text = ast.get_source_segment(source, node), ast.unparse(new)
        first, last = node.lineno - 1, node.end_lineno - 1
        head = b"\n".join([*lines[:first], lines[first][: node.col_offset]])
        tail = b"\n".join([lines[last][node.end_col_offset :], *lines[last + 1 :]])
        is_compound = isinstance(new, (ast.BinOp, ast.Compare))
        code = f"({new_text})" if is_compound else new_text
        changed = b"".join([head, code.encode(), tail]).decode()
        change = f"- {old_text}\n+ {new_text}"
        texts = " ".join(f"{old_text} becomes {new_text}".split())[:90]
        what = f"line {node.lineno}: {texts}"
        found.setdefault(change, Mutant(what, node.lineno, change, changed))
    order = sorted(found, key=lambda change: hashlib.sha256(change.encode()).digest())
    return [found[change] for change in order[:count]]


def _replacements(node: ast.AST, in_assertion: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield nodes below ``node``, each with a wrong node that can replace it."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name):
                if name in UNCHANGED_FUNCTIONS or SVG.search(ast.unparse(child)):
                    continue
            case ast.Call(func=ast.Attribute(attr="sleep")):
                continue  # the length of a pause
            case ast.BinOp() if CLOCKS.search(ast.unparse(child)):
                continue  # a measured time, which differs as much between machines
        if isinstance(child, (ast.FormattedValue, ast.Raise, ast.keyword)):
            continue  # the format of a number, an error message, or an option
        inside = in_assertion or isinstance(child, ast.Assert)
        yield from ((child, new) for new in _wrong_nodes(child, inside))
        yield from _replacements(child, inside)


def _wrong_nodes(node: ast.AST, in_assertion: bool) -> Iterator[ast.AST]:
    """Yield wrong nodes that can replace a node."""

    def changed_copy(change: Callable[[ast.AST], None]) -> ast.AST:
        new = copy.deepcopy(node)
        change(new)
        return new

    match node:
        case ast.Compare(ops=[op]) if type(op) in INVERTED and in_assertion:
            yield changed_copy(lambda new: setattr(new, "ops", [INVERTED[type(op)]()]))
        case _ if in_assertion:
            return
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
            return
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield changed_copy(lambda new: setattr(new, "op", OPERATORS[type(op)]()))
            if isinstance(op, ast.Div):
                yield node.left
        case ast.Call(func=ast.Attribute(attr=name)) if name in REPLACED_CALLS:
            yield changed_copy(lambda new: setattr(new.func, "attr", REPLACED_CALLS[name]))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in REMOVED_CALLS:
            yield ast.Pass()
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.Slice(lower=ast.expr() as lower) if not isinstance(lower, ast.Constant):
            yield changed_copy(lambda new: setattr(new, "lower", None))
        case ast.Subscript(slice=ast.Constant(value=int(index))):
            yield changed_copy(lambda new: setattr(new.slice, "value", index + 1))
        case ast.Constant(value=float(value)) if value not in (0.0, 1.0):
            yield ast.Constant(2 * value)
