"""1F1B with blocking sends deadlocks: both neighbours send, and neither receives.

In the middle of 1F1B, a stage has an activation for the next stage, and the next stage has a
gradient for it at the same moment. A blocking send waits until the other side receives, so both
wait forever. With NCCL, a rank can also wait for the connection to the other rank, which has no
timeout. The program then ends after 60 seconds and prints the line in which each rank waits.

Each run begins with a control, which is not counted: one exchange in which rank 1 receives
before it sends. This exchange completes.

    (no flag)   then both ranks send first, and the timeout ends the program
    --fix       then both transfers are in one batch_isend_irecv
"""

import faulthandler
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

M, SIZE = 4, 2**20  # micro-batches; floats of an activation


def send_then_receive(outgoing: torch.Tensor, peer: int, group) -> torch.Tensor:
    incoming = torch.zeros_like(outgoing)
    dist.send(outgoing, peer, group=group)
    dist.recv(incoming, peer, group=group)
    return incoming


def receive_then_send(outgoing: torch.Tensor, peer: int, group) -> torch.Tensor:
    incoming = torch.zeros_like(outgoing)
    dist.recv(incoming, peer, group=group)
    dist.send(outgoing, peer, group=group)
    return incoming


def exchange_at_once(outgoing: torch.Tensor, peer: int, group) -> torch.Tensor:
    incoming = torch.zeros_like(outgoing)
    ops = [
        dist.P2POp(dist.isend, outgoing, peer, group),
        dist.P2POp(dist.irecv, incoming, peer, group),
    ]
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
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 pipeline_deadlock.py")
    # NCCL sends at most this number of bytes per channel before the other rank receives.
    os.environ.setdefault("NCCL_BUFFSIZE", "32768")
    # A second group runs the operations that may fail; the default group ends in order.
    init_with_limits()
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))
    exchange = exchange_at_once if "--fix" in sys.argv else send_then_receive

    tensor, failed, done = torch.full((SIZE,), rank + 1.0), False, 0
    control = send_then_receive if rank == 0 else receive_then_send
    try:
        if rank == 0:  # warm-up: the forward of micro-batch 0
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(torch.empty_like(tensor), 0, group=group)
        arrived = control(tensor, 1 - rank, group)  # the same ranks, but one receives first
        assert (arrived == 2 - rank).all()
        for i in range(1, M):  # rank 0: F, then B; rank 1: B, then F
            arrived = exchange(tensor + 10 * i, 1 - rank, group)
            assert (arrived == 2 - rank + 10 * i).all()  # the whole tensor of the other rank
            done += 1
    except RuntimeError as error:
        failed = True
        if rank == 0:
            name = type(error).__name__
            print(f"rank 0, after {done} exchanges: {name}: {reason(error)}", flush=True)
    else:
        if rank == 0:
            print(f"{exchange.__name__}: {done} of {M - 1} exchanges done", flush=True)
    dist.barrier()
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    return int(failed)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
