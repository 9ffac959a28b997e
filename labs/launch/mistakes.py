"""Starts the agents of torchrun with wrong options, and prints the error of each agent.

Each agent is a fork of this process that runs the main function of torchrun. The timeouts,
which are minutes by default, are seconds here.
"""

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch.distributed.run as torchrun

STATIC = "--master-addr=127.0.0.1 --master-port={port} --rdzv-conf=timeout=2"
C10D = "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{port} --rdzv-conf=join_timeout="

# --8<-- [start:cases]
CASES = {
    "MASTER_PORT is already in use": [f"--nnodes=1 --node-rank=0 {STATIC}"],
    "--node-rank=0 on both nodes": [f"--nnodes=2 --node-rank=0 {STATIC}"] * 2,
    "--node-rank=1 on both nodes": [f"--nnodes=2 --node-rank=1 {STATIC}"] * 2,
    "only one of two nodes is started": [f"--nnodes=2 --node-rank=0 {STATIC}"],
    "c10d: only one of two nodes is started": [f"--nnodes=2 --rdzv-id=a {C10D}2"],
    "c10d: the nodes have different values of --rdzv-id": [
        f"--nnodes=2 --rdzv-id=a {C10D}4",  # this agent runs the store, and it ends first
        f"--nnodes=2 --rdzv-id=b {C10D}60",
    ],
    "correct: node 0 and node 1": [f"--nnodes=2 --node-rank={n} {STATIC}" for n in (0, 1)],
}
# --8<-- [end:cases]


def start_agent(words: list[str], report: Path) -> int:
    """Run torchrun in a fork, which writes its result into a file. Return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the log contains pages of C++ frames
    os.dup2(2, 1)
    rank = ["--nproc-per-node=1", "--no-python", "true"]
    try:
        torchrun.main([*words, *rank])
        report.write_text("the rank ran")
    except BaseException as error:
        first = (str(error).strip() or "(no text)").splitlines()[0]
        report.write_text(f"{type(error).__name__}: {first}")
    os._exit(0)


def wait_for_store(port: int, report: Path) -> None:
    """Return when an agent listens on the port, or when it has ended and written its report."""
    while not report.exists():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)


def run_case(agents: list[str], port_in_use: bool) -> list[str]:
    """Start the agents of a case, and return the result of each, with PORT for the number."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        if not port_in_use:
            listener.close()
        pids, reports = [], []
        for number, words in enumerate(agents):
            reports.append(Path(folder, str(number)))
            pids.append(start_agent(words.format(port=port).split(), reports[-1]))
            if "--node-rank=1" not in words:  # node 1 runs no store
                wait_for_store(port, reports[-1])
        for pid in pids:
            os.waitpid(pid, 0)
        return [report.read_text().replace(str(port), "PORT") for report in reports]


def main() -> None:
    results = {}
    for name, agents in CASES.items():
        for _ in range(3):
            results[name] = run_case(agents, port_in_use="in use" in name)
            # on a busy machine, the store can need 2 seconds for an answer: then try again
            if not any("keys: init/" in line for line in results[name]):
                break
        print(name)
        for line in results[name]:
            print(f"  {line}", flush=True)
    errors = [line for lines in list(results.values())[:-1] for line in lines]
    assert all("Error" in line for line in errors), errors
    assert results["correct: node 0 and node 1"] == ["the rank ran"] * 2


if __name__ == "__main__":
    assert threading.active_count() == 1, "a fork does not copy the other threads"
    sys.exit(main())
