"""The code that runs in each process of a group.

A rank imports the learner's file and runs the probe of the step. The probe yields a sentence
for each correct result and raises `Wrong` for the first mistake. The rank reports both to the
supervisor.

Each call of a collective of `torch.distributed` is recorded. An asynchronous all-reduce or
broadcast delivers its result only in `wait()`, which is the latest moment that PyTorch allows.
Without this delay, the result of learner's code that does not wait would be right in most runs.
With the delay it is wrong in every run.
"""

import contextlib
import faulthandler
import functools
import importlib.util
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

from graders import protocol, sandbox, scores
from graders.protocol import Call, Wrong
from graders.step import lab_of
from worldsize.execution.processes import end_with_parent

# --- recording of collectives -------------------------------------------------------------


class DelayedWork:
    """The handle of an asynchronous call that delivers its result in `wait`.

    The call works on `result`, which is a copy of the tensor `target`. `real` is the
    handle that torch returned for it. `report(touched=…)` reports to the supervisor that the
    call is complete.
    """

    def __init__(
        self,
        real: dist.Work,
        target: torch.Tensor,
        result: torch.Tensor,
        report: Callable[..., None],
        call: Call,
    ):
        self._real, self._target, self._result = real, target, result
        self._report: Callable[..., None] | None = report  # None after the delivery
        self.call = call
        self._sent = target.detach().clone()

    def _deliver(self) -> None:
        if self._report is None:
            return
        report, self._report = self._report, None
        report(touched=not torch.equal(self._target.detach(), self._sent))
        self._target.detach().copy_(self._result)

    def wait(self, *args: Any) -> bool:
        done = self._real.wait(*args)
        self.call.waited = True  # not in _deliver(): a callback also delivers, without wait()
        self._deliver()
        return done

    def is_completed(self) -> bool:
        if self._real.is_completed():
            self.call.waited = True
            self._deliver()
        return self._report is None

    def get_future(self) -> torch.futures.Future:
        def deliver(future: torch.futures.Future) -> list[torch.Tensor]:
            future.wait()
            self._deliver()
            return [self._target]

        return self._real.get_future().then(deliver)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


DelayedWork.__name__ = "Work"  # errors of the learner's code show this name


# the functions of torch.distributed whose calls are recorded
COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_object", "all_to_all", "barrier", "broadcast",
    "broadcast_object_list", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter",
    "scatter", "send", "all_gather_into_tensor", "reduce_scatter_tensor",
    "all_to_all_single", "all_gather_single", "reduce_scatter_single",
    "all_reduce_coalesced",
]  # fmt: skip
# the functions of torch.distributed._functional_collectives whose calls are recorded
FUNCTIONAL = ("all_reduce", "all_reduce_coalesced", "all_reduce_inplace")


class Lesson:
    """The state of a rank, which a probe receives: its number, its calls, and its arguments."""

    def __init__(self, rank: int, world: int, send: Callable[[dict], None]):
        self.rank, self.world, self.barriers, self._send = rank, world, 0, send
        self.module: ModuleType | None = None  # the learner's module after its import
        self.current_phase = ""
        self.calls: list[Call] = []  # the collectives that this rank has called
        self.is_recording = False  # a recorded function is running
        self.arguments: dict[str, Any] = {}  # the arguments of a trial for its ranks

    def fact(self, name: str, value: Any) -> None:
        """Report a fact to the supervisor. It replaces an earlier fact of the same name."""
        self._send({"fact": name, "value": value})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add this name to the record of each collective that is called in this context."""
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before

    @functools.cached_property
    def store(self) -> dist.TCPStore:
        """A connection to the store through which the ranks of the group find each other."""
        port = int(os.environ["MASTER_PORT"])
        return dist.TCPStore("127.0.0.1", port, is_master=False)

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have called this function, without a collective.

        If one rank still waits in a collective that the other ranks did not call, they wait
        here. The checker then reports this collective, and not a later call of the step.
        """
        self.barriers += 1
        if self.store.add(f"barrier {self.barriers}", 1) == self.world:
            self.store.set(f"barrier {self.barriers} complete", "")
        self.store.wait([f"barrier {self.barriers} complete"])

    def record(
        self, name: str, tensor: Any, asynchronous: bool, detail: str = "", n: int = 1,
        members: Sequence[int] = (),
    ) -> int:  # fmt: skip
        """Report a call in a group of n ranks before it is made, and return its index.

        `members` contains the ranks of the group. It is empty for the group of all ranks.
        """
        tensors = list(tensor) if isinstance(tensor, (list, tuple)) else [tensor]
        if name != "all_reduce_coalesced":  # for all others, the first tensor is enough
            del tensors[1:]
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        numel = sum(each.numel() for each in tensors)
        size = sum(each.nbytes for each in tensors)
        sent = scores.bytes_sent(name, size, n) if tensors else 0
        call = [name, numel, asynchronous, self.current_phase, detail, sent]
        self._send({"call": call, "members": list(members)})
        self.calls.append(Call(*call, members=tuple(members)))
        return len(self.calls) - 1

    def record_collectives(self) -> None:
        """Record every collective that is called through torch.distributed."""
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._recorder(name, getattr(dist, name)))
        # P2POp accepts only the functions isend and irecv of this module
        distributed_c10d.isend, distributed_c10d.irecv = dist.isend, dist.irecv
        for name in FUNCTIONAL:
            is_lazy = name != "all_reduce_inplace"
            recorder = self._recorder(name, getattr(functional, name), is_lazy, skip_torch=True)
            setattr(functional, name, recorder)
        self._record_group_all_reduce()

    def _record_group_all_reduce(self) -> None:
        """Let `group.allreduce(tensor)` call dist.all_reduce, which is recorded."""
        real = dist.ProcessGroup.allreduce

        def allreduce(group: dist.ProcessGroup, tensors: Any, *options: Any) -> Any:
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            if self.is_recording or len(tensors) != 1:
                return real(group, tensors, *options)
            op = getattr(options[0], "reduceOp", options[0]) if options else dist.ReduceOp.SUM
            return dist.all_reduce(tensors[0], op, group, async_op=True)

        dist.ProcessGroup.allreduce = allreduce

    def _recorder(
        self, name: str, real: Callable, is_lazy: bool = False, skip_torch: bool = False
    ) -> Callable:
        """Return a function that records each call and then calls `real`.

        `is_lazy`: `real` returns at once, and the first use of its result waits.
        `skip_torch`: calls from torch itself, such as those of a DTensor, are not recorded.
        """
        signature = signature_of(real)
        torch_folder = os.path.dirname(torch.__file__) + os.sep

        def recorder(*args: Any, **kwargs: Any) -> Any:
            if is_lazy and self.is_recording:  # a recorded function calls it
                return real(*args, **kwargs)
            if skip_torch and sys._getframe(1).f_code.co_filename.startswith(torch_folder):
                return real(*args, **kwargs)
            before, self.is_recording = self.is_recording, True
            try:
                return record_and_call(*args, **kwargs)
            finally:
                self.is_recording = before

        def record_and_call(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            tensor, group = next(iter(arguments.values()), None), arguments.get("group")
            detail = f"from rank {arguments.get('src')}" if name == "broadcast" else ""
            asynchronous = is_lazy or arguments.get("async_op") is True
            groups = [group] if isinstance(group, dist.ProcessGroup) else []
            n = dist.get_world_size(*groups) if dist.is_initialized() else 1
            members = dist.get_process_group_ranks(group) if groups and n < self.world else []
            number = self.record(name, tensor, asynchronous, detail, n, members)

            def report(touched: bool = False) -> None:
                self.calls[number].returned, self.calls[number].touched = True, touched
                self._send({"returned": number, "touched": touched})

            if name in ("all_reduce", "broadcast") and asynchronous and not is_lazy:
                result = tensor.detach().clone()
                rest = {key: value for key, value in kwargs.items() if key != "tensor"}
                call = self.calls[number]
                return DelayedWork(
                    real(result, *args[1:], **rest), tensor, result, report, call
                )
            value = real(*args, **kwargs)
            if is_lazy or not asynchronous:
                report()
            return value

        recorder.__name__ = recorder.__qualname__ = name
        return recorder


@functools.cache
def signature_of(function: Callable) -> inspect.Signature:
    """Return the signature of a function."""
    return inspect.signature(function)


def load(path: str | Path, name: str = "learner") -> ModuleType:
    """Import a file under this name. Code below `__name__ == "__main__"` does not run."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(code_of(str(path)), vars(module))
    return module


@functools.cache
def code_of(path: str) -> CodeType:
    """Return the compiled code of a file. Forked ranks share the code that is in the cache."""
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


def _raised_in(error: BaseException, path: str) -> bool:
    """Return whether the outermost function of the traceback of an error is in this file."""
    return traceback.extract_tb(error.__traceback__)[0].filename == path


def _describe(error: BaseException, path: str) -> dict[str, Any]:
    """Return the report of an error: its type, its first line, and the learner's line number.

    The line number is that of the innermost line of the learner's file, or None.
    """
    cause = error.__cause__
    if isinstance(cause, StopIteration) and not _raised_in(cause, path):
        error = cause  # a next() in the learner's code ended the probe, which is a generator
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            line = frame.lineno
    if isinstance(error, SyntaxError) and error.filename == path:
        line, error = error.lineno, type(error)(error.msg)  # msg does not contain the line
    with contextlib.suppress(Exception):
        text, *more = str(error).strip().splitlines() or [""]
        if more and more[0].strip().startswith("but got"):  # torch continues in line 2
            text = f"{text} {more[0].strip()}"
        text = text[:300]
        return {"kind": type(error).__name__, "text": text, "line": line}
    return {"kind": type(error).__name__, "text": "", "line": line}


# --- the process of a rank ----------------------------------------------------------------


def run_rank(
    lab: str,
    number: int,
    path: str,
    rank: int,
    world: int,
    port: int,
    folder: str,
    events: Any,
    output: Any,
    arguments: dict[str, Any],
) -> None:
    """Import the learner's file, run the probe, report, and sleep until the process is killed.

    `events` and `output` are the writing ends of two pipes. The first pipe is for the reports,
    and the second one for the printed text. `arguments` are the arguments of a trial.
    """
    os.setsid()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.chdir(folder)
    sys.argv = [path]
    torch.set_num_threads(1)
    os.environ.update(_variables(rank, world, port, arguments.get("restart", 0)))
    sandbox.set_rlimits()
    # this also works while the rank waits in C++, where a handler in Python would not run
    faulthandler.register(signal.SIGUSR1, file=events.fileno(), all_threads=False)
    send = functools.partial(protocol.send, events.fileno())
    lesson = Lesson(rank, world, send)
    lesson.arguments = arguments
    _run_probe(lesson, lab, number, path, send)
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    while True:  # no code of the learner may run until the supervisor kills this process
        time.sleep(3600)


def _variables(rank: int, world: int, port: int, restarts: int) -> dict[str, str]:
    """Return the variables that torchrun sets, and variables that hide all GPUs."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "GROUP_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HIP_VISIBLE_DEVICES": "",
    }


def _run_probe(
    lesson: Lesson, lab: str, number: int, path: str, send: Callable[[dict], None]
) -> None:
    """Run the probe of a step on the learner's file, and report how the probe ended."""
    step = lab_of(lab)[number]
    doing = "join"
    try:
        lesson.record_collectives()
        if step.joins:
            dist.init_process_group(
                "gloo", store=lesson.store, rank=lesson.rank, world_size=lesson.world
            )
        doing = "import"
        # The finished program is imported first. If both programs make a device, its device is
        # used.
        finished = lab_of(lab).finished
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
        send({"end": "error", "doing": doing, **_describe(error, path)})
