"""Comparison: `compare` lists the mismatches between what a program did and its transcript.

It starts no process, and reads no file but the figure of the book.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worldsize.execution import runner
from worldsize.execution.program_run import RunResult, succeeded
from worldsize.execution.staging import LABS
from worldsize.model import BookError
from worldsize.model.transcript import (
    DEFAULT_TOLERANCES,
    Command,
    Tolerances,
    Transcript,
    difference,
    output_lines,
)
from worldsize.testing.figures import Figure, figure_difference


@dataclass(frozen=True)
class Mismatch:
    """One thing in which a run differs from a transcript."""

    message: str  # with file and line
    recordable: bool = True  # whether a new transcript or figure may contain it


def compare(
    run: RunResult, transcript: Transcript, tolerances: Tolerances = DEFAULT_TOLERANCES
) -> list[Mismatch]:
    """Return the mismatches between a run and a transcript, in the order of the commands.

    After a command that failed nothing else is compared. The figure is compared where all
    commands ran.
    """
    found: list[Mismatch] = []
    for command, result in zip(transcript.commands, run.results, strict=False):
        if mismatch := compare_command(run, transcript.name, command, result, tolerances):
            found.append(mismatch)
            if not mismatch.recordable:
                return found
    if len(run.results) == len(transcript.commands):
        found += _compare_figure(run, tolerances)
    return found


def compare_command(
    run: RunResult,
    name: str,
    command: Command,
    result: runner.Result,
    tolerances: Tolerances = DEFAULT_TOLERANCES,
) -> Mismatch | None:
    """Return the mismatch between one command and its part of the transcript ``name``."""
    program, where = run.program, f"{name}:{command.line}: `{command.command_line}`"
    if not succeeded(command, result):
        return Mismatch(_failure(run, command, result, where), recordable=False)
    try:
        output = output_lines(result.stdout)
    except ValueError as error:
        return Mismatch(f"{program.name}:1: {where}: {error}", recordable=False)
    if any(str(run.folder.parent) in line for line in output):
        return Mismatch(
            f"{program.name}:1: {where} printed the path of the folder it ran in, "
            f"which no reader has: print names, not paths",
            recordable=False,
        )
    if diff := difference(command.output, output, tolerances):
        return Mismatch(f"{where} printed something else:\n" + "\n".join(diff))
    return None


def _failure(run: RunResult, command: Command, result: runner.Result, where: str) -> str:
    """Describe a command that was killed, had another status, or left processes running."""
    program = run.program
    if not result.timed_out and result.status == command.status:
        return f"{program.name}:1: {where} {result.leftovers_message}"
    wanted = f"status {command.status}" if command.status else "success"
    came = "" if result.timed_out else f" left with status {result.status}, not {wanted}:"
    renamed = {f"{run.folder}/{name}/": f"{name}/" for name in LABS}
    renamed[f"{run.folder}/"] = f"{program.path.parent.relative_to(program.root)}/"
    line = result.line_in(program.path.name) or 1
    return f"{program.name}:{line}: {where}{came}\n{runner.explain(result, renamed)}"


def _compare_figure(run: RunResult, tolerances: Tolerances) -> Iterator[Mismatch]:
    """Yield the mismatch between the figure that a run drew and that of the book."""
    program, path = run.program, run.program.figure_path(run.device)
    name = path.relative_to(program.root).as_posix()
    if run.figure is None:
        if path.exists():
            message = f"{name} is in the book, but {program.name} draws no such figure"
            yield Mismatch(message, recordable=False)
        return
    try:
        new = Figure.parse(run.figure)
        if not new.labels:
            raise BookError("it has no words: label its axes, and keep text as text")
    except BookError as error:
        message = f"{program.name}:1: the figure {path.name} it drew: {error}"
        yield Mismatch(message, recordable=False)
        return
    if not path.exists():
        yield Mismatch(f"{program.name}:1: it draws {path.name}, which is not in the book yet")
        return
    old = Figure.parse(path.read_text("utf-8"))
    if differs := figure_difference(old, new, tolerances):
        yield Mismatch(f"{name}: {program.name} draws {differs}")
