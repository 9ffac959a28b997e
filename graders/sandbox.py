"""Sandbox: limits what the code of a learner can use of the machine, and what it can change.

The sandbox protects against accidents, such as a fork in a loop or an rmtree of the wrong
folder. It does not stop a person who wants to get around it. The file belongs to the learner,
and so does the machine.

- `set_rlimits` sets limits of the kernel for a process and for all that it starts.
- `excess` finds out what all processes of a group use together. The supervisor calls it ten
  times a second. It needs Linux.
- `install_audit_hook` lets Python code in a rank neither change a file of the book nor use the
  solution in the finished program.
"""

import contextlib
import errno
import os
import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from worldsize.execution import processes
from worldsize.execution.processes import LINUX

ROOT = Path(__file__).resolve().parents[1]


def _all_memory() -> int:
    """Return the bytes of memory of this machine, or of its container."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


# limits for a group of ranks, or for a command
MEMORY = _all_memory() // 2  # bytes
RESERVED = 32 << 30  # additional bytes that are reserved but not used; cuda_on_cpu.py: 20 GiB
PROCESSES = 500
DISK = 2 << 30  # bytes in the folder; also the size of any single file
# limits for one process, or for one rank
FILES = 4096  # that are open at the same time, including sockets
PRINTED = 1 << 30  # bytes
EVENTS = 200_000  # reports to the supervisor; a collective sends two

REFUSED = {  # a message of `install_audit_hook`: the hint
    "the checker lets your code change nothing here": "changes",
    "the checker takes nothing from the finished program": "solution",
}
CRASHES = {  # a pattern for the message of a different error: the hint
    r"^MemoryError|allocate memory": "memory",
    r"Errno 11\]|can't start new thread": "processes",
    r"File too large|No space left": "disk",
}


def set_rlimits(memory: bool = True) -> None:
    """Set the limits for this process and for all that it starts. A lower limit remains.

    `memory` is False for a process that uses a GPU, because the driver maps more than it uses.
    """
    limits = {"CORE": 0, "FSIZE": DISK, "NOFILE": FILES}
    if LINUX:
        # the kernel counts all processes and threads of the user, and does not limit root
        limits["NPROC"] = processes.count_tasks() + 2 * PROCESSES
        if memory:
            limits["DATA"] = MEMORY + RESERVED
        processes.become_first_oom_victim()
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        old = resource.getrlimit(kind)
        new = tuple(most if n == resource.RLIM_INFINITY else min(n, most) for n in old)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, new)


# --- what a group uses together -----------------------------------------------------------


def size(number: int) -> str:
    """Return a number of bytes in words."""
    return f"{number / 2**30:.3g} GiB"


def _memory(pids: list[int]) -> int:
    """Return the bytes of memory of some processes; shared memory counts once."""
    most = sum(processes.memory_of(pid) for pid in pids)
    if most > MEMORY:
        most = sum(processes.memory_of(pid, exact=True) for pid in pids)
    return most


def _written_to(folder: str | Path) -> int:
    """Return the bytes in a folder, at least 64 KiB for each file. Stops above the limit."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += max(os.lstat(os.path.join(parent, name)).st_blocks * 512, 1 << 16)
            if total > DISK:
                return total
    return total


def excess(pids: list[int], folder: str | Path) -> tuple[str, str] | None:
    """Return which limit these processes and their folder exceed, and the hint for it."""
    if len(pids) > PROCESSES:
        return f"more than {PROCESSES} processes were running", "processes"
    if _memory(pids) > MEMORY:
        return f"all processes together held more than {size(MEMORY)}", "memory"
    if _written_to(folder) > DISK:
        return f"more than {size(DISK)} were written into the current folder", "disk"
    return None


# --- what a rank may change ---------------------------------------------------------------

STANDARD = os.path.dirname(os.__file__)
# the audit events of Python for changes, and how many of their arguments are paths
CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.truncate": 1, "os.chmod": 1}
CHANGES |= {"shutil.rmtree": 1}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install_audit_hook(path: str, finished: str) -> None:
    """Refuse in this process to change a file of the book, or to use the solution.

    `path` is the learner's file, and `finished` the finished program. Forks of this process
    have the same hook. Other programs and code in C do not.
    """
    temporary, folder = os.path.realpath(tempfile.gettempdir()), os.path.realpath(".")
    book, own, lab = str(ROOT), os.path.realpath(path), Path(finished).stem
    change, solution = REFUSED

    def refuse_changes(names: Iterable, whole_folder: bool) -> None:
        for name in names:
            # the current folder does not exist, or the name is a number
            with contextlib.suppress(OSError, TypeError):
                name = os.path.realpath(os.fsdecode(name))
                forbidden = (_within(name, book) or name == own) and not _within(name, folder)
                if whole_folder:
                    forbidden |= _within(book, name) or _within(own, name)
                    forbidden |= not _within(name, temporary)
                if forbidden:
                    break
        else:
            return
        raise PermissionError(errno.EPERM, change, name)

    def check_event(event: str, arguments: tuple) -> None:
        if event in CHANGES:
            refuse_changes(arguments[: CHANGES[event]], event == "shutil.rmtree")
        elif event == "open" and arguments[2] & WRITES:
            refuse_changes(arguments[:1], False)
        elif event in ("open", "import") and path != finished and lab in str(arguments[0]):
            if event == "open":
                used = os.path.realpath(arguments[0]) == finished
            else:
                used = arguments[0].rpartition(".")[2] == lab
            if used and _caller() == path:
                raise PermissionError(errno.EPERM, solution, str(arguments[0]))

    sys.addaudithook(check_event)


def _within(name: str, folder: str) -> bool:
    """Return whether a path is this folder, or in it."""
    return name == folder or name.startswith(folder.rstrip(os.sep) + os.sep)


def _caller() -> str:
    """Return the file whose code caused the event, directly or through the standard library."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith(STANDARD) and "-packages" not in file
        if not standard and not file.startswith("<frozen"):
            return file
        frame = frame.f_back
    return ""
