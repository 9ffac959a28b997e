"""Connection closed by peer: this is what the other ranks see when a rank dies.

Rank 1 ends by SIGKILL, as the out-of-memory killer of the kernel would end it: it prints no
traceback. The operating system closes its sockets, so a rank that waits for it fails at once.
torchrun looks at its processes ten times a second. It stops the ranks that are left, and
reports the rank that failed first as the root cause, with exit code -9.

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
    """The message of gloo without the line of its source, the address and the advice."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error))
    return re.sub(r" \[[^]]*\](:\d+)?(\..*)?$", "", message, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stuck", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("dead_rank.py needs 2 ranks or more, started by torchrun")

    # torchrun sends SIGTERM to the survivors. Rank 0 only stores the signal, so that it always
    # has the time to print its error.
    signals: list[int] = []
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))

    # The messages are from gloo, so the program uses gloo even if there are GPUs.
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))

    finished = time.perf_counter()
    # --8<-- [start:traced]
    for step in range(STEPS):
        if step == 3 and rank == 1 and attempt == 0:
            fall_over(args.stuck)
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except RuntimeError as error:
            if rank == 0:
                waited = time.perf_counter() - finished
                assert (3 if args.stuck else 0.5) <= waited < 600
                print(
                    f"attempt {attempt}, rank 0, step {step}: {type(error).__name__}:", end=" "
                )
                print(f"{first_sentence(error)}, after ≈{waited:.1f} s", flush=True)
                patience = 2.0 if args.stuck else 600.0
                while not signals and patience > 0:  # until torchrun has noticed rank 1
                    time.sleep(0.05)
                    patience -= 0.05
                print(f"SIGTERM from torchrun: {bool(signals)}", flush=True)
                assert bool(signals) != args.stuck
            return 1
        finished = time.perf_counter()
    # --8<-- [end:traced]

    if rank == 0:
        print(f"attempt {attempt}: all {STEPS} steps are done")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
