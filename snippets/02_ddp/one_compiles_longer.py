"""If one rank compiles longer than the timeout of the group, a healthy rank reports a time-out.

Every rank except the last one finds its compiled kernels in a cache. A sleep stands for the
compilation on the last rank. The timeout is 1 second here, where the default of NCCL is ten
minutes. Look at which rank prints the message, and at what the warm-up changes.
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
    """Stands for a compiled function: the first call on the slow rank takes COMPILE_S."""
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
    """Compile on every rank before the first collective that has a short timeout."""
    compute(0.0)  # in a real run: forward, backward and evaluation, with the real shapes
    dist.barrier(group=patient)


# --8<-- [end:warm_up]


def main() -> None:
    global compiled
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("one_compiles_longer.py needs 2 ranks or more, started by torchrun")
    dist.init_process_group("gloo")  # the message is from gloo, even if there are GPUs
    report = print if dist.get_rank() == 0 else lambda *_: None
    patient = dist.new_group(timeout=timedelta(seconds=60))
    for warm in (False, True):
        compiled = False
        dist.barrier(group=patient)
        hasty = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
        began = time.perf_counter()
        if warm:
            warm_up(patient)
            assert time.perf_counter() - began > LIMIT_S  # without `patient` it would time out
        failed = False
        try:
            total = step(hasty)
        except RuntimeError as error:
            failed = True
            # gloo's message begins with a file and a line of its source, in brackets
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
