"""gloo reports "unsupported gloo device" if the wheel lacks the transport that gloo looks up.

PyTorch's gloo looks up a transport by a name. A variable contains the name, or the operating
system determines it. Linux wheels contain the transport TCP but not UV, so on Linux the name UV
reproduces the error of those Windows wheels that were built without UV.
"""

import os
import sys
import tempfile
from multiprocessing import get_context

import torch
import torch.distributed as dist


def try_gloo(rank: int, path: str, variables: dict[str, str], pipe) -> None:
    """Join a gloo group of two ranks in this process, and send the sum or the error."""
    os.environ.update(variables)  # torch reads GLOO_DEVICE_TRANSPORT only once in a process
    try:
        store = dist.FileStore(path, 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        total = torch.full((), 1.0 + 4 * rank)  # 1 on rank 0, and 5 on rank 1
        dist.all_reduce(total)
        pipe.send(f"the sum is {total.item()}")
        dist.destroy_process_group()
    except RuntimeError as error:
        pipe.send(str(error).splitlines()[0])


def outcome(**variables: str) -> str:
    """The report of two processes with these variables. Both must report the same."""
    fork = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [fork.Pipe() for _ in range(2)]
        children = [
            fork.Process(target=try_gloo, args=(rank, f"{folder}/store", variables, theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for child in children:
            child.start()
        results = [ours.recv() for ours, _ in pipes]
        for child in children:
            child.join()
    assert results[0] == results[1]
    return results[0]


def main() -> None:
    if sys.platform != "linux":
        sys.exit("This program needs Linux, because each system has different transports.")
    for variable in ("GLOO_DEVICE_TRANSPORT", "GLOO_SOCKET_IFNAME"):
        os.environ.pop(variable, None)
    results = {name: outcome(GLOO_DEVICE_TRANSPORT=name) for name in ("TCP", "UV", "tcp")}
    results = {"(not set)": outcome()} | results
    for name, result in results.items():
        print(f"GLOO_DEVICE_TRANSPORT={name}: {result}")
    missing = "makeDeviceForHostname(): unsupported gloo device"
    assert results["(not set)"] == results["TCP"] == "the sum is 6.0"
    assert results["UV"] == results["tcp"] == missing  # the names are upper case

    result = outcome(GLOO_DEVICE_TRANSPORT="UV", GLOO_SOCKET_IFNAME="lo")
    print(f"UV, with GLOO_SOCKET_IFNAME=lo: {result}")
    assert result == "makeDeviceForInterface(): unsupported gloo device"
    assert outcome(GLOO_SOCKET_IFNAME="lo") == "the sum is 6.0"


if __name__ == "__main__":
    main()
