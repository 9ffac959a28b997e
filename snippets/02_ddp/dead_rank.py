"""Connection closed by peer: what the others see when a rank dies, and how the run ends.

Rank 1 ends by SIGKILL, as the kernel's out-of-memory killer would end it: no traceback, no
last word. The system closes its sockets, so the rank that waits for it fails at once. torchrun
looks at its children ten times a second: it ends those which are left and reports as root
cause the one that failed first, with exit code -9.

    (no flag)   rank 1 is killed at step 3 of its first life. With --max-restarts=1 all are
                started again, and nobody dies (a real program resumes from its checkpoint here)
    --stuck     rank 1 does not die but waits for ever: torchrun sees nothing wrong, and only
                the timeout of the process group ends the run

The restart needs a fresh store: the ranks share torchrun's by default, find the addresses of
the dead there, and fail with "Gloo connectFullMesh failed" or hang. --standalone (or another
c10d rendezvous) together with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives every attempt its own.
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
    time.sleep(0.5)  # the others are waiting in all_reduce by now
    if stuck:
        time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def first_sentence(error: RuntimeError) -> str:
    """gloo's message without the line of its source, the address and the advice."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error))
    return re.sub(r" \[[^]]*\](:\d+)?(\..*)?$", "", message, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stuck", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("dead_rank.py needs 2 ranks or more, started by torchrun")

    # torchrun sends SIGTERM to the survivors. Rank 0 only notes it, so that it always has the
    # time to print what it saw.
    told: list[int] = []
    if os.environ["RANK"] == "0":
        signal.signal(signal.SIGTERM, lambda number, _: told.append(number))

    # The messages are gloo's, so gloo it is, also where there are GPUs.
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))

    finished = time.perf_counter()
    for step in range(STEPS):
        if step == 3 and rank == 1 and attempt == 0:
            fall_over(args.stuck)
        try:
            dist.all_reduce(torch.ones(4), group=group)
        except RuntimeError as error:
            if rank == 0:
                waited = time.perf_counter() - finished
                assert (3 if args.stuck else 0) <= waited < 600
                print(
                    f"attempt {attempt}, rank 0, step {step}: {type(error).__name__}:", end=" "
                )
                print(f"{first_sentence(error)}, after ≈{waited:.1f} s", flush=True)
                patience = 2.0 if args.stuck else 600.0
                while not told and patience > 0:  # until torchrun has noticed rank 1, the cause
                    time.sleep(0.05)
                    patience -= 0.05
                print(f"torchrun has told rank 0 to end: {bool(told)}", flush=True)
            return 1
        finished = time.perf_counter()

    if rank == 0:
        print(f"attempt {attempt}: {STEPS} steps done")
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
