# %% [markdown]
# # Lab 01: Check a multi-GPU cluster
#
# A training job that hangs says nothing: somewhere a name does not resolve, a port is taken, a
# rank never started, a cable runs at a tenth of its speed. In this lab you write the program
# which one runs first on a new machine, and again whenever a job hangs. It says what the
# machines have, whether each collective gives the right answer, how fast each link is, what is
# slow, and what is wrong.
#
#     torchrun --nproc-per-node=2 labs/lab01_multi_gpu_setup.py
#
# runs the finished doctor on this machine. On a cluster, start it exactly as you start your
# training, for it examines the environment which that start gives to each rank: by torchrun on
# every machine, by `srun`, or by hand with `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and
# `MASTER_PORT` set. It ends with status 0 if all is well. Its report is made to be pasted into
# a ticket; `--help` lists what it takes.
#
# Under torchrun the launchers of all machines meet first, and only then does the doctor start.
# If it has printed nothing after a minute, the fault lies in `--master-addr` or
# `--rdzv-endpoint`, or in a machine that did not come. Then start one process on each machine
# without torchrun, and the doctor names it:
#
#     RANK=0 WORLD_SIZE=2 MASTER_ADDR=… MASTER_PORT=29611 python labs/lab01_multi_gpu_setup.py
#
# To write it yourself:
#
#     python labs/start.py 01       # writes my_labs/lab01_multi_gpu_setup.py, with blanks
#     torchrun --nproc-per-node=2 my_labs/lab01_multi_gpu_setup.py
#     python labs/check.py my_labs/lab01_multi_gpu_setup.py
#
# There are eight steps, each with a text, a blank and a check (`check.py --step 2` grades one).
# At a blank your copy prints one sentence; the long report below it is torchrun's. What is left
# to you is what the rest of the book stands on: devices, groups, what each collective means,
# how to time, how to turn a time into a bandwidth. The searching for broken wires is written
# out, for you to read.
# Allow two hours.

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
    """What is wrong, in a sentence or two, and how to fix it."""

    what: str
    fix: str


class Trouble(Exception):
    """Faults that leave nothing to go on with. `shared`: rank 0 has them too, and reports."""

    def __init__(self, *faults: Fault, shared: bool = False):
        super().__init__("; ".join(fault.what for fault in faults))
        self.faults, self.shared = faults, shared


@dataclass
class Report:
    """What is known so far. Rank 0 prints it at the end, or where the run has to stop."""

    doing: str = "reading the environment"
    found: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    wrong: list[Fault] = field(default_factory=list)
    store: dist.Store | None = None  # once all ranks have met there
    world: int = 1

    def text(self) -> str:
        """The report, a section for each kind of finding."""
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
    """A paragraph, whose first line begins with `start` and the others below it."""
    return textwrap.fill(
        text, 92, initial_indent=start, subsequent_indent=" " * max(len(start), 5),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


REPORT = Report()


def say(text: str) -> None:
    """Print once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def count(number: int, thing: str) -> str:
    """'1 rank' or '2 ranks'."""
    return f"{number} {thing}{'s' * (number != 1)}"


def listed(items: Iterable[object], last: str = "and") -> str:
    """'1, 2 and 5'."""
    *most, end = map(str, items)
    return f"{', '.join(most)} {last} {end}" if most else end


def named(ranks: Iterable[int]) -> str:
    """'rank 3', or 'ranks 0 to 7 and 9'."""
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


# what torch.distributed says when another rank is gone, or the network
OF_GROUP = re.compile(r"gloo|nccl|c10d|store|socket|connection|timed? ?out|launcher", re.I)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 speaks first, and its launcher then ends the others; every rank meets a blank
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


def stop_with_report(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on trouble with a report; on a blank or a failed check with one sentence."""
    text = os.environ.get("RANK", "")
    rank = int(text) if text.isdecimal() else 0
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if kind is Trouble or (issubclass(kind, RuntimeError) and OF_GROUP.search(str(error))):
        # torchrun asks all ranks to end when one has: they end by themselves, with a report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop(error if isinstance(error, Trouble) else broken_off(error, rank), rank)
    else:
        stop_kindly(kind, error, trace)


def stop(trouble: Trouble, rank: int) -> None:
    """Print the report of what cannot be gone on with, and end this process."""
    if rank and trouble.shared:
        time.sleep(3 if "TORCHELASTIC_RUN_ID" in os.environ else 0)  # rank 0 speaks
        # in its hook for exceptions torch holds back what goes to sys.stderr
        print(f"rank {rank} stops: rank 0 prints the report", file=sys.__stderr__, flush=True)
    else:
        REPORT.wrong += trouble.faults
        who = f"rank {rank} on {socket.gethostname()} " if rank else ""
        REPORT.found.append(f"{who}had to stop while {REPORT.doing}")
        print(REPORT.text(), flush=True)
        if REPORT.store is not None and rank == 0:
            time.sleep(2)  # the others still ask the store who is alive
    os._exit(1)  # no destructor of a broken group may wait for a rank that is gone


def asked_to_end(*_: object) -> None:
    """Somebody wants this process to end, torchrun for instance because another rank has."""
    raise RuntimeError("the launcher ended this rank")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="The cluster doctor: finds out what works, what is slow, what is wrong."
    )
    add = parser.add_argument
    for name, default, text in (
        ("--wait", 60, "seconds to wait for a rank or for a collective (60)"),
        ("--limit", 600, "seconds the whole run may take (600)"),
        ("--factor", 3, "a link is slow if N times slower than the median of its kind (3)"),
        ("--min-shm", None, "free MiB that shared memory must have (32, or 512 with GPUs)"),
    ):
        add(name, type=float, default=default, metavar="N", help=text)
    add("--shm", default="/dev/shm", metavar="FOLDER", help="where shared memory is")
    for name, choices, text in (
        ("--device", ("auto", "cpu", "gpu"), "gpu: refuse to run with fewer GPUs than ranks"),
        ("--report", ("full", "brief"), "brief: without what differs between machines"),
        ("--plant", ("size", "dtype", "slow", "death", "hang"), "make the last rank faulty"),
    ):
        default = None if name == "--plant" else choices[0]
        add(name, choices=choices, default=default, help=text)
    return parser.parse_args(arguments)


def watch(limit: float, patience: float, rank: int) -> None:
    """End this process when its time is up, or when it is stuck: whatever hangs, it reports."""

    def look() -> None:
        doing, since, began = REPORT.doing, time.monotonic(), time.monotonic()
        while True:
            time.sleep(0.25)
            now = time.monotonic()
            if REPORT.doing != doing:
                doing, since = REPORT.doing, now
            if now - began > limit + (2 if rank else 0):
                what = f"the run did not end within {limit:g} s: rank {rank} was {doing}."
                stop(Trouble(Fault(what, "start it again with a larger --limit.")), rank)
            if now - since > patience and REPORT.store is not None:
                stop(broken_off(RuntimeError(f"it took more than {patience:g} s"), rank), rank)

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    options = options_of(sys.argv[1:])
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(os.environ):
        sys.exit(f"start me with: torchrun --nproc-per-node=2 {Path(__file__).name}")
    sys.excepthook = stop_with_report

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## Before the group: what can be wrong already
#
# `dist.init_process_group` is where broken clusters hang, and its message, if one comes at all,
# is that a wait has timed out. It does four things in one call: it resolves a name, opens or
# finds a port, waits for everybody, and connects everybody with everybody. Done one by one,
# with plain sockets, each of them has an exact answer.
#
# Four things need no other rank. The four variables must be there and be numbers. An interface
# named in `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` must exist: gloo takes whole names, NCCL
# takes prefixes, `=name` for a whole one and `^` for all but these. And `/dev/shm` must have
# room: NCCL passes data between the processes of one machine through it, and so do the workers
# of a `DataLoader`. Docker gives a container 64 MiB of it unless told otherwise; NCCL's guide
# (Runtime and MPI issues) asks for `--shm-size=1g`.
#
# And the GPU driver must start. If it does not, torch warns once and then counts no GPUs, so a
# job can train on the CPU of a machine that has eight GPUs. So the doctor calls `cuInit`, the
# first function of CUDA's driver library, and reads its status. Three values mean that the
# machine is at fault and not the program. One of them is 802, `system not yet initialized`:
# GPUs that are connected by NVSwitch need NVIDIA's fabric manager.


# %%
@dataclass(frozen=True)
class Place:
    """Who this process is, as its environment says."""

    rank: int
    world: int
    address: str  # MASTER_ADDR
    port: int  # MASTER_PORT
    agent: bool  # torchrun holds the store: nobody else opens the port


def read_place(environment: Mapping[str, str]) -> Place:
    """Read the four variables and torchrun's; raise Trouble if one is missing or senseless."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not environment.get(name)]:
        raise Trouble(
            Fault(
                f"{listed(missing)} {'is' if len(missing) == 1 else 'are'} not set.",
                "torchrun sets all four. Whoever starts ranks in another way (srun, mpirun, a "
                "shell) must export them for each process.",
            )
        )
    numbers = {}
    for name, most in (("RANK", 10**6), ("WORLD_SIZE", 10**6), ("MASTER_PORT", 65535)):
        text, least = environment[name], int(name != "RANK")
        if not text.isdecimal() or not least <= int(text) <= most:
            what = f'{name} is "{text}", and must be a whole number from {least} to {most}.'
            raise Trouble(Fault(what, f"set {name} in the environment of this process."))
        numbers[name] = int(text)
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world:
        raise Trouble(
            Fault(
                f"RANK is {rank} and WORLD_SIZE is {world}: ranks count from 0 to {world - 1}.",
                "give every process a RANK of its own, from 0 to WORLD_SIZE - 1.",
            )
        )
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, world, environment["MASTER_ADDR"], numbers["MASTER_PORT"], agent)


def interface_faults(environment: Mapping[str, str], existing: Sequence[str]) -> list[Fault]:
    """Faults of the variables that choose a network interface, given those that exist."""
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
                    f"{variable}={text}, and there is no interface {listed(absent, 'or')}; "
                    f"there are {listed(sorted(existing))}.",
                    f"set {variable} to the interface which leads to the other machines, or "
                    "unset it.",
                )
            )
    return faults


def shared_memory_faults(folder: str, least_mib: float) -> list[Fault]:
    """Faults of the shared memory at this folder."""
    fix = (
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes mount an emptyDir with "
        "medium: Memory at /dev/shm; outside of containers remove what dead jobs left there."
    )
    try:
        system = os.statvfs(folder)
    except OSError:
        return [Fault(f"there is no shared memory: {folder} does not exist.", fix)]
    free = system.f_bavail * system.f_frsize / 2**20
    if free < least_mib:
        what = f"{folder} has {free:.0f} MiB free, and {least_mib:g} MiB are needed."
        return [Fault(what, fix)]
    if not os.access(folder, os.W_OK):
        return [Fault(f"{folder} is not writable for this user.", f"chmod 1777 {folder}")]
    return []


# statuses of cuInit that a change of the program cannot fix: CUDA's text, and what to do
DRIVER = {
    802: (
        "system not yet initialized",
        "install nvidia-fabricmanager in exactly the version of the driver, start it "
        "(systemctl enable --now nvidia-fabricmanager), and wait until nvidia-smi -q shows "
        "State: Completed under Fabric (H100 and later).",
    ),
    803: (
        "system has unsupported display driver / cuda driver combination",
        "the driver's library and its kernel module have different versions: reboot, or mount "
        "the host's libraries into the container again.",
    ),
    804: (
        "forward compatibility was attempted on non supported HW",
        "this GPU cannot use the cuda-compat libraries: remove them from LD_LIBRARY_PATH, or "
        "update the driver of the machine.",
    ),
}


def driver_faults(library: str = "libcuda.so.1") -> list[Fault]:
    """Faults of CUDA's driver, none if this machine has no such library or no GPU."""
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
# Ranks meet at a **store**, a small table of keys and values which one process serves over TCP
# at `MASTER_ADDR:MASTER_PORT`. Under torchrun that is torchrun's agent, otherwise rank 0. So
# rank 0 asks whether it can have the port, and whether `MASTER_ADDR` leads back to it; the
# others ask whether the name resolves, whether anybody listens, and whether that is a store.


# %%
def within(seconds: float, work: Callable[[], object], otherwise: object) -> object:
    """What `work` returns, or `otherwise` if that takes too long: a lookup can block."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else otherwise


def addresses(name: str, seconds: float = 10) -> list[str]:
    """The addresses of a name, none if it does not resolve."""

    def look_up() -> list[str]:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return sorted({entry[4][0] for entry in found})

    return within(seconds, look_up, [])


def holder(port: int) -> str:
    """Which process of ours listens on a port, as far as /proc tells: ' by python (12)'."""
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
    """Why rank 0 cannot listen on this port, if so."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        socket.create_server(
            ("", port), family=family, dualstack_ipv6=family == socket.AF_INET6
        ).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return Fault(
                f"port {port} is taken{holder(port)}: rank 0 cannot open its store there.",
                "end that process, most often a job that did not die, or set MASTER_PORT to a "
                "free port, the same for all ranks.",
            )
        if error.errno == errno.EACCES:
            what = f"rank 0 may not listen on port {port}: ports below 1024 are for root."
            return Fault(what, "set MASTER_PORT to a port above 1023, the same for all ranks.")
        if error.errno != errno.EAFNOSUPPORT:
            what = f"rank 0 cannot listen on port {port}: {error.strerror}."
            return Fault(what, "set MASTER_PORT to another port, the same for all ranks.")
    return None


def knock(address: str, port: int, seconds: float, patient: bool = True) -> str | Exception:
    """Connect to a port, again and again while it is refused; return our own address.

    Returns the last error if nobody has answered in time.
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
    """Why nobody answers at the master's address."""
    where = f"{place.address}:{place.port}"
    if isinstance(error, ConnectionRefusedError):
        return Fault(
            f"nobody listens at MASTER_ADDR:MASTER_PORT = {where}: for {seconds:g} s "
            "connections have been refused.",
            "start rank 0, which opens this port, and give every rank the address and port of "
            "rank 0's machine.",
        )
    return Fault(
        f"MASTER_ADDR:MASTER_PORT = {where} does not answer: {type(error).__name__}.",
        "compare MASTER_ADDR with `hostname -I` on rank 0's machine; if it is right, see with "
        "ping whether the machine can be reached, and let no firewall drop this port.",
    )


def open_store(place: Place, seconds: float) -> tuple[dist.TCPStore, str]:
    """The store at which the ranks meet, and the address by which this machine reached it."""
    # a pod's name enters the DNS some seconds after the pod has started
    deadline = time.monotonic() + min(seconds, 30)
    while not (found := addresses(place.address)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if not found:
        what = f'MASTER_ADDR is "{place.address}", a name that this machine cannot resolve.'
        fix = (
            "set MASTER_ADDR to the address of rank 0's machine (hostname -I prints it there), "
            "or put the name into DNS or /etc/hosts."
        )
        raise Trouble(Fault(what, fix))
    served, timeout = None, timedelta(seconds=seconds)
    if place.rank == 0 and not place.agent:
        if fault := port_fault(place.port):
            raise Trouble(fault)
        served = dist.TCPStore("localhost", place.port, is_master=True, wait_for_workers=False)
        SERVED.append(served)
    # ours is there: nobody needs to wait for it
    ours = knock(place.address, place.port, min(seconds, 5) if served else seconds)
    lost = Fault(
        f"MASTER_ADDR is {place.address}, and does not lead to this machine, where rank 0 is.",
        "set MASTER_ADDR to the machine of rank 0, or start rank 0 on that machine.",
    )
    if isinstance(ours, Exception):
        raise Trouble(lost if served else no_answer(place, ours, seconds))

    def connect() -> dist.TCPStore | None:
        try:
            return dist.TCPStore(place.address, place.port, is_master=False, timeout=timeout)
        except RuntimeError:
            return None

    # a program that listens and says nothing keeps TCPStore waiting beyond its timeout
    store = within(seconds, connect, None)
    if store is None:
        raise Trouble(
            Fault(
                f"something listens at {place.address}:{place.port}, but it is no store of "
                "torch: another program has the port.",
                "set MASTER_PORT to a port that is free on rank 0's machine, the same for all "
                "ranks.",
            )
        )
    if served:
        mark = uuid.uuid4().hex
        served.set(mark, "")
        served.get(mark)  # set() does not wait until it has happened
        if not store.check([mark]):
            raise Trouble(lost)
    return store, ours


SERVED: list[dist.TCPStore] = []  # what rank 0 serves must live as long as the process

# %% [markdown]
# ## Before the group: the roll call
#
# At the store each process draws a ticket and leaves a card: who it is, how many it expects,
# where it runs, what it has found wrong with its own machine. Rank 0 reads the cards as they
# come. It need not wait for a timeout to see that two ranks disagree on the world size, that
# two processes claim one rank, or that their versions of torch differ. If it does come to the
# time limit, it knows exactly who is missing. The verdict goes back to all by the store, so
# that one rank speaks, and no rank waits for ever.
#
# Where ranks are on several machines, each then knocks at the door of others, since every pair
# of ranks will open connections on ports that nobody chose: a firewall which lets only
# `MASTER_PORT` through stops the job a moment later.


# %%
def interfaces() -> dict[str, str]:
    """The network interfaces of this machine and the IPv4 address of each, if it has one."""
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
    """What this process tells the others of itself."""
    nets = interfaces()
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    own = os.environ.get("DOCTOR_HOST", socket.gethostname())  # to act several machines on one
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
    """The ranks of each machine, the machine of the lowest rank first."""
    hosts: dict[str, list[int]] = {}
    for card in sorted(cards, key=lambda card: card["rank"]):
        hosts.setdefault(card["host"], []).append(card["rank"])
    return hosts


def judge_cards(cards: Sequence[Mapping], world: int, seconds: float) -> list[Fault]:
    """What the cards that came in, in this many seconds, tell of the whole set-up."""
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
                "give every process the same WORLD_SIZE: machines times processes on each "
                "(torchrun: the same --nnodes and --nproc-per-node everywhere).",
            )
        )
    elif missing := sorted(set(range(world)) - set(ranks)):
        came = [f"{named(on)} ({host})" for host, on in by_host(cards).items()]
        faults.append(
            Fault(
                f"{named(missing)} of {world} never arrived: in {seconds:g} s only "
                f"{listed(came)} did.",
                "read the output of each missing process on its machine: it was not started, "
                "it died before, or it has another MASTER_ADDR or MASTER_PORT.",
            )
        )
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        hosts = sorted({card["host"] for card in cards if card["rank"] == twice[0]})
        faults.append(
            Fault(
                f"{ranks.count(twice[0])} processes claim to be rank {twice[0]}, on "
                f"{listed(hosts)}.",
                "give every process a RANK of its own (Slurm: RANK=$SLURM_PROCID).",
            )
        )
    versions: dict[str, list[int]] = {}
    for card in cards:
        versions.setdefault(card["torch"], []).append(card["rank"])
    if len(versions) > 1:
        said = [f"{named(on)} {version}" for version, on in versions.items()]
        faults.append(
            Fault(
                f"the ranks run different versions of torch: {listed(said)}.",
                "install the same version everywhere, or start all ranks from one image.",
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
    """Machines that have fewer accelerators than ranks."""
    faults = []
    for host, ranks in by_host(cards).items():
        here = min(card["accelerators"] for card in cards if card["host"] == host)
        if here < len(ranks):
            faults.append(
                Fault(
                    f"{host} has {count(here, 'accelerator')} for {count(len(ranks), 'rank')}.",
                    "start one rank per GPU (--nproc-per-node=gpu), and look at nvidia-smi and "
                    "CUDA_VISIBLE_DEVICES if some GPUs do not show.",
                )
            )
    return faults


def loopback_faults(cards: Sequence[Mapping]) -> list[Fault]:
    """Machines whose gloo would give the others an address that leads nowhere for them."""
    faults = []
    for host, ranks in by_host(cards).items():
        own = next(card["name leads to"] for card in cards if card["rank"] == ranks[0])
        if own is not None and all(address.startswith("127.") for address in own):
            leads = f"leads to {own[0]}" if own else "does not resolve"
            faults.append(
                Fault(
                    f"on {host} the machine's own name {leads}, so gloo tells the other "
                    "machines to connect to a loopback address.",
                    "export GLOO_SOCKET_IFNAME with the interface that leads to the others, or "
                    "fix /etc/hosts.",
                )
            )
    met_by_loopback = any(card["address"].startswith("127.") for card in cards)
    return [] if met_by_loopback or len(by_host(cards)) == 1 else faults


def read_cards(store: dist.Store, cards: list[dict]) -> None:
    """Append the cards that have come since the last look."""
    while len(cards) < store.add("cards", 0):
        cards.append(json.loads(store.get(f"cards {len(cards) + 1}")))


def hand_in(store: dist.Store, what: str, value: object) -> None:
    """Leave a value at the store, under the next number."""
    store.set(f"{what} {store.add(what, 1)}", json.dumps(value))


def pronounce(store: dist.Store, what: str, faults: Sequence[Fault], others: int) -> None:
    """As rank 0: tell the others whether to go on; raise Trouble if not."""
    store.set(f"{what} verdict", json.dumps([fault.what for fault in faults]))
    if faults:
        deadline = time.monotonic() + 3  # the store, which may be ours, must outlive their wait
        while time.monotonic() < deadline and store.add(f"{what} heard", 0) < others:
            time.sleep(0.02)
        raise Trouble(*faults)


def hear(store: dist.Store, what: str, seconds: float) -> None:
    """As another rank: wait for the verdict of rank 0; raise Trouble if it says so."""
    store.wait([f"{what} verdict"], timedelta(seconds=seconds))
    faults = json.loads(store.get(f"{what} verdict"))
    store.add(f"{what} heard", 1)
    if faults:
        raise Trouble(*(Fault(text, "") for text in faults), shared=True)


def roll_call(store: dist.Store, card: Mapping, options: argparse.Namespace) -> list[dict]:
    """The cards of all ranks in rank order; raise Trouble on every rank if all is not well."""
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
            what = f"rank {rank} lost the store before the roll call was over."
            if cards and all(other["rank"] for other in cards):
                came = named(other["rank"] for other in cards)
                what = f"rank 0 of {world} never arrived: in {seconds:g} s only {came} did."
            fix = "read the output of rank 0 on its machine."
            raise Trouble(Fault(what, fix)) from None
    deadline = time.monotonic() + seconds
    while rank == 0 and time.monotonic() < deadline:
        read_cards(store, cards)
        ranks = [other["rank"] for other in cards]
        if len({other["world"] for other in cards}) > 1 or len(set(ranks)) < len(ranks):
            deadline = min(deadline, time.monotonic() + 0.5)  # let others join the quarrel
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
        what = f"rank {rank} expects {world} ranks, and the others have started without it."
        raise Trouble(Fault(what, "give every process the same WORLD_SIZE."))
    return cards


def unreachable(cards: Sequence[Mapping], rank: int, seconds: float) -> list[str]:
    """Knock at ranks on other machines; say which do not open."""
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
    """What to say of an error of torch.distributed in the middle of the run."""
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
            gone = [0]  # the store went with it
    if gone:
        first = min(set(range(REPORT.world)) - set(gone), default=rank)
        what = f"{named(gone)} died or hung while the others were {REPORT.doing}."
        fix = (
            "read the last lines of that process, and dmesg on its machine: it names the "
            "processes that were killed for lack of memory."
        )
        return Trouble(Fault(what, fix), shared=rank != first)
    what = f"{REPORT.doing} failed: {text}"
    fix = "run again with NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL."
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

    REPORT.doing = "knocking at the other machines"
    hosts = by_host(cards)
    if len(hosts) > 1:
        hand_in(store, "doors", unreachable(cards, rank, min(options.wait, 10)))
        if rank == 0:
            closed = [json.loads(store.get(f"doors {n + 1}")) for n in range(world)]
            fix = (
                "open all ports between these machines, or choose another interface by "
                "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
            )
            faults = [Fault(line, fix) for lines in closed for line in sorted(lines)]
            pronounce(store, "doors", faults, world - 1)
        else:
            hear(store, "doors", options.wait + 10)
    door.close()

    neighbours = hosts[cards[rank]["host"]]  # for ranks that were started by hand
    os.environ.setdefault("LOCAL_RANK", str(neighbours.index(rank)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(neighbours)))
    all_ranks, machines = count(world, "rank"), count(len(hosts), "machine")
    say(f"before the group: {all_ranks} on {machines} met, and agree")
    REPORT.right.append(f"the meeting: {world} of {all_ranks}, one world size, one torch")

# %% [markdown]
# ## Step 1: pick the device of a local rank
#
# A machine with eight GPUs numbers them 0 to 7, whatever place it has among the machines. A
# process must therefore use the GPU of its **local rank**, its number on its own machine; rank
# 11 is local rank 3 of the second such machine. A process that does not choose gets GPU 0, as
# all its neighbours do: NCCL then refuses two ranks on one GPU, or memory runs out on one GPU
# while seven are idle.
#
# `torch.accelerator` is the part of torch that does not care whose accelerators they are. If
# there are fewer of them here than ranks, take the CPU: half a machine on GPUs and half on the
# CPU would not find a common backend.


# %%
def pick_device(local_rank: int, local_world: int) -> torch.device:
    """The accelerator of this local rank, made the current one; the CPU if they are too few."""
    # >>> solution 1: return the accelerator with this index if there are enough, else the CPU
    # hint: torch.accelerator.is_available(), .device_count(), .current_accelerator()
    # hint: torch.accelerator.set_device_index(index) makes a device the current one
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        torch.accelerator.set_device_index(local_rank)
        return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    return torch.device("cpu")
    # <<< solution


# %% [markdown]
# One machine that lacks a GPU decides for all, so the ranks compare before they settle.

# %%
if __name__ == "__main__":
    REPORT.doing = "picking devices"
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if options.device != "cpu":
        device = pick_device(local_rank, local_world)
    assert device.type == "cpu" or device.index == local_rank, "a rank takes its own device"
    hand_in(store, "devices", device.type)
    kinds = {json.loads(store.get(f"devices {n + 1}")) for n in range(world)}
    if len(kinds) > 1:
        device = torch.device("cpu")
    where = "on the CPU" if device.type == "cpu" else f"each on a {device.type} of its own"
    say(f"step 1: {all_ranks} {where}")
    if device.type == "cpu" and options.device == "auto":
        few = accelerator_faults(cards)
        REPORT.found += [f"the CPU is used: {fault.what}" for fault in few]

# %% [markdown]
# ## Step 2: start the group, with a timeout
#
# A **process group** is the ranks that a collective spans; its **backend** carries the bytes,
# NCCL between NVIDIA GPUs, gloo between CPUs. With `device_id=device` the group is bound to the
# GPU, torch takes the backend that belongs to it, and connects at once rather than in the first
# collective, so that a broken network is seen here and not an hour later.
#
# `init_process_group` would look for a store by itself. We have one, tested, so we pass it,
# with rank and world size. The timeout is for collectives too: a rank whose neighbour has died
# waits so long and no longer. The default is 30 minutes on gloo and 10 on NCCL, which is a
# long time to pay for eight idle GPUs; a doctor has less patience.


# %%
def start_group(
    store: dist.Store, device: torch.device, rank: int, world: int, timeout: timedelta
) -> None:
    """Start the group of all ranks, which meet at `store` and wait `timeout` at most."""
    # >>> solution 2: init the group on the device, or with gloo on the CPU, with the timeout
    # hint: dist.init_process_group(store=..., rank=..., world_size=..., timeout=...)
    # hint: and the backend "gloo" on the CPU, device_id=device on an accelerator
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
        wait += timedelta(seconds=30)  # NCCL's own watchdog would kill without a word of ours
    start_group(dist.PrefixStore("group", store), device, rank, world, wait)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world), "the group has all ranks"
    backend = dist.get_backend()
    say(f"step 2: a group of {all_ranks} with {backend} which waits {options.wait:g} s at most")
    store.set(f"started {rank}", "")
    if options.plant in ("death", "hang") and rank == world - 1 > 0:
        store.wait([f"started {other}" for other in range(world)])  # else some are still at it
        os._exit(9) if options.plant == "death" else time.sleep(1e6)

# %% [markdown]
# ## Step 3: what each collective must give
#
# Write what the ranks hold as one table. Rank $r$ has row $r$, with a cell for each rank, and
# the cell $c_{r,k}$ is a few numbers. Every collective is then a sentence about this table:
#
# | collective | rank $k$ ends with |
# |---|---|
# | broadcast from $q$ | row $q$ |
# | scatter from $q$ | the cell $c_{q,k}$ |
# | gather to $q$ | the whole table, if $k = q$; the others nothing |
# | all-gather | the whole table |
# | reduce to $q$ | the sum of all rows, if $k = q$; the others nothing |
# | all-reduce | the sum of all rows |
# | reduce-scatter | cell $k$ of the sum of all rows |
# | all-to-all | column $k$ |
# | send/recv around a ring | the row of rank $k - 1$; rank 0 that of the last |
#
# Two facts the book lives on can be read off. An all-reduce is a reduce-scatter and then an
# all-gather, and ZeRO comes from doing the two at different times. An all-to-all transposes the
# table, and that is how tokens travel to their experts and back.
#
# A check that compares with another collective would trust what it examines. Yours uses none:
# every rank can compute the whole table by itself, because the numbers follow from $r$ and $k$.


# %%
NAMES = (
    "broadcast", "scatter", "gather", "all-gather", "reduce", "all-reduce", "reduce-scatter",
    "all-to-all", "send/recv",
)  # fmt: skip


def expected(name: str, table: torch.Tensor, rank: int, root: int) -> torch.Tensor | None:
    """What `rank` must hold after the collective, if rank r brought `table[r]`.

    `table` is [world, world, width]: table[r, k] is the cell of rank r for rank k. The result
    is a table, a row or column [world, width], a cell [width], or None for nothing.
    """
    # >>> solution 3: return for each of NAMES the part of the table, or of its sum, of the rank
    # hint: a row is table[r], a column table[:, k], the sum of all rows table.sum(dim=0)
    # hint: match name: case "broadcast": return table[root] ...
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
# The calls themselves, each as torch wants it. In-place ones get a copy. The sender of a
# scatter and the receiver of a gather pass a list, the others `None`. The ring sends and
# receives in one batch: if every rank first sent and then received, with messages too large to
# be buffered, all would wait for a receiver, for ever.


# %%
def run_collective(
    name: str, row: torch.Tensor, rank: int, world: int, root: int
) -> torch.Tensor | None:
    """What `dist` gives to this rank, which brings `row`, [world, width]."""
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
    """A table of small whole numbers, so that sums are exact in float32 in any order."""
    rows, cells = torch.arange(world), torch.arange(world)
    numbers = rows[:, None, None] * 31 + cells[None, :, None] * 7 + torch.arange(width)
    return (numbers % 251).float()


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal to the last bit, or nothing both times."""
    return (a is None) == (b is None) and (a is None or torch.equal(a.cpu(), b.cpu()))


# %% [markdown]
# A barrier carries no data. What it must give is an order in time: nobody leaves before all
# have entered. Each rank counts itself in at the store and then enters, the last rank late;
# who leaves must find them all counted.

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
            what = f"{name} gives wrong answers on {named(ranks)}."
            fix = (
                "if this file is your copy, check.py has a hint. Otherwise leave out faulty "
                "ranks one by one, and look at dmesg there for errors of memory or links."
            )
            REPORT.wrong.append(Fault(what, fix))
    if good:
        say(wrapped("step 3: ", f"right on {all_ranks}: {', '.join(good)}"))
        REPORT.right.append(f"the answers on {all_ranks} of {', '.join(good)}")

# %% [markdown]
# ## Step 4: gather the facts, print them in rank order
#
# Every rank knows its own machine. If each printed what it knows, the lines would come in
# whatever order the processes happen to run in, and on a large job from machines whose output
# nobody reads. So one rank gathers and prints.
#
# `dist.all_gather_object` pickles what each rank passes and fills a list, which every rank must
# bring, with what all ranks passed, in rank order. It is a collective like any other: all ranks
# call it, the printing is for one. (Pickles run code when they are read. Between the ranks of
# one job that is no matter; from strangers it would be.)


# %%
def gather_facts(mine: dict, world: int) -> list[dict]:
    """The facts of every rank, on every rank, in rank order."""
    # >>> solution 4: make a list of world places, let all_gather_object fill it, return it
    everybody: list[dict] = [{} for _ in range(world)]
    dist.all_gather_object(everybody, mine)
    return everybody
    # <<< solution


# %% [markdown]
# What is worth knowing: the host, its cores and memory, the accelerators and their memory, the
# versions, the network interfaces. NVML, the library beneath `nvidia-smi`, adds the driver,
# how much memory somebody else is using, and the width of each GPU's PCIe link. A link that
# has come up with 4 lanes of 16 is a fault that no error message ever mentions.


# %%
def nvml_facts() -> list[str]:
    """What NVML knows of each GPU of this machine; nothing where there is none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no module, no library, no driver: there is nothing to say
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
    """What one rank knows of its machine."""
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
    """Lines on each machine and on the devices of its ranks."""
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
    assert [fact["rank"] for fact in facts] == list(range(world)), "facts come in rank order"
    say(f"step 4: the facts of {named(fact['rank'] for fact in facts)}, in rank order")
    with_what = f"{all_ranks} on {machines} with {backend} on {device.type}"
    REPORT.found = [with_what, *describe(facts, options.report == "brief"), *REPORT.found]

# %% [markdown]
# ## Step 5: time it properly
#
# Three things make a measured time wrong, and each has its cure.
#
# **The first calls are slow.** They allocate buffers, open connections, load kernels. Run the
# work a few times before the clock starts: **warm up**.
#
# **A GPU works in the background.** A call returns when the work is queued. Read the clock
# then, and you have timed the queueing. Wait for the device, `torch.accelerator.synchronize()`,
# before each reading of the clock; the first too, or work from before falls into your time.
#
# **Some calls are disturbed.** The machine does other things too, and one call in a hundred
# takes ten times as long. The mean spreads that over all; the **median** does not see it.


# %%
def median_seconds(
    work: Callable[[], object], device: torch.device, repeats: int = 9, warm_up: int = 3
) -> float:
    """The median time that `work` takes on `device`, over `repeats` calls after `warm_up`."""

    def settle() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    # >>> solution 5: warm up, then time each call between two settled readings; the median
    # hint: time.perf_counter() reads the clock; call settle() before each reading
    # hint: statistics.median(times)
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
# A link is measured by **ping-pong**: $a$ sends to $b$, $b$ sends back, and half of that time
# is one way. No two clocks have to agree. One number there and back gives the **latency** α,
# the price of any message; 4 MiB give the bandwidth, 1/β. All pairs are measured, one after
# the other, while the rest waits. Beyond 32 ranks only the pairs at distances 1, 2, 4, 8, …
# are: those are the ones that rings and trees use.


# %%
@dataclass(frozen=True)
class Link:
    """A pair of ranks, and how fast it is."""

    a: int
    b: int
    kind: str  # "same machine" or "between machines"
    latency: float  # seconds, one way
    bandwidth: float  # bytes per second, one way

    def __str__(self) -> str:
        speed = f"≈{self.latency * 1e6:.0f} µs, ≈{self.bandwidth / 1e9:.2f} GB/s"
        return f"link {self.a}-{self.b} ({self.kind}): {speed}"


def pairs_of(world: int) -> Iterator[tuple[int, int]]:
    """The pairs of ranks to measure."""
    for distance in range(1, world):
        if world <= 32 or distance.bit_count() == 1:
            yield from ((a, a + distance) for a in range(world - distance))


def measure_link(
    a: int, b: int, rank: int, device: torch.device, delay: float = 0
) -> tuple[float, float]:
    """Latency and bandwidth between ranks a and b, on both of them."""

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
    assert all(link.latency > 0 and link.bandwidth > 0 for link in links), "time passes"
    say(f"step 5: {count(len(links), 'link')} timed there and back")

# %% [markdown]
# ## Step 6: from a time to a bandwidth
#
# An all-reduce of $S$ bytes that takes $t$ seconds has the **algorithm bandwidth** $S / t$. It
# says how long yours will take, and little about the wires: with more ranks it falls, though
# no wire has become slower.
#
# The **bus bandwidth** undoes that. Around a ring, each rank sends the $S/N$ bytes of a chunk
# $N - 1$ times to add up and $N - 1$ times to hand out: $2 (N-1)/N \cdot S$ bytes through each
# link, and no algorithm on point-to-point links needs less for the slowest rank. So
#
# $$\text{bus bandwidth} = \frac{S}{t} \cdot \frac{2 (N - 1)}{N}$$
#
# is the rate at which a link carried bytes. It can be compared with what the vendor promises,
# and between 8 and 512 ranks. NVIDIA's nccl-tests print it as `busbw`. With one rank nothing
# moves and it is zero.


# %%
def bus_bandwidth(nbytes: int, seconds: float, world: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth of an all-reduce, in bytes per second."""
    # >>> solution 6: return bytes per second, and that times what each link has to carry
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
    assert abs(bus / algorithm - 2 * (world - 1) / world) < 1e-6, "check.py has a hint"
    say(f"step 6: each link carries {bus / algorithm:.2f} times the bytes of an all-reduce")
    REPORT.measured.append(
        f"all-reduce of {buffer.nbytes // 2**20} MiB: ≈{slowest * 1e3:.1f} ms, algorithm"
        f" bandwidth ≈{algorithm / 1e9:.2f} GB/s, bus bandwidth ≈{bus / 1e9:.2f} GB/s"
    )

# %% [markdown]
# ## Step 7: find the slow link
#
# A ring is as fast as its slowest link, so one bad cable slows down every rank, and every rank
# looks alike. Only the links, each by itself, tell. Slow compared with what? Not with a number
# from a data sheet, for the doctor does not know your hardware, but with the other links: the
# **median of its kind**. Of its kind, because a link between machines is slower than one inside
# and is healthy all the same. The median, because it stays where it is when the sick ones
# change. And a link that is the only one of its kind has nothing to be compared with.


# %%
def slow_links(links: Sequence[Link], factor: float = 3) -> list[Link]:
    """The links with less than 1/factor of the median bandwidth of their kind.

    Or with more than factor times the median latency of their kind. In the order of `links`.
    """
    # >>> solution 7: compare each link's latency and bandwidth with the medians of its own kind
    # hint: statistics.median(link.latency for link in links if link.kind == kind)
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
        "the link with a tenth of the bandwidth is slow"
    )
    say("step 7: of five invented links the one with a tenth of the bandwidth is found")
    for link in slow_links(links, options.factor):
        ends = dict.fromkeys([facts[link.a]["host"], facts[link.b]["host"]])
        look = f"look at the cables, slots and switch ports of {listed(ends)}"
        REPORT.slow.append(f"{link}: {look}")
    if not REPORT.slow:
        REPORT.slow.append(f"no link is {options.factor:g} times slower than its kind")

# %% [markdown]
# ## Step 8: compare before the collective
#
# Collectives are matched by the order of calls, and nobody looks whether the tensors match.
# Bring a number more on rank 1, and gloo kills the process: `op.preamble.length <= op.nbytes.
# 1004 vs 1000. Received data size doesn't match expected size.` Bring int32 there and float32
# on rank 0, and nothing fails: the bytes are as many, and both get a wrong sum, in silence.
# NCCL's guide (Collective Operations) calls the outcome undefined: hangs, crashes, corruption.
#
# The cure costs a few messages, so it is for debugging, not for every step
# (`TORCH_DISTRIBUTED_DEBUG=DETAIL` makes torch do the like). Before the collective, each rank
# writes what it is going to call, and with what, to the store, and reads what all others wrote.
# The store does not depend on the group, so it works while the group is stuck. A key that does
# not appear in time tells who is not there. And as keys stay, each call needs keys of its own,
# or you will compare with what was said an hour ago.


# %%
def exchange_metadata(
    store: dist.Store, call: str, mine: str, rank: int, world: int, timeout: timedelta
) -> list[str | None]:
    """What each rank says of its part in this `call`, in rank order; None for who is silent."""
    # >>> solution 8: set your own key of this call, then wait for each rank's key and read it
    # hint: store.set(key, text), store.wait([key], timeout), store.get(key).decode()
    # hint: a wait that takes too long raises dist.DistStoreError
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
    """The fault in what the ranks are about to call, if they do not agree."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text or "nothing, in time", []).append(rank)
    if len(groups) == 1:
        return None
    said = [f"{named(ranks)} {text}" for text, ranks in groups.items()]
    return Fault(
        f"{name} would not match: {', '.join(said)}.",
        "find out where that rank's data differs: an uneven last batch, a branch that depends "
        "on the rank, a model or autocast region that is not the same everywhere.",
    )


# %%
def tell(tensor: torch.Tensor) -> str:
    """What must be alike on all ranks: 'float32 [1000]'."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


if __name__ == "__main__":
    REPORT.doing = "comparing what the ranks bring"
    gradient = torch.zeros(1000, device=device)
    odd = torch.zeros(1000 + (rank == world - 1 > 0), device=device)
    for number, tensor in enumerate((gradient, odd)):
        texts = exchange_metadata(store, f"rehearsal {number}", tell(tensor), rank, world, wait)
        assert texts[rank] == tell(tensor), "what a rank says reaches the others"
        fault = mismatch("the all-reduce", texts)
        assert (fault is not None) == (number == 1 and world > 1), "check.py has a hint"
    seen = "a number too many is seen before the collective" if world > 1 else "no other rank"
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
# Rank 0 prints it. The status is 1 if anything is wrong; a slow link is for you to judge.

# %%
if __name__ == "__main__":
    say(REPORT.text())
    dist.barrier()
    dist.destroy_process_group()
    store.add("left", 1)
    deadline = time.monotonic() + 10
    while rank == 0 and SERVED and store.add("left", 0) < world and time.monotonic() < deadline:
        time.sleep(0.02)  # who holds the store leaves last
    sys.exit(1 if any(answers.values()) else 0)

# %% [markdown]
# ## Where to go from here
#
# - Start the ranks by hand, in two terminals, with `RANK`, `WORLD_SIZE=2`, `MASTER_ADDR` and
#   `MASTER_PORT` set. Then break it: another `WORLD_SIZE` in one of them, a misspelt address,
#   only one of the two. Read what the doctor says, then start a program which only calls
#   `dist.init_process_group("gloo")` in the same way, and see what torch says, and when.
# - `--plant slow` with three ranks delays one link; `--plant death` kills the last rank in the
#   middle, and `--plant hang` lets it sleep; `size` and `dtype` make its tensor odd.
# - `DOCTOR_HOST=a` for some ranks and `DOCTOR_HOST=b` for the others make one machine look like
#   two. What does the report say of the links between them?
