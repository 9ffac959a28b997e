"""Run the commands of a program and return their results.

This module compares nothing. `worldsize.testing.compare` compares a result with a transcript.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from worldsize.execution import runner, shared_gpu
from worldsize.execution.prefork import Launcher
from worldsize.execution.requirements import gpus_needed, is_never_forked
from worldsize.execution.staging import stage_program
from worldsize.model.program import Program
from worldsize.model.transcript import Clocks, Command, Transcript

PREFORK_LIMIT = 300.0  # seconds; the time limit of a forked command, to find its hang sooner


@dataclass(frozen=True)
class RunOptions:
    """The options for running commands."""

    limit: float = 900.0  # the time limit of one command in seconds
    launcher: Launcher | None = None  # forks commands; without it, commands run under bash
    device: str = "cpu"  # the device that the commands may use


@dataclass
class RunResult:
    """The results of the commands of a program, in the order in which they ran."""

    program: Program
    device: str
    folder: Path  # the folder in which the commands ran; it no longer exists
    results: list[runner.Result] = field(default_factory=list)
    figure: str | None = None  # the text of the SVG file, if the program drew one
    used_prefork: bool = False  # whether a launcher forked at least one command
    clocks: Clocks | None = None  # the clock rates of the GPU while the commands ran

    @property
    def seconds(self) -> float:
        """Return the duration of all commands together, in seconds."""
        return sum(result.seconds for result in self.results)


def succeeded(command: Command, result: runner.Result) -> bool:
    """Return whether a command ended in time, with the right status and without leftovers."""
    return not result.timed_out and result.status == command.status and not result.leftovers


def execute(
    program: Program,
    commands: list[Command],
    options: RunOptions,
    *,
    source: str | None = None,
    is_wrong: Callable[[RunResult, Command, runner.Result], bool] = lambda *_: False,
) -> RunResult:
    """Run the commands of a program in a new folder, and return their results.

    The run stops after a command that did not succeed or for which ``is_wrong`` returns True.
    ``source`` replaces the text of the program.
    """
    ranks = gpus_needed(Transcript(commands))
    shares_gpus = options.device != "cpu" and shared_gpu.needs_sharing(ranks)
    variables = shared_gpu.VARIABLES if shares_gpus else {}
    if program.path.suffix == ".cu":
        # The emulator of CUDA C++ stores its object file in this folder. All programs in CUDA
        # C++ share the folder, so the emulator is compiled only once in a session.
        variables = variables | {"TMPDIR": tempfile.gettempdir()}
    with runner.empty_folder() as folder:
        stage_program(program, folder, source)
        run = RunResult(program, options.device, folder)
        for number, command in enumerate(commands):
            launcher = usable_launcher(options, program, command.command_line, number)
            run.used_prefork = run.used_prefork or launcher is not None
            limit = min(options.limit, PREFORK_LIMIT) if launcher else options.limit
            result = runner.run(
                command.command_line,
                folder,
                limit=limit,
                device=options.device,
                launcher=launcher,
                variables=variables,
            )
            run.results.append(result)
            if not succeeded(command, result) or is_wrong(run, command, result):
                break
        figure = folder / program.figure.name
        run.figure = figure.read_text("utf-8") if figure.exists() else None
    return run


def usable_launcher(
    options: RunOptions, program: Program, command_line: str, number: int
) -> Launcher | None:
    """Return the launcher if it accepts this command; None if the command runs under bash."""
    launcher = options.launcher
    if launcher is None or is_never_forked(program, command_line):
        return None
    return launcher if launcher.accepts(command_line, program.name, number) else None


@contextmanager
def gpu_lock(device: str) -> Iterator[None]:
    """Let only one process of this user at a time use the GPU. A CPU is not locked."""
    if device == "cpu":
        yield
        return
    # all sessions share this folder, although each may have its own temporary folder
    folder = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    with open(Path(folder, f"world-size-gpu-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
