"""Warm: start commands from a process that has imported torch already.

Most of a short program's time is ``import torch``, once in the launcher and once in each rank.
A process that has torch waits for commands and forks for each. For a torchrun command the
fork does what torchrun does on one node, with ranks that are forks in place of fresh
interpreters: the same variables, a store, and an end for all when one rank fails.

Commands of transcripts and Python of pages start warm, but for the first command of one
program in 40, and one page in 40, always the same ones; whatever needs a shell runs as typed.
What differs from its transcript when it was started warm is run again, all of it as typed, and
that counts. ``--plain`` runs every command as typed, as recording and one Python of the
workflow do; ``--warm`` starts all warm, for the edit loop.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import re
import shlex
import signal
import sys
import zlib
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from book.core import ROOT
from book.core.program import LAUNCH

# What these show or count is told by processes that are forks of no other.
_AS_TYPED = {
    "snippets/01_parallelism_strategies/rendezvous_by_hand.py",
    "snippets/02_ddp/group_survives.py",
    "labs/lab01_multi_gpu_setup.py",
}
_CHECK = "python labs/check.py "  # but how these are graded is as for the others
_FOR_A_SHELL = set("|&;<>()$`\\\"'*?[]#~=%!{}\n")
_BOTH = " 2>&1"
# read when a group is joined, and not when torch is imported
_LATE = {"TORCH_DISTRIBUTED_DEBUG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def _words(command: str) -> tuple[dict[str, str], list[str]] | None:
    """A command's own variables, and its words; None where it takes a shell to run it.

    Only a variable that can still be set when torch has been imported is allowed.
    """
    command = command.removesuffix(_BOTH)
    if set(command.replace("=", "")) & _FOR_A_SHELL:
        return None
    words, own = shlex.split(command), {}
    while words and words[0].partition("=")[0] in _LATE:
        name, _, own[name] = words.pop(0).partition("=")
    return None if not words or "=" in words[0] else (own, words)


def _first_as_typed(program: str) -> bool:
    """Whether a program is one of those whose first command runs as typed.

    One in 40 keeps torchrun itself in every session; the checksum of the name makes them
    the same ones each time. Which remainder is taken does not matter.
    """
    return zlib.crc32(program.encode()) % 40 == 28


class Launcher:
    """The side of pytest: has commands started by forks of a process that has torch.

    That process is the fork server of `multiprocessing`: it starts with the first command,
    imports `book.run.preload`, and ends with pytest.
    """

    def __init__(self, eager: bool = False) -> None:
        """``eager``: take all first commands too."""
        self.eager = eager
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["book.run.warm", "book.run.preload"])

    def takes(self, command: str, program: str = "", number: int = 0) -> bool:
        """Whether to start a command warm, the ``number``-th (from 0) of its transcript.

        It can be done for `torchrun …` and `python FILE …` without shell syntax. ``program`` is
        empty for a command that belongs to none.
        """
        shown = program in _AS_TYPED and not command.startswith(_CHECK)
        if shown or (parsed := _words(command)) is None:
            return False
        _, (tool, *words) = parsed
        if tool == "torchrun":
            options = itertools.takewhile(lambda word: word.startswith("-"), words)
            if not all(re.fullmatch(r"--nproc-per-node=\d+", option) for option in options):
                return False  # addresses, ports, rendezvous: what they do is torchrun's to show
        elif tool != "python" or not words or not words[0].endswith(".py"):
            return False
        elif program.startswith(LAUNCH) and not self.eager:
            return False  # what starts processes is what these show
        return self.eager or number > 0 or (bool(program) and not _first_as_typed(program))

    def start(
        self, command: str, folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> tuple[int, Callable[[], int | None]]:
        """Start a command; return its process number and a function that polls its status."""
        own, words = _words(command)
        err = out if command.endswith(_BOTH) else err
        process = self.start_words(words, folder, env | own, out, err)
        return process.pid, lambda: process.exitcode

    def start_words(
        self, words: list[str], folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> BaseProcess:
        """Start what the words of a command say, with these variables and no others."""
        arguments = (words, str(folder), env, str(out), str(err))
        process = self._context.Process(target=_become, args=arguments)
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        of_server = {k: v for k, v in env.items() if k.startswith("TORCHINDUCTOR_")}
        of_server |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        of_server["OMP_WAIT_POLICY"] = "passive"  # threads that wait leave the core to others
        of_server["CUDA_VISIBLE_DEVICES"] = env.get("CUDA_VISIBLE_DEVICES", "")
        kept = dict(os.environ)
        os.environ.update(of_server)  # read by the server, when the first command starts it
        try:
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(kept)
        return process


# --- the side of the process that has torch ---------------------------------------------------


def _become(words: list[str], folder: str, env: dict[str, str], out: str, err: str) -> NoReturn:
    """Become the command: never returns."""
    import faulthandler

    import torch

    from book.run import preload

    _end_with_parent()
    multiprocessing.set_start_method(None, force=True)  # not that of a fork server's child
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    os.environ.clear()
    os.environ.update(env)
    own = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *dict.fromkeys([*own, *preload.PATH])]
    for name in preload.AGAIN:
        sys.modules.pop(name, None)
    with contextlib.suppress(ImportError):
        importlib.import_module("sitecustomize")  # as each interpreter does
    faulthandler.enable()
    torch.distributed.set_debug_level_from_env()
    tool, *arguments = words
    if tool == "torchrun":
        _leave(_status_of(lambda: _torchrun(arguments)))
    _leave(_run_script(arguments))


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

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
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
