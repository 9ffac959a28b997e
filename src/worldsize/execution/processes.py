"""Find the processes of a run, measure their resources, and end them.

This module imports only the standard library, because the graders use it on a learner's
machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

LINUX = sys.platform == "linux"
# Options of the Linux system call prctl:
PR_SET_PDEATHSIG = 1  # set the signal that this process receives when its parent ends
PR_SET_CHILD_SUBREAPER = 36  # orphaned descendants become children of this process


# --- finding processes --------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    pid: int
    parent: int = field(compare=False)  # its process ID, which changes when the parent ends
    session: int
    command: str
    state: str = field(default="S", compare=False)  # the letter that /proc and ps print
    ticks: int = field(default=0, compare=False)  # processor time of this process
    child_ticks: int = field(default=0, compare=False)  # processor time of its ended children

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its start; {} if they cannot be read."""
        return variables_of(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process if it still exists."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)


def running_processes(ignored_states: str = "ZX") -> set[Process]:
    """Return all visible processes of this machine, from /proc on Linux and from ps elsewhere.

    ``ignored_states`` contains the states of processes that are left out. By default, these are
    the states of ended processes.
    """
    if Path("/proc/self/stat").exists():
        found = map(_from_proc, filter(str.isdigit, os.listdir("/proc")))
        return {each for each in found if each and each.state not in ignored_states}
    columns = "pid=,ppid=,sess=,state=,command="
    listing = subprocess.run(
        ["ps", "-A", "-o", columns], capture_output=True, text=True, check=False
    )
    processes = set()
    for line in listing.stdout.splitlines():
        pid, parent, session, state, *command = line.split(None, 4)
        if state[0] not in ignored_states:
            number = int(session) if session.isdigit() else 0
            words = " ".join(command)
            processes.add(Process(int(pid), int(parent), number, words, state[0]))
    return processes


def _from_proc(pid: str) -> Process | None:
    """Return the process with this entry in /proc; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return None
    state, parent, _, session, *more = stat.rsplit(")", 1)[1].split()
    text = command.replace(b"\0", b" ").decode(errors="replace").strip()
    ticks, child_ticks = (int(more[n]) + int(more[n + 1]) for n in (7, 9))
    numbers = int(pid), int(parent), int(session)
    return Process(*numbers, text, state, ticks, child_ticks)


def variables_of(pid: int) -> dict[str, str]:
    """Return the environment variables of a process's start; {} if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def descendants(*pids: int) -> list[int]:
    """Return the children of these processes, the children of the children, and so on.

    The result is empty on systems other than Linux.
    """
    if not LINUX:
        return []
    has_lists = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    tree, found = {} if has_lists else _all_children(), [*pids]
    for process in found:
        found += _children_of(process) if has_lists else tree.get(process, [])
    return found[len(pids) :]


def _all_children() -> dict[int, list[int]]:
    """Return the children of every process, for kernels without lists of children."""
    tree: dict[int, list[int]] = {}
    for process in running_processes(ignored_states=""):
        tree.setdefault(process.parent, []).append(process.pid)
    return tree


def _children_of(pid: int) -> list[int]:
    """Return the children of a process, from the lists of the kernel."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    return found


def ranks_among(pids: Iterable[int]) -> dict[int, int]:
    """Return those of these processes that are ranks, as a mapping from rank to process ID."""
    found: dict[int, int] = {}
    for pid in pids:
        rank = variables_of(pid).get("RANK", "")
        if rank.isdecimal():
            found.setdefault(int(rank), pid)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process exists and has not ended. On Linux, a zombie has ended."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text() if LINUX else ") S"
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- measuring resources ------------------------------------------------------------------


def ticks_and_sleep(pid: int) -> tuple[int, bool]:
    """Return the clock ticks that a process has used, and whether all its threads sleep.

    The event loop of gloo does not count. This thread checks its sockets a hundred times per
    second, even if no message will ever arrive.
    """
    ticks, asleep = 0, True
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/stat") as file:
                name, _, text = file.read().rpartition(")")
            if name.endswith("(gloo_tcp_loop"):
                continue
            fields = text.split()
            ticks += int(fields[11]) + int(fields[12])
            asleep = asleep and fields[0] in "SZ"
    return ticks, asleep


def waits_for_name_server(pids: Iterable[int]) -> bool:
    """Return whether one of these processes waits for a name server (DNS).

    The store of torch looks up the name of every address to which it connects, even of
    127.0.0.1. If no name server answers, the lookup fails only after about ten seconds.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets = [Path(f"/proc/{pid}/net/{each}").read_text() for each in ("udp", "udp6")]
            rows = [line.split() for line in "".join(sockets).splitlines()]
            lookups = {row[9] for row in rows if row[2].endswith(":0035")}  # port 53
            links = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")]
            if lookups & {link[8:-1] for link in links if link.startswith("socket:[")}:
                return True
    return False


def memory_of(pid: int, exact: bool = False) -> int:
    """Return the bytes of memory that a process has written to; 0 if it has ended.

    Mapped files do not count. With ``exact``, memory that several processes share is divided
    among them, so that a sum counts it once. The kernel needs more time to compute this.
    """
    file, kind = ("smaps_rollup", b"Pss") if exact else ("status", b"Rss")
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}", file).read_bytes()
        return 1024 * sum(map(int, re.findall(kind + rb"_?(?:Anon|Shmem):\s+(\d+)", text)))
    return 0


def count_tasks() -> int:
    """Return the number of processes and threads of this machine (Linux only)."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def processor_seconds() -> float:
    """Return the processor time of this process and of all its descendants, in seconds."""
    # An ended process is in this list until its parent has waited for it. From then on, its
    # time is part of the parent's time.
    processes, tree, size = running_processes(ignored_states=""), {os.getpid()}, 0
    while len(tree) > size:
        size = len(tree)
        tree |= {p.pid for p in processes if p.parent in tree}
    others = (p for p in processes if p.pid in tree and p.pid != os.getpid())
    ticks = sum(p.ticks + p.child_ticks for p in others)
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


# --- ending processes ---------------------------------------------------------------------


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent process ends (Linux only)."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent ends (Linux only)."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def become_first_oom_victim() -> None:
    """Let the kernel kill this process first if the memory runs out (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def kill_process_group(pid: int) -> None:
    """Kill the process group whose leader has this process ID, if it still exists."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants(exclude: Collection[int] = ()) -> None:
    """Kill descendants of this process until only `exclude` is left (Linux only)."""
    while LINUX and (remaining := set(descendants(os.getpid())) - set(exclude)):
        for pid in remaining:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def end_workers() -> None:
    """Send SIGTERM to the child processes that are in the same session as this process."""
    for process in running_processes():
        if process.parent == os.getpid() and process.session == os.getsid(0):
            process.send(signal.SIGTERM)
