"""Warm: start commands from a process that has imported torch already.

Most of a short program's time is ``import torch``, once in the launcher and once in each rank.
A process that has torch waits for commands and forks for each. For a torchrun command the
fork does what torchrun does on one node, with ranks that are forks in place of fresh
interpreters: the same variables, a store, and an end for all when one rank fails.

Commands of transcripts start warm, but for the first command of one program in eight, always
the same ones; whatever needs a shell runs as typed. What differs from its transcript when it
was started warm is run again, all of it as typed, and that counts. ``--plain`` runs every
command as typed, as recording and the workflow do; ``--warm`` starts all warm, for the edit
loop.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

# What these show or count is told by processes that are forks of no other.
_AS_TYPED = {
    "snippets/01_parallelism_strategies/rendezvous_by_hand.py",
    "snippets/02_ddp/group_survives.py",
    "snippets/02_ddp/threads_or_processes.py",
    "labs/lab01_multi_gpu_setup.py",
    "labs/lab05_deepspeed.py",
}
_PLAIN = set("|&;<>()$`\\\"'*?[]#~=%!{}\n")


def _words(command: str) -> tuple[dict[str, str], list[str]] | None:
    """A command's own variables, and its words; None where it takes a shell to run it.

    Only a variable that can still be set when torch has been imported is allowed.
    """
    if set(command.replace("=", "")) & _PLAIN:
        return None
    words, own = shlex.split(command), {}
    if words and words[0].startswith("TORCH_DISTRIBUTED_DEBUG="):
        name, _, own[name] = words.pop(0).partition("=")
    return None if not words or "=" in words[0] else (own, words)


class Launcher:
    """The side of pytest: asks the warm process to start commands."""

    def __init__(self, eager: bool = False) -> None:
        """``eager``: take all first commands too."""
        self.eager = eager
        self._process: subprocess.Popen | None = None
        self._ended: dict[int, int] = {}

    def takes(self, command: str, program: str = "", number: int = 0) -> bool:
        """Whether to start a command warm, the ``number``-th (from 0) of its transcript.

        It can be done for `torchrun …` and `python FILE …` without shell syntax. ``program`` is
        empty for a command that belongs to none.
        """
        if (parsed := _words(command)) is None:
            return False
        _, words = parsed
        if words[0] == "torchrun":
            options = itertools.takewhile(lambda word: word.startswith("-"), words[1:])
            if not all(re.fullmatch(r"--nproc-per-node=\d+", option) for option in options):
                return False  # addresses, ports, rendezvous: what they do is torchrun's to show
        elif words[0] != "python" or len(words) == 1 or not words[1].endswith(".py"):
            return False
        if program in _AS_TYPED:
            return False
        if (
            words[0] == "python"
            and program.startswith(("labs/", "assessment/"))
            and not self.eager
        ):
            return False  # the labs' own tools start processes, and import torch only for that
        as_typed = zlib.crc32(program.encode()) % 8 == 4 if program else True
        return self.eager or number > 0 or not as_typed

    def start(
        self, command: str, folder: Path, env: dict[str, str], out: Path, err: Path
    ) -> tuple[int, Callable[[], int | None]]:
        """Start a command; return its process number and a function that polls its status."""
        if self._process is None or self._process.poll() is not None:
            root = str(Path(__file__).resolve().parent.parent)
            paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "book.warm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
                | {key: env[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in env},
                text=True,
            )
        out.touch()
        err.touch()
        own, words = _words(command)
        request = {
            "words": words,
            "folder": str(folder),
            "env": env | own,
            "out": str(out),
            "err": str(err),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())

        def poll() -> int | None:
            # the warm process reaps the child, then leaves its status beside the output
            try:
                return int((out.parent / "status").read_text())
            except (OSError, ValueError):
                return None

        return pid, poll

    def close(self) -> None:
        """End the warm process."""
        if self._process is not None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _serve() -> None:
    """The side of the warm process: read requests, fork, report."""
    import contextlib
    import gc
    import select
    import threading

    import torch
    import torch._dynamo  # the first step of an optimizer imports it
    import torch.distributed as dist
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.run
    import torch.distributed.tensor.parallel

    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401

    assert dist.is_available()
    assert torch.get_num_threads() == 1  # a thread pool would not survive the fork
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, every page
    children: dict[int, Path] = {}
    buffer = b""
    while True:
        ready, _, _ = select.select([0], [], [], 0.01 if children else None)
        if ready:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                break
            buffer += chunk
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _child(request)
            children[pid] = Path(request["out"]).parent
            print(pid, flush=True)
        while children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            folder = children.pop(pid, None)
            if folder is not None and folder.is_dir():
                code = os.waitstatus_to_exitcode(status)
                partial = folder / "status.part"
                partial.write_text(str(code))
                partial.replace(folder / "status")
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _child(request: dict) -> None:
    """Become the command: never returns."""
    import faulthandler
    import runpy

    import torch

    os.setsid()
    os.chdir(request["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for target, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), target)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)
    os.environ.clear()
    os.environ.update(request["env"])
    faulthandler.enable()
    torch.distributed.set_debug_level_from_env()
    if request["words"][0] == "torchrun":
        _leave(_status_of(lambda: _torchrun(request["words"][1:])))
    torch.set_num_threads(os.cpu_count() or 1)
    sys.argv = request["words"][1:]
    sys.path[0] = request["folder"]
    _leave(_status_of(lambda: runpy.run_path(sys.argv[0], run_name="__main__")))


def _status_of(body: Callable[[], int | object]) -> int:
    """The exit status an interpreter would leave with; what it would say is said."""
    import traceback

    try:
        result = body()
        return result if isinstance(result, int) else 0
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
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


def _rank(script: str, arguments: list[str]) -> int:
    """What torchrun's fresh interpreter would do in a rank; its exit status."""
    import runpy

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    return _status_of(lambda: runpy.run_path(script, run_name="__main__"))


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
            listener.close()
            own = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank}
            os.environ.update({key: str(value) for key, value in (common | own).items()})
            _leave(_rank(args.training_script, args.training_script_args))
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


if __name__ == "__main__":
    _serve()
