"""Run a command as a reader would run it, with a time limit, and leave no process behind.

The command runs under bash, or is forked by a launcher, in an empty folder and with the
environment variables of a reader. When the time limit is exceeded, the runner collects the
Python stack of every rank, and then kills all processes of the run. To get a stack, it sends
SIGABRT. ``faulthandler`` then prints the stack, which needs no privileges and no other tool.
After every run, the runner finds, kills and reports the processes that are still running.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from worldsize.execution import host_checks
from worldsize.execution.prefork import TAG, Launcher
from worldsize.execution.processes import Process, running_processes
from worldsize.model import atomic_write

INHERITED_VARIABLES = re.compile(
    r"^(HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TZ|LD_LIBRARY_PATH|CUDA_HOME|CUDA_PATH|"
    r"NVIDIA_\w+|XDG_\w+|SSL_CERT_\w+|"
    r"ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA)$"  # these limit the CPU instructions of torch
)
MAX_OUTPUT_BYTES = 1 << 20  # the runner reads at most this much of stdout and of stderr
IDLE_TIMEOUT = 2.0  # seconds; processes that only sleep for this time count as leftovers
EXIT_TIMEOUT = 30.0  # seconds that a process may need to end on a busy machine


@dataclass
class Result:
    """The result of a command: its exit status, its output and its duration in seconds."""

    command: str
    status: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    stacks: list[tuple[str, str]] = field(default_factory=list)  # (process, its Python stack)
    leftovers: list[str] = field(default_factory=list)  # processes that ran after its end

    @property
    def leftovers_message(self) -> str:
        """Return the end of a sentence that lists the processes in `leftovers`."""
        return "\n  ".join(["left processes running (they are killed now):", *self.leftovers])

    def line_in(self, file: str) -> int | None:
        """Return the line number of ``file`` in the last traceback.

        If the command timed out, return the line at which the first rank hangs. The result is
        None if no traceback contains the file.
        """
        text = "\n".join(stack for _, stack in self.stacks) or self.stderr
        lines = re.findall(rf'File "[^"]*{re.escape(file)}", line (\d+)', text)
        return int(lines[0] if self.stacks else lines[-1]) if lines else None


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Yield an empty folder for one run, and remove it at the end, also after an error."""
    with host_checks.defer_signals():
        parent = tempfile.TemporaryDirectory(prefix="ws-", ignore_cleanup_errors=True)
    try:
        for name in ("run", "tmp"):
            Path(parent.name, name).mkdir()
        yield Path(parent.name, "run")
    finally:
        with host_checks.defer_signals():  # an interrupted cleanup would not be repeated
            parent.cleanup()


def environment(folder: Path, device: str) -> dict[str, str]:
    """Return the environment variables of a run, which are those of a reader's shell.

    The folder of this Python comes first on PATH. If ``device`` is "cpu", the variables hide
    the GPUs of the machine.
    """
    parent = os.environ
    env = {key: value for key, value in parent.items() if INHERITED_VARIABLES.match(key)} | {
        "LANG": parent.get("LANG", "C.UTF-8"),
        "PATH": os.pathsep.join([_python_folder(), parent.get("PATH", os.defpath)]),
        "TMPDIR": str(folder.parent / "tmp"),
        # In a shared folder, torch would wait forever for the lock of a build that was killed.
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "tmp"),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # By default, torch.compile first compiles its headers. This does not save time here,
        # because the folder is removed after one run. (Forked commands share one folder, see
        # `Launcher.start_words`.) The test of vector instructions is not needed either.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    # With PYTHON=python3, PYTHONPATH may contain a folder of installed packages. Keep all
    # folders except the one of this package.
    entries = filter(None, parent.get("PYTHONPATH", "").split(os.pathsep))
    if remaining := [
        each for each in entries if not Path(each, "worldsize/execution/runner.py").exists()
    ]:
        env["PYTHONPATH"] = os.pathsep.join(remaining)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_VISIBLE_DEVICES" in parent:
        env["CUDA_VISIBLE_DEVICES"] = parent["CUDA_VISIBLE_DEVICES"]
    if not host_checks.hostname_resolves():
        # By default, torchrun uses the host name, which does not resolve.
        env["PET_LOCAL_ADDR"] = "localhost"
    version = tuple(map(int, re.findall(r"\d+", torch_version())[:2]))
    if version and version < (2, 13):
        # Before 2.13, every torchrun on one node used port 29500, so one of two simultaneous
        # runs failed.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["PET_MASTER_PORT"] = str(probe.getsockname()[1])
    return env


def _python_folder() -> str:
    """Return a folder whose `python`, `python3` and `torchrun` belong to this interpreter."""
    bin_folder = Path(sys.executable).parent
    if (bin_folder / "python").exists() and (bin_folder / "torchrun").exists():
        return str(bin_folder)
    suffix = f"{os.getuid()}-{uuid.uuid5(uuid.NAMESPACE_URL, sys.executable).hex[:8]}"
    shims = Path(tempfile.gettempdir(), f"ws-python-{suffix}")
    shims.mkdir(mode=0o700, exist_ok=True)
    arguments = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run"}
    for name, words in arguments.items():
        text = f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n'
        if not (shims / name).exists() or (shims / name).read_text() != text:
            atomic_write(shims / name, text, 0o755)
    return str(shims)


# --- processes -------------------------------------------------------------------------------


@dataclass
class _ProcessTree:
    """The processes of a run: ``root``, its descendants, their sessions, and all with the tag.

    The tag is an environment variable that every descendant inherits. It identifies a process
    that has left the session and whose parent has ended.
    """

    root: int  # the ID of the first process
    tag: str  # the value of the variable TAG

    def members(self, processes: set[Process] | None = None) -> list[Process]:
        """Return the running processes of this tree, out of these or of all processes."""
        processes = [p for p in processes or running_processes() if p.pid != os.getpid()]
        tree, size = {self.root}, 0
        while len(tree) > size:
            size = len(tree)
            tree |= {p.pid for p in processes if p.parent in tree or p.session in tree}
        return [p for p in processes if p.pid in tree or p.variables().get(TAG) == self.tag]

    def leftovers(self) -> list[Process]:
        """Return the processes that run after the end of the command and do not end soon."""
        start = idle_since = time.monotonic()
        before: list[tuple[int, int]] = []
        while members := self.members():
            now, ticks = time.monotonic(), sorted((p.pid, p.ticks) for p in members)
            if ticks != before or any(p.state in "RD" for p in members):
                idle_since, before = now, ticks
            if now - idle_since > IDLE_TIMEOUT or now - start > EXIT_TIMEOUT:
                return members
            time.sleep(0.02)
        return []

    def kill(self, members: list[Process]) -> None:
        """Send SIGKILL to all processes, and repeat this until none is left.

        ``members`` contains processes that an earlier search found. The variables of a process
        cannot be read at every moment, so a search can miss a process that has left the
        session. Therefore, two searches in a row must find no process.
        """
        deadline = time.monotonic() + 30
        found, empty_searches = set(members), 0
        while empty_searches < 2 and time.monotonic() < deadline:
            processes = running_processes()
            found.update(self.members(processes))
            alive = found & processes
            empty_searches = 0 if alive else empty_searches + 1
            for process in alive:
                process.send(signal.SIGKILL)
            time.sleep(0.01)

    def stacks(self, stderr: Path) -> list[tuple[str, str]]:
        """Return the name and the Python stack of every rank.

        Without ranks, return those of every Python process that has no children. The other
        processes are stopped first, because torchrun would end the remaining ranks. ``stderr``
        is the file that contains the standard error of all processes.
        """
        members = [p for p in self.members() if "python" in p.command.split(" ")[0]]
        ranks = {p: int(rank) for p in members if (rank := p.variables().get("RANK"))}
        parents = {p.parent for p in members}
        targets = list(ranks) or [p for p in members if p.pid not in parents]
        for process in set(members) - set(targets):
            process.send(signal.SIGSTOP)
        stacks = []
        for number, process in enumerate(sorted(targets, key=lambda p: (ranks.get(p), p.pid))):
            start = stderr.stat().st_size
            process.send(signal.SIGABRT)
            _until(lambda process=process: process not in running_processes(), EXIT_TIMEOUT)
            dump = stderr.read_bytes()[start:].decode(errors="replace")
            name = f"process {number} of {len(targets)}" if len(targets) > 1 else "the process"
            name = f"rank {ranks[process]}" if ranks else name
            stacks.append((name, _readable_stack(dump)))
        return stacks


def _readable_stack(dump: str) -> str:
    """Return the main thread of a dump of faulthandler, with the innermost call first."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump)
    threads = [thread for thread in threads if "most recent call first" in thread]
    if not threads:
        return "(no Python stack: the process does not react to SIGABRT or is not Python)"
    main_threads = [t for t in threads if "in <module>" in t] or threads
    lines = [line for line in main_threads[-1].splitlines() if line.startswith("  ")]
    return "\n".join(lines[:30])


def _until(is_done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``is_done`` returns True, at most for ``seconds``; return its last result."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not (done := is_done()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return done


# --- running ---------------------------------------------------------------------------------


def run(
    command: str,
    folder: Path,
    *,
    limit: float,
    device: str = "cpu",
    launcher: Launcher | None = None,
    variables: Mapping[str, str] | None = None,
) -> Result:
    """Run ``command`` in a folder of `empty_folder` for at most ``limit`` seconds.

    The launcher, which must accept the command, forks a process for it. Without a launcher, the
    command runs under bash, exactly as it is written. ``variables`` are added to the
    environment of the command.
    """
    tag = uuid.uuid4().hex
    env = environment(folder, device) | {TAG: tag, **(variables or {})}
    out, err = folder.parent / "stdout", folder.parent / "stderr"
    out.write_bytes(b"")
    err.write_bytes(b"")
    tree, stacks, leftovers = None, [], []
    try:
        with host_checks.defer_signals():
            root, poll = (launcher.start if launcher else _start_in_bash)(
                command, folder, env, out, err
            )
            tree, start = _ProcessTree(root, tag), time.monotonic()
        ended = _until(lambda: poll() is not None, limit)
        seconds = time.monotonic() - start
        if ended:
            leftovers = tree.leftovers()
        else:
            stacks = tree.stacks(err)
    finally:
        if tree is not None:
            tree.kill(leftovers)
    status = poll() if ended else -signal.SIGKILL
    _until(lambda: poll() is not None, EXIT_TIMEOUT)  # collect the status of the killed process
    names = [f"{p.command[:200]} (process {p.pid})" for p in leftovers]
    return Result(command, status, _read(out), _read(err), seconds, not ended, stacks, names)


def use_default_signals() -> None:
    """Let SIGINT and SIGHUP end the process that is about to start, as in a terminal.

    A background job of a shell ignores SIGINT, and a command under `nohup` ignores SIGHUP. The
    processes that they start would otherwise ignore these signals, too.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _start_in_bash(
    command: str, folder: Path, env: dict[str, str], out: Path, err: Path
) -> tuple[int, Callable[[], int | None]]:
    """Start a command under bash; return its process ID and a function that polls its status.

    This function returns None while the command runs.
    """
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out_file,
            stderr=err_file,
            start_new_session=True,
            preexec_fn=use_default_signals,
        )
    return process.pid, process.poll


def _read(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        text = file.read(MAX_OUTPUT_BYTES).decode("utf-8", errors="replace")
    return text if size <= MAX_OUTPUT_BYTES else f"{text}\n… cut: the output has {size} bytes"


# --- describing a failure --------------------------------------------------------------------


_FAILED_RANK = re.compile(
    r"Root Cause.*?\n.*?rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)",
    re.DOTALL,
)


def explain(result: Result, paths: dict[str, str] | None = None) -> str:
    """Return why a command failed: the rank, its status and its last lines of output.

    ``paths`` maps paths in the folder of the run to paths in the book.
    """
    parts, printed = [], _program_lines(result.stderr)
    if result.timed_out:
        parts.append(f"it was still running after {result.seconds:.0f} s and was killed")
        for name, stack in result.stacks:
            parts.append(f"{name} was here (innermost call first):\n{stack}")
        printed = []
    elif failed := _FAILED_RANK.search(result.stderr):
        rank, status = f"rank{failed[1]}", int(failed[2])
        killed = status < 0 and f"was killed by {signal.Signals(-status).name}"
        parts.append(f"rank {failed[1]} {killed or f'exited with status {status}'}")
        lines = result.stderr.splitlines()
        printed = [li for li in lines if re.match(rf"\[{rank}\]:.*\S", li)] or printed
    else:
        printed = printed or result.stdout.splitlines()
    if printed:
        parts.append("\n  ".join(["its last lines:", *printed[-12:]]))
    text = "\n".join(parts) or "it printed nothing"
    text = re.sub(r'File "[^"]*/site-packages/', 'File "', text)
    for run_path, book_path in (paths or {}).items():
        text = text.replace(run_path, book_path)
    return text


_NOISE = re.compile(
    r"^(\*{5,}|={5,}|-{5,}|[EWI]\d{4} |Setting OMP_NUM_THREADS|\[[EWI]\d{4})|^\s*$"
)


def _program_lines(stderr: str) -> list[str]:
    """Return the lines of stderr without the messages that torchrun adds."""
    lines = stderr.splitlines()
    cut = next((n for n, line in enumerate(lines) if "ChildFailedError" in line), None)
    if cut is not None:
        tracebacks = [n for n in range(cut) if lines[n].startswith("Traceback (most recent")]
        lines = lines[: tracebacks[-1] if tracebacks else cut]  # the last one is of torchrun
    return [line for line in lines if not _NOISE.match(line)]


# --- the machine -----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def torch_version() -> str:
    """Return the version of torch without its build suffix, without importing torch."""
    try:
        return metadata.version("torch").split("+")[0]
    except metadata.PackageNotFoundError:
        return "none"


def describe_device(device: str) -> str:
    """Return a description of the hardware: `2 CPU cores (…)` or `1 × NVIDIA H200`."""
    if device != "cpu":
        names = gpu_names()
        return ", ".join(f"{names.count(name)} × {name}" for name in sorted(set(names)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU cores ({_cpu_name()})"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:[ \t]*(\S.*)$", text, re.MULTILINE):
            name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*|,", "", match[1])
            name = " ".join(name.split())
            return name if name.lower() not in {"", "unknown"} else platform.machine()
    return platform.machine()


@lru_cache(maxsize=1)
def gpu_names() -> list[str]:
    """Return the names of the CUDA devices that torch finds in a separate process."""
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        return []
    code = "import torch.cuda as c; print(*map(c.get_device_name, range(c.device_count())), "
    code += r"sep='\n')"
    listing = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return list(filter(None, listing.stdout.splitlines()))
