"""The prefork launcher: start commands as forks of a process that has already imported torch.

A short program spends most of its time in ``import torch``, once in the launcher and once in
each rank. The fork server imports torch once, waits for commands, and forks a child for each
command. For a torchrun command on one node, the child does the work of torchrun itself: it sets
the same variables, runs a store, and ends all ranks when one rank fails. Its ranks are forks
instead of new interpreters. If the command has other options, or if a filter reads the messages
of torchrun, the child runs the real torchrun, whose ranks are then forks. A program that starts
Python programs also gets forks, as long as it has only one thread.

The tests start the commands of transcripts and the Python code of pages in this way, with three
exceptions. The first command of one program in 132, and one page in 132, run in new
interpreters. The choice is the same in every session. A command that needs a shell also runs
under bash, unless the shell only pipes the whole output into a filter. If the output of a
forked command differs from the transcript, all commands of the program run again under bash,
and the second result counts.

``--launcher=process`` runs every command under bash, exactly as the command is written.
Recording does the same, and so does one Python version in the workflow. ``--launcher=prefork``
forks for all commands, which makes the edit loop faster.
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

from worldsize.execution.processes import end_with_parent
from worldsize.model import ROOT
from worldsize.model.program import LAUNCH

_SHELL_CHARACTERS = set("|&;<>()$`\\*?[]#~=%!{}\n")
_STDERR_TO_STDOUT = " 2>&1"
# Variables that are read when a process group is created or that are set again for each
# command. Importing torch does not read them.
_SETTABLE_AFTER_IMPORT = {
    "TORCH_DISTRIBUTED_DEBUG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
}
_ONE_NODE = re.compile(r"--nproc-per-node=\d+")
TAG = "WORLD_SIZE_RUN"  # the variable that every process of a run inherits


def _words(command: str) -> tuple[dict[str, str], list[str]] | None:
    """Return the variables that a command sets, and its words.

    Return None if the command needs a shell.

    The command may only set variables that can still be set after torch has been imported.
    """
    command = command.partition(f"{_STDERR_TO_STDOUT} | ")[0].removesuffix(_STDERR_TO_STDOUT)
    if set(command.replace("=", "")) & _SHELL_CHARACTERS:
        return None
    words, own = shlex.split(command), {}
    while words and words[0].partition("=")[0] in _SETTABLE_AFTER_IMPORT:
        name, _, own[name] = words.pop(0).partition("=")
    return None if not words or "=" in words[0] else (own, words)


def _first_runs_in_bash(program: str) -> bool:
    """Return whether the first command of this program runs under bash.

    This is so for one program in 132, so every session tests the real torchrun. The checksum of
    the name selects the same programs every time. The remainder 15 was chosen because its
    programs are short and because they include a torchrun command and a page.
    """
    return zlib.crc32(program.encode()) % 132 == 15


@functools.cache
def shares_headers() -> bool:
    """Return whether all commands of a session can share one compilation of inductor's headers.

    torch names the compiled headers by a hash, and it calls openssl to compute this hash.
    """
    return sys.platform == "linux" and shutil.which("openssl") is not None


class Launcher:
    """Starts commands as forks of a process that has imported torch. pytest uses this class.

    The process is the fork server of `multiprocessing`. It starts with the first command,
    imports `worldsize.execution.prefork_imports`, and ends when pytest ends.
    """

    def __init__(self, fork_all: bool = False) -> None:
        """Set ``fork_all`` to fork also for the first commands that would run under bash."""
        self.fork_all = fork_all
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["worldsize.execution.prefork", "worldsize.execution.prefork_imports"]
        )
        if "torch" in sys.modules:  # a test of pytest itself, which already runs in a fork
            self._context = multiprocessing.get_context("fork")

    def takes(self, command: str, program: str = "", number: int = 0) -> bool:
        """Return whether a fork can run this command.

        The command must be `torchrun …` or `python FILE …` without shell syntax, except for a
        filter after `2>&1 |`. ``program`` is the program that the transcript belongs to; it is
        empty for a command without a program. ``number`` is the position of the command in the
        transcript, counted from 0.
        """
        if (parsed := _words(command)) is None:
            return False
        _, (tool, *words) = parsed
        if tool != "torchrun" and (tool != "python" or not words or words[0][-3:] != ".py"):
            return False
        elif program.startswith(LAUNCH) and not self.fork_all:
            return False  # these programs show how processes are started
        return (
            self.fork_all or number > 0 or (bool(program) and not _first_runs_in_bash(program))
        )

    def start(
        self, command: str, folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> tuple[int, Callable[[], int | None]]:
        """Start a command; return its process ID and a function that polls its exit status."""
        own, words = _words(command)
        _, both, filter_command = command.partition(_STDERR_TO_STDOUT)
        err = out if both else err
        process = self.start_words(words, folder, env | own, out, err, filter_command[3:])
        return process.pid, lambda: process.exitcode

    def start_words(
        self,
        words: list[str],
        folder: Path,
        env: dict[str, str],
        out: Path,
        err: Path,
        filter_command: str = "",
    ) -> BaseProcess:
        """Start a command, given as words, with exactly the variables of ``env``.

        ``filter_command`` is a shell command that reads the whole output, or an empty string.
        """
        arguments = (words, str(folder), env, str(out), str(err), filter_command)
        process = self._context.Process(target=_run_in_child, args=arguments)
        paths = filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
        early = "TORCHINDUCTOR_", "ATEN_CPU_"  # torch reads these before a command starts
        server_env = {k: v for k, v in env.items() if k.startswith(early)}
        server_env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        # waiting threads leave the core to other threads
        server_env["OMP_WAIT_POLICY"] = "passive"
        server_env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "")
        if shares_headers():
            server_env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "1"
        server_env["WORLD_SIZE_PADDING"] = " " * 4096
        kept = dict(os.environ)
        os.environ.update(server_env)  # the server reads them when the first command starts it
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        return process


# --- in the child process ---------------------------------------------------------------------


_AT_EXIT: list[Callable] = []  # the exit functions that this process has registered


def _run_in_child(
    words: list[str], folder: str, env: dict[str, str], out: str, err: str, filter_command: str
) -> NoReturn:
    """Run the command in this child process, and exit with its status."""
    import atexit

    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    from worldsize.execution import prefork_imports

    end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # undo the choice of the fork server
    os.setsid()
    # A shell lets background jobs ignore these signals. A command in a terminal receives them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    own = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *dict.fromkeys([*own, *prefork_imports.PATH])]
    for name in prefork_imports.REIMPORTED:
        sys.modules.pop(name, None)
    if filter_command:
        _pipe_into(filter_command)
    _reset_interpreter(env)
    subprocess.Popen, subprocess_handler.Popen = _Popen, _AgentPopen
    os.execvp = _execvp
    register = atexit.register
    atexit.register = lambda does, *a, **k: (_AT_EXIT.append(does), register(does, *a, **k))[1]
    tool, *arguments = words
    options = itertools.takewhile(lambda word: word.startswith("-"), arguments)
    if tool == "torchrun" and not filter_command and all(map(_ONE_NODE.fullmatch, options)):
        _exit_interpreter(_status_of(lambda: _torchrun(arguments)))
    _run_tool(tool, arguments)


def _run_tool(tool: str, arguments: list[str]) -> NoReturn:
    """Run `torchrun` or `python` with these arguments, and exit with the same status."""
    from torch.distributed.run import main

    if tool == "torchrun":
        _exit_interpreter(_status_of(lambda: main(arguments)))
    _exit_interpreter(_run_script(arguments))


def _reset_interpreter(env: dict[str, str]) -> None:
    """Set these variables, and discard the exit functions of the parent process."""
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
        importlib.import_module("sitecustomize")  # every new interpreter imports it
    faulthandler.enable()
    torch.distributed.set_debug_level_from_env()
    # torchrun looks up the module of each of its frames, often. These frames belong to no
    # module.
    frames = (frame for frame, _ in traceback.walk_stack(None))
    files = ["<frozen runpy>", *(frame.f_code.co_filename for frame in frames)]
    inspect.modulesbyfile.update(dict.fromkeys(files, ""))


def _show_variables() -> None:
    """Show the variables of this process in /proc/PID/environ (Linux only).

    The text overwrites the variables that the fork server was started with. Their padding makes
    enough room for it.
    """
    import ctypes

    if sys.platform == "linux":
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, stat[47:49])
        ordered = sorted(os.environ.items(), key=lambda each: each[0] not in (TAG, "RANK"))
        text = "".join(f"{name}={value}\0" for name, value in ordered).encode()
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _pipe_into(command: str) -> None:
    """Fork, let the child continue, and pipe its output into a shell command in the parent."""
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.dup2(writes, 1)
        os.dup2(writes, 2)
        os.close(reads)
        os.close(writes)
        return
    os.close(writes)
    os._exit(subprocess.run(["bash", "-c", command], stdin=reads, check=False).returncode)


# Variables that torch or Python reads when it starts.
_READ_AT_START = re.compile(
    r"PATH|PYTHON(?!FAULTHANDLER|UNBUFFERED|UTF8)|LD_|TORCH_(LOGS|TRACE)|TORCHINDUCTOR|ONEDNN"
)


def _thread_count() -> int:
    """Return the number of threads of this process; 0 on systems other than Linux."""
    here = Path("/proc/self/task")
    return len(list(here.iterdir())) if here.exists() else 0


class _Popen(subprocess.Popen):
    """Starts Python programs as forks (`_run_forked`), as long as no thread has started."""

    initial_threads = 0  # the thread count when the program began: torch has one idle thread

    def __init__(self, args: object, *others: object, **options: object) -> None:
        env = dict(options.get("env") or os.environ)
        words = None if others or options.get("shell") else _python_command(args)
        if (
            words
            and self.may_fork()
            and not any(map(_READ_AT_START.match, _changed_variables(env)))
        ):
            kept, before = options.get("pass_fds", ()), options.get("preexec_fn")
            options["preexec_fn"] = functools.partial(_run_forked, words, env, kept, before)
        super().__init__(args, *others, **options)

    def may_fork(self) -> bool:
        return 0 < _thread_count() == self.initial_threads


class _AgentPopen(_Popen):
    """Starts a rank.

    The threads of the elastic agent only wait, and hold no lock that it needs.
    """

    def may_fork(self) -> bool:
        return _thread_count() > 0


def _execvp(file: str, args: list[str], exec_before: Callable = os.execvp) -> NoReturn:
    """Replace this process by a Python program; without exec if no thread has started."""
    words = _python_command(args)
    if not words or not 0 < _thread_count() <= _Popen.initial_threads:
        exec_before(file, args)
    kept = []
    for handle in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed again
            kept += [handle] if os.get_inheritable(handle) else []
    _run_forked(words, dict(os.environ), kept)


def _changed_variables(env: dict[str, str]) -> set[str]:
    """Return the names of the variables that differ from those of this process."""
    return {name for name, _ in env.items() ^ os.environ.items()}


def _python_command(args: object) -> list[str] | None:
    """Return the command as `torchrun …` or `python FILE …`; None for any other command."""
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


def _run_forked(
    words: list[str],
    env: dict[str, str],
    kept: Collection[int],
    before: Callable | None = None,
) -> NoReturn:
    """Run a program in the child that `Popen` has forked, as a new interpreter would run it.

    `Popen` waits until its pipe is closed, as it is when a process executes another program.
    This function therefore closes all other descriptors.
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
    _reset_interpreter(env)
    _run_tool(words[0], words[1:])


def _status_of(body: Callable[[], int | object]) -> int:
    """Return the exit status that an interpreter would have, and print the same messages."""
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


def _exit_interpreter(status: int) -> NoReturn:
    """Exit like an interpreter: join threads, call the exit functions, and flush the output."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_script(arguments: list[str]) -> int:
    """Run a script with its arguments as a new interpreter would; return its exit status."""
    import runpy

    import torch

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        options = {"run_name": "__main__", "alter_sys": True}
        return _status_of(lambda: runpy.run_module(arguments[1], **options))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    _Popen.initial_threads = _thread_count()
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    return _status_of(lambda: runpy.run_path(arguments[0], run_name="__main__"))


def _torchrun(arguments: list[str]) -> int:
    """Do the work of torchrun on one node, and return its exit status.

    It sets the variables of each rank, runs the store and waits for the ranks.

    The ranks are forked before this process starts any thread. If a thread held a lock during
    the fork, this lock would stay locked in the child forever.
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
            end_with_parent()
            listener.close()
            own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            os.environ.update({key: str(value) for key, value in (common | own).items()})
            _show_variables()
            _exit_interpreter(_run_script([args.training_script, *args.training_script_args]))
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
