"""Timed out waiting for clients: a rank that never arrives, and how to learn which one.

The launcher says world size 3, and ranks 0 and 2 come: a node is down, a firewall drops its
packets, or WORLD_SIZE counts nodes in place of processes. By default the store waits 30 minutes
with gloo and 10 with NCCL, and then says how many came, but not who.

    (no flag)   two of three come; the time limit is 5 seconds
    --ask       each rank leaves its name in the store before init_process_group, and rank 0
                reads the list: now it knows who is missing
    --fix      all three come
"""

import argparse
import multiprocessing
import os
import re
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

WORLD_SIZE = 3
LIMIT = timedelta(seconds=5)


def roll_call(rank: int) -> None:
    """Rank 0 prints who has come; `PORT_2` is a second port, for this alone."""
    port = int(os.environ["PORT_2"])
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=LIMIT
    )
    store.set(f"here/{rank}", socket.gethostname())
    if rank == 0:
        missing = []
        for other in range(WORLD_SIZE):
            try:
                store.wait([f"here/{other}"], LIMIT)
            except dist.DistStoreError:
                missing.append(other)
        print(f"rank 0: missing ranks {missing}", flush=True)
        store.set("read", "")
    else:
        store.wait(["read"], timedelta(seconds=300))


def worker(rank: int, ask: bool) -> None:
    os.environ["RANK"] = str(rank)
    if ask:
        roll_call(rank)
    try:
        dist.init_process_group("gloo", timeout=LIMIT)
    except dist.DistError as error:
        if rank == 0:
            message = re.sub(r"after (\d+)", r"after ≈\1", str(error).splitlines()[0])
            print(f"rank 0: {type(error).__name__}: {message}", flush=True)
        sys.exit(1)
    if rank == 0:
        print(f"rank 0: all {dist.get_world_size()} ranks are here")
    dist.destroy_process_group()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ask", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    os.environ |= {"WORLD_SIZE": str(WORLD_SIZE), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": free_port(), "PORT_2": free_port()}
    fork = multiprocessing.get_context("fork")  # torch is imported: the limit is for joining
    ranks = (0, 1, 2) if args.fix else (0, 2)
    processes = [fork.Process(target=worker, args=(rank, args.ask)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
