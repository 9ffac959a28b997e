"""A cluster on one Linux machine: 2 to 4 nodes, each with its own network.

    python labs/cluster.py -- hostname
    python labs/cluster.py --nodes 2 --rate 200mbit -- torchrun --nnodes={nodes} \\
        --node-rank={node} --nproc-per-node=2 --master-addr={master} \\
        --master-port={port} train.py

runs the command once on each node. A node is a network namespace with a name (`node0`), an
address (10.77.0.1), an interface `eth0`, and a file `/etc/hosts` with the names of all nodes. A
bridge connects the nodes, and `tc` limits the rate of each link in both directions. In the
command, {node}, {nodes}, {master}, {port}, {address} and {interface} are replaced by values.

No matter how the program ends, nothing of the cluster is left. The nodes are in namespaces
without a name, below a process that is the first one of its own process namespace. If this
process dies, the kernel kills all processes in the namespace, and removes links, addresses and
mounts. It dies together with this program, even after `kill -9`. The program does not need root
if the system allows user namespaces.

If the system does not allow them, or if `ip` or `tc` is missing, the nodes are plain processes
on localhost. No link between them is slow then, and the program prints this. The option
`--localhost` or the variable CLUSTER_ON_LOCALHOST selects this mode. `--check` prints whether
namespaces are possible.
If all processes were killed at the same moment, a folder of the cluster may be left. The next
call, or `--down`, removes the folder and the processes that still run in it.
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
PREFIX = "world-size-cluster"  # of the folders that `clean` may remove
KIND_END = 5.0  # seconds that the nodes have to end after SIGTERM
AFTER_A_FAILURE = 3.0  # seconds that the other nodes have after a failure
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class Plan:
    """The kind of cluster that is possible. `why` is the reason for localhost, or empty."""

    nodes: int
    rate: str
    delay: str = ""
    why: str = ""

    @property
    def isolated(self) -> bool:
        """Return whether each node has its own network."""
        return not self.why

    @property
    def master(self) -> str:
        """Return a name of the first node that every node can reach."""
        return "node0" if self.isolated else "localhost"

    @property
    def interfaces(self) -> dict[str, str]:
        """Return the interfaces of the first node, with their addresses."""
        ours = {"docker0": "172.17.0.1/16", "eth0": f"{SUBNET}.1/24"}
        return {"lo": "127.0.0.1/8"} | (ours if self.isolated else {})

    def port(self) -> int:
        """Return an unused port on the first node."""
        if self.isolated:
            return PORT  # its network is new
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]


def make_plan(
    nodes: int = 2, rate: str = "200mbit", delay: str = "", localhost: bool = False
) -> Plan:
    """Find out what this machine allows: build a cluster of one node, and remove it."""
    clean()
    isolated = Plan(nodes, rate, delay)
    if localhost or os.environ.get("CLUSTER_ON_LOCALHOST"):
        why = "you have selected localhost"
    elif sys.platform != "linux":
        why = "this is not Linux"
    elif missing := [name for name in ("ip", "tc") if program(name) is None]:
        why = f"there is no program `{missing[0]}` (in Debian, package iproute2)"
    else:
        with tempfile.TemporaryFile() as output:
            status = run(Plan(1, rate, delay), [["true"]], stderr=output)
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()
        if status == 0:
            return isolated
        why = (lines or [f"a trial ended with status {status}"])[-1].removeprefix("cluster: ")
    return Plan(nodes, rate, delay, why)


def program(name: str) -> str | None:
    """Return the path of a program, also if it is in a folder for system programs."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def run(plan: Plan, commands: Sequence[Sequence[str]], stdout=None, stderr=None) -> int:
    """Run one command on each node and wait. Return the exit status of the first failure, or 0.

    If this function ends, or the program that called it, the cluster ends too.
    """
    started = _started(os.getpid())
    name = f"{PREFIX}-{os.getpid()}-{started}-{secrets.token_hex(4)}"
    folder = Path(tempfile.gettempdir()) / name  # the keeper creates it and removes it
    task = json.dumps({"plan": asdict(plan), "commands": list(map(list, commands))})
    process = None
    life, ours = os.pipe()  # the kernel closes `ours` when this process ends
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


# --- what an earlier cluster may have left ------------------------------------------------


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks, because process IDs are used again."""
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
    """Remove what is left of clusters whose owner has ended, and return their names."""
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
    """Return the cluster of a process, from a variable that all its processes inherit."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    found = [entry for entry in variables if entry.startswith(TAG.encode() + b"=")]
    return found[0].partition(b"=")[2].decode() if found else ""


# --- the keeper: a process in its own session, which ends when its owner ends ---------------


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library, and raise its error as an OSError."""
    if ctypes.CDLL(None, use_errno=True)[name](*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def system(*words: str) -> None:
    """Run `ip` or `tc`. If it fails, raise its message as an OSError."""
    done = subprocess.run([program(words[0]), *words[1:]], capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"`{' '.join(words)}`: {message}")


def owner_is_gone(life: int, seconds: float) -> bool:
    """Wait until the owner of the cluster ends, or this long. Return whether it has ended."""
    return bool(select.select([life], [], [], seconds)[0])


def keep(life: int, folder: Path, plan: Plan, commands: list[list[str]]) -> int:
    """Keep a cluster until its commands or its owner end. Return the exit status."""
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
    """Start the first process of a process namespace. Wait until it or the owner ends."""
    user, group = os.getuid(), os.getgid()
    if user != 0:
        try:
            call("unshare", CLONE_NEWUSER)
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:  # "no space left" means that the limit is 0
            why = f"this is not root, and user namespaces are refused ({error.strerror})"
            raise OSError(error.errno, why) from None
    call("unshare", CLONE_NEWPID)  # the next child is the first process in it
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
            os._exit(status)  # the kernel then kills all others and removes the network
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
    """Create the bridge and the links, and start the nodes. Return their process IDs."""
    call("unshare", CLONE_NEWNS | CLONE_NEWNET)
    private()
    call("mount", b"cluster", bytes(folder), b"tmpfs", 0, None)  # ends with the last process
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
            raise OSError(f"node {node} could not get its own network")
        port = f"port{node}"
        peer = ["peer", "name", "eth0", "netns", str(nodes[-1])]
        system("ip", "link", "add", port, "type", "veth", *peer)
        system("ip", "link", "set", port, "master", "switch", "up")
        shape(plan, port)  # limits what the node receives
        os.write(may_go, b"1")
        for end in (ready, go, may_go):
            os.close(end)
    return nodes


def private() -> None:
    """Hide later mounts from processes outside."""
    call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)


def furnish(folder: Path, plan: Plan, node: int) -> None:
    """Give this node its name, its interfaces and its /etc/hosts."""
    socket.sethostname(f"node{node}")
    private()
    # as on Debian, the name of the node resolves to an address that no other node can reach
    names = ["127.0.0.1 localhost", f"127.0.1.1 node{node}"]
    names += [f"{SUBNET}.{n + 1} node{n}" for n in range(plan.nodes) if n != node]
    hosts = folder / f"hosts{node}"
    hosts.write_text("\n".join(names) + "\n")
    if os.path.exists("/etc/hosts"):
        call("mount", bytes(hosts), b"/etc/hosts", None, MS_BIND, None)
    system("ip", "link", "set", "lo", "up")
    # a second interface with the same address on all nodes, as on machines with Docker
    system("ip", "link", "add", "docker0", "type", "bridge")
    system("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    system("ip", "link", "set", "docker0", "up")
    system("ip", "addr", "add", f"{SUBNET}.{node + 1}/24", "dev", "eth0")
    system("ip", "link", "set", "eth0", "up")
    shape(plan, "eth0")  # limits what the node sends


def shape(plan: Plan, interface: str) -> None:
    """Limit the rate at which this interface sends, and add the delay."""
    # a long queue drops no packet; a dropped packet would be sent and counted twice
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
    """Start the command of a node in a new session. Return its process ID."""
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
    """Wait for the nodes. Return the status of the first node that failed, or 0.

    After a failure, the other nodes may continue for a moment. If the owner ends, the nodes get
    SIGTERM.
    """
    running, first_status, deadline = dict(zip(nodes, range(len(nodes)), strict=True)), 0, None
    told = False
    while running and (deadline is None or time.monotonic() < deadline):
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(-1, os.WNOHANG)  # also returns orphans
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
    """Send SIGTERM to the session of a node, or to its process if there is no session yet."""
    for send in (os.killpg, os.kill):
        try:
            return send(node, signal.SIGTERM)
        except OSError:
            pass


def remove_my_descendants() -> None:
    """End the processes that the nodes have left, which is needed only on localhost."""
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
    parser.add_argument(
        "--rate", default="200mbit", help="rate of each link, in the units of tc"
    )
    parser.add_argument(
        "--delay", default="", help="delay of each link and direction, for example 2ms"
    )
    parser.add_argument("--localhost", action="store_true", help="use no namespaces")
    parser.add_argument("--check", action="store_true", help="print what this machine allows")
    parser.add_argument(
        "--down", action="store_true", help="remove what an earlier cluster has left"
    )
    parser.add_argument("command", nargs="*", help="the command of each node, after --")
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
            possible = "each node can have its own network"
            print(f"no namespaces: {plan.why}" if plan.why else possible)
            sys.exit(0 if plan.isolated else 1)
        if not options.command:
            parser.error("the command is missing: write it after --")
        if plan.why:
            print(
                f"cluster: the nodes run on localhost, and no link is slow: {plan.why}",
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
    """Replace {node} and the other names by values. Other braces stay."""
    for name, value in words.items():
        word = word.replace(f"{{{name}}}", str(value))
    return word


if __name__ == "__main__":
    main()
