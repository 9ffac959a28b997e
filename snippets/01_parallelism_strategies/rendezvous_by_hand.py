"""In a rendezvous, processes that know only one address become the ranks of a process group.

Four processes start with the host and the port of a key-value store, and know nothing more. A
counter in the store gives each process its rank, in the order of arrival. One process writes a
key, and all processes read it. gloo exchanges the addresses of its sockets through the same
store. The c10d rendezvous of torchrun does this too, with restarts and time limits. In a static
rendezvous the launcher has already chosen the ranks, so only the second half is needed.
"""

import multiprocessing
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

WORLD_SIZE = 4


def meet(host: str, port: int) -> tuple[dist.Store, int]:
    """Join the other processes at `host`:`port`. Return the store and the rank."""
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))
    rank = store.add("arrived", 1) - 1  # atomic: no two processes get the same number
    if rank == WORLD_SIZE - 1:
        store.set("complete", "all here")  # the last process lets all processes continue
    store.wait(["complete"])  # blocks until the key exists, or until the timeout
    assert store.add("arrived", 0) == WORLD_SIZE  # no process continues before all have come
    return store, rank


def work(host: str, port: int, results: multiprocessing.Queue) -> None:
    store, rank = meet(host, port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    if rank == 0:
        store.set("greeting", f"written by rank {rank}")
    results.put((rank, total.item(), store.get("greeting").decode()))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # free port
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])  # imported only once
    results = context.Queue()
    arguments = ("127.0.0.1", server.port, results)
    processes = [context.Process(target=work, args=arguments) for _ in range(WORLD_SIZE)]
    for process in processes:
        process.start()
    rows = sorted(results.get(timeout=600) for _ in processes)
    for process in processes:
        process.join()

    for rank, total, greeting in rows:
        print(f"rank {rank}: all_reduce gives {total}, store.get gives {greeting!r}")
    assert [row[0] for row in rows] == list(range(WORLD_SIZE))
    own_keys = ["arrived", "complete", "greeting"]
    assert server.check(own_keys) and server.num_keys() > len(own_keys)  # gloo also has keys
    print(f"processes that asked the counter: {server.add('arrived', 0)}")
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
