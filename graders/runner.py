"""Runner: executes one step of a lab in new processes, and judges the result of each rank.

A step is judged by two generators, which `graders.dsl` helps to write. The first one runs on
every rank of a new group of processes. It calls the learner's function, yields a line for each
correct result, and raises `Wrong` for the first mistake. The second one runs in the checker. It
finds mistakes that only all ranks together show, from the facts that the ranks reported and
from every collective that they called.

- Every group of processes is new, so nothing remains from an earlier step or world size. On
  Linux the processes are forked from a process that has imported torch and never runs the
  learner's code. A group of three ranks then starts in a fraction of a second.
- Ranks get the same environment variables as under torchrun, and always run on the CPU.
- The collectives of `dist` are recorded when they are called. An asynchronous all-reduce or
  broadcast delivers its result only in `wait()`, which is the latest moment that PyTorch
  allows. If the learner's code does not wait, the result is therefore wrong in every run, and
  not only rarely.
- A group hangs if all its ranks sleep and use no processor time for `PATIENCE` seconds. On a
  machine under load, a rank that waits for a processor does not sleep, so it does not count as
  hanging. A second limit ends endless loops. It counts the processor time of the busiest rank,
  not the time on the clock, so a step on a busy machine takes longer but is still judged.
- After a group, all its processes are killed, also those that detached themselves. (On Linux,
  the checker becomes the parent of such orphans.)
- `graders.sandbox` limits how much of the machine the ranks can use or change.

A *trial* is a step that decides itself what to run in its folder. It can run several groups one
after the other, kill some of their ranks on purpose, and run complete commands as a user types
them.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

from graders import host_checks, sandbox, scores

PATIENCE = 3.0  # seconds without any processor time, all ranks asleep: a hang
LOOK = 0.5  # seconds between two looks at them, at most
OWN = 0.1  # fraction of the limit that a rank may use itself; a compiler may use all of it
LEAST_OWN = 1.0  # processor seconds that a rank may use itself even if the limit is small
GRACE = 1.5  # seconds asleep that the other ranks get after one has failed
LONGEST_GRACE = 15.0  # processor seconds that they get then while they compute
KEPT_OUTPUT = 4000  # characters of each rank's output
KEPT_OF_COMMAND = 16 << 20  # bytes of what a command prints, its last
LINUX = sys.platform == "linux"


# --- what a judge sees --------------------------------------------------------------------


class Wrong(Exception):
    """A finding: what is wrong, and the name of the hint for it."""

    def __init__(self, what: str, hint: str):
        super().__init__(what)
        self.what, self.hint = what, hint


@dataclass
class Call:
    """One collective, as a rank called it."""

    name: str
    numel: int
    asynchronous: bool
    phase: str
    detail: str = ""
    sent: float = 0  # bytes that leave this rank, if rings do the collectives
    members: tuple[int, ...] = ()  # the ranks of its group, if not all
    returned: bool = False  # the call came back (if asynchronous: its result was delivered)
    waited: bool = False  # this rank called wait() on an asynchronous call
    touched: bool = False  # the tensor was changed between the launch and the wait


@dataclass
class Rank:
    """What one rank reported, and how it ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    end: str = "waiting"  # or "done", "wrong", "error", "left"
    rights: list[str] = field(default_factory=list)  # what its judge found to be right
    error: dict[str, Any] = field(default_factory=dict)  # of "wrong": what, hint
    status: int | None = None
    output: str = ""
    printed: int = 0  # bytes
    events: int = 0
    unread: bytes = b""  # the beginning of an event
    stack: list[tuple[str, int]] = field(default_factory=list)  # file, line: innermost first
    line: int | None = None  # the line of the learner's file that it was in when it was stopped
    busy: bool = False  # it used processor time until it was stopped at the limit
    deaf: bool = False  # the pipe of its events is closed


@dataclass
class Group:
    """All ranks of one run of one step."""

    world: int
    ranks: list[Rank]
    stopped: str = ""  # why the runner had to end it: "asleep", "limit", "failure", "excess"
    excess: Wrong | None = None  # what it took too much of

    def facts(self, name: str) -> list[Any]:
        """What each rank reported under this name, in rank order."""
        return [rank.facts.get(name) for rank in self.ranks]


class Blank(Exception):
    """The learner has not written this yet."""


Judge = Iterator[str]  # yields what is right, raises Wrong


@dataclass
class Step:
    """One step of a lab. `graders.dsl.Lab` makes it of the functions that judge it.

    `probe(theirs, ours, lesson)` runs on every rank, with the learner's module and the finished
    one. `together(group)` runs afterwards in the checker. Either may be missing, and both are
    generators that yield what is right and raise `Wrong`.
    """

    number: int
    title: str
    proves: str
    uses: tuple[str, ...]  # the names that the learner must define
    world_sizes: tuple[int, ...] = (2, 3, 1)
    needs: tuple[int, ...] = ()  # the steps that must pass before this one can be judged
    joins: bool = True  # the group is initialised before the probe
    symmetric: bool = True  # all ranks must call the same collectives
    crashes: dict[str, str] = field(default_factory=dict)  # an error's text matches: the hint
    compiles: bool = False  # the step uses torch.compile: a rank may use the whole limit
    order_hint: str = "order"  # for ranks which call collectives in different orders
    probe: Callable[..., Judge | None] | None = None
    together: Callable[[Group], Judge | None] | None = None
    stuck: Callable[[Group], None] | None = None  # says why ranks wait that are not symmetric


@dataclass
class IntegrationStep(Step):
    """A step whose `trial(bench)` runs groups and commands on a `Workspace`, and judges them.

    A group's ranks run `probe`, and find what the trial gave them in `lesson.scene`. A trial
    that has commands only needs no probe.
    """

    trial: Callable[["Workspace"], Judge | None] | None = None


@dataclass
class CommandResult:
    """What a command came to."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    stopped: str = ""  # "asleep" or "limit" if it had to be ended


class Workspace:
    """Where a trial runs things: one folder, which lasts from the first run to the verdict."""

    def __init__(self, runner: "Runner", step: Step, path: Path, folder: Path):
        self.runner, self.step, self.path, self.folder = runner, step, path, folder
        self.limit, self._said = runner.limit, ""
        self.scores: dict[str, float] = {}  # beside those of its groups

    @property
    def gpus(self) -> bool:
        """Whether commands may use the GPUs of this machine."""
        return bool(self.runner.visible)

    def group(self, world: int, dies: bool = False, **scene: Any) -> Group:
        """Run the probe on a new group of ranks, each of which sees `scene`.

        Raises `Blank` or `Wrong` unless all came to their end; with `dies`, the group is
        returned whatever became of it.
        """
        group = self.runner.run(self.step, self.path, world, self.folder, scene)
        said = "".join(rank.output for rank in group.ranks)
        self._said = said or self._said
        if not dies or group.excess is not None:
            list(judge(group, self.step))
        return group

    def run(
        self,
        *command: str | Path,
        limit: float | None = None,
        patience: float | None = None,
        watch: Callable[[dict[int, int]], None] | None = None,
        **variables: str,
    ) -> CommandResult:
        """Run a command in the folder, with its keeping: nothing outlives it, a hang ends.

        `python` and `torchrun` are those of this Python. `watch(ranks)` is called twenty times
        a second with the process of each rank. `patience` is how long all may sleep; None is
        for ever. What hung leaves its Python stacks on stderr.
        """
        words = list(map(str, command))
        starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
        if words[0] in starts:
            words = [sys.executable, *starts[words[0]], *words[1:]]
        env = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        env |= {"PYTHONUTF8": "1"} | variables
        if not host_checks.hostname_resolves():
            env.setdefault("PET_LOCAL_ADDR", "localhost")  # not a host that nobody finds
        for name, value in self.runner.visible.items():
            env.pop(name, None)
            env |= {name: value} if value is not None else {}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            start = time.monotonic()
            process = subprocess.Popen(
                words, cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=out,
                stderr=err, start_new_session=True,
                preexec_fn=functools.partial(
                    sandbox.set_rlimits, memory=not self.runner.visible
                ),
            )  # fmt: skip
            try:
                stopped = self._wait(process, limit or self.limit, patience, watch)
            finally:
                self.runner.end_all([], spare=self.runner.stores.keeper, also=process)
            texts = []
            for file in (out, err):
                file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT_OF_COMMAND))
                texts.append(file.read().decode(errors="replace"))
        self._said = "".join(texts)
        return CommandResult(process.returncode, *texts, time.monotonic() - start, stopped)

    def _wait(
        self,
        process: subprocess.Popen,
        limit: float,
        patience: float | None,
        watch: Callable[[dict[int, int]], None] | None,
    ) -> str:
        """Wait for a command; say why it was ended, if it was."""
        clock, stopped = Clock(self.folder), ""
        while process.poll() is None and not stopped:
            time.sleep(0.05)
            pids = [process.pid, *_descendants(process.pid)]
            if watch is not None:
                watch(_ranks(pids))
            clock.look(pids)
            if clock.excess is not None:
                raise clock.excess
            if clock.asleep > (math.inf if patience is None else patience):
                stopped = "asleep"
            if clock.over(limit):
                stopped = "limit"
        if stopped:
            asked = _ranks(pids).values() or [process.pid]
            for pid in asked:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGABRT)  # faulthandler prints the stack
            clock = Clock()
            while any(map(_lives, asked)) and clock.asleep < GRACE and not clock.over(GRACE):
                time.sleep(0.05)
                clock.look(list(asked))
        return stopped

    def last_words(self) -> list[str]:
        """The end of what the last group or command printed."""
        return self._said.splitlines()[-20:]


# --- inside a rank ------------------------------------------------------------------------


class Pending:
    """The Work of an asynchronous all-reduce that delivers its result in `wait`."""

    def __init__(self, work: dist.Work, target: torch.Tensor, result: torch.Tensor, tell, call):
        self._work, self._target, self._result, self._tell = work, target, result, tell
        self.call = call
        self._sent = target.detach().clone()

    def _deliver(self) -> None:
        if self._tell is None:
            return
        tell, self._tell = self._tell, None
        tell(touched=not torch.equal(self._target.detach(), self._sent))
        self._target.detach().copy_(self._result)

    def wait(self, *args: Any) -> bool:
        done = self._work.wait(*args)
        self.call.waited = True  # a callback delivers without wait(), and at any time
        self._deliver()
        return done

    def is_completed(self) -> bool:
        if self._work.is_completed():
            self.call.waited = True
            self._deliver()
        return self._tell is None

    def get_future(self) -> torch.futures.Future:
        def deliver(future: torch.futures.Future) -> list[torch.Tensor]:
            future.wait()
            self._deliver()
            return [self._target]

        return self._work.get_future().then(deliver)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


Pending.__name__ = "Work"  # errors of the learner's code show this name


# functions of torch.distributed whose calls are recorded
COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_object", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "scatter", "send", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "all_gather_single", "reduce_scatter_single",
    "all_reduce_coalesced",
]  # fmt: skip
FUNCTIONAL = ("all_reduce", "all_reduce_coalesced", "all_reduce_inplace")


class Lesson:
    """What a probe works with: the learner's module, who this rank is, and where facts go."""

    def __init__(self, rank: int, world: int, send: Callable[[dict], None]):
        self.rank, self.world, self.meetings, self._send = rank, world, 0, send
        self.module: ModuleType | None = None
        self.current_phase = ""
        self.calls: list[Call] = []  # the collectives that this rank has called
        self.inside = False  # whether a recorded function is running
        self.scene: dict[str, Any] = {}  # what a trial tells its ranks

    def fact(self, name: str, value: Any) -> None:
        """Report a fact; a later one of the same name replaces it."""
        self._send({"fact": name, "value": value})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note with each collective called in this context that it was."""
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before

    @functools.cached_property
    def store(self) -> dist.TCPStore:
        """Where the ranks of the group meet."""
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore("127.0.0.1", port, is_master=False)

    def meet(self) -> None:
        """Wait for all ranks, without a collective.

        Who did not come, because it still waits in a call that others did not make, is then
        found before what the step asks next.
        """
        self.meetings += 1
        if self.store.add(f"met {self.meetings}", 1) == self.world:
            self.store.set(f"all met {self.meetings}", "")
        self.store.wait([f"all met {self.meetings}"])

    def record(
        self, name: str, tensor: Any, asynchronous: bool, detail: str = "", n: int = 1,
        members: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Tell the checker of a call, in a group of n, before it is made; return its number.

        `members`: the ranks of the group, unless it is the group of all ranks.
        """
        tensors = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
        if name != "all_reduce_coalesced":  # of other lists, the first tensor says enough
            del tensors[1:]
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        numel = sum(each.numel() for each in tensors)
        sent = scores.sent(name, sum(each.nbytes for each in tensors), n) if tensors else 0
        call = [name, numel, asynchronous, self.current_phase, detail, sent]
        self._send({"call": call, "members": list(members)})
        self.calls.append(Call(*call, members=tuple(members)))
        return len(self.calls) - 1

    def watch_collectives(self) -> None:
        """Record every collective that is called through torch.distributed."""
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._watched(name, getattr(dist, name)))
        # P2POp accepts these functions only
        distributed_c10d.isend, distributed_c10d.irecv = dist.isend, dist.irecv
        for name in FUNCTIONAL:
            by_itself = name != "all_reduce_inplace"
            watched = self._watched(name, getattr(functional, name), by_itself, direct=True)
            setattr(functional, name, watched)
        self._watch_group_all_reduce()

    def _watch_group_all_reduce(self) -> None:
        """Send `group.allreduce(tensor)` through dist.all_reduce, which is recorded."""
        real = dist.ProcessGroup.allreduce

        def allreduce(group: dist.ProcessGroup, tensors: Any, *options: Any) -> Any:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            if self.inside or len(tensors) != 1:
                return real(group, tensors, *options)
            op = getattr(options[0], "reduceOp", options[0]) if options else dist.ReduceOp.SUM
            return dist.all_reduce(tensors[0], op, group, async_op=True)

        dist.ProcessGroup.allreduce = allreduce

    def _watched(
        self, name: str, real: Callable, by_itself: bool = False, direct: bool = False
    ) -> Callable:
        """Return the function with a record of each call.

        `by_itself`: the function returns at once, and its result waits when it is used.
        `direct`: calls that torch makes itself, as a DTensor does, are not recorded.
        """
        takes = _signature(real)
        torchs = os.path.dirname(torch.__file__) + os.sep

        def watched(*args: Any, **kwargs: Any) -> Any:
            if by_itself and self.inside:  # a recorded function calls it
                return real(*args, **kwargs)
            if direct and sys._getframe(1).f_code.co_filename.startswith(torchs):
                return real(*args, **kwargs)
            before, self.inside = self.inside, True
            try:
                return recorded(*args, **kwargs)
            finally:
                self.inside = before

        def recorded(*args: Any, **kwargs: Any) -> Any:
            named = takes.bind_partial(*args, **kwargs).arguments
            tensor, group = next(iter(named.values()), None), named.get("group")
            detail = f"from rank {named.get('src')}" if name == "broadcast" else ""
            asynchronous = by_itself or named.get("async_op") is True
            groups = [group] if isinstance(group, dist.ProcessGroup) else []
            n = dist.get_world_size(*groups) if dist.is_initialized() else 1
            members = dist.get_process_group_ranks(group) if groups and n < self.world else []
            number = self.record(name, tensor, asynchronous, detail, n, members)

            def tell(touched: bool = False) -> None:
                self.calls[number].returned, self.calls[number].touched = True, touched
                self._send({"returned": number, "touched": touched})

            if name in ("all_reduce", "broadcast") and asynchronous and not by_itself:
                result = tensor.detach().clone()
                rest = {key: value for key, value in kwargs.items() if key != "tensor"}
                call = self.calls[number]
                return Pending(real(result, *args[1:], **rest), tensor, result, tell, call)
            value = real(*args, **kwargs)
            if by_itself or not asynchronous:
                tell()
            return value

        watched.__name__ = watched.__qualname__ = name
        return watched


@functools.cache
def _signature(function: Callable) -> inspect.Signature:
    """Return the parameters of a function. The checker caches them before it forks ranks."""
    return inspect.signature(function)


def load(path: str | Path, name: str = "learner") -> ModuleType:
    """Import a file under a name that is not __main__."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(code_of(str(path)), vars(module))
    return module


@functools.cache
def code_of(path: str) -> CodeType:
    """A file, compiled: in the checker once, for all ranks that are forked from it."""
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _raised_in(error: BaseException, path: str) -> bool:
    """Whether an error has gone no further out than through functions of this file."""
    return traceback.extract_tb(error.__traceback__)[0].filename == path


def _describe(error: BaseException, path: str) -> dict[str, Any]:
    """An error: its kind, its first line, and the learner's line it came from."""
    cause = error.__cause__
    if isinstance(cause, StopIteration) and not _raised_in(cause, path):
        error = cause  # a next() of the learner's ended a judge: judges are generators
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            line = frame.lineno
    if isinstance(error, SyntaxError) and error.filename == path:
        line, error = error.lineno, type(error)(error.msg)  # its text would repeat the line
    with contextlib.suppress(Exception):
        text, *more = str(error).strip().splitlines() or [""]
        if more and more[0].strip().startswith("but got"):  # torch goes on in the second line
            text = f"{text} {more[0].strip()}"
        text = text[:300]
        return {"kind": type(error).__name__, "text": text, "line": line}
    return {"kind": type(error).__name__, "text": "", "line": line}


def _serve(lab: str, number: int, path: str, rank: int, world: int, port: int,
           folder: str, events: Any, output: Any, scene: dict[str, Any]) -> None:  # fmt: skip
    """The whole life of a rank: import, probe, report; then sleep until it is killed."""
    os.setsid()
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.chdir(folder)
    sys.argv = [path]
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(scene.get("restart", 0)), GROUP_RANK="0",
        OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="",
    )  # fmt: skip

    sandbox.set_rlimits()

    def send(event: dict) -> None:
        text = json.dumps(event).encode() + b"\n"
        while text:
            text = text[os.write(events.fileno(), text) :]

    # also works while the rank waits in C++, where a handler in Python would not run
    faulthandler.register(signal.SIGUSR1, file=events.fileno(), all_threads=False)
    step = lab_of(lab)[number]
    lesson = Lesson(rank, world, send)
    lesson.scene = scene
    doing = "join"
    try:
        lesson.watch_collectives()
        if step.joins:
            dist.init_process_group("gloo", store=lesson.store, rank=rank, world_size=world)
        doing = "import"
        finished = lab_of(lab).finished  # first: where both make a device, it is that one's
        sandbox.install_audit_hook(path, str(finished.__file__))
        lesson.module = load(path)
        doing = "probe"
        for name in step.uses:
            if not callable(getattr(lesson.module, name, None)):
                raise LookupError(name)
        for right in step.probe(lesson.module, finished, lesson) or ():
            send({"right": right})
        send({"end": "done"})
    except Wrong as wrong:
        send({"end": "wrong", "what": wrong.what, "hint": wrong.hint})
    except BaseException as error:
        described = _describe(error, path)
        send({"end": "error", "doing": doing, **described})
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    while True:  # the checker ends this process: nothing more of it may run
        time.sleep(3600)


def _keep_stores(requests: Any) -> None:
    """Hold the store at which the ranks of one group meet, as torchrun's agent does.

    For each request a new one, on a port of its own, in place of the one before. It has a
    process of its own because it has a thread of its own: a process that forks must have one
    thread only, or a child may wait for a lock whose owner was not copied.
    """
    os.setsid()
    if LINUX:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    # where no name server answers, the store says of a rank that it has no name
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while requests.recv():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        requests.send(store.port)


def lab_of(name: str) -> Any:
    """The `graders.dsl.Lab` for a lab, or for a part of the assessment, of this name."""
    kind = "labs" if name.startswith("lab") else "assessment"
    return importlib.import_module(f"graders.{kind}.{name}").LAB


# --- in the checker -----------------------------------------------------------------------


def _children() -> dict[int, list[int]]:
    """Processes by parent, from /proc, whole: where the kernel keeps no list of children."""
    tree: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                text = Path("/proc", entry, "stat").read_text()
                parent = int(text.rpartition(")")[2].split()[1])
                tree.setdefault(parent, []).append(int(entry))
    return tree


def _children_of(pid: int) -> list[int]:
    """The children of one process, from the kernel's own list."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    return found


def _descendants(*pids: int) -> list[int]:
    """The processes that come from these, themselves left out."""
    if not LINUX:
        return []
    listed = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
    tree, found = {} if listed else _children(), [*pids]
    for process in found:
        found += _children_of(process) if listed else tree.get(process, [])
    return found[len(pids) :]


def _ticks_and_sleep(pid: int) -> tuple[int, bool]:
    """Clock ticks a process has used, and whether all of its threads are asleep.

    gloo has a thread for each group which looks at its sockets a hundred times a second, also
    where nothing will ever come: it does not count.
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


def _ask_a_name_server(pids: list[int]) -> bool:
    """Whether one waits for a name server, which may take ten seconds to say nothing.

    torch's store asks it for the name of each address that it talks to, 127.0.0.1 too.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            sent = [Path(f"/proc/{pid}/net/{each}").read_text() for each in ("udp", "udp6")]
            rows = [line.split() for line in "".join(sent).splitlines()]
            asked = {row[9] for row in rows if row[2].endswith(":0035")}
            held = [os.readlink(fd.path) for fd in os.scandir(f"/proc/{pid}/fd")]
            if asked & {link[8:-1] for link in held if link.startswith("socket:[")}:
                return True
    return False


def _lives(pid: int) -> bool:
    """Whether a process has not ended; elsewhere than on Linux, or waits to be asked."""
    try:
        os.kill(pid, 0)
        said = Path(f"/proc/{pid}/stat").read_text() if LINUX else ") S"
    except OSError:
        return False
    return said.rpartition(")")[2].split()[0] not in "ZX"


class Clock:
    """Time as some processes have it: what a busy machine does not give them does not count.

    `asleep`: seconds since any of them used processor time, or had a thread that was not
    asleep. Between two looks no more than `LOOK` pass: where the checker itself was held up,
    so was what it looks at. `worked`: processor seconds of the busiest one since the clock
    began. Elsewhere than on Linux nobody is seen asleep, and `worked` is what the clock on the
    wall says.

    `excess`: what they, with what lies in their `folder`, take too much of.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder, self.weighed, self.excess = folder, 0.0, None
        self.looked = time.monotonic()
        self.asleep = self.worked = self.lasted = 0.0
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}

    def look(self, pids: list[int], interrupted: bool = False) -> None:
        """Look at them again; what they have said since (`interrupted`) ends their sleep."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, LOOK), now
        self.lasted += passed
        if self.folder is not None and now - self.weighed > 0.1:
            if found := sandbox.excess(pids, self.folder):
                self.excess = Wrong(*found)
            self.weighed = time.monotonic()
        if not LINUX:
            self.worked = self.lasted
            return
        used = {pid: _ticks_and_sleep(pid) for pid in pids}
        ticks = {pid: count for pid, (count, _) in used.items()}
        awake = interrupted or ticks != self.last or not all(idle for _, idle in used.values())
        self.asleep = 0.0 if awake else self.asleep + passed
        if self.asleep > 1 and _ask_a_name_server(pids):
            self.asleep = 0.0
        self.last, self.first = ticks, ticks | self.first
        most = max((count - self.first[pid] for pid, count in ticks.items()), default=0)
        self.worked = max(self.worked, most / os.sysconf("SC_CLK_TCK"))

    def used(self, processes: list) -> list[float]:
        """Processor seconds of each of these processes, without those of its children."""
        ticks = [
            self.last.get(process.pid, 0) - self.first.get(process.pid, 0)
            for process in processes
        ]
        return [max(0, each) / os.sysconf("SC_CLK_TCK") for each in ticks]

    def over(self, limit: float) -> bool:
        """Whether one has worked for longer than `limit`, or all existed ten times as long."""
        return self.worked > limit or self.lasted > 10 * limit


def _ranks(pids: list[int]) -> dict[int, int]:
    """The processes among these that are ranks of torchrun, by rank."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            variables = Path("/proc", str(pid), "environ").read_bytes()
            if rank := re.search(rb"(?:^|\0)RANK=(\d+)", variables):
                found.setdefault(int(rank[1]), pid)
    return found


CONTEXT = multiprocessing.get_context("fork" if LINUX else "spawn")


class RendezvousServer:
    """Where the ranks of a group meet, in a process that is started once for many runners.

    A context manager: on leaving, it ends.
    """

    keeper: multiprocessing.Process | None = None

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(self, *_: object) -> None:
        Runner.end_all([self.keeper] if self.keeper else [], spare=None)

    def new(self) -> int:
        """The port of a store that nobody has used."""
        if self.keeper is None or not self.keeper.is_alive():
            self.requests, submission = CONTEXT.Pipe()
            with host_checks.defer_signals():
                self.keeper = CONTEXT.Process(target=_keep_stores, args=(submission,))
                self.keeper.start()
            submission.close()
        self.requests.send(True)
        return self.requests.recv()


class Runner:
    """Runs steps of one lab on one file. A context manager: on leaving, nothing is left."""

    def __init__(
        self,
        lab: str,
        limit: float = 60.0,
        visible: dict[str, str | None] | None = None,
        stores: RendezvousServer | None = None,
    ):
        """`limit`: the processor seconds that one rank may use for a step at one world size.

        `visible`: the variables by which commands of trials see GPUs; none hides them.
        `stores`: those of several runners, which outlive each of them.
        """
        self.lab, self.limit, self.visible = lab, limit, visible or {}
        self.stores, self.shared = stores or RendezvousServer(), stores is not None

    def own(self, step: Step) -> float:
        """Processor seconds that one rank may use itself for a step at one world size."""
        share = 1.0 if step.compiles else OWN
        return min(self.limit, max(LEAST_OWN, share * self.limit))

    def __enter__(self) -> "Runner":
        if why := host_checks.loopback_error():
            sys.exit(why)
        host_checks.use_batch_scheduling()
        if LINUX:
            ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to us
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True)
        lab = lab_of(self.lab)
        if lab.early:
            _ = lab.finished
        for module, names in ((dist, COLLECTIVES), (functional, FUNCTIONAL)):
            for name in names:
                if hasattr(module, name):
                    _signature(getattr(module, name))
        gc.collect()
        gc.freeze()  # a collection in a rank would write to, and so copy, every page
        return self

    def __exit__(self, *_: object) -> None:
        if self.shared:
            self.end_all([], spare=self.stores.keeper)
        else:
            self.stores.__exit__()
        with host_checks.defer_signals():  # what is interrupted here would not be tried again
            self.folder.cleanup()

    @contextlib.contextmanager
    def bench(self, step: IntegrationStep, path: Path) -> Iterator[Workspace]:
        """A bench for one trial, in a new folder."""
        yield Workspace(self, step, path, self._new_folder())

    def _new_folder(self) -> Path:
        """A folder for one group or trial; an earlier one may have removed all of them."""
        os.makedirs(self.folder.name, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder.name))

    def run(
        self,
        step: Step,
        path: Path,
        world: int,
        folder: Path | None = None,
        scene: dict[str, Any] | None = None,
    ) -> Group:
        """Run one step at one world size; once more if the ranks could not even meet.

        Once more, too, if all ranks fell asleep and no call of theirs says why: a machine that
        stalls looks the same, and what truly hangs does so again.
        """
        for attempt in range(3):
            group = self._run(step, path, world, folder, scene or {})
            if any(rank.error.get("doing") == "join" for rank in group.ranks):
                continue
            if attempt == 0 and group.stopped == "asleep" and _sleeps_without_reason(group):
                continue
            return group
        sys.exit(f"the checker cannot start {world} ranks: {group.ranks[0].error}")

    def _run(
        self, step: Step, path: Path, world: int, folder: Path | None, scene: dict[str, Any]
    ) -> Group:
        group = Group(world, [Rank() for _ in range(world)])
        processes, events, outputs = [], [], []
        folder = folder or self._new_folder()
        with contextlib.suppress(Exception):  # the ranks meet it, too
            code_of(str(path))
        try:
            port = self.stores.new()
            for rank in range(world):
                receive, send = CONTEXT.Pipe(duplex=False)
                read, write = CONTEXT.Pipe(duplex=False)
                arguments = (self.lab, step.number, str(path), rank, world, port)
                arguments += (str(folder), send, write, scene)
                with host_checks.defer_signals():
                    process = CONTEXT.Process(target=_serve, args=arguments)
                    process.start()
                    processes.append(process)
                send.close()
                write.close()
                os.set_blocking(receive.fileno(), False)  # whoever has the pipe can write half
                events.append(receive)
                outputs.append(read)
            self._listen(group, folder, processes, events, outputs, self.own(step))
            if group.stopped in ("asleep", "limit"):
                self._ask_for_lines(group, str(path), processes, events)
        finally:
            self.end_all(processes, spare=self.stores.keeper)
            for connection in [*events, *outputs]:
                connection.close()
        return group

    def _listen(
        self,
        group: Group,
        folder: Path,
        processes: list,
        events: list,
        outputs: list,
        own: float,
    ) -> None:
        clock, failed = Clock(folder), math.inf  # when a rank failed, by the clock
        grace = LONGEST_GRACE if LINUX else GRACE
        open_outputs = dict(enumerate(outputs))
        seeming: set[int] = set()  # ranks that seem to have ended: they are asked each time
        heard, looked = False, -math.inf
        while not group.stopped and any(rank.end == "waiting" for rank in group.ranks):
            waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
            sources = [events[r] for r in waiting if not group.ranks[r].deaf]
            sources += [processes[r].sentinel for r in waiting if r not in seeming]
            ready = wait(sources + list(open_outputs.values()), timeout=0.1)
            for r, output in list(open_outputs.items()):
                if output in ready:
                    try:
                        text = os.read(output.fileno(), 65536)
                    except OSError:
                        text = b""
                    if not text:
                        del open_outputs[r]
                    group.ranks[r].printed += len(text)
                    kept = group.ranks[r].output
                    group.ranks[r].output = (kept + text.decode(errors="replace"))[:KEPT_OUTPUT]
            for r in waiting:
                rank = group.ranks[r]
                if events[r] in ready:
                    self._receive(rank, events[r])
                if processes[r].sentinel in ready:  # or somebody has written there
                    seeming.add(r)
                look = r in seeming or not ready
                if look and rank.end == "waiting" and not processes[r].is_alive():
                    self._receive(rank, events[r])
                    if rank.end == "waiting":
                        rank.end, rank.status = "left", processes[r].exitcode
                if rank.end in ("error", "left", "wrong"):
                    failed = min(failed, clock.worked)
            heard = heard or bool(ready)
            # to look at every thread after each event takes longer than the step
            if time.monotonic() - looked > 0.1:
                # and what they started: a compiler works while its rank waits for it
                pids = [self.stores.keeper.pid, *(processes[r].pid for r in waiting)]
                clock.look(pids + _descendants(*pids), interrupted=heard)
                heard, looked = False, time.monotonic()
            group.excess = clock.excess or _floods(group)
            if group.excess is not None:
                group.stopped = "excess"
            elif clock.worked > failed + grace or (failed < math.inf and clock.asleep > GRACE):
                group.stopped = "failure"
            elif clock.asleep > PATIENCE:
                group.stopped = "asleep"
            elif clock.over(self.limit) or max(clock.used(processes)) > own:
                group.stopped = "limit"
                used = clock.used(processes)
                for rank, seconds in zip(group.ranks, used, strict=True):
                    rank.busy = rank.end == "waiting" and seconds > max(used) / 2

    def _ask_for_lines(self, group: Group, path: str, processes: list, events: list) -> None:
        """Ask each rank that still runs for the line of the learner's file that it is in."""
        waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
        for r in waiting:
            with contextlib.suppress(OSError):
                os.kill(processes[r].pid, signal.SIGUSR1)
        answered = 0
        for _ in range(20):
            for r in waiting:
                self._receive(group.ranks[r], events[r])
            answered += all(group.ranks[r].stack for r in waiting)
            if answered > 1:  # one more round, for messages that arrive late
                break
            time.sleep(0.05)
        name = path.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
        for r in waiting:
            rank = group.ranks[r]
            rank.line = next((line for file, line in rank.stack if file == name), None)

    @staticmethod
    def _receive(rank: Rank, connection: Any) -> None:
        """Take in what has come, as lines of JSON; what is none of ours is left out."""
        try:
            text = os.read(connection.fileno(), 1 << 20)
        except OSError:  # there is nothing yet
            return
        rank.deaf = not text
        *lines, rank.unread = (rank.unread + text).split(b"\n")
        if len(rank.unread) > 1 << 20:
            rank.unread = b""
        for line in lines:
            rank.events += 1
            event = None
            with contextlib.suppress(ValueError, RecursionError):
                event = json.loads(line)
            if frame := FRAME.match(line.decode(errors="replace")):
                rank.stack.append((frame[1], int(frame[2])))
            match event if rank.end == "waiting" else None:
                case {"fact": str(name), "value": value}:
                    rank.facts[name] = value
                case {"right": str(right)}:
                    rank.rights.append(right)
                case {
                    "call": [str(), int(), bool(), str(), str(), int() | float()] as call,
                    "members": [*members],
                } if all(isinstance(member, int) for member in members):
                    rank.calls.append(Call(*call, members=tuple(members)))
                case {"returned": int(number), "touched": bool(touched)}:
                    for call in rank.calls[number : number + 1]:
                        call.returned, call.touched = True, touched
                case (
                    {"end": "done"}
                    | {"end": "wrong", "what": str(), "hint": str()}
                    | {"end": "error", "doing": str(), "kind": str(), "text": str()}
                ):
                    rank.end, rank.error = event["end"], event

    @staticmethod
    def end_all(
        processes: list,
        spare: multiprocessing.Process | None,
        also: subprocess.Popen | None = None,
    ) -> None:
        """Kill the ranks and everything they left behind, but for the keeper of stores.

        `also`: a command, whose status is kept.
        """
        if also is not None:
            with contextlib.suppress(OSError):
                os.killpg(also.pid, signal.SIGKILL)
            also.wait()
        for process in processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in processes:
            process.join()
            process.close()
        kept = {spare.pid} if spare else set()
        while LINUX and (left := set(_descendants(os.getpid())) - kept):
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.01)


# --- what is true of every lab ------------------------------------------------------------

IMPORT_HINTS = {
    "SyntaxError": "syntax", "IndentationError": "syntax", "TabError": "syntax",
    "ModuleNotFoundError": "module",
}  # fmt: skip
FRAME = re.compile(r'  File "(.+)", line (\d+) in ')  # of a stack that faulthandler writes
COLLATERAL = re.compile(r"gloo|Connection closed|peer|Broken pipe|Socket|timed out", re.I)


def _first_error(group: Group) -> tuple[int, Rank] | None:
    """The rank to blame: the first whose error is not the echo of another rank's."""
    failed = [(r, rank) for r, rank in enumerate(group.ranks) if rank.end in ("error", "left")]
    own = [
        (r, rank)
        for r, rank in failed
        if rank.end == "left" or not COLLATERAL.search(rank.error.get("text", ""))
    ]
    return (own or failed or [None])[0]


def _floods(group: Group) -> Wrong | None:
    """What a rank says too much of."""
    for r, rank in enumerate(group.ranks):
        if rank.events > sandbox.EVENTS:
            return Wrong(f"rank {r} called collectives without end", "endless")
        if rank.printed > sandbox.PRINTED:
            return Wrong(
                f"rank {r} printed more than {sandbox.size(sandbox.PRINTED)}", "output"
            )
    return None


MESSAGES = ("send", "recv", "isend", "irecv")  # each has one sender and one receiver


def _sequences(group: Group) -> list[list[tuple]]:
    """What each rank called, in order."""
    return [[(c.name, c.numel, c.detail) for c in rank.calls] for rank in group.ranks]


def _sleeps_without_reason(group: Group) -> bool:
    """Whether all ranks made the same calls, and none of them is inside of one."""
    sequences = _sequences(group)
    last = [rank.calls[-1] for rank in group.ranks if rank.calls]
    inside = any(not call.returned and not call.asynchronous for call in last)
    return not inside and all(sequence == sequences[0] for sequence in sequences)


def compare_calls(group: Group, step: Step, absent: bool = True) -> None:
    """Raise `Wrong` if the ranks did not call the same collectives in the same order.

    `absent`: a call that some ranks did not come to counts as a difference.
    """
    for members in sorted({call.members for rank in group.ranks for call in rank.calls}):
        if set(members) <= set(range(group.world)):
            _compare_calls_of(group, members, step, absent)


def _compare_calls_of(group: Group, members: tuple[int, ...], step: Step, absent: bool) -> None:
    """Compare the collectives in the groups of these ranks. Messages are not compared."""
    ranks = members or range(group.world)
    sequences = [
        [
            (call.name, call.numel, call.detail)
            for call in group.ranks[r].calls
            if call.members == members and call.name not in MESSAGES
        ]
        for r in ranks
    ]
    for place in range(max(map(len, sequences))):
        here = [sequence[place] if place < len(sequence) else None for sequence in sequences]
        if len(set(here)) == 1 or (None in here and not absent):
            continue
        if None in here:
            callers = [call for call in here if call is not None]
            name, numel, _ = callers[0]
            names = _named(*(r for r, c in zip(ranks, here, strict=True) if c is not None))
            what = f"only {names} of {group.world} called {name} with {numel} elements"
            if members:
                what += f" in the group of {_named(*members)}"
            raise Wrong(what, "some_ranks")
        named = zip(ranks, here, strict=True)
        calls = [f"rank {r} called {c[0]} with {c[1]} elements {c[2]}" for r, c in named]
        what = f"call {place + 1} differs between the ranks: "
        what += ", and ".join(map(str.strip, calls))
        if len({call[:2] for call in here}) == 1 and here[0][0] == "broadcast":
            raise Wrong(what, "own_source")
        raise Wrong(what, step.order_hint)


def judge(group: Group, step: Step) -> Judge:
    """Yield what the ranks found to be right, and what they show together; raise `Wrong`."""
    judge_ends(group, step)
    found = [rank for rank in group.ranks if rank.end == "wrong"]
    if step.symmetric:
        # a rank that found a mistake came to no further call
        compare_calls(group, step, absent=not found)
    yield from min((rank.rights for rank in found or group.ranks), key=len)
    if found:
        wrong = min(found, key=lambda rank: len(rank.rights)).error
        raise Wrong(wrong["what"], wrong["hint"])
    if step.together is not None:
        try:
            yield from step.together(group) or ()
        except (Blank, Wrong):
            raise
        except Exception as error:
            what = f"what the ranks reported cannot be judged: {type(error).__name__}: {error}"
            raise Wrong(what, "report") from error


def _who(step: Step, *ranks: int) -> str:
    """The ranks that failed, in words. Without a process group there are no ranks to name."""
    return _named(*ranks) if step.joins else "your code"


def _named(*ranks: int) -> str:
    """Name some ranks: "ranks 0, 1 and 2"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def judge_ends(group: Group, step: Step) -> None:
    """Raise `Blank` or `Wrong` unless every rank came to an end of its own, or to a finding."""
    if group.excess is not None:
        raise group.excess
    blamed = _first_error(group)
    if blamed is not None:
        r, rank = blamed
        who = _who(step, r)
        kind, text = rank.error.get("kind"), rank.error.get("text", "")
        where = f", line {rank.error['line']}" if rank.error.get("line") else ""
        refused = [hint for words, hint in sandbox.REFUSED.items() if words in text]
        if refused:
            raise Wrong(f"{who} failed: {kind}{where}: {text}", refused[0])
        if rank.end == "error" and rank.error["doing"] == "import" and kind != "SystemExit":
            what = f"the file cannot be imported: {kind}{where}: {text}"
            raise Wrong(what, IMPORT_HINTS.get(kind, "import"))
        if kind == "NotImplementedError" and re.match(r"step \d+: ", text):
            raise Blank(re.sub(r"^step \d+: ", "", text) + where)
        if kind == "LookupError" and not where:
            raise Wrong(f"the file has no {text}", "missing")
        if kind == "SystemExit":
            raise Wrong(f"{who} ended itself by sys.exit{where}", "exit")
        if rank.end == "left":
            status = rank.status
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            compare_calls(group, step, absent=False)  # gloo aborts if sizes do not match
            what = f"{who} ended in the middle of the step ({how})"
            known = (hint for words, hint in step.crashes.items() if re.search(words, what))
            raise Wrong(what, next(known, "killed"))
        if kind == "RecursionError":
            raise Wrong(f"{who} failed: {kind}{where}", "recursion")
        what = f"{who} failed: {kind}{where}: {text}"
        for pattern, hint in step.crashes.items():
            if re.search(pattern, text):
                raise Wrong(what, hint)
        for pattern, hint in sandbox.CRASHES.items():
            if re.search(pattern, f"{kind}: {text}"):
                raise Wrong(what, hint)
        if COLLATERAL.search(text):
            compare_calls(group, step)
        raise Wrong(what, "missing" if kind == "TypeError" and "argument" in text else "crash")
    if any(rank.end == "wrong" for rank in group.ranks):
        return  # and so others may wait for it
    if group.stopped:
        _judge_stopped(group, step)


def _judge_stopped(group: Group, step: Step) -> None:
    """Raise `Wrong` for a group that the runner had to stop, without an error of a rank."""
    waiting = [r for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
    lines = [
        f"{f'rank {r}' if step.joins else 'it'} was in line {group.ranks[r].line}"
        for r in waiting
        if group.ranks[r].line
    ]
    them = "it" if len(waiting) == 1 else "them"
    where = f": when the checker stopped {them}, {' and '.join(lines)}" if lines else ""
    endless = Wrong(f"{_who(step, *waiting)} did not end{where}", "endless")
    calls = [rank.calls[-1:] for rank in group.ranks if rank.busy]
    if any(not last or last[0].returned or last[0].asynchronous for last in calls):
        raise endless  # a rank works outside of a collective, and others may wait for it
    if step.stuck is not None:
        step.stuck(group)
    try:
        compare_calls(group, step)
    except Wrong as wrong:
        raise Wrong(wrong.what + where, wrong.hint) from wrong
    blocked = [rank.calls[-1] for rank in group.ranks if rank.calls and rank.end == "waiting"]
    if blocked and not blocked[0].returned and not blocked[0].asynchronous:
        what = f"did not come out of {blocked[0].name}{where}"
        raise Wrong(f"{_who(step, *waiting)} {what}", "some_ranks")
    raise endless
