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
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path

KEPT_VARIABLES = re.compile(
    r"^(HOME|USER|LOGNAME|SHELL|LANG|LC_\w+|TERM|TZ|LD_LIBRARY_PATH|CUDA_HOME|CUDA_PATH|"
    r"NVIDIA_\w+|XDG_\w+|SSL_CERT_\w+)$"
)
TAG = "WORLD_SIZE_RUN"
LONGEST_OUTPUT = 1 << 20  # bytes kept of stdout and of stderr
GRACE = 2.0  # seconds that a run's helpers have to end after the command has


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


@contextlib.contextmanager
def empty_folder() -> Iterator[Path]:
    """A folder of its own for one run, gone afterwards whatever happened in it."""
    folder = Path(tempfile.mkdtemp(prefix="ws-"))
    try:
        (folder / "run").mkdir()
        (folder / "tmp").mkdir()
        yield folder / "run"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(folder: Path, device: str) -> dict[str, str]:
    """The variables of a run: what a reader's shell has, and this Python first on the path.

    ``device`` "cpu" hides the machine's GPUs.
    """
    env = {key: value for key, value in os.environ.items() if KEPT_VARIABLES.match(key)}
    env.setdefault("LANG", "C.UTF-8")
    env["PATH"] = os.pathsep.join([*_python_folders(), os.environ.get("PATH", os.defpath)])
    env["TMPDIR"] = str(folder.parent / "tmp")
    env["PYTHONFAULTHANDLER"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    # torch.compile would compile its headers first, to use them once: the folder is removed
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    env["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # nor compile a test of the processor's vectors first
    # with PYTHON=python3 the packages may lie in a folder named by PYTHONPATH; ours do not
    outside = [
        entry
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry and not (Path(entry) / "book" / "runner.py").exists()
    ]
    if outside:
        env["PYTHONPATH"] = os.pathsep.join(outside)
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif "CUDA_VISIBLE_DEVICES" in os.environ:
        env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    version = tuple(map(int, re.findall(r"\d+", torch_version())[:2]))
    if version and version < (2, 13):
        # until 2.13, every torchrun of one node took port 29500: two runs at once collided
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            env["PET_MASTER_PORT"] = str(probe.getsockname()[1])
    return env


@lru_cache(maxsize=1)
def torch_version() -> str:
    """The version of torch without its build suffix, read without importing it."""
    try:
        return metadata.version("torch").split("+")[0]
    except metadata.PackageNotFoundError:
        return "none"


def _python_folders() -> list[str]:
    """Where `python`, `python3` and `torchrun` are those of the interpreter that runs us."""
    beside = Path(sys.executable).parent
    if (beside / "python").exists() and (beside / "torchrun").exists():
        return [str(beside)]
    shims = (
        Path(tempfile.gettempdir())
        / f"ws-python-{os.getuid()}-{uuid.uuid5(uuid.NAMESPACE_URL, sys.executable).hex[:8]}"
    )
    shims.mkdir(mode=0o700, exist_ok=True)
    for name, start in (
        ("python", ""),
        ("python3", ""),
        ("torchrun", "-m torch.distributed.run"),
    ):
        text = f'#!/bin/sh\nexec "{sys.executable}" {start} "$@"\n'
        shim = shims / name
        if not shim.exists() or shim.read_text() != text:
            partial = shims / f".{name}.{os.getpid()}"
            partial.write_text(text)
            partial.chmod(0o755)
            partial.replace(shim)
    return [str(shims)]


# --- processes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A live process, as far as a run cares."""

    pid: int
    parent: int
    session: int
    state: str
    command: str


def _processes() -> list[Process]:
    """Every live process of this machine that can be seen (Linux: /proc; elsewhere: ps)."""
    found = []
    if Path("/proc/self/stat").exists():
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
                command = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            state, parent, _, session, *_ = stat.rsplit(")", 1)[1].split()
            text = command.replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(Process(int(entry), int(parent), int(session), state, text))
    else:
        listing = subprocess.run(
            ["ps", "-A", "-o", "pid=,ppid=,sess=,state=,command="],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        for line in listing.splitlines():
            pid, parent, session, state, *command = line.split(None, 4)
            session = session if session.isdigit() else "0"
            found.append(
                Process(int(pid), int(parent), int(session), state[0], " ".join(command))
            )
    return found


def _variables(pid: int) -> dict[str, str]:
    """The environment a process started with; empty where it cannot be read."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {
        key.decode(errors="replace"): value.decode(errors="replace") for key, _, value in pairs
    }


def _members(root: int, tag: str, everyone: list[Process] | None = None) -> list[Process]:
    """The processes of a run: children of ``root``, its session, and whoever carries its tag.

    The tag is a variable that every descendant inherits: it finds those that have left the
    session and whose parent has died.
    """
    everyone = _processes() if everyone is None else everyone
    alive = [p for p in everyone if p.state != "Z" and p.pid != os.getpid()]
    inside = {root}
    grew = True
    while grew:
        more = {p.pid for p in alive if p.parent in inside or p.session in inside} - inside
        inside |= more
        grew = bool(more)
    return [p for p in alive if p.pid in inside or _variables(p.pid).get(TAG) == tag]


def _kill(root: int, tag: str, known: list[Process]) -> None:
    """Kill every process of a run, with the signal that nobody can ignore, until all are gone.

    ``known`` are members seen before. One look that finds none is not believed: the variables
    of a process that has left the session cannot be read at every moment.
    """
    deadline = time.monotonic() + 30
    seen = {(p.pid, p.session, p.command) for p in known}
    looks = 0  # that found none, in a row
    while looks < 2 and time.monotonic() < deadline:
        everyone = _processes()
        seen |= {(p.pid, p.session, p.command) for p in _members(root, tag, everyone)}
        alive = [
            p.pid for p in everyone if p.state != "Z" and (p.pid, p.session, p.command) in seen
        ]
        looks = 0 if alive else looks + 1
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _stacks(root: int, tag: str, stderr: Path) -> list[tuple[str, str]]:
    """The Python stack of every rank of a run (of every Python process, where none is a rank).

    The launcher is stopped first, so that it does not tear down the ranks still to be asked.
    """
    members = [p for p in _members(root, tag) if "python" in p.command.split(" ")[0]]
    ranks = {p.pid: _variables(p.pid).get("RANK") for p in members}
    asked = [p for p in members if ranks[p.pid] is not None]
    # the launcher of a warm run, and a program without ranks, are known by having no child
    parents = {p.parent for p in members}
    asked = asked or [p for p in members if p.pid not in parents]
    for process in members:
        if process not in asked:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGSTOP)
    stacks = []
    asked.sort(key=lambda p: (int(ranks[p.pid] or 0), p.pid))
    for number, process in enumerate(asked):
        start = stderr.stat().st_size
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGABRT)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and any(
            p.pid == process.pid and p.state != "Z" for p in _processes()
        ):
            time.sleep(0.02)
        with stderr.open("rb") as file:
            file.seek(start)
            dump = file.read().decode(errors="replace")
        if ranks[process.pid] is not None:
            name = f"rank {ranks[process.pid]}"
        elif len(asked) > 1:
            name = f"process {number} of {len(asked)}"
        else:
            name = "the process"
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


# --- running ---------------------------------------------------------------------------------


def run(command: str, folder: Path, *, limit: float, device: str = "cpu", warm=None) -> Result:
    """Run ``command`` in ``folder`` and wait for it, ``limit`` seconds at most.

    ``warm`` is a `book.warm.Launcher` to start it (one that takes it), or None: as typed.
    """
    tag = uuid.uuid4().hex
    env = environment(folder, device) | {TAG: tag}
    with tempfile.TemporaryDirectory(prefix="ws-out-") as outputs:
        out, err = Path(outputs, "stdout"), Path(outputs, "stderr")
        root, poll = None, None
        if warm is not None:
            root, poll = warm.start(command, folder, env, out, err)
        else:
            with out.open("wb") as out_file, err.open("wb") as err_file:
                process = subprocess.Popen(
                    ["bash", "-c", command],
                    cwd=folder,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=out_file,
                    stderr=err_file,
                    start_new_session=True,
                )
            root, poll = process.pid, process.poll
        timed_out, stacks, leftovers = False, [], []
        start = time.monotonic()
        try:
            pause = 0.005
            while (status := poll()) is None:
                if time.monotonic() - start > limit:
                    timed_out = True
                    stacks = _stacks(root, tag, err)
                    break
                time.sleep(pause)
                pause = min(pause * 1.5, 0.05)
            seconds = time.monotonic() - start
            leftovers = [] if timed_out else _leftovers(root, tag)
        finally:
            _kill(root, tag, leftovers)
        if timed_out:
            deadline = time.monotonic() + 5
            while poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
            status = -signal.SIGKILL
        return Result(
            command,
            status,
            _read(out),
            _read(err),
            seconds,
            timed_out,
            stacks,
            [f"{p.command[:200]} (process {p.pid})" for p in leftovers],
        )


def _leftovers(root: int, tag: str) -> list[Process]:
    """What still runs a moment after the command has ended."""
    deadline = time.monotonic() + GRACE
    while members := _members(root, tag):
        if time.monotonic() > deadline:
            return members
        time.sleep(0.02)
    return []


def _read(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        text = file.read(LONGEST_OUTPUT).decode("utf-8", errors="replace")
    return text if size <= LONGEST_OUTPUT else f"{text}\n… cut: {size} bytes in all"


# --- saying what happened --------------------------------------------------------------------


def explain(result: Result, renamed: dict[str, str] | None = None) -> str:
    """Why a command failed: which rank, where, and the last lines it said.

    ``renamed`` maps a path as the run saw it to the path in the book.
    """
    parts = []
    if result.timed_out:
        parts.append(f"it was still running after {result.seconds:.0f} s; killed")
        for name, stack in result.stacks:
            parts.append(f"{name} was here (innermost call first):\n{stack}")
    else:
        root = re.search(
            r"Root Cause.*?\n.*?rank\s*: (\d+) \(local_rank: \d+\)\s*\n\s*exitcode\s*: (-?\d+)",
            result.stderr,
            re.DOTALL,
        )
        if root:
            how = (
                f"was killed by {signal.Signals(-int(root[2])).name}"
                if int(root[2]) < 0
                else f"left with status {root[2]}"
            )
            own = [
                line
                for line in result.stderr.splitlines()
                if line.startswith(f"[rank{root[1]}]:") and line.strip() != f"[rank{root[1]}]:"
            ]
            parts.append(f"rank {root[1]} {how}")
            said = own or _spoken(result.stderr)
            if said:
                parts.append(
                    "its last lines:\n" + "\n".join(f"  {line}" for line in said[-12:])
                )
        elif (said := _spoken(result.stderr)) or (said := result.stdout.splitlines()):
            parts.append("its last lines:\n" + "\n".join(f"  {line}" for line in said[-12:]))
        else:
            parts.append("it said nothing")
    text = re.sub(r'File "[^"]*/site-packages/', 'File "', "\n".join(parts))
    for seen, real in (renamed or {}).items():
        text = text.replace(seen, real)
    return text


def _spoken(stderr: str) -> list[str]:
    """stderr without what torchrun itself says around it."""
    noise = re.compile(
        r"^(\*{5,}|={5,}|-{5,}|[EWI]\d{4} |Setting OMP_NUM_THREADS|\[[EWI]\d{4})|^\s*$"
    )
    lines = stderr.splitlines()
    cut = next((n for n, line in enumerate(lines) if "ChildFailedError" in line), None)
    if cut is not None:
        head = [
            n
            for n, line in enumerate(lines[:cut])
            if line.startswith("Traceback (most recent call last)")
        ]
        lines = lines[: head[-1] if head else cut]
    return [line for line in lines if not noise.match(line)]


def describe_device(device: str) -> str:
    """The machine a run was on, as a page names it: `2 CPU cores (…)` or `1 × NVIDIA H200`."""
    if device == "cuda":
        names = gpu_names()
        kinds = sorted(set(names))
        return ", ".join(f"{names.count(kind)} × {kind}" for kind in kinds)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} CPU cores ({_cpu_name()})"


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                name = re.sub(r"\((R|TM)\)|\bCPU\b|\bProcessor\b|@.*", "", value)
                name = " ".join(name.replace(",", "").split())
                return name if name.lower() not in {"", "unknown"} else platform.machine()
    return platform.machine()


def gpu_names() -> list[str]:
    """The names of the CUDA devices that torch sees, asked in a process of its own."""
    global _GPUS
    if _GPUS is None:
        _GPUS = []
        if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
            asked = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import torch.cuda as c; "
                    "[print(c.get_device_name(i)) for i in range(c.device_count())]",
                ],
                capture_output=True,
                text=True,
                check=False,
            )
            _GPUS = asked.stdout.splitlines()
    return _GPUS


_GPUS: list[str] | None = None
