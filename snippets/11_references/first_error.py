"""Connection reset by peer: read the logs of all ranks, and find the rank that failed first.

Four ranks sum a tensor, and each rank writes to its own log. Rank 3 reads bad data and ends.
The operating system closes its sockets, so every other rank gets a connection error. The log of
rank 0 has such an error, and then an error of its own handler. The times show which came first.

    (no flag)      rank 3 raises an exception
    --killed       rank 3 is killed, and writes nothing
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, VICTIM = 4, 3


# --8<-- [start:find]
# What a rank writes when another rank has ended. The texts are from NCCL and from gloo.
CONSEQUENCES = re.compile(
    r"ncclRemoteError|remote process exited|Connection reset by peer|Connection closed by"
    r"|Broken pipe|Socket recv failed|Read error|Timed out waiting"
)


def errors_by_time(folder: Path) -> list[tuple[float, int, str]]:
    """The time, the rank and the text of all errors in the logs, the earliest first."""
    found = []
    for log in folder.glob("rank*.log"):
        for line in log.read_text().splitlines():
            moment, text = line.split(" ", 1)
            if "Error" in text:
                found.append((float(moment), int(log.stem[4:]), text))
    return sorted(found)


def first_error(folder: Path) -> str:
    """The error that started all others, or the ranks that wrote no error."""
    errors = errors_by_time(folder)
    _, rank, text = errors[0]
    if not CONSEQUENCES.search(text):
        return f"rank {rank}: {text}"
    silent = sorted(set(range(RANKS)) - {rank for _, rank, _ in errors})
    return f"not in the logs; ranks without an error: {silent}"


# --8<-- [end:find]

# NCCL does not run here. One of these texts is from NCCL, and torch adds the other one.
for text in (
    "remote process exited or there was a network error",
    "ncclRemoteError: A call failed possibly due to a network error",
):
    assert CONSEQUENCES.search(text)


def train(rank: int, folder: Path, killed: bool) -> None:
    """Three steps; before the third, the victim fails, while the other ranks wait for it."""
    with open(folder / f"rank{rank}.log", "w", buffering=1) as log:
        try:
            for step in range(1, 4):
                log.write(f"{time.time():.6f} step {step}\n")
                if (rank, step) == (VICTIM, 3):
                    if killed:
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise ValueError("sample 4711 has no tokens")
                total = torch.tensor(1.0)
                dist.all_reduce(total)
                assert total.item() == RANKS
        except (RuntimeError, ValueError) as error:
            log.write(
                f"{time.time():.6f} {type(error).__name__}: {str(error).splitlines()[0]}\n"
            )
            if rank == 0:  # its handler also fails, and this error looks like a cause
                log.write(f"{time.time():.6f} FileNotFoundError: emergency checkpoint\n")
            os._exit(1)  # the sockets close after the line is in the log


def fork_rank(rank: int, folder: Path, killed: bool) -> int:
    """Start a process for this rank, and return its process id."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # ends a rank that would run for ever
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        train(rank, folder, killed)
    finally:
        os._exit(2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--killed", action="store_true")
    args = parser.parse_args()
    if not hasattr(os, "fork"):
        sys.exit("first_error.py forks its ranks: it needs Linux or macOS")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pids = [fork_rank(rank, folder, args.killed) for rank in range(RANKS)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        errors = errors_by_time(folder)
        texts: list[list[str]] = [[] for _ in range(RANKS)]
        for _, rank, text in errors:
            kind = "a connection error" if CONSEQUENCES.search(text) else text
            texts[rank].append(kind)
        for rank in range(RANKS):
            own = ", then ".join(texts[rank]) or "no error"
            print(f"rank {rank}: {own}; exit status {statuses[rank]}")
        found = first_error(folder)
        print(f"first: {found}")
    # On one machine the order is certain: a socket closes after its rank has written its line.
    survivors = [texts[rank][0] for rank in range(RANKS) if rank != VICTIM]
    assert survivors == ["a connection error"] * (RANKS - 1)
    assert texts[0][1] == "FileNotFoundError: emergency checkpoint"
    if args.killed:
        assert statuses == [1, 1, 1, -signal.SIGKILL]
        assert found == f"not in the logs; ranks without an error: [{VICTIM}]"
    else:
        assert statuses == [1] * RANKS
        assert found == f"rank {VICTIM}: ValueError: sample 4711 has no tokens"


if __name__ == "__main__":
    main()
