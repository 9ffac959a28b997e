"""Check whether this machine can run ranks, and prepare the current process for this.

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

DISK_FULL = os.strerror(errno.ENOSPC)  # the operating system's message: no space left


def is_disk_full(error: BaseException) -> bool:
    """Return whether an error means that a disk is full.

    If the disk is already full, `tempfile` reports that no temporary folder is usable.
    """
    texts = (DISK_FULL, "No usable temporary directory")
    return isinstance(error, OSError) and any(text in str(error) for text in texts)


def loopback_error() -> str:
    """Return why ranks cannot connect on this machine, and the fix; "" if they can connect."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
    except OSError as error:
        return (
            f"the ranks cannot connect, because this machine does not reach 127.0.0.1 "
            f"({os.strerror(error.errno)}): activate the loopback interface as root, with "
            f"`ip link set lo up` or `ip addr add 127.0.0.1/8 dev lo`"
        )
    return ""


@functools.lru_cache(maxsize=1)
def hostname_resolves() -> bool:
    """Return whether the host name of this machine resolves to an address.

    torchrun expects that it does.
    """
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    return False


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of this context.

    Start a process in this context. Otherwise a signal can arrive after the start, but before
    the process ID is stored, and then the process is never ended. A signal can also get lost,
    because some modules register hooks for a fork, and Python ignores exceptions in these
    hooks. In a thread that is not the main thread, this context does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        for number in received:
            signal.raise_signal(number)


def use_batch_scheduling() -> None:
    """Use batch scheduling for this process and for all processes that it starts (Linux only).

    When a process with batch scheduling wakes up, it does not preempt a running process. This
    matters for gloo if there are more ranks than cores. The event thread of gloo does not wait
    for a lock that a different thread holds, but tries again and again (`handleEvents` in
    gloo/transport/tcp/pair.cc). Without batch scheduling, a message wakes up a rank, which
    preempts the sender while the sender still holds the lock. Until the sender runs again, its
    event thread keeps trying. In lab 04, with three ranks on two cores, each rank tried
    3 million times.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
