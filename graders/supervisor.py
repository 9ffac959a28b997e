"""Supervisor: runs a step of a lab in new processes, watches these processes, and ends them.

- Every group of processes is new, so nothing remains from an earlier step or world size. On
  Linux the processes are forked from a process that has imported torch and never runs the
  learner's code. A group of three ranks then starts in a fraction of a second.
- Ranks get the same environment variables as under torchrun, and always run on the CPU.
- A group hangs if all its ranks sleep and use no processor time for `PATIENCE` seconds. On a
  machine under load, a rank that waits for a processor does not sleep, so it does not count as
  hanging. A second limit ends endless loops. It counts the processor time of the busiest rank,
  not the time on the clock, so a step on a busy machine takes longer but is still judged.
- After a group, all its processes are killed, also those that detached themselves. (On Linux,
  the checker becomes the parent of such orphans.)
- `graders.sandbox` limits how much of the machine the ranks can use or change.

A *trial* is a step that decides itself what to run in its folder. It can run several groups one
after the other, kill some of their ranks on purpose, and run complete commands as a user types
them. Its `Workspace` does this.
"""

import contextlib
import functools
import gc
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from graders import rank, sandbox, verdict
from graders.protocol import Group, RankReport, Wrong
from graders.step import IntegrationStep, Step, lab_of
from worldsize.execution import host_checks, processes
from worldsize.execution.processes import LINUX

PATIENCE = 3.0  # seconds for which all ranks of a group may sleep; then the group hangs
MAX_INTERVAL = 0.5  # seconds of sleep that count between two observations
OWN_FRACTION = 0.1  # of the limit: what one rank may use itself, if it does not compile
MIN_OWN_LIMIT = 1.0  # processor seconds that a rank may use itself even if the limit is small
GRACE = 1.5  # seconds that the other ranks may sleep after one has failed
LONGEST_GRACE = 15.0  # processor seconds that the other ranks may use after one has failed
MAX_RANK_OUTPUT = 4000  # characters that are kept of the output of each rank
MAX_COMMAND_OUTPUT = 16 << 20  # bytes that are kept of the end of the output of a command
CONTEXT = multiprocessing.get_context("fork" if LINUX else "spawn")


# --- observing ----------------------------------------------------------------------------


class Clock:
    """Measures the time of some processes without the delays of a busy machine.

    `asleep`: the seconds since one of them used processor time or had a thread that did not
    sleep. At most `MAX_INTERVAL` seconds count between two observations, because a delay of the
    checker also delays the processes that it observes.
    `worked`: the processor seconds of the busiest process since the clock started. Only Linux
    shows processor time and sleep. On other systems `worked` is the time on the clock, and
    `asleep` stays 0.
    `excess`: the limit of the sandbox that the processes, or the files in `folder`, exceed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self.excess: Wrong | None = None
        self.weighed = 0.0  # when the limits of the sandbox were checked
        self.looked = time.monotonic()
        self.asleep = self.worked = self.lasted = 0.0
        self.first: dict[int, int] = {}  # the ticks of each process when it was first seen
        self.last: dict[int, int] = {}

    def look(self, pids: list[int], interrupted: bool = False) -> None:
        """Observe the processes. `interrupted`: they have sent something in the meantime."""
        now = time.monotonic()
        passed, self.looked = min(now - self.looked, MAX_INTERVAL), now
        self.lasted += passed
        if self.folder is not None and now - self.weighed > 0.1:
            if found := sandbox.excess(pids, self.folder):
                self.excess = Wrong(*found)
            self.weighed = time.monotonic()
        if not LINUX:
            self.worked = self.lasted
            return
        used = {pid: processes.ticks_and_sleep(pid) for pid in pids}
        ticks = {pid: count for pid, (count, _) in used.items()}
        awake = interrupted or ticks != self.last or not all(idle for _, idle in used.values())
        self.asleep = 0.0 if awake else self.asleep + passed
        if self.asleep > 1 and processes.waits_for_name_server(pids):
            self.asleep = 0.0
        self.last, self.first = ticks, ticks | self.first
        most = max((count - self.first[pid] for pid, count in ticks.items()), default=0)
        self.worked = max(self.worked, most / os.sysconf("SC_CLK_TCK"))

    def used(self, ranks: list[BaseProcess]) -> list[float]:
        """Return the processor seconds of each of these processes, without its children."""
        ticks = [self.last.get(each.pid, 0) - self.first.get(each.pid, 0) for each in ranks]
        return [max(0, each) / os.sysconf("SC_CLK_TCK") for each in ticks]

    def over(self, limit: float) -> bool:
        """Return whether one process worked longer than `limit`, or 10 times as long passed."""
        return self.worked > limit or self.lasted > 10 * limit


# --- the meeting point of the ranks -------------------------------------------------------


class RendezvousServer:
    """The store through which the ranks of a group find each other, in its own process.

    One process serves several supervisors. A context manager: the process ends with it.
    """

    process: BaseProcess | None = None

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(self, *_: object) -> None:
        end_all([self.process] if self.process else [])

    @property
    def pids(self) -> list[int]:
        """The number of the process, if it has started."""
        return [self.process.pid] if self.process else []

    def new_store(self) -> int:
        """Return the port of a new store."""
        if self.process is None or not self.process.is_alive():
            self.requests, requests = CONTEXT.Pipe()
            with host_checks.defer_signals():
                self.process = CONTEXT.Process(target=_serve_stores, args=(requests,))
                self.process.start()
            requests.close()
        self.requests.send(True)
        return self.requests.recv()


def _serve_stores(requests: Connection) -> None:
    """Make a new store on a new port for each request; the store before it ends.

    torchrun has such a store in its agent. Here the store needs a separate process, because it
    has a thread. A process that forks must have only one thread. Otherwise a child can wait for
    a lock of a thread that was not copied.
    """
    os.setsid()
    processes.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    # without a name server, the store prints a warning for each rank that connects
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while requests.recv():
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        requests.send(store.port)


# --- a group of ranks ---------------------------------------------------------------------


@dataclass
class RunningGroup:
    """The processes of a group that is running, and the pipes from them."""

    group: Group
    processes: list[BaseProcess] = field(default_factory=list)
    events: list[Connection] = field(default_factory=list)  # the reports of each rank
    outputs: list[Connection] = field(default_factory=list)  # what each rank prints

    def waiting(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [r for r, report in enumerate(self.group.ranks) if report.end == "waiting"]

    def close(self) -> None:
        """Close the pipes."""
        for connection in [*self.events, *self.outputs]:
            connection.close()

    def read_output(self, r: int) -> bool:
        """Read what a rank has printed; return whether it can print more."""
        report = self.group.ranks[r]
        try:
            text = os.read(self.outputs[r].fileno(), 65536)
        except OSError:
            text = b""
        report.printed += len(text)
        report.output = (report.output + text.decode(errors="replace"))[:MAX_RANK_OUTPUT]
        return bool(text)

    def note_exit(self, r: int) -> None:
        """Note that a rank has ended without a report, if this is so."""
        report = self.group.ranks[r]
        if report.end == "waiting" and not self.processes[r].is_alive():
            report.receive(self.events[r].fileno())
            if report.end == "waiting":
                report.end, report.status = "left", self.processes[r].exitcode

    def ask_for_lines(self, path: str) -> None:
        """Find out in which line of the learner's file each rank is that still runs."""
        waiting = self.waiting()
        for r in waiting:
            with contextlib.suppress(OSError):
                os.kill(self.processes[r].pid, signal.SIGUSR1)
        answered = 0
        for _ in range(20):
            for r in waiting:
                self.group.ranks[r].receive(self.events[r].fileno())
            answered += all(self.group.ranks[r].stack for r in waiting)
            if answered > 1:  # one more round, for lines that arrive late
                break
            time.sleep(0.05)
        name = path.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
        for r in waiting:
            report = self.group.ranks[r]
            report.line = next((line for file, line in report.stack if file == name), None)


def end_all(
    ranks: list[BaseProcess],
    spare: list[int] | None = None,
    command: subprocess.Popen | None = None,
) -> None:
    """Kill ranks, a command, and every other descendant of this process except `spare`."""
    if command is not None:
        processes.kill_session(command.pid)
        command.wait()
    for process in ranks:
        processes.kill_session(process.pid)
        process.kill()
    for process in ranks:
        process.join()
        process.close()
    processes.kill_descendants(spare or [])


# --- the supervisor -----------------------------------------------------------------------


class Supervisor:
    """Runs steps of one lab on one file. A context manager: at its end no process is left."""

    def __init__(
        self,
        lab: str,
        limit: float = 60.0,
        gpu_variables: dict[str, str | None] | None = None,
        rendezvous: RendezvousServer | None = None,
    ):
        """`limit`: the processor seconds that a rank may use for a step at one world size.

        `gpu_variables`: the variables that show GPUs to the commands of trials; without them
        no GPU is visible.
        `rendezvous`: a server that several supervisors share, and that outlives this one.
        """
        self.lab, self.limit, self.gpu_variables = lab, limit, gpu_variables or {}
        self.rendezvous, self.shared = rendezvous or RendezvousServer(), rendezvous is not None

    def own_limit(self, step: Step) -> float:
        """Return the processor seconds that a rank may use itself, without its children."""
        fraction = 1.0 if step.compiles else OWN_FRACTION
        return min(self.limit, max(MIN_OWN_LIMIT, fraction * self.limit))

    def __enter__(self) -> "Supervisor":
        if why := host_checks.loopback_error():
            sys.exit(why)
        host_checks.use_batch_scheduling()
        processes.adopt_orphans()
        torch.set_num_threads(1)
        self.folder = tempfile.TemporaryDirectory(prefix="check-", ignore_cleanup_errors=True)
        lab = lab_of(self.lab)
        if lab.preload_reference:
            _ = lab.finished
        for module, names in ((dist, rank.COLLECTIVES), (functional, rank.FUNCTIONAL)):
            for name in names:
                if hasattr(module, name):
                    rank.signature_of(getattr(module, name))  # the ranks share the cache
        gc.collect()
        gc.freeze()  # a collection in a rank would write to every page, and so copy it
        return self

    def __exit__(self, *_: object) -> None:
        if self.shared:
            end_all([], spare=self.rendezvous.pids)
        else:
            self.rendezvous.__exit__()
        with host_checks.defer_signals():  # an interrupted removal is not repeated
            self.folder.cleanup()

    @contextlib.contextmanager
    def workspace(self, step: IntegrationStep, path: Path) -> Iterator["Workspace"]:
        """Yield the workspace of one trial, in a new folder."""
        yield Workspace(self, step, path, self._new_folder())

    def _new_folder(self) -> Path:
        """Return a new folder. The learner's code may have removed all earlier folders."""
        os.makedirs(self.folder.name, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=self.folder.name))

    def run(
        self,
        step: Step,
        path: Path,
        world: int,
        folder: Path | None = None,
        arguments: dict[str, Any] | None = None,
    ) -> Group:
        """Run one step at one world size, and return the reports of the ranks.

        The step runs again if the ranks could not connect to each other. It also runs once
        more if all ranks fell asleep and none of their calls explains it. A machine that stalls
        looks like this. A program that really hangs hangs again.
        """
        for attempt in range(3):
            group = self._run_once(step, path, world, folder, arguments or {})
            if any(report.error.get("doing") == "join" for report in group.ranks):
                continue
            stalled = group.stopped == "asleep" and verdict.sleeps_without_reason(group)
            if attempt == 0 and stalled:
                continue
            return group
        sys.exit(f"the checker cannot start {world} ranks: {group.ranks[0].error}")

    def _run_once(
        self, step: Step, path: Path, world: int, folder: Path | None, arguments: dict[str, Any]
    ) -> Group:
        running = RunningGroup(Group(world, [RankReport() for _ in range(world)]))
        folder = folder or self._new_folder()
        with contextlib.suppress(Exception):  # the ranks report this error
            rank.code_of(str(path))
        try:
            port = self.rendezvous.new_store()
            for number in range(world):
                place = (self.lab, step.number, str(path), number, world, port, str(folder))
                self._start_rank(running, place, arguments)
            self._watch(running, folder, self.own_limit(step))
            if running.group.stopped in ("asleep", "limit"):
                running.ask_for_lines(str(path))
        finally:
            end_all(running.processes, spare=self.rendezvous.pids)
            running.close()
        return running.group

    @staticmethod
    def _start_rank(running: RunningGroup, place: tuple, arguments: dict[str, Any]) -> None:
        """Start one rank, and add its process and its pipes to the group."""
        events, send = CONTEXT.Pipe(duplex=False)
        output, write = CONTEXT.Pipe(duplex=False)
        with host_checks.defer_signals():
            process = CONTEXT.Process(
                target=rank.run_rank, args=(*place, send, write, arguments)
            )
            process.start()
            running.processes.append(process)
        send.close()
        write.close()
        os.set_blocking(events.fileno(), False)  # a process may write half a line
        running.events.append(events)
        running.outputs.append(output)

    def _watch(self, running: RunningGroup, folder: Path, own_limit: float) -> None:
        """Collect the reports until all ranks have ended, or the group has to be stopped."""
        group, clock = running.group, Clock(folder)
        failed = math.inf  # `clock.worked` when the first rank failed
        grace = LONGEST_GRACE if LINUX else GRACE
        open_outputs = dict(enumerate(running.outputs))
        suspected: set[int] = set()  # ranks whose process may have ended: checked in each round
        heard, looked = False, -math.inf
        while not group.stopped and (waiting := running.waiting()):
            sources = [running.events[r] for r in waiting if not group.ranks[r].closed]
            sources += [running.processes[r].sentinel for r in waiting if r not in suspected]
            ready = wait(sources + list(open_outputs.values()), timeout=0.1)
            for r, output in list(open_outputs.items()):
                if output in ready and not running.read_output(r):
                    del open_outputs[r]
            for r in waiting:
                report = group.ranks[r]
                if running.events[r] in ready:
                    report.receive(running.events[r].fileno())
                if running.processes[r].sentinel in ready:  # or the rank has written there
                    suspected.add(r)
                if r in suspected or not ready:
                    running.note_exit(r)
                if report.end in ("error", "left", "wrong"):
                    failed = min(failed, clock.worked)
            heard = heard or bool(ready)
            # observing every thread after each report would take longer than the step
            if time.monotonic() - looked > 0.1:
                # with their children: a rank waits while its compiler works
                pids = [*self.rendezvous.pids, *(running.processes[r].pid for r in waiting)]
                clock.look(pids + processes.descendants(*pids), interrupted=heard)
                heard, looked = False, time.monotonic()
            group.excess = clock.excess or verdict.excessive_reports(group)
            used = clock.used(running.processes)
            if group.excess is not None:
                group.stopped = "excess"
            elif clock.worked > failed + grace or (failed < math.inf and clock.asleep > GRACE):
                group.stopped = "failure"
            elif clock.asleep > PATIENCE:
                group.stopped = "asleep"
            elif clock.over(self.limit) or max(used) > own_limit:
                group.stopped = "limit"
                for report, seconds in zip(group.ranks, used, strict=True):
                    report.busy = report.end == "waiting" and seconds > max(used) / 2


# --- the workspace of a trial -------------------------------------------------------------


@dataclass
class CommandResult:
    """How a command ended, and what it printed."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    stopped: str = ""  # "asleep" or "limit" if it had to be stopped


class Workspace:
    """Runs the groups and the commands of one trial, all in the same folder."""

    def __init__(self, supervisor: Supervisor, step: Step, path: Path, folder: Path):
        self.supervisor, self.step, self.path, self.folder = supervisor, step, path, folder
        self.limit, self._output = supervisor.limit, ""
        self.scores: dict[str, float] = {}  # in addition to the scores of its groups

    @property
    def gpus(self) -> bool:
        """Whether commands may use the GPUs of this machine."""
        return bool(self.supervisor.gpu_variables)

    def group(self, world: int, dies: bool = False, **arguments: Any) -> Group:
        """Run the probe on a new group of ranks, which get `arguments`, and return their reports.

        Raises `Blank` or `Wrong` if a rank did not reach the end of the probe, unless `dies`.
        """
        group = self.supervisor.run(self.step, self.path, world, self.folder, arguments)
        output = "".join(report.output for report in group.ranks)
        self._output = output or self._output
        if not dies or group.excess is not None:
            list(verdict.judge(group, self.step))
        return group

    def run(
        self,
        *command: str | Path,
        limit: float | None = None,
        patience: float | None = None,
        watch: Callable[[dict[int, int]], None] | None = None,
        **variables: str,
    ) -> CommandResult:
        """Run a command in the folder. It is stopped if it hangs, and no process of it is left.

        `python` and `torchrun` are those of this Python. `watch(ranks)` is called twenty times
        a second with the process number of each rank. `patience` is how many seconds all
        processes may sleep; None means no limit. A command that is stopped prints the Python
        stacks of its processes on stderr.
        """
        words = list(map(str, command))
        starts = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
        if words[0] in starts:
            words = [sys.executable, *starts[words[0]], *words[1:]]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            start = time.monotonic()
            process = subprocess.Popen(
                words, cwd=self.folder, env=self._variables(variables),
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=functools.partial(sandbox.set_rlimits, memory=not self.gpus),
            )  # fmt: skip
            try:
                stopped = self._wait(process, limit or self.limit, patience, watch)
            finally:
                end_all([], spare=self.supervisor.rendezvous.pids, command=process)
            texts = []
            for file in (out, err):
                file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_COMMAND_OUTPUT))
                texts.append(file.read().decode(errors="replace"))
        self._output = "".join(texts)
        return CommandResult(process.returncode, *texts, time.monotonic() - start, stopped)

    def _variables(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the environment variables of a command."""
        env = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        env |= {"PYTHONUTF8": "1"} | variables
        if not host_checks.hostname_resolves():
            env.setdefault("PET_LOCAL_ADDR", "localhost")  # a name that every rank can resolve
        for name, value in self.supervisor.gpu_variables.items():
            env.pop(name, None)
            env |= {name: value} if value is not None else {}
        return env

    def _wait(
        self,
        process: subprocess.Popen,
        limit: float,
        patience: float | None,
        watch: Callable[[dict[int, int]], None] | None,
    ) -> str:
        """Wait for a command; return why it was stopped, or "" if it ended itself."""
        clock, stopped = Clock(self.folder), ""
        while process.poll() is None and not stopped:
            time.sleep(0.05)
            pids = [process.pid, *processes.descendants(process.pid)]
            if watch is not None:
                watch(processes.ranks_among(pids))
            clock.look(pids)
            if clock.excess is not None:
                raise clock.excess
            if clock.asleep > (math.inf if patience is None else patience):
                stopped = "asleep"
            if clock.over(limit):
                stopped = "limit"
        if stopped:
            _print_stacks(list(processes.ranks_among(pids).values()) or [process.pid])
        return stopped

    def last_lines(self) -> list[str]:
        """Return the end of what the last group or command printed."""
        return self._output.splitlines()[-20:]


def _print_stacks(pids: list[int]) -> None:
    """Let processes print their Python stacks, and wait until they have ended."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGABRT)  # faulthandler prints the stack
    clock = Clock()
    while any(map(processes.is_alive, pids)) and clock.asleep < GRACE and not clock.over(GRACE):
        time.sleep(0.05)
        clock.look(pids)
