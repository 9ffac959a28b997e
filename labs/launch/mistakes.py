"""Nodes that do not find each other: torchrun's agents started wrongly, and what each one says.

Every agent is a fork of this process that runs torchrun's own main. The waits that last minutes
by default are cut to seconds.
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
    "MASTER_PORT is taken": [f"--nnodes=1 --node-rank=0 {STATIC}"],
    "both nodes say that they are node 0": [f"--nnodes=2 --node-rank=0 {STATIC}"] * 2,
    "both say that they are node 1": [f"--nnodes=2 --node-rank=1 {STATIC}"] * 2,
    "one node of two never comes": [f"--nnodes=2 --node-rank=0 {STATIC}"],
    "c10d: one node of two never comes": [f"--nnodes=2 --rdzv-id=a {C10D}2"],
    "c10d: two ids, so two meetings": [  # the first, which holds the store, gives up first
        f"--nnodes=2 --rdzv-id=a {C10D}4",
        f"--nnodes=2 --rdzv-id=b {C10D}60",
    ],
    "right: node 0 and node 1": [f"--nnodes=2 --node-rank={n} {STATIC}" for n in (0, 1)],
}
# --8<-- [end:cases]


def agent(words: list[str], said: Path) -> int:
    """Run torchrun in a fork; write its last word into a file."""
    pid = os.fork()
    if pid:
        return pid
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # pages of C++ frames
    os.dup2(2, 1)
    rank = ["--nproc-per-node=1", "--no-python", "true"]
    try:
        torchrun.main([*words, *rank])
        said.write_text("its rank ran")
    except BaseException as error:
        first = (str(error).strip() or "(no text)").splitlines()[0]
        said.write_text(f"{type(error).__name__}: {first}")
    os._exit(0)


def wait_for_store(port: int, said: Path) -> None:
    """Return when an agent listens on the port, or has ended and said why not."""
    while not said.exists():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.02)


def outcome(agents: list[str], taken: bool) -> list[str]:
    """Start a case's agents; return what each said, the port named PORT."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        if not taken:
            listener.close()
        pids, files = [], []
        for number, words in enumerate(agents):
            files.append(Path(folder, str(number)))
            pids.append(agent(words.format(port=port).split(), files[-1]))
            if "--node-rank=1" not in words:  # which holds no store
                wait_for_store(port, files[-1])
        for pid in pids:
            os.waitpid(pid, 0)
        return [file.read_text().replace(str(port), "PORT") for file in files]


def main() -> None:
    told = {}
    for name, agents in CASES.items():
        told[name] = outcome(agents, taken="taken" in name)
        print(name)
        for words in told[name]:
            print(f"  {words}", flush=True)
    errors = [words for said in list(told.values())[:-1] for words in said]
    assert all("Error" in words for words in errors), errors
    assert told["right: node 0 and node 1"] == ["its rank ran"] * 2


if __name__ == "__main__":
    assert threading.active_count() == 1, "a fork takes no threads along"
    sys.exit(main())
