"""Program runs: `execute` runs the commands of a program and returns what each of them did.

Nothing is compared here. `worldsize.testing.compare` compares a result with a transcript.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from worldsize.execution import runner
from worldsize.execution.prefork import Launcher
from worldsize.execution.requirements import must_start_as_typed
from worldsize.execution.staging import stage_program
from worldsize.model.program import Program
from worldsize.model.transcript import Clocks, Command

PREFORK_LIMIT = 300.0  # seconds; a command that hangs only when it is forked is found sooner


@dataclass(frozen=True)
class RunOptions:
    """How commands are run."""

    limit: float = 900.0  # seconds that one command may last
    launcher: Launcher | None = None  # forks commands; None: each starts as it is typed
    device: str = "cpu"  # the device that the commands see


@dataclass
class RunResult:
    """What the commands of a program did, in the order in which they ran."""

    program: Program
    device: str
    folder: Path  # in which the commands ran; it no longer exists
    results: list[runner.Result] = field(default_factory=list)
    figure: str | None = None  # the text of the SVG file, if the program drew one
    prefork: bool = False  # whether a command was forked from a prepared process
    clocks: Clocks | None = None  # of the GPU, while the commands ran

    @property
    def seconds(self) -> float:
        """The seconds that all commands together lasted."""
        return sum(result.seconds for result in self.results)


def succeeded(command: Command, result: runner.Result) -> bool:
    """Return whether a command ended in time, with its status, and left no process running."""
    return not result.timed_out and result.status == command.status and not result.leftovers


def execute(
    program: Program,
    commands: list[Command],
    options: RunOptions,
    *,
    source: str | None = None,
    is_wrong: Callable[[RunResult, Command, runner.Result], bool] = lambda *_: False,
) -> RunResult:
    """Run the commands of a program in one new folder and return what each of them did.

    The run ends early after a command that did not succeed, or for which ``is_wrong`` returns
    True. ``source`` replaces the text of the program.
    """
    with runner.empty_folder() as folder:
        stage_program(program, folder, source)
        run = RunResult(program, options.device, folder)
        for number, command in enumerate(commands):
            launcher = usable_launcher(options, program, command.command_line, number)
            run.prefork = run.prefork or launcher is not None
            limit = min(options.limit, PREFORK_LIMIT) if launcher else options.limit
            result = runner.run(
                command.command_line,
                folder,
                limit=limit,
                device=options.device,
                warm=launcher,
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
    """Return the launcher if it can fork this command; None if the command starts as typed."""
    launcher = options.launcher
    if launcher is None or must_start_as_typed(program, command_line):
        return None
    return launcher if launcher.takes(command_line, program.name, number) else None


@contextmanager
def gpu_lock(device: str) -> Iterator[None]:
    """Let one run at a time use the GPU, in all processes of this user. A CPU is not locked."""
    if device == "cpu":
        yield
        return
    shared = os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # by sessions
    with open(Path(shared, f"world-size-gpu-{os.getuid()}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
