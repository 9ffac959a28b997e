"""EADDRINUSE, address already in use: another job, or the last one, holds the port.

The store listens on MASTER_PORT of the first node. Two jobs that were given the same port on
the same machine, or one whose predecessor has left a process behind, meet this error. The
program occupies a port itself, then opens a store there; the port is printed as PORT.

    (no flag)   the store of this job on a port that is taken
    --fix      port 0: the system chooses a free one, which the others have to be told.
                That is what torchrun --standalone does, for jobs on a single machine
"""

import argparse
import socket
import sys

import torch.distributed as dist


def serve(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()

    with socket.socket() as other_job:
        other_job.bind(("0.0.0.0", 0))
        other_job.listen()
        taken = other_job.getsockname()[1]
        port = 0 if args.fix else taken
        try:
            store = serve(port)
        except dist.DistNetworkError as error:
            message = str(error).splitlines()[0].replace(str(taken), "PORT")
            print(f"{type(error).__name__}: {message}", flush=True)
            return 1
        assert len({taken, store.port, serve(port).port}) == 3  # nor do two of our jobs meet
        print("store.port is free: the system chose it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
