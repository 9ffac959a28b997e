"""EADDRINUSE, address already in use: another job or a process of the last job uses the port.

The store listens on MASTER_PORT of the first node. Two jobs with the same port on one machine
get this error, and so does a job whose predecessor has left a process running. The program
occupies a port itself and then opens a store on this port. It prints the port as PORT.

    (no flag)   the store of this job uses a port that is taken
    --fix       with port 0 the system chooses a free port, and the other ranks must be given
                its number. torchrun --standalone does so for a job on a single machine
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
        assert len({taken, store.port, serve(port).port}) == 3  # also for two jobs
        print("store.port is free: the system chose it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
