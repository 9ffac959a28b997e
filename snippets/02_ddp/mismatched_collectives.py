"""A rank skips a collective, or calls two in another order: the hang, and who is to blame.

A collective ends when every rank has called it. When one rank does not come, the others wait
until the group's timeout (30 minutes on gloo, 10 on NCCL), and the message they get then names
nobody. TORCH_DISTRIBUTED_DEBUG=DETAIL checks before each collective that all ranks are about
to call the same one; monitored_barrier (gloo) names the rank that is missing.

    --case skip     rank 1 finds NaN in its batch and continues with the next one
    --case order    rank 1 logs before it reduces, rank 0 reduces before it logs
    --monitored     a monitored_barrier before the collective
    --fix          every rank calls the same collectives, with nothing to say if need be
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def step(
    rate: torch.Tensor, group: dist.ProcessGroup, args: argparse.Namespace
) -> torch.Tensor:
    """Average `value` over the ranks whose batch is good; broadcast rank 0's learning rate."""
    odd = dist.get_rank() == 1
    value = torch.full((4,), float("nan") if odd else 2.0)

    if args.monitored:
        if odd:
            return value  # the step is skipped, the barrier with it
        dist.monitored_barrier(group, timeout=timedelta(seconds=3))

    if args.fix:  # a bad batch counts zero, but its rank comes
        good = ~value.isnan()
        total = torch.cat([value.where(good, 0.0), good.float()])
        dist.all_reduce(total, group=group)
        dist.broadcast(rate, src=0, group=group)
        return total[:4] / total[4:]

    if odd and args.case == "skip":
        return value
    if odd and args.case == "order":
        dist.broadcast(rate, src=0, group=group)
        dist.all_reduce(value, group=group)
    else:
        dist.all_reduce(value, group=group)
        dist.broadcast(rate, src=0, group=group)
    return value


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["skip", "order"], default="skip")
    parser.add_argument("--monitored", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("mismatched_collectives.py needs 2 ranks or more, started by torchrun")

    # The messages are gloo's, so gloo it is, also where there are GPUs. The default group is
    # used to end in order; the collectives that fail run in a second group whose timeout is
    # short, shortest on rank 0, so that rank 0 is always the first to give up.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))

    rate = torch.full((4,), 0.0 if rank else 0.5)
    failed = False
    try:
        value = step(rate, group, args)
    except RuntimeError as error:
        failed = True
        # gloo puts the file and line of its source in brackets first: not the same everywhere
        message = str(error).splitlines()[0].removeprefix("[").split("] Timed out")
        message = "Timed out" + message[1] if len(message) > 1 else str(error).splitlines()[0]
        if rank == 0:
            print(f"rank 0: {type(error).__name__}: {message}", flush=True)
    else:
        if rank == 0:
            print(f"rank 0: mean of the good batches {value[0].item()}", flush=True)

    assert not args.fix or rate.eq(0.5).all()  # every rank has that of rank 0
    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
