"""A small launcher: it sets six variables, watches the ranks, and forwards signals to them.

Start it once on each node, as you would start torchrun. The training script train.py ends with
the same loss under this launcher as under torchrun, so the script needs nothing else.

    python by_hand.py --nnodes=2 --node-rank=0 --nproc-per-node=8 --master-addr=HOST train.py …
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time


# --8<-- [start:variables]
def variables(options: argparse.Namespace, local: int) -> dict[str, str]:
    """Return the environment variables of the rank with local rank `local` on this node."""
    ranks = options.nproc_per_node
    return {
        "RANK": str(options.node_rank * ranks + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": str(options.nnodes * ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
    }


# --8<-- [end:variables]


# --8<-- [start:watch]
def watch(ranks: list[subprocess.Popen], grace: float) -> int:
    """Wait until all ranks have ended, and return the exit status.

    If a rank fails, end the others, because they would wait for it in their next collective.
    They have `grace` seconds to save a checkpoint.
    """
    while None in (codes := [rank.poll() for rank in ranks]):  # poll every rank, not only some
        if failed := [code for code in codes if code]:
            for rank in ranks:
                rank.terminate()
            deadline = time.monotonic() + grace
            for rank in ranks:
                try:
                    rank.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    rank.kill()
                    rank.wait()
            return failed[0]
        time.sleep(0.05)
    return max((rank.returncode for rank in ranks), key=abs)


# --8<-- [end:watch]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, help="the same on every node")
    parser.add_argument("--grace", type=float, default=30, help="seconds until SIGKILL")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.program:
        parser.error("the program is missing, for example: train.py")
    if options.master_port is None:
        if options.nnodes > 1:
            parser.error("with several nodes, set the same --master-port on each of them")
        with socket.create_server(("127.0.0.1", 0)) as server:
            options.master_port = server.getsockname()[1]

    # --8<-- [start:start]
    ranks: list[subprocess.Popen] = []

    def forward(number: int, frame: object) -> None:
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, forward)
    for local in range(options.nproc_per_node):
        env = os.environ | variables(options, local)
        # Each rank gets its own session. Otherwise Ctrl-C would reach it twice: from the
        # terminal and from forward().
        command = [sys.executable, *options.program]
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
    return watch(ranks, options.grace)
    # --8<-- [end:start]


if __name__ == "__main__":
    sys.exit(main())
