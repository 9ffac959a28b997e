"""Machine: what programs need and a machine may lack, asked before the first one starts."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket

FULL = os.strerror(errno.ENOSPC)


def cannot_meet() -> str:
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
def knows_itself() -> bool:
    """Whether this machine's own name leads to an address, as torchrun expects."""
    with contextlib.suppress(OSError):
        return bool(socket.getaddrinfo(socket.gethostname(), None))
    return False
