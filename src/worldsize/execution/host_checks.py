"""Host checks: finds out whether this machine can run ranks, and prepares the process for that.

The tests and the graders call these functions before they start ranks. This module imports only
the standard library.
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
    """Return whether an error means that a disk is full, even for a temporary folder."""
    nowhere = "No usable temporary directory"
    return isinstance(error, OSError) and any(text in str(error) for text in (FULL, nowhere))


def loopback_error() -> str:
    """Return why ranks cannot connect on this machine, and what to do; "" if they can."""
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
    """Return whether the name of this machine has an address, as torchrun expects."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    return False


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of this context.

    Start a process in this context. Otherwise a signal can arrive after the start, but before
    the process number is stored, and then nothing can end the process. A signal can also get
    lost: some modules register hooks for a fork, and Python ignores exceptions in these hooks.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    own = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in own.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in received:
            signal.raise_signal(number)


def use_batch_scheduling() -> None:
    """Linux: use batch scheduling for this process and for all that it starts.

    A process of this class that wakes up does not preempt a running process. This matters for
    gloo if there are more ranks than cores. The event thread of gloo does not wait for a lock
    of a different thread, but tries again and again (`handleEvents` in
    gloo/transport/tcp/pair.cc). Without batch scheduling, a message wakes up a rank, which
    preempts the sender while the sender still has the lock. Until the sender runs again, its
    event thread keeps trying. In lab 04, with three ranks on two cores, each rank tried
    3 million times.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
