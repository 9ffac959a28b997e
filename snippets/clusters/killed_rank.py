"""Finds the rank that was killed, although only the other ranks report an error.

Four ranks sum a tensor in each step. Rank 2 ends by SIGKILL, as if the out-of-memory killer had
chosen it. The system closes its sockets, and a rank that waits for rank 2 gets an error. That
rank ends, its sockets close too, and so the error reaches ranks that never communicated with
rank 2. Two facts identify it: it ended by a signal, and it printed no error. The number of
completed steps does not help, because it is the same on all ranks.

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STEPS, VICTIM, AT = 4, 8, 2, 5


# --8<-- [start:rank]
def train(rank: int, folder: Path) -> None:
    for step in range(1, STEPS + 1):
        if (rank, step) == (VICTIM, AT):
            others = [folder / f"heartbeat.{r}" for r in range(RANKS) if r != rank]
            while any(beat.read_text() != str(step - 1) for beat in others):
                time.sleep(0.05)  # all other ranks have completed step 4
            time.sleep(0.3)  # and wait in step 5
            os.kill(os.getpid(), signal.SIGKILL)
        gradient = torch.ones(1000)
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            (folder / f"error.{rank}").write_text(f"step {step}: {error}")
            raise
        assert gradient.eq(RANKS).all()
        (folder / f"heartbeat.{rank}").write_text(str(step))  # a file, or a key in a store


# --8<-- [end:rank]


def fork_rank_without_stderr(rank: int, folder: Path, work: Callable, *rest) -> int:
    """Start a process that runs `work(rank, folder, *rest)` as this rank. Return its pid."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # in any case, the rank ends after this time
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo prints errors when it ends
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        work(rank, folder, *rest)
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal. After an interrupt, the ranks end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def outcome(error: Path) -> str:
    """A rank's error without the line of gloo's source code, the address and the advice."""
    if not error.exists():
        return "no error"
    step, _, message = error.read_text().partition(": ")
    for known in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"):
        if known in message:
            return f"{step}: an error of the connection"
    return f"{step}: {re.sub(r'^.[^]]*. ', '', message)}"


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("killed_rank.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses = wait_for(
            [fork_rank_without_stderr(rank, folder, train) for rank in range(RANKS)]
        )
        reports = [outcome(folder / f"error.{rank}") for rank in range(RANKS)]
        beats = [int((folder / f"heartbeat.{rank}").read_text()) for rank in range(RANKS)]

    for rank in range(RANKS):
        print(f"rank {rank}: exit status {statuses[rank]:2}, {reports[rank]}")
    signalled = [rank for rank, status in enumerate(statuses) if status < 0]
    silent = [rank for rank, report in enumerate(reports) if report == "no error"]
    print(f"ended by a signal: rank {signalled}; printed no error: rank {silent}")
    print(f"steps completed: {beats}")
    assert signalled == silent == [VICTIM] and statuses[VICTIM] == -signal.SIGKILL
    assert all("connection" in report for r, report in enumerate(reports) if r != VICTIM)
    assert beats == [AT - 1] * RANKS  # so the count does not help


if __name__ == "__main__":
    main()
