"""Warm: start commands from a process that has imported torch already.

Most of a short program's time is ``import torch``, once in the launcher and once in each rank.
A process that has torch waits for commands and forks for each. For a torchrun command of one
node the fork does what torchrun does, with ranks that are forks in place of fresh interpreters:
the same variables, a store, and an end for all when one rank fails. With other options, or
where something reads what torchrun itself says, the fork is torchrun, and forks for its ranks.
So does a program that starts Python programs before it has a second thread.

Commands of transcripts and Python of pages start warm, but for the first command of one
program in 132, and one page in 132, always the same ones; what needs a shell for more than to
pipe all that is said into a filter runs as typed.
What differs from its transcript when it was started warm is run again, all of it as typed, and
that counts. ``--launcher=process`` runs every command as typed, as recording and one Python of
the
workflow do; ``--launcher=prefork`` starts all warm, for the edit loop.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Collection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from worldsize.model import ROOT
from worldsize.model.program import LAUNCH

_FOR_A_SHELL = set("|&;<>()$`\\*?[]#~=%!{}\n")
_BOTH = " 2>&1"
# read when a group is joined, or set again for each command, and not when torch is imported
_LATE = {"TORCH_DISTRIBUTED_DEBUG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_LATE |= {"OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"}
_ONE_NODE = re.compile(r"--nproc-per-node=\d+")
TAG = "WORLD_SIZE_RUN"  # the variable that everything of a run carries


def _words(command: str) -> tuple[dict[str, str], list[str]] | None:
    """A command's own variables, and its words; None where it takes a shell to run it.

    Only a variable that can still be set when torch has been imported is allowed.
    """
    command = command.partition(f"{_BOTH} | ")[0].removesuffix(_BOTH)
    if set(command.replace("=", "")) & _FOR_A_SHELL:
        return None
    words, own = shlex.split(command), {}
    while words and words[0].partition("=")[0] in _LATE:
        name, _, own[name] = words.pop(0).partition("=")
    return None if not words or "=" in words[0] else (own, words)


def _first_as_typed(program: str) -> bool:
    """Whether a program is one of those whose first command runs as typed.

    One in 132 keeps torchrun itself in every session; the checksum of the name makes them
    the same ones each time. Which remainder is taken does not matter: of 15 the programs are
    short, and torchrun and a page are among them.
    """
    return zlib.crc32(program.encode()) % 132 == 15


@functools.cache
def shares_headers() -> bool:
    """Whether what torch.compile writes has its headers compiled once a session, for all.

    It names them by a digest, which it asks of openssl.
    """
    return sys.platform == "linux" and shutil.which("openssl") is not None


class Launcher:
    """The side of pytest: has commands started by forks of a process that has torch.

    That process is the fork server of `multiprocessing`: it starts with the first command,
    imports `worldsize.execution.prefork_imports`, and ends with pytest.
    """

    def __init__(self, eager: bool = False) -> None:
        """``eager``: take all first commands too."""
        self.eager = eager
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["worldsize.execution.prefork", "worldsize.execution.prefork_imports"]
        )
        if "torch" in sys.modules:  # a test of pytest, started warm itself
            self._context = multiprocessing.get_context("fork")

    def takes(self, command: str, program: str = "", number: int = 0) -> bool:
        """Whether to start a command warm, the ``number``-th (from 0) of its transcript.

        It can be done for `torchrun …` and `python FILE …` without shell syntax, but for a
        filter behind `2>&1 |`. ``program`` is empty for a command that belongs to none.
        """
        if (parsed := _words(command)) is None:
            return False
        _, (tool, *words) = parsed
        if tool != "torchrun" and (tool != "python" or not words or words[0][-3:] != ".py"):
            return False
        elif program.startswith(LAUNCH) and not self.eager:
            return False  # what starts processes is what these show
        return self.eager or number > 0 or (bool(program) and not _first_as_typed(program))

    def start(
        self, command: str, folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> tuple[int, Callable[[], int | None]]:
        """Start a command; return its process number and a function that polls its status."""
        own, words = _words(command)
        _, both, read_by = command.partition(_BOTH)
        err = out if both else err
        process = self.start_words(words, folder, env | own, out, err, read_by[3:])
        return process.pid, lambda: process.exitcode

    def start_words(
        self,
        words: list[str],
        folder: Path,
        env: dict[str, str],
        out: Path,
        err: Path,
        read_by: str = "",
    ) -> BaseProcess:
        """Start what the words of a command say, with these variables and no others.

        ``read_by`` is a command for a shell that reads all that they print.
        """
        arguments = (words, str(folder), env, str(out), str(err), read_by)
        process = self._context.Process(target=_become, args=arguments)
        paths = filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
        early = "TORCHINDUCTOR_", "ATEN_CPU_"  # read before a command starts
        of_server = {k: v for k, v in env.items() if k.startswith(early)}
        of_server |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        of_server["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the core to others
        of_server["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "")
        if shares_headers():
            of_server["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "1"
        of_server["ROOM"] = " " * 4096
        kept = dict(os.environ)
        os.environ.update(of_server)  # read by the server, when the first command starts it
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        return process


# --- the side of the process that has torch ---------------------------------------------------


_AT_EXIT: list[Callable] = []  # what this process has to do when it ends


def _become(
    words: list[str], folder: str, env: dict[str, str], out: str, err: str, read_by: str
) -> NoReturn:
    """Become the command: never returns."""
    import atexit

    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from worldsize.execution import prefork_imports

    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # not that of a fork server's child
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, too, where a
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # shell started the session in the background
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    own = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *dict.fromkeys([*own, *prefork_imports.PATH])]
    for name in prefork_imports.AGAIN:
        sys.modules.pop(name, None)
    if read_by:
        _pipe_into(read_by)
    _begin(env)
    subprocess.Popen, subprocess_handler.Popen = _Popen, _OfAgent
    os.execvp = _execvp
    register = atexit.register
    atexit.register = lambda does, *a, **k: (_AT_EXIT.append(does), register(does, *a, **k))[1]
    tool, *arguments = words
    options = itertools.takewhile(lambda word: word.startswith("-"), arguments)
    if tool == "torchrun" and not read_by and all(map(_ONE_NODE.fullmatch, options)):
        _leave(_status_of(lambda: _torchrun(arguments)))
    _do(tool, arguments)


def _do(tool: str, arguments: list[str]) -> NoReturn:
    """Be this tool, torchrun or python, and leave as it does."""
    from torch.distributed.run import main

    if tool == "torchrun":
        _leave(_status_of(lambda: main(arguments)))
    _leave(_run_script(arguments))


def _begin(env: dict[str, str]) -> None:
    """Take these variables, and leave to the parent what it has to do when it ends."""
    import atexit
    import faulthandler
    import inspect
    import tempfile
    import traceback
    import weakref
    from multiprocessing import process, util

    import torch

    os.environ.clear()
    os.environ.update(env)
    _show_variables()
    while _AT_EXIT:
        atexit.unregister(_AT_EXIT.pop())
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    util._finalizer_registry.clear()
    process._children.clear()
    tempfile.tempdir = None
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # as each interpreter does
    faulthandler.enable()
    torch.distributed.set_debug_level_from_env()
    # torchrun has each of its frames looked up, often, and no module's are these
    frames = (frame for frame, _ in traceback.walk_stack(None))
    files = ["<frozen runpy>", *(frame.f_code.co_filename for frame in frames)]
    inspect.modulesbyfile.update(dict.fromkeys(files, ""))


def _show_variables() -> None:
    """Linux: let others see the variables of this process, as they see those of any.

    They look where the variables stood with which the server was started, among them `ROOM`.
    """
    import ctypes

    if sys.platform == "linux":
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, stat[47:49])
        told = sorted(os.environ.items(), key=lambda each: each[0] not in (TAG, "RANK"))
        text = "".join(f"{name}={value}\0" for name, value in told).encode()
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _pipe_into(command: str) -> None:
    """Fork: the child goes on, and a shell reads what it prints; this process waits for it."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        os.close(reads)
        os.close(writes)
        return
    os.close(writes)
    os._exit(subprocess.run(["bash", "-c", command], stdin=reads, check=False).returncode)


# variables that are read when torch or Python starts
_EARLY = re.compile(
    r"PATH|PYTHON(?!FAULTHANDLER|UNBUFFERED|UTF8)|LD_|TORCH_(LOGS|TRACE)|TORCHINDUCTOR|ONEDNN"
)


def _threads() -> int:
    """How many threads this process has; 0 where Linux cannot be asked."""
    here = Path("/proc/self/task")
    return len(list(here.iterdir())) if here.exists() else 0


class _Popen(subprocess.Popen):
    """Starts a Python program as a fork, if this process has begun no thread: see `_forked`."""

    at_first = 0  # how many threads the program began with: torch has one that waits

    def __init__(self, args: object, *others: object, **how: object) -> None:
        env = dict(how.get("env") or os.environ)
        words = None if others or how.get("shell") else _python(args)
        if words and self.may_fork() and not any(map(_EARLY.match, _differ(env))):
            kept, before = how.get("pass_fds", ()), how.get("preexec_fn")
            how["preexec_fn"] = functools.partial(_forked, words, env, kept, before)
        super().__init__(args, *others, **how)

    def may_fork(self) -> bool:
        return 0 < _threads() == self.at_first


class _OfAgent(_Popen):
    """Starts a rank: the agent's threads only wait, and hold nothing that it needs."""

    def may_fork(self) -> bool:
        return _threads() > 0


def _execvp(file: str, args: list[str], exec_before: Callable = os.execvp) -> NoReturn:
    """Become a Python program as a fork would, if no thread has begun since torch's own."""
    words = _python(args)
    if not words or not 0 < _threads() <= _Popen.at_first:
        exec_before(file, args)
    kept = []
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the listing's own is closed
            kept += [handle] if os.get_inheritable(handle) else []
    _forked(words, dict(os.environ), kept)


def _differ(env: dict[str, str]) -> set[str]:
    """The variables that are not as in this process."""
    return {name for name, _ in env.items() ^ os.environ.items()}


def _python(args: object) -> list[str] | None:
    """What is started, `torchrun …` or `python FILE …`; None where it is something else."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    tool, *words = map(os.fspath, args)
    if tool not in (sys.executable, "python", "torchrun"):
        return None
    if tool != "torchrun" and words[:1] == ["-u"]:
        del words[0]
    if words[:2] == ["-m", "torch.distributed.run"]:
        tool, words = "torchrun", words[2:]
    if tool == "torchrun":
        return [tool, *words]
    return ["python", *words] if words and words[0].endswith(".py") else None


def _forked(
    words: list[str],
    env: dict[str, str],
    kept: Collection[int],
    before: Callable | None = None,
) -> NoReturn:
    """Be what a fresh interpreter would be, in the child that `Popen` has forked.

    To close its pipe, as starting another program does, tells `Popen` that it has started.
    """
    if before:
        before()
    for handle in map(int, os.listdir("/proc/self/fd")):
        if handle > 2 and handle not in kept:
            with contextlib.suppress(OSError):
                os.close(handle)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(sys.path[0] + os.sep):
            del sys.modules[name]
    _begin(env)
    _do(words[0], words[1:])


def _end_with_parent() -> None:
    """Linux: be killed once the process that forked this one is gone, as it is with pytest."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _status_of(body: Callable[[], int | object]) -> int:
    """The exit status an interpreter would leave with; what it would say is said."""
    try:
        result = body()
        return result if isinstance(result, int) else 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1


def _leave(status: int) -> NoReturn:
    """Leave as an interpreter does: threads joined, exit functions called, output written."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_script(arguments: list[str]) -> int:
    """What a fresh interpreter would do with a script and its arguments; its exit status."""
    import runpy

    import torch

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        how = {"run_name": "__main__", "alter_sys": True}
        return _status_of(lambda: runpy.run_module(arguments[1], **how))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _Popen.at_first = _threads()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    return _status_of(lambda: runpy.run_path(arguments[0], run_name="__main__"))


def _torchrun(arguments: list[str]) -> int:
    """What torchrun does on one node: set each rank's variables, keep the store, wait.

    The ranks are forked before this process has any thread: a lock that a thread holds at a
    fork stays locked in the child for ever.
    """
    import socket
    import uuid

    from torch.distributed import TCPStore
    from torch.distributed.run import parse_args

    args = parse_args(arguments)
    world_size = int(args.nproc_per_node)
    listener = socket.create_server(("localhost", 0), backlog=128)
    port = listener.getsockname()[1]
    size = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    size |= {"ROLE_WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": 1, "GROUP_RANK": 0}
    common = size | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "ROLE_NAME": args.role,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_RUN_ID": uuid.uuid4(),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": args.signals_to_handle,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ranks: set[int] = set()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _end_with_parent()
            listener.close()
            own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            os.environ.update({key: str(value) for key, value in (common | own).items()})
            _show_variables()
            _leave(_run_script([args.training_script, *args.training_script_args]))
        ranks.add(pid)
    store = TCPStore(
        "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    status = 0
    while ranks:
        pid, code = os.wait()
        ranks.discard(pid)
        if code != 0 and status == 0:
            status = 1
            for other in ranks:
                os.kill(other, signal.SIGTERM)
    del store
    return status
