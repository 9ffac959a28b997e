"""Timed out waiting for clients: one rank never arrives, and a roll call finds this rank.

The world size is 3, and only ranks 0 and 2 come. Typical reasons are a node that is down, a
firewall that drops packets, or a WORLD_SIZE that counts nodes instead of processes. By default
the store waits 30 minutes with gloo and 10 minutes with NCCL. Then it reports how many ranks
came, but not which ranks.

    (no flag)     two of three ranks come, and the time limit is 5 seconds
    --ask         each rank writes its number to a store before init_process_group, and rank 0
                  reads the list, so that it finds the missing rank
    --fix         all three ranks come
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


def roll_call(rank: int) -> dist.TCPStore:
    """Rank 0 prints the missing ranks. Keep the returned store, because it runs in rank 0."""
    port = int(os.environ["PORT_2"])  # not the port of the process group
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
    return store


def worker(rank: int, ask: bool) -> None:
    os.environ["RANK"] = str(rank)
    store = roll_call(rank) if ask else None  # rank 0 must not close it before all have read
    try:
        dist.init_process_group("gloo", timeout=LIMIT)
    except dist.DistError as error:
        if rank == 0:
            message = re.sub(r"after (\d+)", r"after ≈\1", str(error).splitlines()[0])
            print(f"rank 0: {type(error).__name__}: {message}", flush=True)
        sys.exit(1)
    del store
    dist.barrier()  # if a rank leaves earlier, a rank that is still connecting can fail
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
    # a forked process need not import torch, so the time limit covers only the rendezvous
    fork = multiprocessing.get_context("fork")
    ranks = (0, 1, 2) if args.fix else (0, 2)
    processes = [fork.Process(target=worker, args=(rank, args.ask)) for rank in ranks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return int(any(process.exitcode for process in processes))


if __name__ == "__main__":
    sys.exit(main())
