"""Runs a step of a lab in new processes, watches these processes, and ends them.

- Every group of processes is new, so nothing remains from an earlier step or world size. On
  Linux, the processes are forked from a process that has imported torch and never runs the
  learner's code. Therefore, a group of three ranks starts in a fraction of a second.
- Ranks get the same environment variables as under torchrun, and always run on the CPU.
- A group hangs if all its ranks sleep and use no processor time for `PATIENCE` seconds. On a
  machine under load, a rank that waits for a processor does not sleep, so it does not count as
  hanging. A second limit ends endless loops. It counts the processor time of the busiest rank,
  not the time on the clock. On a busy machine a step therefore lasts longer, but its verdict is
  the same.
- After a group has ended, all its processes are killed. This includes processes that detached
  themselves: on Linux, the checker becomes the parent of such orphans.
- `graders.sandbox` limits the resources that the ranks can use and the files that they can
  change.

A *trial* is a step that decides itself what to run in its folder. With the methods of its
`Workspace`, it can run several groups one after the other, kill some of their ranks on purpose,
and run complete commands.
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

PATIENCE = 3.0  # a group hangs if all its ranks sleep for more than this number of seconds
MAX_INTERVAL = 0.5  # the largest number of seconds that count between two observations
OWN_FRACTION = (
    0.1  # the fraction of the limit that a rank which does not compile may use itself
)
MIN_OWN_LIMIT = 1.0  # processor seconds that a rank may use itself even if the limit is small
GRACE = 1.5  # seconds for which the other ranks may sleep after a rank has failed
LONGEST_GRACE = 15.0  # processor seconds that the other ranks may use after a rank has failed
MAX_RANK_OUTPUT = 4000  # the number of characters that are stored of the output of a rank
MAX_COMMAND_OUTPUT = 16 << 20  # the number of bytes that are stored of the output of a command
CONTEXT = multiprocessing.get_context("fork" if LINUX else "spawn")


# --- observation of processes -------------------------------------------------------------


class Clock:
    """Measures the time of processes without the delays of a busy machine.

    `asleep`: the seconds since one of the processes used processor time or had a thread that
    did not sleep. At most `MAX_INTERVAL` seconds count between two observations, because a
    delay of the checker also delays the processes that it observes.
    `busiest`: the processor seconds of the busiest process since the clock started. Only on
    Linux can the clock read processor time and sleep. On other systems `busiest` is the time on
    the clock, and `asleep` stays 0.
    `excess`: describes a limit of the sandbox that the processes, or the files in `folder`,
    exceed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self.excess: Wrong | None = None
        self.limits_checked_at = 0.0
        self.observed_at = time.monotonic()
        self.asleep = self.busiest = self.elapsed = 0.0
        self.first: dict[int, int] = {}  # the ticks of each process at its first observation
        self.last: dict[int, int] = {}  # the ticks of each process at the last observation

    def observe(self, pids: list[int], has_reports: bool = False) -> None:
        """Observe the processes. `has_reports`: they sent something since the last time."""
        now = time.monotonic()
        interval, self.observed_at = min(now - self.observed_at, MAX_INTERVAL), now
        self.elapsed += interval
        if self.folder is not None and now - self.limits_checked_at > 0.1:
            if found := sandbox.excess(pids, self.folder):
                self.excess = Wrong(*found)
            self.limits_checked_at = time.monotonic()
        if not LINUX:
            self.busiest = self.elapsed
            return
        states = {pid: processes.ticks_and_sleep(pid) for pid in pids}
        ticks = {pid: count for pid, (count, _) in states.items()}
        all_sleep = all(sleeps for _, sleeps in states.values())
        is_awake = has_reports or ticks != self.last or not all_sleep
        self.asleep = 0.0 if is_awake else self.asleep + interval
        if self.asleep > 1 and processes.waits_for_name_server(pids):
            self.asleep = 0.0
        self.last, self.first = ticks, ticks | self.first
        most = max((count - self.first[pid] for pid, count in ticks.items()), default=0)
        self.busiest = max(self.busiest, most / os.sysconf("SC_CLK_TCK"))

    def processor_seconds(self, ranks: list[BaseProcess]) -> list[float]:
        """Return the processor seconds of each of these processes, without its children."""
        ticks = [self.last.get(each.pid, 0) - self.first.get(each.pid, 0) for each in ranks]
        return [max(0, each) / os.sysconf("SC_CLK_TCK") for each in ticks]

    def is_over(self, limit: float) -> bool:
        """Return whether the time is over.

        This is so if a process used more than `limit` processor seconds, or if more than
        10 * `limit` seconds have passed.
        """
        return self.busiest > limit or self.elapsed > 10 * limit


# --- the rendezvous of the ranks ----------------------------------------------------------


class RendezvousServer:
    """A process with the store through which the ranks of a group find each other.

    It can serve several supervisors. The class is a context manager, which ends the process.
    """

    process: BaseProcess | None = None

    def __enter__(self) -> "RendezvousServer":
        return self

    def __exit__(self, *_: object) -> None:
        end_all([self.process] if self.process else [])

    @property
    def pids(self) -> list[int]:
        """A list with the process number, which is empty until the process has started."""
        return [self.process.pid] if self.process else []

    def new_store(self) -> int:
        """Make a new store and return its port."""
        if self.process is None or not self.process.is_alive():
            self.requests, requests = CONTEXT.Pipe()
            with host_checks.defer_signals():
                self.process = CONTEXT.Process(target=_serve_stores, args=(requests,))
                self.process.start()
            requests.close()
        self.requests.send(True)
        return self.requests.recv()


def _serve_stores(requests: Connection) -> None:
    """Make a new store on a new port for each request. The previous store ends.

    torchrun has such a store in its agent. Here the store needs a separate process, because the
    store has a thread, and a process that forks must have only one thread. Otherwise a child
    can wait forever for a lock of a thread that was not copied.
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
    events: list[Connection] = field(default_factory=list)  # for the reports of each rank
    outputs: list[Connection] = field(default_factory=list)  # for the output of each rank

    def active_ranks(self) -> list[int]:
        """Return the numbers of the ranks that have not ended."""
        return [r for r, report in enumerate(self.group.ranks) if report.end == "waiting"]

    def close(self) -> None:
        """Close the pipes."""
        for connection in [*self.events, *self.outputs]:
            connection.close()

    def read_output(self, r: int) -> bool:
        """Read the new output of a rank, and return whether more output can follow."""
        report = self.group.ranks[r]
        try:
            text = os.read(self.outputs[r].fileno(), 65536)
        except OSError:
            text = b""
        report.output_bytes += len(text)
        report.output = (report.output + text.decode(errors="replace"))[:MAX_RANK_OUTPUT]
        return bool(text)

    def note_exit(self, r: int) -> None:
        """Update the report of a rank if its process has ended without a last report."""
        report = self.group.ranks[r]
        if report.end == "waiting" and not self.processes[r].is_alive():
            report.receive(self.events[r].fileno())
            if report.end == "waiting":
                report.end, report.status = "exited", self.processes[r].exitcode

    def find_lines(self, path: str) -> None:
        """Find the line of the learner's file in which each active rank is.

        The signal SIGUSR1 makes a rank write its stack into the pipe of its reports.
        """
        active = self.active_ranks()
        for r in active:
            with contextlib.suppress(OSError):
                os.kill(self.processes[r].pid, signal.SIGUSR1)
        complete_rounds = 0
        for _ in range(20):
            for r in active:
                self.group.ranks[r].receive(self.events[r].fileno())
            complete_rounds += all(self.group.ranks[r].stack for r in active)
            if complete_rounds > 1:  # one more round, for lines that arrive late
                break
            time.sleep(0.05)
        name = path.encode("ascii", "backslashreplace").decode()  # the format of faulthandler
        for r in active:
            report = self.group.ranks[r]
            report.line = next((line for file, line in report.stack if file == name), None)


def end_all(
    ranks: list[BaseProcess],
    spare: list[int] | None = None,
    command: subprocess.Popen | None = None,
) -> None:
    """Kill ranks, a command, and all other descendants of this process except `spare`.

    `spare` contains the numbers of processes.
    """
    if command is not None:
        processes.kill_process_group(command.pid)
        command.wait()
    for process in ranks:
        processes.kill_process_group(process.pid)
        process.kill()
    for process in ranks:
        process.join()
        process.close()
    processes.kill_descendants(spare or [])


# --- the supervisor -----------------------------------------------------------------------


class Supervisor:
    """Runs the steps of one lab. The class is a context manager, which ends all processes."""

    def __init__(
        self,
        lab: str,
        limit: float = 60.0,
        gpu_variables: dict[str, str | None] | None = None,
        rendezvous: RendezvousServer | None = None,
    ):
        """Create a supervisor for the steps of a lab.

        `limit`: the processor seconds that a rank may use for a step at one world size.
        `gpu_variables`: the environment variables that make GPUs visible to the commands of
        trials. Without them, no GPU is visible.
        `rendezvous`: a server that several supervisors share, and that this one does not end.
        """
        self.lab, self.limit, self.gpu_variables = lab, limit, gpu_variables or {}
        self.rendezvous = rendezvous or RendezvousServer()
        self.shares_rendezvous = rendezvous is not None

    def own_limit(self, step: Step) -> float:
        """Return the processor seconds that a rank may use itself, without its children."""
        fraction = 1.0 if step.compiles else OWN_FRACTION
        return min(self.limit, max(MIN_OWN_LIMIT, fraction * self.limit))

    def __enter__(self) -> "Supervisor":
        if error := host_checks.loopback_error():
            sys.exit(error)
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
        gc.freeze()  # a collection in a rank would write to every page, and so copy the page
        return self

    def __exit__(self, *_: object) -> None:
        if self.shares_rendezvous:
            end_all([], spare=self.rendezvous.pids)
        else:
            self.rendezvous.__exit__()
        with host_checks.defer_signals():  # an interrupted removal is not repeated
            self.folder.cleanup()

    @contextlib.contextmanager
    def workspace(self, step: IntegrationStep, path: Path) -> Iterator["Workspace"]:
        """Yield the workspace of a trial, which has a new folder."""
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
        more if all ranks were asleep and none of their calls explains why, because the machine
        may have stalled. A program that really hangs will hang again.
        """
        for attempt in range(3):
            group = self._run_once(step, path, world, folder, arguments or {})
            if any(report.error.get("doing") == "join" for report in group.ranks):
                continue
            has_stalled = group.stopped == "asleep" and verdict.sleeps_without_reason(group)
            if attempt == 0 and has_stalled:
                continue
            return group
        sys.exit(f"The checker cannot start {world} ranks: {group.ranks[0].error}")

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
                start = (self.lab, step.number, str(path), number, world, port, str(folder))
                self._start_rank(running, start, arguments)
            self._watch(running, folder, self.own_limit(step))
            if running.group.stopped in ("asleep", "limit"):
                running.find_lines(str(path))
        finally:
            end_all(running.processes, spare=self.rendezvous.pids)
            running.close()
        return running.group

    @staticmethod
    def _start_rank(running: RunningGroup, start: tuple, arguments: dict[str, Any]) -> None:
        """Start one rank, and add its process and its pipes to the group.

        `start` contains the first seven arguments of `rank.run_rank`.
        """
        events, send = CONTEXT.Pipe(duplex=False)
        output, write = CONTEXT.Pipe(duplex=False)
        with host_checks.defer_signals():
            process = CONTEXT.Process(
                target=rank.run_rank, args=(*start, send, write, arguments)
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
        failed_at = math.inf  # `clock.busiest` when the first rank failed
        grace = LONGEST_GRACE if LINUX else GRACE
        open_outputs = dict(enumerate(running.outputs))
        suspects: set[int] = set()  # ranks whose process may have ended: checked in each round
        has_reports, observed_at = False, -math.inf
        while not group.stopped and (active := running.active_ranks()):
            sources = [running.events[r] for r in active if not group.ranks[r].is_closed]
            sources += [running.processes[r].sentinel for r in active if r not in suspects]
            ready = wait(sources + list(open_outputs.values()), timeout=0.1)
            for r, output in list(open_outputs.items()):
                if output in ready and not running.read_output(r):
                    del open_outputs[r]
            for r in active:
                report = group.ranks[r]
                if running.events[r] in ready:
                    report.receive(running.events[r].fileno())
                if running.processes[r].sentinel in ready:  # or the rank wrote to the sentinel
                    suspects.add(r)
                if r in suspects or not ready:
                    running.note_exit(r)
                if report.end in ("error", "exited", "wrong"):
                    failed_at = min(failed_at, clock.busiest)
            has_reports = has_reports or bool(ready)
            # observing every thread after each report would take longer than the step
            if time.monotonic() - observed_at > 0.1:
                # with the children of the ranks, because a rank waits while its compiler works
                pids = [*self.rendezvous.pids, *(running.processes[r].pid for r in active)]
                clock.observe(pids + processes.descendants(*pids), has_reports)
                has_reports, observed_at = False, time.monotonic()
            group.excess = clock.excess or verdict.excessive_reports(group)
            used = clock.processor_seconds(running.processes)
            has_failed = failed_at < math.inf
            if group.excess is not None:
                group.stopped = "excess"
            elif clock.busiest > failed_at + grace or (has_failed and clock.asleep > GRACE):
                group.stopped = "failure"
            elif clock.asleep > PATIENCE:
                group.stopped = "asleep"
            elif clock.is_over(self.limit) or max(used) > own_limit:
                group.stopped = "limit"
                for report, seconds in zip(group.ranks, used, strict=True):
                    report.is_busy = report.end == "waiting" and seconds > max(used) / 2


# --- the workspace of a trial -------------------------------------------------------------


@dataclass
class CommandResult:
    """The exit status and the output of a command."""

    status: int
    stdout: str
    stderr: str
    seconds: float
    stopped: str = ""  # "asleep" or "limit" if the command was stopped


class Workspace:
    """Runs the groups and the commands of one trial, all in the same folder."""

    def __init__(self, supervisor: Supervisor, step: Step, path: Path, folder: Path):
        self.supervisor, self.step, self.path, self.folder = supervisor, step, path, folder
        self.limit, self._output = supervisor.limit, ""
        self.scores: dict[str, float] = {}  # the scores of the trial, which the trial sets

    @property
    def has_gpus(self) -> bool:
        """Return whether commands may use the GPUs of this machine."""
        return bool(self.supervisor.gpu_variables)

    def group(self, world: int, may_die: bool = False, **arguments: Any) -> Group:
        """Run the probe on a new group of ranks, and return their reports.

        The ranks find the arguments in `lesson.arguments`. Raises `Blank` or `Wrong` if a rank
        did not reach the end of the probe. If `may_die` is true, such an end is not an error.
        """
        group = self.supervisor.run(self.step, self.path, world, self.folder, arguments)
        output = "".join(report.output for report in group.ranks)
        self._output = output or self._output
        if not may_die or group.excess is not None:
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
        """Run a command in the folder, and return its result after all of its processes end.

        The commands `python` and `torchrun` run with the Python that runs this function.
        `limit`: the command is stopped if one of its processes uses more processor seconds, or
        if it lasts 10 times as long.
        `patience`: the command is stopped if all its processes sleep for more than this number
        of seconds. None means no limit.
        `watch(ranks)` is called twenty times a second. `ranks` contains the process number of
        each rank.
        A command that is stopped prints the Python stacks of its processes on stderr.
        """
        words = list(map(str, command))
        options = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
        if words[0] in options:
            words = [sys.executable, *options[words[0]], *words[1:]]
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            start = time.monotonic()
            process = subprocess.Popen(
                words, cwd=self.folder, env=self._variables(variables),
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=functools.partial(sandbox.set_rlimits, memory=not self.has_gpus),
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
        """Return the environment variables of a command, with the additional `variables`."""
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
        """Wait for a command. Return why it was stopped, or "" if it ended by itself."""
        clock, stopped = Clock(self.folder), ""
        while process.poll() is None and not stopped:
            time.sleep(0.05)
            pids = [process.pid, *processes.descendants(process.pid)]
            if watch is not None:
                watch(processes.ranks_among(pids))
            clock.observe(pids)
            if clock.excess is not None:
                raise clock.excess
            if clock.asleep > (math.inf if patience is None else patience):
                stopped = "asleep"
            if clock.is_over(limit):
                stopped = "limit"
        if stopped:
            _print_stacks(list(processes.ranks_among(pids).values()) or [process.pid])
        return stopped

    def last_lines(self) -> list[str]:
        """Return the last 20 lines that the last group or command printed."""
        return self._output.splitlines()[-20:]


def _print_stacks(pids: list[int]) -> None:
    """Make processes print their Python stacks, and wait for a short time until they end."""
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGABRT)  # faulthandler prints the stack
    clock = Clock()
    while any(map(processes.is_alive, pids)):
        if clock.asleep >= GRACE or clock.is_over(GRACE):
            break
        time.sleep(0.05)
        clock.observe(pids)
