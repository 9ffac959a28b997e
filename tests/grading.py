"""Grading: what the tests of the labs and of the assessment share.

A wrong answer is a file with the functions and methods that replace those of the finished
program, the step it spoils and the hint it must get. One that differs from a long function in
a line has `INSTEAD = {line: what stands there instead}`; a line must occur once.
"""

import ast
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent
LABS = ROOT / "labs"
TAG = "WORLD_SIZE_LAB_TEST"


def constants(path: Path) -> tuple[int, str]:
    """The step and the hint that a wrong answer names."""
    step, hint = re.search(r'^STEP, HINT = (\d+), "(\w+)"$', path.read_text(), re.M).groups()
    return int(step), hint


def run(*command: str | Path, cwd: Path, limit: float = 300) -> subprocess.CompletedProcess:
    """Run a program in a folder; fail if it leaves a process behind."""
    tag = f"{TAG}={uuid.uuid4().hex}"
    name, _, value = tag.partition("=")
    environment = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", name: value}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
    )
    left = survivors(tag)
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = survivors(tag)
    assert not left, f"left behind by {command}: {left}"
    return done


def survivors(tag: str) -> list[str]:
    """Processes that carry the tag in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if tag.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            pass
    return found


def check(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess:
    return run(sys.executable, LABS / "check.py", *arguments, cwd=cwd)


def unwrapped(output: str) -> str:
    """The output of check.py with its paragraphs in one line each."""
    return re.sub(r"\n {15}", " ", output)


@functools.lru_cache
def all_hints(reference: Path, runners: bool = True) -> dict[str, str]:
    """The hints of a lab or a part of the assessment by name, and those of the runner."""
    sys.path.insert(0, str(LABS))
    try:
        ours = importlib.import_module(f"graders.{reference.stem}").HINTS
        return importlib.import_module("graders.runner").HINTS | ours if runners else ours
    finally:
        sys.path.remove(str(LABS))


def span(node: ast.AST) -> tuple[int, int]:
    """First and last line of a definition, decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno


def spoiled(reference: str, wrong: str) -> str:
    """The reference with the functions, methods and lines of `wrong` in place of its own."""
    theirs = ast.parse(wrong)
    for node in theirs.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "INSTEAD":
            for line, instead in ast.literal_eval(node.value).items():
                assert reference.count(line) == 1, f"{reference.count(line)} times: {line}"
                reference = reference.replace(line, instead)
    ours = ast.parse(reference)
    lines, new = reference.splitlines(), wrong.splitlines()
    edits = []
    kinds = (ast.FunctionDef, ast.ClassDef)
    for node in [n for n in theirs.body if isinstance(n, kinds)]:
        old = next(n for n in ours.body if isinstance(n, kinds) and n.name == node.name)
        pairs = [(old, node)]
        if isinstance(node, ast.ClassDef):
            methods = {n.name: n for n in old.body if isinstance(n, ast.FunctionDef)}
            pairs = [(methods[m.name], m) for m in node.body]
        edits += [(span(before), span(after)) for before, after in pairs]
    for (first, last), (start, end) in sorted(edits, reverse=True):
        lines[first - 1 : last] = new[start - 1 : end]
    return "\n".join(lines) + "\n"


# grades the wrong answers to each step in one call of check.py's main, in one process
GRADE_ALL = """
import json, sys
sys.path.insert(0, sys.argv[1])
import check
for step, names in json.loads(sys.argv[2]).items():
    sys.argv = ["check.py", *names, "--step", step]
    try:
        check.main()
    except SystemExit as left:
        assert left.code == 1, left.code
"""


def grade_wrong_answers(
    references: dict[str, Path], answers: list[Path], folder: Path
) -> dict[Path, str]:
    """Grade wrong answers in one process; what check.py said of each.

    An answer lies in a folder whose name has its reference.
    """
    steps: dict[int, list[str]] = {}
    copies: dict[str, Path] = {}
    for path in answers:
        reference = references[path.parent.name]
        name = f"{reference.stem}-{path.name}"
        (folder / name).write_text(spoiled(reference.read_text(), path.read_text()))
        steps.setdefault(constants(path)[0], []).append(name)
        copies[name] = path
    all_steps = json.dumps(steps, sort_keys=True)
    done = run(sys.executable, "-c", GRADE_ALL, LABS, all_steps, cwd=folder, limit=600)
    assert done.returncode == 0, done.stderr
    parts = re.split(r"^(\w+-\w+\.py), graded .*\n", done.stdout, flags=re.M)
    said = dict(zip(parts[1::2], map(unwrapped, parts[2::2]), strict=True))
    return {path: said[name] for name, path in copies.items()}
