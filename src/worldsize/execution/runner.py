"""Run one command as a reader would run it, with a time limit, and leave no process behind.

The command runs under bash in an empty folder, with the variables that a reader would have.
When the time limit is exceeded, the runner collects the Python stack of every rank and then
kills all processes of the run. To get a stack, it sends SIGABRT: ``faulthandler`` then prints
the stack, and this needs no privileges and no other tool. After every run, processes that are
still running are found, killed and reported.
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
from collections.abc import Callable, Iterator
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
    r"ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA)$"  # limit the CPU instructions that torch uses
)
MAX_OUTPUT_BYTES = 1 << 20  # bytes that are read of stdout and of stderr
IDLE_TIMEOUT = 2.0  # seconds of sleep after which a process counts as left behind
EXIT_TIMEOUT = 30.0  # seconds that a process may need to end on a busy machine


@dataclass
class Result:
    """The result of a command: its exit status, its output and its duration."""

    command: str
    status: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False
    stacks: list[tuple[str, str]] = field(default_factory=list)  # (process, its Python stack)
    leftovers: list[str] = field(default_factory=list)  # processes that outlived the command

    @property
    def left_running(self) -> str:
        """Return the message that lists the processes that outlived the command."""
        return "\n  ".join(["left processes running (they are killed now):", *self.leftovers])

    def line_in(self, file: str) -> int | None:
        """Return the line of ``file`` in the last traceback, or where the first rank hangs."""
        text = "\n".join(stack for _, stack in self.stacks) or self.stderr
        lines = re.findall(rf'File "[^"]*{re.escape(file)}", line (\d+)', text)
        return int(lines[0] if self.stacks else lines[-1]) if lines else None


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """Yield an empty folder for one run, and remove it at the end, also after an error."""
    with host_checks.defer_signals():
        around = tempfile.TemporaryDirectory(prefix="ws-", ignore_cleanup_errors=True)
    try:
        for name in ("run", "tmp"):
            Path(around.name, name).mkdir()
        yield Path(around.name, "run")
    finally:
        with host_checks.defer_signals():  # an interrupted cleanup would not be repeated
            around.cleanup()


def environment(folder: Path, device: str) -> dict[str, str]:
    """Return the variables of a run: those of a reader's shell, with this Python first on PATH.

    If ``device`` is "cpu", the variables hide the GPUs of the machine.
    """
    own = os.environ
    env = {key: value for key, value in own.items() if INHERITED_VARIABLES.match(key)} | {
        "LANG": own.get("LANG", "C.UTF-8"),
        "PATH": os.pathsep.join([_python_folder(), own.get("PATH", os.defpath)]),
        "TMPDIR": str(folder.parent / "tmp"),
        # torch waits forever for the lock that a killed build left in the shared folder
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "tmp"),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # By default, torch.compile first compiles its headers. That does not pay off here,
        # because the folder is removed after one run (forked commands share one folder, see
        # `Launcher.start_words`). The test of vector instructions is not needed either.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    # With PYTHON=python3, PYTHONPATH may name a folder of packages. Keep all but the engine's.
    entries = filter(None, own.get("PYTHONPATH", "").split(os.pathsep))
    if outside := [
        each for each in entries if not Path(each, "worldsize/execution/runner.py").exists()
    ]:
        env["PYTHONPATH"] = os.pathsep.join(outside)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_VISIBLE_DEVICES" in own:
        env["CUDA_VISIBLE_DEVICES"] = own["CUDA_VISIBLE_DEVICES"]
    if not host_checks.hostname_resolves():
        # torchrun would use a host name that does not resolve
        env["PET_LOCAL_ADDR"] = "localhost"
    version = tuple(map(int, re.findall(r"\d+", torch_version())[:2]))
    if version and version < (2, 13):
        # before 2.13, every torchrun on one node used port 29500, so two runs at once collided
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["PET_MASTER_PORT"] = str(probe.getsockname()[1])
    return env


def _python_folder() -> str:
    """Return a folder whose `python`, `python3` and `torchrun` belong to this interpreter."""
    bin_folder = Path(sys.executable).parent
    if (bin_folder / "python").exists() and (bin_folder / "torchrun").exists():
        return str(bin_folder)
    own = f"{os.getuid()}-{uuid.uuid5(uuid.NAMESPACE_URL, sys.executable).hex[:8]}"
    shims = Path(tempfile.gettempdir(), f"ws-python-{own}")
    shims.mkdir(mode=0o700, exist_ok=True)
    starts = {"python": "", "python3": "", "torchrun": "-m torch.distributed.run"}
    for name, start in starts.items():
        text = f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n'
        if not (shims / name).exists() or (shims / name).read_text() != text:
            atomic_write(shims / name, text, 0o755)
    return str(shims)


# --- processes -------------------------------------------------------------------------------


@dataclass
class _ProcessTree:
    """The processes of a run: the descendants of ``root``, its session, and all with its tag.

    The tag is a variable that every descendant inherits. It identifies processes that have left
    the session and whose parent has ended.
    """

    root: int
    tag: str

    def members(self, everyone: set[Process] | None = None) -> list[Process]:
        alive = [p for p in everyone or running_processes() if p.pid != os.getpid()]
        inside, size = {self.root}, 0
        while len(inside) > size:
            size = len(inside)
            inside |= {p.pid for p in alive if p.parent in inside or p.session in inside}
        return [p for p in alive if p.pid in inside or p.variables().get(TAG) == self.tag]

    def leftovers(self) -> list[Process]:
        """Return the processes that still run after the command ended and do not end soon."""
        start = since = time.monotonic()
        before: list[tuple[int, int]] = []
        while members := self.members():
            now, ticks = time.monotonic(), sorted((p.pid, p.ticks) for p in members)
            if ticks != before or any(p.state in "RD" for p in members):
                since, before = now, ticks
            if now - since > IDLE_TIMEOUT or now - start > EXIT_TIMEOUT:
                return members
            time.sleep(0.02)
        return []

    def kill(self, known: list[Process]) -> None:
        """Send SIGKILL to all processes, and repeat until none is left.

        ``known`` lists members that were seen before. Only two searches in a row that find no
        process are accepted as proof, because the variables of a process that has left the
        session cannot be read at every moment.
        """
        deadline = time.monotonic() + 30
        seen, looks = set(known), 0  # looks counts the searches in a row that found no process
        while looks < 2 and time.monotonic() < deadline:
            everyone = running_processes()
            seen.update(self.members(everyone))
            alive = seen & everyone
            looks = 0 if alive else looks + 1
            for process in alive:
                process.send(signal.SIGKILL)
            time.sleep(0.01)

    def stacks(self, stderr: Path) -> list[tuple[str, str]]:
        """Return the Python stack of every rank; without ranks, of every Python process.

        The launcher is stopped first, because it would otherwise end the remaining ranks.
        """
        members = [p for p in self.members() if "python" in p.command.split(" ")[0]]
        ranks = {p: int(rank) for p in members if (rank := p.variables().get("RANK"))}
        # without ranks, or if they are forks, a process without children is a program
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
    """Return the main thread of a faulthandler dump, with the innermost call first."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump)
    threads = [thread for thread in threads if "most recent call first" in thread]
    if not threads:
        return "(no Python stack: the process does not react to SIGABRT or is not Python)"
    program = [t for t in threads if "in <module>" in t] or threads
    lines = [line for line in program[-1].splitlines() if line.startswith("  ")]
    return "\n".join(lines[:30])


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``done`` returns True, but at most ``seconds``; return its last result."""
    deadline, pause = time.monotonic() + seconds, 0.005
    while not (so := done()) and time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    return so


# --- running ---------------------------------------------------------------------------------


def run(
    command: str,
    folder: Path,
    *,
    limit: float,
    device: str = "cpu",
    warm: Launcher | None = None,
) -> Result:
    """Run ``command`` in a folder of `empty_folder`, for at most ``limit`` seconds.

    ``warm`` is the launcher that starts it; it must accept the command. Without a launcher, the
    command runs under bash, exactly as it is written.
    """
    tag = uuid.uuid4().hex
    env = environment(folder, device) | {TAG: tag}
    out, err = folder.parent / "stdout", folder.parent / "stderr"
    out.write_bytes(b"")
    err.write_bytes(b"")
    tree, stacks, leftovers = None, [], []
    try:
        with host_checks.defer_signals():
            root, poll = (warm.start if warm else _start_in_bash)(
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


def as_in_a_terminal() -> None:
    """Let SIGINT and SIGHUP end the process that is about to start, as they do in a terminal.

    A shell lets background jobs ignore SIGINT, and `nohup` lets its command ignore SIGHUP.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _start_in_bash(
    command: str, folder: Path, env: dict[str, str], out: Path, err: Path
) -> tuple[int, Callable[[], int | None]]:
    """Start a command under bash.

    Return its process ID and a function that polls its exit status.
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
            preexec_fn=as_in_a_terminal,
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


def explain(result: Result, renamed: dict[str, str] | None = None) -> str:
    """Return why a command failed: the rank, its status and its last lines of output.

    ``renamed`` maps paths of the run's folder to paths in the book.
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
    for seen, real in (renamed or {}).items():
        text = text.replace(seen, real)
    return text


_NOISE = re.compile(
    r"^(\*{5,}|={5,}|-{5,}|[EWI]\d{4} |Setting OMP_NUM_THREADS|\[[EWI]\d{4})|^\s*$"
)


def _program_lines(stderr: str) -> list[str]:
    """Return the lines of stderr without the messages that torchrun adds."""
    lines = stderr.splitlines()
    cut = next((n for n, line in enumerate(lines) if "ChildFailedError" in line), None)
    if cut is not None:
        of_torchrun = [n for n in range(cut) if lines[n].startswith("Traceback (most recent")]
        lines = lines[: of_torchrun[-1] if of_torchrun else cut]
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
        return ", ".join(f"{names.count(kind)} × {kind}" for kind in sorted(set(names)))
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
    """Return the names of the CUDA devices that torch sees, read by a separate process."""
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        return []
    code = "import torch.cuda as c; print(*map(c.get_device_name, range(c.device_count())), "
    code += r"sep='\n')"
    listing = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return list(filter(None, listing.stdout.splitlines()))
