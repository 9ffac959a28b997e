"""Mutants: a program with one thing made wrong in it, which its own checks must notice.

A program holds itself to its assertions, and its transcript holds it to what it printed. One
that is made wrong and still does as recorded has survived, and shows a check that cannot fail.

Some mutants are written by hand, in ``tests/mutants/CHAPTER.toml``: what is then wrong with the
lesson, the text (it occurs once) and what it becomes; a third text where nobody could notice
says why::

    ["snippets/02_ddp/naive.py"]
    "the gradients are summed, not averaged" = ["grad / n", "grad"]

A program whose output shows little is checked by tests instead: its list begins with ``tests``,
the arguments of the pytest run that must fail, and a third text replaces these arguments.

Others are made from the syntax tree of a Python program: operators, reductions, slices,
constants, dropped calls, inverted assertions; always the same ones for the same text. One that
nobody could notice is written down, with the reason, and is then no longer made.
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
HANG = 1800.0  # seconds that the tests of a changed module may take
NOT_COPIED = {".venv", ".git", ".cache", "site", "my_labs"}  # of the repository's own folder
MADE = 2  # for each program, beside the written ones
LIMIT = 60.0  # seconds beyond ten times what the program takes: what hangs is noticed by that

OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
}  # fmt: skip
INVERTED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}  # fmt: skip
OTHERS = {
    "sum": "mean", "mean": "sum", "max": "min", "min": "max", "amax": "amin", "amin": "amax",
    "argmax": "argmin", "softmax": "log_softmax", "floor": "ceil", "ceil": "floor",
    "tril": "triu", "triu": "tril", "zeros": "ones", "zeros_like": "ones_like", "sin": "cos",
    "cos": "sin",
}  # fmt: skip
DROPPED = {  # not a barrier: without one the others are in time on most days
    "all_gather_into_tensor", "all_reduce", "all_to_all_single", "broadcast", "copy_",
    "reduce_scatter_tensor", "wait", "zero_grad",
}  # fmt: skip
LEFT_ALONE = {
    "draw",
    "init_distributed",
    "on_gpu",
    "more_on_gpu",
}  # the look of a figure, joining, a GPU
# what a program says where it runs nothing else
GPU_ONLY = re.compile(r"needs (an NVIDIA|a) GPU|on a GPU, and there is no")
CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time|elapsed_time)\(")
DRAWN = re.compile(r"<(svg|rect|text|path)\b")  # what is wrong by a few pixels


@dataclass(frozen=True)
class Mutant:
    """One change to a program."""

    what: str  # is then wrong
    line: int
    change: str
    source: str  # of the whole program, changed
    equivalent: str = ""  # why nobody could notice


def of(program: Program, kind: str) -> list[Mutant]:
    """The mutants of a program. Raises BookError where a written one does not apply."""
    source = program.path.read_text("utf-8")
    written = list(_written(program, source))
    found = [] if kind == "made" else written
    commands = program.transcript("cpu").commands
    needs_gpu = all(each.status for each in commands) and GPU_ONLY.search(source)
    if kind != "written" and program.path.suffix == ".py" and not needs_gpu:
        known = [_form(mutant.source) for mutant in written if mutant.equivalent]
        extra = [new for new in made(source) if not known or _form(new.source) not in known]
        found = found + extra
    return found


def _form(source: str) -> str:
    """What a source comes to, however it is laid out."""
    return ast.unparse(ast.parse(source))


def check(
    program: Program, device: str, mutant: Mutant, options: program_check.CheckOptions
) -> program_check.CheckResult:
    """Run the program as the mutant has it. Raises BookError where it does as recorded."""
    recorded = program.transcript(device).provenance
    limit = LIMIT + 10 * (recorded.seconds if recorded else 0)
    outcome = program_check.check_changed_source(
        program, device, mutant.source, replace(options, limit=limit)
    )
    if outcome is None:
        raise BookError(
            f"{program.name}:{mutant.line}: survived: {mutant.what}\n{mutant.change}"
        )
    return outcome


# --- programs that are checked by tests
# --------------------------------------------------------


def of_module(path: Path, root: Path, kind: str) -> list[tuple[Mutant, str]]:
    """The mutants of such a program, each with the tests that must fail for it.

    Raises BookError where a written one does not apply.
    """
    name, place = path.relative_to(root).as_posix(), list_of(path, root)
    tests, source = tests_of(path, root), path.read_text("utf-8")
    found = _changed(_listed(place, name), source, name, place)
    written = [(mutant, mutant.equivalent or tests) for mutant in found]
    if kind == "written":
        return written
    extra = [(mutant, tests) for mutant in made(source) if tests]
    return extra if kind == "made" else written + extra


def tests_of(path: Path, root: Path) -> str:
    """The arguments of pytest that run the tests of a program; empty if its output is
    compared.
    """
    return _listed(list_of(path, root), path.relative_to(root).as_posix()).get("tests", "")


def check_module(path: Path, root: Path, mutant: Mutant, tests: str) -> None:
    """Run the tests in a copy of the repository. Raises BookError where they stay green."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        own = (
            NOT_COPIED if Path(folder) == root else set()
        )  # src/worldsize/site is no built site
        return {"__pycache__", *own} & {*names}

    with tempfile.TemporaryDirectory(prefix="ws-") as folder:
        copied = Path(folder, "copy")
        shutil.copytree(root, copied, ignore=left_out, symlinks=True)
        (copied / path.relative_to(root)).write_text(mutant.source, "utf-8")
        outer = ("PYTEST", "PYTHONPATH")
        kept = {key: text for key, text in os.environ.items() if not key.startswith(outer)}
        command = [sys.executable, "-m", "pytest", "-x", "-q", *shlex.split(tests)]
        try:
            done = subprocess.run(
                command, cwd=copied, env=kept, capture_output=True, text=True, timeout=HANG
            )
        except subprocess.TimeoutExpired:
            return  # a hang is noticed
    name = path.relative_to(root).as_posix()
    if done.returncode in (pytest.ExitCode.NO_TESTS_COLLECTED, pytest.ExitCode.USAGE_ERROR):
        said = "\n".join(done.stderr.splitlines()[-3:])
        raise BookError(
            f"{name}:{mutant.line}: no test of `pytest {tests}` ran\n{said}".strip()
        )
    if done.returncode == 0:
        raise BookError(f"{name}:{mutant.line}: survived: {mutant.what}\n{mutant.change}")


# --- written by hand -------------------------------------------------------------------------


def list_of(path: Path, root: Path) -> Path:
    """The file in which the written mutants of a program or a module stand."""
    top, *rest = path.relative_to(root).parts
    chapter = rest[0] if top == "snippets" else top
    return root / "tests" / "mutants" / f"{chapter}.toml"


@lru_cache
def read_list(path: Path, _mtime: int) -> dict[str, dict[str, list[str]]]:
    """A file of written mutants: for each program what is wrong, and the change."""
    return tomllib.loads(path.read_text("utf-8"))


def _written(program: Program, source: str) -> Iterator[Mutant]:
    path = list_of(program.path, program.root)
    yield from _changed(_listed(path, program.name), source, program.name, path)


def _listed(path: Path, name: str) -> dict[str, list[str]]:
    """What the file has for a program or module; nothing where there is no such file."""
    return read_list(path, path.stat().st_mtime_ns).get(name, {}) if path.exists() else {}


def _changed(
    changes: dict[str, list[str]], source: str, name: str, path: Path
) -> Iterator[Mutant]:
    written = [(what, *change) for what, change in changes.items() if what != "tests"]
    for what, was, becomes, *why in written:
        if source.count(was) != 1 or was == becomes:
            times = (
                "is left as it is" if was == becomes else f"occurs {source.count(was)} times"
            )
            raise BookError(
                f"tests/mutants/{path.name}:1: {name}, {what!r}: {times}: {was}\n"
                f"After an edit of the program, run: make update-mutants WHAT={name}"
            )
        line = source[: source.index(was)].count("\n") + 1
        changed = source.replace(was, becomes)
        yield Mutant(what, line, f"- {was}\n+ {becomes}", changed, "".join(why))


# --- made from the syntax tree ---------------------------------------------------------------


def made(source: str, count: int = MADE) -> list[Mutant]:
    """At most ``count`` mutants of a Python source, chosen by a digest of the change."""
    tree, lines = ast.parse(source), source.encode().split(b"\n")
    found: dict[str, Mutant] = {}
    for node, new in _changes(tree, checked=False):
        was, becomes = ast.get_source_segment(source, node), ast.unparse(new)
        first, last = node.lineno - 1, node.end_lineno - 1
        head = b"\n".join([*lines[:first], lines[first][: node.col_offset]])
        tail = b"\n".join([lines[last][node.end_col_offset :], *lines[last + 1 :]])
        bracketed = f"({becomes})" if isinstance(new, (ast.BinOp, ast.Compare)) else becomes
        changed = b"".join([head, bracketed.encode(), tail]).decode()
        change = f"- {was}\n+ {becomes}"
        what = f"line {node.lineno}: {' '.join(f'{was} becomes {becomes}'.split())[:90]}"
        found.setdefault(change, Mutant(what, node.lineno, change, changed))
    order = sorted(found, key=lambda change: hashlib.sha256(change.encode()).digest())
    return [found[change] for change in order[:count]]


def _changes(node: ast.AST, checked: bool) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Nodes of a tree, each with a wrong one for its place; ``checked``: in an assertion."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name):
                if name in LEFT_ALONE or DRAWN.search(ast.unparse(child)):
                    continue
            case ast.Call(func=ast.Attribute(attr="sleep")):
                continue  # how long a pause is
            case ast.BinOp() if CLOCKS.search(ast.unparse(child)):
                continue  # a time, from which machines differ by as much
        if isinstance(child, (ast.FormattedValue, ast.Raise, ast.keyword)):
            continue  # the look of a number, of an error; options
        inside = checked or isinstance(child, ast.Assert)
        yield from ((child, new) for new in _wrong(child, inside))
        yield from _changes(child, inside)


def _wrong(node: ast.AST, checked: bool) -> Iterator[ast.AST]:
    """What may stand in place of a node and be wrong."""

    def but(change: Callable[[ast.AST], None]) -> ast.AST:
        new = copy.deepcopy(node)
        change(new)
        return new

    match node:
        case ast.Compare(ops=[op]) if type(op) in INVERTED and checked:
            yield but(lambda new: setattr(new, "ops", [INVERTED[type(op)]()]))
        case _ if checked:
            return
        case ast.BinOp(left=ast.Constant(value=str()) | ast.JoinedStr()):
            return
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield but(lambda new: setattr(new, "op", OPERATORS[type(op)]()))
            if isinstance(op, ast.Div):
                yield node.left
        case ast.Call(func=ast.Attribute(attr=name)) if name in OTHERS:
            yield but(lambda new: setattr(new.func, "attr", OTHERS[name]))
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in DROPPED:
            yield ast.Pass()
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.Slice(lower=ast.expr() as lower) if not isinstance(lower, ast.Constant):
            yield but(lambda new: setattr(new, "lower", None))
        case ast.Subscript(slice=ast.Constant(value=int(at))):
            yield but(lambda new: setattr(new.slice, "value", at + 1))
        case ast.Constant(value=float(value)) if value not in (0.0, 1.0):
            yield ast.Constant(2 * value)
