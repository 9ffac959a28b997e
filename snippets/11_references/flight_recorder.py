"""A job hangs, every rank writes a dump of Flight Recorder, and torchfrtrace reads the dumps.

Rank 1 takes a different branch in step 2. After the timeout, each rank writes what its recorder
has stored. With NCCL, the watchdog does this automatically (TORCH_NCCL_DUMP_ON_TIMEOUT=1).

    --read    compare the dumps by hand and with torch's analyser
"""

import argparse
import contextlib
import io
import os
import pickle
import re
import sys
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
import torch
import torch.distributed as dist


def step(number: int) -> None:
    gradient = torch.ones(4)
    if number == 2 and dist.get_rank() == 1:
        dist.broadcast(gradient, src=0)  # a branch that the other ranks do not take
    dist.all_reduce(gradient)


# --8<-- [start:dump]
def dump(folder: str) -> None:
    """Write the record of this rank to FOLDER/rank_N, in the format of torchfrtrace."""
    from torch._C._distributed_c10d import _dump_fr_trace

    recorded = pickle.loads(_dump_fr_trace(True, True, False))  # collectives, stacks, all
    if "" in recorded["pg_config"]:  # gloo: the entries name group "0", no group has it
        everyone = str(list(range(dist.get_world_size())))
        recorded["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": everyone}}
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"rank_{dist.get_rank()}").write_bytes(pickle.dumps(recorded))


# --8<-- [end:dump]


# --8<-- [start:read]
def read(folder: str) -> None:
    """Print the dumps next to each other, and the result of torch's analyser."""
    if not Path(folder).is_dir():
        sys.exit(f"there is no folder {folder}: this program under torchrun writes dumps/")
    dumps = [pickle.loads(p.read_bytes()) for p in sorted(Path(folder).glob("rank_*"))]
    print("call   " + "".join(f"rank {rank:<18}" for rank in range(len(dumps))))
    for calls in zip(*(d["entries"] for d in dumps), strict=True):
        row = ""
        for call in calls:
            line = next(f["line"] for f in call["frames"] if f["filename"].endswith(NAME))
            row += f"{call['profiling_name'].split(':')[1]} (line {line})".ljust(23)
        print(f"{calls[0]['collective_seq_id']:4}   {row}".rstrip())

    with contextlib.redirect_stderr(io.StringIO()) as said:  # torchfrtrace DUMPS --prefix rank_
        from torch.distributed.flight_recorder.fr_trace import main as torchfrtrace

        torchfrtrace([folder, "--prefix", "rank_"])
    for line in said.getvalue().splitlines():
        if re.match(r"(.*Collective sequence number|collective:|input sizes|error msg)", line):
            print(re.sub(r"^.*(?=Collective seq)", "", line))
    assert "Culprit rank 1" in said.getvalue()


# --8<-- [end:read]

NAME = Path(__file__).name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", metavar="FOLDER")
    args = parser.parse_args()
    if args.read:
        return read(args.read)
    if int(os.environ.get("WORLD_SIZE", "1")) < 3:
        sys.exit("flight_recorder.py needs 3 ranks or more, started by torchrun")

    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"  # rank 0 times out first, and closes its connections
    dist.init_process_group("gloo", timeout=timedelta(seconds=8 if first else 60))
    try:
        for number in range(4):
            step(number)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            print(f"rank 0, step {number}:", re.sub(r"^\[/\S+\] ", "", str(error)))
    dump("dumps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
