"""Compare the run of a program with its transcript and its figure.

This module starts no process, and it reads no file except the figure in the book.
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
    """A difference between a run and a transcript or figure."""

    message: str  # with file and line
    recordable: bool = True  # whether a new transcript or figure may contain it


def compare(
    run: RunResult, transcript: Transcript, tolerances: Tolerances = DEFAULT_TOLERANCES
) -> list[Mismatch]:
    """Return the mismatches between a run and a transcript, in the order of the commands.

    After a command that failed, nothing else is compared. The figure is compared only if all
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
            f"{program.name}:1: {where} printed the path of the folder that it ran in. This "
            f"path is different for every reader: print names instead of paths",
            recordable=False,
        )
    if diff := difference(command.output, output, tolerances):
        return Mismatch(f"{where} printed something else:\n" + "\n".join(diff))
    return None


def _failure(run: RunResult, command: Command, result: runner.Result, where: str) -> str:
    """Describe why a command failed: a timeout, a wrong exit status, or running processes."""
    program = run.program
    if not result.timed_out and result.status == command.status:
        return f"{program.name}:1: {where} {result.leftovers_message}"
    wrong_status = f" exited with status {result.status}, not {command.status}:"
    ending = "" if result.timed_out else wrong_status
    renamed = {f"{run.folder}/{name}/": f"{name}/" for name in LABS}
    renamed[f"{run.folder}/"] = f"{program.path.parent.relative_to(program.root)}/"
    line = result.line_in(program.path.name) or 1
    return f"{program.name}:{line}: {where}{ending}\n{runner.explain(result, renamed)}"


def _compare_figure(run: RunResult, tolerances: Tolerances) -> Iterator[Mismatch]:
    """Yield the mismatch between the figure that a run drew and the figure in the book."""
    program, path = run.program, run.program.figure_path(run.device)
    name = path.relative_to(program.root).as_posix()
    if run.figure is None:
        if path.exists():
            message = f"{name} is in the book, but {program.name} does not draw it"
            yield Mismatch(message, recordable=False)
        return
    try:
        new = Figure.parse(run.figure)
        if not new.labels:
            raise BookError(
                "it contains no text: label its axes, and do not draw text as paths"
            )
    except BookError as error:
        message = f"{program.name}:1: its figure {path.name} is wrong: {error}"
        yield Mismatch(message, recordable=False)
        return
    if not path.exists():
        yield Mismatch(f"{program.name}:1: it draws {path.name}, which is not in the book yet")
        return
    old = Figure.parse(path.read_text("utf-8"))
    if text := figure_difference(old, new, tolerances):
        yield Mismatch(f"{name}: {program.name} draws {text}")
