"""Processes: finds the processes of a run, measures what they use, and ends them.

It imports only the standard library, because the graders use it on a learner's machine.
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
PR_SET_PDEATHSIG = 1  # the signal that this process gets when its parent ends
PR_SET_CHILD_SUBREAPER = 36  # orphans among its descendants become children of this process


# --- which processes there are ------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A running process, with the properties that a run needs."""

    pid: int
    parent: int = field(compare=False)  # changes when the parent ends
    session: int
    command: str
    state: str = field(default="S", compare=False)  # the letter that /proc and ps print
    ticks: int = field(default=0, compare=False)  # processor time of this process
    waited: int = field(default=0, compare=False)  # processor time of its ended children

    def variables(self) -> dict[str, str]:
        """Return the variables that it was started with; none if they cannot be read."""
        return variables_of(self.pid)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still exists."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)


def running_processes(dead: str = "ZX") -> set[Process]:
    """Return all visible processes of this machine, from /proc on Linux and from ps elsewhere.

    ``dead`` contains the states that are left out; the empty string leaves out none.
    """
    if Path("/proc/self/stat").exists():
        found = map(_from_proc, filter(str.isdigit, os.listdir("/proc")))
        return {process for process in found if process and process.state not in dead}
    columns = "pid=,ppid=,sess=,state=,command="
    listing = subprocess.run(
        ["ps", "-A", "-o", columns], capture_output=True, text=True, check=False
    )
    processes = set()
    for line in listing.stdout.splitlines():
        pid, parent, session, state, *command = line.split(None, 4)
        if state[0] not in dead:
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
    own, waited = (int(more[n]) + int(more[n + 1]) for n in (7, 9))
    numbers = int(pid), int(parent), int(session)
    return Process(*numbers, text, state, own, waited)


def variables_of(pid: int) -> dict[str, str]:
    """Return the variables with which a process was started; none if they cannot be read."""
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def descendants(*pids: int) -> list[int]:
    """Return the children of these processes, the children of the children, and so on."""
    if not LINUX:
        return []
    listed = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    tree, found = {} if listed else _all_children(), [*pids]
    for process in found:
        found += _children_of(process) if listed else tree.get(process, [])
    return found[len(pids) :]


def _all_children() -> dict[int, list[int]]:
    """Return the children of every process, for kernels that keep no lists of children."""
    tree: dict[int, list[int]] = {}
    for process in running_processes(dead=""):
        tree.setdefault(process.parent, []).append(process.pid)
    return tree


def _children_of(pid: int) -> list[int]:
    """Return the children of one process, from the list that the kernel keeps."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    return found


def ranks_among(pids: Iterable[int]) -> dict[int, int]:
    """Return the processes that torchrun started as ranks, by rank."""
    found: dict[int, int] = {}
    for pid in pids:
        rank = variables_of(pid).get("RANK", "")
        if rank.isdecimal():
            found.setdefault(int(rank), pid)
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended. On Linux, a zombie has ended."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text() if LINUX else ") S"
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- what they use ------------------------------------------------------------------------


def ticks_and_sleep(pid: int) -> tuple[int, bool]:
    """Return the clock ticks that a process has used, and whether all its threads sleep.

    The event loop of gloo is not counted. It is a thread that looks at its sockets a hundred
    times a second, even if no message will ever arrive.
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
    """Return whether one of these processes waits for a name server.

    The store of torch asks for the name of every address that it connects to, even 127.0.0.1.
    A name server that is not there is given up only after about ten seconds.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets = [Path(f"/proc/{pid}/net/{each}").read_text() for each in ("udp", "udp6")]
            rows = [line.split() for line in "".join(sockets).splitlines()]
            asking = {row[9] for row in rows if row[2].endswith(":0035")}  # port 53
            opened = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")]
            if asking & {link[8:-1] for link in opened if link.startswith("socket:[")}:
                return True
    return False


def memory_of(pid: int, exact: bool = False) -> int:
    """Return the bytes of memory that a process has written to; mapped files do not count.

    `exact`: memory that several processes share counts only once among them, which takes the
    kernel longer to compute.
    """
    file, kind = ("smaps_rollup", b"Pss") if exact else ("status", b"Rss")
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}", file).read_bytes()
        return 1024 * sum(map(int, re.findall(kind + rb"_?(?:Anon|Shmem):\s+(\d+)", text)))
    return 0


def count_tasks() -> int:
    """Return the number of processes and threads of this machine. Linux only."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def processor_seconds() -> float:
    """Return the processor time in seconds of this process and of all that it has started."""
    # An ended process is counted until its parent waits for it. From then on, its time is part
    # of the parent's time.
    everyone, inside, size = running_processes(dead=""), {os.getpid()}, 0
    while len(inside) > size:
        size = len(inside)
        inside |= {p.pid for p in everyone if p.parent in inside}
    others = (p for p in everyone if p.pid in inside and p.pid != os.getpid())
    ticks = sum(p.ticks + p.waited for p in others)
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


# --- how they end -------------------------------------------------------------------------


def end_with_parent() -> None:
    """Linux: let the kernel kill this process when the process that forked it ends."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Linux: become the parent of each descendant whose own parent ends."""
    if LINUX:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_first_without_memory() -> None:
    """Linux: let the kernel kill this process before all others if memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def kill_session(pid: int) -> None:
    """Kill the process group that this process leads, if it still exists."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def kill_descendants(spare: Collection[int] = ()) -> None:
    """Linux: kill all descendants of this process except `spare`, until none is left."""
    while LINUX and (left := set(descendants(os.getpid())) - set(spare)):
        for pid in left:
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
