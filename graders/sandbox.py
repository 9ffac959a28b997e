"""Limits the resources that a learner's code can use, and the files that it can change.

The sandbox protects against accidents, such as a fork in a loop or an rmtree of the wrong
folder. It does not stop a person who wants to get around it. There is no need for this, because
the file and the machine belong to the learner.

- `set_rlimits` sets limits of the kernel for a process and for all processes that it starts.
- `excess` checks the total that all processes of a group use. The supervisor calls it ten times
  a second. On other systems than Linux, it can check only the folder.
- `install_audit_hook` prevents Python code in a rank from changing a file of the book, and from
  using the solution in the finished program.
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
RESERVED = 32 << 30  # more bytes, which are reserved but not used. cuda_on_cpu.py needs 20 GiB
PROCESSES = 500
DISK = 2 << 30  # bytes of all files in the folder, and also of each single file
# limits for one process, or for one rank
FILES = 4096  # files and sockets that are open at the same time
OUTPUT = 1 << 30  # bytes of printed text
EVENTS = 200_000  # reports to the supervisor. A collective sends two

REFUSALS = {  # the messages of `install_audit_hook`, and their hints
    "the checker does not let your code change this file or folder": "changes",
    "the checker does not let your code use the finished program": "solution",
}
CRASHES = {  # patterns for the messages of other errors, and their hints
    r"^MemoryError|allocate memory": "memory",
    r"Errno 11\]|can't start new thread": "processes",
    r"File too large|No space left": "disk",
}


def set_rlimits(memory: bool = True) -> None:
    """Set the limits for this process and for all processes that it starts.

    A limit that is already lower does not change. `memory` is False for a process that uses a
    GPU, because the driver maps more memory than it uses.
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


# --- the total use of a group -------------------------------------------------------------


def format_size(number: int) -> str:
    """Return a number of bytes as a text in GiB."""
    return f"{number / 2**30:.3g} GiB"


def _memory_of(pids: list[int]) -> int:
    """Return the bytes of memory that these processes use.

    Above the limit, the bytes are counted exactly, so that shared memory counts only once.
    """
    total = sum(processes.memory_of(pid) for pid in pids)
    if total > MEMORY:
        total = sum(processes.memory_of(pid, exact=True) for pid in pids)
    return total


def _folder_size(folder: str | Path) -> int:
    """Return the bytes in a folder, with at least 64 KiB for each file.

    The function stops counting as soon as the sum exceeds the limit.
    """
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += max(os.lstat(os.path.join(parent, name)).st_blocks * 512, 1 << 16)
            if total > DISK:
                return total
    return total


def excess(pids: list[int], folder: str | Path) -> tuple[str, str] | None:
    """Return a sentence and a hint for a limit that these processes or their folder exceed.

    Returns None if they exceed no limit.
    """
    if len(pids) > PROCESSES:
        return f"more than {PROCESSES} processes were running", "processes"
    if _memory_of(pids) > MEMORY:
        return f"all processes together used more than {format_size(MEMORY)}", "memory"
    if _folder_size(folder) > DISK:
        return f"more than {format_size(DISK)} were written into the current folder", "disk"
    return None


# --- the files that a rank may change -----------------------------------------------------

STANDARD_LIBRARY = os.path.dirname(os.__file__)
# the audit events of Python for changes of files, and the number of their arguments that are
# paths
CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.truncate": 1, "os.chmod": 1}
CHANGES |= {"shutil.rmtree": 1}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install_audit_hook(path: str, finished: str) -> None:
    """Make this process raise `PermissionError` if it changes the book or uses the solution.

    `path` is the learner's file, and `finished` is the path of the finished program. Forks of
    this process have the same hook. Other programs and code in C do not have it.
    """
    temporary, folder = os.path.realpath(tempfile.gettempdir()), os.path.realpath(".")
    book, own, lab = str(ROOT), os.path.realpath(path), Path(finished).stem
    change_refusal, solution_refusal = REFUSALS

    def refuse_changes(names: Iterable, whole_folder: bool) -> None:
        for name in names:
            # an OSError: the current folder does not exist. A TypeError: the name is a number
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
        raise PermissionError(errno.EPERM, change_refusal, name)

    def check_event(event: str, arguments: tuple) -> None:
        if event in CHANGES:
            refuse_changes(arguments[: CHANGES[event]], event == "shutil.rmtree")
        elif event == "open" and arguments[2] & WRITES:
            refuse_changes(arguments[:1], False)
        elif event in ("open", "import") and path != finished and lab in str(arguments[0]):
            if event == "open":
                is_finished = os.path.realpath(arguments[0]) == finished
            else:
                is_finished = arguments[0].rpartition(".")[2] == lab
            if is_finished and _caller() == path:
                raise PermissionError(errno.EPERM, solution_refusal, str(arguments[0]))

    sys.addaudithook(check_event)


def _within(name: str, folder: str) -> bool:
    """Return whether a path is this folder or is inside it."""
    return name == folder or name.startswith(folder.rstrip(os.sep) + os.sep)


def _caller() -> str:
    """Return the file whose code caused the event, directly or through the standard library.

    Returns "" if there is no such file.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(STANDARD_LIBRARY) and "-packages" not in file
        if not is_standard and not file.startswith("<frozen"):
            return file
        frame = frame.f_back
    return ""
