"""Stops a node without closing its connections; the other node waits, and then continues alone.

Two torchrun agents represent two nodes. In the middle of the run, SIGSTOP stops all processes
of node 1. Its connections stay open, so rank 0 gets no error and waits until its timeout. Each
rank writes a heartbeat from a separate thread, and only the stopped rank has an old heartbeat.
With --nnodes=1:2, the remaining agent starts its rank again, which resumes from the checkpoint
and computes all rows.

SIGSTOP is not exactly a pulled cable: the kernel of a stopped process still acknowledges
packets, so the connections never end by themselves.

Under torchrun, this is the training program. Started with plain python, it is the operator.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

STEPS, EVERY, CUT_AT, ROWS, TIMEOUT = 40, 8, 20, 12, 5  # seconds
AGENT = [
    "--nnodes=1:2",  # at least one, at most two
    "--nproc-per-node=1",
    "--max-restarts=3",
    "--rdzv-backend=c10d",
    # an agent without a heartbeat for 2 x 3 s is removed; the others wait 8 s for more nodes
    "--rdzv-conf=is_host={host},keep_alive_interval=2,keep_alive_max_attempt=3,"
    "last_call_timeout=8",
]


# --8<-- [start:train]
def beat(folder: Path, rank: int, stop: threading.Event) -> None:
    """Touch a file from a thread, also while the main thread waits in a collective."""
    while not stop.wait(0.2):
        (folder / f"beat.{rank}").touch()


def train(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))  # the start may take long
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))  # a step must be fast
    rank, n = dist.get_rank(), dist.get_world_size()
    stop = threading.Event()
    threading.Thread(target=beat, args=(folder, rank, stop), daemon=True).start()
    done, weights = 0, torch.zeros(4)
    if (folder / "checkpoint.pt").exists():
        done, weights = torch.load(folder / "checkpoint.pt", weights_only=True).values()
    if rank == 0:
        write_log(folder, f"{n} node{'s' * (n > 1)}: starts at step ≈{done + 1}")
    for step in range(done + 1, STEPS + 1):
        mine = gradient(weights, step, rank, n)
        try:
            dist.all_reduce(mine, group=group)
        except RuntimeError as error:
            write_log(folder, f"rank {rank}: {re.sub(r'^.[^]]*. ', '', str(error))}")
            os._exit(1)  # torchrun sees it, and meets the remaining agents again
        weights -= 0.1 * mine
        time.sleep(0.03)  # a larger model would need this time
        if rank == 0:
            (folder / "step").write_text(str(step))
            if step % EVERY == 0:
                state = {"step": step, "weights": weights}
                torch.save(state, folder / "checkpoint.tmp")
                os.replace(folder / "checkpoint.tmp", folder / "checkpoint.pt")
    stop.set()
    if rank == 0:
        torch.save(weights, folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()


# --8<-- [end:train]


def gradient(weights: torch.Tensor, step: int, rank: int, n: int) -> torch.Tensor:
    """This rank's part of the gradient. The sum is the same for any number of ranks."""
    x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(step))
    rows = x[rank * ROWS // n : (rank + 1) * ROWS // n]
    return 2 * rows.T @ (rows @ weights - rows.sum(1)) / ROWS


def write_log(folder: Path, line: str) -> None:
    with (folder / "log").open("a") as log:
        log.write(line + "\n")


def end_with_agent() -> None:
    """Ask Linux to kill this process when the process that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def start_agent(node: int, port: int, folder: Path) -> subprocess.Popen:
    options = [option.format(host=int(node == 0)) for option in AGENT]
    options += ["--local-addr=127.0.0.1", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=7"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, str(folder)]
    # each life of the ranks gets its own store, not the store of the agents
    variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    variables["TMPDIR"] = str(folder)  # for torchrun's logs
    errors = (folder / f"stderr.{node}").open("w")
    return subprocess.Popen(
        command, env=os.environ | variables, stderr=errors, preexec_fn=end_with_agent
    )


def signal_node(agent: subprocess.Popen, number: signal.Signals) -> None:
    """Send a signal to an agent and to its ranks, which have their own sessions (Linux)."""
    os.kill(agent.pid, number)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]) == agent.pid:
                os.kill(int(entry.name), number)


def wait_until(condition, agents: list[subprocess.Popen], limit: float = 600.0) -> None:
    ends = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < ends and all(agent.poll() is None for agent in agents)
        time.sleep(0.02)


def missing(folder: Path, seconds: float) -> list[int]:
    """The ranks whose heartbeat is older than `seconds`."""
    beats = sorted(folder.glob("beat.*"))
    return [int(b.suffix[1:]) for b in beats if time.time() - b.stat().st_mtime > seconds]


# --8<-- [start:operate]
def operate(folder: Path, agents: list[subprocess.Popen]) -> None:
    step, log = folder / "step", folder / "log"
    wait_until(lambda: step.exists() and int(step.read_text() or 0) >= CUT_AT, agents)
    signal_node(agents[1], signal.SIGSTOP)
    cut = time.monotonic()
    print("node 1 is cut off", flush=True)
    for condition, what in (
        (
            lambda: missing(folder, 2.0) == [1],
            "rank 1 has no heartbeat, rank 0 waits",
        ),
        (lambda: "Timed out" in log.read_text(), "the timeout of the group ends the wait"),
        (lambda: "1 node:" in log.read_text(), "one node continues"),
    ):
        wait_until(condition, agents)
        print(f"after ≈{time.monotonic() - cut:.0f} s: {what}")
    assert agents[0].wait(timeout=600) == 0
    first = int(re.findall(r"1 node: starts at step ≈(\d+)", log.read_text())[0])
    assert first % EVERY == 1 and first > CUT_AT - EVERY  # after a save
    for line in log.read_text().splitlines():
        print(f"  {line}")
    signal_node(agents[1], signal.SIGCONT)  # the node comes back
    assert agents[1].wait(timeout=600) > 0
    print("node 1 comes back after the end of the run, and ends with an error")


# --8<-- [end:operate]


def main() -> None:
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        end_with_agent()
        return train(Path(sys.argv[1]))
    if not Path("/proc/self/stat").exists():
        sys.exit("node_cut_off.py finds the ranks of an agent in /proc: it needs Linux")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        agents: list[subprocess.Popen] = []
        try:
            for node in range(2):
                agents.append(start_agent(node, port, folder))
            operate(folder, agents)
            result = torch.load(folder / "result.pt")
        finally:
            for agent in agents:
                agent.kill()  # its ranks end too, because of end_with_agent
                agent.wait()
            time.sleep(0.2)  # until then they may write heartbeats
    alone = torch.zeros(4)
    for step in range(1, STEPS + 1):
        alone -= 0.1 * gradient(alone, step, 0, 1)
    torch.testing.assert_close(result, alone)
    print("the weights are equal to those of one undisturbed process")


if __name__ == "__main__":
    main()
