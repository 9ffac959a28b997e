"""A job hangs, every rank writes a dump of Flight Recorder, and torchfrtrace reads the dumps.

Rank 1 takes a different branch in step 2. After the timeout, each rank writes what its recorder
has stored. With TORCH_NCCL_BLOCKING_WAIT=0, the watchdog of NCCL writes these files itself.

    --read    compare the dumps by hand and with torch's analyser
"""

import argparse
import contextlib
import faulthandler
import io
import os
import pickle
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def step(number: int) -> None:
    gradient = torch.ones(4)
    if number == 2 and dist.get_rank() == 1:
        dist.broadcast(gradient, src=0)  # a branch that the other ranks do not take
    dist.all_reduce(gradient)


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


# --8<-- [start:dump]
def dump(folder: str) -> None:
    """Write the record of this rank to FOLDER/rank_N, in the format of torchfrtrace."""
    import torch._C._distributed_c10d as c10d

    # Each backend has its own recorder. Since torch 2.15, "nccl" starts the backend "nccl2".
    backend = dist.group.WORLD._get_backend(torch.empty(0).device).name()
    record = c10d._dump_nccl_trace if backend == "nccl" else c10d._dump_fr_trace
    chosen = {} if backend in ("gloo", "nccl") else {"backend": backend}
    recorded = pickle.loads(record(True, True, False, **chosen))  # collectives, stacks, all
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
    entries = [d["entries"] for d in dumps]  # with NCCL, some ranks may have fewer
    for calls in zip(*entries, strict="gloo" in entries[0][0]["profiling_name"]):
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


def reason(error: RuntimeError) -> str:
    """The first line of the message, without the prefix of gloo or NCCL in brackets."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
    return re.sub(r"ran for (\d+)", r"ran for ≈\1", message)  # NCCL measures this time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", metavar="FOLDER")
    args = parser.parse_args()
    if args.read:
        return read(args.read)
    if int(os.environ.get("WORLD_SIZE", "1")) < 3:
        sys.exit("flight_recorder.py needs 3 ranks or more, started by torchrun")

    torch.set_num_threads(1)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    device = init_with_limits()
    if device.type == "cpu":  # rank 0 times out first; its closed connections end the others
        limit = timedelta(seconds=8 if dist.get_rank() == 0 else 60)
    else:  # each rank times out alone, and must write its dump before torchrun ends it
        limit = timedelta(seconds=8)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(limit)  # of the default group; older releases have only the private function
    try:
        for number in range(4):
            step(number)
        if device.type != "cpu":  # NCCL's watchdog writes the dumps while this line waits
            torch.accelerator.synchronize()
    except RuntimeError as error:
        if dist.get_rank() == 0:
            print(f"rank 0, step {number}:", reason(error))
    dump("dumps")
    dist.group.WORLD.abort()  # since NCCL 2.31, destroying waits for all ranks of the machine
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
