"""One rank of three fails: torchrun stores the output of each rank and the error in files.

`@record` writes the file of the error. Without it, torchrun only has an exit code.

    --read LOGS    print what the files contain
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
    dist.barrier()  # a rank that fails earlier can also break a rank that is still connecting
    rank = dist.get_rank()
    print(f"rank {rank} has loaded its shard", flush=True)
    if rank == 1:
        print("rank 1: shard 1 of 3 is empty", file=sys.stderr, flush=True)
        raise ValueError("no tokens in shard 1")
    time.sleep(60)  # the others wait until torchrun ends them
    print(f"rank {rank} has ended by itself")  # no rank gets here


# --8<-- [end:main]


# --8<-- [start:read]
def read(logs: str) -> None:
    """Print what torchrun stored of each rank's first attempt."""
    failed = []
    for folder in sorted(Path(logs).glob("*/attempt_0/*"), key=lambda f: int(f.name)):
        print(f"LOGS/…/attempt_0/{folder.name}: {sorted(f.name for f in folder.iterdir())}")
        print(f"  stdout.log: {(folder / 'stdout.log').read_text().strip()}")
        own = [x for x in (folder / "stderr.log").read_text().splitlines() if "shard" in x]
        print(f"  stderr.log: {len(own)} lines mention a shard")
        if (folder / "error.json").exists():
            failed.append(folder.name)
            message = json.loads((folder / "error.json").read_text())["message"]
            trace = message["extraInfo"]["py_callstack"]
            print(f"  error.json: {message['message']}")
            print(f"    raised at: {trace.strip().splitlines()[-2].strip()}")
    assert failed == ["1"], "only the rank that failed has an error.json"


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
