"""Machine: what a grading or a run needs of it, asked first; for the checker and the engine.

It imports nothing of either, and no torch.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import threading
from collections.abc import Iterator

FULL = os.strerror(errno.ENOSPC)


def is_full(error: BaseException) -> bool:
    """Whether a disk had no room, be it for the one byte that a temporary folder takes."""
    nowhere = "No usable temporary directory"
    return isinstance(error, OSError) and any(text in str(error) for text in (FULL, nowhere))


def loopback_error() -> str:
    """Why ranks of this machine cannot meet, and what to do; empty where they can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
    except OSError as error:
        return (
            f"ranks cannot meet here, this machine does not reach 127.0.0.1 "
            f"({os.strerror(error.errno)}): bring lo up with that address, as root: "
            f"ip link set lo up, or ip addr add 127.0.0.1/8 dev lo"
        )
    return ""


@functools.lru_cache(maxsize=1)
def hostname_resolves() -> bool:
    """Whether this machine's own name leads to an address, as torchrun expects."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    return False


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until what is being started is known, and can be ended.

    What they raise meanwhile can also be lost: modules have hooks at a fork, and Python ignores
    what is raised in those.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    own = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in own.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in came:
            signal.raise_signal(number)


def use_batch_scheduling() -> None:
    """Linux: let what this process starts be woken without driving others from their cores.

    gloo's thread for events does not wait for a lock that another thread has, it asks again
    (`handleEvents` in gloo/transport/tcp/pair.cc). Where ranks outnumber cores, the message
    which a thread sends wakes a rank that takes the sender's core while the sender still has
    the lock, and until it comes back its own loop asks for it: in lab 04 with three ranks on
    two cores 3 million times in each. A batch process that wakes waits for the end of a turn.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
