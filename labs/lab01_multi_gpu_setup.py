# %% [markdown]
# # Lab 01: Check a multi-GPU cluster
#
# When a distributed training job hangs, it usually prints nothing. Perhaps a name cannot be
# resolved, a port is in use, a rank was never started, or a cable transfers data at a tenth of
# its speed. In this lab you write the most important parts of a program that finds the reason.
# We call it the **doctor**. Run it first on every new machine, and again whenever a job hangs.
# It reports which hardware and software the machines have, whether each collective returns the
# right result, how fast each link is, which links are slow, and what is wrong.
#
# | step | what you write |
# |---|---|
# | 1 | `pick_device` chooses the GPU or the CPU for a rank. |
# | 2 | `start_group` starts the process group with a timeout. |
# | 3 | `expected` returns what every rank must have after each of nine collectives. |
# | 4 | `gather_facts` collects the facts that every rank has about its machine. |
# | 5 | `median_seconds` measures how long a call takes. |
# | 6 | `bus_bandwidth` computes two bandwidths from a time. |
# | 7 | `slow_links` finds the slow links among all links. |
# | 8 | `exchange_metadata` compares the tensors of all ranks before a collective. |
#
# The rest of the book uses these parts again: devices, groups, the meaning of each collective,
# and measurements. The code that searches for broken connections is already written. Read it
# when you need it.
#
# ## How to run the doctor
#
# This command runs the finished doctor on this machine:
#
#     torchrun --nproc-per-node=2 labs/lab01_multi_gpu_setup.py
#
# On a cluster, start the doctor in the same way as your training. Each launcher sets different
# environment variables for the ranks, and the doctor examines the environment of each rank. You
# can start the doctor with torchrun on every machine, with `srun`, or by hand with the
# variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`. The exit status of the doctor
# is 0 if nothing is wrong. You can paste its report into a ticket. The option `--help` lists
# all options.
#
# With torchrun, the launchers of all machines connect to each other first, and the doctor
# starts only after that. If the doctor has printed nothing after a minute, then `--master-addr`
# or `--rdzv-endpoint` is wrong, or the launcher was not started on one of the machines. In this
# case, start one process on each machine without torchrun, for example with this command for
# the first of two machines. The doctor then prints the reason:
#
#     RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=29611 python labs/lab01_multi_gpu_setup.py
#
# ## How to work on this lab
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 01       # creates my_labs/lab01_multi_gpu_setup.py
#     torchrun --nproc-per-node=2 my_labs/lab01_multi_gpu_setup.py
#     python labs/check.py my_labs/lab01_multi_gpu_setup.py
#
# Each of the eight steps has a text, a blank and a check. Your copy runs up to the first blank,
# and there it prints one line that says what is missing. The long report below that line comes
# from torchrun, and you can ignore it. `check.py` grades each step separately, and `check.py
# --step 2` grades only step 2. Plan two hours for the lab.

# %%
import argparse
import contextlib
import ctypes
import errno
import json
import os
import platform
import re
import signal
import socket
import statistics
import struct
import sys
import textwrap
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Fault:
    """A fault says in one or two sentences what is wrong, and how you can fix it."""

    what: str
    fix: str


class Trouble(Exception):
    """This exception contains faults that end the run.

    If `shared` is true, rank 0 has the same faults and reports them.
    """

    def __init__(self, *faults: Fault, shared: bool = False):
        super().__init__("; ".join(fault.what for fault in faults))
        self.faults, self.shared = faults, shared


@dataclass
class Report:
    """The report contains all findings so far.

    Rank 0 prints the report at the end, or when the run has to stop.
    """

    doing: str = "reading the environment"
    found: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    wrong: list[Fault] = field(default_factory=list)
    store: dist.Store | None = None  # set when all ranks have met at this store
    world: int = 1

    def text(self) -> str:
        """Return the report, with one section for each kind of finding."""
        lines = ["", "cluster report"]
        for name in ("found", "right", "measured", "slow"):
            if section := getattr(self, name):
                lines += [name, *(wrapped("  ", line) for line in section)]
        lines.append("wrong")
        for number, fault in enumerate(self.wrong, start=1):
            lines.append(wrapped(f"  {number}. ", fault.what))
            lines.append(wrapped("     fix: ", fault.fix))
        return "\n".join(lines if self.wrong else [*lines, "  nothing"])


def wrapped(start: str, text: str) -> str:
    """Return a paragraph whose first line begins with `start`. The other lines are indented."""
    return textwrap.fill(
        text, 92, initial_indent=start, subsequent_indent=" " * max(len(start), 5),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


REPORT = Report()


def say(text: str) -> None:
    """Print a line on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def count(number: int, thing: str) -> str:
    """Return a number with its noun, such as '1 rank' or '2 ranks'."""
    return f"{number} {thing}{'s' * (number != 1)}"


def listed(items: Iterable[object], last: str = "and") -> str:
    """Return a list in words, such as '1, 2 and 5'."""
    *most, end = map(str, items)
    return f"{', '.join(most)} {last} {end}" if most else end


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words, such as 'rank 3' or 'ranks 0 to 7 and 9'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [
        part
        for run in runs
        for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))
    ]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {listed(parts)}"


# words in the messages of torch.distributed if another rank or the network has failed
OF_GROUP = re.compile(r"gloo|nccl|c10d|store|socket|connection|timed? ?out|launcher", re.I)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print one sentence on one rank if a blank or a failed check ended the program."""
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


def stop_with_report(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print a report for Trouble, and one sentence for a blank or for a failed check."""
    text = os.environ.get("RANK", "")
    rank = int(text) if text.isdecimal() else 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if kind is Trouble or (issubclass(kind, RuntimeError) and OF_GROUP.search(str(error))):
        # torchrun sends SIGTERM when one rank ends, so ignore it until the report is printed
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop(error if isinstance(error, Trouble) else broken_off(error, rank), rank)
    else:
        stop_kindly(kind, error, trace)


def stop(trouble: Trouble, rank: int) -> None:
    """Print the report, or one line if rank 0 prints the report. Then end this process."""
    if rank and trouble.shared:
        time.sleep(3 if "TORCHELASTIC_RUN_ID" in os.environ else 0)  # rank 0 prints first
        # while an exception is handled, torch delays what is written to sys.stderr
        print(f"rank {rank} stops: rank 0 prints the report", file=sys.__stderr__, flush=True)
    else:
        REPORT.wrong += trouble.faults
        who = f"rank {rank} on {socket.gethostname()} " if rank else "rank 0 "
        REPORT.found.append(f"{who}stopped while {REPORT.doing}")
        print(REPORT.text(), flush=True)
        if REPORT.store is not None and rank == 0:
            # the other ranks still use this store to find out which ranks are alive
            time.sleep(2)
    os._exit(1)  # the destructor of a broken group could wait forever for a rank that died


def asked_to_end(*_: object) -> None:
    """Handle SIGTERM, which torchrun sends when another rank has ended."""
    raise RuntimeError("the launcher ended this rank")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="The cluster doctor reports what works, what is slow and what is wrong."
    )
    add = parser.add_argument
    for name, default, text in (
        ("--wait", 60, "seconds to wait for a rank or for a collective (default: 60)"),
        ("--limit", 600, "time limit for the whole run, in seconds (default: 600)"),
        (
            "--factor",
            3,
            "a link is slow if it is N times slower than the median of its kind (default: 3)",
        ),
        (
            "--min-shm",
            None,
            "MiB of shared memory that must be free (default: 32, or 512 with GPUs)",
        ),
    ):
        add(name, type=float, default=default, metavar="N", help=text)
    add("--shm", default="/dev/shm", metavar="FOLDER", help="the folder of the shared memory")
    for name, choices, text in (
        (
            "--device",
            ("auto", "cpu", "gpu"),
            "gpu: stop if a machine has fewer GPUs than ranks",
        ),
        (
            "--report",
            ("full", "brief"),
            "brief: leave out details of the machines, such as their names and software",
        ),
        (
            "--plant",
            ("size", "dtype", "slow", "death", "hang"),
            "give the last rank this fault",
        ),
    ):
        default = None if name == "--plant" else choices[0]
        add(name, choices=choices, default=default, help=text)
    return parser.parse_args(arguments)


def watch(limit: float, patience: float, rank: int) -> None:
    """Start a thread that can end this process with a report.

    It does this after `limit` seconds, or if the process hangs for `patience` seconds.
    """

    def look() -> None:
        doing, since, began = REPORT.doing, time.monotonic(), time.monotonic()
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            if REPORT.doing != doing:
                doing, since = REPORT.doing, now
            if now - began > limit + (2 if rank else 0):
                what = f"the run did not end within {limit:g} s: rank {rank} was {doing}."
                stop(Trouble(Fault(what, "run the doctor again with a larger --limit.")), rank)
            if now - since > patience and REPORT.store is not None:
                stop(broken_off(RuntimeError(f"it took more than {patience:g} s"), rank), rank)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    options = options_of(sys.argv[1:])
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ):
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {Path(__file__).name}")
    sys.excepthook = stop_with_report

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls the functions that you wrote. If you add code of your own, put it into
# functions or into such cells.
#
# ## Before the group: what can be wrong already
#
# On a broken cluster, a job usually hangs in `dist.init_process_group`. If this function prints
# a message at all, the message only says that a timeout has expired. This one call does four
# things. It resolves a name, it opens or finds a port, it waits for all ranks, and it connects
# every rank with every other rank. The doctor does these things one after the other with plain
# sockets, so it can report exactly which of them fails.
#
# Four checks need no other rank:
#
# - The four environment variables must exist and must be valid.
# - An interface that is named in `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` must exist. gloo
#   expects the whole name of an interface. NCCL expects the beginning of a name. For NCCL, you
#   can also write `=name` to give a whole name, or `^name` to exclude all interfaces whose
#   names begin with `name`.
# - `/dev/shm` must have enough free space. NCCL sends data between the processes of one machine
#   through this shared memory, and the workers of a `DataLoader` use it too. Docker gives a
#   container 64 MiB by default. The NCCL guide (section Runtime and MPI issues) recommends
#   `--shm-size=1g`.
# - The GPU driver must start. If it does not start, torch prints one warning and then reports 0
#   GPUs. A job can then train on the CPU without an error, although the machine has eight GPUs.
#
# For the last check, the doctor calls `cuInit`, the first function of CUDA's driver library,
# and reads its status. Three values mean that the fault is in the machine and not in the
# program. One of them is 802, `system not yet initialized`. GPUs that are connected by NVSwitch
# need NVIDIA's fabric manager. Without the fabric manager, `cuInit` returns this status.


# %%
@dataclass(frozen=True)
class Place:
    """This class contains the rank of a process, and the address where the ranks meet.

    `read_place` reads both from the environment variables.
    """

    rank: int
    world: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT
    agent: bool  # true if torchrun serves the store, so that no rank opens the port


def read_place(environment: Mapping[str, str]) -> Place:
    """Read the environment variables. Raise Trouble if one is missing or not valid."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environment.get(name)]:
        raise Trouble(
            Fault(
                f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not set.",
                "torchrun sets all four variables. If you start the ranks with srun, mpirun "
                "or a shell, export them for each process.",
            )
        )
    numbers = {}
    for name, most in (("RANK", 10**6), ("WORLD_SIZE", 10**6), ("MASTER_PORT", 65535)):
        text, least = environment[name], int(name != "RANK")
        if not text.isdecimal() or not least <= int(text) <= most:
            what = f'{name} is "{text}", but it must be a whole number from {least} to {most}.'
            raise Trouble(Fault(what, f"set {name} in the environment of this process."))
        numbers[name] = int(text)
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world:
        raise Trouble(
            Fault(
                f"RANK is {rank} and WORLD_SIZE is {world}, but ranks have numbers from 0 to "
                f"{world - 1}.",
                "give every process a different RANK from 0 to WORLD_SIZE - 1.",
            )
        )
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, world, environment["MASTER_ADDR"], numbers["MASTER_PORT"], agent)


def interface_faults(environment: Mapping[str, str], existing: Sequence[str]) -> list[Fault]:
    """Return the faults of the variables that name a network interface.

    `existing` contains the names of the interfaces of this machine.
    """
    faults = []
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        text = environment.get(variable, "")
        if not text or text.startswith("^"):
            continue
        names = text.removeprefix("=").split(",")
        whole = variable.startswith("GLOO") or text.startswith("=")
        absent = [
            name
            for name in names
            if not any(other == name if whole else other.startswith(name) for other in existing)
        ]
        if absent and (whole or len(absent) == len(names)):
            faults.append(
                Fault(
                    f"{variable}={text}, but there is no interface {listed(absent, 'or')}. "
                    f"The interfaces are {listed(sorted(existing))}.",
                    f"set {variable} to the interface that leads to the other machines, or "
                    "unset it.",
                )
            )
    return faults


def shared_memory_faults(folder: str, least_mib: float) -> list[Fault]:
    """Return the faults of the shared memory in this folder."""
    fix = (
        "start the container with docker run --shm-size=8g or --ipc=host. In Kubernetes, "
        "mount an emptyDir with medium: Memory at /dev/shm. Outside of containers, remove the "
        "files that dead jobs left there."
    )
    try:
        system = os.statvfs(folder)
    except OSError:
        return [Fault(f"there is no shared memory: {folder} does not exist.", fix)]
    free = system.f_bavail * system.f_frsize / 2**20
    if free < least_mib:
        what = f"{folder} has {free:.0f} MiB free, but {least_mib:g} MiB are needed."
        return [Fault(what, fix)]
    if not os.access(folder, os.W_OK):
        return [Fault(f"{folder} is not writable for this user.", f"chmod 1777 {folder}")]
    return []


# CUDA's message and the fix for each status of cuInit that means a fault of the machine
DRIVER = {
    802: (
        "system not yet initialized",
        "install nvidia-fabricmanager with exactly the same version number as the driver, and "
        "start it with systemctl enable --now nvidia-fabricmanager. On an H100 or a later GPU, "
        "wait until nvidia-smi -q shows State: Completed under Fabric.",
    ),
    803: (
        "system has unsupported display driver / cuda driver combination",
        "the library and the kernel module of the driver have different versions. Reboot, or "
        "mount the libraries of the host into the container again.",
    ),
    804: (
        "forward compatibility was attempted on non supported HW",
        "this GPU cannot use the cuda-compat libraries. Remove them from LD_LIBRARY_PATH, or "
        "update the driver of the machine.",
    ),
}


def driver_faults(library: str = "libcuda.so.1") -> list[Fault]:
    """Return the faults of CUDA's driver.

    The list is also empty if the machine has no library of the driver, or no GPU.
    """
    try:
        status = ctypes.CDLL(library).cuInit(0)
    except (OSError, AttributeError):
        return []
    if status not in DRIVER:
        return []
    text, fix = DRIVER[status]
    return [Fault(f"CUDA's driver does not start: error {status}, {text}.", fix)]


# %% [markdown]
# ## Before the group: meeting at the store
#
# Ranks meet at a **store**. A store is a small table of keys and values, which one process
# serves over TCP at `MASTER_ADDR:MASTER_PORT`. With torchrun, this process is torchrun's agent.
# Otherwise it is rank 0. In this case, rank 0 checks whether it can open the port, and whether
# a connection to `MASTER_ADDR` reaches its own store. Every other rank checks whether the name
# can be resolved, whether a process listens at the port, and whether this process is a store.


# %%
def within(seconds: float, work: Callable[[], object], otherwise: object) -> object:
    """Return the result of `work`. If `work` takes longer than `seconds`, return `otherwise`.

    This limit is necessary for calls that can block, such as the lookup of a name.
    """
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def addresses(name: str, seconds: float = 10) -> list[str]:
    """Return the addresses of a name, or an empty list if the name cannot be resolved."""

    def look_up() -> list[str]:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return sorted({entry[4][0] for entry in found})

    return within(seconds, look_up, [])


def holder(port: int) -> str:
    """Return the process that listens on a port, in words such as ' by python (process 12)'.

    The result is an empty string if /proc does not show the process.
    """
    with contextlib.suppress(OSError, ValueError):
        inodes = {
            fields[9]
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for fields in map(str.split, Path(table).read_text().splitlines()[1:])
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
        }
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                for link in (process / "fd").iterdir():
                    if os.readlink(link).removeprefix("socket:[").rstrip("]") in inodes:
                        name = (process / "comm").read_text().strip()
                        return f" by {name} (process {process.name})"
    return ""


def port_fault(port: int) -> Fault | None:
    """Return the fault if rank 0 cannot listen on this port."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
        ).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Fault(
                f"port {port} is in use{holder(port)}, so rank 0 cannot open its store there.",
                "end this process, which is usually a job that did not stop. Alternatively, "
                "choose a free port, and set MASTER_PORT to this port for all ranks.",
            )
        if error.errno == errno.EACCES:
            what = (
                f"rank 0 is not allowed to listen on port {port}, because only root can use "
                "ports below 1024."
            )
            return Fault(
                what,
                "choose a port above 1023, and set MASTER_PORT to this port for all ranks.",
            )
        if error.errno != errno.EAFNOSUPPORT:
            what = f"rank 0 cannot listen on port {port}: {error.strerror}."
            return Fault(
                what, "choose a different port, and set MASTER_PORT to this port for all ranks."
            )
    return None


def knock(address: str, port: int, seconds: float, patient: bool = True) -> str | Exception:
    """Connect to a port and return the address of this side of the connection.

    If `patient` is true, the function tries again until `seconds` have passed. It returns the
    last error if no attempt succeeded.
    """
    deadline = time.monotonic() + seconds
    while True:
        rest = max(deadline - time.monotonic(), 0.1)
        try:
            with socket.create_connection((address, port), timeout=rest) as connection:
                return connection.getsockname()[0]
        except OSError as error:
            if not patient or time.monotonic() + 0.1 > deadline:
                return error
            time.sleep(0.1)


def no_answer(place: Place, error: Exception, seconds: float) -> Fault:
    """Return the fault if no connection to MASTER_ADDR:MASTER_PORT is possible."""
    where = f"{place.address}:{place.port}"
    if isinstance(error, ConnectionRefusedError):
        return Fault(
            f"no process listens at MASTER_ADDR:MASTER_PORT = {where}. Connections were "
            f"refused for {seconds:g} s.",
            "start rank 0, which opens this port, and give every rank the address and the port "
            "of the machine of rank 0.",
        )
    return Fault(
        f"MASTER_ADDR:MASTER_PORT = {where} does not answer: {type(error).__name__}.",
        "compare MASTER_ADDR with the output of `hostname -I` on the machine of rank 0. If "
        "the address is right, check with ping whether the machine can be reached, and check "
        "that no firewall blocks this port.",
    )


def open_store(place: Place, seconds: float) -> tuple[dist.TCPStore, str]:
    """Return the store of all ranks, and an address of this machine.

    This machine uses the address on its own connection to the store.
    """
    # the name of a pod appears in the DNS some seconds after the pod has started
    deadline = time.monotonic() + min(seconds, 30)
    while not (found := addresses(place.address)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not found:
        what = f'MASTER_ADDR is "{place.address}", a name that this machine cannot resolve.'
        fix = (
            "set MASTER_ADDR to an address that hostname -I prints on the machine of rank 0. "
            "Alternatively, add the name to the DNS or to /etc/hosts."
        )
        raise Trouble(Fault(what, fix))
    served, timeout = None, timedelta(seconds=seconds)
    if place.rank == 0 and not place.agent:
        if fault := port_fault(place.port):
            raise Trouble(fault)
        served = dist.TCPStore("localhost", place.port, is_master=True, wait_for_workers=False)
        SERVED.append(served)
    # rank 0 has already opened its own store, so it does not need to wait long
    ours = knock(place.address, place.port, min(seconds, 5) if served else seconds)
    lost = Fault(
        f"MASTER_ADDR is {place.address}, but rank 0 runs on this machine, and the address "
        "does not lead to this machine.",
        "set MASTER_ADDR to an address of this machine, or start rank 0 on the machine that "
        f"has the address {place.address}.",
    )
    if isinstance(ours, Exception):
        raise Trouble(lost if served else no_answer(place, ours, seconds))

    def connect() -> dist.TCPStore | None:
        try:
            return dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout)
        except RuntimeError:
            return None

    # TCPStore waits longer than its timeout if a program listens there but never answers
    store = within(seconds, connect, None)
    if store is None:
        raise Trouble(
            Fault(
                f"a process listens at {place.address}:{place.port}, but it is not a store of "
                "torch. A different program uses the port.",
                "set MASTER_PORT to the same port for all ranks. It must be free on the "
                "machine of rank 0.",
            )
        )
    if served:
        mark = uuid.uuid4().hex
        served.set(mark, "")
        served.get(mark)  # set() can return before the value is stored
        if not store.check([mark]):
            raise Trouble(lost)
    return store, ours


SERVED: list[dist.TCPStore] = []  # the store of rank 0 must live as long as the process

# %% [markdown]
# ## Before the group: the roll call
#
# Each process writes one entry into the store, which we call its card. The card contains the
# rank of the process, the number of ranks that the process expects, the name of its machine,
# and the faults of this machine. Rank 0 reads the cards as they arrive. It does not need a
# timeout to see that two ranks expect different world sizes, that two processes have the same
# rank, or that their versions of torch differ. If the time limit is reached, rank 0 knows
# exactly which ranks are missing. Rank 0 writes its verdict into the store for all ranks.
# Therefore only one rank prints the report, and no rank waits forever.
#
# If the ranks run on several machines, each rank then tries to connect to ranks on other
# machines. This check is necessary because every pair of ranks will open connections later, on
# ports that are not known in advance. A firewall that allows only `MASTER_PORT` would then stop
# the job.


# %%
def interfaces() -> dict[str, str]:
    """Return the network interfaces of this machine and their IPv4 addresses, if any."""
    found = {}
    for _, name in socket.if_nameindex():
        found[name] = ""
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asked.fileno(), 0x8915, request)  # SIOCGIFADDR
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def make_card(place: Place, address: str, faults: Sequence[Fault], listens: int) -> dict:
    """Return the card of this process for the store."""
    nets = interfaces()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = os.environ.get("DOCTOR_HOST", socket.gethostname())  # to simulate several machines
    return {
        "rank": place.rank,
        "world": place.world,
        "host": own,
        "torch": torch.__version__,
        "accelerators": torch.accelerator.device_count(),
        "address": nets.get(chosen) or address,
        "listens": listens,
        "name leads to": None if chosen else addresses(socket.gethostname(), 5),
        "faults": [[fault.what, fault.fix] for fault in faults],
    }


def by_host(cards: Sequence[Mapping]) -> dict[str, list[int]]:
    """Return the ranks of each machine. The machine of the lowest rank is first."""
    hosts: dict[str, list[int]] = {}
    for card in sorted(cards, key=lambda card: card["rank"]):
        hosts.setdefault(card["host"], []).append(card["rank"])
    return hosts


def judge_cards(cards: Sequence[Mapping], world: int, seconds: float) -> list[Fault]:
    """Return the faults that the cards show.

    The cards arrived within `seconds` seconds.
    """
    faults = []
    ranks = [card["rank"] for card in cards]
    if len(worlds := sorted({card["world"] for card in cards})) > 1:
        said = [
            f"{named(card['rank'] for card in cards if card['world'] == size)} "
            f"expect{'s' * ([card['world'] for card in cards].count(size) == 1)} {size}"
            for size in worlds
        ]
        faults.append(
            Fault(
                f"the ranks disagree on the world size: {', '.join(said)}.",
                "give every process the same WORLD_SIZE, which is the number of machines times "
                "the number of processes on each machine. torchrun needs the same --nnodes and "
                "--nproc-per-node on all machines.",
            )
        )
    elif missing := sorted(set(range(world)) - set(ranks)):
        came = [f"{named(on)} ({host})" for host, on in by_host(cards).items()]
        faults.append(
            Fault(
                f"{named(missing)} of {world} never arrived. Within {seconds:g} s, only "
                f"{listed(came)} arrived.",
                "read the output of each missing process on its machine. The process was not "
                "started, it died early, or it has a different MASTER_ADDR or MASTER_PORT.",
            )
        )
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        hosts = sorted({card["host"] for card in cards if card["rank"] == twice[0]})
        faults.append(
            Fault(
                f"{ranks.count(twice[0])} processes have the rank {twice[0]}, on "
                f"{listed(hosts)}.",
                "give every process a different RANK. With Slurm, set RANK=$SLURM_PROCID.",
            )
        )
    versions: dict[str, list[int]] = {}
    for card in cards:
        versions.setdefault(card["torch"], []).append(card["rank"])
    if len(versions) > 1:
        said = [f"{named(on)}: {version}" for version, on in versions.items()]
        faults.append(
            Fault(
                f"the ranks use different versions of torch ({'; '.join(said)}).",
                "install the same version everywhere, or start all ranks from the same image.",
            )
        )
    own: dict[tuple[str, str], list[Mapping]] = {}
    for card in cards:
        for fault in card["faults"]:
            own.setdefault(tuple(fault), []).append(card)
    for (what, fix), ill in own.items():
        where = [f"{named(on)} ({host})" for host, on in by_host(ill).items()]
        faults.append(Fault(f"{listed(where)}: {what}", fix))
    return faults


def accelerator_faults(cards: Sequence[Mapping]) -> list[Fault]:
    """Return a fault for each machine that has fewer accelerators than ranks."""
    faults = []
    for host, ranks in by_host(cards).items():
        here = min(card["accelerators"] for card in cards if card["host"] == host)
        if here < len(ranks):
            faults.append(
                Fault(
                    f"{host} has {count(here, 'accelerator')} for {count(len(ranks), 'rank')}.",
                    "start one rank per GPU (--nproc-per-node=gpu). If the machine has more "
                    "GPUs than this number, check nvidia-smi and CUDA_VISIBLE_DEVICES.",
                )
            )
    return faults


def loopback_faults(cards: Sequence[Mapping]) -> list[Fault]:
    """Return a fault for each machine where gloo would give other machines a useless address.

    An address is useless if other machines cannot use it to connect to this machine.
    """
    faults = []
    for host, ranks in by_host(cards).items():
        own = next(card["name leads to"] for card in cards if card["rank"] == ranks[0])
        if own is not None and all(address.startswith("127.") for address in own):
            leads = f"leads to {own[0]}" if own else "does not resolve"
            faults.append(
                Fault(
                    f"on {host} the machine's own name {leads}, so gloo tells the other "
                    "machines to connect to a loopback address.",
                    "export GLOO_SOCKET_IFNAME with the interface that leads to the other "
                    "machines, or fix /etc/hosts.",
                )
            )
    met_by_loopback = any(card["address"].startswith("127.") for card in cards)
    return [] if met_by_loopback or len(by_host(cards)) == 1 else faults


def read_cards(store: dist.Store, cards: list[dict]) -> None:
    """Append the cards that have arrived since the last call."""
    while len(cards) < store.add("cards", 0):
        cards.append(json.loads(store.get(f"cards {len(cards) + 1}")))


def hand_in(store: dist.Store, what: str, value: object) -> None:
    """Write a value into the store, under the next number."""
    store.set(f"{what} {store.add(what, 1)}", json.dumps(value))


def pronounce(store: dist.Store, what: str, faults: Sequence[Fault], others: int) -> None:
    """Write into the store whether the other ranks must stop.

    Only rank 0 calls this function. It raises Trouble if there are faults.
    """
    store.set(f"{what} verdict", json.dumps([fault.what for fault in faults]))
    if faults:
        # this process can be the one that serves the store, and the others still read from it
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and store.add(f"{what} heard", 0) < others:
            time.sleep(0.02)
        raise Trouble(*faults)


def hear(store: dist.Store, what: str, seconds: float) -> None:
    """Wait for the verdict of rank 0, and raise Trouble if the verdict contains faults.

    All ranks except rank 0 call this function.
    """
    store.wait([f"{what} verdict"], timedelta(seconds=seconds))
    faults = json.loads(store.get(f"{what} verdict"))
    store.add(f"{what} heard", 1)
    if faults:
        raise Trouble(*(Fault(text, "") for text in faults), shared=True)


def roll_call(store: dist.Store, card: Mapping, options: argparse.Namespace) -> list[dict]:
    """Return the cards of all ranks in rank order.

    If there is a fault on any rank, raise Trouble on all ranks.
    """
    rank, world, seconds = card["rank"], card["world"], options.wait
    hand_in(store, "cards", card)
    cards: list[dict] = []
    if rank:
        try:
            hear(store, "cards", seconds + 5)
            read_cards(store, cards)
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                read_cards(store, cards)
            what = f"rank {rank} lost the connection to the store before all ranks had arrived."
            if cards and all(other["rank"] for other in cards):
                came = named(other["rank"] for other in cards)
                what = f"rank 0 of {world} never arrived. Within {seconds:g} s, only {came} "
                what += "arrived."
            fix = "read the output of rank 0 on its machine."
            raise Trouble(Fault(what, fix)) from None
    deadline = time.monotonic() + seconds
    while rank == 0 and time.monotonic() < deadline:
        read_cards(store, cards)
        ranks = [other["rank"] for other in cards]
        if len({other["world"] for other in cards}) > 1 or len(set(ranks)) < len(ranks):
            deadline = min(deadline, time.monotonic() + 0.5)  # more ranks can disagree
        elif set(ranks) >= set(range(world)):
            break
        time.sleep(0.02)
    cards.sort(key=lambda other: other["rank"])
    if options.report == "brief":
        aliases = {host: f"machine {number}" for number, host in enumerate(by_host(cards))}
        cards = [other | {"host": aliases[other["host"]]} for other in cards]
    if rank == 0:
        faults = judge_cards(cards, world, seconds)
        few = accelerator_faults(cards)
        if options.device == "gpu":
            faults += few
        elif few or options.device == "cpu":
            faults += loopback_faults(cards)
        pronounce(store, "cards", faults, len(cards) - 1)
    elif [other["rank"] for other in cards] != list(range(world)):
        what = f"rank {rank} expects {world} ranks, but the others have started without it."
        raise Trouble(Fault(what, "give every process the same WORLD_SIZE."))
    return cards


def unreachable(cards: Sequence[Mapping], rank: int, seconds: float) -> list[str]:
    """Connect to ranks on other machines. Return a line for each connection that fails."""
    world, lines, threads = len(cards), [], []
    ours = cards[rank]["host"]
    distances = range(1, world) if world <= 32 else [2**n for n in range(world.bit_length())]

    def visit(other: Mapping) -> None:
        answer = knock(other["address"], other["listens"], seconds, patient=False)
        if isinstance(answer, Exception):
            lines.append(
                f"rank {rank} ({ours}) cannot connect to rank {other['rank']} "
                f"({other['host']}) at {other['address']}: {type(answer).__name__}."
            )

    for distance in distances:
        other = cards[(rank + distance) % world]
        if other["host"] != ours:
            threads.append(threading.Thread(target=visit, args=(other,), daemon=True))
            threads[-1].start()
    for thread in threads:
        thread.join(seconds + 1)
    return lines


def broken_off(error: RuntimeError, rank: int) -> Trouble:
    """Return the Trouble that explains an error of torch.distributed during the run."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
    gone: list[int] = []
    if REPORT.store is not None:
        try:
            REPORT.store.set(f"alive {rank}", "")
            gone, deadline = list(range(REPORT.world)), time.monotonic() + 2
            while gone and time.monotonic() < deadline:
                gone = [other for other in gone if not REPORT.store.check([f"alive {other}"])]
                time.sleep(0.05)
        except RuntimeError:
            gone = [0]  # the store is gone, because rank 0 has ended
    if gone:
        first = min(set(range(REPORT.world)) - set(gone), default=rank)
        what = f"{named(gone)} died or hung while the others were {REPORT.doing}."
        fix = (
            "read the last lines that this process printed, and the output of dmesg on its "
            "machine. dmesg lists processes that were killed because memory was low."
        )
        return Trouble(Fault(what, fix), shared=rank != first)
    what = f"{REPORT.doing} failed: {text}"
    fix = "run the doctor again with NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL."
    return Trouble(Fault(what, fix), shared=REPORT.store is not None)


# %%
if __name__ == "__main__":
    place = read_place(os.environ)
    rank, world, wait = place.rank, place.world, timedelta(seconds=options.wait)
    watch(options.limit, options.wait + 5, rank)

    REPORT.doing = "looking for the store"
    accelerated = options.device != "cpu" and torch.accelerator.is_available()
    least = options.min_shm
    if least is None:
        least = 512 if accelerated else 32
    faults = interface_faults(os.environ, list(interfaces()))
    if sys.platform == "linux":
        faults += shared_memory_faults(options.shm, least)
    if options.device != "cpu":
        faults += driver_faults()
    try:
        tcp_store, address = open_store(place, options.wait)
    except Trouble as trouble:
        raise Trouble(*faults, *trouble.faults) from None

    REPORT.doing = "waiting for all ranks"
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"doctor {restart}", tcp_store)
    door = socket.create_server(("", 0), backlog=1024)
    card = make_card(place, address, faults, door.getsockname()[1])
    cards = roll_call(store, card, options)
    REPORT.store, REPORT.world = store, world
    signal.signal(signal.SIGTERM, asked_to_end)

    REPORT.doing = "connecting to the other machines"
    hosts = by_host(cards)
    if len(hosts) > 1:
        hand_in(store, "doors", unreachable(cards, rank, min(options.wait, 10)))
        if rank == 0:
            closed = [json.loads(store.get(f"doors {n + 1}")) for n in range(world)]
            fix = (
                "open all ports between these machines, or choose a different interface with "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
            )
            faults = [Fault(line, fix) for lines in closed for line in sorted(lines)]
            pronounce(store, "doors", faults, world - 1)
        else:
            hear(store, "doors", options.wait + 10)
    door.close()

    neighbours = hosts[cards[rank]["host"]]  # needed if ranks were started by hand
    os.environ.setdefault("LOCAL_RANK", str(neighbours.index(rank)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(neighbours)))
    all_ranks, machines = count(world, "rank"), count(len(hosts), "machine")
    say(
        f"before the group: {all_ranks} on {machines} met, with the same world size and "
        "version of torch"
    )
    REPORT.right.append(
        f"{world} of {all_ranks} met, with the same world size and the same version of torch"
    )

# %% [markdown]
# ## Step 1: pick the device of a local rank
#
# On every machine with eight GPUs, the GPUs have the numbers 0 to 7. A process must therefore
# use the GPU with the number of its **local rank**, which is the number of the process on its
# own machine. For example, rank 11 is local rank 3 of the second machine. A process that does
# not choose a GPU uses GPU 0, and so do all other processes of this machine. NCCL then refuses
# two ranks on one GPU, or GPU 0 runs out of memory while seven other GPUs are idle.
#
# `torch.accelerator` works with the accelerators of all vendors. If this machine has fewer
# accelerators than ranks, all its ranks must use the CPU. If some ranks used GPUs and others
# used the CPU, there would be no backend that works for all of them.


# %%
def pick_device(local_rank: int, local_world: int) -> torch.device:
    """Return the accelerator of this local rank, and make it the current device.

    Return the CPU if this machine has fewer accelerators than ranks.
    """
    # >>> solution 1: return the accelerator of this rank if there are enough, else the CPU
    # hint: torch.accelerator has is_available(), device_count() and current_accelerator()
    # hint: torch.accelerator.set_device_index(index) makes a device the current device
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        torch.accelerator.set_device_index(local_rank)
        return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    return torch.device("cpu")
    # <<< solution


# %% [markdown]
# If one machine has too few GPUs, the ranks of all machines must use the CPU. Therefore the
# ranks compare their devices before they use them.

# %%
if __name__ == "__main__":
    REPORT.doing = "picking devices"
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device != "cpu":
        device = pick_device(local_rank, local_world)
    assert device.type == "cpu" or device.index == local_rank, "a rank must use its own device"
    hand_in(store, "devices", device.type)
    kinds = {json.loads(store.get(f"devices {n + 1}")) for n in range(world)}
    if len(kinds) > 1:
        device = torch.device("cpu")
    where = "the CPU" if device.type == "cpu" else f"one {device.type} device each"
    say(f"step 1: {all_ranks} use{'s' * (world == 1)} {where}")
    if device.type == "cpu" and options.device == "auto":
        few = accelerator_faults(cards)
        REPORT.found += [f"the CPU is used, because {fault.what}" for fault in few]

# %% [markdown]
# ## Step 2: start the group, with a timeout
#
# A **process group** is the set of ranks that take part in a collective. The **backend** of a
# group transfers the bytes. NCCL is the backend for NVIDIA GPUs, and gloo is the backend for
# CPUs. If you pass `device_id=device`, the group is bound to this GPU, and torch chooses the
# backend for this kind of device. torch then also connects the ranks immediately, and not in
# the first collective. A broken network is therefore noticed here, and not an hour later.
#
# By default, `init_process_group` finds a store itself. The doctor has already tested a store,
# so your function passes this store, the rank and the world size. The timeout also applies to
# collectives. If another rank has died, a rank waits until the timeout is over, and no longer.
# The default is 30 minutes for gloo and 10 minutes for NCCL. This is a long time if you pay for
# eight idle GPUs, so the doctor uses a shorter timeout.


# %%
def start_group(
    store: dist.Store, device: torch.device, rank: int, world: int, timeout: timedelta
) -> None:
    """Start the group of all ranks. They meet at `store` and wait at most `timeout`."""
    # >>> solution 2: start the group on the device, or with gloo on the CPU; pass the timeout
    # hint: dist.init_process_group has arguments for the store, the rank and the world size
    # hint: pass the backend if the device is the CPU, and pass device_id otherwise
    if device.type == "cpu":
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timeout
        )
    else:
        dist.init_process_group(
            store=store, rank=rank, world_size=world, timeout=timeout, device_id=device
        )
    # <<< solution


# %%
if __name__ == "__main__":
    REPORT.doing = "starting the process group"
    if device.type != "cpu":
        # the report must be printed before NCCL's watchdog ends the process
        wait += timedelta(seconds=30)
    start_group(dist.PrefixStore("group", store), device, rank, world, wait)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world), (
        "the group must contain all ranks"
    )
    backend = dist.get_backend()
    say(f"step 2: a {backend} group of {all_ranks} has a timeout of {options.wait:g} s")
    store.set(f"started {rank}", "")
    if options.plant in ("death", "hang") and rank == world - 1 > 0:
        # wait until every rank has started the group
        store.wait([f"started {other}" for other in range(world)])
        os._exit(9) if options.plant == "death" else time.sleep(1e6)

# %% [markdown]
# ## Step 3: what each collective must give
#
# Write the data of all ranks as one table. Rank $r$ has row $r$. The row has one cell for each
# rank, and the cell $c_{r,k}$ contains a few numbers. You can now describe each collective by
# what rank $k$ has afterwards:
#
# | collective | what rank $k$ has afterwards |
# |---|---|
# | broadcast from $q$ | row $q$ |
# | scatter from $q$ | the cell $c_{q,k}$ |
# | gather to $q$ | the whole table if $k = q$; every other rank has nothing |
# | all-gather | the whole table |
# | reduce to $q$ | the sum of all rows if $k = q$; every other rank has nothing |
# | all-reduce | the sum of all rows |
# | reduce-scatter | cell $k$ of the sum of all rows |
# | all-to-all | column $k$ |
# | send/recv around a ring | the row of rank $k - 1$; rank 0 has the row of the last rank |
#
# The table shows two facts that this book uses often. First, an all-reduce is a reduce-scatter
# that is followed by an all-gather. ZeRO does these two parts at different times. Second, an
# all-to-all transposes the table. In this way, tokens are sent to their experts and back.
#
# If a check compared one collective with another collective, it would rely on the code that it
# examines. Your check needs no collective. The numbers follow from $r$ and $k$, so every rank
# can compute the whole table itself.


# %%
NAMES = (
    "broadcast", "scatter", "gather", "all-gather", "reduce", "all-reduce", "reduce-scatter",
    "all-to-all", "send/recv",
)  # fmt: skip


def expected(name: str, table: torch.Tensor, rank: int, root: int) -> torch.Tensor | None:
    """Return what `rank` must have after the collective, if rank r passes `table[r]`.

    `table` has the shape [world, world, width], and table[r, k] is the cell of rank r for rank
    k. The result is a whole table, a row or a column of the shape [world, width], a cell of the
    shape [width], or None if the rank has nothing.
    """
    # >>> solution 3: return the part of the table, or of the sum of its rows, that fits `name`
    # hint: a row is table[r], a column is table[:, k], the sum of all rows is table.sum(dim=0)
    # hint: you can use a dictionary or a match statement with the nine names in NAMES
    world, total = len(table), table.sum(dim=0)
    results = {
        "broadcast": table[root],
        "scatter": table[root, rank],
        "gather": table if rank == root else None,
        "all-gather": table,
        "reduce": total if rank == root else None,
        "all-reduce": total,
        "reduce-scatter": total[rank],
        "all-to-all": table[:, rank],
        "send/recv": table[(rank - 1) % world],
    }
    return results[name]
    # <<< solution


# %% [markdown]
# The next function contains the calls themselves. A collective that works in place gets a copy.
# The sender of a scatter and the receiver of a gather pass a list, and every other rank passes
# `None`. The ring sends and receives in one batch. Suppose that every rank first sent and then
# received. With messages that are too large for the buffers, every rank would wait for a
# receiver forever.


# %%
def run_collective(
    name: str, row: torch.Tensor, rank: int, world: int, root: int
) -> torch.Tensor | None:
    """Return the result of the collective for a rank that passes `row` [world, width]."""
    result, cell = row.clone(), torch.empty_like(row[0])
    rows = [torch.empty_like(row) for _ in range(world)]
    here = rank == root
    match name:
        case "broadcast":
            dist.broadcast(result, src=root)
        case "scatter":
            dist.scatter(cell, list(row) if here else None, src=root)
            return cell
        case "gather":
            dist.gather(row, rows if here else None, dst=root)
            return torch.stack(rows) if here else None
        case "all-gather":
            dist.all_gather(rows, row)
            return torch.stack(rows)
        case "reduce":
            dist.reduce(result, dst=root)
            return result if here else None
        case "all-reduce":
            dist.all_reduce(result)
        case "reduce-scatter":
            dist.reduce_scatter(cell, list(row))
            return cell
        case "all-to-all":
            dist.all_to_all_single(result, row)
        case "send/recv" if world > 1:
            ring = [
                dist.P2POp(dist.isend, row, (rank + 1) % world),
                dist.P2POp(dist.irecv, result, (rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
    return result


def make_table(world: int, width: int = 1000) -> torch.Tensor:
    """Return a table of small whole numbers. Their float32 sums are exact in any order."""
    rows, cells = torch.arange(world), torch.arange(world)
    numbers = rows[:, None, None] * 31 + cells[None, :, None] * 7 + torch.arange(width)
    return (numbers % 251).float()


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Return whether both are None, or both are tensors with the same bits."""
    return (a is None) == (b is None) and (a is None or torch.equal(a.cpu(), b.cpu()))


# %% [markdown]
# A barrier transfers no data. It must guarantee that no rank leaves the barrier before all
# ranks have entered it. To check this, each rank increases a counter in the store and then
# enters the barrier. The last rank enters late. When a rank leaves the barrier, the counter
# must be equal to the number of ranks.

# %%
if __name__ == "__main__":
    table, root = make_table(world), world - 1
    wrong_here = []
    for name in NAMES:
        REPORT.doing = f"checking {name}"
        result = run_collective(name, table[rank].to(device), rank, world, root)
        if not same(result, expected(name, table, rank, root)):
            wrong_here.append(name)
    REPORT.doing = "checking barrier"
    if rank == world - 1:
        time.sleep(0.2)
    store.add("entered the barrier", 1)
    dist.barrier()
    if store.add("entered the barrier", 0) < world:
        wrong_here.append("barrier")

    hand_in(store, "answers", [rank, wrong_here])
    answers = dict(json.loads(store.get(f"answers {n + 1}")) for n in range(world))
    bad = {name: [r for r in answers if name in answers[r]] for name in [*NAMES, "barrier"]}
    good = [name for name, ranks in bad.items() if not ranks]
    for name, ranks in bad.items():
        if ranks:
            what = f"{name} returns wrong results on {named(ranks)}."
            fix = (
                "if this file is your copy, check.py gives a hint. Otherwise, leave out these "
                "ranks one by one, and look in the output of dmesg for errors of the memory "
                "or of a link."
            )
            REPORT.wrong.append(Fault(what, fix))
    if good:
        say(wrapped("step 3: ", f"the results on {all_ranks} are right: {', '.join(good)}"))
        REPORT.right.append(f"the results on {all_ranks} are right: {', '.join(good)}")

# %% [markdown]
# ## Step 4: gather the facts, print them in rank order
#
# Every rank knows its own machine. If each rank printed what it knows, the lines would appear
# in a random order. In a large job, most of the lines would appear in the output of machines
# that no one reads. Therefore one rank collects the facts of all ranks and prints them.
#
# `dist.all_gather_object` pickles the object that each rank passes. It fills a list, which
# every rank must provide, with the objects of all ranks in rank order. It is a collective like
# all others, so all ranks must call it, even if only one rank prints. (Unpickling can run code.
# Between the ranks of one job this is no problem. Never unpickle data from strangers.)


# %%
def gather_facts(mine: dict, world: int) -> list[dict]:
    """Return the facts of all ranks in rank order, on every rank."""
    # >>> solution 4: create a list with a place for each rank, have it filled, and return it
    everybody: list[dict] = [{} for _ in range(world)]
    dist.all_gather_object(everybody, mine)
    return everybody
    # <<< solution


# %% [markdown]
# These facts are useful: the host name, the cores and the memory, the accelerators and their
# memory, the versions of the software, and the network interfaces. NVML is the library that
# `nvidia-smi` uses. It adds the version of the driver, the memory that other programs use on
# each GPU, and the width of the PCIe link of each GPU. A PCIe link that uses only 4 of its 16
# lanes is a fault that no error message ever mentions.


# %%
def nvml_facts() -> list[str]:
    """Return what NVML reports about each GPU of this machine, or an empty list."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # the module, the library or the driver is missing
        return []
    lines = [f"driver {nvml.nvmlSystemGetDriverVersion()}"]
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):
            gpu = nvml.nvmlDeviceGetHandleByIndex(index)
            used = nvml.nvmlDeviceGetMemoryInfo(gpu).used / 2**30
            lanes = nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)
            most = nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
            lines.append(f"GPU {index}: {used:.1f} GiB in use, PCIe {lanes} of {most} lanes")
    return lines


def facts_of(rank: int, host: str, device: torch.device) -> dict:
    """Return the facts of one rank about its machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = "memory unknown"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        pages = os.sysconf("SC_PHYS_PAGES")
        memory = f"{pages * os.sysconf('SC_PAGE_SIZE') / 2**30:.1f} GiB of memory"
    facts = {
        "rank": rank,
        "host": host,
        "cores": cores,
        "memory": memory,
        "software": f"torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}",
        "interfaces": ", ".join(f"{n} {a}".strip() for n, a in sorted(interfaces().items())),
        "device": str(device),
    }
    with contextlib.suppress(OSError):
        shared = os.statvfs(options.shm)
        free = shared.f_bavail * shared.f_frsize / 2**30
        facts["shared"] = f"{options.shm} {free:.1f} GiB free"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] += f" {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        if int(os.environ["LOCAL_RANK"]) == 0:
            facts["nvml"] = nvml_facts()
    return facts


def describe(facts: Sequence[Mapping], brief: bool) -> list[str]:
    """Return the lines of the report about each machine and the devices of its ranks."""
    lines = []
    for host, ranks in by_host(facts).items():
        first = facts[ranks[0]]
        if brief:
            lines.append(f"{host}: {named(ranks)}, ≈{first['cores']} cores")
            continue
        lines.append(f"{host}: {named(ranks)}, {first['cores']} cores, {first['memory']}")
        lines.append(f"  {first['software']}")
        lines.append(f"  {first['interfaces']}; {first.get('shared', 'no shared memory')}")
        lines += [f"  {line}" for line in first.get("nvml", [])]
        lines += [
            f"  rank {r}: {facts[r]['device']}" for r in ranks if facts[r]["device"] != "cpu"
        ]
    return lines


# %%
if __name__ == "__main__":
    REPORT.doing = "gathering the facts"
    facts = gather_facts(facts_of(rank, cards[rank]["host"], device), world)
    assert [fact["rank"] for fact in facts] == list(range(world)), (
        "the facts must be in rank order"
    )
    say(f"step 4: gathered the facts of {named(fact['rank'] for fact in facts)} in rank order")
    with_what = f"{all_ranks} on {machines} with {backend} on {device.type}"
    REPORT.found = [with_what, *describe(facts, options.report == "brief"), *REPORT.found]

# %% [markdown]
# ## Step 5: time it properly
#
# Three effects make a measured time wrong. Each of them has a remedy.
#
# **The first calls are slow.** They allocate buffers, open connections and load kernels. Call
# the work a few times before you start the clock. This is called **warming up**.
#
# **A GPU works in the background.** A call returns when the work has been queued. If you read
# the clock at this moment, you have measured how long the queueing takes. Wait for the device
# with `torch.accelerator.synchronize()` before each reading of the clock. The first reading
# needs this too, because otherwise earlier work is included in your time.
#
# **Some calls are disturbed.** The machine has other tasks too, and one call in a hundred can
# last ten times as long. Such a call changes the mean of all calls. The **median** ignores it.


# %%
def median_seconds(
    work: Callable[[], object], device: torch.device, repeats: int = 9, warm_up: int = 3
) -> float:
    """Return the median time of `repeats` calls of `work` on `device`, in seconds.

    Before these calls, `work` is called `warm_up` times, and these calls are not timed.
    """

    def settle() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    # >>> solution 5: warm up, then time each call with the clock, and return the median
    # hint: time.perf_counter() reads the clock; call settle() before each reading
    # hint: statistics.median(numbers) returns the median
    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
    # <<< solution


# %% [markdown]
# A link is measured by **ping-pong**: rank $a$ sends a message to rank $b$, and $b$ sends it
# back. Half of the measured time is the time in one direction, so the clocks of two machines do
# not have to agree. A message of one number gives the **latency** α, which is the time that
# every message costs. A message of 4 MiB gives the bandwidth 1/β. All pairs are measured one
# after the other, while the other ranks wait. With more than 32 ranks, only the pairs at
# distances 1, 2, 4, 8, … are measured, because rings and trees use these pairs.


# %%
@dataclass(frozen=True)
class Link:
    """A link is a pair of ranks. The fields contain the speed between these ranks."""

    a: int
    b: int
    kind: str  # "same machine" or "between machines"
    latency: float  # seconds in one direction
    bandwidth: float  # bytes per second in one direction

    def __str__(self) -> str:
        speed = f"≈{self.latency * 1e6:.0f} µs, ≈{self.bandwidth / 1e9:.2f} GB/s"
        return f"link {self.a}-{self.b} ({self.kind}): {speed}"


def pairs_of(world: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks that are measured."""
    for distance in range(1, world):
        if world <= 32 or distance.bit_count() == 1:
            yield from ((a, a + distance) for a in range(world - distance))


def measure_link(
    a: int, b: int, rank: int, device: torch.device, delay: float = 0
) -> tuple[float, float]:
    """Return the latency and the bandwidth between ranks a and b.

    Both ranks must call this function.
    """

    def ping_pong(message: torch.Tensor) -> None:
        if rank == a:
            dist.send(message, b)
            dist.recv(message, b)
        else:
            time.sleep(delay)
            dist.recv(message, a)
            dist.send(message, a)

    small, large = torch.zeros(1, device=device), torch.zeros(2**20, device=device)
    latency = median_seconds(lambda: ping_pong(small), device, repeats=15) / 2
    seconds = median_seconds(lambda: ping_pong(large), device, repeats=7) / 2
    return latency, large.nbytes / seconds


# %%
if __name__ == "__main__":
    measured = {}
    for a, b in pairs_of(world):
        REPORT.doing = f"measuring the link {a}-{b}"
        dist.barrier()
        if rank in (a, b):
            delay = 0.1 if options.plant == "slow" and b == world - 1 and a == 0 else 0
            measured[a, b] = measure_link(a, b, rank, device, delay)
    REPORT.doing = "gathering the measurements"
    halves = gather_facts({"rank": rank, "links": measured}, world)
    links = [
        Link(
            a, b,
            "same machine" if facts[a]["host"] == facts[b]["host"] else "between machines",
            *halves[a]["links"][a, b],
        )
        for a, b in pairs_of(world)
    ]  # fmt: skip
    assert all(link.latency > 0 and link.bandwidth > 0 for link in links), (
        "all measured times must be positive"
    )
    say(f"step 5: measured {count(len(links), 'link')} in both directions")

# %% [markdown]
# ## Step 6: from a time to a bandwidth
#
# If an all-reduce of $S$ bytes lasts $t$ seconds, then $S / t$ is its **algorithm bandwidth**.
# This number says how long your all-reduce takes, but it says little about the links. It
# decreases if there are more ranks, although no link has become slower.
#
# The **bus bandwidth** corrects this. A ring cuts the $S$ bytes into $N$ chunks. Each rank
# sends $N - 1$ chunks while the sums are computed, and $N - 1$ chunks while they are
# distributed. Therefore $2 (N-1)/N \cdot S$ bytes go through each link. With point-to-point
# links, no algorithm needs fewer bytes, because in every algorithm at least one rank must send
# this number of bytes or more. The bus bandwidth is
#
# $$\text{bus bandwidth} = \frac{S}{t} \cdot \frac{2 (N - 1)}{N}$$
#
# It is the number of bytes per second that went through each link. You can compare it with the
# number that the vendor promises, and you can compare 8 ranks with 512 ranks. NVIDIA's
# nccl-tests print it as `busbw`. With one rank, no data moves, and the bus bandwidth is zero.


# %%
def bus_bandwidth(nbytes: int, seconds: float, world: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth of an all-reduce, in bytes per second."""
    # >>> solution 6: return two numbers, the algorithm bandwidth and the bus bandwidth
    algorithm = nbytes / seconds
    return algorithm, algorithm * 2 * (world - 1) / world
    # <<< solution


# %%
if __name__ == "__main__":
    REPORT.doing = "timing the all-reduce"
    buffer = torch.zeros(2**21 if device.type == "cpu" else 2**26, device=device)
    seconds = median_seconds(lambda: dist.all_reduce(buffer), device, repeats=7)
    slowest = max(fact["seconds"] for fact in gather_facts({"seconds": seconds}, world))
    algorithm, bus = bus_bandwidth(buffer.nbytes, slowest, world)
    assert abs(bus / algorithm - 2 * (world - 1) / world) < 1e-6, (
        "the bus bandwidth is wrong, and check.py gives a hint"
    )
    say(f"step 6: each link transfers {bus / algorithm:.2f} times the size of the tensor")
    REPORT.measured.append(
        f"all-reduce of {buffer.nbytes // 2**20} MiB: ≈{slowest * 1e3:.1f} ms, algorithm"
        f" bandwidth ≈{algorithm / 1e9:.2f} GB/s, bus bandwidth ≈{bus / 1e9:.2f} GB/s"
    )

# %% [markdown]
# ## Step 7: find the slow link
#
# A ring is as fast as its slowest link, so one bad cable slows down all ranks, and all ranks
# look the same. To find the bad link, you must measure the links one by one. But when is a link
# slow? The doctor does not know your hardware, so it does not use numbers from a data sheet. It
# compares each link with the **median of its kind**. The kind matters because a link between
# machines is slower than a link inside a machine, even if it is healthy. The median is useful
# because a few bad links do not change it. If a link is the only one of its kind, there is
# nothing to compare it with.


# %%
def slow_links(links: Sequence[Link], factor: float = 3) -> list[Link]:
    """Return the slow links, in the order of `links`.

    A link is slow if its bandwidth is less than 1/factor of the median bandwidth of its kind,
    or if its latency is more than factor times the median latency of its kind.
    """
    # >>> solution 7: compare the latency and the bandwidth of each link with their medians
    # hint: compute each median over all links of the same kind
    slow = []
    for link in links:
        kin = [other for other in links if other.kind == link.kind]
        latency = statistics.median(other.latency for other in kin)
        bandwidth = statistics.median(other.bandwidth for other in kin)
        if link.latency > factor * latency or link.bandwidth < bandwidth / factor:
            slow.append(link)
    return slow
    # <<< solution


# %%
if __name__ == "__main__":
    for kind in sorted({link.kind for link in links}, reverse=True):
        kin = [link for link in links if link.kind == kind]
        latency = statistics.median(link.latency for link in kin)
        bandwidth = statistics.median(link.bandwidth for link in kin)
        REPORT.measured.append(
            f"{count(len(kin), 'link')} ({kind}): median latency"
            f" ≈{latency * 1e6:.0f} µs, bandwidth ≈{bandwidth / 1e9:.2f} GB/s"
        )
    if options.report == "full" and 1 < len(links) <= 28:
        REPORT.measured += [f"  {link}" for link in links]

    speeds = [1.0e10, 1.1e10, 1.0e10, 1.2e9, 0.9e10]
    invented = [Link(0, b, "same machine", 1e-5, speed) for b, speed in enumerate(speeds, 1)]
    assert slow_links(invented) == [invented[3]], (
        "the link with a tenth of the bandwidth must be slow"
    )
    say("step 7: among five invented links, the link with a tenth of the bandwidth was found")
    for link in slow_links(links, options.factor):
        ends = dict.fromkeys([facts[link.a]["host"], facts[link.b]["host"]])
        look = f"check the cables, slots and switch ports of {listed(ends)}"
        REPORT.slow.append(f"{link}: {look}")
    if not REPORT.slow:
        REPORT.slow.append(
            f"no link is {options.factor:g} times slower than the median of its kind"
        )

# %% [markdown]
# ## Step 8: compare before the collective
#
# gloo and NCCL pair the calls of the ranks only by their order. The first call of one rank
# belongs to the first call of every other rank, and so on. Neither library checks in advance
# whether the tensors of these calls have the same shape and the same dtype. Suppose that rank 1
# passes one number more than rank 0. gloo then ends the process with this message:
# `op.preamble.length <= op.nbytes. 1004 vs 1000. Received data size doesn't match expected
# size.` Now suppose that rank 1 passes int32 numbers and rank 0 passes float32 numbers. Both
# tensors have the same number of bytes, so nothing fails, and both ranks silently get a wrong
# sum. The NCCL guide (section Collective Operations) calls the result undefined. The program
# can hang, crash, or compute wrong numbers.
#
# A comparison before the collective prevents this. It costs a few messages, so use it for
# debugging and not in every training step. (`TORCH_DISTRIBUTED_DEBUG=DETAIL` makes torch do
# something similar.) Before the collective, each rank writes an entry into the store. The key
# of the entry contains the name of the call and the number of the rank, and its text describes
# the tensor. Then the rank reads what all other ranks wrote. The store does not depend on the
# process group, so this works even while the group is stuck. If the key of a rank does not
# appear in time, this rank is missing. Keys stay in the store, so each call needs its own keys.
# Otherwise, a rank would read what was written for an earlier call.


# %%
def exchange_metadata(
    store: dist.Store, call: str, mine: str, rank: int, world: int, timeout: timedelta
) -> list[str | None]:
    """Return the text of each rank for this `call`, in rank order.

    `mine` is the text of this rank. A rank that has not written its text within `timeout` gets
    None. Every rank that calls this function writes its text.
    """
    # >>> solution 8: set your own key for this call, then wait for each key and read it
    # hint: a store has set(key, text), wait(keys, timeout) and get(key), which returns bytes
    # hint: if the timeout is over, store.wait raises dist.DistStoreError
    store.set(f"{call}/{rank}", mine)
    texts: list[str | None] = []
    for other in range(world):
        try:
            store.wait([f"{call}/{other}"], timeout)
            texts.append(store.get(f"{call}/{other}").decode())
        except dist.DistStoreError:
            texts.append(None)
    return texts
    # <<< solution


def mismatch(name: str, texts: Sequence[str | None]) -> Fault | None:
    """Return the fault if the ranks do not pass the same kind of tensor."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text or "no answer in time", []).append(rank)
    if len(groups) == 1:
        return None
    said = [f"{text} on {named(ranks)}" for text, ranks in groups.items()]
    return Fault(
        f"the tensors of {name} do not match: {', '.join(said)}.",
        "find out why the data of these ranks differs. Usual reasons are an uneven last "
        "batch, a branch that depends on the rank, or a model or autocast region that is not "
        "the same on all ranks.",
    )


# %%
def tell(tensor: torch.Tensor) -> str:
    """Return the dtype and the shape of a tensor in words, such as 'float32 [1000]'."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


if __name__ == "__main__":
    REPORT.doing = "comparing the tensors of the ranks"
    gradient = torch.zeros(1000, device=device)
    odd = torch.zeros(1000 + (rank == world - 1 > 0), device=device)
    for number, tensor in enumerate((gradient, odd)):
        texts = exchange_metadata(store, f"rehearsal {number}", tell(tensor), rank, world, wait)
        assert texts[rank] == tell(tensor), "a rank must also read its own text"
        fault = mismatch("the all-reduce", texts)
        assert (fault is not None) == (number == 1 and world > 1), (
            "the comparison of the tensors is wrong, and check.py gives a hint"
        )
    seen = "a tensor with one number too many is found before the collective"
    seen = seen if world > 1 else "there is no other rank"
    say(f"step 8: equal tensors pass, and {seen}")

    if rank == world - 1 > 0 and options.plant == "size":
        gradient = torch.zeros(1001, device=device)
    if rank == world - 1 > 0 and options.plant == "dtype":
        gradient = torch.zeros(1000, device=device, dtype=torch.int32)
    texts = exchange_metadata(store, "all-reduce 1", tell(gradient), rank, world, wait)
    if fault := mismatch("the all-reduce", texts):
        raise Trouble(fault, shared=True)
    dist.all_reduce(gradient)

# %% [markdown]
# ## The report
#
# Rank 0 prints the report. The exit status is 1 if something is wrong. A slow link does not
# change the exit status, because only you can judge whether the link is too slow.

# %%
if __name__ == "__main__":
    say(REPORT.text())
    dist.barrier()
    dist.destroy_process_group()
    store.add("left", 1)
    deadline = time.monotonic() + 10
    while rank == 0 and SERVED and store.add("left", 0) < world and time.monotonic() < deadline:
        time.sleep(0.02)  # the rank that serves the store must end last
    sys.exit(1 if any(answers.values()) else 0)

# %% [markdown]
# ## Where to go from here
#
# - Start the ranks by hand in two terminals, with `RANK`, `WORLD_SIZE=2`, `MASTER_ADDR` and
#   `MASTER_PORT`. Then break the job: set a different `WORLD_SIZE` in one terminal, misspell
#   the address, or start only one of the two ranks. Read what the doctor reports. After that,
#   start a different program in the same way. This program only needs to call
#   `dist.init_process_group("gloo")`. What does torch print, and when?
# - With three ranks, `--plant slow` delays one link. `--plant death` ends the last rank in the
#   middle of the run, and `--plant hang` makes it sleep. `--plant size` and `--plant dtype`
#   give the last rank a tensor that does not match the tensors of the other ranks.
# - Set `DOCTOR_HOST=a` for some ranks and `DOCTOR_HOST=b` for the others. One machine then
#   looks like two machines. What does the report say about the links between them?
