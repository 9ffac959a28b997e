"""One rank compiles longer than the group waits: the time-out, and a warm-up that prevents it.

Every rank but the last finds its kernels in a cache. Sleeping stands for the last one's
compilation. The limits are seconds here, where NCCL's is ten minutes. Look at who prints the
message: a rank on which nothing was wrong.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_S, COMPILE_S = 1, 2.5
compiled = False


def compute(value: float) -> torch.Tensor:
    """A compiled function: the first call on the last rank takes COMPILE_S."""
    global compiled
    if not compiled and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(COMPILE_S)
    compiled = True
    return torch.full((4,), value)


def step(group: dist.ProcessGroup) -> float:
    gradient = compute(dist.get_rank() + 1.0)
    dist.all_reduce(gradient, group=group)
    return gradient[0].item()


# --8<-- [start:warm_up]
def warm_up(patient: dist.ProcessGroup) -> None:
    """Compile on every rank, before the first collective that has a short limit."""
    compute(0.0)  # forward, backward and evaluation, with the shapes of the run
    dist.barrier(group=patient)


# --8<-- [end:warm_up]


def main() -> None:
    global compiled
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("one_compiles_longer.py needs 2 ranks or more, started by torchrun")
    dist.init_process_group("gloo")  # the message is gloo's, also where there are GPUs
    report = print if dist.get_rank() == 0 else lambda *_: None
    patient = dist.new_group(timeout=timedelta(seconds=60))
    for warm in (False, True):
        compiled = False
        dist.barrier(group=patient)
        hasty = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        if warm:
            warm_up(patient)
        failed = False
        try:
            total = step(hasty)
        except RuntimeError as error:
            failed = True
            # gloo puts the file and line of its source in brackets first
            reason = str(error).splitlines()[0].rpartition("] ")[2]
            report(f"without a warm-up, rank 0: {type(error).__name__}: {reason}")
        else:
            if warm:
                report(f"after a warm-up: every rank has the sum {total:.0f}")
                assert total == sum(range(dist.get_world_size() + 1))
        assert dist.get_rank() != 0 or failed != warm
    dist.barrier(group=patient)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
