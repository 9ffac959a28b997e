"""Waiting for events, and finding what a run has left behind.

No test asks how fast a machine is: it waits until something has happened, and then looks.
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

from worldsize.execution.runner import as_in_a_terminal

if TYPE_CHECKING:
    from worldsize.execution.prefork import Launcher

HANG = 1800.0  # seconds: what has not come to its end by then hangs
LEAVING = 60.0  # seconds that a process which is on its way out may still be seen
PYTEST = ["-m", "pytest"]
LAUNCHER: list[Launcher | None] = [None]  # of the session; none where all starts as typed


def until(event: Callable[[], object], process: Popen | None = None) -> None:
    """Wait for an event; fail if it does not come, or the process that it is of ends before."""
    deadline = time.monotonic() + HANG
    while not event():
        over = process is not None and process.poll() is not None
        assert event() or not over, f"it ended with status {process.returncode} before that"
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.01)


def carrying(mark: str, *, in_command: bool = False) -> dict[int, str]:
    """The live processes with a mark in their variables (or their command): their commands."""
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
    """The commands of those that are still there a while after all have been told to end."""
    deadline = time.monotonic() + LEAVING
    while (left := carrying(mark, in_command=in_command)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return list(left.values())


def end(mark: str) -> None:
    """Kill those that carry a mark."""
    for pid in carrying(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


class Warm:
    """A program that starts in a fork of a process with torch, as a `Popen` has one."""

    def __init__(
        self, launcher: Launcher, words: list[str], cwd: str | Path, env: dict[str, str]
    ) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.said = self.folder / "out", self.folder / "err"
        self.process = launcher.start_words(words, Path(cwd), env, *self.said)

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has printed, once it has ended."""
        self.process.join(timeout)
        if self.returncode is None:
            self.process.kill()
            raise subprocess.TimeoutExpired(f"process {self.process.pid}", timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self.said)
        shutil.rmtree(self.folder)
        return out, err


def start(words: list[str], cwd: str | Path, env: dict[str, str]) -> Popen | Warm:
    """Start `python …` or `torchrun …` with these variables, warm where commands do.

    What `python` starts warm is a file, or pytest.
    """
    begins = words[0] == "torchrun" or words[1].endswith(".py") or words[1:3] == PYTEST
    if LAUNCHER[0] and begins:
        return Warm(LAUNCHER[0], words, cwd, env)
    starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
    return Popen(
        [sys.executable, *starts[words[0]], *words[1:]],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_in_a_terminal,
    )
