"""Recording: writes the transcript and the figure of a run into the book."""

from __future__ import annotations

import datetime
import sys

from worldsize.execution import runner
from worldsize.execution.program_run import RunResult
from worldsize.model import atomic_write
from worldsize.model.program import Program, device_up_to, release
from worldsize.model.transcript import Command, Provenance, Transcript, output_lines


def has_listed_commands(program: Program, transcript: Transcript) -> bool:
    """Return whether a GPU transcript has the commands that snippets/gpu.toml lists."""
    listed = program.gpu_template.commands if program.gpu_template else []
    return [each.command_line for each in transcript.commands] == [
        each.command_line for each in listed
    ]


def record(run: RunResult, previous: Transcript, name: str) -> None:
    """Write the transcript called ``name`` and the figure, each completely or not at all.

    If ``previous`` was recorded on an older release of torch, it is kept as the transcript for
    this release. If it was recorded on a newer one, the new transcript is the older one.
    """
    program, provenance = run.program, _provenance(run)
    if run.device == "cpu" and previous.provenance:
        here, there = release(provenance.torch), release(previous.provenance.torch)
        if here > there:
            atomic_write(program.transcript_path(device_up_to(there)), previous.text())
        elif here < there:
            name = device_up_to(here)
    commands = [
        Command(command.command_line, output_lines(result.stdout), command.status)
        for command, result in zip(previous.commands, run.results, strict=True)
    ]
    atomic_write(program.transcript_path(name), Transcript(commands, provenance).text())
    if run.figure is not None and name in ("cpu", run.device):  # a figure is of today's torch
        text = "\n".join(line.rstrip() for line in run.figure.splitlines())
        atomic_write(program.figure_path(run.device), text + "\n")


def _provenance(run: RunResult) -> Provenance:
    return Provenance(
        datetime.date.today().isoformat(),
        runner.describe_device(run.device),
        runner.torch_version(),
        ".".join(map(str, sys.version_info[:3])),
        run.seconds,
        run.clocks,
    )
