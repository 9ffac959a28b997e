"""Write the transcript and the figure of a run into the book."""

from __future__ import annotations

import datetime
import sys

from worldsize.execution import runner, shared_gpu
from worldsize.execution.program_run import RunResult
from worldsize.execution.requirements import gpus_needed
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
    """Write the transcript ``name`` and the figure; a failure leaves no incomplete file.

    If ``previous`` was recorded on an older release of torch, it becomes the transcript for
    that release. If it was recorded on a newer release, it is kept, and the new transcript
    becomes the transcript for the older release.
    """
    program, provenance = run.program, _provenance(run, previous)
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
    # only the figure of the newest release is stored
    if run.figure is not None and name in ("cpu", run.device):
        text = "\n".join(line.rstrip() for line in run.figure.splitlines())
        atomic_write(program.figure_path(run.device), text + "\n")


def _provenance(run: RunResult, previous: Transcript) -> Provenance:
    if run.device == "cpu":
        hardware = runner.describe_device("cpu")
    else:
        hardware = shared_gpu.describe_gpus(gpus_needed(previous))
    return Provenance(
        datetime.date.today().isoformat(),
        hardware,
        runner.torch_version(),
        ".".join(map(str, sys.version_info[:3])),
        run.seconds,
        run.clocks,
    )
