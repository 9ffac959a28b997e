"""Limits: what the code of a learner may take of the machine, and what it may change.

They are for accidents, a fork in a loop or an rmtree of the wrong folder, and stop nobody who
wants to get around them: the file is the learner's own, on the learner's own machine.

- `set_rlimits` bounds a process and what it starts, by limits of the kernel.
- `excess` finds what all processes of a group take together; the runner asks it ten times a
  second. It needs Linux.
- `install_audit_hook` lets Python in a rank change nothing of the book, and lend no solution
from it.
"""

import contextlib
import errno
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

LINUX = sys.platform == "linux"
ROOT = Path(__file__).resolve().parents[1]


def _all_memory() -> int:
    """The bytes of this machine, or those that its container may take."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return most


# of a group of ranks, or a command
MEMORY = _all_memory() // 2  # bytes
RESERVED = 32 << 30  # bytes besides, asked for and never used: cuda_on_cpu.py takes 20 GiB
PROCESSES = 500
DISK = 2 << 30  # bytes in its folder, and of a file anywhere
# of a process, or a rank
FILES = 4096  # open at a time, sockets too
PRINTED = 1 << 30  # bytes
EVENTS = 200_000  # reports to the checker; a collective is two

REFUSED = {  # what `install_audit_hook` says: the hint
    "the checker lets your code change nothing here": "changes",
    "the checker takes nothing from the finished program": "solution",
}
CRASHES = {  # what other errors say: the hint
    r"^MemoryError|allocate memory": "memory",
    r"Errno 11\]|can't start new thread": "processes",
    r"File too large|No space left": "disk",
}


def set_rlimits(memory: bool = True) -> None:
    """Bound what this process, and each that it starts, takes; a lower limit stays.

    `memory` is False for what sees a GPU, whose driver maps more than it uses.
    """
    limits = {"CORE": 0, "FSIZE": DISK, "NOFILE": FILES}
    if LINUX:
        tasks = Path("/proc/loadavg").read_text().split()[3].partition("/")[2]
        limits["NPROC"] = int(tasks) + 2 * PROCESSES  # the user's, threads too; not of root
        if memory:
            limits["DATA"] = MEMORY + RESERVED
        with contextlib.suppress(OSError):  # should memory end, this process goes first
            Path("/proc/self/oom_score_adj").write_text("1000")
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        old = resource.getrlimit(kind)
        new = tuple(most if n == resource.RLIM_INFINITY else min(n, most) for n in old)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(kind, new)


# --- what a group takes together ----------------------------------------------------------


def size(number: int) -> str:
    """Bytes, in words."""
    return f"{number / 2**30:.3g} GiB"


def _memory_of(pid: int, file: str, kind: bytes) -> int:
    """The bytes that a process holds; what it only reads from files does not count."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}", file).read_bytes()
        return 1024 * sum(map(int, re.findall(kind + rb"_?(?:Anon|Shmem):\s+(\d+)", said)))
    return 0


def _memory(pids: list[int]) -> int:
    """The bytes that processes hold; what forks share counts once, which is slow to see."""
    most = sum(_memory_of(pid, "status", b"Rss") for pid in pids)
    if most > MEMORY:
        most = sum(_memory_of(pid, "smaps_rollup", b"Pss") for pid in pids)
    return most


def _written_to(folder: str | Path) -> int:
    """The bytes in a folder, a file taken for 64 KiB at least; counted up to the limit."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += max(os.lstat(os.path.join(parent, name)).st_blocks * 512, 1 << 16)
            if total > DISK:
                return total
    return total


def excess(pids: list[int], folder: str | Path) -> tuple[str, str] | None:
    """What these processes and their folder take too much of, and the hint for it."""
    if len(pids) > PROCESSES:
        return f"more than {PROCESSES} processes were running", "processes"
    if _memory(pids) > MEMORY:
        return f"all processes together held more than {size(MEMORY)}", "memory"
    if _written_to(folder) > DISK:
        return f"more than {size(DISK)} were written into the current folder", "disk"
    return None


# --- what a rank may change ---------------------------------------------------------------

STANDARD = os.path.dirname(os.__file__)
# the events by which Python tells of a change, and how many of their arguments are paths
CHANGES = {"os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.truncate": 1, "os.chmod": 1}
CHANGES |= {"shutil.rmtree": 1}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def install_audit_hook(path: str, finished: str) -> None:
    """From now on, refuse in this process to change the book, or to take its solution.

    `path` is the learner's file. Forks are guarded too; other programs and C are not.
    """
    temporary, folder = os.path.realpath(tempfile.gettempdir()), os.path.realpath(".")
    book, own, lab = str(ROOT), os.path.realpath(path), Path(finished).stem
    change, solution = REFUSED

    def refuse_changes(names: Iterable, whole_folder: bool) -> None:
        for name in names:
            # the current folder is gone; a number in place of a name
            with contextlib.suppress(OSError, TypeError):
                name = os.path.realpath(os.fsdecode(name))
                spoils = (_within(name, book) or name == own) and not _within(name, folder)
                if whole_folder:
                    spoils |= _within(book, name) or _within(own, name)
                    spoils |= not _within(name, temporary)
                if spoils:
                    break
        else:
            return
        raise PermissionError(errno.EPERM, change, name)

    def look(event: str, arguments: tuple) -> None:
        if event in CHANGES:
            refuse_changes(arguments[: CHANGES[event]], event == "shutil.rmtree")
        elif event == "open" and arguments[2] & WRITES:
            refuse_changes(arguments[:1], False)
        elif event in ("open", "import") and path != finished and lab in str(arguments[0]):
            if event == "open":
                taken = os.path.realpath(arguments[0]) == finished
            else:
                taken = arguments[0].rpartition(".")[2] == lab
            if taken and _asker() == path:
                raise PermissionError(errno.EPERM, solution, str(arguments[0]))

    sys.addaudithook(look)


def _within(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder.rstrip(os.sep) + os.sep)


def _asker() -> str:
    """The file whose code called the hook, through the standard library or not."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        standard = file.startswith(STANDARD) and "-packages" not in file
        if not standard and not file.startswith("<frozen"):
            return file
        frame = frame.f_back
    return ""
