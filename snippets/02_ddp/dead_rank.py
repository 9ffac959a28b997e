"""Connection closed by peer: this is what the other ranks see when a rank dies.

Rank 1 ends by SIGKILL, as the out-of-memory killer of the kernel would end it: it prints no
traceback. The operating system closes its sockets, so a rank that waits for it fails at once.
torchrun looks at its processes ten times a second. It stops the ranks that are left, and
reports the rank that failed first as the root cause, with exit code -9. With NCCL, the other
ranks may not notice that a rank is dead. They then wait until the timeout or until torchrun
stops them.

    (no flag)   rank 1 is killed at step 3 of the first attempt. With --max-restarts=1 torchrun
                starts all ranks again, and none dies. (A real program then loads a checkpoint.)
    --stuck     rank 1 does not die, but waits forever. torchrun notices nothing, and only the
                timeout of the process group ends the run.

The restart needs a new store. By default the ranks share the store of torchrun. They find the
addresses of the dead ranks in it, and fail with "Gloo connectFullMesh failed", or hang.
--standalone (or a different c10d rendezvous) together with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives every attempt a store of its own.
"""

import argparse
import faulthandler
import os
import re
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

STEPS = 6


def fall_over(stuck: bool) -> None:
    time.sleep(0.5)  # after this, the other ranks are waiting in all_reduce
    if stuck:
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def first_sentence(error: RuntimeError) -> str:
    """The message without the prefix in brackets, the address and the advice of gloo."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
    message = re.sub(r"ran for (\d+)", r"ran for ≈\1", message)  # NCCL measures this time
    return re.sub(r" \[[^]]*\](:\d+)?(\..*)?$", "", message)


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stuck", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("dead_rank.py needs 2 ranks or more, started by torchrun")

    # torchrun sends SIGTERM to the survivors. Rank 0 only stores it, so it can print its error.
    signals: list[int] = []
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))

    init_with_limits()
    rank, n = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))

    began: list[float] = []  # when each step began
    # --8<-- [start:traced]
    for step in range(STEPS):
        began.append(time.perf_counter())
        if step == 3 and rank == 1 and attempt == 0:
            fall_over(args.stuck)
        try:
            total = torch.full((4,), rank + 1.0)
            dist.all_reduce(total, group=group)
            assert total.eq(n * (n + 1) / 2).all()  # with NCCL, this line also waits
        except RuntimeError as error:
            if rank == 0:
                earlier, waited = (time.perf_counter() - moment for moment in began[-2:])
                # Rank 1 sleeps only after rank 0 has begun the step before.
                assert (3 if args.stuck else 0.5) <= earlier and waited < 600
                print(
                    f"attempt {attempt}, rank 0, step {step}: {type(error).__name__}:", end=" "
                )
                print(f"{first_sentence(error)}, after ≈{waited:.1f} s", flush=True)
                patience = 2.0 if args.stuck else 600.0
                listens = time.perf_counter()
                while not signals and time.perf_counter() < listens + patience:
                    time.sleep(0.05)  # until torchrun has noticed rank 1
                assert signals or time.perf_counter() >= listens + 2  # time for 20 checks
                print(f"SIGTERM from torchrun: {bool(signals)}", flush=True)
                assert bool(signals) != args.stuck
            return 1
    # --8<-- [end:traced]

    if rank == 0:
        print(f"attempt {attempt}: all {len(began)} steps are done")
    return 0


if __name__ == "__main__":
    status = main()
    if status == 0:  # after an error, destroy_process_group() could wait for a dead rank
        dist.destroy_process_group()
    sys.exit(status)
