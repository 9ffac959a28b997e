"""Tests of the emulated cluster: it starts, its links are slow, and it leaves nothing behind.

This command sends each signal at twenty different moments:
`python -m pytest -q tests/test_cluster.py -k signal_at_any_moment --times 20`
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from processes import HANG, end, left_behind, processes_with, start, until, use_default_signals

from worldsize.execution.requirements import command_failure

INPUTS = ["src/worldsize/execution", "src/worldsize/testing", "graders", "labs/cluster.py", "labs/lab09_multi_node.py",
          "labs/check.py", "labs/start.py"]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, LAB = ROOT / "labs/cluster.py", ROOT / "labs/lab09_multi_node.py"
CAN_RUN = "python labs/cluster.py --check"
KINDS = ["namespaces", "localhost"]


@pytest.fixture(params=KINDS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine(request.param, tmp_path)


@pytest.fixture
def isolated_machine(tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine("namespaces", tmp_path)


@pytest.fixture
def local_machine(tmp_path: Path) -> Iterator[Machine]:
    yield from make_machine("localhost", tmp_path)


def make_machine(kind: str, folder: Path) -> Iterator[Machine]:
    if sys.platform != "linux":
        pytest.skip("this test needs /proc")
    if kind == "namespaces" and (why := command_failure(CAN_RUN, ROOT)):
        pytest.skip(why)
    machine = Machine(kind, folder)
    yield machine
    machine.assert_nothing_left()


class Machine:
    """Starts clusters with a separate temporary folder, and finds what they leave behind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.tag = uuid.uuid4().hex
        (folder / "tmp").mkdir()
        self.before = self.traces()

    def environment(self) -> dict[str, str]:
        common = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        local = {"CLUSTER_ON_LOCALHOST": "1"} if self.kind == "localhost" else {}
        return common | local | {"CLUSTER_TEST": self.tag, "TMPDIR": str(self.folder / "tmp")}

    def start(self, *words: str | Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=self.folder, env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=use_default_signals,
        )  # fmt: skip

    def run(self, *words: str | Path, fork: bool = False) -> subprocess.CompletedProcess:
        """Run a command in a new interpreter, or with `processes.start` if `fork` is true."""
        python = ["python", *map(str, words)]
        env = self.environment()
        process = start(python, self.folder, env) if fork else self.start(*words)
        out, err = process.communicate(timeout=HANG)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def is_running(self, pattern: str) -> bool:
        """Return whether a command that matches this pattern runs in any namespace."""
        return any(re.match(pattern, command) for command in processes_with(self.tag).values())

    def traces(self) -> tuple[list[str], list[str], list[str]]:
        """Return the interfaces, mounts and files that a cluster could leave behind."""
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        of_clusters = [line for line in mounts if line.startswith("cluster ")]
        links = sorted(os.listdir("/sys/class/net"))
        namespaces = Path("/run/netns")
        if namespaces.exists():
            links += sorted(path.name for path in namespaces.iterdir())
        return links, of_clusters, sorted(os.listdir(self.folder / "tmp"))

    def assert_nothing_left(self) -> None:
        running = left_behind(self.tag)
        end(self.tag)
        assert running == []
        assert self.traces() == self.before


def load_cluster() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_of_test", SCRIPT)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# --- success and failure ------------------------------------------------------------------


def test_each_node_runs_the_command(machine: Machine) -> None:
    """A background process of the command must end with the command."""
    command = "echo {node} of {nodes} at {master}:{port} $CLUSTER_LINK; setsid sleep 1000 & "
    done = machine.run(SCRIPT, "--nodes", "3", "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    isolated = machine.kind == "namespaces"
    where, port, link = ("node0", "29400", " eth0") if isolated else ("localhost", r"\d+", "")
    for node, line in enumerate(lines):
        assert re.fullmatch(f"{node} of 3 at {where}:{port}{link}", line), done.stdout
    assert len(lines) == 3
    assert ("no link is slow" in done.stderr) == (not isolated)


def test_the_first_failure_ends_all_nodes(machine: Machine) -> None:
    wait = "[ {node} = 1 ] && exit 7; sleep 1000 & sleep 1000"
    done = machine.run(SCRIPT, "--nodes", "3", "--", "sh", "-c", wait)
    assert done.returncode == 7
    assert "cluster: node 1 ended with status 7\n" in done.stderr


def test_a_missing_command_is_reported(machine: Machine) -> None:
    done = machine.run(SCRIPT, "--", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


# --- interruptions ------------------------------------------------------------------------

STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGKILL": -9}


@pytest.mark.parametrize("name", STATUS)
def test_a_signal_at_any_moment_leaves_nothing(
    machine: Machine, name: str, pytestconfig: pytest.Config
) -> None:
    """The first moments are in the start of Python, and at the last one all nodes run."""
    moments = [0.3, 1.2]
    if times := pytestconfig.getoption("--times"):
        moments = [1.5 * (k + 1) / times for k in range(times)]
    for moment in moments:
        process = machine.start(SCRIPT, "--", "sh", "-c", "setsid sleep 1000 & sleep 1000")
        time.sleep(moment)
        if moment == moments[-1]:  # on a busy machine, this may take longer
            until(lambda: machine.is_running("sleep 1000"))
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=HANG)
        if moment == moments[-1]:  # at an earlier moment, Python itself may handle the signal
            assert process.returncode == STATUS[name]
        machine.assert_nothing_left()


def test_an_interruption_during_the_setup_leaves_nothing(machine: Machine) -> None:
    """The signals arrive when the keeper process has started, and at later moments."""
    for pause in (0.0, 0.03, 0.06, 0.1, 0.15):
        process = machine.start(SCRIPT, "--", "sleep", "1000")
        until(lambda: machine.is_running(r".* --keep "))
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG)
        machine.assert_nothing_left()


def test_killing_the_keeper_process_ends_the_cluster(machine: Machine) -> None:
    process = machine.start(SCRIPT, "--", "sh", "-c", "setsid sleep 1000 & sleep 1000")
    until(lambda: machine.is_running("sleep 1000"))
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"--keep" in words and parent == process.pid:
            os.kill(pid, signal.SIGKILL)
            break
    else:
        pytest.fail("the cluster has no keeper process")
    process.communicate(timeout=HANG)
    assert process.returncode != 0


def test_nodes_receive_sigterm(machine: Machine) -> None:
    """A program can therefore save a checkpoint when it receives SIGTERM."""
    saved = machine.folder / "saved{node}"
    trap = f"trap 'echo > {saved}; exit 0' TERM; echo ready; sleep 1000 & wait"
    process = machine.start(SCRIPT, "--", "sh", "-c", trap)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG)
    assert process.returncode == 143
    assert sorted(path.name for path in machine.folder.glob("saved*")) == ["saved0", "saved1"]


# --- the network --------------------------------------------------------------------------

TALK = """
import socket, sys, time
node, address, port, word = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
size = 1_000_000
if node == 0:
    server = socket.create_server(("", port))
    other, _ = server.accept()
    got = b""
    while len(got) < size:
        got += other.recv(1 << 20)
    assert got == (word.encode() * size)[:size]
    other.sendall(b"k")
else:
    for _ in range(200):
        try:
            other = socket.create_connection((address, port))
            break
        except OSError:
            time.sleep(0.05)
    start = time.perf_counter()
    other.sendall((word.encode() * size)[:size])
    assert other.recv(1) == b"k"
    for line in open("/proc/net/dev"):
        if line.strip().startswith("eth0:"):
            print(word, time.perf_counter() - start, line.split(":")[1].split()[8])
"""


def test_two_clusters_at_once_have_separate_links(isolated_machine: Machine) -> None:
    """Both use the same port and addresses. The link is not faster than the given rate."""
    talk = [sys.executable, "-c", TALK, "{node}", "node0", "{port}"]
    both = [
        isolated_machine.start(SCRIPT, "--rate", "20mbit", "--", *talk, word) for word in "ab"
    ]
    for process, word in zip(both, "ab", strict=True):
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
        received, seconds, sent = out.split()
        assert received == word
        # a busy machine is slower, but never faster
        assert float(seconds) > 0.5 * 1e6 * 8 / 20e6
        assert 1.0e6 < int(sent) < 1.2e6


def test_a_node_has_a_host_name_and_interfaces_like_a_real_one(
    isolated_machine: Machine,
) -> None:
    look = "hostname; cat /etc/hosts; cat /proc/net/dev"
    done = isolated_machine.run(SCRIPT, "--", "sh", "-c", f"[ {{node}} = 1 ] || exit 0; {look}")
    assert done.stdout.startswith(
        "node1\n127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.1 node0"
    )
    assert set(re.findall(r"^ *(\w+):", done.stdout, re.M)) == {"lo", "docker0", "eth0"}


def test_a_delay_is_emulated_or_reported_as_impossible(isolated_machine: Machine) -> None:
    """Some kernels lack the module netem, which delays packets."""
    done = isolated_machine.run(SCRIPT, "--delay", "2ms", "--", "true")
    assert done.returncode == 0
    if done.stderr:
        assert "no link is slow" in done.stderr and "netem delay 2ms" in done.stderr


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0,
    reason="only root can start it as a different user",
)
def test_root_is_not_needed_if_user_namespaces_are_allowed(isolated_machine: Machine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        script = Path(folder, "cluster.py")
        script.write_text(SCRIPT.read_text())
        env = isolated_machine.environment() | {"TMPDIR": folder}
        as_nobody = partial(
            subprocess.run, cwd=folder, env=env, user=65534, group=65534, extra_groups=[],
            capture_output=True, text=True, timeout=HANG, check=False,
        )  # fmt: skip
        if as_nobody(["/usr/bin/env", "python3", "-c", "import json"]).returncode:
            pytest.skip("no other user can start python3 on this machine")
        done = as_nobody(["/usr/bin/env", "python3", script, "--", "hostname"])
        assert os.listdir(folder) == ["cluster.py"]
    assert done.returncode == 0, done.stderr
    if "user namespaces are refused" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert sorted(done.stdout.split()) == ["node0", "node1"], done.stderr


# --- machines with restrictions -----------------------------------------------------------


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_tool_is_reported(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CLUSTER_ON_LOCALHOST", raising=False)
    monkeypatch.setattr(cluster, "program", lambda name: None if name == missing else name)
    plan = cluster.make_plan()
    assert plan.why == f"there is no program `{missing}` (in Debian, package iproute2)"
    assert (plan.isolated, plan.master, list(plan.interfaces)) == (False, "localhost", ["lo"])


def test_option_down_removes_folders_of_dead_clusters_only(local_machine: Machine) -> None:
    """Folders of live clusters and other folders with similar names must stay."""
    cluster = load_cluster()
    dead = "world-size-cluster-999999999-5-xyz"
    live = f"world-size-cluster-{os.getpid()}-{cluster._started(os.getpid())}-abc"
    unrelated = "cluster-2026-11-22"  # a name that also contains numbers
    for name in (dead, live, unrelated):
        (local_machine.folder / "tmp" / name).mkdir()
    done = local_machine.run(SCRIPT, "--down")
    assert done.stdout == f"removed: {dead}\n", done.stderr
    for name in (live, unrelated):
        (local_machine.folder / "tmp" / name).rmdir()
    assert local_machine.run(SCRIPT, "--down").stdout == "nothing was left\n"


# --- the lab ------------------------------------------------------------------------------


def test_the_lab_runs_on_localhost(local_machine: Machine) -> None:
    """Without namespaces, the lab also runs, and reports what it does not measure."""
    done = local_machine.run(LAB, fork=True)
    assert done.returncode == 0, done.stderr
    assert [f"step {n}:" in done.stdout for n in range(1, 9)] == [True] * 8
    assert (
        "all on localhost, where no link is slow\nno namespaces: you have selected localhost"
        in done.stdout
    )
    assert "4.00 MiB by formula (not counted here)" in done.stdout
    assert "nothing is left" in done.stdout


def test_a_blank_is_reported_in_one_line(local_machine: Machine) -> None:
    local_machine.run(ROOT / "labs/start.py", "09")
    (local_machine.folder / "my_labs/cluster.py").write_text(SCRIPT.read_text())
    done = local_machine.run("my_labs/lab09_multi_node.py", fork=True)
    assert done.returncode == 1
    assert re.search(r"\nlab09_multi_node\.py, line \d+, a blank: step 1: .*\n$", done.stdout)
    assert done.stderr == ""


def test_the_finished_lab_passes_without_namespaces(local_machine: Machine) -> None:
    if command_failure(CAN_RUN, ROOT) is None:
        pytest.skip(
            "this machine allows namespaces, so the test of the transcript runs the lab"
        )
    done = local_machine.run(ROOT / "labs/check.py", LAB)
    assert "8 of 8 steps pass" in done.stdout, done.stdout + done.stderr
