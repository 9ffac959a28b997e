"""The emulated cluster: it is built, it is slow where it must be, and nothing of it is left.

By hand, twenty moments for each signal:
`python -m pytest -q tests/test_cluster.py -k killed --times 20`
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
from processes import HANG, as_in_a_terminal, carrying, end, left_behind, start, until

from worldsize.execution.requirements import command_failure

INPUTS = ["src/worldsize/execution", "src/worldsize/testing", "graders", "labs/cluster.py", "labs/lab09_multi_node.py",
          "labs/check.py", "labs/start.py"]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, LAB = ROOT / "labs/cluster.py", ROOT / "labs/lab09_multi_node.py"
CAN_RUN = "python labs/cluster.py --check"
KINDS = ["namespaces", "localhost"]


@pytest.fixture(params=KINDS)
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Machine]:
    yield from a_machine(request.param, tmp_path)


@pytest.fixture
def isolating(tmp_path: Path) -> Iterator[Machine]:
    yield from a_machine("namespaces", tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Machine]:
    yield from a_machine("localhost", tmp_path)


def a_machine(kind: str, folder: Path) -> Iterator[Machine]:
    if sys.platform != "linux":
        pytest.skip("this looks into /proc")
    if kind == "namespaces" and (why := command_failure(CAN_RUN, ROOT)):
        pytest.skip(why)
    machine = Machine(kind, folder)
    yield machine
    machine.assert_nothing_is_left()


class Machine:
    """Starts clusters, in a folder for temporary files of its own, and looks what is left."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.tag = uuid.uuid4().hex
        (folder / "tmp").mkdir()
        self.before = self.traces()

    def environment(self) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        local = {"CLUSTER_ON_LOCALHOST": "1"} if self.kind == "localhost" else {}
        return kept | local | {"CLUSTER_TEST": self.tag, "TMPDIR": str(self.folder / "tmp")}

    def start(self, *words: str | Path) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=self.folder, env=self.environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=as_in_a_terminal,
        )  # fmt: skip

    def run(self, *words: str | Path, warm: bool = False) -> subprocess.CompletedProcess:
        """Run it as typed, or, as a lab starts torch many times, from a process that has it."""
        python = ["python", *map(str, words)]
        env = self.environment()
        process = start(python, self.folder, env) if warm else self.start(*words)
        out, err = process.communicate(timeout=HANG)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def runs(self, pattern: str) -> bool:
        """Whether a command that matches runs, in whatever namespace."""
        return any(re.match(pattern, command) for command in carrying(self.tag).values())

    def traces(self) -> tuple[list[str], list[str], list[str]]:
        """Interfaces, mounts and files that a cluster could leave."""
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        ours = [line for line in mounts if line.startswith("cluster ")]
        links = sorted(os.listdir("/sys/class/net"))
        named = Path("/run/netns")
        links += sorted(path.name for path in named.iterdir()) if named.exists() else []
        return links, ours, sorted(os.listdir(self.folder / "tmp"))

    def assert_nothing_is_left(self) -> None:
        left = left_behind(self.tag)
        end(self.tag)
        assert left == []
        assert self.traces() == self.before


def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cluster_of_test", SCRIPT)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


# --- success and failure ------------------------------------------------------------------


def test_each_node_runs_the_command(machine: Machine) -> None:
    """What it leaves in the background ends with it."""
    said = "echo {node} of {nodes} at {master}:{port} $CLUSTER_LINK; setsid sleep 1000 & "
    done = machine.run(SCRIPT, "--nodes", "3", "--", "sh", "-c", said)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    isolated = machine.kind == "namespaces"
    where, port, link = ("node0", "29400", " eth0") if isolated else ("localhost", r"\d+", "")
    for node, line in enumerate(lines):
        assert re.fullmatch(f"{node} of 3 at {where}:{port}{link}", line), done.stdout
    assert len(lines) == 3
    assert ("no link is slow" in done.stderr) == (not isolated)


def test_the_first_failure_ends_all(machine: Machine) -> None:
    wait = "[ {node} = 1 ] && exit 7; sleep 1000 & sleep 1000"
    done = machine.run(SCRIPT, "--nodes", "3", "--", "sh", "-c", wait)
    assert done.returncode == 7
    assert "cluster: node 1 ended with status 7\n" in done.stderr


def test_a_command_that_is_missing_is_named(machine: Machine) -> None:
    done = machine.run(SCRIPT, "--", "no-such-program")
    assert done.returncode == 127
    assert "no-such-program: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


# --- killed at any moment -----------------------------------------------------------------

STATUS = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129, "SIGKILL": -9}


@pytest.mark.parametrize("name", STATUS)
def test_killed_at_any_moment(machine: Machine, name: str, pytestconfig: pytest.Config) -> None:
    """From the start of Python to nodes that have been working for a while."""
    moments = [0.3, 1.2]
    if times := pytestconfig.getoption("--times"):
        moments = [1.5 * (k + 1) / times for k in range(times)]
    for moment in moments:
        process = machine.start(SCRIPT, "--", "sh", "-c", "setsid sleep 1000 & sleep 1000")
        time.sleep(moment)
        if moment == moments[-1]:  # on a busy machine, this may take longer
            until(lambda: machine.runs("sleep 1000"))
        process.send_signal(getattr(signal, name))
        process.communicate(timeout=HANG)
        if moment == moments[-1]:  # before, Python itself may have answered
            assert process.returncode == STATUS[name]
        machine.assert_nothing_is_left()


def test_killed_while_it_is_built(machine: Machine) -> None:
    """As soon as the keeper is there, and again a little later each time."""
    for pause in (0.0, 0.03, 0.06, 0.1, 0.15):
        process = machine.start(SCRIPT, "--", "sleep", "1000")
        until(lambda: machine.runs(r".* --keep "))
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANG)
        machine.assert_nothing_is_left()


def test_the_keeper_is_killed(machine: Machine) -> None:
    process = machine.start(SCRIPT, "--", "sh", "-c", "setsid sleep 1000 & sleep 1000")
    until(lambda: machine.runs("sleep 1000"))
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
        pytest.fail("there is no keeper")
    process.communicate(timeout=HANG)
    assert process.returncode != 0


def test_what_asks_a_node_to_end_is_sigterm(machine: Machine) -> None:
    """A program that saves a checkpoint on SIGTERM gets to do it."""
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


def test_two_at_once_talk_over_links_of_their_own(isolating: Machine) -> None:
    """One port, the same addresses; the link is no faster than it was asked to be."""
    talk = [sys.executable, "-c", TALK, "{node}", "node0", "{port}"]
    both = [isolating.start(SCRIPT, "--rate", "20mbit", "--", *talk, word) for word in "ab"]
    for process, word in zip(both, "ab", strict=True):
        out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
        said, seconds, sent = out.split()
        assert said == word
        assert float(seconds) > 0.5 * 1e6 * 8 / 20e6  # a busy machine is slower, never faster
        assert 1.0e6 < int(sent) < 1.2e6


def test_a_node_has_what_real_ones_have(isolating: Machine) -> None:
    look = "hostname; cat /etc/hosts; cat /proc/net/dev"
    done = isolating.run(SCRIPT, "--", "sh", "-c", f"[ {{node}} = 1 ] || exit 0; {look}")
    assert done.stdout.startswith(
        "node1\n127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.1 node0"
    )
    assert set(re.findall(r"^ *(\w+):", done.stdout, re.M)) == {"lo", "docker0", "eth0"}


def test_a_delay_is_kept_or_refused(isolating: Machine) -> None:
    """netem is a module that not every kernel has."""
    done = isolating.run(SCRIPT, "--delay", "2ms", "--", "true")
    assert done.returncode == 0
    if done.stderr:
        assert "no link is slow" in done.stderr and "netem delay 2ms" in done.stderr


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="this is not root")
def test_root_is_not_needed_where_user_namespaces_are(isolating: Machine) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        script = Path(folder, "cluster.py")
        script.write_text(SCRIPT.read_text())
        env = isolating.environment() | {"TMPDIR": folder}
        as_nobody = partial(
            subprocess.run, cwd=folder, env=env, user=65534, group=65534, extra_groups=[],
            capture_output=True, text=True, timeout=HANG, check=False,
        )  # fmt: skip
        if as_nobody(["/usr/bin/env", "python3", "-c", "import json"]).returncode:
            pytest.skip("there is no python3 that another user may start")
        done = as_nobody(["/usr/bin/env", "python3", script, "--", "hostname"])
        assert os.listdir(folder) == ["cluster.py"]
    assert done.returncode == 0, done.stderr
    if "user namespaces are refused" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert sorted(done.stdout.split()) == ["node0", "node1"], done.stderr


# --- what this machine allows -------------------------------------------------------------


@pytest.mark.parametrize("missing", ["ip", "tc"])
def test_a_missing_program_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = module()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("CLUSTER_ON_LOCALHOST", raising=False)
    monkeypatch.setattr(cluster, "program", lambda name: None if name == missing else name)
    plan = cluster.make_plan()
    assert plan.why == f"there is no program `{missing}` (in Debian, package iproute2)"
    assert (plan.isolated, plan.master, list(plan.interfaces)) == (False, "localhost", ["lo"])


def test_what_was_left_is_removed(local: Machine) -> None:
    """The folder of a cluster whose owner is dead, and no other."""
    cluster = module()
    left = "world-size-cluster-999999999-5-xyz"
    mine = f"world-size-cluster-{os.getpid()}-{cluster._started(os.getpid())}-abc"
    notes = "cluster-2026-11-22"  # which has numbers, too
    for name in (left, mine, notes):
        (local.folder / "tmp" / name).mkdir()
    done = local.run(SCRIPT, "--down")
    assert done.stdout == f"removed: {left}\n", done.stderr
    for name in (mine, notes):
        (local.folder / "tmp" / name).rmdir()
    assert local.run(SCRIPT, "--down").stdout == "nothing was left\n"


# --- the lab ------------------------------------------------------------------------------


def test_the_lab_runs_on_localhost(local: Machine) -> None:
    """Where no namespace can be made it is the same lab, and says what is not measured."""
    done = local.run(LAB, warm=True)
    assert done.returncode == 0, done.stderr
    assert [f"step {n}:" in done.stdout for n in range(1, 9)] == [True] * 8
    assert (
        "all on localhost, where no link is slow\nno namespaces: you have selected localhost"
        in done.stdout
    )
    assert "4.00 MiB by formula (not counted here)" in done.stdout
    assert "nothing is left" in done.stdout


def test_a_blank_is_named_in_one_line(local: Machine) -> None:
    local.run(ROOT / "labs/start.py", "09")
    (local.folder / "my_labs/cluster.py").write_text(SCRIPT.read_text())
    done = local.run("my_labs/lab09_multi_node.py", warm=True)
    assert done.returncode == 1
    assert re.search(r"\nlab09_multi_node\.py, line \d+, a blank: step 1: .*\n$", done.stdout)
    assert done.stderr == ""


def test_the_reference_is_graded_where_its_transcript_is_not(local: Machine) -> None:
    if command_failure(CAN_RUN, ROOT) is None:
        pytest.skip("its transcript runs here, and shows the same")
    done = local.run(ROOT / "labs/check.py", LAB)
    assert "8 of 8 steps pass" in done.stdout, done.stdout + done.stderr
