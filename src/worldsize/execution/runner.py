"""Runner: one command, as a reader would type it, with a time limit, leaving nothing behind.

The command runs under bash in a folder of its own with the variables a reader would have. When
the time limit is exceeded, every rank is asked for its Python stack (``faulthandler`` answers
SIGABRT, which needs no privileges and no other tool) and then the whole tree is killed. After
any run, whatever it left running is found, killed and reported.
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

from graders import host_checks
from worldsize.execution.prefork import TAG, Launcher
from worldsize.model import atomic_write

INHERITED_VARIABLES = re.compile(
    r"^(HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TZ|LD_LIBRARY_PATH|CUDA_HOME|CUDA_PATH|"
    r"NVIDIA_\w+|XDG_\w+|SSL_CERT_\w+|"
    r"ATEN_CPU_CAPABILITY|ONEDNN_MAX_CPU_ISA)$"  # the newest instructions that torch may use
)
MAX_OUTPUT_BYTES = 1 << 20  # bytes kept of stdout and of stderr
IDLE_TIMEOUT = 2.0  # seconds asleep after which a helper has outlived its command
EXIT_TIMEOUT = 30.0  # seconds that a process may take to end on a busy machine


@dataclass
class Result:
    """What came of a command."""

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
        """What to say of the processes that outlived the command."""
        return "\n  ".join(["left processes running (killed now):", *self.leftovers])

    def line_in(self, file: str) -> int | None:
        """The line of ``file`` where the last traceback, or a rank that hangs, was."""
        text = "\n".join(stack for _, stack in self.stacks) or self.stderr
        lines = re.findall(rf'File "[^"]*{re.escape(file)}", line (\d+)', text)
        return int(lines[0] if self.stacks else lines[-1]) if lines else None


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder of its own for one run, gone afterwards whatever happened in it."""
    with host_checks.defer_signals():
        around = tempfile.TemporaryDirectory(prefix="ws-", ignore_cleanup_errors=True)
    try:
        for name in ("run", "tmp"):
            Path(around.name, name).mkdir()
        yield Path(around.name, "run")
    finally:
        with host_checks.defer_signals():  # what is interrupted here would not be tried again
            around.cleanup()


def environment(folder: Path, device: str) -> dict[str, str]:
    """The variables of a run: what a reader's shell has, and this Python first on the path.

    ``device`` "cpu" hides the machine's GPUs.
    """
    own = os.environ
    env = {key: value for key, value in own.items() if INHERITED_VARIABLES.match(key)} | {
        "LANG": own.get("LANG", "C.UTF-8"),
        "PATH": os.pathsep.join([_python_folder(), own.get("PATH", os.defpath)]),
        "TMPDIR": str(folder.parent / "tmp"),
        # torch waits for ever for the lock that a killed build left in the folder all share
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "tmp"),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # torch.compile would compile its headers first, to use them once: the folder is
        # removed (warm, all share one: `Launcher.start_words`); nor does it compile a test of
        # the processor's vectors
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
    }
    # with PYTHON=python3 the packages may lie in a folder named by PYTHONPATH; ours do not
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
        env["PET_LOCAL_ADDR"] = "localhost"  # torchrun would name a host that nobody finds
    version = tuple(map(int, re.findall(r"\d+", torch_version())[:2]))
    if version and version < (2, 13):
        # until 2.13, every torchrun of one node took port 29500: two runs at once collided
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["PET_MASTER_PORT"] = str(probe.getsockname()[1])
    return env


def _python_folder() -> str:
    """Where `python`, `python3` and `torchrun` are those of the interpreter that runs us."""
    beside = Path(sys.executable).parent
    if (beside / "python").exists() and (beside / "torchrun").exists():
        return str(beside)
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


@dataclass(frozen=True)
class Process:
    """A live process, as far as a run cares."""

    pid: int
    parent: int = field(compare=False)  # it changes when the parent dies
    session: int
    command: str
    state: str = field(default="S", compare=False)  # as /proc and ps have it
    ticks: int = field(default=0, compare=False)  # of processor time
    waited: int = field(default=0, compare=False)  # ticks of its children that have ended

    def variables(self) -> dict[str, str]:
        """The environment it started with; empty where that cannot be read."""
        try:
            text = Path(f"/proc/{self.pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            return {}
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)


def _processes(dead: str = "ZX") -> set[Process]:
    """Every live process of this machine that can be seen (Linux: /proc; elsewhere: ps).

    ``dead``: the states of those that are left out; none with ``""``.
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
    """A process by its entry in /proc; None where it is gone."""
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


def processor_seconds() -> float:
    """Of this process and of all that it has started, whether they still run or have ended."""
    # one that has ended counts, too, until somebody waits: else it would count again then
    everyone, inside, size = _processes(dead=""), {os.getpid()}, 0
    while len(inside) > size:
        size = len(inside)
        inside |= {p.pid for p in everyone if p.parent in inside}
    others = (p for p in everyone if p.pid in inside and p.pid != os.getpid())
    ticks = sum(p.ticks + p.waited for p in others)
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def end_workers() -> None:
    """Ask the processes that this one has started in its own session to end."""
    for process in _processes():
        if process.parent == os.getpid() and process.session == os.getsid(0):
            process.send(signal.SIGTERM)


@dataclass
class _Tree:
    """The processes of a run: children of ``root``, its session, and whoever carries its tag.

    The tag is a variable that every descendant inherits: it finds those that have left the
    session and whose parent has died.
    """

    root: int
    tag: str

    def members(self, everyone: set[Process] | None = None) -> list[Process]:
        alive = [p for p in everyone or _processes() if p.pid != os.getpid()]
        inside, size = {self.root}, 0
        while len(inside) > size:
            size = len(inside)
            inside |= {p.pid for p in alive if p.parent in inside or p.session in inside}
        return [p for p in alive if p.pid in inside or p.variables().get(TAG) == self.tag]

    def leftovers(self) -> list[Process]:
        """What still runs after the command has ended, and is not about to end itself."""
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
        """Kill every process, with the signal that nobody can ignore, until all are gone.

        ``known`` are members seen before. One look that finds none is not believed: the
        variables of a process that has left the session cannot be read at every moment.
        """
        deadline = time.monotonic() + 30
        seen, looks = set(known), 0  # looks that found none, in a row
        while looks < 2 and time.monotonic() < deadline:
            everyone = _processes()
            seen.update(self.members(everyone))
            alive = seen & everyone
            looks = 0 if alive else looks + 1
            for process in alive:
                process.send(signal.SIGKILL)
            time.sleep(0.01)

    def stacks(self, stderr: Path) -> list[tuple[str, str]]:
        """The Python stack of every rank (of every Python process, where none is a rank).

        The launcher is stopped first, so that it does not tear down the ranks still to be
        asked.
        """
        members = [p for p in self.members() if "python" in p.command.split(" ")[0]]
        ranks = {p: int(rank) for p in members if (rank := p.variables().get("RANK"))}
        # the launcher of a warm run, and a program without ranks, are known by having no child
        parents = {p.parent for p in members}
        asked = list(ranks) or [p for p in members if p.pid not in parents]
        for process in set(members) - set(asked):
            process.send(signal.SIGSTOP)
        stacks = []
        for number, process in enumerate(sorted(asked, key=lambda p: (ranks.get(p), p.pid))):
            start = stderr.stat().st_size
            process.send(signal.SIGABRT)
            _until(lambda process=process: process not in _processes(), EXIT_TIMEOUT)
            dump = stderr.read_bytes()[start:].decode(errors="replace")
            name = f"process {number} of {len(asked)}" if len(asked) > 1 else "the process"
            name = f"rank {ranks[process]}" if ranks else name
            stacks.append((name, _readable_stack(dump)))
        return stacks


def _readable_stack(dump: str) -> str:
    """The part of a faulthandler dump a reader needs: the main thread, innermost call first."""
    threads = re.split(r"\n(?=(?:Current thread|Thread) 0x)", dump)
    threads = [thread for thread in threads if "most recent call first" in thread]
    if not threads:
        return "(no Python stack: the process does not answer, or is not Python)"
    program = [t for t in threads if "in <module>" in t] or threads
    lines = [line for line in program[-1].splitlines() if line.startswith("  ")]
    return "\n".join(lines[:30])


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Wait until something is so, ``seconds`` at most; return whether it is."""
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
    """Run ``command`` in a folder made by `empty_folder`; wait ``limit`` seconds at most.

    ``warm`` starts it where it is given (and must take it); otherwise it runs as typed.
    """
    tag = uuid.uuid4().hex
    env = environment(folder, device) | {TAG: tag}
    out, err = folder.parent / "stdout", folder.parent / "stderr"
    out.write_bytes(b"")
    err.write_bytes(b"")
    tree, stacks, leftovers = None, [], []
    try:
        with host_checks.defer_signals():
            root, poll = (warm.start if warm else _as_typed)(command, folder, env, out, err)
            tree, start = _Tree(root, tag), time.monotonic()
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
    _until(lambda: poll() is not None, EXIT_TIMEOUT)  # what was killed is to be waited for
    told = [f"{p.command[:200]} (process {p.pid})" for p in leftovers]
    return Result(command, status, _read(out), _read(err), seconds, not ended, stacks, told)


def as_in_a_terminal() -> None:
    """Let Ctrl-C and a hang-up end the process that is about to start, as they do there.

    What a shell starts before `&` ignores the first, and what `nohup` starts the second.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _as_typed(
    command: str, folder: Path, env: dict[str, str], out: Path, err: Path
) -> tuple[int, Callable[[], int | None]]:
    """Start a command under bash; return its process number and what asks for its status."""
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
    return text if size <= MAX_OUTPUT_BYTES else f"{text}\n… cut: {size} bytes in all"


# --- saying what happened --------------------------------------------------------------------


_FAILED_RANK = re.compile(
    r"Root Cause.*?\n.*?rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)",
    re.DOTALL,
)


def explain(result: Result, renamed: dict[str, str] | None = None) -> str:
    """Why a command failed: which rank, where, and the last lines it said.

    ``renamed`` maps a path as the run saw it to the path in the book.
    """
    parts, said = [], _spoken(result.stderr)
    if result.timed_out:
        parts.append(f"it was still running after {result.seconds:.0f} s; killed")
        for name, stack in result.stacks:
            parts.append(f"{name} was here (innermost call first):\n{stack}")
        said = []
    elif failed := _FAILED_RANK.search(result.stderr):
        rank, status = f"rank{failed[1]}", int(failed[2])
        killed = status < 0 and f"was killed by {signal.Signals(-status).name}"
        parts.append(f"rank {failed[1]} {killed or f'left with status {status}'}")
        lines = result.stderr.splitlines()
        said = [li for li in lines if re.match(rf"\[{rank}\]:.*\S", li)] or said
    else:
        said = said or result.stdout.splitlines()
    if said:
        parts.append("\n  ".join(["its last lines:", *said[-12:]]))
    text = "\n".join(parts) or "it said nothing"
    text = re.sub(r'File "[^"]*/site-packages/', 'File "', text)
    for seen, real in (renamed or {}).items():
        text = text.replace(seen, real)
    return text


_NOISE = re.compile(
    r"^(\*{5,}|={5,}|-{5,}|[EWI]\d{4} |Setting OMP_NUM_THREADS|\[[EWI]\d{4})|^\s*$"
)


def _spoken(stderr: str) -> list[str]:
    """stderr without what torchrun itself says around it."""
    lines = stderr.splitlines()
    cut = next((n for n, line in enumerate(lines) if "ChildFailedError" in line), None)
    if cut is not None:
        of_torchrun = [n for n in range(cut) if lines[n].startswith("Traceback (most recent")]
        lines = lines[: of_torchrun[-1] if of_torchrun else cut]
    return [line for line in lines if not _NOISE.match(line)]


# --- the machine -----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def torch_version() -> str:
    """The version of torch without its build suffix, read without importing it."""
    try:
        return metadata.version("torch").split("+")[0]
    except metadata.PackageNotFoundError:
        return "none"


def describe_device(device: str) -> str:
    """The machine a run was on, as a page names it: `2 CPU cores (…)` or `1 × NVIDIA H200`."""
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
    """The names of the CUDA devices that torch sees, asked in a process of its own."""
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        return []
    code = "import torch.cuda as c; print(*map(c.get_device_name, range(c.device_count())), "
    code += r"sep='\n')"
    asked = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return list(filter(None, asked.stdout.splitlines()))
