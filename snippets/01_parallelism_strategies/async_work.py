"""An asynchronous collective returns immediately, and its result is complete after wait.

Rank 0 starts an all-reduce and looks at its tensor before the other ranks start theirs. The
other ranks wait until rank 0 writes a key to the store, so the output does not depend on luck.
Before wait, the work is not complete, and the tensor still has the numbers of rank 0. Meanwhile
rank 0 is free to compute. After wait, the tensor has the sum.

On a CPU, wait blocks the caller until the data has arrived. With NCCL, wait makes the current
stream wait, and the host continues. Then only work on that stream may use the tensor.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("async_work.py needs 2 ranks or more, started by torchrun")
    dist.init_process_group("gloo")  # the host reads the data, so it is in host memory
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )

    x = torch.full((3,), 10.0**rank)
    if rank > 0:
        store.wait(["rank 0 has looked"], timedelta(seconds=300))
    work = dist.all_reduce(x, async_op=True)

    if rank == 0:
        print(f"launched: complete {work.is_completed()}, x = {x.tolist()}")
        useful = torch.ones(64, 64) @ torch.ones(64, 64)  # anything that does not need x
        print(f"computed meanwhile: {useful.sum().item():.0f}")
        time.sleep(0.5)  # long enough for the other ranks, if one of them had started
        assert not work.is_completed()
        store.set("rank 0 has looked", "")

    work.wait()
    assert work.is_completed() and x.tolist() == [sum(10.0**r for r in range(n))] * 3
    if rank == 0:
        print(f"waited:   complete {work.is_completed()}, x = {x.tolist()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
