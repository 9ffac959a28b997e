"""Warm: start commands from a process that has imported torch already.

Most of a short program's time is ``import torch``, once in the launcher and once in each rank.
A process that has torch waits for commands and forks for each. The child of a fork runs the
very launcher that torchrun runs (torchrun's own parser makes its configuration), with
``start_method="fork"`` in place of fresh interpreters.

Torchrun commands of transcripts start warm, but for the first command of one program in four,
always the same ones; single processes and whatever needs a shell run as typed. What differs
from its transcript when it was started warm is run again, all of it as typed, and that counts.
``--plain`` runs every command as typed, as recording and the workflow do; ``--warm`` also
starts single processes warm, for the edit loop.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

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
        """``eager``: take all first commands too, and those of one process."""
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
            as_typed = zlib.crc32(program.encode()) % 4 == 0 if program else True
            return self.eager or number > 0 or not as_typed
        single = words[0] == "python" and len(words) > 1 and words[1].endswith(".py")
        return self.eager and single

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
    import select

    import torch
    import torch.distributed as dist
    import torch.distributed.launcher.api
    import torch.distributed.run
    import torch.nn.parallel

    assert dist.is_available()
    assert torch.get_num_threads() == 1  # a thread pool would not survive the fork
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
    import traceback

    import torch.distributed

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
    status = 1
    try:
        if request["words"][0] == "torchrun":
            _torchrun(request["words"][1:])
        else:
            torch.set_num_threads(os.cpu_count() or 1)
            sys.argv = request["words"][1:]
            sys.path[0] = request["folder"]
            runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as leaving:
        status = (
            leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        )
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class _Left(BaseException):
    """A rank has called ``os._exit(0)``."""


def _rank(script: str, arguments: list[str]) -> None:
    """What torchrun's fresh interpreter would do in each rank."""
    import runpy

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    leave = os._exit

    def hand_in_and_leave(status: int) -> None:
        # the launcher waits for what a forked rank returns, so one that is well must return
        if status:
            leave(status)
        raise _Left

    os._exit = hand_in_and_leave
    try:
        runpy.run_path(script, run_name="__main__")
    except _Left:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit = leave


def _torchrun(arguments: list[str]) -> None:
    """torchrun by its own parser and launcher, its workers forked."""
    import uuid

    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    args = parse_args(arguments)
    if args.rdzv_backend == "static" and not args.rdzv_endpoint and args.nnodes in {"1", "1:1"}:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    config, _, _ = config_from_args(args)
    config.start_method = "fork"
    elastic_launch(config, _rank)(args.training_script, args.training_script_args)


if __name__ == "__main__":
    _serve()
