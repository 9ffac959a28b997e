"""Helpers that wait for events and find the processes that a run has left behind.

No test depends on the speed of a machine: it waits until an event has happened, and then
checks.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

from worldsize.execution.runner import use_default_signals

if TYPE_CHECKING:
    from worldsize.execution.prefork import Launcher

HANG = 1800.0  # seconds after which a process counts as hanging
EXIT_TIMEOUT = 60.0  # seconds that a process may need to end after a signal
PYTEST = ["-m", "pytest"]
LAUNCHER: list[Launcher | None] = [None]  # the prefork launcher of the session, if it has one


def until(event: Callable[[], object], process: Popen | None = None) -> None:
    """Wait for an event; fail if it does not happen, or if the process ends before it."""
    deadline = time.monotonic() + HANG
    while not event():
        over = process is not None and process.poll() is not None
        assert event() or not over, f"it ended too early, with status {process.returncode}"
        assert time.monotonic() < deadline, f"the event did not happen within {HANG} s"
        time.sleep(0.01)


def processes_with(mark: str, *, in_command: bool = False) -> dict[int, str]:
    """Return the live processes with this mark in their variables, or in their command.

    The result maps process IDs to commands.
    """
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            text = command if in_command else (entry / "environ").read_bytes()
            if mark.encode() in text and int(entry.name) != os.getpid():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            pass
    return found


def left_behind(mark: str, *, in_command: bool = False) -> list[str]:
    """Return the commands of marked processes that still run after all had time to end."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    while (left := processes_with(mark, in_command=in_command)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(left.values())


def end(mark: str) -> None:
    """Kill all processes with this mark in their variables."""
    for pid in processes_with(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class ForkedProgram:
    """A program that runs in a fork of a process with torch.

    It has the interface of `Popen`.
    """

    def __init__(
        self, launcher: Launcher, words: list[str], cwd: str | Path, env: dict[str, str]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.outputs = self.folder / "out", self.folder / "err"
        self.process = launcher.start_words(words, Path(cwd), env, *self.outputs)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return what the program printed, after it has ended."""
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(f"process {self.process.pid}", timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self.outputs)
        shutil.rmtree(self.folder)
        return out, err


def start(words: list[str], cwd: str | Path, env: dict[str, str]) -> Popen | ForkedProgram:
    """Start `python …` or `torchrun …` with these variables.

    If the session has a prefork launcher, torchrun, Python files and pytest run in a fork.
    """
    can_fork = words[0] == "torchrun" or words[1].endswith(".py") or words[1:3] == PYTEST
    if LAUNCHER[0] and can_fork:
        return ForkedProgram(LAUNCHER[0], words, cwd, env)
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    return Popen(
        [sys.executable, *starts[words[0]], *words[1:]],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=use_default_signals,
    )
