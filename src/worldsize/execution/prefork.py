"""The prefork launcher: start commands as forks of a process that has already imported torch.

A short program spends most of its time in ``import torch``, once in torchrun and once in each
rank. The fork server imports torch once, waits for commands, and forks a child process for each
command. For a torchrun command on one node, the child does the work of torchrun itself: it sets
the same variables, runs a store, and ends all ranks when one rank fails. Its ranks are forks
instead of new interpreters. If the command has other options, or if a filter reads the messages
of torchrun, the child runs the real torchrun, whose ranks are then forks, too. If a program
starts Python programs, these are also forks, as long as the program has started no thread.

The tests start the commands of transcripts and the Python code of pages in this way. There are
these exceptions, in which a command runs under bash in new interpreters:

- The first command of about one program in 132, and about one page in 132. The choice is the
  same in every session.
- The commands of the programs in labs/launch/, which show how processes are started, and the
  commands that `requirements.is_never_forked` selects.
- A command that needs a shell, unless the shell only pipes the output into a filter.
- All commands of a program once more, if the result of a forked command differs from the
  transcript. Then only the second result counts.

``--launcher=process`` runs every command under bash, exactly as it is written. Recording does
the same, and so does one Python version in the workflow. ``--launcher=prefork`` also forks the
first commands and the commands of labs/launch/, so that a change is tested faster.
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
_PIPEFAIL = "set -o pipefail; "
_CONSOLE_SCRIPTS = {"accelerate"}  # installed Python programs; their names do not end in .py
# Variables that are read when a process group is created, or that are set again for each
# command. They can be set after the import of torch, because the import does not read them.
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
TAG = "WORLD_SIZE_RUN"  # the environment variable that every process of a run inherits


def _split_pipe(command: str) -> tuple[str, bool, str]:
    """Return a command without its filter, whether its stderr goes to stdout, and the filter.

    The filter is the shell command that reads the output of the command from a pipe. It is ""
    if the command has no filter. If the command begins with `set -o pipefail`, the returned
    filter begins with it instead.
    """
    command, _, filter_command = command.partition(" | ")
    if filter_command and command.startswith(_PIPEFAIL):
        command, filter_command = command.removeprefix(_PIPEFAIL), _PIPEFAIL + filter_command
    head = command.removesuffix(_STDERR_TO_STDOUT)
    return head, head != command, filter_command


def _parse(command: str) -> tuple[dict[str, str], list[str]] | None:
    """Return the variables that a command sets, and its words without the filter.

    Return None if the command needs a shell, or sets a variable that must be set before torch
    is imported.
    """
    command, _, _ = _split_pipe(command)
    if set(command.replace("=", "")) & _SHELL_CHARACTERS:
        return None
    try:
        words, variables = shlex.split(command), {}
    except ValueError:  # the text " | " is inside quotes, so it is not a pipe
        return None
    while words and words[0].partition("=")[0] in _SETTABLE_AFTER_IMPORT:
        name, _, variables[name] = words.pop(0).partition("=")
    if not words or "=" in words[0]:
        return None
    if words[0] in _CONSOLE_SCRIPTS:
        words = ["python", str(Path(sys.executable).with_name(words[0])), *words[1:]]
    return variables, words


def _first_runs_in_bash(program: str) -> bool:
    """Return whether the first command of this program runs under bash.

    This is True for about one program in 132, so every session tests the real torchrun. The
    checksum of the name selects the same programs every time. The remainder 15 was chosen
    because its programs are short, and because they include a torchrun command and a page.
    """
    return zlib.crc32(program.encode()) % 132 == 15


@functools.cache
def shares_headers() -> bool:
    """Return whether all commands of a session can share the compiled headers of inductor.

    torch uses a hash as the name of the compiled headers, and calls openssl to compute it.
    """
    return sys.platform == "linux" and shutil.which("openssl") is not None


class Launcher:
    """A launcher that starts commands as forks of a process that has imported torch.

    This process is the fork server of `multiprocessing`. It starts with the first command,
    imports `worldsize.execution.prefork_imports`, and ends when pytest ends.
    """

    def __init__(self, fork_all: bool = False) -> None:
        """Create a launcher. ``fork_all`` also forks commands that would run under bash.

        These are the first commands of `_first_runs_in_bash` and the programs of labs/launch/.
        """
        self.fork_all = fork_all
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            ["worldsize.execution.prefork", "worldsize.execution.prefork_imports"]
        )
        if "torch" in sys.modules:  # a test of pytest itself, which already runs in a fork
            self._context = multiprocessing.get_context("fork")

    def accepts(self, command: str, program: str = "", number: int = 0) -> bool:
        """Return whether this launcher starts the command as a fork.

        The command must be `torchrun …`, `python FILE.py …`, `python -m MODULE …` or one of
        _CONSOLE_SCRIPTS. The only shell syntax that it may contain is what `_split_pipe` and
        `_parse` remove. ``program`` is the name of the program or page that the command belongs
        to. It is empty for a command that belongs to none. ``number`` is the position of the
        command in the transcript, counted from 0.
        """
        if (parsed := _parse(command)) is None:
            return False
        _, (tool, *words) = parsed
        script = words[0] if tool == "python" and words else ""
        is_python = script == "-m" or script.endswith((".py", *_CONSOLE_SCRIPTS))
        if tool != "torchrun" and not is_python:
            return False
        elif program.startswith(LAUNCH) and not self.fork_all:
            return False  # these programs show how processes are started
        return (
            self.fork_all or number > 0 or (bool(program) and not _first_runs_in_bash(program))
        )

    def start(
        self, command: str, folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> tuple[int, Callable[[], int | None]]:
        """Start a command that this launcher accepts, in ``folder``.

        The outputs are appended to the files ``out`` and ``err``. Return the process ID, and a
        function that polls the exit status. This function returns None while the command runs.
        """
        variables, words = _parse(command)
        _, joins_stderr, filter_command = _split_pipe(command)
        err = out if joins_stderr else err
        process = self.start_words(words, folder, env | variables, out, err, filter_command)
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

        ``filter_command`` is a shell command that reads the output from a pipe, or "".
        """
        arguments = (words, str(folder), env, str(out), str(err), filter_command)
        process = self._context.Process(target=_run_in_child, args=arguments)
        paths = filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
        prefixes = "TORCHINDUCTOR_", "ATEN_CPU_"  # torch reads these variables at its import
        server_env = {k: v for k, v in env.items() if k.startswith(prefixes)}
        server_env |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        server_env["OMP_WAIT_POLICY"] = "passive"  # a thread that waits does not use its core
        server_env["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "")
        if shares_headers():
            server_env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "1"
        server_env["WORLD_SIZE_PADDING"] = " " * 4096  # for `_show_variables`
        saved = dict(os.environ)
        os.environ.update(server_env)  # inherited by the server, if this command starts it
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
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
    # A background job of a shell ignores these signals. A command in a terminal receives them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    python_path = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *dict.fromkeys([*python_path, *prefork_imports.PATH])]
    for name in prefork_imports.REIMPORTED:
        sys.modules.pop(name, None)
    if filter_command:
        _pipe_into(filter_command)
    _reset_interpreter(env)
    subprocess.Popen, subprocess_handler.Popen = _Popen, _AgentPopen
    os.execvp = _execvp
    register = atexit.register
    atexit.register = lambda call, *a, **k: (_AT_EXIT.append(call), register(call, *a, **k))[1]
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
    """Set the variables of a new program, and discard the exit functions of the parent."""
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
    # torchrun often looks up the module of each of its frames. These frames belong to no
    # module, and this entry saves the search.
    frames = (frame for frame, _ in traceback.walk_stack(None))
    files = ["<frozen runpy>", *(frame.f_code.co_filename for frame in frames)]
    inspect.modulesbyfile.update(dict.fromkeys(files, ""))


def _show_variables() -> None:
    """Show the variables of this process in /proc/PID/environ (Linux only).

    The text replaces the variables with which the fork server was started. The variable
    WORLD_SIZE_PADDING ensures that there is enough space for it. If there is not, the text is
    cut off, and TAG and RANK come first.
    """
    import ctypes

    if sys.platform == "linux":
        stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, stat[47:49])
        ordered = sorted(os.environ.items(), key=lambda each: each[0] not in (TAG, "RANK"))
        text = "".join(f"{name}={value}\0" for name, value in ordered).encode()
        ctypes.memmove(start, text[: end - start].ljust(end - start, b"\0"), end - start)


def _pipe_into(command: str) -> None:
    """Fork, return in the child, and let the parent pipe the child's output into a command.

    ``command`` runs under bash, and the parent exits with the status of ``command``. If this
    status is 0 and ``command`` begins with `set -o pipefail`, the parent exits with the status
    of the child instead. The child's stderr goes into the pipe only if the stdout and the
    stderr of this process are the same file.
    """
    read_end, write_end = os.pipe()
    streams = (1, 2) if os.path.sameopenfile(1, 2) else (1,)
    child = os.fork()
    if child == 0:
        for stream in streams:
            os.dup2(write_end, stream)
        os.close(read_end)
        os.close(write_end)
        # The streams of the parent expect a file, in which they can seek.
        for name, descriptor in (("__stdout__", 1), ("__stderr__", 2)):
            old = getattr(sys, name)
            options = {"encoding": old.encoding, "errors": old.errors, "closefd": False}
            setattr(sys, name, open(descriptor, "w", **options))  # noqa: SIM115
        return
    os.close(write_end)
    status = subprocess.run(["bash", "-c", command], stdin=read_end, check=False).returncode
    os.close(read_end)  # if the command has ended early, a write of the child must now fail
    child_status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == 0 and command.startswith(_PIPEFAIL):
        status = child_status
    os._exit(status if status >= 0 else 128 - status)


# Variables that torch or Python reads when it starts.
_READ_AT_START = re.compile(
    r"PATH|PYTHON(?!FAULTHANDLER|UNBUFFERED|UTF8)|LD_|TORCH_(LOGS|TRACE)|TORCHINDUCTOR|ONEDNN"
)


def _thread_count() -> int:
    """Return the number of threads of this process; 0 on systems other than Linux."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 0


class _Popen(subprocess.Popen):
    """A `Popen` that starts Python programs as forks, as long as no thread has started."""

    initial_threads = 0  # the thread count at the start; torch may have an idle thread

    def __init__(self, args: object, *others: object, **options: object) -> None:
        env = dict(options.get("env") or os.environ)
        words = None if others or options.get("shell") else _python_command(args)
        if (
            words
            and self.may_fork()
            and not any(map(_READ_AT_START.match, _changed_variables(env)))
        ):
            inherited, preexec = options.get("pass_fds", ()), options.get("preexec_fn")
            options["preexec_fn"] = functools.partial(
                _run_forked, words, env, inherited, preexec
            )
        super().__init__(args, *others, **options)

    def may_fork(self) -> bool:
        """Return whether a fork is safe, because this program has started no thread."""
        return 0 < _thread_count() == self.initial_threads


class _AgentPopen(_Popen):
    """A `Popen` with which torchrun starts a rank as a fork.

    Its threads do not make the fork unsafe, because they only wait, and hold no lock that the
    rank needs.
    """

    def may_fork(self) -> bool:
        """Return True on Linux."""
        return _thread_count() > 0


def _execvp(file: str, args: list[str], execvp: Callable = os.execvp) -> NoReturn:
    """Replace the program of this process, like `os.execvp`.

    A Python program runs in this interpreter if no thread has started.
    """
    words = _python_command(args)
    if not words or not 0 < _thread_count() <= _Popen.initial_threads:
        execvp(file, args)
    inherited = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # listdir has closed its own descriptor again
            inherited += [descriptor] if os.get_inheritable(descriptor) else []
    _run_forked(words, dict(os.environ), inherited)


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
    inherited: Collection[int],
    preexec: Callable | None = None,
) -> NoReturn:
    """Run a program in this process, as a new interpreter would run it.

    `Popen` calls this function in the child that it has forked, and waits until the child
    closes a pipe. A call of exec would close this pipe. Therefore, this function closes all
    descriptors except the standard streams and ``inherited``. It first calls ``preexec``.
    """
    if preexec:
        preexec()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in inherited:
            with contextlib.suppress(OSError):
                os.close(descriptor)
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
    """Call ``body``; return the exit status of an interpreter and print the same messages."""
    try:
        result = body()
        return result if isinstance(result, int) else 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
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

    This function sets the variables of each rank, runs the store, and waits for the ranks. It
    forks the ranks before this process starts any thread. If a thread held a lock during the
    fork, this lock would stay locked in the child forever.
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
            variables = common | {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            os.environ.update({key: str(value) for key, value in variables.items()})
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
