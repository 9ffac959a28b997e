"""A host name resolves late: torch's client repeats the lookup, torchrun's agent does not.

In Kubernetes the name of a pod enters the DNS some seconds after the pod has started. This
program imitates such a DNS on one machine: a few lines of C replace getaddrinfo for it
and refuse the name `trainer-0.jobs` for the first lookups. Each case counts the lookups.

    (no flag)   what each part of torch does while the name is missing
    --fix       the same parts after `wait_for_name`, and an agent with the option is_host

Linux only, and it needs a C compiler (`cc`).
"""

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

NAME = "trainer-0.jobs"
LATE_DNS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <string.h>
int refused = 0, lookups = 0; /* Python sets the first and reads the second. */
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    int (*libc)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&libc = dlsym(RTLD_NEXT, "getaddrinfo");
    if (!name || strcmp(name, "trainer-0.jobs")) return libc(name, service, hints, found);
    if (lookups++ < refused) return EAI_NONAME;
    return libc("127.0.0.1", service, hints, found);
}
"""


# --8<-- [start:wait_for_name]
def wait_for_name(name: str, seconds: float = 120) -> None:
    """Return when `name` resolves. Raise TimeoutError if it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} does not resolve: {error.strerror}") from error
        time.sleep(0.2)


# --8<-- [end:wait_for_name]


def restart_with_late_dns() -> None:
    """Compile the C code, and start this program again with it. This does not return."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        sys.exit("this program needs Linux and a C compiler (cc)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "late_dns.c"), Path(folder, "late_dns.so")
        source.write_text(LATE_DNS)
        command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        subprocess.run(command, check=True)
        again = [sys.executable, __file__, *sys.argv[1:]]
        # without FATAL, c10d logs a line for each lookup and a C++ stack for each time-out
        quiet = {"LD_PRELOAD": str(library), "TORCH_CPP_LOG_LEVEL": "FATAL"}
        sys.exit(subprocess.run(again, env=os.environ | quiet, check=False).returncode)


# --8<-- [start:cases]
def ask_once(port: int) -> None:
    socket.getaddrinfo(NAME, port)


def connect(port: int, seconds: float) -> None:
    """Do what every rank except rank 0 does in init_process_group."""
    TCPStore(NAME, port, is_master=False, timeout=timedelta(seconds=seconds))


def agent(port: int, **options: str) -> None:
    """Do what torchrun does on the machine with this name: serve the c10d store."""
    endpoint = f"{NAME}:{unused_port()}"
    parameters = RendezvousParameters(
        "c10d", endpoint, "job", 1, 1, read_timeout="2", **options
    )
    create_backend(parameters)


# --8<-- [end:cases]


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outcome(
    work: Callable, *given: object, refused: int = 2, **options: str
) -> tuple[str, int]:
    """Run a case while the first `refused` lookups fail. Return the result and the lookups."""
    dns.refused.value, dns.lookups.value = refused, 0
    try:
        work(*given, **options)
        return "succeeded", dns.lookups.value
    except (OSError, RuntimeError, RendezvousError) as error:
        inner = error.__cause__ if isinstance(error, RendezvousError) else error
        text = str(inner).splitlines()[0]
        return f"{type(error).__name__}: {text}", dns.lookups.value


class LateDns:
    """The two counters of the C library with which this process was started."""

    def __init__(self) -> None:
        library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self.refused = ctypes.c_int.in_dll(library, "refused")
        self.lookups = ctypes.c_int.in_dll(library, "lookups")


def main() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    if "--fix" in sys.argv:
        wait = lambda: wait_for_name(NAME)  # noqa: E731
        cases = {
            "wait_for_name": outcome(wait),
            "the agent, after wait_for_name": outcome(lambda: (wait(), agent(store.port))),
            "the agent with is_host=1": outcome(agent, store.port, is_host="1"),
        }
        for name, (result, lookups) in cases.items():
            print(f"{name}: {result}")
            assert result == "succeeded" and lookups >= 3, (name, result, lookups)
        gone, _ = outcome(lambda: wait_for_name(NAME, 1), refused=1000)
        assert gone == f"TimeoutError: {NAME} does not resolve: Name or service not known", gone
        print("a name that never resolves:", gone)
        return
    once, once_lookups = outcome(ask_once, store.port)
    late, late_lookups = outcome(connect, store.port, 60)
    never, never_lookups = outcome(connect, store.port, 2, refused=1000)
    refused_once, refused_lookups = outcome(agent, store.port, refused=1)
    resolved, _ = outcome(agent, store.port, refused=0)
    print(f"getaddrinfo: {once} ({once_lookups} lookup)")
    print(f"torch's client: {late} ({late_lookups} lookups)")
    print("torch's client, and the name never resolves:")
    print(f"  {hide_port(never)}")
    print("torchrun's agent on the machine of that name, one lookup refused:")
    print(f"  {hide_port(refused_once)}")
    print(f"torchrun's agent, and the name resolves: {resolved}")
    assert once_lookups == 1 and "Name or service not known" in once
    assert late == "succeeded" and late_lookups == 3, (late, late_lookups)
    assert "timed out" in never and never_lookups > 1, (never, never_lookups)
    # the name resolved from the second lookup on, but no process served the store
    assert "timed out" in refused_once and refused_lookups > 2, (refused_once, refused_lookups)
    assert resolved == "succeeded"


def hide_port(text: str) -> str:
    return text.rpartition(", ")[0] + ", PORT)."


if __name__ == "__main__":
    if "LD_PRELOAD" not in os.environ:
        restart_with_late_dns()
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    dns = LateDns()
    main()
