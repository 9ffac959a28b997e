"""A cluster on one Linux machine: 2 to 4 nodes, each with a network of its own.

    python labs/cluster.py -- hostname
    python labs/cluster.py --nodes 2 --rate 200mbit -- torchrun --nnodes={nodes} \\
        --node-rank={node} --nproc-per-node=2 --master-addr={master} \\
        --master-port={port} train.py

runs the command once on each node. A node is a network namespace with a name (`node0`), an
address (10.77.0.1), an interface `eth0` and a `/etc/hosts` that knows the others; a bridge is
the switch between them, and `tc` shapes both directions of each node's link. In the command,
{node}, {nodes}, {master}, {port}, {address} and {interface} are filled in.

Nothing is left behind, however it ends. The nodes live in namespaces without a name, under a
process which is the first of its own process namespace: when that one dies, the kernel kills
all that it contains, and takes links, addresses and mounts away. It dies with this program,
also with `kill -9`. Root is not needed where the system allows user namespaces.

Where it does not, or `ip` or `tc` is missing, the nodes are plain processes on localhost: no
link between them is slow then, and this program says so. `--localhost`, or the variable
CLUSTER_ON_LOCALHOST, asks for that. `--check` says which it would be. Should a folder of a
cluster be left because everything was killed at once, the next call, or `--down`, removes it
and what still runs in it.
"""

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SUBNET, PORT, TAG = "10.77.0", 29400, "CLUSTER_RUN"
PREFIX = "world-size-cluster"  # of folders that `clean` may remove: nobody else's begin so
KIND_END = 5.0  # seconds the nodes have to end after they were asked to
AFTER_A_FAILURE = 3.0  # seconds the other nodes have after one has failed
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Plan:
    """What a cluster would be here: `why` says why it is on localhost, if it is."""

    nodes: int
    rate: str
    delay: str = ""
    why: str = ""

    @property
    def isolated(self) -> bool:
        """Whether each node has a network of its own."""
        return not self.why

    @property
    def master(self) -> str:
        """The name of the first node, which every node can reach."""
        return "node0" if self.isolated else "localhost"

    @property
    def interfaces(self) -> dict[str, str]:
        """The interfaces of the first node and their addresses; other nodes have others."""
        ours = {"docker0": "172.17.0.1/16", "eth0": f"{SUBNET}.1/24"}
        return {"lo": "127.0.0.1/8"} | (ours if self.isolated else {})

    def port(self) -> int:
        """A port on the first node that nobody uses."""
        if self.isolated:
            return PORT  # its network is new
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]


def make_plan(
    nodes: int = 2, rate: str = "200mbit", delay: str = "", localhost: bool = False
) -> Plan:
    """See what this machine allows: a cluster of one node is built for it, and removed."""
    clean()
    isolated = Plan(nodes, rate, delay)
    if localhost or os.environ.get("CLUSTER_ON_LOCALHOST"):
        why = "so it was asked"
    elif sys.platform != "linux":
        why = "this is not Linux"
    elif missing := [name for name in ("ip", "tc") if program(name) is None]:
        why = f"there is no program `{missing[0]}` (in Debian, package iproute2)"
    else:
        with tempfile.TemporaryFile() as said:
            status = run(Plan(1, rate, delay), [["true"]], stderr=said)
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
        if status == 0:
            return isolated
        why = (lines or [f"a trial ended with status {status}"])[-1].removeprefix("cluster: ")
    return Plan(nodes, rate, delay, why)


def program(name: str) -> str | None:
    """Where a program lies; those of the system are not on everybody's path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def run(plan: Plan, commands: Sequence[Sequence[str]], stdout=None, stderr=None) -> int:
    """Run one command on each node and wait; the status is that of the first that failed.

    Whatever ends this function, or the program that called it, ends the cluster.
    """
    started = _started(os.getpid())
    name = f"{PREFIX}-{os.getpid()}-{started}-{secrets.token_hex(4)}"
    folder = Path(tempfile.gettempdir()) / name  # the keeper makes it, and so it removes it
    task = json.dumps({"plan": asdict(plan), "commands": list(map(list, commands))})
    process = None
    life, ours = os.pipe()  # its other end is closed when this process ends, whatever ends it
    try:
        process = subprocess.Popen(
            [sys.executable, __file__, "--keep", str(life), str(folder), task],
            pass_fds=[life],
            start_new_session=True,  # Ctrl-C reaches this process alone
            env=os.environ | {TAG: folder.name, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        return process.wait()
    finally:
        os.close(life)
        os.close(ours)
        try:
            if process is not None:
                process.wait(timeout=KIND_END + 3)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        finally:
            remove(folder)


# --- what a machine may have been left with -----------------------------------------------


def _started(pid: int) -> int:
    """When a process started, in clock ticks: a number that is given again has another."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def remove(folder: Path) -> None:
    """Remove the folder of a cluster, and end the processes that were in it."""
    for _ in range(100):
        carriers = [pid for pid in _all_pids() if _tag(pid) == folder.name]
        if not carriers:
            break
        for pid in carriers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)


def clean() -> list[str]:
    """Remove what clusters left whose owner is dead; their names."""
    left = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}-*-*-*"):
        with contextlib.suppress(ValueError, OSError):
            pid, started, _ = folder.name.removeprefix(f"{PREFIX}-").split("-", 2)
            if folder.stat().st_uid == os.getuid() and _started(int(pid)) != int(started):
                remove(folder)
                left.append(folder.name)
    return left


def _all_pids() -> list[int]:
    if not os.path.exists("/proc"):
        return []
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def _tag(pid: int) -> str:
    """Which cluster a process belongs to, by a variable that all its processes inherit."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    found = [entry for entry in variables if entry.startswith(TAG.encode() + b"=")]
    return found[0].partition(b"=")[2].decode() if found else ""


# --- the keeper: a process in a session of its own, which ends when its owner does ---------


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library that Python has no name for; raise what it reports."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def system(*words: str) -> None:
    """Run `ip` or `tc`; if it fails, say what it said."""
    done = subprocess.run([program(words[0]), *words[1:]], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise OSError(f"`{' '.join(words)}`: {said}")


def owner_is_gone(life: int, seconds: float) -> bool:
    """Wait this long, less if the owner of the cluster ends."""
    return bool(select.select([life], [], [], seconds)[0])


def keep(life: int, folder: Path, plan: Plan, commands: list[list[str]]) -> int:
    """Hold a cluster until its commands or its owner end; the exit status."""
    os.set_inheritable(life, False)
    try:
        folder.mkdir(mode=0o700)
        if not plan.isolated:
            if sys.platform == "linux":
                ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            nodes = [start_node(plan, n, commands[n], "lo") for n in range(plan.nodes)]
            return watch(life, nodes)
        return keep_isolated(life, folder, plan, commands)
    except OSError as error:
        print(f"cluster: {error.strerror or error}", file=sys.stderr, flush=True)
        return 1
    finally:
        remove_my_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def keep_isolated(life: int, folder: Path, plan: Plan, commands: list[list[str]]) -> int:
    """Start the first process of a new process namespace; wait until it or the owner ends."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        try:
            call("unshare", CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:  # "no space left" means that none is allowed
            why = f"this is not root, and user namespaces are refused ({error.strerror})"
            raise OSError(error.errno, why) from None
    call("unshare", CLONE_NEWPID)  # for children: the next one is the first in it
    first = os.fork()
    if first == 0:
        status = 1
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            nodes = build(life, folder, plan, commands)
            status = watch(life, nodes)
        except OSError as error:
            print(f"cluster: {error.strerror or error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)  # and the kernel kills what is left, and removes the network
    asked = None
    while True:
        pid, status = os.waitpid(first, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status) % 256
        if owner_is_gone(life, 0.05 if asked is None else 0):
            asked = asked or time.monotonic()
            time.sleep(0.02)
        if asked is not None and time.monotonic() - asked > KIND_END + 1:
            os.kill(first, signal.SIGKILL)


def build(life: int, folder: Path, plan: Plan, commands: list[list[str]]) -> list[int]:
    """Lay the switch and the links, and start a command on each node; the processes."""
    call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    private()
    call("mount", b"cluster", bytes(folder), b"tmpfs", 0, None)  # gone with the last process
    system("ip", "link", "add", "switch", "type", "bridge")
    system("ip", "link", "set", "switch", "up")
    nodes = []
    for node in range(plan.nodes):
        ready, is_ready = os.pipe()
        go, may_go = os.pipe()

        def live_apart(node=node, is_ready=is_ready, go=go) -> None:
            call("unshare", CLONE_NEWNET | CLONE_NEWUTS | CLONE_NEWNS)
            os.write(is_ready, b"1")
            os.read(go, 1)
            furnish(folder, plan, node)

        nodes.append(start_node(plan, node, commands[node], "eth0", live_apart))
        os.close(is_ready)
        if os.read(ready, 1) != b"1":
            raise OSError(f"node {node} could not have a network of its own")
        port = f"port{node}"
        peer = ["peer", "name", "eth0", "netns", str(nodes[-1])]
        system("ip", "link", "add", port, "type", "veth", *peer)
        system("ip", "link", "set", port, "master", "switch", "up")
        shape(plan, port)  # what comes to the node
        os.write(may_go, b"1")
        for end in (ready, go, may_go):
            os.close(end)
    return nodes


def private() -> None:
    """Let nobody outside see what is mounted from here on."""
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def furnish(folder: Path, plan: Plan, node: int) -> None:
    """Give a node its name, its interfaces and its /etc/hosts, from inside."""
    socket.sethostname(f"node{node}")
    private()
    # as Debian does it: the node's own name leads to an address that nobody else can reach
    names = ["127.0.0.1 localhost", f"127.0.1.1 node{node}"]
    names += [f"{SUBNET}.{n + 1} node{n}" for n in range(plan.nodes) if n != node]
    hosts = folder / f"hosts{node}"
    hosts.write_text("\n".join(names) + "\n")
    if os.path.exists("/etc/hosts"):
        call("mount", bytes(hosts), b"/etc/hosts", None, MS_BIND, None)
    system("ip", "link", "set", "lo", "up")
    # a second interface, whose address is the same on all nodes: so it is where Docker runs
    system("ip", "link", "add", "docker0", "type", "bridge")
    system("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    system("ip", "link", "set", "docker0", "up")
    system("ip", "addr", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
    system("ip", "link", "set", "eth0", "up")
    shape(plan, "eth0")  # what leaves the node


def shape(plan: Plan, interface: str) -> None:
    """Let through what leaves by this interface at the link's rate, after its delay."""
    # the queue is long: a packet that is dropped is sent again, and would be counted twice
    tbf = ["tbf", "rate", plan.rate, "burst", "256kb", "limit", "64mb"]
    system("tc", "qdisc", "add", "dev", interface, "root", "handle", "1:", *tbf)
    if plan.delay:
        netem = ["netem", "delay", plan.delay, "limit", "100000"]
        system("tc", "qdisc", "add", "dev", interface, "parent", "1:1", *netem)


def start_node(
    plan: Plan,
    node: int,
    command: list[str],
    interface: str,
    before: Callable[[], None] | None = None,
) -> int:
    """Start the command of a node in a session of its own; its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if before is not None:
            before()
        link = interface if plan.isolated else ""
        os.environ.update(CLUSTER_NODE=str(node), CLUSTER_NODES=str(plan.nodes))
        os.environ.update(CLUSTER_LINK=link, CLUSTER_RATE=plan.rate if link else "")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            os.execvp(command[0], command)
        except OSError as error:
            raise OSError(f"{command[0]}: {error.strerror}") from None
    except OSError as error:
        print(f"cluster: node {node}: {error.strerror or error}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def watch(life: int, nodes: list[int]) -> int:
    """Wait for the nodes; the status of the first that failed, or 0.

    The others may go on for a moment after a failure, and end kindly when the owner is gone.
    """
    running, first_status, deadline = dict(zip(nodes, range(len(nodes)), strict=True)), 0, None
    told = False
    while running and (deadline is None or time.monotonic() < deadline):
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)  # orphans come here too
            if pid in running:
                node, code = running.pop(pid), os.waitstatus_to_exitcode(status)
                if code and not told:
                    first_status = first_status or (code if code > 0 else 128 - code)
                    deadline = deadline or time.monotonic() + AFTER_A_FAILURE
                    how = f"status {code}" if code > 0 else f"signal {-code}"
                    print(f"cluster: node {node} ended with {how}", file=sys.stderr, flush=True)
            if pid:
                continue
        if owner_is_gone(life, 0.02 if not told else 0):
            if not told:
                told, first_status = True, first_status or 143
                deadline = time.monotonic() + KIND_END
                for pid in running:
                    ask_to_end(pid)
            time.sleep(0.02)
    return first_status


def ask_to_end(node: int) -> None:
    """Send SIGTERM to all of a node's session; to itself, if it has not made one yet."""
    for send in (os.killpg, os.kill):
        try:
            return send(node, signal.SIGTERM)
        except OSError:
            pass


def remove_my_descendants() -> None:
    """End what the nodes have left (localhost; a process namespace ends its own)."""
    if sys.platform != "linux":
        return
    while True:
        parents = {}
        for pid in _all_pids():
            with contextlib.suppress(OSError, IndexError):
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                parents[pid] = int(stat[1])
        ours = {os.getpid()}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        ours.discard(os.getpid())
        if not ours:
            return
        for pid in ours:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


# --- the command line ---------------------------------------------------------------------


def main() -> None:
    if sys.argv[1:2] == ["--keep"]:
        task = json.loads(sys.argv[4])
        plan, folder = Plan(**task["plan"]), Path(sys.argv[3])
        sys.exit(keep(int(sys.argv[2]), folder, plan, task["commands"]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--rate", default="200mbit", help="of each link, as tc names it")
    parser.add_argument("--delay", default="", help="of each link and direction: 2ms, say")
    parser.add_argument("--localhost", action="store_true", help="no namespaces")
    parser.add_argument("--check", action="store_true", help="say what this machine allows")
    parser.add_argument("--down", action="store_true", help="remove what was left, if any")
    parser.add_argument("command", nargs="*", help="what each node runs, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGHUP, lambda *_: sys.exit(129))
    if options.down:
        removed = clean()
        print("removed: " + ", ".join(removed) if removed else "nothing was left")
        return
    try:
        plan = make_plan(options.nodes, options.rate, options.delay, options.localhost)
        if options.check:
            possible = "each node can have a network of its own"
            print(f"no namespaces: {plan.why}" if plan.why else possible)
            sys.exit(0 if plan.isolated else 1)
        if not options.command:
            parser.error("what shall the nodes run? Put it after --")
        if plan.why:
            print(
                f"cluster: the nodes are processes on localhost, no link is slow: {plan.why}",
                file=sys.stderr,
                flush=True,
            )
        words = {"nodes": plan.nodes, "master": plan.master, "port": plan.port()}
        commands = []
        for node in range(plan.nodes):
            address = f"{SUBNET}.{node + 1}" if plan.isolated else "127.0.0.1"
            words |= {"node": node, "address": address}
            words["interface"] = "eth0" if plan.isolated else "lo"
            commands.append([fill(word, words) for word in options.command])
        sys.exit(run(plan, commands))
    except KeyboardInterrupt:
        sys.exit(130)


def fill(word: str, words: dict[str, object]) -> str:
    """Put values in place of {node} and its like; other braces stay."""
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


if __name__ == "__main__":
    main()
