"""One rank of three fails: torchrun keeps what each rank said, and the error in another file.

`@record` is what fills the second: without it torchrun knows an exit code and no traceback.

    --read LOGS    what was kept
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


# --8<-- [start:main]
@record
def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"rank {rank} has loaded its shard", flush=True)
    if rank == 1:
        print("rank 1: shard 1 of 3 is empty", file=sys.stderr, flush=True)
        raise ValueError("no tokens in shard 1")
    time.sleep(60)  # the others wait, and are ended by torchrun
    print(f"rank {rank} has ended by itself")  # nobody comes here


# --8<-- [end:main]


# --8<-- [start:read]
def read(logs: str) -> None:
    """Print what torchrun kept of each rank's last attempt."""
    for folder in sorted(Path(logs).glob("*/attempt_0/*"), key=lambda f: int(f.name)):
        print(f"LOGS/…/attempt_0/{folder.name}: {sorted(f.name for f in folder.iterdir())}")
        print(f"  stdout.log: {(folder / 'stdout.log').read_text().strip()}")
        own = [x for x in (folder / "stderr.log").read_text().splitlines() if "shard" in x]
        print(f"  stderr.log, its lines on shards: {len(own)}")
        if (folder / "error.json").exists():
            message = json.loads((folder / "error.json").read_text())["message"]
            trace = message["extraInfo"]["py_callstack"]
            print(f"  error.json: {message['message']}")
            print(f"    raised at: {trace.strip().splitlines()[-2].strip()}")


# --8<-- [end:read]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", metavar="LOGS")
    args = parser.parse_args()
    if args.read:
        read(args.read)
    elif int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("rank_fails.py needs 2 ranks or more, started by torchrun")
    else:
        main()
