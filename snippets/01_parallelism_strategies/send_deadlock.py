"""A ring in which every rank sends before it receives can wait forever. Two fixes end this.

dist.send may wait until the other side receives. In a ring each rank sends to its right
neighbour and receives from its left neighbour. If all ranks send first, no rank ever reaches
its recv. In the output, look at the call in which each rank waits, and at the first call of
each rank. The control shows that one rank with the opposite order is enough to complete the
same ring. With NCCL, a rank may also wait for a connection to a neighbour, without a time
limit. Then the program ends after 60 s and prints where each rank waits. NCCL can also send a
small tensor before a rank receives it.

    (no flag)       all ranks send first, and the time limit ends the program
    --control       rank 0 receives first, and the other ranks send first: the ring completes
    --fix order     even ranks send first, odd ranks receive first (an even number of ranks)
    --fix batch     batch_isend_irecv starts both transfers and waits for both
"""

import argparse
import faulthandler
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

calls: list[str] = []  # the blocking calls that this rank has entered, in their order


def send_then_receive(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    calls.append("send")
    dist.send(x, right, group=group)
    calls.append("recv")
    dist.recv(incoming, left, group=group)
    return incoming


def receive_then_send(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    calls.append("recv")
    dist.recv(incoming, left, group=group)
    calls.append("send")
    dist.send(x, right, group=group)
    return incoming


def one_receives_first(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    shift = receive_then_send if dist.get_rank() == 0 else send_then_receive
    return shift(x, right, left, group)


def odd_and_even(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    shift = receive_then_send if dist.get_rank() % 2 else send_then_receive
    return shift(x, right, left, group)


def both_at_once(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, right, group),
        dist.P2POp(dist.irecv, incoming, left, group),
    ]
    calls.append("batch_isend_irecv")
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return incoming


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def init_with_limits() -> torch.device:
    """Join the process group so that no wait is endless, also with NCCL. Return the device.

    With NCCL, a time-out raises an exception, as with gloo. TORCH_NCCL_BLOCKING_WAIT=0 restores
    the default of NCCL: a watchdog thread aborts the process. New tensors are on the device.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # a new group connects its ranks at once
    device = init_distributed()
    if device.type == "cuda":
        torch.set_default_device(device)
        # A call that blocks before its kernel starts has no timeout: print its line, and exit.
        faulthandler.dump_traceback_later(60, exit=True)
    return device


def reason(error: RuntimeError) -> str:
    """The first line of the message, without the prefix of gloo or NCCL in brackets."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
    return re.sub(r"ran for (\d+)", r"ran for ≈\1", message)  # NCCL measures this time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--fix", choices=["order", "batch"])
    args = parser.parse_args()
    n = int(os.environ.get("WORLD_SIZE", "0"))
    if n < 2 or n % 2:
        sys.exit("start this program with: torchrun --nproc-per-node=4 send_deadlock.py")

    # The default group synchronizes the exit. The calls that may fail use a second group. The
    # limit of rank 0 is the shortest, so its error is a time-out.
    init_with_limits()
    rank = dist.get_rank()
    dist.barrier()
    in_vain = not (args.control or args.fix)
    limit = timedelta(seconds=(3 if rank == 0 else 6) if in_vain else 30)
    group = dist.new_group(timeout=limit)

    fixes = {None: send_then_receive, "order": odd_and_even, "batch": both_at_once}
    shift = one_receives_first if args.control else fixes[args.fix]
    x = torch.arange(1024) + 10_000 * rank
    failed, report = False, "has its left neighbour's tensor"
    try:
        received = shift(x, (rank + 1) % n, (rank - 1) % n, group)
        x.zero_()  # a send that is not complete would now send zeros
        assert received.equal(torch.arange(1024) + 10_000 * ((rank - 1) % n))
    except RuntimeError as error:
        failed, report = True, f"waits in {calls[-1]}"
        if rank == 0:
            print(f"rank 0: {type(error).__name__}: {reason(error)}", flush=True)
    reports = [("", "")] * n
    dist.all_gather_object(reports, (report, calls[0]))
    if rank == 0:
        assert all(each == report for each, _ in reports), reports
        print(f"{shift.__name__}: every rank {report}", flush=True)
        print(f"first call of each rank: {', '.join(call for _, call in reports)}", flush=True)
    dist.barrier()
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
